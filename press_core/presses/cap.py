"""CAPKV (arXiv 2604.25975): the values that carry most of what queries read."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import normalize, pad

from press_core.call import AttentionCall
from press_core.press import Needs, RatioScorer, require
from press_core.presses.expected_attention import query_blocks
from press_core.select import leading, protect, upcast


@dataclass
class Cap(RatioScorer):
    """Keeps values of high weighted leverage, weighed by their keys' alignment (2604.25975).

    `w_i = exp(tau * cos(k_i, a) - max)` with `a` the mean query at the positions to come, and
    `A = I + sum (w_i + epsilon) v_i v_iᵀ`; the score is `w_i v_iᵀ A⁻¹ v_i`, mean over the group.
    Contexts of at most `n_sink` tokens are left whole.

    Attributes:
        tau: how sharply keys are weighed by their direction.
        n_future_positions: how many coming positions the rotation is averaged over.
        n_sink: first tokens, left out of the mean query and always kept.
        epsilon: added to the weights in `A`.
    """

    tau: float = 5.0
    n_future_positions: int = 512
    n_sink: int = 4
    epsilon: float = 1e-6

    needs = Needs.QUERIES | Needs.ROPE

    def validate(self) -> None:
        super().validate()
        require(self, "n_future_positions", self.n_future_positions >= 1, "1 or more")
        require(self, "n_sink", self.n_sink >= 0, "a number of tokens, 0 or more")
        require(self, "epsilon", self.epsilon >= 0, "0 or more")

    def is_long_enough(self, length: int) -> bool:
        return length > self.n_sink

    def score_tokens(self, call: AttentionCall) -> Tensor:
        anchor = future_mean_query(call, self.n_sink, self.n_future_positions)
        keys, values = (upcast(x[:, :, self.n_sink :]) for x in (call.keys, call.values))
        weights = alignment(keys, anchor, self.tau)
        scores = weighted_leverage(values, weights, self.epsilon).mean(dim=2)
        return protect(pad(scores, (self.n_sink, 0)), leading(call.keys, self.n_sink))


def future_mean_query(call: AttentionCall, n_sink: int, n_positions: int) -> Tensor:
    """The mean query, sinks left out, where the next tokens will stand: `(B, H, d)`."""
    assert call.site.rotary is not None
    blocks = list(query_blocks(call, n_sink))
    total = torch.stack([block.sum(dim=2) for block in blocks]).sum(dim=0)
    mean = total / sum(block.shape[2] for block in blocks)
    rotation = call.site.rotary.average(mean, call.next_position, n_positions)
    return (mean.unsqueeze(-2) @ rotation.mT).squeeze(-2)


def alignment(keys: Tensor, anchor: Tensor, tau: float) -> Tensor:
    """`exp(tau * cos(k, a) - max)` of keys `(B, H_kv, S, d)` and `(B, H, d)`: `(B, H_kv, G, S)`."""
    directions = normalize(anchor.unflatten(1, (keys.shape[1], -1)), dim=-1)
    logits = tau * (directions @ normalize(keys, dim=-1).mT)
    return (logits - logits.amax(dim=-1, keepdim=True)).exp()


def weighted_leverage(values: Tensor, weights: Tensor, epsilon: float) -> Tensor:
    """`w_i v_iᵀ (I + sum (w_i + epsilon) v_i v_iᵀ)⁻¹ v_i`, `(B, H_kv, G, S)`.

    Args:
        values: `(B, H_kv, S, d)`.
        weights: `(B, H_kv, G, S)`.
    """
    leverages = []
    for of_head in weights.unbind(dim=2):  # one at a time: each needs weighted values of its own
        weighted = values * (of_head + epsilon).unsqueeze(-1)
        identity = torch.eye(values.shape[-1], dtype=values.dtype, device=values.device)
        root = torch.linalg.cholesky(identity + weighted.mT @ values)
        solved = torch.linalg.solve_triangular(root, values.mT, upper=False)  # (B, H_kv, d, S)
        leverages.append(of_head * solved.square().sum(dim=-2))
    return torch.stack(leverages, dim=2)
