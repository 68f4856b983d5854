"""Fields of presses: what each of them may hold, said where it is declared."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Callable
from dataclasses import MISSING, field, fields
from numbers import Integral, Real
from typing import Any

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


def told_amount(default: Any = 0.0) -> Any:
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


_PLAIN: dict[str, tuple[type, str]] = {
    "int": (Integral, "a whole number"),
    "float": (Real, "a number"),
    "bool": (bool, "True or False"),
    "str": (str, "a string"),
    "None": (type(None), "None"),
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
    types = _PLAIN | {"Press": (kind, "a press installed by the same mechanism")}
    for declared in fields(press):
        value, name = getattr(press, declared.name), type(press).__name__
        if isinstance(value, nn.Module) and value is not declared.default:
            meant = "a press is made first and opened on the model then"
            require(press, declared.name, False, f"no model: {meant}, as in {name}(...)(model)")
        names = _names_of(declared.type)
        if types.keys() >= set(names) and value is not declared.default:
            fits = any(isinstance(value, types[name][0]) for name in names)
            fits = fits and (not isinstance(value, bool) or "bool" in names)
            allowed = " or ".join(types[name][1] for name in names)
            require(press, declared.name, fits, f"{allowed}, not a {type(value).__name__}")
        words = _words_of(declared.type)
        require(press, declared.name, not words or value in words, f"one of {', '.join(words)}")
        if "holds" in declared.metadata:
            holds, allowed = declared.metadata["holds"], declared.metadata["allowed"]
            require(press, declared.name, bool(holds(value)), allowed)
    for declared in fields(press):
        if "above" in declared.metadata:
            other, value = declared.metadata["above"], getattr(press, declared.name)
            least = getattr(press, other)
            allowed = f"a number of tokens above {other}={least}"
            require(press, declared.name, value > least, allowed)


def _words_of(annotation: Any) -> list[str]:
    """The words that `annotation` lists; empty: it lists none."""
    return re.findall(r"'(\w+)'", annotation) if str(annotation).startswith("Literal[") else []


def _names_of(annotation: Any) -> list[str]:
    """The names of the types of which `annotation` is the union."""
    written = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", "")
    return ["str"] if written.startswith("Literal[") else re.split(r"\s*\|\s*", written)
