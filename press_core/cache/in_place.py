"""Layers in formats that only the attention functions of this library can read, in place."""

from typing import Any

import torch
from torch import Tensor

from press_core.cache.pruned import PrunedLayer
from press_core.cache.tokens import ReadingNeeds
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


class ChannelPrunedLayer(InPlaceLayer):
    """A pruned layer from whose keys channels were evicted.

    Attributes:
        keys: keys of the pruned part, `(B, H_kv, n, d')`.
        channels: which channels these keys have, `(B, H_kv, d')` int64.
        recent_keys: keys of the tokens appended after pruning, `(B, H_kv, m, d)`.
        values: `(B, H_kv, n + m, d)`.
    """

    refusal = "keys that have lost channels"
    unreadable = "this cache stores some channels of its keys only" + UNREADABLE

    def __init__(self, inner: Any, channels: Tensor, head_dim: int) -> None:
        super().__init__(inner)
        self.channels, self.needs = channels, ReadingNeeds.ATTENTION
        self.recent_keys = self.keys.new_empty(*self.keys.shape[:2], 0, head_dim)

    def states(self) -> tuple[Tensor, Tensor]:
        """Keys, with zeros in evicted channels, and values, `(B, H_kv, n + m, d)` each."""
        batch, heads, n, _ = self.keys.shape
        whole = self.keys.new_zeros(batch, heads, n, self.recent_keys.shape[-1])
        index = self.channels.unsqueeze(2).expand(-1, -1, n, -1)
        keys = torch.cat((whole.scatter(-1, index, self.keys), self.recent_keys), dim=-2)
        return keys, self.values

    def append(self, keys: Tensor, values: Tensor) -> None:
        self.recent_keys = torch.cat((self.recent_keys, keys), dim=-2)
        self.inner.values = torch.cat((self.values, values), dim=-2)

    def drop_last(self, n: int) -> None:
        self.recent_keys = self.recent_keys[..., :-n, :]
        self.inner.values = self.values[..., :-n, :]

    def select_rows(self, rows: Tensor) -> None:
        super().select_rows(rows)
        rows = rows.to(self.channels.device)
        self.channels, self.recent_keys = self.channels[rows], self.recent_keys[rows]

    def reset(self) -> None:
        super().reset()
        self.channels = self.recent_keys = None  # type: ignore[assignment]
