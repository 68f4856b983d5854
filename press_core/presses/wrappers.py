"""Presses that wrap one press and change its selection: per head, by threshold, or by merging.

AdaKV (Feng et al., arXiv 2407.11550) shares one budget among the KV heads of a layer; CriticalKV
(2502.03805) weights scores by the projected values; DMS at inference (2506.05345) evicts by a
threshold, after a delay. CaM (Zhang et al., ICML 2024, openreview LCTmppB165), and MergingPress
after ToMe (2210.09461) and D2O (2406.13035), merge values of evicted tokens into kept ones.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from press_core.call import AttentionCall
from press_core.eviction import Eviction
from press_core.fields import count, limited, number, require, share
from press_core.model.sites import AttentionSite, output_weight
from press_core.presses.decoding import RECEIVED, Accumulating, Decoding
from press_core.presses.positions import layer_generator, seed_field
from press_core.scoring import Around, BudgetPress, TokenScorer, Wrapper
from press_core.select import best_first, gather_tokens, raised, trailing, true_indices, upcast
from press_core.tiles import rows_at_once
from press_core.traits import Evicts, Needs, Phase


@dataclass
class AdaKV(Wrapper, BudgetPress):
    """Keeps the best `n * H_kv` tokens of a layer over all its KV heads (AdaKV, 2407.11550).

    `n` is the budget per head of the wrapped press. Heads keep different numbers of tokens, and the
    layer stores no more than these. Paper: Feng et al.

    Attributes:
        press: scores tokens (a ScorerPress or CriticalKVPress); its ratio sets the budget.
        alpha_safeguard: share of `n`, in [0, 1], that every head keeps; at least one token.
    """

    alpha_safeguard: float = share(0.2)

    evicts = Evicts.PER_HEAD

    def spend(self, call: AttentionCall, n: int) -> Eviction:
        scores = self.scorer.checked_scores(call)
        safe = best_first(scores, max(1, int(n * self.alpha_safeguard)))
        finite = scores.clamp(max=torch.finfo(scores.dtype).max)  # no other score is as high
        kept = self.choose(call, finite.masked_fill(safe, float("inf")), n)
        return Eviction.keep_per_head(call, kept)

    def choose(self, call: AttentionCall, scores: Tensor, n: int) -> Tensor:
        """Which tokens each head keeps, `n * H_kv` in total: `(B, H_kv, S)` bool.

        Args:
            scores: `(B, H_kv, S)`, infinite for the safeguarded tokens of each head.
        """
        return shared_budget(scores, n)


def shared_budget(scores: Tensor, n: int) -> Tensor:
    """`(B, H_kv, S)` bool: the best `n * H_kv` tokens over all heads, by scores `(B, H_kv, S)`."""
    return best_first(scores.flatten(1).unsqueeze(1), n * scores.shape[1]).view(scores.shape)


class ReadingStates(Wrapper):
    """A wrapper that reads keys or values, also where the wrapped press reads positions alone."""

    @property
    def needs(self) -> Needs:
        return super().needs & ~Needs.ONLY


@dataclass
class Critical(ReadingStates):
    """A press that weights scores by the norms of the values after the output projection."""

    epsilon: float = number(1e-4, 0)
    first_stage_ratio: float = share(0.5)

    def check_site(self, site: AttentionSite) -> None:
        super().check_site(site)
        output_weight(site)

    def weighted(self, call: AttentionCall, scores: Tensor, n_first: int | Tensor) -> Tensor:
        """Weighted scores, with the `n_first` best tokens before weighting above all others.

        These are finite and in their order, so that presses can average and rank them.
        """
        first = best_first(scores, n_first)
        norms = projected_norms(call, leaving_out=first)
        weighted = ((scores + self.epsilon) * norms).where(scores.isfinite(), scores)
        weighted = weighted.masked_fill(first, 0)  # infinite ones, too
        low = scores.masked_fill(scores == -torch.inf, torch.inf).amin(dim=(1, 2), keepdim=True)
        high = scores.masked_fill(scores == torch.inf, -torch.inf).amax(dim=(1, 2), keepdim=True)
        share = ((scores - low) / (high - low)).clamp(0, 1)  # also of infinite ones
        return raised(weighted, first, 1 + share.nan_to_num(1))  # all are equal


class CriticalKV(Critical, TokenScorer):
    """Keeps the tokens whose scores and projected values are large (CriticalKV, arXiv 2502.03805).

    In two stages: the best `int(n * first_stage_ratio)` tokens of each head by the scores of the
    wrapped press are kept. The rest of the budget `n` goes to the best by
    `(score + epsilon) * ‖W_o v‖₁`, with the norm averaged over the GQA group.

    Attributes:
        press: scores tokens (a ScorerPress or CriticalKVPress); its ratio sets the budget.
        epsilon: added to the scores before they are weighted; 0 or more.
        first_stage_ratio: share of the budget, in [0, 1], that the first stage spends.
    """

    @property
    def independent(self) -> bool:
        return self.scorer.independent and self.first_stage_ratio == 0  # else tokens compete

    def score(self, call: AttentionCall) -> Tensor:
        n_first = int(self.budget(call) * self.first_stage_ratio)
        return self.weighted(call, self.scorer.checked_scores(call), n_first)


@dataclass
class CriticalAdaKV(Critical, AdaKV):
    """Keeps as many tokens per head as AdaKV, chosen in CriticalKV's two stages.

    Tokens that AdaKV's safeguard keeps in a head are kept before either stage. Papers: arXiv
    2407.11550 (AdaKV) and 2502.03805 (CriticalKV).

    Attributes:
        press: scores tokens (a ScorerPress or CriticalKVPress); its ratio sets the budget.
        alpha_safeguard: share of the even budget, in [0, 1], that every head keeps; at least one
            token.
        epsilon: added to the scores before they are weighted; 0 or more.
        first_stage_ratio: share of a head's budget, in [0, 1], that goes to the best unweighted
            scores.
    """

    def choose(self, call: AttentionCall, scores: Tensor, n: int) -> Tensor:
        budgets = shared_budget(scores, n).sum(dim=-1, keepdim=True)
        n_first = (budgets * self.first_stage_ratio).int()
        return best_first(self.weighted(call, scores, n_first), budgets)


@torch.no_grad()
def projected_norms(call: AttentionCall, leaving_out: Tensor) -> Tensor:
    """L1 norm of each value after the output projection, averaged over the GQA group.

    Computed in blocks of tokens, as projected values are `D / d` times as large as the values.

    Args:
        leaving_out: `(B, H_kv, S)` bool, tokens whose norms are not needed.

    Returns:
        `(B, H_kv, S)`, float32; 0 for the tokens left out.
    """
    values = call.values
    weight = output_weight(call.site).to(values.dtype)
    of_heads = weight.unflatten(1, (values.shape[1], -1, values.shape[-1]))  # (D, H_kv, G, d)
    n_rows = rows_at_once(values, len(weight))
    norms, space = upcast(values.new_zeros(values.shape[:3])), values.new_empty(0)
    for head in range(values.shape[1]):
        for part in (~leaving_out[:, head]).nonzero().split(n_rows):
            rows, tokens = part.unbind(1)
            chosen, projected = values[rows, head, tokens], space.resize_(len(part), len(weight))
            for columns in of_heads[:, head].unbind(1):
                torch.mm(chosen, columns.T, out=projected)
                norms[rows, head, tokens] += projected.abs_().sum(dim=-1, dtype=norms.dtype)
    return norms.div_(of_heads.shape[2])


SCORES = "recent scores"
THRESHOLD = "a number: tokens with lower scores are evicted"


@dataclass
class DMS(Around):
    """Keeps the tokens that score at or above a threshold, and a sliding window (2506.05345).

    This is DMS at inference: in each KV head, a token is evicted when it leaves the window of the
    last `sliding_window_size` tokens and its score is below `threshold`. The ratio that results
    can be read from `compression_ratio` after the prefill.

    Attributes:
        press: scores tokens (a ScorerPress or CriticalKVPress).
        threshold: tokens with lower scores are evicted; in the units of the scores.
        sliding_window_size: number of last tokens that are not evicted yet.
        decoding: prune while decoding too. A token is then scored once, when it is appended, so
            `press` must score each token independently (KVzapPress, KnormPress, QFilterPress).
    """

    threshold: float = limited(None, lambda x: x is not None and x == x, THRESHOLD)
    sliding_window_size: int = count(128, 1)
    decoding: bool = False

    evicts = Evicts.PER_HEAD

    def validate(self) -> None:
        super().validate()
        alone = self.scorer.independent and not self.scorer.all_needs & Needs.MEMORY
        fits = alone or not self.decoding
        allowed = "one that scores each token independently, such as KVzapPress, if decoding=True"
        require(self, "press", fits, allowed)

    @property
    def phases(self) -> Phase:
        return Phase.PREFILL | Phase.DECODING if self.decoding else Phase.PREFILL

    def is_long_enough(self, length: int) -> bool:
        fits = self.decoding or length > self.sliding_window_size
        return fits and super().is_long_enough(length)

    def keeps(self, length: int) -> int:
        return 1 if self.is_long_enough(length) else length  # at least 1; the threshold decides

    def compress(self, call: AttentionCall) -> Eviction:
        if not self.is_long_enough(call.length):
            return Eviction.nothing(call)
        scores, window = self.scorer.checked_scores(call), self.sliding_window_size
        if SCORES not in call.carried:
            kept = (scores >= self.threshold) | trailing(call.keys, window)
            carried = {SCORES: scores[..., -window:]} if self.decoding else {}
            return Eviction.keep_per_head(call, kept, carried)
        known = torch.cat((call.carried[SCORES], scores), dim=-1)
        leaving = max(0, known.shape[-1] - window)
        late = known[..., :leaving] < self.threshold
        return Eviction.late(call, late, {SCORES: known[..., leaving:]})


@dataclass
class Merging(ReadingStates, BudgetPress):
    """Keeps what the wrapped press keeps, with the values of evicted tokens merged into it.

    Each evicted value `v_e` is merged into the kept token `j` with the most similar key:
    `v_j ← (v_j + Σ w_e v_e) / (1 + Σ w_e)`, where
    `w_e = max(cos(k_e, k_j), 0) * ‖v_e‖ / (‖v_e‖ + ‖v_j‖ + 1e-6)`. Keys, and with them positions,
    do not change. After ToMe (arXiv 2210.09461) and D2O (2406.13035).

    Attributes:
        press: scores tokens (a ScorerPress or CriticalKVPress); its ratio sets the budget.
        similarity_threshold: least cosine similarity of two keys, in [0, 1], for a merge.
        merge_fraction: share of each head's evicted tokens, in (0, 1], that is merged: those with
            the most similar keys, at least one.
    """

    similarity_threshold: float = share(0.0)
    merge_fraction: float = limited(1.0, lambda x: 0 < x <= 1, "a number in (0, 1]")

    def spend(self, call: AttentionCall, n: int) -> Eviction:
        chosen = best_first(self.scorer.checked_scores(call), n)
        kept, evicted = (true_indices(part) for part in (chosen, ~chosen))
        eviction = Eviction.keep(call, kept)
        return replace(eviction, values=self.merged(eviction, call.select(evicted)))

    def merged(self, kept: Eviction, evicted: AttentionCall) -> Tensor:
        """The kept values with the evicted ones merged into them, `(B, H_kv, n, d)`."""
        similarity, target = most_similar(evicted.keys, kept.keys)
        merges = similarity >= self.similarity_threshold
        if self.merge_fraction < 1:
            n_merged = 1 + int((evicted.length - 1) * self.merge_fraction)
            merges &= best_first(similarity, n_merged)
        values, added = upcast(kept.values), upcast(evicted.values)
        norms = values.norm(dim=-1).gather(-1, target), added.norm(dim=-1)
        weights = similarity.clamp(min=0) * norms[1] / (norms[1] + norms[0] + 1e-6)
        return add_weighted(values, added, weights * merges, target).to(kept.values.dtype)


def most_similar(keys: Tensor, others: Tensor) -> tuple[Tensor, Tensor]:
    """For each of `keys` `(B, H_kv, m, d)`, the most similar of `others` `(B, H_kv, n, d)`.

    Returns:
        Cosine similarity, `(B, H_kv, m)` float32, and index among the `n`, int64.
    """
    found, directions = (normalize(upcast(x), dim=-1) for x in (keys, others))
    n_rows = rows_at_once(keys, others[..., 0].numel())
    best = [(rows @ directions.mT).max(dim=-1) for rows in found.split(n_rows, dim=2)]
    return torch.cat([x.values for x in best], dim=-1), torch.cat([x.indices for x in best], dim=-1)


def add_weighted(values: Tensor, added: Tensor, weights: Tensor, target: Tensor) -> Tensor:
    """`(v_j + sum w_e v_e) / (1 + sum w_e)` over the `e` whose target is `j`.

    Terms are sorted by target and summed segment by segment: deterministic on GPUs too, unlike a
    scatter-add.

    Args:
        values: `(B, H_kv, n, d)`, the `v_j`.
        added: `(B, H_kv, m, d)`, the `v_e`.
        weights: `(B, H_kv, m)`, the `w_e`.
        target: `(B, H_kv, m)` int64, indices among the `n`.
    """
    counts = torch.zeros(values.shape[:3], dtype=torch.int64, device=values.device)
    counts = counts.scatter_add_(-1, target, torch.ones_like(target))
    order = target.argsort(dim=-1, stable=True)
    weights = weights.gather(-1, order).unsqueeze(-1)
    # The weights are appended as one more channel, to be summed as well.
    terms = torch.cat((gather_tokens(added, order) * weights, weights), dim=-1)
    sums = torch.segment_reduce(terms.flatten(0, 2), "sum", lengths=counts.flatten(), axis=0)
    sums = sums.view(*values.shape[:3], -1)
    return (values + sums[..., :-1]) / (1 + sums[..., -1:])


@dataclass
class CAM(Accumulating, Decoding):
    """Keeps the best tokens while decoding, and merges evicted values into them (CaM, LCTmppB165).

    Every `compression_interval` decoding steps, all heads keep the same `target_size` tokens, those
    with the best scores averaged over heads. Of the evicted ones, the best are merged: as many as
    there were steps since the previous pruning. The value of each is merged, in equal parts, into
    the next `merge_budget` kept tokens with probability `clamp(a_e / mean(a), 0, 1)`: `a` is the
    attention received while decoding, `a_e` by the evicted token, `mean(a)` by these kept ones.
    Paper: Zhang et al., ICML 2024, openreview LCTmppB165.

    Attributes:
        base_press: scores tokens (a ScorerPress or CriticalKVPress); its own ratio is not used.
        compression_interval: number of decoding forwards between two prunings.
        target_size: tokens that each KV head keeps at each pruning.
        hidden_states_buffer_size: number of the last tokens since the previous pruning whose hidden
            states and queries are buffered for `base_press`; 1 or more if it reads queries.
        merge_budget: number of kept tokens that an evicted value is shared among.
        seed: seeds the draws together with `layer_idx` and the number of the forward; they are the
            same on every device, in every row of a batch and with both mechanisms. None: use
            torch's global generator.
    """

    merge_budget: int = count(32, 1)
    seed: int | None = seed_field()

    def compress(self, call: AttentionCall) -> Eviction:
        scorer: Any = self.base_press
        n = scorer.budget(call.with_budget(self.budget(call)))
        if n >= call.length:
            return Eviction.nothing(call)
        scores = scorer.checked_scores(call.with_budget(n)).mean(dim=1, keepdim=True)
        chosen = best_first(scores, n).expand(call.keys.shape[:3])
        n_merged = min(call.when.n_steps, call.length - n)
        evicted = true_indices(~chosen[:, :1])
        best = true_indices(best_first(scores.gather(-1, evicted), n_merged))
        merged = evicted.gather(-1, best).expand(-1, chosen.shape[1], -1)
        eviction = Eviction.keep(call, true_indices(chosen))
        return replace(eviction, values=self.merged(eviction, merged))

    def merged(self, kept: Eviction, evicted: Tensor) -> Tensor:
        """The kept values with evicted ones merged into them, `(B, H_kv, n, d)`.

        Args:
            evicted: `(B, H_kv, m)` int64, indices of the tokens to merge.
        """
        call, received = kept.call, kept.call.memory[RECEIVED]
        shares = shares_of_next(kept.known_kept, evicted, self.merge_budget, received.dtype)
        of_next = (shares @ received.gather(-1, kept.known_kept).unsqueeze(-1)).squeeze(-1)
        of_evicted = received.gather(-1, evicted)
        probabilities = of_evicted / of_next.clamp(min=torch.finfo(received.dtype).tiny)
        numbers = uniform(evicted.shape[1:], self.seed, call.site.layer_idx, call.when.n_forwards)
        drawn = numbers.to(received) < probabilities
        added = gather_tokens(upcast(call.values), evicted) * drawn.unsqueeze(-1)
        return (upcast(kept.values) + shares.mT @ added).to(kept.values.dtype)


def uniform(shape: torch.Size, seed: int | None, layer_idx: int, forward: int) -> Tensor:
    """Uniform random numbers in [0, 1), float32 on the CPU; seeded as `CAM.seed` says."""
    generator = layer_generator(seed, layer_idx)
    if generator is not None:
        drawn = torch.randint(2**62, (), generator=generator, device="cpu")
        generator.manual_seed(int(drawn) + forward)
    return torch.rand(shape, generator=generator, dtype=torch.float32, device="cpu")


def shares_of_next(kept: Tensor, evicted: Tensor, n_next: int, dtype: torch.dtype) -> Tensor:
    """Share of each evicted token that each kept one gets: equal over the next `n_next` kept ones.

    Args:
        kept: `(B, H_kv, n)` int64, positions, ascending.
        evicted: `(B, H_kv, m)` int64, positions.
        n_next: number of kept tokens that share one evicted token (fewer at the end).
        dtype: of the shares.

    Returns:
        `(B, H_kv, m, n)`; rows sum to 1, or to 0 where no kept token follows.
    """
    before = (kept.unsqueeze(2) < evicted.unsqueeze(3)).sum(dim=-1, keepdim=True)
    index = torch.arange(kept.shape[-1], device=kept.device)
    receives = (index >= before) & (index < before + n_next)
    return receives.to(dtype) / receives.sum(dim=-1, keepdim=True).clamp(min=1)
