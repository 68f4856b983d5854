"""Fields of presses, declared together with the values that they allow."""

import reprlib
from collections.abc import Callable, Collection
from dataclasses import MISSING, field, fields
from functools import cache
from math import inf, isfinite
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from torch import nn

from press_core.budget import is_amount, is_whole_number
from press_core.errors import HyperparameterError


def limited(default: Any, holds: Callable[[Any], bool], allowed: str) -> Any:
    """A field whose values satisfy `holds`; `allowed` describes them in error messages."""
    return field(default=default, metadata={"holds": holds, "allowed": allowed})


def count(default: Any = MISSING, at_least: int = 0, of: str = "a number of tokens, ") -> Any:
    """A field for a whole number; None is allowed if it is the default."""
    none = "None or " if default is None else ""
    allowed = f"{none}{of}{at_least} or more"
    return limited(default, lambda n: default is n is None or at_least <= n < inf, allowed)


def number(default: float, low: float, high: float = inf) -> Any:
    """A field for a number in [`low`, `high`]."""
    allowed = f"{low:g} or more" if high == inf else f"a number in [{low:g}, {high:g}]"
    return limited(default, lambda x: low <= x <= high and isfinite(x), allowed)


def share(default: float) -> Any:
    """A field for a number in [0, 1]."""
    return number(default, 0, 1)


def odd(default: int) -> Any:
    """A field for the width of a centered window: an odd number."""
    return limited(default, lambda n: n >= 1 and n % 2 == 1, "odd and positive")


AMOUNT = is_amount, "a number in [0, 1), or the Tokens to keep"
"""Arguments of `limited` for a compression ratio: the check and its description."""


def amount_field(default: Any = 0.0) -> Any:
    """A field for a compression ratio, or for the `Tokens` to keep."""
    return limited(default, *AMOUNT)


def above(other: str, default: int) -> Any:
    """A field for a number of tokens greater than that in the field `other`."""
    return field(default=default, metadata={"above": other})


def native(value: Any) -> Any:
    """`value`; a number as one of Python's own.

    Those of numpy overflow in their few bits, and tensors take no Fraction.
    """
    if type(value) is float or isinstance(value, int) or not isinstance(value, Real):
        return value
    return int(value) if isinstance(value, Integral) else float(value)


def require(press: Any, name: str, holds: bool, allowed: str) -> None:
    """Raise a `HyperparameterError` about the field `name` of `press` unless `holds`."""
    if not holds:
        value, kind = getattr(press, name), type(press).__name__
        is_model = isinstance(value, nn.Module)
        shown = f"<a {type(value).__name__}>" if is_model else reprlib.repr(value)
        raise HyperparameterError(f"{kind}({name}={shown}): {name} must be {allowed}")


def require_given(holds: Callable[[Any], bool], allowed: str, **given: Any) -> None:
    """Raise a `HyperparameterError` unless all arguments satisfy `holds`; see `limited`."""
    for name, value in given.items():
        if not holds(value):
            raise HyperparameterError(f"{name}={reprlib.repr(value)}: {name} must be {allowed}")


def require_whole(at_least: int, **given: Any) -> None:
    """Raise a `HyperparameterError` unless all are whole numbers, `at_least` or more."""
    require_given(
        lambda n: is_whole_number(n, at_least), f"a whole number, {at_least} or more", **given
    )


_PLAIN: dict[Any, tuple[type, str]] = {
    int: (Integral, "a whole number"),
    float: (Real, "a number"),
    bool: (bool, "True or False"),
    str: (str, "a string"),
    NoneType: (NoneType, "None"),
}
"""By annotation, the type of the values that a field takes, and its name in error messages."""


def check_fields(press: Any, kind: type, traits: Collection[str]) -> None:
    """Raise if a field of `press` holds a value that it does not take; make numbers Python's own.

    Types are checked for fields of plain types, of `Literal` strings and of a single press; a field
    that a class leaves for later, `field(init=False)`, once it is set. Only a field of another type
    that declares nothing may hold a model.

    Args:
        kind: the base class of all presses, whose methods and properties no field may replace.
        traits: those that a field may replace.

    Raises:
        HyperparameterError: with the field, its value and what is allowed.
    """
    types = _PLAIN | {kind: (kind, "a press installed by the same mechanism")}
    annotations, name = _annotations(press.__class__), type(press).__name__
    known = [declared for declared in fields(press) if hasattr(press, declared.name)]
    for declared in known:
        value, annotation = getattr(press, declared.name), annotations.get(declared.name)
        own = None if declared.name in traits else getattr(kind, declared.name, None)
        is_free = not (callable(own) or isinstance(own, property))
        require(press, declared.name, is_free, "renamed: presses have a method of that name")
        is_union = get_origin(annotation) in (Union, UnionType)
        members = get_args(annotation) if is_union else (annotation,)
        is_plain = types.keys() >= set(members)
        if isinstance(value, nn.Module) and (is_plain or "holds" in declared.metadata):
            advice = "a press is constructed first and then opened on the model"
            require(press, declared.name, False, f"no model: {advice}, as in {name}(...)(model)")
        if is_plain and value is not declared.default:
            fits = any(isinstance(value, types[member][0]) for member in members)
            fits = fits and (not isinstance(value, bool) or bool in members)
            allowed = " or ".join(types[member][1] for member in members)
            require(press, declared.name, fits, f"{allowed}, not a {type(value).__name__}")
        if get_origin(annotation) is Literal:
            values = get_args(annotation)
            require(press, declared.name, value in values, f"one of {', '.join(map(str, values))}")
        if "holds" in declared.metadata:
            holds, allowed = declared.metadata["holds"], declared.metadata["allowed"]
            require(press, declared.name, bool(holds(value)), allowed)
        if native(value) is not value:
            vars(press)[declared.name] = native(value)
    for declared in known:
        if "above" in declared.metadata:
            other, value = declared.metadata["above"], getattr(press, declared.name)
            least = getattr(press, other)
            allowed = f"a number of tokens above {other}={least}"
            require(press, declared.name, value > least, allowed)


@cache
def _annotations(cls: type) -> dict[str, Any]:
    """By field, the type that `cls` declares; empty if an annotation cannot be evaluated."""
    try:
        return get_type_hints(cls)
    except Exception:  # annotations for type checkers only can raise anything
        return {}
