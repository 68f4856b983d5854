"""Option types and checks that several experiments share; a failed check names its flag."""

from collections.abc import Callable, Collection
from typing import Annotated, Any

import torch
import typer
from pydantic import ByteSize, Field, TypeAdapter, ValidationError

from press_core.errors import first_line

Check = Callable[[Any], Any]
"""A callback for `typer.Option` that returns its argument, or raises `typer.BadParameter`."""


def _each(values: Any) -> Collection[Any]:
    """The values of a flag: of one, of a list if it can be repeated, or of None if absent."""
    if values is None:
        return ()
    return values if isinstance(values, list) else (values,)


def checking(holds: Callable[[Any], bool], wrong: str) -> Check:
    """A check that `holds` is true of every value.

    Args:
        wrong: the error message, with `{}` for the value.
    """

    def check(values: Any) -> Any:
        for value in _each(values):
            if not holds(value):
                raise typer.BadParameter(wrong.format(value))
        return values

    return check


checked_share = checking(lambda n: 0 <= n < 1, "{} is not in [0, 1); 0.75 evicts three quarters")
"""Check that shares of tokens are in [0, 1)."""

checked_positive_share = checking(lambda n: 0 < n < 1, "{} is not above 0 and below 1")
"""Check that shares of tokens are in (0, 1), for flags where evicting nothing makes no sense."""


def one_of(known: Collection[str]) -> Check:
    """Check that every value is in `known`."""
    return checking(
        lambda name: name in known, f"{{!r}} is unknown; choose from {', '.join(known)}"
    )


def at_least(least: int) -> Check:
    """Check that every value is `least` or more."""
    return checking(lambda n: n >= least, f"{{}} is less than {least}")


def chosen_device(name: str) -> str:
    """Resolve a device: for "auto" a GPU if there is one, else the CPU; otherwise `name`."""
    if name != "auto":
        return name
    return "cuda" if torch.cuda.is_available() else "cpu"


def _checked_device(name: str) -> str:
    device = chosen_device(name)
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # the type depends on the device
        raise typer.BadParameter(f"cannot use {name!r}: {first_line(error)}") from error
    return device


Device = Annotated[
    str,
    typer.Option(
        help="Device to run on, such as cpu or cuda; auto: a GPU if there is one.",
        callback=_checked_device,
    ),
]
"""A field of options: the device to run on, to be resolved by `chosen_device`."""


DTYPES = ("float32", "bfloat16", "float16")
"""Dtypes in which models can be loaded."""

Dtype = Annotated[
    str, typer.Option(help=f"Dtype of the weights: {', '.join(DTYPES)}.", callback=one_of(DTYPES))
]
"""A field of options: the dtype in which a model is loaded."""


# ---- several values in one flag ------------------------------------------------------------------


def several(kind: Callable[[str], Any], help: str, check: Check | None = None, **more: Any) -> Any:
    """An option that takes several values: separated by commas, by repeating the flag, or both.

    Args:
        kind: parses one value, or raises a `ValueError`.
        check: called with the list of all values; see `Check`.
        more: further arguments of `typer.Option`.
    """

    def split(text: Any) -> list[Any]:
        if not isinstance(text, str):
            return [text]  # a default value, already parsed
        try:
            return [kind(part.strip()) for part in text.split(",")]
        except ValueError as error:
            raise typer.BadParameter(f"cannot read {text!r}: {error}") from error

    def gathered(groups: Any) -> Any:
        values = [value for group in _each(groups) for value in group]
        return check(values) if check else values

    note = f"{help} Repeatable, or comma-separated."
    return typer.Option(help=note, parser=split, callback=gathered, **more)


_SIZE = TypeAdapter(Annotated[ByteSize, Field(gt=0)])


def n_bytes(text: str) -> int:
    """Parse a size such as `8GiB`, `500 MB` or `1048576` as bytes.

    Raises:
        BadParameter: if it is no size.
    """
    try:
        return int(_SIZE.validate_python(text))
    except ValidationError as error:
        raise typer.BadParameter(f"{text!r} is no size; write one such as 8GiB or 500MB") from error


def size_of(n: int) -> str:
    """A number of bytes in GiB or MiB."""
    return f"{n / 2**30:,.0f} GiB" if n % 2**30 == 0 else f"{n / 2**20:,.0f} MiB"
