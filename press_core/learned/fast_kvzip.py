"""Fast KVzip (Kim et al., arXiv 2601.17668): gates that learned what KVzip would keep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
from press_core.forward import Forward
from press_core.learned.calibration import Calibration, learned, sized
from press_core.learned.running import Examples, TaughtPress, taught
from press_core.model.sites import AttentionSite
from press_core.press import RatioPress
from press_core.replay.rows import cache_after, store_chosen
from press_core.scope import ScopeState
from press_core.select import best_first, leading, trailing, upcast
from press_core.tiles import rows_at_once
from press_core.traits import Evicts, Needs, Phase

GATE, TOKEN = "gate", "token"
LONG_CONTEXT = 32_000
"""Tokens from which on the last `window_size` are kept, rather than a share of the context."""
EPSILON = 1e-6
"""Added to mean squares."""


class Gate(NamedTuple):
    """The gate of one layer: `r` channels, `t` keys to compare with.

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
        """How likely each token is to be needed, in [0, 1]: `(B, H_kv, S)`, float32 or better.

        The share of attention that the token's key would get from its own query against the keys of
        `base`, mean over the queries of a group. Projected in the precision of the hidden states,
        what follows in float32.

        Args:
            states: `(B, S, D)`, the input of the attention module.
        """
        n_kv, _, rank = self.base.shape
        query = _project(states, self.query_weight, self.query_bias).unflatten(2, (n_kv, -1))
        query, key = query.transpose(1, 2), _project(states, self.key_weight).transpose(1, 2)
        # Not the queries are normalized, but what comes of them, which is less.
        scale, weight = _inverse_rms(query) / rank**0.5, self.query_norm.to(query)
        key = key * _inverse_rms(key) * (self.key_norm.to(key) * weight)  # (B, H_kv, S, r)
        own = (query @ key.unsqueeze(-1) * scale).squeeze(-1)  # (B, H_kv, S, G)
        # One product for all tokens of a head, which takes a sixth of the time of one for each.
        others = query.flatten(2, 3) @ (self.base.to(query) * weight).mT
        others = others.unflatten(2, own.shape[2:]) * scale
        own = own + self.bias.to(query).view(n_kv, 1, -1)
        return (own - others.logsumexp(dim=-1)).sigmoid().mean(dim=-1)


def _project(states: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`states` `(B, S, D)` by `weight` `(heads, r, D)`: `(B, S, heads, r)`, float32 or better."""
    bias = None if bias is None else bias.flatten().to(states)
    projected = linear(states, weight.flatten(0, 1).to(states), bias)
    return upcast(projected).unflatten(-1, weight.shape[:2])


def _inverse_rms(x: Tensor) -> Tensor:
    return (x.square().mean(dim=-1, keepdim=True) + EPSILON).rsqrt()


@dataclass(frozen=True, eq=False, repr=False)
class KVzipGates(Calibration):
    """The gates of all layers: what a `Gate` has, stacked.

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
    """The gates whose outputs come closest to the examples, layer by layer.

    Raises:
        CalibrationError: if there are none.
    """

    def learn(states: Tensor, targets: Tensor) -> Gate:
        """The gate after `steps` steps of AdamW towards `targets`."""
        states, targets = states.float(), targets.clamp(0, 1)
        scale = states.square().mean().sqrt().clamp(min=1e-12)  # folded into the weights afterwards

        def loss_of(parameters: Sequence[Tensor], rows: Tensor) -> Tensor:
            told = Gate(*parameters)(states[rows][None] / scale)[0].mT
            return binary_cross_entropy(told, targets[rows])

        start = _first_gate(examples.site, rank, n_base, targets, states.shape[1], seed)
        generator = torch.Generator().manual_seed(seed)
        gate = Gate(*taught(start, loss_of, len(states), steps, generator))
        query, key = gate.query_weight / scale, gate.key_weight / scale
        return gate._replace(query_weight=query, key_weight=key)

    return KVzipGates(*examples.taught(learn))


def _first_gate(
    site: AttentionSite, rank: int, n_base: int, targets: Tensor, width: int, seed: int
) -> Gate:
    """A gate at random that says of all tokens about what `targets` say on average."""
    n_heads, n_kv, generator = site.num_heads, site.num_kv_heads, torch.Generator()
    generator.manual_seed(seed)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

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
    """Keeps what learned gates take for needed to repeat the context (arXiv 2601.17668).

    A small gate per layer tells from the hidden states alone what KVzip would find out by letting
    the model repeat its context. The heads of all layers share one budget, so that nothing is
    evicted before the decoder has run, and outer scopes that prune layer by layer act first; or
    those of each layer do, which lose tokens as it ends.

    Attributes:
        compression_ratio: share of the tokens of all heads that is evicted, in [0, 1).
        layerwise: share one budget over the heads of each layer, rather than of the model.
        n_sink: first tokens, always kept.
        window_size: last tokens that are always kept, of contexts of 32,000 tokens or more.
        window_ratio: share of shorter contexts, at their end, that is always kept.
        gates: the gates of the model (see `fit`), or a file, a folder or a hub id. None: the file
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
        at_once = self.layerwise or self.amount == 0  # nothing is left to do after all layers
        return Needs.FORWARD if at_once else Needs.FORWARD | Needs.MEMORY

    @property
    def phases(self) -> Phase:
        return Phase.PREFILL if self.layerwise else Phase.PREFILL | Phase.AFTER_DECODER

    # ---- the formula -----------------------------------------------------------------------------

    @torch.no_grad()
    def scores(self, call: AttentionCall) -> Tensor:
        """What the gate says of each key's token, `(B, H_kv, S)`; protected ones above 1.

        Raises:
            PressError: if it says nothing of some, as the hidden states are no numbers.
        """
        gate = call.prepared(self).of_layer(call.site.layer_idx)
        n_numbers = len(call.hidden_states) * gate.query_bias.numel()
        step = rows_at_once(call.hidden_states, n_numbers)
        parts = [gate(part) for part in call.hidden_states.split(step, dim=1)]
        scores = call.align_to_keys(torch.cat(parts, dim=-1))
        if bool(scores.isnan().any()):
            raise PressError(
                f"the gate of {call.site.name} says NaN of some tokens, which has no rank among "
                "numbers: the hidden states are infinite, or too large for the gate"
            )
        protected = leading(call.keys, self.n_sink) | trailing(call.keys, self.window(call.length))
        # The same in all heads and layers: a budget smaller than their number keeps the latest.
        recency = torch.arange(1, call.length + 1, device=scores.device, dtype=scores.dtype)
        return torch.where(protected, 1 + recency, scores)

    def window(self, length: int) -> int:
        """How many tokens at the end of a context of `length` are always kept."""
        return int(length * self.window_ratio) if length < LONG_CONTEXT else self.window_size

    def choose(self, scores: list[Tensor]) -> list[Tensor]:
        """Which tokens heads that share a budget keep, `(H_kv, S)` bool for each layer.

        Args:
            scores: of one row, `(H_kv, S)` for each layer; lengths may differ.
        """
        never_empty = [
            layer.masked_fill(best_first(layer[None], 1)[0], float("inf")) for layer in scores
        ]
        # Layers may lie on several devices.
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
        """What the gate says of each token, and that it is one: padding gets zeros of both."""
        scores = self.scores(call)
        return {GATE: scores, TOKEN: torch.ones_like(scores)}

    def after_decoder(self, scope: ScopeState, forward: Forward, output: Any) -> None:
        """Evict from all layers, after the prefill of a context."""
        cache = cache_after(forward, output)
        if cache is None:
            return
        layers = [known(cache, site.layer_idx) for site in scope.sites]
        memories = [layer.memories.get(scope.key) for layer in layers]
        slots = [{} if memory is None else memory.slots for memory in memories]
        if not all(GATE in of_layer for of_layer in slots):
            return
        known_slots = list(zip(scope.sites, slots, strict=True))
        gates = [site.ranks.gather(x[GATE]) for site, x in known_slots]  # of all ranks
        tokens = [site.ranks.gather(x[TOKEN])[:, 0] > 0 for site, x in known_slots]
        by_row = []
        for row in range(len(tokens[0])):
            pairs = zip(gates, tokens, strict=True)
            by_row.append(self.choose([scores[row][:, current[row]] for scores, current in pairs]))
        is_whole = all(bool(chosen.all()) for of_row in by_row for chosen in of_row)
        of_layers = zip(scope.sites, layers, tokens, zip(*by_row, strict=True), strict=True)
        for site, layer, current, chosen in of_layers:
            layer.remember(scope.key, None)
            if not is_whole:
                occupied = None if bool(current.all()) else current
                store_chosen(scope, cache, site, occupied, chosen)
