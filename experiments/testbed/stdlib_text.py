"""Text that every machine with Python has: the sources of the standard library.

The corpus is the running interpreter's own standard library, one document per module, in the
order of the modules' paths. Every twentieth document is held out whole. Another Python version
gives another text, so a number measured on it should name the version.
"""

from __future__ import annotations

import sysconfig
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import torch
from transformers import PreTrainedTokenizerBase

Split = Literal["train", "held-out"]

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


def token_stream(tokenizer: PreTrainedTokenizerBase, split: Split) -> torch.Tensor:
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
