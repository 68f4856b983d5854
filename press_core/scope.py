"""Opening a press on a model, closing it, and what the run came to."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, ClassVar
from weakref import WeakSet

from torch import nn

from press_core.cache.memory import Key
from press_core.errors import ScopeError
from press_core.forward import Forward
from press_core.model.decoder import decoder_of
from press_core.model.sites import AttentionSite, Bystander
from press_core.on_layers import OnLayers, Removable, removed
from press_core.press import Press
from press_core.probe import verified
from press_core.tally import Tally
from press_core.traits import Needs, Phase

_opening = threading.RLock()
"""Held while a scope opens or closes: none is to change a model that another is probing."""

_open: WeakSet[ScopeState] = WeakSet()
"""Scopes that were opened, until they are collected; of closed ones the decoder is None."""

AROUND = Phase.PREFILL | Phase.DECODING | Phase.CHUNKS
"""Phases in which a press acts around attention modules."""


@dataclass(frozen=True)
class Traits:
    """What a press says of itself, asked once: a composition asks each of its parts.

    Attributes:
        reads_queries: whether it reads queries of the attention forwards that it is told of.
        remembers: whether it keeps something of each token.
        may_pass: whether most steps that decode behind a context are nothing to it.
        counts: whether it counts them all the same, and so waits for some of them.
        thread: whose forwards alone it hears of; None: those of all threads.
    """

    needs: Needs
    phases: Phase
    buffered_tokens: int
    reads_queries: bool
    reads_hidden_states: bool
    remembers: bool
    may_pass: bool
    counts: bool
    thread: int | None

    @classmethod
    def of(cls, press: Press) -> Traits:
        of_parts = Needs.of_parts(part.needs for part in press.parts)
        only = Needs.POSITIONS_ALONE | Needs.SAME_FOR_ALL_HEADS
        needs = press.needs | (of_parts & ~only)
        phases, thread = press.observed_phases, vars(press).get("thread")
        others = phases & ~(Phase.ON_CONTEXTS | Phase.DECODING)
        remembers = Needs.MEMORY in needs
        return cls(
            needs,
            phases,
            press.buffered_tokens,
            reads_queries=Needs.QUERIES in needs and bool(phases & AROUND),
            reads_hidden_states=bool(needs & (Needs.FORWARD | Needs.HIDDEN_STATES)),
            remembers=remembers,
            may_pass=not (remembers or others) and thread is None,
            counts=Phase.DECODING in phases,
            thread=thread,
        )


@dataclass(eq=False)
class ScopeState:
    """One open scope: a press bound to a model, and all that the run learns and measures.

    Attributes:
        model: None once the scope is closed, and so is `decoder`.
        sites: the attention modules that the press works on.
        bystanders: attention modules beside them that need help to read what is pruned.
        decoder: the module that takes token ids and runs all of them.
        traits: what the press says of itself.
        known: by id of a part of the press, that part and what it has prepared for the model, which
            serves copies with another ratio too.
        tally: what the run came to.
        key: tells it from all other scopes of the process, in caches too.
        running: forwards of it in progress, and the threads that run them.
        remembering: cache layers that hold something for it.
        warnings: what a mechanism found to have gone wrong, asked when the scope closes.
        installed: what the mechanism has put on the model for as long as the scope is open.
        on_layers: what it has put on attention modules, for the forwards that need it.
    """

    press: Press
    model: Any
    sites: list[AttentionSite]
    bystanders: list[Bystander]
    decoder: Any
    traits: Traits
    known: dict[int, tuple[Press, Any]] = field(default_factory=dict)
    tally: Tally = field(default_factory=Tally)
    key: Key = field(default_factory=Key)
    running: dict[Forward, int] = field(default_factory=dict)
    remembering: WeakSet[Any] = field(default_factory=WeakSet, repr=False)
    warnings: list[Callable[[], str | None]] = field(default_factory=list)
    installed: list[Removable] = field(default_factory=list)
    on_layers: OnLayers = field(default_factory=OnLayers)

    def prepared(self, press: Any) -> Any:
        """What `press`, a part of this scope's, has prepared for the model."""
        same = id(press) if id(press) in self.known else vars(press).get("prepared_as")
        if same not in self.known:  # nobody said that it is a part: it is in no field
            self.known[id(press)], same = (press, press.prepare(self.model)), id(press)
        return self.known[same][1]

    @property
    def is_open(self) -> bool:
        """Whether forwards that begin now are the scope's."""
        return self.key.is_open

    def remember(self, cache: Any, layer_idx: int, layer: Any, memory: Any) -> None:
        """Keep a `memory` of one layer of `cache`, in the words of pruned layers, while open."""
        cache.layers[layer_idx] = layer
        self.remembering.add(layer)
        layer.memories[self.key] = memory

    def install(self, removable: Removable) -> None:
        """Take `removable` off when the scope closes."""
        self.installed.append(removable)

    # ---- closing ---------------------------------------------------------------------------------

    def close(self) -> None:
        """Take off all that was installed, if that was not done before.

        Forwards that have begun are the scope's to their end, and are waited for: those of other
        threads here, and in the middle of one of this thread once that has ended.
        """
        with _opening:
            self.key.is_open = False
        inside = self._under_way(in_this_thread=True)
        if inside:
            inside[0].at_end.append(self._end)
        else:
            self._end()

    def _end(self) -> None:
        """Close, once forwards of other threads have ended."""
        is_cut = True
        try:
            while self._under_way(in_this_thread=False):
                time.sleep(1e-3)
            is_cut = False
        finally:  # an interrupt has ended what is left, or the wait for it
            for forward in self.running.copy():
                if is_cut or not forward.runs:
                    forward.fail()
            self.take_off()

    def _under_way(self, in_this_thread: bool) -> list[Forward]:
        """Forwards of it that run in this thread, or in all others."""
        mine = threading.get_ident()
        return [
            forward
            for forward, thread in self.running.copy().items()
            if (thread == mine) is in_this_thread and forward.runs
        ]

    def take_off(self) -> None:
        with _opening:
            if self.model is None:  # it was done before
                return
            self.model = None
        said = [warning for ask in (*self.warnings, self._opened_too_late) if (warning := ask())]
        for layer in list(self.remembering):
            layer.remember(self.key, None)
        with _opening:
            removed([*self.installed, *self.on_layers.drop(self)])
        self.warnings, self.installed, self.sites, self.bystanders = [], [], [], []
        self.decoder = None
        if said:  # one cause at a time: the first explains the others
            warnings.warn(f"{type(self.press).__name__}{said[0]}", RuntimeWarning, stacklevel=5)

    def _opened_too_late(self) -> str | None:
        """A warning of a scope that could have evicted something, had it been open before."""
        length, tally = self.tally.longest_whole, self.tally
        if tally.layers or tally.n_contexts or not length:
            return None
        prefill_only = self.traits.phases & ~Phase.DECODER == Phase.PREFILL
        if not prefill_only or self.press.keeps(length) >= length:
            return None
        return (
            f" evicted nothing: all {length} tokens were in the cache before this scope opened; "
            "open it before the prefill, or use a press that acts while decoding"
        )


def bound_to(press: Press, model: nn.Module) -> ScopeState:
    """Check that a press fits a model, and bind it to that; nothing is installed.

    Raises:
        PressError: if it does not fit.
    """
    press.validate()
    press.post_init_from_model(model)
    sites, bystanders = verified(model)
    for site in sites:
        press.check_site(site)
    decoder = decoder_of(model, [site.name for site in sites])
    state = ScopeState(press, model, sites, bystanders, decoder, Traits.of(press))
    state.tally.n_sites, state.known = len(sites), prepared(press, model)
    return state


def prepared(press: Press, model: nn.Module) -> dict[int, tuple[Press, Any]]:
    """What a press and its parts have to know of a model; see `ScopeState.known`."""
    known: dict[int, tuple[Press, Any]] = {}
    for part in press.everything():
        known[id(part)] = part, part.prepare(model)
        known.setdefault(vars(part).get("prepared_as", id(part)), known[id(part)])
    return known


def _on_layers_of(decoder: nn.Module) -> OnLayers:
    """What the scopes that are open on one decoder share."""
    return next((scope.on_layers for scope in _open if scope.decoder is decoder), OnLayers())


class Scope:
    """The time during which a press is installed on a model.

    Entering installs it, leaving (in whatever way) takes exactly that off again, in any order with
    other scopes. A scope can be opened again once it is closed. It has to do with the forwards that
    begin while it is open, whichever thread runs them, from their first layer to their last.
    """

    def __init__(self, press: InstalledPress, model: nn.Module) -> None:
        self.press, self.model = press, model
        self.state: ScopeState | None = None
        self._lock = threading.Lock()

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
            state = bound_to(self.press, self.model)
            try:
                self.press.install(state)
                state.on_layers = _on_layers_of(state.decoder)
                state.on_layers.add(state)
            except BaseException:
                state.warnings.clear()
                state.take_off()
                raise
            state.key.is_open, self.state = True, state
            _open.add(state)
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


class InstalledPress(Press):
    """A press that a mechanism installs on models.

    ```python
    with press(model):
        model(input_ids, past_key_values=cache)
    handle = press.register(model); handle.remove()    # the same without a block
    ```
    """

    collector: ClassVar[Callable[..., InstalledPress]]
    """Makes a press that shows the calls of a model to a function; see `Collecting`."""

    def __call__(self, model: nn.Module) -> Scope:
        """The scope `with press(model): ...`; nothing is installed before it is entered."""
        return Scope(self, model)

    def register(self, model: nn.Module) -> Scope:
        """Open the scope at once; `remove()` on what is returned closes it (again: no effect)."""
        scope = self(model)
        scope.open()
        return scope

    def remove(self) -> None:
        """Close the scope of this press that was opened last, if it is open."""
        state = vars(self).get("_last_scope")
        if state is not None:
            state.close()

    def install(self, scope: ScopeState) -> None:
        """Install on the decoder what hears of forwards; `scope` takes it off again."""
        raise NotImplementedError

    def install_on_layers(self, scope: ScopeState) -> Iterator[Removable]:
        """Install on the attention modules what acts there, whenever forwards need it."""
        raise NotImplementedError

    def refuse_missed(self, scope: ScopeState) -> None:
        """Refuse to go on: a forward has gone past some of what is installed on layers.

        Raises:
            ScopeError: if nobody would hear of it otherwise.
        """

    def after(self, module: nn.Module, act: Callable[[tuple[Any, ...], Any], Any]) -> Removable:
        """Call `act(args, output)` after each forward of `module`, by this press's mechanism.

        What it returns stands for the output, unless it is None.

        Returns:
            What takes it off again.
        """
        raise NotImplementedError
