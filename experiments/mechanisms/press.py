"""The press that every mechanism installs, and what its uses have in common.

What is borrowed from the machinery of presses is borrowed here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

import hooks_impl
import patch_impl
from press_core import attention_sites
from press_core.cache.pruned import PrunedLayer
from press_core.call import AttentionCall
from press_core.engine import after_attention, before_attention, prune_before
from press_core.model.forward import AttentionForward
from press_core.presses.knorm import knorm_scores
from press_core.scope import ScopeState
from press_core.select import gather_tokens, n_kept, top_positions

Score = Callable[[Tensor], Tensor]
"""From keys `(B, H_kv, S, d)` to scores `(B, H_kv, S)`."""


@dataclass
class HookPress(hooks_impl.KnormPress):
    """`hooks_impl.KnormPress`, whose formula can be exchanged."""

    scores: Score = knorm_scores

    def score(
        self,
        module: nn.Module,
        hidden_states: Tensor,
        keys: Tensor,
        values: Tensor,
        attentions: Tensor | None,
        kwargs: dict[str, Any],
    ) -> Tensor:
        return self.scores(keys)


@dataclass
class PatchPress(patch_impl.KnormPress):
    """`patch_impl.KnormPress`, whose formula can be exchanged."""

    scores: Score = knorm_scores

    def score(self, call: AttentionCall) -> Tensor:
        return self.scores(call.keys)


Opens = Callable[[PreTrainedModel], AbstractContextManager[Any]]
"""`press(model)`: what a press is to its user, however it is installed."""


def as_press(scope: Callable[..., AbstractContextManager[Any]]) -> Callable[..., Opens]:
    """`scope(model, compression_ratio, score)`, to be called as `press(ratio, score)(model)`."""

    def press(compression_ratio: float, score: Score = knorm_scores) -> Opens:
        return lambda model: scope(model, compression_ratio, score)

    return press


def observing(
    press: PatchPress, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[ScopeState, AttentionForward]:
    """A forward of an attention module of whatever model, and what stands for a scope around it."""
    scope = ScopeState(press, None, attention_sites(module))
    return scope, AttentionForward(args, kwargs, scope.sites[0])


def prune_after(scope: ScopeState, forward: AttentionForward, output: Any) -> None:
    """Prune the layer that a forward has filled."""
    after_attention(scope, forward, output, None, query_is_rotated=False)


def prune_late(scope: ScopeState, forward: AttentionForward) -> None:
    """Prune, before a forward, what an earlier one has left whole."""
    layer = None if forward.cache is None else forward.layer
    pruned = isinstance(layer, PrunedLayer) and layer.is_pruned
    if layer is not None and layer.get_seq_length() and not pruned:
        prune_before(scope, forward)


def call_and_prune(
    press: PatchPress, module: nn.Module, call_next: Any, *args: Any, **kwargs: Any
) -> Any:
    """Call an attention module's forward, `call_next`, and prune the layer that it has filled."""
    scope, forward = observing(press, module, args, kwargs)
    forward = before_attention(scope, forward) or forward
    output = call_next(*forward.args, **forward.kwargs)
    prune_after(scope, forward, output)
    return output


def evicting(attend: Any, compression_ratio: float, score: Score) -> Any:
    """An attention function that evicts once `attend` has been called."""

    def attend_and_evict(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any
    ) -> Any:
        output = attend(module, query, key, value, mask, **kwargs)
        evict_in_place(compression_ratio, score, query, key, value)
        return output

    return attend_and_evict


def evict_in_place(
    compression_ratio: float, score: Score, query: Tensor, key: Tensor, value: Tensor
) -> None:
    """Shrink the keys and values that an attention function was given, after a prefill.

    An attention function is not given the cache. It is given the very tensors that a `DynamicCache`
    holds (without gradients), and these can be made smaller.

    Args:
        query: `(B, H, q, d)`; a forward that found its layer empty has as many queries as keys.
        key, value: `(B, H_kv, S, d)`.
    """
    n = n_kept(key.shape[2], compression_ratio)
    if query.shape[2] != key.shape[2] or n == key.shape[2]:
        return
    kept = top_positions(score(key), n)
    for states in (key, value):
        states.data = gather_tokens(states, kept)
