"""Fast KVzip (Kim et al., arXiv 2601.17668): gates that learned what KVzip would keep."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy, linear

from press_core.blocks import rows_at_once
from press_core.cache.pruned import PrunedLayer, is_quantized
from press_core.calibration import (
    Batch,
    Calibration,
    CalibrationError,
    F,
    check_fits,
    find,
    require_given,
)
from press_core.call import AttentionCall
from press_core.engine import prune_heads
from press_core.errors import PressError, UnsupportedCacheError
from press_core.eviction import Eviction
from press_core.examples import Examples, Scores, taught
from press_core.model.forward import DecoderForward
from press_core.model.generation import require_no_drafts
from press_core.model.sites import AttentionSite
from press_core.press import Evicts, Needs, Phase, Press, RatioPress, require
from press_core.scope import ScopeState
from press_core.select import Tokens, best_first, leading, trailing, upcast

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
    return upcast(linear(states, weight.flatten(0, 1).to(states), bias)).unflatten(
        -1, weight.shape[:2]
    )


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

    kind: ClassVar[str] = "Fast KVzip gates"
    file_names: ClassVar[tuple[str, ...]] = ("fast_kvzip_gates.safetensors",)

    query_weight: Tensor
    query_bias: Tensor
    key_weight: Tensor
    query_norm: Tensor
    key_norm: Tensor
    base: Tensor
    bias: Tensor

    def check(self) -> None:
        shapes = {name: tuple(x.shape) for name, x in self.tensors.items()}
        dims = [len(shapes[field.name]) for field in fields(self)]
        if dims == [4, 3, 4, 2, 2, 4, 2]:
            layers, heads, rank, width = shapes["query_weight"]
            kv_heads, n_base = shapes["base"][1:3]
            expected = [
                *((layers, heads, rank, width), (layers, heads, rank)),
                *((layers, kv_heads, rank, width), (layers, rank), (layers, rank)),
                *((layers, kv_heads, n_base, rank), (layers, heads)),
            ]
            whole = min(layers, heads, rank, width, kv_heads, n_base) > 0
            if list(shapes.values()) == expected and whole and heads % kv_heads == 0:
                return
        found = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise CalibrationError(
            f"{found}: they must be query_weight (L, H, r, D), query_bias (L, H, r), key_weight "
            "(L, H_kv, r, D), query_norm and key_norm (L, r), base (L, H_kv, t, r) and bias (L, H)"
        )

    @property
    def sizes(self) -> dict[str, int]:
        layers, heads, _, width = self.query_weight.shape
        return {
            "layers": layers,
            "heads": heads,
            "kv_heads": self.base.shape[1],
            "hidden_size": width,
        }

    def of_layer(self, layer_idx: int) -> Gate:
        """The gate of one layer."""
        return Gate(**{name: x[layer_idx] for name, x in self.tensors.items()})

    @classmethod
    def load(cls: type[F], source: str | Path, file_names: tuple[str, ...] = ()) -> F:
        """As `Calibration.load`; the pickles that the paper's authors publish are refused."""
        if str(source).endswith((".pt", ".pth", ".bin")):
            raise CalibrationError(
                f"{str(source)!r} is a pickle, which may run code as it is read; turn it into "
                "safetensors once, if you trust it, as docs/learned.md says"
            )
        return super().load(source, file_names)

    @classmethod
    def published(cls, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """From the names that the published gates have, each behind `layers.0.` and so on."""
        n_layers = len({name.split(".")[1] for name in tensors})

        def stacked(name: str) -> Tensor:
            return torch.stack([tensors[f"layers.{i}.{name}"] for i in range(n_layers)])

        base, norm = stacked("k_base"), stacked("q_norm.weight")
        rank = norm.shape[-1]
        return {
            "query_weight": stacked("q_proj.weight").unflatten(1, (-1, rank)),
            "query_bias": stacked("q_proj.bias").unflatten(1, (-1, rank)),
            "key_weight": stacked("k_proj.weight").unflatten(1, (-1, rank)),
            "query_norm": norm,
            "key_norm": stacked("k_norm.weight"),
            "base": base.squeeze(2),
            "bias": stacked("b").flatten(1),
        }


@dataclass
class FastKVzip(RatioPress):
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
    n_sink: int = 4
    window_size: int = 4096
    window_ratio: float = 0.02
    gates: KVzipGates | str | Path | None = None

    needs = Needs.FORWARD
    evicts = Evicts.PER_HEAD

    teacher: ClassVar[Callable[..., Any]]
    """Makes the press whose `scores` are learned, KVzip."""

    def validate(self) -> None:
        super().validate()
        require(self, "n_sink", self.n_sink >= 0, "a number of tokens, 0 or more")
        require(self, "window_size", self.window_size >= 0, "a number of tokens, 0 or more")
        require(self, "window_ratio", 0 <= self.window_ratio <= 1, "a number in [0, 1]")
        require_given(self, "gates", KVzipGates)

    @property
    def spans_layers(self) -> bool:  # type: ignore[override]
        return not self.layerwise

    @property
    def phases(self) -> Phase:  # type: ignore[override]
        return Phase.PREFILL | Phase.DECODER if self.spans_layers else Phase.PREFILL

    @property
    def remembers(self) -> bool:  # type: ignore[override]
        return self.spans_layers and self.amount != 0

    def bind(self, model: Any) -> Press:
        make = f"{type(self).__name__}.fit(model, token_batches)"
        return replace(self, gates=find(KVzipGates, self.gates, model, fit=make))

    def check_site(self, site: AttentionSite) -> None:
        super().check_site(site)
        assert isinstance(self.gates, KVzipGates)
        check_fits(self.gates, site)

    # ---- the formula -----------------------------------------------------------------------------

    @torch.no_grad()
    def scores(self, call: AttentionCall) -> Tensor:
        """What the gate says of each key's token, `(B, H_kv, S)`; protected ones above 1.

        Raises:
            PressError: if it says nothing of some, as the hidden states are no numbers.
        """
        assert isinstance(self.gates, KVzipGates)
        gate = self.gates.of_layer(call.site.layer_idx)
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
        chosen = best_first(together.view(1, 1, -1), self._n_kept(scores)).flatten()
        parts = chosen.split([layer.numel() for layer in scores])
        pairs = zip(parts, scores, strict=True)
        return [part.view_as(layer).to(layer.device) for part, layer in pairs]

    def _n_kept(self, scores: list[Tensor]) -> int:
        """How many tokens are kept of all together, at least one per head."""
        if isinstance(self.compression_ratio, Tokens):
            return sum(len(layer) * self.compression_ratio.of(layer.shape[1]) for layer in scores)
        size = sum(layer.numel() for layer in scores)
        return max(sum(map(len, scores)), size - int(size * self.compression_ratio))

    # ---- acting ----------------------------------------------------------------------------------

    def decide(self, call: AttentionCall) -> Eviction:
        if self.spans_layers or self.leaves_whole(call):
            return Eviction.nothing(call)
        rows = [self.choose([row])[0] for row in self.scores(call)]
        return Eviction.keep_per_head(call, torch.stack(rows))

    def remember(self, call: AttentionCall) -> Mapping[str, Tensor]:
        """What the gate says of each token, and that it is one: padding gets zeros of both."""
        scores = self.scores(call)
        return {GATE: scores, TOKEN: torch.ones_like(scores)}

    def before_decoder(self, scope: ScopeState, forward: DecoderForward) -> DecoderForward:
        """Refuse, before anything is run, what cannot lose tokens once all layers have run."""
        cache = _own_cache(forward.cache)
        if self.remembers and (cache is None or cache.get_seq_length() == 0):
            require_no_drafts(scope.sites[0], f"{type(self).__name__}(layerwise=False)")
            quantized = [x for x in getattr(cache, "layers", ()) if is_quantized(x)]
            if quantized:
                raise UnsupportedCacheError(
                    f"{type(self).__name__} keeps other tokens for each head, which a "
                    f"{type(quantized[0]).__name__} cannot store; use a DynamicCache"
                )
        return forward

    def after_decoder(self, scope: ScopeState, forward: DecoderForward, output: Any) -> None:
        """Evict from all layers, after the prefill of a context."""
        cache = forward.cache
        cache = _own_cache(getattr(output, "past_key_values", None) if cache is None else cache)
        known = [] if cache is None else [_recall(scope, site, cache) for site in scope.sites]
        if not all(known):
            return  # a later forward, or a chunk of a prefill
        gates, tokens = ([layer[name] for layer in known] for name in (GATE, TOKEN))
        kept = [torch.zeros_like(layer) for layer in tokens]
        for row in range(len(kept[0])):
            mine = [layer[row, 0] for layer in tokens]
            scores = [layer[row][:, here] for layer, here in zip(gates, mine, strict=True)]
            for layer, here, chosen in zip(kept, mine, self.choose(scores), strict=True):
                layer[row, :, here] = chosen
        is_whole = all(map(torch.equal, kept, tokens))
        for site, keeps, occupied in zip(scope.sites, kept, tokens, strict=True):
            del cache.layers[site.layer_idx].memories[scope.key]
            if not is_whole:
                prune_heads(scope, cache, site, keeps, occupied[:, 0])

    # ---- learning --------------------------------------------------------------------------------

    @classmethod
    def fit(
        cls,
        model: Any,
        token_batches: Iterable[Batch],
        scores: Scores | None = None,
        *,
        rank: int = 16,
        n_base: int = 16,
        max_tokens: int = 32_768,
        steps: int = 2_000,
        seed: int = 0,
    ) -> KVzipGates:
        """Learn to tell the scores of KVzip from hidden states.

        The same seed gives the same gates on the same device.

        Args:
            model: left as it was.
            token_batches: token ids `(B, S)`, or dicts with `input_ids` and `attention_mask` where
                rows are padded on the left; those rows are scored one by one.
            scores: what to learn, in [0, 1]. None: the scores of KVzip, which needs the model's
                tokenizer; without one, `KVzipPress(prompts=...).scores`.
            rank: channels of the gate's queries and keys, 16 in the paper.
            n_base: keys that those of tokens are compared with, 16 in the paper.
            max_tokens: tokens to learn from, at most; their hidden states are held in memory.
            steps: of AdamW.
            seed: of what the gates start from, and of the batches of tokens.

        Returns:
            The gates, float32: to hand over as `gates`, or to save beside the model.

        Raises:
            CalibrationError: if there is no token to learn from, or if scores have another shape.
        """
        if scores is None:
            scores = cls.teacher().bind(model).scores
        examples = Examples.of(model, token_batches, scores, cls.collector, max_tokens)
        return fit_gates(examples, rank, n_base, steps, seed)


def _own_cache(cache: Any) -> Any:
    """The cache of the decoder's own keys, of two."""
    return getattr(cache, "self_attention_cache", cache)


def _recall(scope: ScopeState, site: AttentionSite, cache: Any) -> dict[str, Tensor]:
    """What the scope remembers of the tokens of a layer, `(B, H_kv, S)` for the heads of all ranks.

    Empty where it remembers nothing.
    """
    layer = cache.layers[site.layer_idx]
    memory = layer.memories.get(scope.key) if isinstance(layer, PrunedLayer) else None
    if memory is None or GATE not in memory.slots:
        return {}
    known = {name: site.heads.gather(memory.slots[name]) for name in (GATE, TOKEN)}
    return {**known, TOKEN: known[TOKEN] > 0}


# ---- learning ------------------------------------------------------------------------------------


def fit_gates(examples: Examples, rank: int, n_base: int, steps: int, seed: int) -> KVzipGates:
    """The gates whose outputs come closest to the examples, layer by layer.

    Raises:
        CalibrationError: if there are none.
    """
    examples.require_some()
    learned: dict[int, tuple[Tensor, ...]] = {}
    for layer, states in examples.states.items():
        targets = torch.cat(examples.targets[layer]).clamp(0, 1)
        start = _first_gate(examples.heads, rank, n_base, targets, states[0].shape[1], seed)
        learned[layer] = _taught(start, torch.cat(states).float(), targets, steps, seed)
    return KVzipGates(*examples.stacked(learned))


def _first_gate(
    heads: tuple[int, int], rank: int, n_base: int, targets: Tensor, width: int, seed: int
) -> Gate:
    """A gate at random that says of all tokens about what `targets` say on average."""
    (n_heads, n_kv), generator = heads, torch.Generator().manual_seed(seed)

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


@torch.inference_mode(False)  # a tensor of that mode could not be learned from
def _taught(start: Gate, states: Tensor, targets: Tensor, steps: int, seed: int) -> Gate:
    """The gate after `steps` steps of AdamW towards `targets` `(n, H_kv)` of `states` `(n, D)`."""
    states, targets = states.clone(), targets.clone()
    scale = states.square().mean().sqrt().clamp(min=1e-12)  # folded into the weights afterwards

    def loss_of(parameters: Sequence[Tensor], rows: Tensor) -> Tensor:
        told = Gate(*parameters)(states[rows][None] / scale)[0].mT
        return binary_cross_entropy(told, targets[rows])

    generator = torch.Generator().manual_seed(seed)
    gate = Gate(*taught(start, loss_of, len(states), steps, generator))
    return gate._replace(query_weight=gate.query_weight / scale, key_weight=gate.key_weight / scale)
