"""Hooks or patches of open scopes on attention modules, installed only while forwards need them."""

import threading
from typing import Any, Protocol

import torch

from press_core.forward import call_all
from press_core.model.graphs import graphs_of, n_compiled


class Removable(Protocol):
    """Something that was installed: the handle of a hook, or a patch."""

    def remove(self) -> None: ...


class OnLayers:
    """What the scopes open on one decoder have installed on its attention modules.

    A hook or a patch slows down every forward of its module, even if it does nothing. So the first
    forward that no scope acts in takes all of them off; the next one in which a scope acts, or
    whose layers need masks or positions, puts them back. What is installed on the decoder detects
    these forwards, and stays there.

    The scopes of a decoder are put on and taken off together, in the order in which they were
    opened, so that the inner one acts first.

    Attributes:
        by_scope: what each scope has installed now, the outermost first. Replaced, not changed:
            garbage collection may close a scope in any line.
        are_on: whether all scopes are installed.
        stay: whether they stay installed: graphs were compiled with them, and taking them off would
            cause recompilation.
    """

    def __init__(self) -> None:
        self.by_scope: dict[Any, list[Removable]] = {}
        self.are_on, self.stay = True, False
        self._n_compiled = 0
        self._lock = threading.RLock()

    def add(self, scope: Any) -> None:
        """Install a scope that opens, and any that are off."""
        with self._lock:
            self.by_scope = {**self.by_scope, scope: []}
            self.put_on()

    def drop(self, scope: Any) -> None:
        """Forget a scope that closes; what it has installed here joins `scope.installed`."""
        with self._lock:  # in this order: an interrupt may come in between
            scope.installed += self.by_scope.get(scope, [])
            self.by_scope = {other: on for other, on in self.by_scope.items() if other is not scope}

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def put_on(self) -> None:
        """Install the scopes that are off, for a forward that needs them."""
        with self._lock:
            for scope, installed in self.by_scope.items():
                if not installed or not self.are_on:
                    remove_all(installed)  # an interrupt may have left some of them
                    try:
                        installed.extend(scope.press.install_on_layers(scope))  # one by one
                    except BaseException:
                        remove_all(installed)
                        raise
                    if scope not in self.by_scope:  # closed meanwhile
                        remove_all(installed)
            self.are_on, self._n_compiled = True, n_compiled()

    def take_off(self, scope: Any, entering: Any = None) -> None:
        """Take all scopes off, unless a running forward needs them.

        Args:
            scope: the caller; no effect unless it is the innermost scope.
            entering: the forward that does not need them, and has not reached its layers yet; None:
                no scope takes part in it.
        """
        if not self.are_on or self.stay:
            return
        with self._lock:
            if scope not in self.by_scope or scope is not next(reversed(self.by_scope)):
                return
            self.are_on = False  # before the check: a new forward joins `running`, then reads this
            running = {forward for other in self.by_scope for forward in other.running.copy()}
            if any(forward.runs for forward in running - {entering}):
                self.are_on = True
                return
            if n_compiled() != self._n_compiled and any(graphs_of(scope.sites)):
                self.are_on = self.stay = True
                return
            for installed in self.by_scope.values():
                remove_all(installed)


def remove_all(installed: list[Removable]) -> None:
    """Remove everything in `installed`, the last first, and empty the list."""
    call_all([removable.remove for removable in reversed(installed)])
    installed.clear()
