"""What flags of several experiments have in common: checks that name the flag which is wrong."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Annotated, Any

import torch
import typer
from pydantic import ByteSize, Field, TypeAdapter, ValidationError

from press_core.errors import first_line

Values = Any
"""What a flag was given: one value, or a list of them if it can be repeated; None if nothing."""

Check = Callable[[Values], Values]
"""A callback for `typer.Option` that returns what it is given, or raises `typer.BadParameter`."""


def _each(values: Values) -> Collection[Any]:
    if values is None:
        return ()
    return values if isinstance(values, list) else (values,)


def checking(holds: Callable[[Any], bool], wrong: str) -> Check:
    """A check that every value is such that `holds`; what else is said of it has `{}` for it."""

    def check(values: Values) -> Values:
        for value in _each(values):
            if not holds(value):
                raise typer.BadParameter(wrong.format(value))
        return values

    return check


checked_share = checking(lambda n: 0 <= n < 1, "{} is not in [0, 1); 0.75 evicts three quarters")
"""Check shares of tokens in [0, 1)."""

checked_positive_share = checking(lambda n: 0 < n < 1, "{} is not above 0 and below 1")
"""Check shares of tokens in (0, 1), where evicting nothing makes no sense."""


def one_of(known: Collection[str]) -> Check:
    """Check names."""
    return checking(
        lambda name: name in known, f"{{!r}} is unknown; choose from {', '.join(known)}"
    )


def at_least(least: int) -> Check:
    """Check whole numbers."""
    return checking(lambda n: n >= least, f"{{}} is less than {least}")


def chosen_device(name: str) -> str:
    """`name`, or for "auto" a GPU where there is one, and the CPU elsewhere."""
    if name != "auto":
        return name
    return "cuda" if torch.cuda.is_available() else "cpu"


def _checked_device(name: str) -> str:
    device = chosen_device(name)
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # what torch raises differs by device
        raise typer.BadParameter(f"cannot use {name!r}: {first_line(error)}") from error
    return device


Device = Annotated[
    str,
    typer.Option(
        help="Where to run, such as cpu or cuda; auto: a GPU where there is one.",
        callback=_checked_device,
    ),
]
"""A field of options: the device to run on, for `chosen_device` to read."""


DTYPES = ("float32", "bfloat16", "float16")
"""In which models are loaded."""

Dtype = Annotated[
    str, typer.Option(help=f"Of the weights: {', '.join(DTYPES)}.", callback=one_of(DTYPES))
]
"""A field of options: what a model is loaded in."""


# ---- several values in one flag ------------------------------------------------------------------


def several(kind: Callable[[str], Any], help: str, check: Check | None = None, **more: Any) -> Any:
    """An option that takes several values, with commas between them, repeated, or both.

    Args:
        kind: makes one value from its text, or raises a `ValueError`.
        check: of all values together; see `Check`.
        more: for `typer.Option`.
    """

    def split(text: Any) -> list[Any]:
        if not isinstance(text, str):
            return [text]  # a default
        try:
            return [kind(part.strip()) for part in text.split(",")]
        except ValueError as error:
            raise typer.BadParameter(f"cannot read {text!r}: {error}") from error

    def gathered(groups: Values) -> Values:
        values = [value for group in _each(groups) for value in group]
        return check(values) if check else values

    note = f"{help} Repeatable, or with commas."
    return typer.Option(help=note, parser=split, callback=gathered, **more)


_SIZE = TypeAdapter(Annotated[ByteSize, Field(gt=0)])


def n_bytes(text: str) -> int:
    """Bytes of a size such as `8GiB`, `500 MB` or `1048576`.

    Raises:
        BadParameter: if it is none.
    """
    try:
        return int(_SIZE.validate_python(text))
    except ValidationError as error:
        raise typer.BadParameter(f"{text!r} is no size; write one such as 8GiB or 500MB") from error


def size_of(n: int) -> str:
    """Bytes as people write them."""
    return f"{n / 2**30:,.0f} GiB" if n % 2**30 == 0 else f"{n / 2**20:,.0f} MiB"


def checked_size(text: str | None) -> str | None:
    """Check a size in bytes."""
    if text is not None:
        n_bytes(text)
    return text
