"""Layers in formats that only the attention functions of this library can read, in place."""

from typing import Any

import torch
from torch import Tensor

from press_core.cache.pruned import PrunedLayer
from press_core.errors import ScopeError, UnsupportedCacheError

UNREADABLE = (
    ", which the model's own attention cannot read; decode inside the scope of the press, or "
    "inside `with attention_patch.headwise(model): ...`"
)


class InPlaceLayer(PrunedLayer):
    """A pruned layer that stores states in a special format."""

    def append(self, keys: Tensor, values: Tensor) -> None:
        """Append the states `(B, H_kv, q, d)` of new tokens."""
        raise NotImplementedError

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append `(B, H_kv, q, d)` states to every head.

        Returns:
            Only the new states; attention over all tokens reads the layer itself.

        Raises:
            ScopeError: if no open scope provides the attention function, or if the layer was reset.
        """
        if not self.is_initialized:
            raise ScopeError(f"this cache was reset while it had {self.refusal}; make a new one")
        self.check_readable(key_states)
        grows = torch.is_grad_enabled() and not torch.compiler.is_compiling()
        if grows and self.keys.is_inference():  # autograd cannot save inference tensors
            self.select_rows(torch.arange(self.batch))
        self.append(key_states, value_states)
        return key_states, value_states

    def offload(self) -> None:
        raise UnsupportedCacheError(
            "head-wise and channel-wise compressed layers cannot be offloaded; use a DynamicCache "
            "without offloading"
        )
