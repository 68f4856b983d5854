"""What open scopes have on the layers of a decoder: it is there while forwards need it."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from typing import Any, Protocol

from press_core.model.graphs import graphs_of, n_compiled


class Removable(Protocol):
    """What installing something hands back: a hook's handle, a patch."""

    def remove(self) -> None: ...


class OnLayers:
    """What the scopes open on one decoder have installed on its attention modules.

    A hook or a patch costs its module something in every forward, in those too in which it has
    nothing to do. So the first forward that concerns no scope takes all of them off, and the next
    one in which a scope acts, or which reads a cache with help, puts them back. What hears of
    forwards is on the decoder, and stays there.

    The scopes of a decoder are put on and taken off together, in the order in which they were
    opened, so that the inner one acts first.

    Attributes:
        by_scope: what each scope has there now; the outermost comes first.
        are_on: whether all that there is to install is installed.
        stay: whether it is left there: graphs were compiled with it, and would have to be anew.
    """

    def __init__(self) -> None:
        self.by_scope: dict[Any, list[Removable]] = {}
        self.are_on, self.stay = True, False
        self._n_compiled = 0
        self._lock = threading.RLock()

    def add(self, scope: Any) -> None:
        """Install a scope that opens, and those that are off."""
        with self._lock:
            self.by_scope[scope] = []
            self.put_on()

    def drop(self, scope: Any) -> list[Removable]:
        """What a scope that closes has there, to be removed."""
        with self._lock:
            return self.by_scope.pop(scope, [])

    def put_on(self) -> None:
        """Install what is off: a forward needs it."""
        with self._lock:
            for scope, installed in self.by_scope.items():
                if not installed:
                    self.by_scope[scope] = _installed(scope)
            self.are_on, self._n_compiled = True, n_compiled()

    def take_off(self, scope: Any, entering: Any = None) -> None:
        """Take all of it off, if the innermost scope finds that nobody needs it.

        Args:
            entering: the forward that does not, and has not come to its layers yet; None: the
                scopes have not heard of it.
        """
        if not self.are_on or self.stay:
            return
        with self._lock:
            if scope not in self.by_scope or scope is not next(reversed(self.by_scope)):
                return
            self.are_on = False  # before the look: who begins now looks after it has said so
            running = {forward for other in self.by_scope for forward in other.running.copy()}
            if any(forward.runs for forward in running - {entering}):
                self.are_on = True
                return
            if n_compiled() != self._n_compiled and any(graphs_of(scope.sites)):
                self.are_on = self.stay = True
                return
            for other, installed in self.by_scope.items():
                other.tally.has_lost |= any(getattr(patch, "is_lost", False) for patch in installed)
                removed(installed)
                self.by_scope[other] = []


def _installed(scope: Any) -> list[Removable]:
    """Install on layers what the press of `scope` has for them; nothing if it fails."""
    with ExitStack() as undoing:
        installed = []
        for removable in scope.press.install_on_layers(scope):
            installed.append(removable)
            undoing.callback(removable.remove)
        undoing.pop_all()
    return installed


def removed(installed: list[Removable]) -> None:
    """Take off all that was installed, the latest first."""
    with ExitStack() as removing:  # all of it, whatever one of them raises
        for removable in installed:
            removing.callback(removable.remove)
