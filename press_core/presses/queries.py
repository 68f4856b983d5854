"""Presses that score keys by the attention of queries: observed, of a window, or expected.

Observed attention uses all queries of the context, SnapKV and its relatives those of the
observation window (the last tokens). Expected attention (arXiv 2510.00636) and CAPKV (2604.25975)
estimate future queries.

All presses here have the field `compression_ratio`: the share of the tokens that each KV head
evicts, in [0, 1), or the `Tokens` that it keeps.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf, isfinite

import torch
from torch import Tensor, cdist
from torch.nn.functional import avg_pool1d, max_pool1d, normalize

from press_core.attention import mean_attention, received_attention, window_attention
from press_core.call import AttentionCall
from press_core.fields import count, limited, number, odd, share
from press_core.presses.keys import ridge_root
from press_core.scoring import RatioScorer
from press_core.select import protect, trailing, upcast, with_ends
from press_core.tiles import rows_at_once
from press_core.traits import Needs


class ObservedAttention(RatioScorer):
    """Keeps the keys that received most attention during prefill (after H2O, arXiv 2306.14048).

    The score is the mean attention that a key received from the queries that can see it, averaged
    over the GQA group. Weights returned by the attention implementation (eager) are used; otherwise
    they are computed from the exact queries and keys, block by block, in O(S) extra memory.
    """

    needs = Needs.QUERIES

    def score(self, call: AttentionCall) -> Tensor:
        """Mean attention that each key received from the queries that can see it."""
        n_queries = call.length if call.at.tokens is not None else call.hidden_states.shape[1]
        observers = torch.arange(call.length, 0, -1, device=call.keys.device).clamp(max=n_queries)
        earlier = call.bidirectional_of(call.length)  # tokens of an image before it also see it
        observers = observers if earlier is None else observers + earlier.sum(dim=2)
        return received_attention(call) / observers


@dataclass
class WindowScorer(RatioScorer):
    """A press that scores tokens by the queries of an observation window, which is always kept."""

    window_size: int = count(64, 1)
    kernel_size: int = odd(5)

    needs = Needs.QUERIES
    whole_up_to = ("window_size",)

    def pooled(self, scores: Tensor) -> Tensor:
        """Scores `(B, H_kv, m)` average-pooled over neighbouring keys, in the same shape."""
        return avg_pool1d(scores, self.kernel_size, stride=1, padding=self.kernel_size // 2)


class SnapKV(WindowScorer):
    """Keeps the keys that the last queries attend to most (Li et al., arXiv 2404.14469).

    The score is the mean attention that a key receives from the observation window, averaged over
    the GQA group and pooled over neighbouring keys. Contexts of at most `window_size` tokens are
    not pruned.

    Attributes:
        window_size: number of last tokens that form the observation window; always kept.
        kernel_size: width in tokens of the average pooling over neighbouring keys; odd.
    """

    def score(self, call: AttentionCall) -> Tensor:
        attention = mean_attention(call, call.queries(self.window_size))
        pooled = self.pooled(attention[..., : call.length - self.window_size])
        return with_ends(pooled, last=self.window_size)


@dataclass
class PyramidKV(SnapKV):
    """Keeps what SnapKV keeps, with budgets that shrink from layer to layer (2406.02069).

    Budgets fall linearly from the first layer (`2m - m / beta` tokens) to the last (`m / beta`),
    with mean `m = S * (1 - compression_ratio)`. A first budget above `S - window_size` is clipped
    to that, and the last one raised to keep the mean. If the last one is then below `window_size`
    or above the first one, all layers keep `m` tokens. Contexts of at most `window_size` tokens are
    not pruned.

    Attributes:
        window_size: number of last tokens that form the observation window; always kept.
        kernel_size: width in tokens of the average pooling over neighbouring keys; odd.
        beta: steepness of the pyramid: the last layer keeps `1 / beta` of the mean budget.
    """

    beta: int = count(20, 1)

    def budget(self, call: AttentionCall) -> int:
        length, ratio, place = call.length, self.ratio_of(call), call.site.place
        if call.budget or ratio == 0 or not self.is_long_enough(length):
            return super().budget(call)
        mean = length * (1 - ratio)
        low = mean / self.beta
        high = 2 * mean - low
        if high > length - self.window_size:
            high = length - self.window_size
            low = 2 * mean - high
        if not length >= high >= low >= self.window_size:
            return max(1, round(mean))
        return round(high - place.depth * (high - low) / max(1, place.n_sites - 1))


class TOVA(RatioScorer):
    """Keeps the keys that the last query attends to most (Oren et al., arXiv 2401.06104).

    The score is the attention of the last query, averaged over all heads: every KV head keeps the
    same tokens. The last token is always kept.
    """

    needs = Needs.QUERIES

    def score(self, call: AttentionCall) -> Tensor:
        weights = mean_attention(call, call.queries(1)).mean(dim=1, keepdim=True)
        return protect(weights.expand(-1, call.keys.shape[1], -1), trailing(call.keys, 1))


# ---- DropKV --------------------------------------------------------------------------------------


@dataclass
class DropKV(WindowScorer):
    """Keeps the KV pairs whose removal would change the window's outputs most (DropKV).

    If pair `j` is removed and the softmax renormalized, output `o_i` changes by
    `p_ij / (1 - p_ij) * (o_i - v_j)`. The score is the squared norm of that, summed over the
    queries of the observation window, averaged over the GQA group and pooled over neighbouring
    keys. Scores are comparable across heads, so the press suits `AdaKVPress` too. Contexts of at
    most `window_size` tokens are not pruned. Paper: openreview MqfNzH3TVH.

    Attributes:
        window_size: number of last tokens that form the observation window; always kept.
        kernel_size: width in tokens of the average pooling over neighbouring keys; odd.
        epsilon: added to `1 - p_ij`; positive.
    """

    window_size: int = count(32, 1)
    kernel_size: int = odd(7)
    epsilon: float = limited(1e-6, lambda x: 0 < x < inf, "finite, and more than 0")

    def score(self, call: AttentionCall) -> Tensor:
        before = call.length - self.window_size
        weights = window_attention(call, self.window_size)  # (B, H_kv, G, w, S)
        values = upcast(call.values)
        outputs = weights @ values.unsqueeze(2)  # (B, H_kv, G, w, d)
        weights, outputs = weights[..., :before], outputs.flatten(2, 3)
        odds = (weights / (1 - weights + self.epsilon)).square()
        # Not as ‖v‖² - 2 v·o + ‖o‖²: a query that sees little but v has o close to v.
        exactly = "donot_use_mm_for_euclid_dist"
        distances = cdist(outputs, values[:, :, :before], compute_mode=exactly).view_as(weights)
        changes = (odds * distances.square()).sum(dim=3).mean(dim=2)
        return with_ends(self.pooled(changes), last=self.window_size)


# ---- R-KV ----------------------------------------------------------------------------------------


@dataclass
class RKV(WindowScorer):
    """Keeps keys that are important to the last queries and not redundant (R-KV, arXiv 2505.24133).

    The score is `mix_lambda * importance - (1 - mix_lambda) * redundancy`. Importance is the
    attention of the observation window: maximum over the GQA group, max-pooled over neighbouring
    keys, mean over the queries. Redundancy is the softmax of a key's mean cosine similarity to all
    keys. Made for reasoning models, to prune while they decode:
    `DecodingPress(RKVPress(), compression_interval=128, target_size=1024)`. Contexts of at most
    `window_size` tokens are not pruned.

    Attributes:
        window_size: number of last tokens that form the observation window; always kept.
        kernel_size: width in tokens of the max pooling over neighbouring keys; odd.
        mix_lambda: weight of the importance, in [0, 1].
        similarity_threshold: cosine in [-1, 1] above which two keys count as repetitions.
        n_retained: of the repetitions of a key, this many (the latest) are not penalized for it,
            so that the most recent occurrence is kept.
    """

    window_size: int = count(8, 1)
    kernel_size: int = odd(7)
    mix_lambda: float = share(0.1)
    similarity_threshold: float = number(0.5, -1, 1)
    n_retained: int = count(1)

    def score(self, call: AttentionCall) -> Tensor:
        before, width = call.length - self.window_size, self.kernel_size
        weights = window_attention(call, self.window_size)[..., :before].amax(dim=2)
        pooled = max_pool1d(weights.flatten(0, 1), width, stride=1, padding=width // 2)
        important = pooled.view_as(weights).mean(dim=2)  # over the queries: (B, H_kv, S - w)
        similar = similarity(call.keys, self.similarity_threshold, self.n_retained)
        redundant = similar.softmax(dim=-1)[..., :before]
        scores = self.mix_lambda * important - (1 - self.mix_lambda) * redundant
        return with_ends(scores, last=self.window_size)


def similarity(keys: Tensor, threshold: float, n_retained: int, block: int | None = None) -> Tensor:
    """Mean cosine similarity of each key to all keys, `(B, H_kv, S)` float32.

    Self-similarity counts as zero. For each key, so does its similarity to the `n_retained` latest
    keys above `threshold`: the most recent occurrence is not penalized for repeating it.

    Args:
        keys: `(B, H_kv, S, d)`.
        block: number of rows of the similarity matrix to compute at a time; None: chosen for the
            device.
    """
    directions = normalize(upcast(keys), dim=-1)
    total, length = torch.zeros_like(directions[..., 0]), keys.shape[2]
    order = torch.arange(1, length + 1, dtype=torch.int32, device=keys.device)
    step = block or rows_at_once(keys, keys[..., 0].numel())
    for start in range(0, length, step):
        cosines = directions[:, :, start : start + step] @ directions.mT
        cosines.diagonal(start, dim1=-2, dim2=-1).zero_()
        similar = (cosines > threshold) * order
        for _ in range(min(n_retained, length)):
            latest = similar.amax(dim=-1, keepdim=True)
            index = (latest.long() - 1).clamp(min=0)
            counted = cosines.gather(-1, index).masked_fill(latest > 0, 0)
            cosines.scatter_(-1, index, counted)
            similar.scatter_(-1, index, 0)
        total += cosines.sum(dim=2)
    return total / length


@dataclass
class ExpectedAttention(RatioScorer):
    """Keeps the keys that future queries are expected to attend to (Devoto et al., 2510.00636).

    Future queries are modelled as Gaussian, with mean `μ` and covariance `Σ` of the context's
    queries before RoPE, both rotated by the mean rotation of the next positions. The score is the
    softmax over keys of `k·μ / √d + kᵀΣk / (2d)`, averaged over the GQA group, then
    `(score + epsilon) * ‖v‖₂`. Contexts of at most `n_sink` tokens are not pruned.

    Attributes:
        n_future_positions: number of next positions that the rotation is averaged over.
        n_sink: number of first tokens (attention sinks), always kept and left out of `μ` and `Σ`.
        use_covariance: include the term with `Σ`.
        use_vnorm: multiply scores by the norms of the values.
        epsilon: added to scores before they are multiplied by the norms; 0 or more.
    """

    n_future_positions: int = count(512, 1)
    n_sink: int = count(4)
    use_covariance: bool = True
    use_vnorm: bool = True
    epsilon: float = number(0.0, 0)

    needs = Needs.QUERIES | Needs.ROPE | Needs.LATER_QUERIES
    whole_up_to = ("n_sink",)

    def statistics(self, call: AttentionCall) -> tuple[Tensor, Tensor]:
        """Mean `(B or 1, H, d)` and covariance `(B or 1, H, d, d)` of the queries before RoPE."""
        sizes, means, scatters = [], [], []
        for queries in query_blocks(call, self.n_sink):
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

    def score(self, call: AttentionCall) -> Tensor:
        """Expected attention of future queries, times the norms of the values."""
        mean, covariance = self.statistics(call)
        mean, rotation = at_future_positions(call, mean, self.n_future_positions)
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


def query_blocks(call: AttentionCall, n_sink: int, block: int = 1024) -> Iterator[Tensor]:
    """Queries before RoPE in blocks `(B, H, rows, d)`; those of the sinks are left out."""
    if call.at.tokens is None and call.hidden_states.shape[1] == call.length:
        for start in range(n_sink, call.length, block):
            yield call.chunk(start, start + block).queries_before_rope()
        return
    queries = call.queries_before_rope()
    yield queries[:, :, max(0, n_sink - call.length + queries.shape[2]) :]


def at_future_positions(call: AttentionCall, mean: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """Average over the next `n` positions of the rotated mean query, and of the rotation.

    Args:
        mean: `(B or 1, H, d)`, before RoPE.

    Returns:
        The rotated query in the shape of `mean`, and the mean rotation `(1 or B, 1, d, d)`.
    """
    rotation = call.site.rotation.average(mean, call.next_position, n)
    return (mean.unsqueeze(-2) @ rotation.mT).squeeze(-2), rotation


@torch.no_grad()
def _spread(keys: Tensor, covariance: Tensor) -> Tensor:
    """`kᵀΣk` of keys `(B, H_kv, S, d)` and `Σ` `(B, H_kv, G, d, d)`: `(B, H_kv, G, S)`.

    Computed in blocks of keys, as the intermediate `kᵀΣ` is `G` times as large as the keys.
    """
    n_groups, d = covariance.shape[2], covariance.shape[-1]
    side_by_side = covariance.transpose(2, 3).flatten(3)  # (B, H_kv, d, G * d)
    space, n_rows = keys.new_empty(0), rows_at_once(keys, keys[:, :, 0].numel() * n_groups)

    def spread(part: Tensor) -> Tensor:
        product = space.resize_(*part.shape[:3], n_groups * d)
        torch.matmul(part, side_by_side, out=product)
        return product.unflatten(-1, (n_groups, d)).mul_(part.unsqueeze(3)).sum(dim=-1)

    return torch.cat([spread(part) for part in keys.split(n_rows, dim=2)], dim=2).mT


@dataclass
class Cap(RatioScorer):
    """Keeps the values of highest leverage, weighted by their keys' alignment (CAPKV, 2604.25975).

    `w_i = exp(tau * cos(k_i, a) - max)`, with the anchor `a` the mean query of a query head rotated
    to the next positions, and `A = I + sum (w_i + epsilon) v_i v_iᵀ`. The score is
    `w_i v_iᵀ A⁻¹ v_i`, averaged over the GQA group. Contexts of at most `n_sink` tokens are not
    pruned.

    Attributes:
        tau: sharpness of the weights: factor of the cosine similarity of key and anchor.
        n_future_positions: number of next positions that the rotation is averaged over.
        n_sink: number of first tokens (attention sinks), always kept and left out of `a` and `A`.
        epsilon: added to the weights in `A`; 0 or more.
    """

    tau: float = limited(5.0, isfinite, "a finite number")
    n_future_positions: int = count(512, 1)
    n_sink: int = count(4)
    epsilon: float = number(1e-6, 0)

    needs = Needs.QUERIES | Needs.ROPE | Needs.LATER_QUERIES
    whole_up_to = ("n_sink",)

    def score(self, call: AttentionCall) -> Tensor:
        keys, values = (upcast(x[:, :, self.n_sink :]) for x in (call.keys, call.values))
        blocks = list(query_blocks(call, self.n_sink))
        total = torch.stack([block.sum(dim=2) for block in blocks]).sum(dim=0)
        mean = total / sum(block.shape[2] for block in blocks)
        anchor, _ = at_future_positions(call, mean, self.n_future_positions)
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
    for of_head in weights.unbind(dim=2):  # one by one, as each needs a weighted copy of values
        weighted = values * (of_head + epsilon).unsqueeze(-1)
        root, _ = ridge_root(weighted.mT @ values, 1.0)
        solved = torch.linalg.solve_triangular(root, values.mT, upper=False)  # (B, H_kv, d, S)
        leverages.append(of_head * solved.square().sum(dim=-2))
    return torch.stack(leverages, dim=2)
