"""Presses that run a context again before they judge it.

They wait until the decoder has run over a context. Then they run it on from there, row by row and
over a cache of its own, and see what happens: how much attention each token gets, say. What they
decide about all layers is stored as the decision of any other press.
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers.cache_utils import DynamicLayer

from press_core.cache.caches import row_alone
from press_core.cache.masks import prefill_tokens
from press_core.call import AttentionCall
from press_core.engine import store_left
from press_core.errors import UnsupportedCacheError, UnsupportedInputError
from press_core.eviction import Eviction
from press_core.forward import Arguments, Forward, own_cache
from press_core.model.sites import AttentionSite, n_layers_of
from press_core.observed import Moment
from press_core.press import RatioPress
from press_core.rows import Left, RowGroup
from press_core.scope import ScopeState, bound_to
from press_core.select import places
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


Chosen = dict[int, Tensor]
"""By layer `(H_kv, S)` bool, which tokens of a row each head keeps."""

Joining = dict[int, tuple[Tensor, Tensor]]
"""By layer keys and values `(1, H_kv, n, d)` that join the cache of a row; empty: none do."""


@dataclass
class ReplayPress(RatioPress):
    """A press that acts when the decoder has run a context, and runs it on before it decides.

    Rows of a batch are judged one by one, and without their padding.
    """

    needs = Needs.QUERIES
    phases = Phase.DECODER

    @abstractmethod
    def score_row(self, row: Row) -> dict[int, Tensor]:
        """Scores of the tokens of one row, `(1, H_kv, S)` by layer, the higher the better."""

    @abstractmethod
    def choose(self, scores: dict[int, Tensor]) -> Chosen:
        """Which tokens of a row are kept, from its scores."""

    def judge(self, row: Row) -> tuple[Chosen, Joining]:
        """What is left of `row`, and what joins it."""
        return self.choose(self.score_row(row)), {}

    def scores(self, model: Any, input_ids: Tensor) -> list[Tensor]:
        """Scores of all tokens of contexts without padding, `(B, H_kv, S)` for each layer.

        Layers that no press works on get zeros.
        """
        scope = bound_to(self, model)
        press = scope.press
        assert isinstance(press, ReplayPress)
        with torch.no_grad():
            cache = scope.decoder(input_ids=input_ids, use_cache=True).past_key_values
            rows = [
                press.score_row(Row(scope, cache, row, ids, None, len(ids)))
                for row, ids in enumerate(input_ids)
            ]
        site, device = scope.sites[0], input_ids.device
        nothing = torch.zeros(1, site.num_kv_heads, input_ids.shape[1], device=device)
        layers = range(n_layers_of(site))
        return [torch.cat([row.get(i, nothing) for row in rows]) for i in layers]

    def watch_attention(self, row: Row, see: Callable[[AttentionCall], None]) -> Any:
        """The scope in which `see` is shown what each attention module does in this thread."""
        thread = threading.get_ident()  # others may run the model meanwhile
        press: Any = self
        return press.collector(see, phases=Phase.DECODING, thread=thread)(row.scope.model)

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
            row = Row(scope, cache, index, own, slots, following[index])
            judged.append((row, *self.judge(row)))
        for site in scope.sites:
            store_left(scope, cache, site, self.left_of_layer(site, judged))

    def left_of_layer(self, site: AttentionSite, judged: list[tuple[Row, Chosen, Joining]]) -> Left:
        """What is left of the layer of `site`, of all rows, and behind it what joins them."""
        scope, even, index = judged[0][0].scope, self.evicts is Evicts.TOKENS, site.layer_idx
        layer = judged[0][0].cache.layers[index]
        length, keys, values = layer.keys.shape[2], layer.keys, layer.values
        some = next((joins[index] for _, _, joins in judged if joins), None)
        if some is not None:  # zeros behind rows that nothing joins
            zeros = torch.zeros_like(some[0]), torch.zeros_like(some[1])
            joined = [joins.get(index, zeros) for _, _, joins in judged]
            keys = torch.cat((keys, torch.cat([k for k, _ in joined]).to(keys)), dim=2)
            values = torch.cat((values, torch.cat([v for _, v in joined]).to(values)), dim=2)
        seen = tuple(row.length for row, *_ in judged)
        nothing = keys.new_empty(keys.shape[0], keys.shape[2], 0)  # of the hidden states
        call = AttentionCall(site, nothing, keys, values, when=Moment(seen=seen), scope=scope)
        groups, behind = [], torch.arange(length, keys.shape[2], device=keys.device)
        for row, chosen, joins in judged:
            slots = None if row.slots is None else torch.cat((row.slots, behind))
            part = call if slots is None and len(judged) == 1 else call.of_rows([row.index], slots)
            own = site.ranks.own(chosen[index], keys.shape[1], dim=0)
            own = pad(own, (0, len(behind)), value=bool(joins))[None]
            left = Eviction.keep(part, places(own)) if even else Eviction.keep_per_head(part, own)
            groups.append(RowGroup([row.index], slots, left))
        return Left(call, groups)

    def _real_tokens(self, forward: Forward) -> Tensor | None:
        """Which tokens of a context are no padding, `(B, S)` bool; None: all.

        Raises:
            UnsupportedInputError: if there are no token ids, if the mask is none of their shape, or
                hides other tokens than padding on the left.
        """
        ids, mask = forward.given.get("input_ids"), forward.given.get("attention_mask")
        if ids is None:
            raise UnsupportedInputError(
                f"{type(self).__name__} runs the tokens of the context again; pass input_ids, not "
                "inputs_embeds"
            )
        if mask is not None and mask.dim() != 2:
            raise UnsupportedInputError(
                f"{type(self).__name__} needs an attention_mask of shape (B, S), "
                f"got {tuple(mask.shape)}"
            )
        return prefill_tokens(mask, ids.shape[1], len(ids))


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
