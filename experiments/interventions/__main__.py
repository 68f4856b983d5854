"""Audit the libraries that this environment has, and print what was found as JSON."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from functools import partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

from experiments.audit import audit
from experiments.framework.wording import in_one_line
from experiments.interventions import LIBRARIES, Library
from experiments.testbed.families import build

IMPORT = "import"
"""The subject that is audited first of every library."""


def audit_subject(distribution: str, subject: str) -> dict[str, Any]:
    """One row: what a subject did, or why it did nothing. For a process of its own."""
    row: dict[str, Any] = {
        "library": distribution,
        "version": version(distribution),
        "transformers": version("transformers"),
        "subject": subject,
        "error": "",
        "changes": [],
    }
    (library,) = (library for library in LIBRARIES if library.distribution == distribution)
    try:
        row["changes"] = _changes(library, subject)
    except Exception as error:
        row["error"] = in_one_line(error)
    return row


def _changes(library: Library, subject: str) -> list[dict[Any, Any]]:
    model, importing = build("llama"), partial(import_module, library.module)
    if subject == IMPORT:
        return audit(importing, model).by_kind().to_dict("records")
    importing()  # so that what it does is not counted here
    done = library.subjects[subject]
    run = None if done.runs else lambda *_: None
    return audit(done.scope(model), model, run).by_kind().to_dict("records")


def main(names: list[str]) -> None:
    """Audit `names` (distributions), or all that are installed."""
    subjects = [
        (library.distribution, subject)
        for library in LIBRARIES
        if (not names or library.distribution in names) and _is_installed(library)
        for subject in (IMPORT, *library.subjects)
    ]
    # Whatever a library prints goes to stderr: standard output is for the result.
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    # A fork each: the parent has torch and transformers loaded, and nothing else.
    with multiprocessing.get_context("fork").Pool(2, maxtasksperchild=1) as pool:
        json.dump(pool.starmap(audit_subject, subjects, chunksize=1), output)
    output.close()


def _is_installed(library: Library) -> bool:
    try:
        version(library.distribution)
    except PackageNotFoundError:
        return False
    return find_spec(library.module.split(".")[0]) is not None


if __name__ == "__main__":
    main(sys.argv[1:])
