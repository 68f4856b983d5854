"""Presses made of presses: what they need, evict and do follows from their parts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import reduce
from operator import or_
from typing import Any, ClassVar

from torch import Tensor, nn

from press_core.call import AttentionCall
from press_core.model.forward import AttentionForward, DecoderForward
from press_core.model.sites import AttentionSite
from press_core.press import Evicts, Needs, Phase, Press, TokenScorer, require
from press_core.scope import ScopeState
from press_core.select import Amount, Tokens


@dataclass
class CompositePress(Press):
    """A press that leaves part of its work to others, which it never changes.

    Attributes:
        own_needs: class attribute; what it reads of the model beside what they read.
    """

    own_needs: ClassVar[Needs] = Needs.NOTHING

    @property
    def children(self) -> Iterator[Press]:
        """The presses in its fields."""
        for value in _field_values(self):
            for press in value if isinstance(value, (list, tuple)) else [value]:
                if isinstance(press, Press):
                    yield press

    @property
    def reads_states(self) -> bool:  # type: ignore[override]
        return any(press.reads_states for press in self.children)

    @property
    def reads_hidden_states(self) -> bool:
        return super().reads_hidden_states or any(
            press.reads_hidden_states for press in self.children
        )

    @property
    def alike_per_head(self) -> bool:  # type: ignore[override]
        return all(press.alike_per_head for press in self.children)

    @property
    def needs(self) -> Needs:  # type: ignore[override]
        return reduce(or_, (press.needs for press in self.children), self.own_needs)

    @property
    def phases(self) -> Phase:  # type: ignore[override]
        return reduce(or_, (press.phases for press in self.children), Phase.NEVER)

    @property
    def row_by_row(self) -> bool:  # type: ignore[override]
        return any(press.row_by_row for press in self.children)

    @property
    def rerotates(self) -> bool:  # type: ignore[override]
        return any(press.rerotates for press in self.children)

    @property
    def remembers(self) -> bool:  # type: ignore[override]
        return any(press.remembers for press in self.children)

    def remember(self, call: AttentionCall) -> Mapping[str, Tensor]:
        phase = Phase.DECODING if call.decoding else Phase.PREFILL
        acting = [press for press in self.children if phase in press.phases and press.remembers]
        return {name: x for press in acting for name, x in press.remember(call).items()}

    @property
    def compression_ratio(self) -> float:
        """Share of the tokens that was evicted in the scope opened last; before, what is asked."""
        if self.last_scope is not None and self.last_scope.seen:
            return self.evicted_ratio
        return self.asked_ratio

    @compression_ratio.setter
    def compression_ratio(self, ratio: Amount) -> None:
        told = self.with_ratio(ratio)
        vars(self).update({field.name: getattr(told, field.name) for field in fields(self)})
        vars(self).pop("_last_scope", None)

    @property
    def asked_ratio(self) -> float:
        """Share of the tokens that the parts are told to evict; 0 where they are not told one."""
        return 0.0

    def evicts_of(self, length: int) -> bool:
        return any(press.evicts_of(length) for press in self.children)

    def bind(self, model: nn.Module) -> Press:
        bound: dict[str, Any] = {}
        for field, value in zip(fields(self), _field_values(self), strict=True):
            if isinstance(value, Press):
                bound[field.name] = value.bind(model)
            elif isinstance(value, (list, tuple)) and any(isinstance(x, Press) for x in value):
                bound[field.name] = [press.bind(model) for press in value]
        return replace(self, **bound)

    def post_init_from_model(self, model: nn.Module) -> None:
        for press in self.children:
            press.post_init_from_model(model)

    def check_site(self, site: AttentionSite) -> None:
        super().check_site(site)
        for press in self.children:
            press.check_site(site)

    def before_attention(self, scope: ScopeState, forward: AttentionForward) -> None:
        for press in self.children:
            press.before_attention(scope, forward)

    def before_decoder(self, scope: ScopeState, forward: DecoderForward) -> DecoderForward:
        for press in self.children:
            forward = press.before_decoder(scope, forward)
        return forward

    def after_decoder(self, scope: ScopeState, forward: DecoderForward, output: Any) -> None:
        for press in self.children:
            press.after_decoder(scope, forward, output)


def _field_values(press: Press) -> list[object]:
    return [getattr(press, field.name) for field in fields(press)]


@dataclass
class Wrapper(CompositePress):
    """A press around one other.

    Attributes:
        press: the press that it wraps, of the same mechanism.
    """

    press: Press

    def validate(self) -> None:
        super().validate()
        check_child(self, "press", self.press)
        require(self, "press", *self.takes(self.press))

    def takes(self, press: Press) -> tuple[bool, str]:
        """Whether `press` can be wrapped, and what can be."""
        return takes_scorer(press)

    @property
    def asked_ratio(self) -> float:
        return asked_ratio(self.press)

    @property
    def amount(self) -> Amount:
        return self.press.amount

    @property
    def scorer(self) -> TokenScorer:
        """The wrapped press, where it has to score tokens."""
        assert isinstance(self.press, TokenScorer)
        return self.press

    def is_long_enough(self, length: int) -> bool:
        return self.press.is_long_enough(length)

    def budget(self, call: AttentionCall) -> int:
        return self.press.budget(call)

    def with_ratio(self, compression_ratio: Amount) -> Press:
        return replace(self, press=self.press.with_ratio(compression_ratio))


def asked_ratio(press: Press) -> float:
    """Share of the tokens that a press is told to evict; 0 where it is not told one."""
    if isinstance(press, CompositePress):
        return press.asked_ratio
    ratio = getattr(press, "compression_ratio", 0.0)
    return 0.0 if isinstance(ratio, Tokens) else float(ratio)


def check_child(outer: Press, field: str, child: object) -> None:
    """Refuse a field that is not a valid press of the same mechanism.

    Raises:
        HyperparameterError: naming the field.
    """
    same = isinstance(child, Press) and child.mechanism == outer.mechanism
    require(outer, field, same, f"a press installed by {outer.mechanism}, as this one is")
    assert isinstance(child, Press)
    child.validate()


def takes_scorer(press: Press) -> tuple[bool, str]:
    """Whether a press gives each token a score, and a word for those that do."""
    scores = isinstance(press, TokenScorer)
    return scores, "a press that scores tokens (a ScorerPress or CriticalKVPress)"


def acts_in_prefill_only(press: Press) -> bool:
    """Whether a press acts around the attention forwards of a prefill, and at no other time."""
    return press.phases & ~Phase.DECODER == Phase.PREFILL


def takes_even(press: Press) -> tuple[bool, str]:
    """Whether a press evicts tokens in the prefill, as many of each head."""
    fits = press.evicts is Evicts.TOKENS and acts_in_prefill_only(press)
    return fits, "a press that evicts as many tokens of each head, after the prefill"
