"""Opening a press on a model, closing it, and the tally of the run."""

from __future__ import annotations

import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar
from weakref import WeakSet, ref

import torch
from torch import nn

from press_core.cache.caches import known
from press_core.cache.memory import Key, Memory
from press_core.cache.pruned import PrunedLayer
from press_core.errors import ScopeError
from press_core.forward import Arguments, Forward, current
from press_core.model.decoder import decoder_of, uncompiled
from press_core.model.sites import AttentionSite
from press_core.on_layers import OnLayers, Removable, remove_all
from press_core.press import Press
from press_core.probe import verified
from press_core.tally import Tally
from press_core.traits import Needs, Phase

_opening = threading.RLock()
"""Held while a scope opens or closes, so that no scope changes a model that another one probes."""

_open: WeakSet[ScopeState] = WeakSet()
"""Scopes that were opened, until they are garbage-collected; a closed one's decoder is None."""


@dataclass(frozen=True)
class Traits:
    """The traits of a press, read once per scope: a composition computes them from its parts.

    Attributes:
        needs, phases, buffered_tokens: those of the press and its parts.
        reads_queries: whether the press reads the queries of attention forwards.
        remembers: whether the press stores values per token; see `Press.remember`.
        may_pass: whether the press has nothing to do in most decode steps.
        counts_steps: whether it acts in some decode steps, which are counted for it.
        thread: the only thread whose forwards the scope takes part in; None: all threads.
    """

    needs: Needs
    phases: Phase
    buffered_tokens: int
    reads_queries: bool
    remembers: bool
    may_pass: bool
    counts_steps: bool
    thread: int | None

    @classmethod
    def of(cls, press: Press) -> Traits:
        needs, phases = press.all_needs, press.observed_phases
        thread = vars(press).get("only_thread")
        others = phases & ~(Phase.ON_CONTEXTS | Phase.DECODING)
        attends = phases & (Phase.IN_PREFILL | Phase.DECODING)
        remembers = bool(needs & Needs.MEMORY)
        return cls(
            needs,
            phases,
            press.buffered_tokens,
            reads_queries=bool(needs & Needs.QUERIES and attends),
            remembers=remembers,
            may_pass=not (remembers or others) and thread is None,
            counts_steps=bool(phases & Phase.DECODING),
            thread=thread,
        )


@dataclass(eq=False)
class ScopeState:
    """One open scope: a press bound to a model, and the state of its run.

    Attributes:
        model: None after the scope is closed; so is `decoder`.
        sites: the attention modules that the press works on.
        first: index of the cache layer of the first of them. Other threads may read it in a decode
            step while the scope closes, which has no sites then.
        bystanders: other attention modules, which need help to read pruned layers.
        decoder: the module that takes token ids and runs all attention modules.
        traits: the traits of the press.
        known: by id of a part of the press, that part and what its `prepare` returned; copies of it
            with another ratio use the same.
        tally: counts of what was pruned.
        key: identifies the scope within the process; copies of a cache keep it.
        running: forwards in progress that the scope takes part in, each with its thread's id.
        warnings: functions that return a warning, or None, when the scope closes.
        installed: what the mechanism has installed on the decoder while the scope is open.
        on_layers: what it has installed on attention modules, while forwards need it.
    """

    press: Press
    model: Any
    sites: list[AttentionSite]
    first: int
    bystanders: list[AttentionSite]
    decoder: Any
    traits: Traits
    known: dict[int, tuple[Press, Any]] = field(default_factory=dict)
    tally: Tally = field(default_factory=Tally)
    key: Key = field(default_factory=Key)
    running: dict[Forward, int] = field(default_factory=dict)
    warnings: list[Callable[[], str | None]] = field(default_factory=list)
    installed: list[Removable] = field(default_factory=list)
    on_layers: OnLayers = field(default_factory=OnLayers)

    def prepared(self, press: Any) -> Any:
        """What the `prepare` of `press`, a part of this scope's press, returned for the model."""
        key = id(press) if id(press) in self.known else id(_original(press))
        if key not in self.known:  # not found when the scope opened, as it is in no field
            self.known[id(press)], key = (press, press.prepare(self.model)), id(press)
        return self.known[key][1]

    def is_open_in(self, outer: Forward | None) -> bool:
        """Whether the scope takes part in forwards that begin now, inside of `outer` if any.

        One that is closed inside of `outer` stays open in it.
        """
        return self.key.is_open or (outer is not None and self in outer.entered)

    def check_fields(self) -> None:
        """Raise if fields of the press have changed for the worse since the scope was opened.

        Raises:
            PressError: with the field, or because other tokens would have to be observed.
        """
        self.press.validate()
        if Traits.of(self.press) != self.traits:
            raise ScopeError(
                f"what {type(self.press).__name__} reads, or when it acts, has changed with fields "
                "since its scope was opened; close the scope first, and open it again"
            )

    def acts_in_step(self, n_steps: int, n_new: int) -> bool:
        """Whether the press acts in a decode step; see `Press.is_awaited`."""
        n_buffered = self.traits.buffered_tokens
        try:
            return self.traits.remembers or self.press.is_awaited(n_steps, n_new, n_buffered)
        except TypeError:
            self.check_fields()
            raise

    def counted(self, cache: Any) -> tuple[PrunedLayer, Memory]:
        """The first layer that the press works on, and its memory with one more step counted."""
        first = known(cache, self.first)
        return first, first.memory(self.key).after_forward()

    def remember(self, cache: Any, layer_idx: int, layer: Any, memory: Any) -> None:
        """Store this scope's `memory` with `layer`, and put that into `cache` at `layer_idx`."""
        cache.layers[layer_idx] = layer
        layer.remember(self.key, memory)

    def note_outside(self, given: Arguments) -> None:
        """Note a forward of an attention module that is part of no forward of the decoder."""
        if not (torch.compiler.is_compiling() or self.tally.n_forwards or current.left_out):
            self.tally.ran_outside |= given.cache is not None

    # ---- closing ---------------------------------------------------------------------------------

    def close(self) -> None:
        """Remove everything that was installed; no effect if the scope is closed already.

        The scope takes part in forwards that have begun until they end, and closing waits for them:
        for those of other threads it blocks; inside a forward of this thread, closing is deferred
        to the end of that forward.
        """
        try:
            self._close()
        except BaseException:
            self._close()  # what an interrupt has left
            raise

    def _close(self) -> None:
        with _opening:
            self.key.is_open = False
        thread = threading.get_ident()
        if inside := [forward for forward, of in self._under_way().items() if of == thread]:
            inside[0].at_end.append(self._end)
        else:
            self._end()

    def _end(self) -> None:
        """Wait for forwards of other threads, then close."""
        is_interrupted = True
        try:
            while self._under_way():
                time.sleep(1e-3)
            is_interrupted = False
        finally:  # forwards may be left over: an interrupt has ended them, or this wait
            for forward in self.running.copy():
                if is_interrupted or forward not in self._under_way():
                    forward.fail()
            self.take_off()

    def _under_way(self) -> dict[Forward, int]:
        """This scope's running forwards; those of other threads have ended in a forked process."""
        threads = {*sys._current_frames()}  # ids alone: the frames include this one
        running = self.running.copy().items()
        return {forward: of for forward, of in running if of in threads and forward.runs}

    def take_off(self) -> None:
        with _opening:
            if self.model is None:  # already taken off
                return
            try:  # before anything is removed: one reads what is installed
                checks = *self.warnings, self._opened_too_late, self._saw_layers_only
                found = [text for check in checks if (text := check())]
            finally:
                self.warnings = []
                self.key = Key()  # what layers remember goes with the former one
                self.on_layers.drop(self)
                try:
                    remove_all(self.installed)
                except Exception:  # after an interrupt, closing the scope again removes the rest
                    self._forget()
                    raise
                self._forget()
        if found:  # only the first: it is the cause of the others
            warnings.warn(f"{type(self.press).__name__}{found[0]}", RuntimeWarning, stacklevel=5)

    def _forget(self) -> None:
        self.installed, self.sites, self.bystanders = [], [], []
        self.model, self.decoder, self.known = None, None, {}

    def _saw_layers_only(self) -> str | None:
        """A warning if layers were filled, but no forward of the decoder began in the scope."""
        if self.tally.n_forwards or not self.tally.ran_outside:
            return None
        return (
            " evicted nothing: attention modules ran, but no forward of the decoder began inside "
            "the scope; call the model, not its layers one by one, nor `forward` of its decoder"
        )

    def _opened_too_late(self) -> str | None:
        """A warning if the scope evicted nothing because it was opened after the prefill."""
        length, tally = self.tally.longest_whole, self.tally
        acted = tally.layers or tally.n_contexts or self.traits.phases & Phase.BEHIND_CONTEXTS
        if acted or not length or not self.press.acts_on(length):
            return None
        return (
            f" evicted nothing: all {length} tokens were in the cache before this scope opened; "
            "open it before the prefill, or use a press that acts while decoding"
        )


def bound_to(press: Press, model: nn.Module) -> ScopeState:
    """Check that a press fits a model, and return their scope; nothing is installed.

    Raises:
        PressError: if the press does not fit the model.
    """
    model = uncompiled(model)
    press.validate()
    press.post_init_from_model(model)
    sites, bystanders = verified(model)
    for site in sites:
        press.check_site(site)
    decoder = decoder_of(model, [site.name for site in sites])
    first = sites[0].layer_idx
    state = ScopeState(press, model, sites, first, bystanders, decoder, Traits.of(press))
    state.tally.n_sites = len(sites)
    for part in press.everything():
        state.known[id(part)] = part, part.prepare(model)
        state.known.setdefault(id(_original(part)), state.known[id(part)])
    state.warnings.append(partial(_replaced, model, decoder))
    return state


def _replaced(model: nn.Module, decoder: nn.Module) -> str | None:
    """A warning if `model` no longer has the decoder that its scope was opened on."""
    if any(module is decoder for module in model.modules()):
        return None
    return ": the decoder was replaced, and nothing was pruned since; open the scope after that"


def _original(press: Press) -> Press:
    """The press that `press` is a copy of, with another ratio (and keeps alive); else itself."""
    copied = vars(press).get("prepared_as")
    return press if copied is None else copied.press


class Scope:
    """The block `with press(model)` during which a press is installed on a model.

    Entering installs the press; leaving, also by an exception, removes exactly what was installed,
    in any order with other scopes. A closed scope can be opened again. It takes part in the
    forwards that begin while it is open, in any thread, from their first layer to their last.
    """

    def __init__(self, press: InstalledPress, model: nn.Module) -> None:
        self.press, self.model = press, model
        self.state: ScopeState | None = None

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def open(self) -> Scope:
        """Install the press; functions that are compiled break their graph for it.

        Raises:
            PressError: if the press does not fit the model; nothing is installed then.
            ScopeError: if the scope is already open.
        """
        with _opening:
            if self.state is not None and self.state.key.is_open:
                raise ScopeError(
                    f"this scope of {type(self.press).__name__} is open already; call the press "
                    "again, `press(model)`, for a second scope"
                )
            state = bound_to(self.press, self.model)
            try:
                self.press.install(state)
                shared = (other.on_layers for other in _open if other.decoder is state.decoder)
                state.on_layers = next(shared, state.on_layers)
                state.on_layers.add(state)
                state.key.is_open, self.state = True, state
                _open.add(state)
                vars(self.press).update(_last_run=state.tally, _last_scope=ref(state))
            except BaseException:
                state.key.is_open = False
                state.warnings.clear()
                state.take_off()
                raise
        return self

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def remove(self) -> None:
        """Remove the press from the model; no effect if the scope is not open."""
        with _opening:
            state = self.state
        if state is not None:
            state.close()

    def __getstate__(self) -> dict[str, Any]:  # a copy is closed
        return vars(self) | {"state": None}

    def __enter__(self) -> Scope:
        return self.open()

    def __exit__(self, *_: Any) -> None:
        self.remove()


class InstalledPress(Press):
    """A press with a mechanism that installs it on models.

    ```python
    with press(model):
        model(input_ids, past_key_values=cache)
    handle = press.register(model); handle.remove()    # the same without a block
    ```
    """

    collector: ClassVar[Callable[..., InstalledPress]]
    """Class of this mechanism's press that passes each call to a function; see `Collecting`."""

    def __call__(self, model: nn.Module) -> Scope:
        """The scope of `with press(model): ...`; nothing is installed until it is entered."""
        return Scope(self, model)

    def register(self, model: nn.Module) -> Scope:
        """Open a scope and return it; its `remove()` closes it (a second call has no effect)."""
        return self(model).open()

    def remove(self) -> None:
        """Close the scope of this press that was opened last; no effect if it is closed."""
        state = vars(self).get("_last_scope", lambda: None)()
        if state is not None:
            state.close()

    def install(self, scope: ScopeState) -> None:
        """Install what is called around each forward of the decoder; closing `scope` removes it."""
        raise NotImplementedError

    def install_on_layers(self, scope: ScopeState) -> Iterator[Removable]:
        """Install what acts on the attention modules; called whenever forwards need it."""
        raise NotImplementedError

    def after(self, module: nn.Module, act: Callable[[tuple[Any, ...], Any], Any]) -> Removable:
        """Call `act(args, output)` after each forward of `module`, by this press's mechanism.

        A result of `act` other than None replaces the output.

        Returns:
            A handle whose `remove()` undoes this.
        """
        raise NotImplementedError
