"""Sentences of findings, errors in one line, and durations in words."""

from collections.abc import Callable
from typing import Any

from experiments import data_of
from experiments.framework.experiment import Finding


def sentences(module: str) -> Callable[..., Finding]:
    """Makes findings whose sentences are in the YAML file beside a module.

    Args:
        module: path of the module. The file has what each finding `says`, with a field in braces
            for each value, and the `need`, if any.

    Returns:
        `finding(name, verdict=None, evidence=None, as_in=name, **values)`; a finding that has
        several sentences, or shares one, says `as_in` which entry of the file it is.
    """
    known: dict[str, dict[str, str]] = data_of(module)

    def finding(
        name: str, verdict: Any = None, evidence: Any = None, as_in: str = "", **values: Any
    ) -> Finding:
        entry = known[as_in or name]
        return Finding(
            name, entry["says"].format(**values), entry.get("need", ""), verdict, evidence
        )

    return finding


def in_one_line(error: BaseException) -> str:
    """The last line of an error's traceback, without line breaks: `"KeyError: 'missing'"`."""
    return " ".join(f"{type(error).__name__}: {error}".split())


def refused(error: Any, whole: str) -> str:
    """A validation error of pydantic, as `samples is 'many'; input should be a valid integer`.

    Args:
        error: one of `ValidationError.errors()`.
        whole: the name to use if the error names no field.
    """
    place = ".".join(part for part in error["loc"] if isinstance(part, str)) or whole
    reason = error["msg"].removeprefix("Value error, ")
    text = f"{place} is {error['input']!r:.200}; {reason[0].lower()}{reason[1:]}"
    return text if text.isprintable() else ascii(text)[1:-1]


def about_seconds(seconds: float | None) -> str:
    """A duration in s, min or h, such as `"12 min"`; "not known" for None."""
    if seconds is None:
        return "not known"
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
