"""Date, commit, library versions and machine of a study."""

import hashlib
import os
import platform
import re
import subprocess
from collections.abc import Iterable
from contextlib import suppress
from datetime import datetime, timezone
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import torch

_USED = "torch", "transformers", "numpy", "wrapt", "pandas", "accelerate", "peft", "optimum-quanto"

_ROOT = Path(__file__).parents[2]
_CODE = "experiments", "press_core", "hooks_impl", "patch_impl", "attention_patch", "tests/oracle"
"""What results depend on: code, its data, and the weights of the shipped models."""

_ENDS = 2**20  # bytes at the start and at the end of a file that go into a digest


def environment_info() -> dict[str, Any]:
    """Date, commit, library versions and machine, as fields of the manifest."""
    versions = {"python": platform.python_version(), **_versions(_USED)}
    for site in (_ROOT / ".venv-oldest").glob("lib/*/site-packages"):
        theirs = _versions(("kvpress", "transformers", "torch"), path=[str(site)])
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


def commit() -> str:
    """The git commit of this code, with "+changes" and a digest of the sources if what results
    depend on differs from it, or holds further files, or if the commit is "unknown"."""

    def git(*args: str) -> subprocess.CompletedProcess[str]:
        command = ["git", "-C", str(_ROOT), *args]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    with suppress(OSError):  # git is not installed
        if git("ls-files", "--error-unmatch", str(Path(__file__).resolve())).returncode == 0:
            commit = git("rev-parse", "HEAD").stdout.strip()
            changed = git("status", "--porcelain", "--", *_CODE).stdout
            return f"{commit}+changes {code_digest()}" if changed else commit
    return f"unknown+changes {code_digest()}"  # installed, perhaps inside another repository


def code_digest() -> str:
    """A digest of the sources that results depend on, uncommitted changes included."""
    return digest_of(_ROOT, [f"{part}/**/*.{kind}" for part in _CODE for kind in ("py", "yaml")])


def digest_of(folder: Path, patterns: Iterable[str]) -> str:
    """A digest of names, sizes and contents of files; of large files, of both ends."""
    digest = hashlib.sha256()
    for path in sorted(path for pattern in patterns for path in folder.glob(pattern)):
        size = path.stat().st_size
        digest.update(f"{path.relative_to(folder).as_posix()} {size}".encode())
        with path.open("rb") as file:
            digest.update(file.read(_ENDS))
            file.seek(max(0, size - _ENDS))
            digest.update(file.read(_ENDS))
    return digest.hexdigest()[:16]
