"""The errors that presses, scopes and caches raise.

Every message names the value that was given, what is allowed, and what to do about it.
"""


class PressError(Exception):
    """Base of all errors raised by this project."""


class HyperparameterError(PressError, ValueError):
    """A field of a press has a value outside of its range."""


class UnsupportedModelError(PressError):
    """The attention of the model is not supported by this press, or by its mechanism."""


class UnsupportedCacheError(PressError):
    """The cache, or an operation on it, is not compatible with pruning."""


class UnsupportedInputError(PressError):
    """The input is not supported by a press (padded on the right, for example)."""


class ScopeError(PressError):
    """A scope is used wrongly: opened twice, or missing although a cache needs one."""


def first_line(error: BaseException) -> str:
    """The first line of an error message, at most 200 characters of it; or the error's type."""
    line = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
    return line if len(line) <= 200 else f"{line[:200]} ..."
