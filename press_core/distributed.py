"""Tensor parallelism: each rank holds some heads of a layer, and a press is to see them all.

What a press decides about one head may depend on all others (a shared budget, a mean over heads).
So that every press, whoever wrote it, decides as in one process, the ranks put together what they
hold of a call, all of them decide the same, and each stores its own heads.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from press_core.call import AttentionCall
from press_core.eviction import Eviction

_PER_HEAD = ("keys", "values", "attentions", "query", "tokens", "recent_scores")


def of_all_heads(call: AttentionCall) -> AttentionCall:
    """The call as one process would have observed it."""
    group, n_local = call.site.heads, call.keys.shape[1]
    if call.site.heads.process_group is None:
        return call
    gathered: dict[str, Any] = {
        name: group.gather(states)
        for name in _PER_HEAD
        if (states := getattr(call, name)) is not None
    }
    rotary = call.rotary_positions
    if rotary is not None and rotary.shape[1] == n_local:
        gathered["rotary_positions"] = group.gather(rotary)
    memory = {name: group.gather(known) for name, known in call.memory.items()}
    return replace(call, memory=memory, **gathered)


_DECIDED = (
    *("keys", "values", "kept", "rotary_positions"),
    *("head_mask", "channels", "late_mask", "recent_scores"),
)


def of_own_heads(eviction: Eviction, call: AttentionCall) -> Eviction:
    """What was decided about all heads, for those of this rank, which `call` was observed of."""
    if call.site.heads.process_group is None:
        return eviction
    if eviction.is_whole:
        return Eviction.nothing(call)
    own: dict[str, Any] = {
        name: call.site.heads.own(decided, call.keys.shape[1])
        for name in _DECIDED
        if (decided := getattr(eviction, name)) is not None
    }
    return replace(eviction, call=call, **own)
