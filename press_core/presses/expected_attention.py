"""Expected attention (Devoto et al., arXiv 2510.00636): what future queries will look at."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from press_core.blocks import Space, rows_at_once
from press_core.call import AttentionCall
from press_core.press import Needs, RatioScorer, require
from press_core.select import leading, protect, upcast


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

    n_future_positions: int = 512
    n_sink: int = 4
    use_covariance: bool = True
    use_vnorm: bool = True
    epsilon: float = 0.0

    needs = Needs.QUERIES | Needs.ROPE

    def validate(self) -> None:
        super().validate()
        require(self, "n_future_positions", self.n_future_positions >= 1, "1 or more")
        require(self, "n_sink", self.n_sink >= 0, "a number of tokens, 0 or more")
        require(self, "epsilon", self.epsilon >= 0, "0 or more")

    def is_long_enough(self, length: int) -> bool:
        return length > self.n_sink

    def score_tokens(self, call: AttentionCall) -> Tensor:
        return expected_attention_scores(call, *query_statistics(call, self.n_sink), self)


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
    if call.tokens is None and call.hidden_states.shape[1] == call.length:
        for start in range(n_sink, call.length, block):
            yield call.chunk(start, start + block).queries_before_rope()
        return
    queries = call.queries_before_rope()
    yield queries[:, :, max(0, n_sink - call.length + queries.shape[2]) :]


def expected_attention_scores(
    call: AttentionCall, mean: Tensor, covariance: Tensor, press: ExpectedAttention
) -> Tensor:
    """Attention expected from queries of the given statistics at the coming positions.

    Args:
        mean: `(B or 1, H, d)`, of the queries before RoPE.
        covariance: `(B or 1, H, d, d)`.

    Returns:
        `(B, H_kv, S)`, float32; the sinks are protected.
    """
    assert call.site.rotary is not None
    rotation = call.site.rotary.average(mean, call.next_position, press.n_future_positions)
    mean = (mean.unsqueeze(-2) @ rotation.mT).squeeze(-2)  # (B, H, d)
    keys = upcast(call.keys[:, :, press.n_sink :])
    n_kv, d = keys.shape[1], keys.shape[-1]
    logits = mean.unflatten(1, (n_kv, -1)) @ keys.mT / d**0.5  # (B, H_kv, G, S)
    if press.use_covariance:
        covariance = (rotation @ covariance @ rotation.mT).unflatten(1, (n_kv, -1))
        logits = logits + _spread(keys, covariance) / (2 * d)
    scores = logits.softmax(dim=-1).mean(dim=2)
    if press.use_vnorm:
        scores = (scores + press.epsilon) * upcast(call.values[:, :, press.n_sink :]).norm(dim=-1)
    return protect(pad(scores, (press.n_sink, 0)), leading(call.keys, press.n_sink))


@torch.no_grad()
def _spread(keys: Tensor, covariance: Tensor) -> Tensor:
    """`kᵀΣk` of keys `(B, H_kv, S, d)` and `Σ` `(B, H_kv, G, d, d)`: `(B, H_kv, G, S)`.

    Some keys at a time: what stands between is `G` times as large as the keys.
    """
    n_groups, d = covariance.shape[2], covariance.shape[-1]
    side_by_side = covariance.transpose(2, 3).flatten(3)  # (B, H_kv, d, G * d)
    space, n_rows = Space(keys), rows_at_once(keys, keys[:, :, 0].numel() * n_groups)

    def spread(part: Tensor) -> Tensor:
        product = space.of(*part.shape[:3], n_groups * d)
        torch.matmul(part, side_by_side, out=product)
        return product.unflatten(-1, (n_groups, d)).mul_(part.unsqueeze(3)).sum(dim=-1)

    return torch.cat([spread(part) for part in keys.split(n_rows, dim=2)], dim=2).mT
