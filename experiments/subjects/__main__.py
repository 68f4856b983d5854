"""Audit the libraries that this environment has, and print what was found as JSON."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

from experiments.audit import audit
from experiments.subjects import LIBRARIES
from experiments.testbed.families import build


def audit_subject(library_index: int, subject_index: int) -> dict[str, Any]:
    """One row: what a subject did, or why it did nothing. For a process of its own."""
    library = LIBRARIES[library_index]
    subject = library.subjects[subject_index]
    row: dict[str, Any] = {
        "library": library.distribution,
        "version": version(library.distribution),
        "transformers": version("transformers"),
        "subject": subject.name,
        "error": "",
        "changes": [],
    }
    model = build("llama")
    run = None if subject.runs else lambda *_: None
    try:
        if subject_index:  # what the import does is a subject of its own
            __import__(library.module)
        row["changes"] = audit(subject.make(model), model, run).by_kind().to_dict("records")
    except Exception as error:
        row["error"] = " ".join(f"{type(error).__name__}: {error}".split())
    return row


def main(names: list[str]) -> None:
    """Audit `names` (distributions), or all that are installed."""
    found = []
    for index, library in enumerate(LIBRARIES):
        try:
            version(library.distribution)
        except PackageNotFoundError:
            continue
        if (not names or library.distribution in names) and find_spec(library.module.split(".")[0]):
            found += [(index, number) for number in range(len(library.subjects))]
    # Whatever a library prints goes to stderr: standard output is for the result.
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    # A fork each: the parent has torch and transformers loaded, and nothing else.
    with multiprocessing.get_context("fork").Pool(2, maxtasksperchild=1) as pool:
        json.dump(pool.starmap(audit_subject, found, chunksize=1), output)
    output.close()


if __name__ == "__main__":
    main(sys.argv[1:])
