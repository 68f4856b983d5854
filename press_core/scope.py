"""Opening a press on a model, what the open scope knows, and taking it off again."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from threading import Lock, RLock, local
from types import TracebackType
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, WeakSet

from torch import nn

from press_core.copies import copied
from press_core.errors import ScopeError
from press_core.model.decoder import decoder_of
from press_core.model.probe import verified
from press_core.model.sites import AttentionSite, LeftAlone
from press_core.press import Phase, Press, Removable

T = TypeVar("T")
_opening = RLock()
"""Held while a scope opens or closes: none is to change a model that another is probing."""


@dataclass(eq=False)
class ScopeState:
    """One open scope: a press bound to a model, and all that the run learns and measures.

    Attributes:
        press: as it acts on this model.
        reads_queries, reads_hidden_states, phases, remembers, buffered_tokens: what it says of
            itself.
        model: None once the scope is closed.
        sites: the attention modules that the press is installed on.
        decoder: the module that takes token ids and runs all of them.
        left_alone: attention modules beside them that need help to read what is pruned.
        is_open: whether what the scope has installed is still there.
        is_opening: whether it is still being installed; no forward is the scope's before.
        running: per thread, whether a forward of the decoder that is the scope's is running.
        met: caches of forwards that were the scope's from their first attention module on.
        layers: per layer, how many tokens the layer had seen when it was pruned last, and how many
            of them each KV head kept, on average.
        compressions: per layer, how often it was pruned.
        seen: depths of the sites whose forwards were seen.
        reached: by cache, the depth of the site where the press acted last.
        n_prefills: forwards of attention modules that brought (part of) a context.
        longest_whole: length of the longest layer that was found filled, and not pruned.
        warnings: what a mechanism found to have gone wrong, asked when the scope closes.
        key: tells this scope from all others of the process.
        n_sites: how many attention modules there are.
        installed: what the mechanism has put on the model.
    """

    press: Press
    model: nn.Module | None
    sites: list[AttentionSite]
    decoder: nn.Module | None = None
    left_alone: list[LeftAlone] = field(default_factory=list)
    is_open: bool = True
    is_opening: bool = False
    running: local = field(default_factory=local, repr=False)
    met: WeakSet[Any] = field(default_factory=WeakSet, repr=False)
    layers: dict[int, tuple[float, float]] = field(default_factory=dict)
    compressions: dict[int, int] = field(default_factory=dict)
    seen: set[int] = field(default_factory=set)
    reached: WeakKeyDictionary[Any, int] = field(default_factory=WeakKeyDictionary, repr=False)
    n_prefills: int = 0
    longest_whole: int = 0
    warnings: list[Callable[[], str | None]] = field(default_factory=list)
    key: int = field(default_factory=itertools.count().__next__)
    n_sites: int = 0
    reads_queries: bool = False
    reads_hidden_states: bool = False
    phases: Phase = Phase.NEVER
    remembers: bool = False
    buffered_tokens: int = 0
    _memories: dict[type, Any] = field(default_factory=dict)
    installed: list[Removable] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.n_sites = len(self.sites)
        # Asked once: a composition asks each of its parts, and forwards ask often.
        self.reads_queries, self.phases = self.press.reads_queries, self.press.phases
        self.reads_hidden_states = self.press.reads_hidden_states
        self.remembers, self.buffered_tokens = self.press.remembers, self.press.buffered_tokens

    def takes(self, cache: Any, depth: int) -> bool:
        """Whether a forward that comes to the attention module at `depth` is the scope's.

        Threads may run the model while the scope opens or closes: one that had begun before is not
        the scope's in its later layers, and none is once it has closed.
        """
        if not self.acts:
            return False
        if depth == 0 and (Phase.DECODER not in self.phases or self.in_decoder):
            self.met.add(cache)
        return cache in self.met

    @property
    def acts(self) -> bool:
        """Whether all of it is installed, and it is not closed."""
        return self.is_open and not self.is_opening

    @property
    def in_decoder(self) -> bool:
        """Whether this thread is in a forward of the decoder that began in the scope."""
        return getattr(self.running, "decoder", False)

    def as_it_is(self) -> ScopeState | None:
        """A copy that stays whole if another thread closes the scope; None: it is not open."""
        now = copied(self)
        return now if self.acts else None

    def record(self, layer_idx: int, seen: float, kept: float) -> None:
        """Note that a layer was pruned: of `seen` tokens each KV head keeps `kept` on average."""
        self.layers[layer_idx] = seen, kept
        self.compressions[layer_idx] = self.compressions.get(layer_idx, 0) + 1

    def memory(self, kind: type[T]) -> T:
        """The one object of a class that presses keep what they learn in; made when asked for."""
        return self._memories.setdefault(kind, kind())

    def _came_too_late(self) -> str | None:
        """A warning of a scope that could have evicted something, had it been open before."""
        press, length = self.press, self.longest_whole
        if self.layers or self.n_prefills or not length:
            return None
        if self.phases & ~Phase.DECODER != Phase.PREFILL or not press.evicts_of(length):
            return None
        return (
            f" evicted nothing: all {length} tokens were in the cache before this scope opened; "
            "open it before the prefill, or use a press that acts while decoding"
        )

    @property
    def compression_count(self) -> int:
        """How often a layer was pruned, the most of all layers."""
        return max(self.compressions.values(), default=0)

    @property
    def compression_ratio(self) -> float:
        """Share of the tokens that was evicted, over all layers."""
        seen = self.n_sites * max((seen for seen, _ in self.layers.values()), default=0)
        evicted = sum(seen - kept for seen, kept in self.layers.values())
        return evicted / seen if seen else 0.0

    def install(self, removable: Removable) -> None:
        """Take `removable` off when the scope closes."""
        self.installed.append(removable)

    def close(self) -> None:
        """Take off all that was installed; without effect on a scope that is not open."""
        with _opening:
            said = self._close() if self.is_open else []
        if said:  # one cause at a time: the first explains the others
            warnings.warn(f"{type(self.press).__name__}{said[0]}", RuntimeWarning, stacklevel=3)

    def _close(self) -> list[str]:
        """Take off all that was installed.

        Returns:
            What there is to be warned of.
        """
        self.is_open = False
        asked = (*self.warnings, self._came_too_late)  # what broke explains why nothing was evicted
        said = [warning for ask in asked if (warning := ask())]
        self.warnings.clear()
        self._memories = {}  # a new one: a press may be deciding in another thread
        self.mark_torn()
        with ExitStack() as removing:  # all of it, whatever one of them raises
            for removable in self.installed:
                removing.callback(removable.remove)
        self.installed, self.sites, self.left_alone = [], [], []
        self.model = self.decoder = None
        return said

    def mark_torn(self) -> None:
        """Let nobody read caches some of whose layers were pruned in a forward and others not."""
        reached = [ref() for ref in self.reached.keyrefs()]  # forwards in other threads add to it
        for cache in (cache for cache in reached if cache is not None):
            depth = self.reached.pop(cache, self.n_sites)
            for layer in cache.layers if depth + 1 < self.n_sites else ():
                if hasattr(layer, "is_torn"):
                    layer.is_torn = True


def bind(press: Press, model: nn.Module) -> ScopeState:
    """Check that a press fits a model, and bind it to that; nothing is installed.

    Raises:
        PressError: if it does not fit.
    """
    press.validate()
    press.post_init_from_model(model)
    known = verified(model)
    sites = known.sites
    for site in sites:
        Press.check_site(press, site)
    bound = press.bind(model)
    for site in sites:
        bound.check_site(site)
    return ScopeState(bound, model, sites, decoder_of(model, sites), known.left_alone)


class Scope:
    """The time during which a press is installed on a model.

    Entering installs it, leaving (in whatever way) takes exactly that off again, in any order with
    other scopes. A scope can be opened again once it is closed. It acts on the model whichever
    thread runs it, on forwards that begin while it is open; a forward in progress when it closes
    runs on without it, and the cache is then refused where only some layers were pruned.
    """

    def __init__(self, press: Press, model: nn.Module) -> None:
        self.press, self.model = press, model
        self.state: ScopeState | None = None
        self._lock = Lock()

    def open(self) -> None:
        """Install the press.

        Raises:
            PressError: if the press does not fit the model; nothing is installed then.
            ScopeError: if this scope is open already.
        """
        with _opening, self._lock:
            if self.state is not None and self.state.is_open:
                raise ScopeError(
                    f"this scope of {type(self.press).__name__} is open already; call the press "
                    "again, `press(model)`, for a second scope"
                )
            state = bind(self.press, self.model)
            state.is_opening = True
            try:
                state.press.install(state)
            except BaseException:
                state.warnings.clear()
                state.close()
                raise
            state.is_opening = False
            self.state = state
            vars(self.press)["_last_scope"] = state

    def remove(self) -> None:
        """Take the press off the model; without effect on a scope that is not open."""
        with self._lock:
            state = self.state
        if state is not None:
            state.close()

    def __enter__(self) -> Scope:
        self.open()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.remove()
