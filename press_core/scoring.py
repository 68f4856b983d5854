"""Base classes of presses that score tokens, have a size or budget, wrap presses, or only watch."""

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass
from math import isnan
from typing import Any, ClassVar

import torch
from torch import Tensor

from press_core.budget import Amount, Tokens, is_whole_number, n_kept
from press_core.call import AttentionCall
from press_core.errors import PressError
from press_core.eviction import Eviction, described, memory_of
from press_core.fields import limited
from press_core.press import MeasuredPress, Press, RatioPress
from press_core.select import is_dense, top_positions, upcast
from press_core.traits import Evicts, Needs, Phase


class SizedPress(MeasuredPress):
    """A press with a field for the number of tokens to keep, instead of a share to evict.

    Attributes:
        size_field: class attribute; name of that field.
    """

    size_field: ClassVar[str] = "target_size"

    @property
    def amount(self) -> Amount:
        return Tokens(getattr(self, self.size_field))

    def with_budget(self, tokens: int) -> Press:
        return self.changed(**{self.size_field: tokens})


class BudgetPress(Press):
    """A press that evicts nothing from a call within its budget."""

    def compress(self, call: AttentionCall) -> Eviction:
        n: Any = self.budget(call)
        if not is_whole_number(n, 1):
            raise PressError(
                f"{type(self).__name__} was given a budget of {n!r:.80}; `budget(call)` returns a "
                "whole number of tokens, 1 or more"
            )
        return Eviction.nothing(call) if int(n) >= call.length else self.spend(call, int(n))

    def keeps(self, length: int) -> int:  # the presses in its fields spend its budget
        return n_kept(length, self.amount) if self.is_long_enough(length) else length

    @abstractmethod
    def spend(self, call: AttentionCall, n: int) -> Eviction:
        """What to keep of `call` with a budget of `n` tokens per KV head, `n < S`."""


class TokenScorer(BudgetPress):
    """A press that gives each token a score and keeps the best.

    Attributes:
        independent: class attribute; whether a token's score does not depend on other tokens, as
            is assumed of a user's class.
    """

    @property
    def independent(self) -> bool:
        return True

    def score(self, call: AttentionCall) -> Tensor:
        """The formula: scores `(B, H_kv, S)`, floating point, higher is better."""
        raise NotImplementedError(f"{type(self).__name__} does not implement score")

    def spend(self, call: AttentionCall, n: int) -> Eviction:
        return Eviction.keep(call, top_positions(self.checked_scores(call), n))

    def checked_scores(self, call: AttentionCall) -> Tensor:
        """The result of `score`, checked for shape, dtype and NaN, in float32 or better.

        Raises:
            PressError: with the press and what its `score` should return.
        """
        with torch.no_grad():  # scores only rank tokens
            scores: Any = self.score(call)
        expected, name = call.keys.shape[:3], type(self).__name__
        fits = is_dense(scores, call.keys) and scores.shape == expected
        if not (fits and scores.is_floating_point() and scores.itemsize > 1):
            raise PressError(
                f"{name}.score returned {described(scores)}; scores are a floating-point tensor "
                f"(B, H_kv, S) of 16 bits or more, here {tuple(expected)} on {call.keys.device}"
            )
        # NaN would rank highest. Checking the sum first takes a third of the time.
        if isnan(scores.detach().sum()) and bool(scores.isnan().any()):
            raise PressError(
                f"{name}.score returned NaN for some tokens of {call.site.name}, which cannot be "
                "ranked; use -inf to evict a token first, inf to evict it last"
            )
        return upcast(scores)


class RatioScorer(RatioPress, TokenScorer):
    """Keeps, per KV head, the `n = max(1, int(S * (1 - compression_ratio)))` best-scored tokens."""

    independent = False


# ---- presses made of presses ---------------------------------------------------------------------

READS = Needs.QUERIES | Needs.FORWARD | Needs.HIDDEN_STATES
"""What a press may read of the forwards that cached its tokens, besides keys and values."""


def is_scorer(press: Press) -> bool:
    """Whether a press gives each token a score."""
    return isinstance(press, TokenScorer)


def scores_again(press: Press) -> bool:
    """Whether a press scores tokens, and can score the same tokens again in later forwards."""
    return is_scorer(press) and not press.all_needs & Needs.FORWARD


SCORER = is_scorer, "a press that scores tokens (a ScorerPress or CriticalKVPress)"
SCORER_AGAIN = scores_again, f"{SCORER[1]} and can score them again later"
"""Arguments of `limited` for a field that holds a press: the check and its description."""


class Composition(MeasuredPress):
    """A press that uses other presses, which it never modifies."""

    @property
    def buffered_tokens(self) -> int:
        """The field `hidden_states_buffer_size`, if a part reads hidden states or queries."""
        reads = any(part.all_needs & READS for part in self.parts)
        own: int = vars(self).get("hidden_states_buffer_size", 0) if reads else 0
        return max(own, super().buffered_tokens)

    def remember(self, call: AttentionCall) -> Mapping[str, Tensor]:
        """Of all parts, whenever they act by themselves: it asks them in its own phases."""
        return memory_of(self.parts, call)


@dataclass
class Around(Composition):
    """A press that wraps another.

    Attributes:
        press: the wrapped press, of the same mechanism.
    """

    press: Press = limited(MISSING, *SCORER)

    @property
    def scorer(self) -> TokenScorer:
        """The wrapped press, for wrappers whose field only holds scorers."""
        assert isinstance(self.press, TokenScorer)
        return self.press


class Wrapper(Around):
    """A press that wraps another and uses its budget."""

    @property
    def amount(self) -> Amount:
        return self.press.amount

    def budget(self, call: AttentionCall) -> int:
        return self.press.budget(call)

    def with_ratio(self, compression_ratio: Amount) -> Press:
        return self.changed(press=self.press.with_ratio(compression_ratio))


# ---- watching ------------------------------------------------------------------------------------


@dataclass
class Collecting(Press):
    """Passes the call of every attention module to a function, and evicts nothing.

    Attributes:
        see: the function; it gets a call for each group of equally padded rows, without padding.
        reads: what the calls have to contain.
        phases: the forwards to pass on: of prefills, or of decoding.
        only_thread: the thread whose forwards to pass on; None: all.
    """

    see: Callable[[AttentionCall], Any]
    reads: Needs = Needs.QUERIES
    phases: Phase = Phase.PREFILL
    only_thread: int | None = None

    evicts = Evicts.NOTHING

    @property
    def needs(self) -> Needs:
        return self.reads | Needs.HIDDEN_STATES

    def compress(self, call: AttentionCall) -> Eviction:
        self.see(call)
        return Eviction.nothing(call)
