"""Measure kvpress in a process of the interpreter in which it is installed.

kvpress rewrites the attention registry of transformers on import, and may need another release of
transformers, so it is measured in a separate process. The model without a press and hooks of this
project are measured there as well, and results are ratios to these.

An experiment passes the name of its module and its options, as JSON. The function `beside_kvpress`
of that module makes the rows: see `rows_with_kvpress`.
"""

import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pandas as pd
from rich.progress import Progress

from experiments.framework.plots import is_own
from experiments.framework.shared import OLDEST, or_left_out, printed_by
from experiments.testbed.recipes import press_name

NAME = "kvpress"


def python_with_kvpress() -> Path | None:
    """The interpreter with kvpress, this one or `OLDEST`; None if neither has it."""
    if find_spec(NAME) is not None:
        return Path(sys.executable)
    return OLDEST if any(OLDEST.parents[1].glob(f"lib/*/site-packages/{NAME}")) else None


output_of = partial(printed_by, otherwise="; try --no-kvpress")
"""What a module prints when the interpreter with kvpress runs it."""


def rows_with_kvpress(python: Path, module: str, **options: Any) -> pd.DataFrame:
    """The rows of `module.beside_kvpress(**options)` about kvpress, run by `python`.

    Returns:
        The rows, and a column with the version of `transformers`.

    Raises:
        UserError: if the process fails.
    """
    return pd.DataFrame(json.loads(output_of(python, __name__, module, given=json.dumps(options))))


def joined_by_kvpress(
    table: pd.DataFrame, options: Any, progress: Progress, module: str
) -> pd.DataFrame:
    """`table` with `rows_with_kvpress`, unless they are left out."""
    measure = partial(rows_with_kvpress, module=module, **asdict(options))
    return pd.concat([table, of_kvpress(options, progress, measure)], ignore_index=True)


def of_kvpress(options: Any, progress: Progress, measure: Callable[..., Any], *args: Any) -> Any:
    """What `measure` returns, given the interpreter with kvpress and `args`.

    Returns:
        None if `options.kvpress` is not set, or kvpress is not installed, or it fails.
    """
    if not options.kvpress or (python := python_with_kvpress()) is None:
        return None
    progress.add_task(NAME, total=None)
    return or_left_out(progress, NAME, measure, python, *args)


def presses_of_kvpress() -> Mapping[str, type[Any]]:
    """Import kvpress; its presses by name."""
    kvpress = import_module(NAME)
    return {name: getattr(kvpress, name) for name in kvpress.__all__}


def main(module: str) -> None:
    """Print the rows about kvpress as JSON; run in the interpreter with kvpress."""
    # Standard output is for the result, so prints of libraries are redirected to stderr.
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    options, known = json.load(sys.stdin), presses_of_kvpress()
    if given := options["press"]:  # kvpress has neither presses of the user's own nor all others
        options["press"] = [
            name for name in given if not is_own(name) and press_name(name) in known
        ]
    rows = import_module(module).beside_kvpress(**options) if options["press"] or not given else []
    with output:
        theirs = [row for row in rows if row.get("mechanism", NAME) == NAME]
        json.dump([row | {"transformers": version("transformers")} for row in theirs], output)


if __name__ == "__main__":
    main(*sys.argv[1:])
