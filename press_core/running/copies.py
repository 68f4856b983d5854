"""Copies of a model that are made inside a scope: they are clean."""

from __future__ import annotations

from typing import Any

from press_core.forward import current


class Hook:
    """A hook that does not come along when its model is copied or pickled.

    PyTorch's hook dictionaries travel with a module; a copy made inside a scope would be pruned for
    ever. The copy gets a hook that does nothing instead.

    PyTorch notes apart that a hook takes keyword arguments: while another thread puts it on, a
    forward that runs may call it without. That forward is none of the scope's.
    """

    def __init__(self, function: Any) -> None:
        self.function = function

    def __call__(self, *args: Any) -> Any:
        return self.function(*args)

    def __reduce__(self) -> Any:
        return Hook, (do_nothing,)


class LayerHook(Hook):
    """A hook of a layer: it does nothing in a forward that no scope has to do with."""

    def __call__(self, *args: Any) -> Any:
        return None if current.forward is None else self.function(current.forward, *args)


def do_nothing(*_: Any) -> None:
    """What is left of a hook in a copy of its model."""
