"""The forward of the decoder in progress: described when it enters, read by every layer.

A scope takes part in the forwards that begin while it is open. When the decoder is entered,
`entry.begin` describes the forward, for this thread and until it returns. Layers read
`current.forward`, and do nothing if it is None.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from enum import Enum, auto
from types import FrameType
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn

from press_core.errors import UnsupportedInputError

T = TypeVar("T")


class Arguments(NamedTuple):
    """The arguments of one forward of a module, found and replaced by name.

    Attributes:
        args, kwargs: as passed.
        names: of the parameters, in order.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    names: tuple[str, ...]

    def get(self, name: str) -> Any:
        """The argument called `name`, positional or by keyword, or None."""
        if self.args and name not in self.kwargs:
            return dict(zip(self.names, self.args, strict=False)).get(name)
        return self.kwargs.get(name)

    @property
    def cache(self) -> Any:
        """The decoder's self-attention cache; None if none is passed."""
        newer, older = CACHE_NAMES
        cache = self.get(newer)
        return own_cache(self.get(older) if cache is None else cache)

    @property
    def n_tokens(self) -> int:
        """Number of tokens passed to a decoder, as ids or as embeddings."""
        ids = self.get("input_ids")
        ids = self.get("inputs_embeds") if ids is None else ids
        return 0 if ids is None else int(ids.shape[1])

    def replace(self, **given: Any) -> Arguments:
        """A copy with some arguments replaced."""
        args, kwargs = list(self.args), dict(self.kwargs)
        for name, value in given.items():
            index = self.names.index(name) if name in self.names else len(args)
            if name not in kwargs and index < len(args):
                args[index] = value
            else:
                kwargs[name] = value
        return Arguments(tuple(args), kwargs, self.names)


CACHE_NAMES = "cache", "past_key_values"
"""Names of the arguments and outputs that hold a cache: since transformers 5.24, and before.

Releases since then also take the other one from callers. Before, continuous batching passed its
paged cache by the newer name.
"""


def own_cache(cache: Any) -> Any:
    """The self-attention cache of a decoder: in an encoder-decoder, one of two."""
    return getattr(cache, "self_attention_cache", cache)


def cache_of(output: Any) -> Any:
    """The cache that a model or a decoder returned, or None."""
    name = next((name for name in CACHE_NAMES if hasattr(type(output), name)), "")
    return getattr(output, name, None)


def with_cache(module: nn.Module, cache: Any) -> dict[str, Any]:
    """The keyword argument by which a model or a decoder takes a cache."""
    # A forward of a user's own may hand all keyword arguments on.
    names = "forward", "prepare_inputs_for_generation"
    methods = [getattr(type(module), name) for name in names if hasattr(type(module), name)]
    known = {name for method in methods for name in inspect.signature(method).parameters}
    return {next((name for name in CACHE_NAMES if name in known), CACHE_NAMES[-1]): cache}


def names_of(module: nn.Module) -> tuple[str, ...]:
    """Names of the parameters of a module's forward, in order."""
    return tuple(inspect.signature(type(module).forward).parameters)[1:]


@dataclass(eq=False)
class Progress:
    """The state of one scope in a forward.

    Attributes:
        n_steps: while decoding, forwards since the scope last pruned.
        n_forwards: while decoding, forwards over this cache in total.
        depths: of the attention modules that the scope has observed in this forward.
    """

    n_steps: int = 0
    n_forwards: int = 0
    depths: set[int] = field(default_factory=set)


@dataclass(eq=False)
class Forward:
    """One forward of a decoder in which scopes take part.

    Attributes:
        decoder: the module that takes token ids and runs all attention modules.
        given: the arguments to call the decoder with.
        is_context: whether it is part of a prefill: it began with an empty cache, or is a chunk.
        n_remaining: tokens of the context that follow in later chunks, in a chunked prefill.
        entered: scopes that were open when it began, the outermost first; none after it has ended.
        acting: those of them that act around its attention modules, each with its state.
        outer: the forward of this or another decoder in which this one runs.
        notes: values computed once for all layers: masks, positions, notes of a press.
        helped: the layers of the cache, if some need their own masks or positions; else empty.
        reading: the cache layer about to be read, if its mask and positions are ready; or an
            `OneMask`, if the model's mask serves all layers.
        at_failure: callbacks for when an exception ends it.
        at_end: callbacks for when it ends, with or without an exception.
        frame: a stack frame that lives as long as the forward: PyTorch calls no hook after an
            interrupt.
        cache: the decoder's self-attention cache; None if none was passed (the model may make one).
    """

    decoder: nn.Module
    given: Arguments
    is_context: bool = True
    n_remaining: int = 0
    entered: list[Any] = field(default_factory=list)
    acting: dict[Any, Progress] = field(default_factory=dict)
    outer: Forward | None = None
    notes: dict[Any, Any] = field(default_factory=dict)
    helped: Sequence[Any] = ()
    reading: Any = None
    at_failure: list[Callable[[], None]] = field(default_factory=list)
    at_end: list[Callable[[], None]] = field(default_factory=list)
    frame: FrameType | None = None
    cache: Any = field(init=False)

    def __post_init__(self) -> None:
        self.cache = self.given.cache

    @property
    def n_tokens(self) -> int:
        """Number of tokens passed to the decoder."""
        return self.given.n_tokens

    def token_ids(self, why: str) -> torch.Tensor:
        """The token ids `(B, S)` passed to the decoder.

        Args:
            why: begins the error message: who needs token ids, and what for.

        Raises:
            UnsupportedInputError: if embeddings were passed instead, as image-text models do.
        """
        ids: torch.Tensor | None = self.given.get("input_ids")
        if ids is None:
            raise UnsupportedInputError(f"{why}; pass input_ids, not embeddings, to a text model")
        return ids

    def once(self, make: Callable[[], T], *key: Any) -> T:
        """The result of `make`, cached in this forward by `key`.

        Args:
            key: numbers, strings and tuples are compared by value, other objects by identity.
        """
        if torch.compiler.is_compiling():  # the compiler removes common subexpressions
            return make()
        known = tuple([part if isinstance(part, (int, str, tuple)) else id(part) for part in key])
        if known not in self.notes:
            self.notes[known] = key, make()  # keeps the key alive, so that its id is not reused
        return self.notes[known][1]

    def noted(self, name: str, make: Callable[[], T]) -> T:
        """The note `name`; what `make` returned the first time, compiled or not."""
        if name not in self.notes:
            self.notes[name] = make()
        return self.notes[name]

    @property
    def runs(self) -> bool:
        """Whether it is still running, in any thread."""
        frame = self.frame
        if frame is None:
            return False
        try:
            frame.clear()  # raises if the frame runs; walking another thread's stack is not safe
        except RuntimeError:
            return True
        return False

    def fail(self) -> None:
        """End the forward after an exception or an interrupt."""
        if current.forward is self:
            current.forward = self.outer
        for undo in self.at_failure:
            undo()
        self.end()

    def end(self) -> None:
        """End the forward for all of its scopes."""
        self.frame = None
        for scope in self.entered:
            scope.running.pop(self, None)
        self.entered = []
        if self.at_end:  # else compilers would break their graph
            call_all(self.at_end)


def frames_from(frame: FrameType | None) -> Iterator[FrameType]:
    """A stack frame and those that it was called from, the innermost first."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def lasting_frame() -> FrameType | None:
    """The stack frame of this thread that lives as long as the forward that it enters or leaves."""
    callers, last = frames_from(sys._getframe(2)), ("_call_impl", "around_decoder")
    return next((frame for frame in callers if frame.f_code.co_name in last), None)


def call_all(acts: Sequence[Callable[[], Any]]) -> None:
    """Call all of `acts`, in order, even if one raises."""
    with ExitStack() as stack:
        for act in reversed(acts):
            stack.callback(act)


def cache_after(forward: Forward, output: Any) -> Any:
    """The cache that a forward of the decoder has filled with its own keys; None: no cache."""
    return own_cache(cache_of(output)) if forward.cache is None else forward.cache


class OneMask(Enum):
    """How one mask, made by the model for all layers, can serve layers that need help."""

    OF_SLOTS = auto()
    """The decoder got a mask that says which slots hold tokens: the same slots in every layer."""
    OF_ONE_COLUMN = auto()
    """A single token sees everything: one column is broadcast over layers of any length."""


class _ThreadState:
    """The state of one thread; see `Current`."""

    def __init__(self) -> None:
        self.forward: Forward | None = None
        self.left_out = ""


class _Local(threading.local):
    # At a graph break, compilers lose what is assigned to a `threading.local` itself.
    def __init__(self) -> None:
        self.state = _ThreadState()


_local = _Local()


class Current:
    """The state of the current thread."""

    @property
    def forward(self) -> Forward | None:
        """The forward in progress; None if no scope takes part in one."""
        forward = _local.state.forward
        # Another thread may have ended it.
        return forward if forward is not None and forward.entered else None

    @forward.setter
    def forward(self, forward: Forward | None) -> None:
        _local.state.forward = forward

    @property
    def left_out(self) -> str:
        """Which scopes take no part in forwards of this thread: "all", "pruning" ones, or ""."""
        return _local.state.left_out

    @contextmanager
    def apart(self, left_out: str = "all") -> Iterator[None]:
        """Keep scopes out of forwards of this thread: all, or all but those that observe it."""
        state = _local.state
        before = state.forward, state.left_out
        state.forward, state.left_out = None, left_out
        try:
            yield
        finally:
            state.forward, state.left_out = before


current = Current()
