"""The press that every mechanism installs, and what its uses have in common.

What is borrowed from the machinery of presses is borrowed here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

import hooks_impl
import patch_impl
from press_core.budget import n_kept
from press_core.cache.caches import known
from press_core.call import AttentionCall
from press_core.engine import after_attention, prune_before
from press_core.forward import Arguments, Forward
from press_core.observing import Passed
from press_core.presses.knorm import knorm_scores
from press_core.scope import bound_to
from press_core.select import gather_tokens, top_positions

Score = Callable[[Tensor], Tensor]
"""From keys `(B, H_kv, S, d)` to scores `(B, H_kv, S)`."""


@dataclass
class HookPress(hooks_impl.KnormPress):
    """`hooks_impl.KnormPress`, whose formula can be exchanged."""

    scores: Score = knorm_scores

    def score(  # type: ignore[override]
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


class Pruner:
    """Prunes what attention modules have cached: of the model, and of all others of its class."""

    def __init__(self, model: PreTrainedModel, compression_ratio: float, score: Score) -> None:
        # Bound, but never opened: what the mechanism finds, it prunes.
        self.scope = bound_to(PatchPress(compression_ratio, score), model)

    def call(self, module: nn.Module, call_next: Any, *args: Any, **kwargs: Any) -> Any:
        """Call an attention module's forward, `call_next`, and prune the layer it has filled."""
        output = call_next(*args, **kwargs)
        self.after(module, args, kwargs, output)
        return output

    def after(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any
    ) -> None:
        """Prune the layer that a forward has filled."""
        passed = self._passed(module, args, kwargs, output)
        n_tokens = passed.forward.n_tokens
        if passed.cache is not None and self._n_seen(passed) == n_tokens:  # it was a prefill
            after_attention(self.scope, self.scope.press, passed)

    def late(self, module: nn.Module, named: Mapping[str, Any]) -> None:
        """Prune, before a forward, what an earlier one has left whole."""
        passed = self._passed(module, (), named, None)
        if passed.cache is None or not self._n_seen(passed):
            return
        if not known(passed.cache, passed.site.layer_idx).is_pruned:
            prune_before(self.scope, passed.forward, passed.site)

    def _n_seen(self, passed: Passed) -> int:
        return int(passed.cache.get_seq_length(passed.site.layer_idx))

    def _passed(
        self, module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any
    ) -> Passed:
        site = replace(self.scope.sites[0], module=module, layer_idx=module.layer_idx)
        given = Arguments(args, kwargs, site.signature.parameters)
        cache, hidden_states = given.get(site.signature.cache_name), given.get("hidden_states")
        of_decoder = given.replace(past_key_values=cache, inputs_embeds=hidden_states)
        return Passed(Forward(module, of_decoder), site, given, output, None)


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
