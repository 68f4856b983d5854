"""Fast KVzip (Kim et al., arXiv 2601.17668): learned gates that predict KVzip's scores."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy, linear

from press_core.budget import n_together
from press_core.cache.caches import known
from press_core.call import AttentionCall
from press_core.errors import PressError
from press_core.eviction import Eviction
from press_core.fields import count, share
from press_core.forward import Forward, cache_after
from press_core.learned.calibration import Calibration, CalibrationError, learned, sized
from press_core.learned.running import Examples, TaughtPress, trained
from press_core.model.sites import AttentionSite
from press_core.press import RatioPress
from press_core.replay.rows import store_chosen
from press_core.scope import ScopeState
from press_core.select import best_first, leading, trailing, upcast
from press_core.tiles import rows_at_once
from press_core.traits import Evicts, Needs, Phase

GATE = "gate"
LONG_CONTEXT = 32_000
"""Context length from which the last `window_size` tokens are kept, instead of a share of it."""
EPSILON = 1e-6
"""Added to mean squares in RMS normalization."""


class Gate(NamedTuple):
    """The gate of one layer, with `r` channels and `t` learned base keys per KV head.

    Attributes:
        query_weight, query_bias: `(H, r, D)` and `(H, r)`.
        key_weight: `(H_kv, r, D)`.
        query_norm, key_norm: `(r,)`.
        base: `(H_kv, t, r)`.
        bias: `(H,)`.
    """

    query_weight: Tensor
    query_bias: Tensor
    key_weight: Tensor
    query_norm: Tensor
    key_norm: Tensor
    base: Tensor
    bias: Tensor

    def __call__(self, states: Tensor) -> Tensor:
        """Predicted importance of each token, in [0, 1]: `(B, H_kv, S)`, float32 or better.

        This is the softmax weight of the token's gate key, against the keys in `base`, for the
        token's own gate query, averaged over the GQA group. Projections run in the precision of the
        hidden states, everything after them in float32.

        Args:
            states: `(B, S, D)`, the input of the attention module.
        """
        n_kv, _, rank = self.base.shape
        query = _project(states, self.query_weight, self.query_bias).unflatten(2, (n_kv, -1))
        query, key = query.transpose(1, 2), _project(states, self.key_weight).transpose(1, 2)
        # The products are normalized instead of the queries, as they are smaller.
        scale, weight = _inverse_rms(query) / rank**0.5, self.query_norm.to(query)
        key = key * _inverse_rms(key) * (self.key_norm.to(key) * weight)  # (B, H_kv, S, r)
        own = (query @ key.unsqueeze(-1) * scale).squeeze(-1)  # (B, H_kv, S, G)
        # One matrix product per KV head takes a sixth of the time of one per token.
        others = query.flatten(2, 3) @ (self.base.to(query) * weight).mT
        others = others.unflatten(2, own.shape[2:]) * scale
        own = own + self.bias.to(query).view(n_kv, 1, -1)
        return (own - others.logsumexp(dim=-1)).sigmoid().mean(dim=-1)


def _project(states: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Project `(B, S, D)` by `weight` `(heads, r, D)` to `(B, S, heads, r)`, float32 or better."""
    bias = None if bias is None else bias.flatten().to(states)
    projected = linear(states, weight.flatten(0, 1).to(states), bias)
    return upcast(projected).unflatten(-1, weight.shape[:2])


def _inverse_rms(x: Tensor) -> Tensor:
    return (x.square().mean(dim=-1, keepdim=True) + EPSILON).rsqrt()


@dataclass(frozen=True, eq=False, repr=False)
class KVzipGates(Calibration):
    """The gates of all layers: the tensors of each `Gate`, stacked.

    Attributes:
        query_weight, query_bias: `(L, H, r, D)` and `(L, H, r)`.
        key_weight: `(L, H_kv, r, D)`.
        query_norm, key_norm: `(L, r)`.
        base: `(L, H_kv, t, r)`.
        bias: `(L, H)`.
    """

    kind = "Fast KVzip gates"
    file_names = ("fast_kvzip_gates.safetensors",)

    query_weight: Tensor = sized("layers heads rank hidden_size", "layers.*.q_proj.weight")
    query_bias: Tensor = sized("layers heads rank", "layers.*.q_proj.bias")
    key_weight: Tensor = sized("layers kv_heads rank hidden_size", "layers.*.k_proj.weight")
    query_norm: Tensor = sized("layers rank", "layers.*.q_norm.weight")
    key_norm: Tensor = sized("layers rank", "layers.*.k_norm.weight")
    base: Tensor = sized("layers kv_heads n_base rank", "layers.*.k_base")
    bias: Tensor = sized("layers heads", "layers.*.b")

    def of_layer(self, layer_idx: int) -> Gate:
        """The gate of one layer."""
        return Gate(**{name: x[layer_idx] for name, x in self.tensors.items()})

    @classmethod
    def published(cls, tensors: dict[str, Tensor], folder: Path) -> dict[str, Tensor]:
        found = super().published(tensors, folder)
        for name in ("query_weight", "query_bias", "key_weight"):
            found[name] = found[name].unflatten(1, (-1, found["query_norm"].shape[-1]))
        return found | {"base": found["base"].squeeze(2), "bias": found["bias"].flatten(1)}


# ---- learning ------------------------------------------------------------------------------------


def fit_gates(
    examples: Examples, rank: int = 16, n_base: int = 16, steps: int = 2_000, seed: int = 0
) -> KVzipGates:
    """Train the gates of all layers on the examples, by binary cross-entropy.

    Args:
        rank: `r`, channels of the gates' queries and keys.
        n_base: `t`, base keys per KV head.
        steps: number of AdamW steps per layer.
        seed: seeds the initial gates and the batches of tokens.

    Raises:
        CalibrationError: if there are no examples, or scores outside of [0, 1].
    """

    def learn(states: Tensor, targets: Tensor) -> Gate:
        """The gate of one layer after `steps` of AdamW towards `targets`."""
        states, given, targets = states.float(), targets, targets.clamp(0, 1)
        if not torch.allclose(given, targets, atol=1e-3):
            raise CalibrationError(
                f"scores from {given.min():.3g} to {given.max():.3g}: gates learn scores in [0, 1]"
            )
        scale = states.square().mean().sqrt().clamp(min=1e-12)  # folded into the weights afterwards

        def loss_of(parameters: Sequence[Tensor], rows: Tensor) -> Tensor:
            scores = Gate(*parameters)(states[rows][None] / scale)[0].mT
            return binary_cross_entropy(scores, targets[rows])

        start = _first_gate(examples.site, rank, n_base, targets, states.shape[1], seed)
        generator = torch.Generator().manual_seed(seed)
        gate = Gate(*trained(start, loss_of, len(states), steps, generator))
        query, key = gate.query_weight / scale, gate.key_weight / scale
        return gate._replace(query_weight=query, key_weight=key)

    return KVzipGates(*examples.fitted(learn))


def _first_gate(
    site: AttentionSite, rank: int, n_base: int, targets: Tensor, width: int, seed: int
) -> Gate:
    """A random gate whose output for any token is close to the mean of `targets`."""
    n_heads, n_kv = site.num_heads, site.num_kv_heads
    drawn = partial(torch.randn, generator=torch.Generator().manual_seed(seed))
    mean = targets.mean(dim=0).clamp(1e-4, 1 - 1e-4)
    return Gate(
        query_weight=drawn(n_heads, rank, width) * width**-0.5,
        query_bias=torch.zeros(n_heads, rank),
        key_weight=drawn(n_kv, rank, width) * width**-0.5,
        query_norm=torch.ones(rank),
        key_norm=torch.ones(rank),
        base=0.1 * drawn(n_kv, n_base, rank),
        bias=(mean.logit() + torch.tensor(n_base).log()).repeat_interleave(n_heads // n_kv),
    )


# ---- the press -----------------------------------------------------------------------------------


@dataclass
class FastKVzip(RatioPress, TaughtPress):
    """Keeps the tokens to which learned gates give the highest KVzip scores (arXiv 2601.17668).

    A small gate per layer predicts, from the hidden states alone, the scores that KVzip measures by
    replaying the context. By default, the KV heads of all layers share one budget: eviction waits
    until the decoder has run, so that outer scopes that prune layer by layer act first. With
    `layerwise`, the heads of each layer share its budget, and the layer is pruned after its
    attention. Heads keep different numbers of tokens. Paper: Kim et al.

    Attributes:
        compression_ratio: share of the tokens of all heads that is evicted, in [0, 1), or the
            `Tokens` that a head keeps on average.
        layerwise: share a budget over the heads of each layer, instead of the whole model.
        n_sink: number of first tokens (attention sinks), always kept.
        window_size: number of last tokens always kept in contexts of 32,000 tokens or more.
        window_ratio: share of the tokens, in [0, 1], always kept at the end of shorter contexts.
        gates: the gates of the model (see `fit`), their file, folder or hub id. None: the file
            `fast_kvzip_gates.safetensors` beside the model.
    """

    layerwise: bool = False
    n_sink: int = count(4)
    window_size: int = count(4096)
    window_ratio: float = share(0.02)
    gates: KVzipGates | str | Path | None = learned(KVzipGates)

    evicts = Evicts.PER_HEAD
    learn = staticmethod(fit_gates)

    @property
    def needs(self) -> Needs:
        at_once = self.layerwise or self.amount == 0  # nothing to do after the decoder
        return Needs.FORWARD if at_once else Needs.FORWARD | Needs.MEMORY

    @property
    def phases(self) -> Phase:
        return Phase.PREFILL if self.layerwise else Phase.PREFILL | Phase.AFTER_DECODER

    # ---- the formula -----------------------------------------------------------------------------

    @torch.no_grad()
    def scores(self, call: AttentionCall) -> Tensor:
        """The gate's score in [0, 1] of each key's token, `(B, H_kv, S)`; above 1 if protected.

        Raises:
            PressError: if a score is NaN.
        """
        gate = call.prepared(self).of_layer(call.site.layer_idx)
        n_numbers = len(call.hidden_states) * gate.query_bias.numel()
        step = rows_at_once(call.hidden_states, n_numbers)
        parts = [gate(part) for part in call.hidden_states.split(step, dim=1)]
        scores = call.align_to_keys(torch.cat(parts, dim=-1))
        if bool(scores.isnan().any()):
            raise PressError(
                f"the gate of {call.site.name} returned NaN for some tokens, which cannot be "
                "ranked: the hidden states are not finite, or too large for the gate"
            )
        protected = leading(call.keys, self.n_sink) | trailing(call.keys, self.window(call.length))
        # Equal in all heads and layers: a budget below their number keeps the latest of them.
        recency = torch.arange(1, call.length + 1, device=scores.device, dtype=scores.dtype)
        return torch.where(protected, 1 + recency, scores)

    def window(self, length: int) -> int:
        """Number of tokens at the end of a context of `length` that are always kept."""
        return int(length * self.window_ratio) if length < LONG_CONTEXT else self.window_size

    def choose(self, scores: list[Tensor]) -> list[Tensor]:
        """Which tokens the heads that share one budget keep, `(H_kv, S)` bool for each layer.

        Every head keeps at least one token.

        Args:
            scores: of one row, `(H_kv, S)` for each layer; lengths may differ.
        """
        never_empty = [
            layer.masked_fill(best_first(layer[None], 1)[0], float("inf")) for layer in scores
        ]
        # Layers may be on different devices.
        together = torch.cat([layer.flatten().to(scores[0].device) for layer in never_empty])
        lengths = [len(head) for layer in scores for head in layer]
        n = max(len(lengths), n_together(lengths, self.amount))
        chosen = best_first(together.view(1, 1, -1), n).flatten()
        parts = chosen.split([layer.numel() for layer in scores])
        return [part.view_as(layer) for part, layer in zip(parts, scores, strict=True)]

    # ---- acting ----------------------------------------------------------------------------------

    def compress(self, call: AttentionCall) -> Eviction:
        if not self.layerwise or self.budget(call) >= call.length:
            return Eviction.nothing(call)
        rows = [self.choose([row])[0] for row in self.scores(call)]
        return Eviction.keep_per_head(call, torch.stack(rows))

    def remember(self, call: AttentionCall) -> Mapping[str, Tensor]:
        """The gate's scores, above 0: padding has zeros."""
        scores = self.scores(call)
        return {GATE: scores.clamp(min=torch.finfo(scores.dtype).tiny)}

    def after_decoder(self, scope: ScopeState, forward: Forward, output: Any) -> None:
        """Evict from all layers after the prefill of a context."""
        cache = cache_after(forward, output)
        if cache is None:
            return
        layers = [known(cache, site.layer_idx) for site in scope.sites]
        slots = [layer.memory(scope.key).slots for layer in layers]
        if not all(GATE in of_layer for of_layer in slots):
            return
        known_slots = zip(scope.sites, slots, strict=True)
        gates = [site.ranks.gather(x[GATE]) for site, x in known_slots]  # of all ranks
        by_row = [
            self.choose([scores[:, scores[0] > 0] for scores in of_row])
            for of_row in zip(*gates, strict=True)
        ]
        is_whole = all(bool(chosen.all()) for of_row in by_row for chosen in of_row)
        of_layers = zip(scope.sites, layers, gates, zip(*by_row, strict=True), strict=True)
        for site, layer, scores, chosen in of_layers:
            layer.remember(scope.key, None)
            if not is_whole:
                tokens = scores[:, 0] > 0
                occupied = None if bool(tokens.all()) else tokens
                store_chosen(scope, forward, cache, site, occupied, chosen)
