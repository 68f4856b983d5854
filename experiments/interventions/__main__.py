"""Audit the libraries installed in this environment, and print the results as JSON."""

import json
import multiprocessing
import sys
from functools import partial
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

from experiments.audit import audit
from experiments.framework.timing import threads
from experiments.framework.wording import in_one_line
from experiments.interventions import LIBRARIES
from experiments.testbed.families import build

IMPORT = "import"
"""The first audited subject of every library: its import."""


def audit_subject(distribution: str, subject: str) -> dict[str, Any]:
    """One row: the changes made by a subject, or its error. Run it in a separate process."""
    library = LIBRARIES[distribution]
    model, importing = build("llama"), partial(import_module, library.module)
    changes, error = [], ""
    try:
        if subject == IMPORT:
            found = audit(importing, model)
        else:
            importing()  # before the audit, so that the import's changes are not counted
            run = None if library.runs else lambda *_: None
            found = audit(library.subjects[subject](model), model, run)
        changes = found.by_kind().to_dict("records")
    except Exception as raised:
        error = in_one_line(raised)
    row = {"library": distribution, "version": version(distribution), "subject": subject}
    return {**row, "transformers": version("transformers"), "error": error, "changes": changes}


def main(names: list[str]) -> None:
    """Audit `names` (distributions), or all that are installed; the last printed line is JSON."""
    subjects = [
        (name, subject)
        for name, library in LIBRARIES.items()
        if (not names or name in names) and find_spec(library.module.split(".")[0]) is not None
        for subject in (IMPORT, *library.subjects)
    ]
    # A fork for each subject: the parent has loaded torch and transformers, but no audited library.
    # Forked processes do not inherit the threads of torch.
    with threads(1), multiprocessing.get_context("fork").Pool(2, maxtasksperchild=1) as pool:
        print("\n" + json.dumps(pool.starmap(audit_subject, subjects, chunksize=1)))


if __name__ == "__main__":
    main(sys.argv[1:])
