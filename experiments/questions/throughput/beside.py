"""The same answers with kvpress, in the environment that has it: a process of its own.

`python -m experiments.questions.throughput.beside` reads what to measure from standard input, as
JSON, and prints rows. kvpress rewrites the attention registry of transformers when it is imported;
and it may need another release of transformers, so a model without a press and hooks of this
project take their turns there too, and what is told are ratios to these.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from experiments import UserError
from experiments.questions.throughput.cells import FULL, Condition, Subject, scope_of
from experiments.questions.throughput.speed import Effort, speeds
from experiments.testbed.recipes import recipe

NAME = "kvpress"

_ROOT = Path(__file__).parents[3]
_ENVIRONMENT = _ROOT / ".venv-oldest"
"""Where `make test-oracle` installs kvpress."""


class Asked(NamedTuple):
    """What is measured there; of JSON."""

    subject: dict[str, Any]
    press: list[str]
    ratio: list[float]
    context: list[int]
    batch: list[int]
    tokens: int
    rounds: int


def python_with_kvpress() -> Path | None:
    """The interpreter that has kvpress: this one, or that of the oldest environment."""
    if find_spec(NAME) is not None:
        return Path(sys.executable)
    python = _ENVIRONMENT / "bin" / "python"
    return python if any(_ENVIRONMENT.glob(f"lib/*/site-packages/{NAME}")) else None


def rows_of_kvpress(python: Path, asked: Asked) -> pd.DataFrame:
    """Rows as of `speeds`, and the `transformers` that they were measured with.

    Raises:
        UserError: if it fails.
    """
    done = subprocess.run(
        [str(python), "-m", __name__],
        input=json.dumps(asked),
        cwd=_ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        reason = (done.stderr.strip() or "no message").splitlines()[-1]
        raise UserError(f"measuring kvpress with {python} failed: {reason}; try --no-kvpress")
    return pd.DataFrame(json.loads(done.stdout))


def timed_presses(python: Path) -> pd.DataFrame:
    """Time and memory inside each press, here and in kvpress: see `tests.oracle.timing`.

    Raises:
        UserError: if it fails.
    """
    command = [str(python), "-m", "tests.oracle.timing"]
    done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = (done.stderr.strip() or "no message").splitlines()[-1]
        raise UserError(f"timing kvpress with {python} failed: {reason}; try --no-kvpress")
    return pd.read_csv(StringIO(done.stdout))


def measure(asked: Asked) -> Iterator[dict[str, Any]]:
    """What this process is for."""
    import kvpress

    theirs = {name: getattr(kvpress, name) for name in kvpress.__all__}
    subject = Subject(**asked.subject | {"shape": tuple(map(tuple, asked.subject["shape"]))})
    model, effort = subject.load(), Effort(asked.tokens, asked.rounds)
    for context in asked.context:
        opened = {FULL: scope_of(FULL, model, context)}
        for name in asked.press:
            for ratio in asked.ratio:
                ours = Condition(name, "hook", ratio)
                opened[ours] = scope_of(ours, model, context)
                press: Any = recipe(theirs, name, ratio, context)
                opened[Condition(name, NAME, ratio)] = partial(press, model)
        for batch in asked.batch:
            for row in speeds(model, opened, context, batch, effort):
                if row["mechanism"] == NAME:
                    yield {"model": subject.name, **row, "transformers": version("transformers")}


def asked_of(
    subject: Subject, press: list[str], ratio: list[float], sizes: Any, effort: Effort
) -> Asked:
    """What to ask for; `sizes` has contexts and batches."""
    contexts, batches = map(list, sizes)
    return Asked(asdict(subject), press, ratio, contexts, batches, effort.tokens, effort.rounds)


if __name__ == "__main__":
    # Whatever a library prints goes to stderr: standard output is for the result.
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    with output:
        json.dump(list(measure(Asked(*json.load(sys.stdin)))), output)
