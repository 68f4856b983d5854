"""Models that torch.compile has compiled: forwards in which a press acts run eagerly."""

import sys
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any, ParamSpec

import torch
from transformers.cache_utils import Cache

from press_core.cache.caches import is_empty, known, may_be_empty
from press_core.cache.memory import FIRST
from press_core.forward import Arguments, current, frames_from
from press_core.model.graphs import compile_nothing, may_break
from press_core.running.chunks import is_under_way
from press_core.scope import ScopeState
from press_core.traits import Phase

P = ParamSpec("P")


def eagerly(act: Callable[P, None]) -> Callable[P, None]:
    """`act`, kept out of graphs: values decide what is kept, and buffers grow."""
    outside = torch.compiler.disable(act)
    return lambda *args, **kwargs: (outside if may_break() else act)(*args, **kwargs)


def runs_eagerly(scope: ScopeState, given: Arguments) -> bool:
    """Whether to run a forward eagerly though it is compiled: the press acts in it."""
    if not may_break() or not scope.sites:
        return False
    cache, index, n_new = given.cache, scope.first, given.n_tokens
    phases = scope.traits.phases
    if is_empty(cache, index) or is_under_way(cache) or (n_new > 1 and may_be_empty(cache, index)):
        return bool(phases & Phase.ON_CONTEXTS)
    if not isinstance(cache, Cache) or not scope.traits.counts_steps:
        return bool(phases & Phase.BEFORE_DECODING)
    # Without the states in the memory, whose number graphs would depend on.
    return scope.acts_in_step(known(cache, index).memory(scope.key).ticks + 1 - FIRST, n_new)


@torch.compiler.disable(recursive=False)  # type: ignore[untyped-decorator]
def enter_eagerly(
    enter: Callable[[ScopeState, Arguments], Arguments], scope: ScopeState, given: Arguments
) -> Arguments:
    """`enter` a compiled forward, and run it eagerly until it ends."""
    compile_again: Callable[[], Any] = compile_nothing()
    try:
        given = enter(scope, given)
    except BaseException:
        compile_again()
        raise
    if current.forward is None:  # the scope does not take part
        compile_again()
    else:
        current.forward.at_end.append(partial(_inside, current.forward.frame, compile_again))
    return given


def _inside(frame: FrameType | None, act: Callable[[], Any]) -> None:
    """Call `act` in `frame`, and not once an interrupt has ended it, nor in another thread."""
    if any(inner is frame for inner in frames_from(sys._getframe())):
        act()
