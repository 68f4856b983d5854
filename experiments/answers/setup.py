"""What all results of a sweep have in common, so that it can be repeated and is not mixed up."""

from __future__ import annotations

import hashlib
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

import experiments
from experiments.answers.settings import SWEPT, Settings
from experiments.framework.environment import environment_info
from experiments.loading import SHIPPED

_ROOT = Path(experiments.__file__).resolve().parents[1]
_CODE = (
    *("press_core", "hooks_impl", "patch_impl", "attention_patch"),
    *("experiments/answers", "experiments/loading.py", "experiments/testbed/facts.py"),
    "experiments/testbed/facts.yaml",
)
"""What of this project the results hang on."""

_NAMES = ("*.py", "published.yaml")
_WEIGHTS = ("*.safetensors", "*.bin", "config.json", "tokenizer*.json")
_ENDS = 2**20  # bytes of a file, at its start and its end, that tell it from another


def setup_of(settings: Settings) -> dict[str, Any]:
    """The settings that cells share, the model and the versions; `made_with` is for information."""
    made_with = environment_info()
    versions = made_with.pop("versions")
    made_with.pop("seed")
    shared = {name: value for name, value in asdict(settings).items() if name not in SWEPT}
    shared["threads"] = settings.threads or torch.get_num_threads()
    return {
        **shared,
        "model_fingerprint": model_fingerprint(settings.model),
        "versions": versions,
        "code": code_digest(),
        "made_with": made_with,
    }


def code_digest() -> str:
    """A digest of the sources that results hang on, whatever a commit says of them."""
    parts = [_ROOT / part for part in _CODE]
    inside = [path for part in parts for name in _NAMES for path in part.rglob(name)]
    return _digest([*(part for part in parts if part.is_file()), *inside], _ROOT)


def model_fingerprint(name: str) -> str:
    """The commit of a model of the hub; of a folder a digest of its files."""
    folder = Path(__file__).parents[1] / "models" / name if name in SHIPPED else Path(name)
    if not folder.is_dir():
        return str(getattr(AutoConfig.from_pretrained(name), "_commit_hash", None))
    return _digest([path for pattern in _WEIGHTS for path in folder.glob(pattern)], folder)


def _digest(files: list[Path], root: Path) -> str:
    """Of names, sizes and contents of files below a folder, of large ones both ends."""
    digest = hashlib.sha256()
    for path in sorted(files):
        size = path.stat().st_size
        digest.update(f"{path.relative_to(root).as_posix()} {size}".encode())
        with path.open("rb") as file:
            digest.update(file.read(_ENDS))
            file.seek(max(0, size - _ENDS))
            digest.update(file.read(_ENDS))
    return digest.hexdigest()[:16]
