"""What queries to come will look at: expected attention (arXiv 2510.00636), CAPKV (2604.25975)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import normalize

from press_core.call import AttentionCall
from press_core.fields import count, number
from press_core.scoring import RatioScorer
from press_core.select import upcast, with_ends
from press_core.tiles import Scratch, rows_at_once
from press_core.traits import Needs


@dataclass
class ExpectedAttention(RatioScorer):
    """Keeps what Gaussian future queries would attend to (Devoto et al., arXiv 2510.00636).

    Contexts of at most `n_sink` tokens are left whole.

    Attributes:
        n_future_positions: how many coming positions the rotation is averaged over.
        n_sink: first tokens, left out of the statistics and always kept.
        use_covariance: whether the covariance of the queries counts, or their mean alone.
        use_vnorm: whether scores are weighted by the norm of the values.
        epsilon: added before that weighting.
    """

    n_future_positions: int = count(512, 1)
    n_sink: int = count(4)
    use_covariance: bool = True
    use_vnorm: bool = True
    epsilon: float = number(0.0, 0)

    needs = Needs.QUERIES | Needs.ROPE
    whole_up_to = ("n_sink",)

    def statistics(self, call: AttentionCall) -> tuple[Tensor, Tensor]:
        """Mean `(B or 1, H, d)` and covariance `(B or 1, H, d, d)` of the queries before RoPE."""
        return query_statistics(call, self.n_sink)

    def score(self, call: AttentionCall) -> Tensor:
        """Attention expected from queries of these statistics at the coming positions."""
        mean, covariance = self.statistics(call)
        mean, rotation = at_coming_positions(call, mean, self.n_future_positions)
        keys = upcast(call.keys[:, :, self.n_sink :])
        n_kv, d = keys.shape[1], keys.shape[-1]
        logits = mean.unflatten(1, (n_kv, -1)) @ keys.mT / d**0.5  # (B, H_kv, G, S)
        if self.use_covariance:
            covariance = (rotation @ covariance @ rotation.mT).unflatten(1, (n_kv, -1))
            logits = logits + _spread(keys, covariance) / (2 * d)
        scores = logits.softmax(dim=-1).mean(dim=2)
        if self.use_vnorm:
            norms = upcast(call.values[:, :, self.n_sink :]).norm(dim=-1)
            scores = (scores + self.epsilon) * norms
        return with_ends(scores, first=self.n_sink)


def query_statistics(call: AttentionCall, n_sink: int) -> tuple[Tensor, Tensor]:
    """Mean `(B, H, d)` and covariance `(B, H, d, d)` of the queries before RoPE, sinks left out."""
    sizes, means, scatters = [], [], []
    for queries in query_blocks(call, n_sink):
        mean = queries.mean(dim=2, keepdim=True)
        centred = queries - mean
        sizes.append(queries.shape[2])
        means.append(mean)
        scatters.append(centred.mT @ centred)
    weights = torch.tensor(sizes, dtype=means[0].dtype, device=means[0].device)[:, None]
    by_block = torch.cat(means, dim=2)  # (B, H, blocks, d)
    mean = (by_block * weights).sum(dim=2, keepdim=True) / sum(sizes)
    between = (by_block - mean).mT @ ((by_block - mean) * weights)
    scatter = torch.stack(scatters).sum(dim=0) + between
    return mean.squeeze(2), scatter / sum(sizes)


def query_blocks(call: AttentionCall, n_sink: int, block: int = 1024) -> Iterator[Tensor]:
    """Queries before RoPE without the sinks', `(B, H, rows, d)`."""
    if call.at.tokens is None and call.hidden_states.shape[1] == call.length:
        for start in range(n_sink, call.length, block):
            yield call.chunk(start, start + block).queries_before_rope()
        return
    queries = call.queries_before_rope()
    yield queries[:, :, max(0, n_sink - call.length + queries.shape[2]) :]


def at_coming_positions(call: AttentionCall, mean: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """The mean query `(B or 1, H, d)` at the next `n` positions, and their mean rotation."""
    assert call.site.rotary is not None
    rotation = call.site.rotary.average(mean, call.next_position, n)
    return (mean.unsqueeze(-2) @ rotation.mT).squeeze(-2), rotation


@torch.no_grad()
def _spread(keys: Tensor, covariance: Tensor) -> Tensor:
    """`kᵀΣk` of keys `(B, H_kv, S, d)` and `Σ` `(B, H_kv, G, d, d)`: `(B, H_kv, G, S)`.

    Some keys at a time: what stands between is `G` times as large as the keys.
    """
    n_groups, d = covariance.shape[2], covariance.shape[-1]
    side_by_side = covariance.transpose(2, 3).flatten(3)  # (B, H_kv, d, G * d)
    space, n_rows = Scratch(keys), rows_at_once(keys, keys[:, :, 0].numel() * n_groups)

    def spread(part: Tensor) -> Tensor:
        product = space.of(*part.shape[:3], n_groups * d)
        torch.matmul(part, side_by_side, out=product)
        return product.unflatten(-1, (n_groups, d)).mul_(part.unsqueeze(3)).sum(dim=-1)

    return torch.cat([spread(part) for part in keys.split(n_rows, dim=2)], dim=2).mT


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
    n_future_positions: int = count(512, 1)
    n_sink: int = count(4)
    epsilon: float = number(1e-6, 0)

    needs = Needs.QUERIES | Needs.ROPE
    whole_up_to = ("n_sink",)

    def score(self, call: AttentionCall) -> Tensor:
        keys, values = (upcast(x[:, :, self.n_sink :]) for x in (call.keys, call.values))
        blocks = list(query_blocks(call, self.n_sink))
        total = torch.stack([block.sum(dim=2) for block in blocks]).sum(dim=0)
        mean = total / sum(block.shape[2] for block in blocks)
        anchor, _ = at_coming_positions(call, mean, self.n_future_positions)
        directions = normalize(anchor.unflatten(1, (keys.shape[1], -1)), dim=-1)
        logits = self.tau * (directions @ normalize(keys, dim=-1).mT)  # (B, H_kv, G, S)
        weights = (logits - logits.amax(dim=-1, keepdim=True)).exp()
        scores = weighted_leverage(values, weights, self.epsilon).mean(dim=2)
        return with_ends(scores, first=self.n_sink)


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
        root, _ = torch.linalg.cholesky_ex(identity + weighted.mT @ values)  # NaN stays NaN
        solved = torch.linalg.solve_triangular(root, values.mT, upper=False)  # (B, H_kv, d, S)
        leverages.append(of_head * solved.square().sum(dim=-2))
    return torch.stack(leverages, dim=2)
