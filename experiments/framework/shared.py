"""Shared by several experiments: flags, a threshold, and runs in other environments."""

import os
import re
import subprocess
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import Progress

from experiments import UserError, refusing
from experiments.framework.options import checked_positive_share, several
from experiments.framework.plots import is_own
from press_core import PressError

GOOD = 0.9
"""Share of right answers from which a press counts as working."""

# ---- fields of options ---------------------------------------------------------------------------

Model = Annotated[str, typer.Option(help="Shipped model, folder or hub id.")]
ModelOrOwn = Annotated[
    str | None,
    typer.Option(help="Shipped model, folder or hub id.", show_default="the experiment's own"),
]


def _in_pairs(values: list[str]) -> list[str]:
    """`values`, with a hook press of the user's own joined to the patch press after it."""
    each = iter(values)
    return [",".join([name, *islice(each, 1)]) if is_own(name) else name for name in each]


Presses = Annotated[
    tuple[str, ...],
    several(
        str,
        "Press to measure, such as SnapKV; by default those of the study. Or two classes of your "
        "own, the hook press first: my_module:MyHookPress,my_module:MyPatchPress.",
        _in_pairs,
    ),
]
Ratio = Annotated[
    float,
    typer.Option(help="Share of the tokens to evict, in (0, 1).", callback=checked_positive_share),
]
Ratios = Annotated[
    tuple[float, ...],
    several(float, "Share of the tokens to evict, in (0, 1).", checked_positive_share),
]
Samples = Annotated[int, typer.Option(min=1, help="Number of contexts with questions.")]
Words = Annotated[int, typer.Option(min=32, help="Words in a context.")]
Facts = Annotated[int, typer.Option(min=1, help="Facts in a context.")]
Tokens = Annotated[int, typer.Option(min=2, help="Tokens of the context.")]
Rounds = Annotated[int, typer.Option(min=1, help="Rounds, each of which times everything once.")]
Compiled = Annotated[
    bool | None,
    typer.Option(
        help="Also decode compiled, and with static caches.", show_default="unless a model is given"
    ),
]
Kvpress = Annotated[bool, typer.Option(help="Measure kvpress as well, if it is installed.")]
Seed = Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Seed of the contexts.")]


# ---- other environments --------------------------------------------------------------------------

ROOT = Path(__file__).parents[2]
OLDEST = ROOT / ".venv-oldest" / "bin" / "python"
"""The interpreter for which `make test` installs the oldest supported transformers, and kvpress."""


def printed_by(python: Path, *arguments: str, given: str = "", otherwise: str = "") -> str:
    """Run `python -m` with these arguments in another environment and return its standard output.

    Args:
        python: the interpreter of that environment.
        given: standard input.
        otherwise: advice for the error message, starting with a semicolon.

    Raises:
        UserError: if it fails.
    """
    how: dict[str, Any] = {"capture_output": True, "text": True, "check": False}
    where = os.environ | {"PYTHONPATH": str(ROOT)}
    with refusing(f"cannot run {python}", OSError, advice=otherwise):
        done = subprocess.run([python, "-m", *arguments], input=given, env=where, **how)
    if done.returncode:
        said = [line.strip("│ ") for line in done.stderr.splitlines() if re.search(r"\w", line)]
        reason = said[-1] if said else "no message"
        raise UserError(f"running {arguments[0]} with {python} failed: {reason}{otherwise}")
    return done.stdout


# ---- what is not measured ------------------------------------------------------------------------


def print_left_out(progress: Progress, what: str, reason: object) -> None:
    """Print above the progress bar what is not measured, and why."""
    progress.console.print(f"left out: {what}: {reason}", style="yellow", markup=False)


def or_left_out(progress: Progress, what: str, measure: Callable[..., Any], *args: Any) -> Any:
    """What `measure` returns; if it is refused, None, which is printed: the rest is not lost."""
    try:
        return measure(*args)
    except (UserError, PressError) as error:
        print_left_out(progress, what, error)
        return None
