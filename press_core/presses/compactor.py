"""Compactor (Chari and Van Durme, arXiv 2507.08143): leverage and non-causal attention."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.nn.functional import pad

from press_core.call import AttentionCall
from press_core.press import Needs, RatioScorer, require
from press_core.presses.leverage_score import leverage_scores
from press_core.presses.non_causal_attn import non_causal_scores, queries_of_all_keys
from press_core.select import leading, protect, trailing


@dataclass
class Compactor(RatioScorer):
    """Keeps keys of high leverage and much non-causal attention (arXiv 2507.08143).

    Contexts of at most `sink_size_start + sink_size_end` tokens are left whole.

    Attributes:
        sink_size_start, sink_size_end: first and last tokens, left out of all statistics and
            always kept.
        chunk_size: tokens that attend to each other; see `NonCausalAttn`.
        sketch_dimension: channels that are left of each key; see `LeverageScore`.
        blending: weight of the leverage beside the attention; None: the share of tokens evicted.
    """

    sink_size_start: int = 8
    sink_size_end: int = 4
    chunk_size: int = 256
    sketch_dimension: int = 48
    blending: float | None = None

    needs = Needs.QUERIES

    def validate(self) -> None:
        super().validate()
        for name in ("sink_size_start", "sink_size_end"):
            require(self, name, getattr(self, name) >= 0, "a number of tokens, 0 or more")
        require(self, "chunk_size", self.chunk_size >= 1, "a number of tokens, 1 or more")
        require(self, "sketch_dimension", self.sketch_dimension >= 1, "1 or more")
        weight = self.blending is None or self.blending >= 0
        require(self, "blending", weight, "None or a number, 0 or more")

    def is_long_enough(self, length: int) -> bool:
        return length > self.sink_size_start + self.sink_size_end

    def score_tokens(self, call: AttentionCall) -> Tensor:
        return compactor_scores(call, self)


def compactor_scores(call: AttentionCall, press: Compactor) -> Tensor:
    """Leverage and non-causal attention of the tokens between the two ends, blended.

    Returns:
        `(B, H_kv, S)`, float32; both ends are protected.
    """
    first, last = press.sink_size_start, press.sink_size_end
    middle = slice(first, call.length - last)
    keys, values = call.keys[:, :, middle], call.values[:, :, middle]
    queries = queries_of_all_keys(call)[:, :, middle]
    leverage = leverage_scores(
        call.keys_before_rope()[:, :, middle], press.sketch_dimension, call.site.layer_idx
    )
    attention = non_causal_scores(queries, keys, values, press.chunk_size)
    scores = _blending(call, press) * leverage + attention
    ends = leading(call.keys, first) | trailing(call.keys, last)
    return protect(pad(scores, (first, last)), ends)


def _blending(call: AttentionCall, press: Compactor) -> float:
    if press.blending is not None:
        return press.blending
    return press.ratio_of(call.length) if call.budget is None else 1 - call.budget / call.length
