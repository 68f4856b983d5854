"""A text that is available on every machine with Python: the sources of the standard library.

The corpus is the standard library of the running interpreter, one document per module, in the order
of the modules' paths. Every twentieth document is held out completely. Another Python version has
another text, so a number measured on it should name the version.
"""

import sysconfig
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import torch
from transformers import PreTrainedTokenizerBase

Split = Literal["train", "held-out"]

HELD_OUT_EVERY = 20

IGNORED = -100
"""Target of unknown words, which have no loss: the label that `cross_entropy` ignores."""

_EXCLUDED_FOLDERS = {
    *("test", "tests", "encodings", "pydoc_data"),
    *("site-packages", "dist-packages", "ensurepip"),
    # Often omitted by distributions, or removed from newer versions.
    *("idlelib", "lib2to3", "tkinter", "turtledemo", "distutils"),
}
_BUILD_PREFIXES = ("_sysconfigdata", "config-")  # differ from one build to the next


def token_stream(tokenizer: PreTrainedTokenizerBase, split: Split) -> torch.Tensor:
    """Return the split as one stream of token ids, ``(tokens,)`` int64, without any ``<bos>``.

    Documents are concatenated, and each ends with a newline.
    """
    documents, held_out = list(_sources()), slice(HELD_OUT_EVERY - 1, None, HELD_OUT_EVERY)
    if split == "held-out":
        documents = documents[held_out]
    else:
        del documents[held_out]
    encoded = tokenizer(documents, add_special_tokens=False)["input_ids"]
    return torch.tensor([token for document in encoded for token in document])


def _sources() -> Iterator[str]:
    """Sources of modules, in the order of their paths."""
    root = Path(sysconfig.get_paths()["stdlib"])
    relative = (path.relative_to(root) for path in root.rglob("*.py"))
    for path in sorted(relative, key=Path.as_posix):
        built = any(part.startswith(_BUILD_PREFIXES) for part in path.parts)
        if not built and _EXCLUDED_FOLDERS.isdisjoint(path.parts):
            with tokenize.open(root / path) as file:  # respects a coding comment
                text = file.read()
            if text.strip():
                yield text.strip() + "\n"
