"""What flags of several experiments have in common: checks that name the flag which is wrong."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Annotated, Any

import torch
import typer

Values = Any
"""What a flag was given: one value, or a list of them if it can be repeated; None if nothing."""

Check = Callable[[Values], Values]
"""A callback for `typer.Option` that returns what it is given, or raises `typer.BadParameter`."""


def _each(values: Values) -> Collection[Any]:
    if values is None:
        return ()
    return values if isinstance(values, list) else (values,)


def checked_share(values: Values) -> Values:
    """Check shares of tokens in [0, 1)."""
    for value in _each(values):
        if not 0 <= value < 1:
            raise typer.BadParameter(f"{value} is not in [0, 1); 0.75 evicts three quarters")
    return values


def checked_positive_share(values: Values) -> Values:
    """Check shares of tokens in (0, 1), where evicting nothing makes no sense."""
    for value in _each(values):
        if not 0 < value < 1:
            raise typer.BadParameter(f"{value} is not above 0 and below 1")
    return values


def one_of(known: Collection[str]) -> Check:
    """Check names."""

    def check(values: Values) -> Values:
        for value in _each(values):
            if value not in known:
                raise typer.BadParameter(f"{value!r} is unknown; choose from {', '.join(known)}")
        return values

    return check


def _checked_device(name: str) -> str:
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:  # what torch raises differs by device
        raise typer.BadParameter(f"cannot use {name!r}: {str(error).splitlines()[0]}") from error
    return name


Device = Annotated[
    str, typer.Option(help="Where to run, such as cpu or cuda.", callback=_checked_device)
]
"""A field of options: the device to run on."""
