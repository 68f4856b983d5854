"""Tensor parallelism: each rank holds some heads of a layer, but a press sees all of them.

A press's decision about a head may depend on all others (a shared budget, a mean over heads). So
that any press decides as in a single process, the ranks gather the calls of all heads, each rank
makes the same decision, and each stores its own heads.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from press_core.call import AttentionCall
from press_core.eviction import Eviction, memory_of
from press_core.press import Press

_DECIDED = "keys", "values", "kept", "rotary_positions", "head_mask", "channels", "late_mask"


def decided(press: Press, call: AttentionCall) -> Eviction:
    """The press's decision about the heads of all ranks, restricted to those of this rank."""
    eviction = press.evict(of_all_heads(call))
    if call.site.ranks.process_group is None:
        return eviction
    if eviction.is_whole and not eviction.carried:
        return Eviction.nothing(call)
    found = {name: x for name in _DECIDED if (x := getattr(eviction, name)) is not None}
    carried = own_heads(eviction.carried, call)
    return replace(eviction, call=call, carried=carried, **own_heads(found, call))


def remembered(press: Press, call: AttentionCall) -> Mapping[str, Tensor]:
    """The result of `Press.remember` for the heads of this rank."""
    return own_heads(memory_of([press], of_all_heads(call)), call)


def of_all_heads(call: AttentionCall) -> AttentionCall:
    """The call over the heads of all ranks, as a single process would observe it."""
    group, n_local = call.site.ranks, call.keys.shape[1]
    if group.process_group is None:
        return call

    def gathered(x: Tensor, dims: str) -> Tensor:
        is_of_heads = "H" in dims and x.shape[1] % n_local == 0  # else it is the same for all
        return group.gather(x) if is_of_heads else x

    return call.each(gathered)


def own_heads(known: Mapping[str, Tensor], call: AttentionCall) -> dict[str, Any]:
    """Values of all heads, restricted to those of this rank."""
    n = call.keys.shape[1]
    return {name: call.site.ranks.own(x, n) for name, x in known.items()}
