"""Hooks that are not copied with their model: copies made inside a scope are clean."""

from typing import Any


class Hook:
    """A hook that is not copied or pickled with its model.

    PyTorch copies a module's hook dictionaries; a copy made inside a scope would be pruned for
    ever. The copy gets a hook that does nothing instead.

    PyTorch stores separately that a hook takes keyword arguments: while another thread registers
    it, a running forward may call it without. The scope takes no part in that forward.
    """

    def __init__(self, function: Any = lambda *_: None) -> None:
        self.function = function

    def __call__(self, *args: Any) -> Any:
        return self.function(*args)

    def __reduce__(self) -> Any:
        return Hook, ()
