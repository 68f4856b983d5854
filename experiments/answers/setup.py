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
from experiments.loading import SHIPPED
from experiments.study import environment_info

_ROOT = Path(experiments.__file__).resolve().parents[1]
_CODE = (
    *("press_core", "hooks_impl", "patch_impl", "attention_patch"),
    *("experiments/answers", "experiments/loading.py", "experiments/testbed/facts.py"),
)
"""What of this project the results hang on."""

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
    digest = hashlib.sha256()
    for part in _CODE:
        path = _ROOT / part
        files = [*path.rglob("*.py"), *path.rglob("published.yaml")]
        for source in [path] if path.is_file() else sorted(files):
            digest.update(source.relative_to(_ROOT).as_posix().encode() + source.read_bytes())
    return digest.hexdigest()[:16]


def model_fingerprint(name: str) -> str:
    """The commit of a model of the hub; of a folder a digest of its files, large ones in part."""
    folder = Path(__file__).parents[1] / "models" / name if name in SHIPPED else Path(name)
    if not folder.is_dir():
        return str(getattr(AutoConfig.from_pretrained(name), "_commit_hash", None))
    digest = hashlib.sha256()
    for path in sorted(path for pattern in _WEIGHTS for path in folder.glob(pattern)):
        digest.update(f"{path.name} {path.stat().st_size}".encode())
        with path.open("rb") as file:
            digest.update(file.read(_ENDS))
            file.seek(max(0, path.stat().st_size - _ENDS))
            digest.update(file.read(_ENDS))
    return digest.hexdigest()[:16]
