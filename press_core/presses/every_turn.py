"""Every turn of a conversation pruned again."""

from __future__ import annotations

from dataclasses import dataclass, replace

from press_core.call import AttentionCall
from press_core.composite import Wrapper, takes_scorer
from press_core.eviction import Eviction
from press_core.press import Evicts, Needs, Phase, Press, require


@dataclass
class EveryTurn(Wrapper):
    """Bounds the cache of a conversation: every turn is pruned, together with what is left before.

    A turn is a forward of several tokens: the context, and later each question. Once its attention
    has run, each KV head that holds more than `target_size` tokens keeps the best of them, those
    of answers among them. What is decoded token by token is left until the next turn.

    Attributes:
        press: scores tokens, and can score them again later.
        target_size: tokens that each KV head keeps at most after a turn.
        hidden_states_buffer_size: of how many of the last tokens before a turn the hidden states
            and queries are kept for `press`, if it may ask for them.
    """

    target_size: int = 2048
    hidden_states_buffer_size: int = 256

    evicts = Evicts.TOKENS
    phases = Phase.PREFILL | Phase.DECODING

    def validate(self) -> None:
        super().validate()
        require(self, "target_size", self.target_size >= 1, "1 or more")
        fits = self.hidden_states_buffer_size >= 0
        require(self, "hidden_states_buffer_size", fits, "0 or more")

    def takes(self, press: Press) -> tuple[bool, str]:
        fits, allowed = takes_scorer(press)
        again = f"{allowed} and can score them again later"
        return fits and Needs.FORWARD not in press.needs, again

    def with_budget(self, tokens: int) -> Press:
        return replace(self, target_size=tokens)

    @property
    def asked_ratio(self) -> float:
        return 0.0

    @property
    def buffered_tokens(self) -> int:  # type: ignore[override]
        return self.hidden_states_buffer_size if self.press.reads_forwards else 0

    def is_due(self, n_steps: int, n_new: int) -> bool:
        return n_new > 1

    def budget(self, call: AttentionCall) -> int:
        return self.target_size

    def decide(self, call: AttentionCall) -> Eviction:
        if call.length <= self.target_size:
            return Eviction.nothing(call)
        return self.press.evict(call.with_budget(self.target_size))
