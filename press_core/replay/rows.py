"""Presses that replay a context before they prune it.

They wait until the decoder has run over a context. Then they run the decoder on tokens after it,
row by row on a copy of the row's cache, and measure, say, how much attention each key receives.
Their decisions about all layers are stored like those of any other press.

KVCompose (Akulov et al., arXiv 2509.05165) replays the context unchanged, aligns heads by composite
tokens, and lets the layers compete for the budget.
"""

import threading
from abc import abstractmethod
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers.cache_utils import DynamicCache, DynamicLayer

from press_core.attention import attention_tiles
from press_core.budget import Tokens, n_kept
from press_core.cache import caches, masks
from press_core.cache.positions import tokens_seen
from press_core.call import AttentionCall
from press_core.engine import require_readable, store_decisions
from press_core.errors import UnsupportedCacheError, UnsupportedInputError, UnsupportedModelError
from press_core.eviction import Eviction
from press_core.fields import count
from press_core.forward import Arguments, Forward, cache_after, cache_of, current, with_cache
from press_core.model.decoder import has_encoder, n_positions
from press_core.model.sites import AttentionSite, n_layers_of
from press_core.observed import Moment
from press_core.press import RatioPress
from press_core.probe.watching import rotating_as_before
from press_core.rows import Decisions
from press_core.scope import InstalledPress, ScopeState, bound_to
from press_core.select import best_first, true_indices, upcast
from press_core.traits import Evicts, Needs, Phase


@dataclass(frozen=True, eq=False)
class Row:
    """One row of a batch after its prefill, for replays that continue it.

    Attributes:
        scope: the open scope of the press.
        cache: the cache of the whole batch; it is not changed.
        index: index of the row in the batch.
        tokens: `(S,)` int64, token ids of the row without padding.
        slots: `(S,)` int64, slots of these tokens in the cache; None: all slots.
        next_position: position of the next token; None: the one that the model takes by itself.
    """

    scope: ScopeState
    cache: Any
    index: int
    tokens: Tensor
    slots: Tensor | None = None
    next_position: int | None = None

    @property
    def length(self) -> int:
        """`S`."""
        return len(self.tokens)

    @torch.no_grad()
    def alone(self) -> Any:
        """A new cache with the keys and values of this row, without gradients."""
        alone, slots = DynamicCache(), self.slots
        for layer in self.cache.layers:
            own = copy(layer)  # selecting rows replaces its states
            own.batch_select_indices(slice(self.index, self.index + 1))  # of views
            if slots is not None and own.is_initialized:
                own.keys, own.values = (x.index_select(2, slots) for x in (own.keys, own.values))
            alone.layers.append(own)
        return alone

    def run(self, cache: Any = None, n_before: int = 0, **inputs: Tensor) -> Any:
        """Run the decoder over `inputs` `(1, m, ...)`, which follow the context.

        Args:
            cache: a cache from `alone()`, which is extended; None: a new one.
            n_before: number of tokens that were appended to the cache after the context.
            inputs: either `input_ids` or `inputs_embeds`.

        Returns:
            The output of the decoder.
        """
        (given,) = inputs.values()
        first, decoder = self.next_position, self.scope.decoder
        start = (self.length if first is None else first) + n_before
        n, rotates = start + given.shape[1], self.scope.sites[0].rotary is not None
        limit = None if rotates else n_positions(decoder)
        if limit is not None and n > limit:
            raise UnsupportedInputError(
                f"{type(self.scope.press).__name__} runs tokens behind the context, {n} in all, "
                f"and the model has {limit} positions; use a press that does not replay"
            )
        cached = with_cache(decoder, self.alone() if cache is None else cache)
        if first is not None:
            cached["position_ids"] = torch.arange(start, n, device=given.device)[None]
        with current.apart("pruning"):
            return decoder(**inputs, **cached, use_cache=True)


States = tuple[Tensor, Tensor]
"""Keys and values `(1, H_kv, n, d)`."""


@dataclass
class ReplayPress(RatioPress, InstalledPress):
    """A press that acts after the decoder has run over a context, and replays it to score tokens.

    Rows of a batch are scored one by one, without their padding.
    """

    needs = Needs.QUERIES
    phases = Phase.DECODER

    @abstractmethod
    def score_row(self, row: Row) -> Tensor:
        """Scores of one row's tokens in the layers of its scope, `(L, H_kv, S)`."""

    @abstractmethod
    def choose(self, scores: Tensor) -> Tensor:
        """Which tokens of a row each head keeps, `(L, H_kv, S)` bool, by scores `(L, H_kv, S)`."""

    def decide(self, row: Row) -> tuple[Tensor, list[States]]:
        """Which tokens of `row` are kept, and `n` tokens to append to each of its layers.

        `n` is 0 or the same for all rows.

        Returns:
            Which tokens each head keeps, the appended ones included, `(L, H_kv, S + n)` bool; and
            keys and values of the appended tokens by layer (empty: `n` is 0).
        """
        return self.choose(self.score_row(row)), []

    def scores(self, model: Any, input_ids: Tensor) -> list[Tensor]:
        """Scores of all tokens of unpadded contexts `(B, S)`, `(B, H_kv, S)` for each layer.

        Layers that presses do not work on get zeros.
        """
        scope = bound_to(self, model)
        with current.apart("pruning"), torch.no_grad(), rotating_as_before(model):
            cache = cache_of(scope.decoder(input_ids=input_ids, use_cache=True))
            self._require_plain(scope, cache, None)
            rows = [self.score_row(Row(scope, cache, i, ids)) for i, ids in enumerate(input_ids)]
        known = torch.stack(rows, dim=1)
        scores = known.new_zeros(n_layers_of(scope.sites[0]), *known.shape[1:])
        scores[[site.layer_idx for site in scope.sites]] = known
        return [*scores]

    def watch_attention(self, row: Row, observe: Callable[[AttentionCall], None]) -> Any:
        """A scope that passes each attention call of this thread to `observe`."""
        thread = threading.get_ident()  # other threads may run the model at the same time
        return self.collector(observe, phases=Phase.DECODING, only_thread=thread)(row.scope.model)

    # ---- around the decoder ----------------------------------------------------------------------

    def post_init_from_model(self, model: Any) -> None:
        super().post_init_from_model(model)
        if has_encoder(model):
            raise UnsupportedModelError(
                f"{type(self).__name__} replays contexts without the encoder; use another press"
            )

    def before_decoder(self, scope: ScopeState, forward: Forward) -> Arguments:
        """Raise before the decoder runs over a context that cannot be replayed."""
        if self.compression_ratio and forward.is_context:
            for name in ("encoder_hidden_states", "cross_attention_states"):
                if forward.given.get(name) is not None:
                    raise UnsupportedInputError(
                        f"{type(self).__name__} replays contexts without {name}; use another press"
                    )
            cache = cache_before(scope, forward)
            self._require_plain(scope, cache, None)  # `generate` makes 4-d masks for other caches
            self._require_plain(scope, cache, self._real_tokens(forward))
        return forward.given

    def after_decoder(self, scope: ScopeState, forward: Forward, output: Any) -> None:
        """Evict after the prefill of a context.

        Raises:
            UnsupportedCacheError: if a layer is not a DynamicLayer.
        """
        cache = cache_after(forward, output)
        if caches.is_empty(cache, scope.first) or self.compression_ratio == 0:
            return
        ids, tokens = forward.given.get("input_ids"), self._real_tokens(forward)
        self._require_plain(scope, cache, tokens)
        following = _next_positions(forward.given.get("position_ids"), ids, tokens)
        decided, is_whole = [], True
        for index in range(len(ids)):
            slots = None if tokens is None else tokens[index].nonzero().squeeze(1)
            own = ids[index] if slots is None else ids[index, slots]
            with rotating_as_before(scope.model):
                kept, joins = self.decide(Row(scope, cache, index, own, slots, following[index]))
            decided.append((kept, joins))
            is_whole &= bool(kept[..., : len(own)].all()) and not bool(kept[..., len(own) :].any())
        if is_whole:
            return  # layers that lose nothing stay as they are
        for depth, site in enumerate(scope.sites):
            chosen = [kept[depth] for kept, _ in decided]
            joining = [joins[depth] for _, joins in decided if joins]
            store_chosen(scope, forward, cache, site, tokens, chosen, joining)

    def _require_plain(self, scope: ScopeState, cache: Any, tokens: Tensor | None) -> None:
        """Raise unless rows can be copied; where `tokens` leave padding out, of plain layers."""
        offloads = getattr(cache, "offloading", False)
        pruned = {site.layer_idx for site in scope.sites}
        for index, layer in enumerate(getattr(cache, "layers", ())):
            is_plain = type(layer) is DynamicLayer
            has_rows = hasattr(layer, "batch_select_indices") and tokens is None
            if offloads or (not is_plain and (index in pruned or not has_rows)):
                kind = "offloaded" if offloads else f"a {type(layer).__name__}"
                raise UnsupportedCacheError(
                    f"{type(self).__name__} replays whole contexts, each padded row alone, and a "
                    f"row of layer {index}, {kind}, cannot be copied; use it alone with a plain "
                    "DynamicCache, padded rows one by one, or use a press that does not replay"
                )

    def _real_tokens(self, forward: Forward) -> Tensor | None:
        """Which tokens of a context are not padding, `(B, S)` bool; None: all.

        Raises:
            UnsupportedInputError: if there are no token ids, or if the mask hides tokens other than
                left padding.
        """
        ids = forward.token_ids(f"{type(self).__name__} runs the tokens of the context again")
        mask = masks.for_full_attention(forward.given.get("attention_mask"))
        return masks.prefill_tokens(mask, ids.shape[1], len(ids))


def store_chosen(
    scope: ScopeState,
    forward: Forward,
    cache: Any,
    site: AttentionSite,
    occupied: Tensor | None,
    chosen: Sequence[Tensor],
    joining: Sequence[States] = (),
) -> None:
    """Prune a cache layer after the decoder has run, and append tokens to it.

    Args:
        forward: the forward of the decoder that has filled the layer.
        occupied: `(B, S)` bool, which slots hold tokens; None: all.
        chosen: by row, which of its `n` tokens and `m` appended ones each head of all
            tensor-parallel ranks keeps, `(H_kv, n + m)` bool.
        joining: by row, keys and values to append, `(1, H_kv, m, d)`; empty: none.
    """
    layer = caches.known(cache, site.layer_idx)
    require_readable(layer, site)
    (keys, values), seen = layer.states(), tokens_seen(layer, occupied)
    if joining:
        added = [torch.cat(of_rows).to(keys) for of_rows in zip(*joining, strict=True)]
        keys, values = (torch.cat(both, dim=2) for both in zip((keys, values), added, strict=True))
        n_joining = added[0].shape[2]
        occupied = None if occupied is None else pad(occupied, (0, n_joining), value=True)
    unknown = keys.new_empty(len(keys), 0, 0)  # hidden states are not read any more
    when = Moment(seen=seen, occupied=occupied)
    call = AttentionCall(site, unknown, keys, values, when=when, scope=scope)
    even = scope.press.evicts is Evicts.TOKENS  # all heads of a row keep the same number

    def decided(part: AttentionCall) -> Eviction:
        of_all = torch.stack([chosen[row] for row in part.when.batch_rows or range(len(chosen))])
        mask = site.ranks.own(of_all, keys.shape[1]).to(keys.device)
        keep = Eviction.keep if even else Eviction.keep_per_head
        return keep(part, true_indices(mask) if even else mask)

    store_decisions(scope, cache, Decisions(call, decided, row_by_row=even), forward)


def cache_before(scope: ScopeState, forward: Forward) -> Any:
    """The cache that a forward of the decoder will fill, or one like it; None: no cache."""
    config, uses = getattr(scope.decoder, "config", None), forward.given.get("use_cache")
    uses = getattr(config, "use_cache", True) if uses is None else uses
    return DynamicCache(config=config) if forward.cache is None and uses else forward.cache


def _next_positions(position_ids: Tensor | None, ids: Tensor, tokens: Tensor | None) -> list[Any]:
    """The position after the last one of each row of `ids` `(B, S)`; see `Row`."""
    if position_ids is not None:
        return (position_ids[:, -1] + 1).expand(len(ids)).tolist()
    # The model counts padding, too, and rows are run without it.
    return [None if tokens is None else ids.shape[1]] * len(ids)


def in_this_thread(act: Callable[..., Any]) -> Callable[..., Any]:
    """`act`, but as a no-op in threads other than the current one, which may run the model too."""
    thread = threading.get_ident()
    return lambda *args: act(*args) if threading.get_ident() == thread else None


# ---- KVCompose ---------------------------------------------------------------------------------

AT_A_TIME = 512
"""Tokens per forward of the second pass: one forward over all would need a mask `(S, 2 * S)`."""


@dataclass
class KVCompose(ReplayPress):
    """Keeps the keys that the context attends to when it is run a second time (arXiv 2509.05165).

    The context is run once more after itself, and a key's score aggregates the attention of these
    queries. The i-th best tokens of the heads of a layer form its i-th *composite token*, whose
    score aggregates theirs. Composite tokens of all layers compete for the budget, so that layers
    keep different numbers of tokens; within a layer, all heads keep the same number, each its own
    best. The first layer keeps at least as many as any other. Paper: Akulov et al.

    Attributes:
        structured: whether all heads of a layer keep the same number of tokens. If not, the tokens
            of all heads of all layers compete directly.
        compression_ratio: share of the tokens of all layers that is evicted, in [0, 1), or the
            `Tokens` that a head keeps on average.
        agg_task: aggregation of a key's attention over the queries: "max" or "mean".
        agg_group: aggregation of scores over the query heads of a GQA group: "max" or "mean".
        agg_head: aggregation of scores into those of composite tokens: "max" or "mean".
        add_v_norm: multiply scores by the norms of the values.
        add_mean_across_heads: add the mean over the heads of a layer to the scores.
        keep_token_lower_bound: minimum number of tokens that every layer keeps (every head, if not
            `structured`).
    """

    structured: bool = True
    agg_task: Literal["max", "mean"] = "max"
    agg_group: Literal["max", "mean"] = "mean"
    agg_head: Literal["max", "mean"] = "mean"
    add_v_norm: bool = False
    add_mean_across_heads: bool = True
    keep_token_lower_bound: int = count(0)

    @property
    def evicts(self) -> Evicts:
        return Evicts.TOKENS if self.structured else Evicts.PER_HEAD

    def score_row(self, row: Row) -> Tensor:
        received: dict[int, Tensor] = {}
        norms: dict[int, Tensor] = {}

        def observe(call: AttentionCall) -> None:
            layer, groups = call.site.place.depth, call.site.num_heads // call.site.num_kv_heads
            if layer not in received:
                norms[layer] = upcast(call.values[:, :, : row.length]).norm(dim=-1)
                zeros = torch.zeros_like(norms[layer])
                received[layer] = zeros.unsqueeze(2).repeat(1, 1, groups, 1)
            for heads, _, weights in attention_tiles(call, call.queries()):
                weights, of_heads = weights[..., : row.length], received[layer][:, heads]
                if self.agg_task == "max":
                    torch.maximum(of_heads, weights.amax(dim=3), out=of_heads)
                else:  # a sum for now; divided at the end
                    of_heads += weights.sum(dim=3)

        with self.watch_attention(row, observe), torch.no_grad():
            cache = row.alone()
            for start in range(0, row.length, AT_A_TIME):
                row.run(cache, start, input_ids=row.tokens[None, start : start + AT_A_TIME])
        of_layers = [self._scores(x, norms[layer]) for layer, x in sorted(received.items())]
        return torch.cat([scores.to(row.tokens.device) for scores in of_layers])

    def _scores(self, received: Tensor, norms: Tensor) -> Tensor:
        """Scores `(1, H_kv, S)` from attention `(1, H_kv, G, S)` and value norms `(1, H_kv, S)`."""
        received = received / received.shape[-1] if self.agg_task == "mean" else received
        scores = received.amax(dim=2) if self.agg_group == "max" else received.mean(dim=2)
        scores = scores * norms if self.add_v_norm else scores
        return scores + scores.mean(dim=1, keepdim=True) if self.add_mean_across_heads else scores

    def choose(self, scores: Tensor) -> Tensor:
        length = scores.shape[-1]
        curves = scores.sort(dim=-1, descending=True).values  # of what competes: heads, or layers
        if self.structured:
            curves = curves.amax(dim=1) if self.agg_head == "max" else curves.mean(dim=1)
            # Raised to the maximum over layers, so that the first layer gets the largest budget.
            curves = torch.cat((curves.amax(dim=0, keepdim=True), curves[1:])).unsqueeze(1)
        bound = min(length, max(1, self.keep_token_lower_bound))
        curves[..., :bound] = float("inf")
        n, amount = curves.shape[:2].numel(), self.compression_ratio
        total = n * amount.of(length) if isinstance(amount, Tokens) else n_kept(n * length, amount)
        # The first layer wins ties.
        best = best_first(curves.view(1, 1, -1), total).view(curves.shape)
        kept = best.sum(dim=-1, keepdim=True).clamp(min=bound)
        return best_first(scores, kept.expand(*scores.shape[:2], 1))
