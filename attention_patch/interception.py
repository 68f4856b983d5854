"""Scoped interception of attention functions.

An attention module gets a function from its registry and calls it with the queries, keys and
values after RoPE. While `intercept` is open, functions from the registry look for overrides in
their keyword arguments and run them. An override is passed as a keyword argument of the module's
forward, so it affects the attention calls of this forward only; every other model, thread and call
is unchanged.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from attention_patch.reversible import Patch, wrap

OVERRIDE = "attention_override"
"""Keyword argument of an attention forward that holds the overrides, the outermost first."""

Override = Callable[..., Any]
"""`override(function, module, query, key, value, attention_mask, **kwargs)`, run in place of the
attention function `function`."""


def intercept(interface: Any) -> Patch:
    """Make the functions of a registry like `ALL_ATTENTION_FUNCTIONS` run overrides.

    Returns:
        The patch; its `remove()` ends the interception.
    """
    # Shared by all modules and scopes: every further layer would slow down every call.
    return wrap(interface, "get_interface", _run_overrides, shared=True)


def with_override(kwargs: Mapping[str, Any], override: Override) -> dict[str, Any]:
    """`kwargs` of an attention forward plus `override`, wrapped around any existing override."""
    return {**kwargs, OVERRIDE: (override, *kwargs.get(OVERRIDE, ()))}


def _run_overrides(get_interface: Any, *args: Any, **kwargs: Any) -> Any:
    return partial(_dispatch, get_interface(*args, **kwargs))


def _dispatch(function: Any, *args: Any, **kwargs: Any) -> Any:
    for override in reversed(kwargs.pop(OVERRIDE, ())):
        function = partial(override, function)
    return function(*args, **kwargs)
