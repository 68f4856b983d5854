"""Observing a forward of an attention module, and describing it to a press."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch import Tensor

from press_core.cache import caches, masks
from press_core.cache.memory import Memory, Step
from press_core.cache.pruned import PrunedLayer
from press_core.cache.slots import filled_columns, occupied_slots
from press_core.call import AttentionCall
from press_core.errors import UnsupportedInputError
from press_core.eviction import REPORT_POSITIONS
from press_core.forward import Arguments, Forward, own_cache
from press_core.model.sites import AttentionSite
from press_core.observed import Positions, Query
from press_core.press import Press
from press_core.scope import ScopeState
from press_core.traits import Needs


@dataclass(frozen=True, eq=False)
class AttentionPass:
    """A forward of an attention module that has just ended, as one scope observed it.

    Attributes:
        scope: an open scope that acts in it.
        press: what decides: the scope's press, or one that a `forward_hook` of its own calls.
        forward: the forward of the decoder that it is part of.
        site: the attention module.
        given: its arguments.
        output: its output.
        query: its query, if the press reads queries.
    """

    scope: ScopeState
    press: Press
    forward: Forward
    site: AttentionSite
    given: Arguments
    output: Any
    query: Query | None

    @property
    def cache(self) -> Any:
        """The decoder's self-attention cache, or None."""
        return own_cache(self.given.get(self.site.signature.cache_name))

    @property
    def hidden_states(self) -> Tensor:
        """`(B, q, D)`, its input."""
        given: Tensor | None = self.given.get("hidden_states")
        return self.given.args[0] if given is None else given  # the parameter has another name

    @cached_property
    def layer(self) -> PrunedLayer:
        """The cache layer that it has filled."""
        return caches.known(self.cache, self.site.layer_idx)

    @property
    def mask(self) -> Any:
        """Its attention mask, in any form, over the slots that were filled before any pruning."""
        mask, index = self.given.get("attention_mask"), self.site.layer_idx
        return self.forward.once(lambda: filled_columns(mask, self.layer), "filled", mask, index)

    @property
    def cos_sin(self) -> tuple[Tensor, Tensor] | None:
        """Cosines and sines of its tokens' positions, or None if it did not get them."""
        given = self.given.get("position_embeddings")
        pair = isinstance(given, tuple) and len(given) == 2
        return given if pair and given[0].dim() == 3 else None

    @property
    def position_ids(self) -> Tensor | None:
        """`(1 or B, q)` int64, or None; of positions in three dimensions the first dimension.

        The decoder's own, if it does not hand them to its attention modules.
        """
        ids: Tensor | None = self.given.get("position_ids")
        if ids is None and self.site.rotary_in_3d is None:
            ids = self.forward.given.get("position_ids")
        return ids if ids is None or ids.dim() == 2 else ids[0]

    @property
    def occupied(self) -> Tensor | None:
        """Which slots of the layer hold tokens of their row, `(B, S)` bool; None: all."""
        (batch, n), mask = self.hidden_states.shape[:2], self.mask
        if self.layer.is_pruned or self.layer.n_seen != n:
            return occupied_slots(mask, self.layer, n, n_held=n)
        # The layer holds only the tokens of this forward: a context in one forward.
        return self.forward.once(lambda: masks.prefill_tokens(mask, n, batch), "tokens", mask, n)


def call_of(passed: AttentionPass, keys: Tensor, values: Tensor, **fields: Any) -> AttentionCall:
    """The call of a forward of an attention module, with additional `fields`."""
    device = passed.hidden_states.device  # the states of an offloaded cache are moved back
    return AttentionCall(
        passed.site,
        passed.hidden_states,
        keys.to(device),
        values.to(device),
        query=passed.query,
        at=Positions(passed.cos_sin, passed.position_ids),
        kwargs=passed.given.kwargs,
        notes=passed.forward.notes,
        scope=passed.scope,
        **fields,
    )


def context_call(passed: AttentionPass) -> AttentionCall:
    """The call of a prefill.

    Raises:
        UnsupportedInputError: if an inner scope pruned the layer and did not report what it kept:
            the queries and positions of its keys are then unknown.
    """
    layer = passed.layer
    call = call_of(passed, *layer.states())
    if not layer.is_pruned:
        weights: Any = passed.output[1] if isinstance(passed.output, tuple) else None
        if not isinstance(weights, Tensor) or weights.dim() != 4:  # flex returns sums on a GPU
            return call
        return call.replace(attentions=passed.site.grouped(weights)[..., : call.length])
    positions, rotary = layer.all_positions(), layer.all_rotary_positions()
    if positions is None:
        raise UnsupportedInputError(
            f"the press of an inner scope pruned {passed.site.name} without saying which tokens it "
            f"kept; open that scope outermost, or {REPORT_POSITIONS}"
        )
    tokens = positions.to(passed.hidden_states.device)
    return call.replace(at=replace(call.at, tokens=tokens, rotary=rotary))


def step_of(passed: AttentionPass) -> Step:
    """The states of a forward's tokens that the press may read in a later forward."""
    states, cos_sin, ids = {}, passed.cos_sin, passed.position_ids
    needs = passed.scope.traits.needs
    if needs & (Needs.FORWARD | Needs.HIDDEN_STATES):  # more memory than a cache
        states["hidden_states"] = passed.hidden_states
    if passed.query is not None:
        states["query"] = passed.query.states
    if cos_sin is not None:
        states["cos"], states["sin"] = cos_sin
    if ids is not None and passed.given.get("position_ids") is not None:  # in all forwards
        states["position_ids"] = ids.unsqueeze(-1)
    return Step(passed.hidden_states.shape[1], states)


def with_steps(call: AttentionCall, memory: Memory, limit: int | None = None) -> AttentionCall:
    """The call with the buffered states of the last `limit` tokens; None: of all.

    Hidden states that the press did not declare are on the meta device (only their shape).
    """
    states, n = memory.last(limit), memory.n_known
    batch, _, width = call.hidden_states.shape
    hidden_states = states.get("hidden_states")
    if hidden_states is None:
        n = n if limit is None else min(n, limit)
        hidden_states = call.hidden_states.new_empty(batch, n, width, device="meta")
    query, ids = call.query, states.get("position_ids")
    if query is not None:
        query = Query(states["query"], query.is_rotated)
    embeddings = (states["cos"], states["sin"]) if "cos" in states else None
    at = replace(call.at, embeddings=embeddings, ids=None if ids is None else ids.squeeze(-1))
    return call.replace(hidden_states=hidden_states, query=query, at=at)
