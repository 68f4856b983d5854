"""Scoped interception of attention functions.

An attention module asks its registry for a function and calls it with the queries, keys and values
after RoPE. While `intercept` is open, a function that is asked for looks into its keyword
arguments for an override, and runs it. The override rides in the keyword arguments of the module's
own forward, so that it reaches the calls of that one forward and no others: every other model,
thread and call gets what it would have got.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from attention_patch.reversible import Patch, wrap

OVERRIDE = "attention_override"
"""Keyword argument of an attention forward that carries the override."""

Override = Callable[..., Any]
"""`override(function, module, query, key, value, attention_mask, **kwargs)`, to call `function`."""


def intercept(interface: Any) -> Patch:
    """Make the functions of `interface`, a registry like `ALL_ATTENTION_FUNCTIONS`, heed overrides.

    Returns:
        The patch; interception ends with its `remove()`.
    """
    # Once for all modules whose scopes ask for it: each time would cost every call of each of them.
    return wrap(interface, "get_interface", _heed_overrides, shared=True)


def with_override(kwargs: Mapping[str, Any], override: Override) -> dict[str, Any]:
    """Keyword arguments for an attention forward, with `override` around any already there."""
    inner = kwargs.get(OVERRIDE)
    if inner is None:
        return {**kwargs, OVERRIDE: override}

    def both(function: Any, *args: Any, **kwargs: Any) -> Any:
        return override(partial(inner, function), *args, **kwargs)

    return {**kwargs, OVERRIDE: both}


def _heed_overrides(get_interface: Any, *args: Any, **kwargs: Any) -> Any:
    return partial(_dispatch, get_interface(*args, **kwargs))


def _dispatch(function: Any, *args: Any, **kwargs: Any) -> Any:
    override = kwargs.pop(OVERRIDE, None)
    return function(*args, **kwargs) if override is None else override(function, *args, **kwargs)
