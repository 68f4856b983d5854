"""What this forward of the decoder is: described where it enters, looked up by every layer.

A scope has to do with the forwards that begin while it is open. Where the decoder begins, `begin`
describes the forward, for this thread and until it returns; layers ask `current.forward`, and do
nothing where there is none.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
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
        args, kwargs: as they were passed.
        names: of the parameters, in order.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    names: tuple[str, ...]

    def get(self, name: str) -> Any:
        """The argument called `name`, however it was passed, or None."""
        if name in self.kwargs:
            return self.kwargs[name]
        index = self.names.index(name) if name in self.names else len(self.args)
        return self.args[index] if index < len(self.args) else None

    def replace(self, **given: Any) -> Arguments:
        """The same with other arguments."""
        args, kwargs = list(self.args), dict(self.kwargs)
        for name, value in given.items():
            index = self.names.index(name) if name in self.names else len(args)
            if name not in kwargs and index < len(args):
                args[index] = value
            else:
                kwargs[name] = value
        return Arguments(tuple(args), kwargs, self.names)


def own_cache(cache: Any) -> Any:
    """The cache of a decoder's own keys: of an encoder-decoder's two, the self-attention's."""
    return getattr(cache, "self_attention_cache", cache)


def n_tokens(given: Arguments) -> int:
    """How many tokens a decoder is given, as ids or as embeddings."""
    ids = given.get("input_ids")
    ids = given.get("inputs_embeds") if ids is None else ids
    return 0 if ids is None else int(ids.shape[1])


def names_of(module: nn.Module) -> tuple[str, ...]:
    """Names of the parameters of a module's forward, in order."""
    return tuple(inspect.signature(type(module).forward).parameters)[1:]


@dataclass(eq=False)
class Progress:
    """What a forward is for one of its scopes.

    Attributes:
        n_steps, n_forwards: while decoding, forwards since the scope pruned last, and all of them.
        depths: of the attention modules that it has observed.
    """

    n_steps: int = 0
    n_forwards: int = 0
    depths: set[int] = field(default_factory=set)


@dataclass(eq=False)
class Forward:
    """One forward of a decoder in which scopes take part.

    Attributes:
        decoder: the module that takes token ids and runs all attention modules.
        given: its arguments, as the model is to get them.
        is_context: whether it began with an empty cache.
        n_remaining: tokens of the same context that later forwards bring, of a prefill in chunks.
        entered: scopes that were open when it began, the outermost first.
        acting: those that act around its attention modules.
        progress: by scope, how far that has come.
        outer: the forward of another decoder in which this one runs.
        notes: what was found out once for all layers: masks, positions, what a press has noted.
        helps: whether it reads layers with masks or positions of their own.
        at_failure: what to do if an exception ends it.
        at_end: what to do when it has ended, in whatever way.
        is_over: whether it is known to have ended.
        frame: of the stack of its thread, lasts as long as it does: hooks hear of no interrupt.
    """

    decoder: nn.Module
    given: Arguments
    is_context: bool = True
    n_remaining: int = 0
    entered: list[Any] = field(default_factory=list)
    acting: list[Any] = field(default_factory=list)
    progress: dict[Any, Progress] = field(default_factory=dict)
    outer: Forward | None = None
    notes: dict[Any, Any] = field(default_factory=dict)
    helps: bool = False
    at_failure: list[Callable[[], None]] = field(default_factory=list)
    at_end: list[Callable[[], None]] = field(default_factory=list)
    is_over: bool = False
    frame: FrameType | None = None

    @property
    def cache(self) -> Any:
        """The cache of the decoder's own keys; None: the model makes one, if it caches."""
        return own_cache(self.given.get("past_key_values"))

    @property
    def n_tokens(self) -> int:
        """How many tokens the decoder was given."""
        return n_tokens(self.given)

    def token_ids(self, why: str) -> torch.Tensor:
        """The token ids `(B, S)` that the decoder was given.

        Args:
            why: who needs them, and what for.

        Raises:
            UnsupportedInputError: if it was given embeddings.
        """
        ids: torch.Tensor | None = self.given.get("input_ids")
        if ids is None:
            raise UnsupportedInputError(f"{why}; pass input_ids, not inputs_embeds")
        return ids

    def once(self, make: Callable[[], T], *key: Any) -> T:
        """What `make` gives, made once for each `key`: of numbers, words, and objects as such."""
        if torch.compiler.is_compiling():  # who compiles finds what is made twice
            return make()
        known = tuple([part if isinstance(part, (int, str, tuple)) else id(part) for part in key])
        if known not in self.notes:
            self.notes[known] = key, make()  # the key is kept, so that no other gets its id
        return self.notes[known][1]

    @property
    def runs(self) -> bool:
        """Whether it goes on, in whichever thread."""
        frame = self.frame
        if frame is None:
            return False
        try:
            frame.clear()  # what runs is not cleared; the stacks of other threads are not safe
        except RuntimeError:
            return True
        return False

    def fail(self) -> None:
        """Let an exception, or an interrupt, have ended it."""
        if current.forward is self:
            current.forward, current.reading, current.query = self.outer, None, None
        for undo in self.at_failure:
            undo()
        self.end()

    def end(self) -> None:
        """Let it be over, for all of its scopes."""
        self.is_over, self.frame = True, None
        for scope in self.entered:
            scope.running.pop(self, None)
        while self.at_end:
            self.at_end.pop(0)()


class OneMask(Enum):
    """How the one mask that a model makes for all layers reads layers that need help."""

    OF_SLOTS = auto()
    """The decoder was given one that says which slots hold tokens: they are the same everywhere."""
    OF_ONE_COLUMN = auto()
    """A single token sees everything: one column is spread over layers of any length."""


class Now:
    """What one thread is in the middle of; see `Current`."""

    def __init__(self) -> None:
        self.forward: Forward | None = None
        self.reading: Any = None
        self.query: Any = None
        self.is_apart = False


class _OfThread(threading.local):
    def __init__(self) -> None:
        self.now = Now()


_of_thread = _OfThread()


def _now(name: str) -> Any:
    # Compilers lose what is assigned to a `threading.local` itself where a graph breaks.
    return property(
        lambda _: getattr(_of_thread.now, name),
        lambda _, value: setattr(_of_thread.now, name, value),
    )


class Current:
    """What this thread is in the middle of.

    Attributes:
        forward: the forward in progress; None: none in which a scope has anything to do.
        reading: the cache layer that is about to be read with all the help it needs, or how the
            model's one mask reads all of them.
        query: what a hook has collected of the attention module that is running.
        is_apart: whether scopes take no part in forwards of this thread.
    """

    @property
    def forward(self) -> Forward | None:
        forward = _of_thread.now.forward
        return None if forward is None or forward.is_over else forward  # ended by another thread

    @forward.setter
    def forward(self, forward: Forward | None) -> None:
        _of_thread.now.forward = forward

    reading: Any = _now("reading")
    query: Any = _now("query")
    is_apart: bool = _now("is_apart")

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Let scopes take no part in forwards of this thread."""
        before = self.is_apart, self.forward
        self.is_apart, self.forward = True, None
        try:
            yield
        finally:
            self.is_apart, self.forward = before


current = Current()
