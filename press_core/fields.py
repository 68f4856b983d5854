"""Fields of presses: what each of them may hold, said where it is declared."""

from __future__ import annotations

import reprlib
from collections.abc import Callable
from dataclasses import MISSING, field, fields
from functools import cache
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from torch import nn

from press_core.budget import is_amount
from press_core.errors import HyperparameterError


def limited(default: Any, holds: Callable[[Any], bool], allowed: str) -> Any:
    """A field whose values have to be such that `holds`; in words, they are `allowed`."""
    return field(default=default, metadata={"holds": holds, "allowed": allowed})


def count(default: Any = MISSING, at_least: int = 0, of: str = "a number of tokens, ") -> Any:
    """A field for a whole number, which may be None where that is the default."""
    none = "None or " if default is None else ""
    return limited(
        default, lambda n: (default is n is None) or n >= at_least, f"{none}{of}{at_least} or more"
    )


def number(default: float, low: float, high: float = float("inf")) -> Any:
    """A field for a number within limits."""
    allowed = f"{low:g} or more" if high == float("inf") else f"a number in [{low:g}, {high:g}]"
    return limited(default, lambda x: low <= x <= high, allowed)


def share(default: float) -> Any:
    """A field for a number in [0, 1]."""
    return number(default, 0, 1)


def odd(default: int) -> Any:
    """A field for the width of a window that has a middle."""
    return limited(default, lambda n: n >= 1 and n % 2 == 1, "odd and positive")


def amount_field(default: Any = 0.0) -> Any:
    """A field for a compression ratio, or for the `Tokens` to keep."""
    return limited(default, is_amount, "a number in [0, 1), or the Tokens to keep")


def above(other: str, default: int) -> Any:
    """A field for a number of tokens above that in the field `other`."""
    return field(default=default, metadata={"above": other})


def require(press: Any, name: str, holds: bool, allowed: str) -> None:
    """Raise a `HyperparameterError` about the field `name` of `press` unless `holds`."""
    if not holds:
        value = getattr(press, name)
        shown = f"<a {type(value).__name__}>" if isinstance(value, nn.Module) else None
        raise HyperparameterError(
            f"{type(press).__name__}({name}={shown or reprlib.repr(value)}): {name} must be "
            f"{allowed}"
        )


_PLAIN: dict[Any, tuple[type, str]] = {
    int: (Integral, "a whole number"),
    float: (Real, "a number"),
    bool: (bool, "True or False"),
    str: (str, "a string"),
    NoneType: (NoneType, "None"),
}
"""By annotation, the type of the values that a field takes, and what to call them."""


def check_fields(press: Any, kind: type) -> None:
    """Refuse values that the fields of `press` do not take.

    Types are checked of plain fields, of those for one of some words (`Literal`) and for one press;
    but no field is a model.

    Args:
        kind: what all presses are.

    Raises:
        HyperparameterError: naming the field, its value and what is allowed.
    """
    types = _PLAIN | {kind: (kind, "a press installed by the same mechanism")}
    annotations = _annotations(press.__class__)
    for declared in fields(press):
        value, name = getattr(press, declared.name), type(press).__name__
        if isinstance(value, nn.Module) and value is not declared.default:
            meant = "a press is made first and opened on the model then"
            require(press, declared.name, False, f"no model: {meant}, as in {name}(...)(model)")
        annotation = annotations.get(declared.name)
        of_union = get_origin(annotation) in (Union, UnionType)
        taken = get_args(annotation) if of_union else (annotation,)
        if types.keys() >= set(taken) and value is not declared.default:
            fits = any(isinstance(value, types[one][0]) for one in taken)
            fits = fits and (not isinstance(value, bool) or bool in taken)
            allowed = " or ".join(types[one][1] for one in taken)
            require(press, declared.name, fits, f"{allowed}, not a {type(value).__name__}")
        if get_origin(annotation) is Literal:
            words = get_args(annotation)
            require(press, declared.name, value in words, f"one of {', '.join(map(str, words))}")
        if "holds" in declared.metadata:
            holds, allowed = declared.metadata["holds"], declared.metadata["allowed"]
            require(press, declared.name, bool(holds(value)), allowed)
    for declared in fields(press):
        if "above" in declared.metadata:
            other, value = declared.metadata["above"], getattr(press, declared.name)
            least = getattr(press, other)
            allowed = f"a number of tokens above {other}={least}"
            require(press, declared.name, value > least, allowed)


@cache
def _annotations(cls: type) -> dict[str, Any]:
    """By field, the type that `cls` declares; none of them where one is not known at run time."""
    try:
        return get_type_hints(cls)
    except Exception:  # whatever comes of what was written for type checkers alone
        return {}
