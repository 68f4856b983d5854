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
from typing import Any, NamedTuple

import torch
from torch import Tensor

from press_core.cache.caches import prunable_layer, refuse_offloading, row_alone
from press_core.cache.masks import prefill_tokens
from press_core.cache.storing import BatchEviction, RowGroup, store
from press_core.call import AttentionCall
from press_core.errors import UnsupportedCacheError, UnsupportedInputError
from press_core.eviction import Eviction
from press_core.model.forward import AttentionForward, DecoderForward
from press_core.model.generation import require_whole
from press_core.model.sites import output_weight
from press_core.press import Needs, Phase, RatioPress
from press_core.scope import ScopeState, bind
from press_core.select import upcast


class Replay(NamedTuple):
    """A part of a context that is run again.

    Attributes:
        ids: `(1, m)`, what is run.
        start, stop: where the tokens that it judges lie in the context.
    """

    ids: Tensor
    start: int
    stop: int


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
        decoder = self.scope.decoder
        assert decoder is not None
        (given,) = inputs.values()
        start = self.next_position + n_before
        positions = start + torch.arange(given.shape[1], device=given.device)
        cache = self.alone() if cache is None else cache
        return decoder(
            **inputs, position_ids=positions[None], past_key_values=cache, use_cache=True
        )


class Judged(NamedTuple):
    """What is left of one row.

    Attributes:
        slots: `(S,)` int64, where its tokens lie in the cache; None: everywhere.
        chosen: by layer `(H_kv, S)` bool, which of them each head keeps.
        joining: by layer keys and values `(1, H_kv, n, d)` that join the cache; None: none do.
    """

    slots: Tensor | None
    chosen: dict[int, Tensor]
    joining: dict[int, tuple[Tensor, Tensor]] | None = None


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
    def choose(self, scores: dict[int, Tensor]) -> dict[int, Tensor]:
        """Which tokens of a row each head keeps, `(H_kv, S)` bool per layer; from its scores."""

    def judge(self, row: Row) -> Judged:
        """What is left of `row`."""
        return Judged(row.slots, self.choose(self.score_row(row)))

    def left(self, call: AttentionCall, chosen: Tensor) -> Eviction:
        """What is left of `call` where `chosen` `(B, H_kv, S)` stays."""
        return Eviction.keep_per_head(call, chosen)

    def scores(self, model: Any, input_ids: Tensor) -> list[Tensor]:
        """Scores of all tokens of contexts without padding, `(B, H_kv, S)` for each layer.

        Layers that no press works on get zeros.
        """
        scope = bind(self, model)
        press, decoder = scope.press, scope.decoder
        assert isinstance(press, ReplayPress)
        assert decoder is not None
        with torch.no_grad():
            cache = decoder(input_ids=input_ids, use_cache=True).past_key_values
            rows = [
                press.score_row(Row(scope, cache, row, ids, None, len(ids)))
                for row, ids in enumerate(input_ids)
            ]
        n_heads, device = scope.sites[0].num_kv_heads, input_ids.device
        nothing = torch.zeros(1, n_heads, input_ids.shape[1], device=device)
        n_layers = model.config.num_hidden_layers
        return [torch.cat([row.get(i, nothing) for row in rows]) for i in range(n_layers)]

    def watch_attention(self, row: Row, see: Callable[[AttentionCall], None]) -> Any:
        """The scope in which `see` is shown what each attention module does in this thread."""
        assert row.scope.model is not None
        thread = threading.get_ident()  # others may run the model meanwhile
        return self.collector(see, decoding=True, thread=thread)(row.scope.model)

    # ---- around the decoder ----------------------------------------------------------------------

    def before_decoder(self, scope: ScopeState, forward: DecoderForward) -> DecoderForward:
        """Refuse a context that cannot be run again before it is run."""
        require_whole(scope.sites[0], type(self).__name__)
        cache = forward.cache
        if self.compression_ratio and (cache is None or cache.get_seq_length() == 0):
            ids = forward.token_ids(self._why_ids)
            self._real_tokens(forward, ids)
        return forward

    def after_decoder(self, scope: ScopeState, forward: DecoderForward, output: Any) -> None:
        """Evict after the prefill of a context."""
        cache = forward.cache
        cache = getattr(output, "past_key_values", None) if cache is None else cache
        if cache is None or self.compression_ratio == 0:
            return
        refuse_offloading(self, cache)
        layers = {site.layer_idx: prunable_layer(cache, site.layer_idx) for site in scope.sites}
        if any(layer.get_seq_length() != forward.n_tokens for layer in layers.values()):
            return  # tokens came before these
        ids = forward.token_ids(self._why_ids)
        self._check_layers(layers)
        following = _next_positions(forward.argument("position_ids"), ids)
        tokens = self._real_tokens(forward, ids)
        judged = []
        for index in range(len(ids)):
            slots = None if tokens is None else tokens[index].nonzero().squeeze(1)
            own = ids[index] if slots is None else ids[index, slots]
            judged.append(self.judge(Row(scope, cache, index, own, slots, following[index])))
        self.store(scope, cache, judged)

    def store(self, scope: ScopeState, cache: Any, judged: list[Judged]) -> None:
        """Let the layers of `cache` hold what is left of each row."""
        for site in scope.sites:
            layer = cache.layers[site.layer_idx]
            keys, values = layer.keys, layer.values
            seen = tuple(keys.shape[2] if j.slots is None else len(j.slots) for j in judged)
            nothing = keys.new_empty(keys.shape[0], keys.shape[2], 0)  # of the hidden states
            call = AttentionCall(site, nothing, keys, values, seen=seen, scope=scope)
            groups = []
            for index, (slots, chosen, _) in enumerate(judged):
                alone = slots is None and len(judged) == 1
                part = call if alone else call.of_rows([index], slots)
                own = site.heads.own(chosen[site.layer_idx], keys.shape[1], dim=0)
                groups.append(RowGroup([index], slots, self.left(part, own[None])))
            forward = AttentionForward((), {site.cache_name: cache}, site)
            store(forward, scope, BatchEviction(call, groups))

    @property
    def _why_ids(self) -> str:
        return f"{type(self).__name__} runs the tokens of the context again"

    def _check_layers(self, layers: dict[int, Any]) -> None:
        for index, layer in layers.items():
            if type(layer).__name__ != "DynamicLayer":
                raise UnsupportedCacheError(
                    f"{type(self).__name__} runs a whole context again, and layer {index} is a "
                    f"{type(layer).__name__}; use it alone, with a DynamicCache"
                )

    def _real_tokens(self, forward: DecoderForward, ids: Tensor) -> Tensor | None:
        """Which of `ids` `(B, S)` are no padding, `(B, S)` bool; None: all.

        Raises:
            UnsupportedInputError: if the mask is none of that shape, or hides other tokens than
                padding on the left.
        """
        mask = forward.argument("attention_mask")
        if mask is not None and mask.dim() != 2:
            raise UnsupportedInputError(
                f"{type(self).__name__} needs an attention_mask of shape (B, S), "
                f"got {tuple(mask.shape)}"
            )
        return prefill_tokens(mask, ids.shape[1], len(ids))


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


# ---- what a replay pays attention to -------------------------------------------------------------


def seen_by(replay: Replay, keys: Tensor, n_sink: int, length: int) -> tuple[Tensor, slice]:
    """What KVzip lets a replay see: the sinks, the chunk and the replay itself.

    Args:
        keys: `(1, H_kv, length + m, d)`, of the context and of the replay.

    Returns:
        Their keys, and which of them are the chunk's.
    """
    n_before = min(n_sink, replay.start)
    parts = keys[:, :, :n_before], keys[:, :, replay.start : replay.stop], keys[:, :, length:]
    return torch.cat(parts, dim=2), slice(n_before, n_before + replay.stop - replay.start)


def projected_value_norms(call: AttentionCall, values: Tensor) -> Tensor:
    """L2 norm of each value after the output projection, for each query head.

    Args:
        values: `(1, H_kv, n, d)`.

    Returns:
        `(1, H_kv, G, n)`, float32.
    """
    values = upcast(values)
    n_kv, d = values.shape[1], values.shape[-1]
    weight = upcast(output_weight(call.site))
    per_head = weight.view(weight.shape[0], n_kv, -1, d).permute(1, 2, 3, 0)  # (H_kv, G, d, D)
    return (values.unsqueeze(2) @ per_head).norm(dim=-1)
