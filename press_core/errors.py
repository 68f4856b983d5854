"""The errors that presses, scopes and caches raise.

Every message names the value that was given, what is allowed, and what to do about it.
"""


class PressError(Exception):
    """Base of all errors raised by this project."""


class HyperparameterError(PressError, ValueError):
    """A field of a press has a value outside of its range."""


class UnsupportedModelError(PressError):
    """The model has no attention that this press, with this mechanism, can work on."""


class UnsupportedCacheError(PressError):
    """The cache, or what is asked of it, does not go together with pruning."""


class UnsupportedInputError(PressError):
    """The input is laid out so that a press cannot judge it (padded on the right, say)."""


class ScopeError(PressError):
    """A scope is used wrongly: opened twice, or missing where a cache needs one."""


def first_line(error: BaseException) -> str:
    """The first line of what `error` says, or its type; cut where it quotes at length."""
    line = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
    return line if len(line) <= 200 else f"{line[:200]} ..."
