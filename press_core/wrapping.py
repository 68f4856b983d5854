"""Presses made of presses."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

from torch import nn

from press_core.call import AttentionCall
from press_core.model.sites import AttentionSite
from press_core.scope import Press, require


@dataclass
class Nested(Press):
    """A press that leaves part of its work to others, which it never changes."""

    @property
    def inner(self) -> Iterator[Press]:
        """The presses in its fields."""
        for value in _field_values(self):
            for press in value if isinstance(value, (list, tuple)) else [value]:
                if isinstance(press, Press):
                    yield press

    @property
    def uses_queries(self) -> bool:  # type: ignore[override]
        return any(press.uses_queries for press in self.inner)

    @property
    def uses_rope(self) -> bool:  # type: ignore[override]
        return any(press.uses_rope for press in self.inner)

    @property
    def scores_alone(self) -> bool:  # type: ignore[override]
        return all(press.scores_alone for press in self.inner)

    @property
    def scores_once(self) -> bool:  # type: ignore[override]
        return any(press.scores_once for press in self.inner)

    @property
    def decides_per_row(self) -> bool:  # type: ignore[override]
        return any(press.decides_per_row for press in self.inner)

    @property
    def needs_attention(self) -> bool:  # type: ignore[override]
        return any(press.needs_attention for press in self.inner)

    def resolve(self, model: nn.Module) -> Press:
        resolved: dict[str, Any] = {}
        for field, value in zip(fields(self), _field_values(self), strict=True):
            if isinstance(value, Press):
                resolved[field.name] = value.resolve(model)
            elif isinstance(value, (list, tuple)) and any(isinstance(x, Press) for x in value):
                resolved[field.name] = [press.resolve(model) for press in value]
        return replace(self, **resolved)

    def check_site(self, site: AttentionSite) -> None:
        super().check_site(site)
        for press in self.inner:
            press.check_site(site)


def _field_values(press: Press) -> list[object]:
    return [getattr(press, field.name) for field in fields(press)]


@dataclass
class Wrapper(Nested):
    """A press around one other.

    Attributes:
        press: the press that it wraps, of the same mechanism.
    """

    press: Press

    def validate(self) -> None:
        super().validate()
        check_inner(self, "press", self.press)
        require(self, "press", *self.takes(self.press))

    def takes(self, press: Press) -> tuple[bool, str]:
        """Whether `press` can be wrapped, and what can be."""
        return takes_scorer(press)

    @property
    def compression_ratio(self) -> float:
        """Share of the tokens that the wrapped press is told to evict."""
        return self.press.compression_ratio  # type: ignore[attr-defined]

    @compression_ratio.setter
    def compression_ratio(self, ratio: float) -> None:
        self.press = self.press.with_ratio(ratio)

    def acts_on(self, length: int) -> bool:
        return self.press.acts_on(length)

    def budget(self, call: AttentionCall) -> int:
        return self.press.budget(call)

    def leaves_whole(self, call: AttentionCall) -> bool:
        """Whether there is nothing to choose."""
        return self.budget(call) >= call.length or not self.acts_on(call.length)

    def with_ratio(self, compression_ratio: float) -> Press:
        return replace(self, press=self.press.with_ratio(compression_ratio))


def check_inner(outer: Press, field: str, inner: object) -> None:
    """Refuse a field that is not a valid press of the same mechanism.

    Raises:
        HyperparameterError: naming the field.
    """
    same = isinstance(inner, Press) and inner.mechanism == outer.mechanism
    require(outer, field, same, f"a press installed by {outer.mechanism}, as this one is")
    assert isinstance(inner, Press)
    inner.validate()


def takes_scorer(press: Press) -> tuple[bool, str]:
    """Whether a press gives each token a score, and a word for those that do."""
    return press.scores_tokens, "a press that scores tokens (a ScorerPress or CriticalKVPress)"


def takes_even(press: Press) -> tuple[bool, str]:
    """Whether a press evicts tokens in the prefill, as many of each head."""
    fits = press.evicts == "tokens" and press.acts_in_prefill and not press.acts_in_decoding
    return fits, "a press that evicts as many tokens of each head, after the prefill"
