"""Date, commit, library versions and machine of a study."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch


def environment_info() -> dict[str, Any]:
    """Date, commit, library versions and machine, as fields of the manifest."""
    libraries = ("torch", "transformers", "wrapt", "pandas")
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": commit(),
        "versions": {"python": platform.python_version()}
        | {library: version(library) for library in libraries},
        "machine": {
            "system": f"{platform.system()} {platform.machine()}",
            "cpu_count": os.cpu_count(),
            "torch_threads": torch.get_num_threads(),
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        },
    }


def commit() -> str | None:
    """The git commit of this code, with "+changes" if Python files differ; None if unknown."""
    here = Path(__file__)

    def git(*args: str) -> subprocess.CompletedProcess[str]:
        command = ["git", "-C", str(here.parent), *args]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    try:
        if git("ls-files", "--error-unmatch", here.name).returncode:
            return None  # installed, perhaps inside another repository
        commit = git("rev-parse", "HEAD").stdout.strip()
        changed = git("diff", "--quiet", "HEAD", "--", ":/*.py").returncode
    except OSError:
        return None
    return f"{commit}+changes" if changed else commit
