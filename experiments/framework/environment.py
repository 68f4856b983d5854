"""Date, commit, library versions and machine of a study."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from datetime import datetime, timezone
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import torch

_USED = "torch", "transformers", "numpy", "wrapt", "pandas", "accelerate", "peft", "optimum-quanto"
_OF_KVPRESS = ("kvpress", "transformers", "torch")

_ROOT = Path(__file__).parents[2]
_CODE = "experiments", "press_core", "hooks_impl", "patch_impl", "attention_patch", "tests/oracle"
"""What results depend on: code, its data, and the weights of the shipped models."""


def environment_info() -> dict[str, Any]:
    """Date, commit, library versions and machine, as fields of the manifest."""
    versions = {"python": platform.python_version(), **_versions(_USED)}
    for site in (_ROOT / ".venv-oldest").glob("lib/*/site-packages"):
        theirs = _versions(_OF_KVPRESS, path=[str(site)])
        versions["beside kvpress"] = ", ".join(map(" ".join, theirs.items()))
    return {
        "date": now(),
        "commit": commit(),
        "versions": versions,
        "machine": {
            "system": f"{platform.system()} {platform.machine()}",
            "cpu": _processor(),
            "cpu_count": os.cpu_count(),
            "torch_threads": torch.get_num_threads(),
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        },
    }


def now() -> str:
    """The date and time, in UTC."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def _versions(names: tuple[str, ...], **where: Any) -> dict[str, str]:
    """Versions of the libraries that are installed, here or in other folders."""
    found = {name: next(iter(distributions(name=name, **where)), None) for name in names}
    return {name: each.version for name, each in found.items() if each}


def _processor() -> str | None:
    described = Path("/proc/cpuinfo")  # Linux
    found = re.search("model name\\s*: (.+)", described.read_text() if described.exists() else "")
    return found[1] if found else platform.processor() or None


def commit() -> str | None:
    """The git commit of this code, with "+changes" if what results depend on differs from it, or
    holds further files; None if unknown."""

    def git(*args: str) -> subprocess.CompletedProcess[str]:
        command = ["git", "-C", str(_ROOT), *args]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    try:
        if git("ls-files", "--error-unmatch", str(Path(__file__).resolve())).returncode:
            return None  # installed, perhaps inside another repository
        commit = git("rev-parse", "HEAD").stdout.strip()
        changed = git("status", "--porcelain", "--", *_CODE).stdout
    except OSError:
        return None
    return f"{commit}+changes" if changed else commit
