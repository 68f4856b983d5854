"""Measuring with kvpress, in a process of the interpreter that has it.

kvpress rewrites the attention registry of transformers when it is imported, and may need another
release of transformers. So it is measured in a process of its own, where a model without a press,
and hooks of this project, take their turns too; results are ratios to these.

An experiment names its module and what to measure, as JSON. A function `beside_kvpress` of that
module makes the rows there: see `rows_with_kvpress`.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pandas as pd
from rich.progress import Progress

from experiments.framework.shared import printed_by

NAME = "kvpress"

_ENVIRONMENT = Path(__file__).parents[2] / ".venv-oldest"
"""Where `make test-oracle` installs kvpress."""


def python_with_kvpress() -> Path | None:
    """The interpreter that has kvpress: this one, or that of the oldest environment."""
    if find_spec(NAME) is not None:
        return Path(sys.executable)
    python = _ENVIRONMENT / "bin" / "python"
    return python if any(_ENVIRONMENT.glob(f"lib/*/site-packages/{NAME}")) else None


output_of = partial(printed_by, otherwise="; try --no-kvpress")
"""What a module prints that is run by the interpreter with kvpress."""


def rows_with_kvpress(python: Path, module: str, **asked: Any) -> pd.DataFrame:
    """Rows of kvpress among `module.beside_kvpress(**asked)` there, and the `transformers`.

    Raises:
        UserError: if it fails.
    """
    return pd.DataFrame(json.loads(output_of(python, __name__, module, given=json.dumps(asked))))


def joined_by_kvpress(
    table: pd.DataFrame, options: Any, progress: Progress, module: str
) -> pd.DataFrame:
    """`table`, and `rows_with_kvpress` of the `options`, if they want them and it is installed."""
    python = python_with_kvpress() if options.kvpress else None
    if python is None:
        return table
    progress.add_task(NAME, total=None)
    theirs = rows_with_kvpress(python, module, **asdict(options))
    return pd.concat([table, theirs], ignore_index=True)


def presses_of_kvpress() -> Mapping[str, type[Any]]:
    """The presses of kvpress by name; imports it."""
    kvpress = import_module(NAME)
    return {name: getattr(kvpress, name) for name in kvpress.__all__}


def main(module: str) -> None:
    """Make the rows, in the interpreter with kvpress."""
    # Whatever a library prints goes to stderr: standard output is for the result.
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    rows = import_module(module).beside_kvpress(**json.load(sys.stdin))
    with output:
        theirs = [row for row in rows if row.get("mechanism", NAME) == NAME]
        json.dump([row | {"transformers": version("transformers")} for row in theirs], output)


if __name__ == "__main__":
    main(*sys.argv[1:])
