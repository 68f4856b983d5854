"""Text that every machine with Python has: the sources of the standard library.

The corpus is the running interpreter's own standard library, one document per module, in the
order of the modules' paths. Every twentieth document is held out whole. Another Python version
gives another text, so a number measured on it should name the version.
"""

from __future__ import annotations

import sysconfig
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal

import torch
from tokenizers import (
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast

Split = Literal["train", "held-out"]

PAD, BOS, UNK = "<pad>", "<bos>", "<unk>"
SPECIAL_TOKENS = (PAD, BOS, UNK)
"""Entries 0, 1 and 2 of the vocabulary; ``<bos>`` also serves as the end of a text."""

HELD_OUT_EVERY = 20

_EXCLUDED_FOLDERS = frozenset(
    {
        *("test", "tests", "encodings", "pydoc_data"),
        *("site-packages", "dist-packages", "ensurepip"),
        # Often left out by distributions, or gone from newer versions.
        *("idlelib", "lib2to3", "tkinter", "turtledemo", "distutils"),
    }
)
_BUILD_PREFIXES = ("_sysconfigdata", "config-")  # differ from one build to the next


def corpus(split: Split) -> list[str]:
    """Return the documents of one split: module sources, in the order of their paths."""
    held_out = split == "held-out"
    return [
        text
        for index, text in enumerate(_sources())
        if (index % HELD_OUT_EVERY == HELD_OUT_EVERY - 1) == held_out
    ]


def build_tokenizer(texts: Iterable[str], size: int) -> PreTrainedTokenizerFast:
    """Build a lower-case word-level tokenizer from the ``size`` most frequent pieces of ``texts``.

    A piece is a run of letters, one digit, one other character, or the end of a line. Indentation
    and blank lines are dropped. ``tokenizer(text)`` puts ``<bos>`` first, and pads on the left.
    """
    tokenizer = Tokenizer(models.WordLevel(unk_token=UNK))
    tokenizer.normalizer = normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.Lowercase(),
            normalizers.Replace(Regex(r"\s*\n\s*"), "\n"),
        ]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"[^\S\n]+"), "removed"),
            pre_tokenizers.Split(Regex(r"[a-z]+|[^a-z]"), "isolated"),
        ]
    )
    trainer = trainers.WordLevelTrainer(
        vocab_size=size, special_tokens=list(SPECIAL_TOKENS), show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.decoder = _decoder()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=BOS,
        unk_token=UNK,
        padding_side="left",
    )


def token_stream(tokenizer: PreTrainedTokenizerFast, split: Split) -> torch.Tensor:
    """Return the split as one stream of token ids, ``(tokens,)`` int64, without any ``<bos>``.

    Documents follow one another, each ended by the end of a line.
    """
    documents = [text.strip() + "\n" for text in corpus(split)]
    encoded = tokenizer(documents, add_special_tokens=False)["input_ids"]
    return torch.tensor([token for document in encoded for token in document])


def _sources() -> Iterator[str]:
    root = Path(sysconfig.get_paths()["stdlib"])
    relative = (path.relative_to(root) for path in root.rglob("*.py"))
    for path in sorted(relative, key=Path.as_posix):
        built = any(part.startswith(_BUILD_PREFIXES) for part in path.parts)
        if not built and _EXCLUDED_FOLDERS.isdisjoint(path.parts):
            with tokenize.open(root / path) as file:  # honours a coding comment
                text = file.read()
            if text.strip():
                yield text


def _decoder() -> decoders.Decoder:
    """Join the pieces with spaces, except where Python or English would have none."""
    unwanted = "|".join(
        [
            r"▁(?=[.,;:)\]}!?'\n])",  # before closing punctuation
            r"(?<=[(\[{'\n.])▁",  # after an opening bracket, a dot, or the start of a line
            r"(?<!\bdef)▁(?=_)(?!_▁_▁[a-z])|(?<=_)▁",  # in names_like_this, not before __this__
            r"(?<=\d)▁(?=\d)",  # inside numbers
            r"^▁",
        ]
    )
    return decoders.Sequence(
        [
            decoders.Replace(Regex("^"), "▁"),
            decoders.Fuse(),
            decoders.Replace(Regex(unwanted), ""),
            decoders.Replace("▁", " "),
        ]
    )
