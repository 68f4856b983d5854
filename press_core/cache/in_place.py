"""Layers that the model's own attention cannot read: one of our own reads them where they lie."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from press_core.cache.pruned import PrunedLayer
from press_core.errors import ScopeError, UnsupportedCacheError

UNREADABLE = (
    ", which the model's own attention cannot read; decode inside the scope of the press, or "
    "inside `with attention_patch.headwise(model): ...`"
)


class InPlaceLayer(PrunedLayer):
    """A pruned layer of a shape of its own.

    Attributes:
        had: what had become of it when it was reset.
    """

    had: str

    def append(self, keys: Tensor, values: Tensor) -> None:
        """Store the states `(B, H_kv, q, d)` of tokens that came later."""
        raise NotImplementedError

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append `(B, H_kv, q, d)` states to every head.

        Returns:
            The new states alone; attention over all of them needs the layer itself.

        Raises:
            ScopeError: if no scope is open that attends over it, or if it was reset.
        """
        if not self.is_initialized:
            raise ScopeError(f"this cache was reset while {self.had}; make a new one")
        self.check_readable(key_states)
        self.append(key_states, value_states)
        return key_states, value_states

    def offload(self) -> None:
        raise UnsupportedCacheError(
            "what attention reads in place cannot be offloaded; use a DynamicCache without "
            "offloading"
        )
