"""Presses that run a context again before they judge it.

They wait until the decoder has run over a context. Then they run it on from there, row by row and
over a cache of its own, and see what happens: how much attention each token gets, say. What they
decide about all layers is stored as the decision of any other press.

KVCompose (Akulov et al., arXiv 2509.05165) reads it again as it is: composite tokens, and layers
that compete.
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers.cache_utils import DynamicLayer

from press_core.attention import attention_tiles
from press_core.budget import Tokens, n_kept
from press_core.cache.caches import known, row_alone
from press_core.cache.masks import for_full_attention, prefill_tokens
from press_core.cache.positions import tokens_seen
from press_core.call import AttentionCall
from press_core.engine import store_decisions
from press_core.errors import UnsupportedCacheError
from press_core.eviction import Eviction
from press_core.fields import count
from press_core.forward import Arguments, Forward, own_cache
from press_core.model.sites import AttentionSite, n_layers_of
from press_core.observed import Moment
from press_core.press import RatioPress
from press_core.rows import Decisions, RowGroup, parts_of
from press_core.scope import InstalledPress, ScopeState, bound_to
from press_core.select import best_first, true_indices, upcast
from press_core.traits import Evicts, Needs, Phase


@dataclass(frozen=True, eq=False)
class Row:
    """One row of a batch whose context has been run, to be run on from there.

    Attributes:
        scope: of the press.
        cache: filled with the batch that the row is of; it stays as it is.
        index: of the row.
        tokens: `(S,)` int64, the row without its padding.
        slots: `(S,)` int64, where those tokens lie in the cache; None: everywhere.
        next_position: of the token after them.
    """

    scope: ScopeState
    cache: Any
    index: int
    tokens: Tensor
    slots: Tensor | None
    next_position: int

    @property
    def length(self) -> int:
        """`S`."""
        return len(self.tokens)

    def alone(self) -> Any:
        """A cache of its own, that holds what the batch's holds of the row; without gradients."""
        with torch.no_grad():
            return row_alone(self.cache, self.index, self.slots)

    def run(self, cache: Any = None, n_before: int = 0, **inputs: Tensor) -> Any:
        """Run the decoder over `inputs` `(1, m, ...)`, which come after the context.

        Args:
            cache: `alone()`, to be run on; None: a fresh one.
            n_before: how many tokens it holds beyond the context.

        Returns:
            What the decoder returned.
        """
        (given,) = inputs.values()
        start = self.next_position + n_before
        positions = start + torch.arange(given.shape[1], device=given.device)
        cache = self.alone() if cache is None else cache
        return self.scope.decoder(
            **inputs, position_ids=positions[None], past_key_values=cache, use_cache=True
        )


States = tuple[Tensor, Tensor]
"""Keys and values `(1, H_kv, n, d)`."""


@dataclass
class ReplayPress(RatioPress, InstalledPress):
    """A press that acts when the decoder has run a context, and runs it on before it decides.

    Rows of a batch are judged one by one, and without their padding.
    """

    needs = Needs.QUERIES
    phases = Phase.DECODER

    @abstractmethod
    def score_row(self, row: Row) -> Tensor:
        """Scores of the tokens of one row in the layers of its scope, `(L, H_kv, S)`."""

    @abstractmethod
    def choose(self, scores: Tensor) -> Tensor:
        """Which tokens of a row each head keeps, `(L, H_kv, S)` bool, from its scores."""

    def judge(self, row: Row) -> tuple[Tensor, list[States]]:
        """What is left of `row`, and what joins each of its layers; nothing, or as much as others.

        Returns:
            Which tokens each head keeps, of those that join it, too: `(L, H_kv, S + n)` bool. And
            those that join, by layer; empty: none do.
        """
        return self.choose(self.score_row(row)), []

    def scores(self, model: Any, input_ids: Tensor) -> list[Tensor]:
        """Scores of all tokens of contexts without padding, `(B, H_kv, S)` for each layer.

        Layers that no press works on get zeros.
        """
        scope = bound_to(self, model)
        with torch.no_grad():
            cache = scope.decoder(input_ids=input_ids, use_cache=True).past_key_values
            rows = [
                self.score_row(Row(scope, cache, row, ids, None, len(ids)))
                for row, ids in enumerate(input_ids)
            ]
        known = torch.stack(rows, dim=1)
        scores = known.new_zeros(n_layers_of(scope.sites[0]), *known.shape[1:])
        scores[[site.layer_idx for site in scope.sites]] = known
        return [*scores]

    def watch_attention(self, row: Row, see: Callable[[AttentionCall], None]) -> Any:
        """The scope in which `see` is shown what each attention module does in this thread."""
        thread = threading.get_ident()  # others may run the model meanwhile
        return self.collector(see, phases=Phase.DECODING, thread=thread)(row.scope.model)

    # ---- around the decoder ----------------------------------------------------------------------

    def before_decoder(self, scope: ScopeState, forward: Forward) -> Arguments:
        """Refuse a context that cannot be run again before it is run."""
        if self.compression_ratio and forward.is_context:
            self._real_tokens(forward)
        return forward.given

    def after_decoder(self, scope: ScopeState, forward: Forward, output: Any) -> None:
        """Evict after the prefill of a context."""
        cache = cache_after(forward, output)
        if cache is None or self.compression_ratio == 0:
            return
        for site in scope.sites:
            layer = cache.layers[site.layer_idx]
            if type(layer) is not DynamicLayer:
                raise UnsupportedCacheError(
                    f"{type(self).__name__} runs a whole context again, and layer "
                    f"{site.layer_idx} is a {type(layer).__name__}; use it alone, with a "
                    "DynamicCache"
                )
        ids, tokens = forward.given.get("input_ids"), self._real_tokens(forward)
        following = _next_positions(forward.given.get("position_ids"), ids)
        judged = []
        for index in range(len(ids)):
            slots = None if tokens is None else tokens[index].nonzero().squeeze(1)
            own = ids[index] if slots is None else ids[index, slots]
            judged.append(self.judge(Row(scope, cache, index, own, slots, following[index])))
        for depth, site in enumerate(scope.sites):
            chosen = [kept[depth] for kept, _ in judged]
            joining = [joins[depth] for _, joins in judged if joins]
            even = self.evicts is Evicts.TOKENS
            store_chosen(scope, cache, site, tokens, chosen, joining, even)

    def _real_tokens(self, forward: Forward) -> Tensor | None:
        """Which tokens of a context are no padding, `(B, S)` bool; None: all.

        Raises:
            UnsupportedInputError: if there are no token ids, or if the mask hides other tokens than
                padding on the left.
        """
        ids = forward.token_ids(f"{type(self).__name__} runs the tokens of the context again")
        mask = for_full_attention(forward.given.get("attention_mask"))
        return prefill_tokens(mask, ids.shape[1], len(ids))


def store_chosen(
    scope: ScopeState,
    cache: Any,
    site: AttentionSite,
    occupied: Tensor | None,
    chosen: Sequence[Tensor],
    joining: Sequence[States] = (),
    even: bool = False,
) -> None:
    """Store what is left of a layer once the decoder has run, and behind it what joins that.

    Args:
        occupied: `(B, S)` bool, which slots hold tokens; None: all.
        chosen: of each row which of its tokens, and of those that join it, each head of all ranks
            keeps, `(H_kv, n + m)` bool.
        joining: of each row keys and values `(1, H_kv, m, d)`; empty: nothing joins.
        even: whether all heads of a row keep as many.
    """
    layer = known(cache, site.layer_idx)
    (keys, values), when = layer.states(), Moment(seen=tokens_seen(layer, occupied))
    if joining:
        keys, values = (
            torch.cat((states, torch.cat(behind).to(states)), dim=2)
            for states, behind in zip((keys, values), zip(*joining, strict=True), strict=True)
        )
        n_joining = joining[0][0].shape[2]
        occupied = None if occupied is None else pad(occupied, (0, n_joining), value=True)
    unknown = keys.new_empty(len(keys), 0, 0)  # nobody asks for the hidden states again
    call, groups = AttentionCall(site, unknown, keys, values, when=when, scope=scope), []
    for rows, slots, part in parts_of(call, occupied, row_by_row=even):
        of_all_ranks = torch.stack([chosen[row] for row in rows])
        mask = site.ranks.own(of_all_ranks, keys.shape[1]).to(keys.device)
        keep = Eviction.keep if even else Eviction.keep_per_head
        eviction = keep(part, true_indices(mask) if even else mask)
        groups.append(RowGroup(rows, slots, eviction))
    store_decisions(scope, cache, site, Decisions(call, groups))


def cache_after(forward: Forward, output: Any) -> Any:
    """The cache that a forward of the decoder has filled with its own keys; None: it has not."""
    if forward.cache is not None:
        return forward.cache
    return own_cache(getattr(output, "past_key_values", None))


def _next_positions(position_ids: Tensor | None, ids: Tensor) -> list[int]:
    """The position after the last one of each row of `ids` `(B, S)`."""
    if position_ids is None:  # the model counts padding too
        return [ids.shape[1]] * len(ids)
    return (position_ids[:, -1] + 1).expand(len(ids)).tolist()


def in_this_thread(act: Callable[..., Any]) -> Callable[..., Any]:
    """`act` in the thread that asks for it, and nothing in others that run the model meanwhile."""
    thread = threading.get_ident()

    def act_here(*args: Any) -> Any:
        return act(*args) if threading.get_ident() == thread else None

    return act_here


# ---- KVCompose ---------------------------------------------------------------------------------

AT_A_TIME = 512
"""Tokens of the second reading in one forward: a mask over all of them would be `S * 2 S`."""


@dataclass
class KVCompose(ReplayPress):
    """Keeps what a context attends to when it is read again (arXiv 2509.05165).

    The context is run once more after itself. A key's score is the attention that it gets from
    those queries. Every head keeps tokens of its own, and all heads of a layer the same number: the
    best tokens of the heads of a layer make up its first *composite token*, the second best its
    second one, and the composite tokens of all layers compete. The first layer keeps at least as
    many as any other.

    Attributes:
        structured: whether all heads of a layer keep the same number of tokens. If not, the heads
            of all layers compete for themselves.
        compression_ratio: share of the tokens of all layers that is evicted, in [0, 1).
        agg_task: how the attention of all queries to a key makes its score: "max" or "mean".
        agg_group: the same of the scores of the query heads that share a KV head.
        agg_head: the same of the scores that make up a composite token.
        add_v_norm: multiply scores by the norm of the value.
        add_mean_across_heads: add the mean over the heads of a layer to the scores.
        keep_token_lower_bound: tokens that every layer keeps at least.
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

        def see(call: AttentionCall) -> None:
            layer, groups = call.site.place.depth, call.site.num_heads // call.site.num_kv_heads
            if layer not in received:
                norms[layer] = upcast(call.values[:, :, : row.length]).norm(dim=-1)
                zeros = torch.zeros_like(norms[layer])
                received[layer] = zeros.unsqueeze(2).repeat(1, 1, groups, 1)
            for tile in attention_tiles(call.site, call.queries(), call.keys):
                weights, of_heads = tile.weights[..., : row.length], received[layer][:, tile.heads]
                if self.agg_task == "max":
                    torch.maximum(of_heads, weights.amax(dim=3), out=of_heads)
                else:  # the sum over the queries so far
                    of_heads += weights.sum(dim=3)

        with self.watch_attention(row, see), torch.no_grad():
            cache = row.alone()
            for start in range(0, row.length, AT_A_TIME):
                row.run(cache, start, input_ids=row.tokens[None, start : start + AT_A_TIME])
        of_layers = [self._scores(x, norms[layer]) for layer, x in sorted(received.items())]
        return torch.cat([scores.to(row.tokens.device) for scores in of_layers])

    def _scores(self, received: Tensor, norms: Tensor) -> Tensor:
        """`(1, H_kv, S)` from what each query head gave, `(1, H_kv, G, S)`, and norms of values."""
        received = received / received.shape[-1] if self.agg_task == "mean" else received
        scores = received.amax(dim=2) if self.agg_group == "max" else received.mean(dim=2)
        scores = scores * norms if self.add_v_norm else scores
        if self.add_mean_across_heads:
            scores = scores + scores.mean(dim=1, keepdim=True)
        return scores

    def choose(self, scores: Tensor) -> Tensor:
        if not self.structured:
            return self._of_heads(scores)
        kept = self.budgets(scores).view(-1, 1, 1).expand(*scores.shape[:2], 1)
        return best_first(scores, kept)

    def budgets(self, scores: Tensor) -> Tensor:
        """How many tokens each layer keeps, `(L,)` int64, from scores `(L, H_kv, S)`."""
        in_order = scores.sort(dim=-1, descending=True).values
        curves = in_order.amax(dim=1) if self.agg_head == "max" else in_order.mean(dim=1)
        # At least as good as those of any layer, so that the first layer gets the largest budget.
        curves = torch.cat((curves.amax(dim=0, keepdim=True), curves[1:]))
        n_layers, length = curves.shape
        bound = self._bound(length)
        curves[:, :bound] = float("inf")
        # Stable: of equals the first layer's come first.
        order = curves.flatten().argsort(descending=True, stable=True)
        layers = order[: self._n_kept(n_layers, length)] // length
        return layers.bincount(minlength=n_layers).clamp(min=bound)

    def _of_heads(self, scores: Tensor) -> Tensor:
        """Which tokens each head keeps, `(L, H_kv, S)` bool."""
        n_layers, n_heads, length = scores.shape
        least = best_first(scores, self._bound(length))
        raised = scores.masked_fill(least, float("inf"))
        kept = best_first(raised.view(1, 1, -1), self._n_kept(n_layers * n_heads, length))
        return kept.view(scores.shape) | least

    def _bound(self, length: int) -> int:
        """How many of `length` tokens every layer (head) keeps at least; none is left empty."""
        return min(length, max(1, self.keep_token_lower_bound))

    def _n_kept(self, n: int, length: int) -> int:
        """How many tokens `n` layers (heads) keep together, of a context of `length`."""
        if isinstance(self.compression_ratio, Tokens):
            return n * self.compression_ratio.of(length)
        return n_kept(n * length, self.compression_ratio)
