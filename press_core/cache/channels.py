"""A cache layer that stores some channels of its keys only, and all of those that come later."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from press_core.cache.pruned import PrunedLayer
from press_core.cache.storage import Storage
from press_core.cache.tokens import ReadingNeeds
from press_core.errors import ScopeError, UnsupportedCacheError


class ChannelPrunedLayer(PrunedLayer):
    """A pruned layer whose keys have lost channels.

    Attributes:
        keys: `(B, H_kv, n, d')`, of the pruned part.
        channels: `(B, H_kv, d')` int64, which channels those are.
        recent_keys: `(B, H_kv, m, d)`, of the tokens that came later.
        values: `(B, H_kv, n + m, d)`.
    """

    def __init__(self, storage: Storage, channels: Tensor, head_dim: int) -> None:
        super().__init__(storage)
        self.channels, self.needs = channels, ReadingNeeds.ATTENTION
        self.recent_keys = self.keys.new_empty(*self.keys.shape[:2], 0, head_dim)

    @property
    def n_slots(self) -> int:
        return int(self.values.shape[-2]) if self.is_initialized else 0

    def columns(self, n_new: int) -> int:
        return self.n_slots + n_new

    @property
    def refusal(self) -> str:
        return "keys that have lost channels"

    def states(self) -> tuple[Tensor, Tensor]:
        """Keys, zero where channels are gone, and values."""
        batch, heads, n, _ = self.keys.shape
        whole = self.keys.new_zeros(batch, heads, n, self.recent_keys.shape[-1])
        index = self.channels.unsqueeze(2).expand(-1, -1, n, -1)
        keys = torch.cat((whole.scatter(-1, index, self.keys), self.recent_keys), dim=-2)
        return keys, self.values

    @property
    def unreadable(self) -> str:
        return (
            "this cache stores some channels of its keys only, which the model's own attention "
            "cannot read; decode inside the scope of the press, or inside "
            "`with attention_patch.headwise(model): ...`"
        )

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:  # reset
            raise ScopeError("this cache was reset while it had lost channels; make a new one")
        self.check_readable(key_states.shape[2])
        self.recent_keys = torch.cat((self.recent_keys, key_states), dim=-2)
        self.values = torch.cat((self.values, value_states), dim=-2)
        return key_states, value_states

    def drop_last(self, n: int) -> None:
        self.recent_keys, self.values = self.recent_keys[..., :-n, :], self.values[..., :-n, :]

    def select_rows(self, rows: Tensor) -> None:
        super().select_rows(rows)
        rows = rows.to(self.channels.device)
        self.channels, self.recent_keys = self.channels[rows], self.recent_keys[rows]

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def reset(self) -> None:
        super().reset()
        self.channels = self.recent_keys = None  # type: ignore[assignment]

    def offload(self) -> None:
        raise UnsupportedCacheError(
            "a cache with some channels of its keys cannot be offloaded: attention reads it in "
            "place; use a DynamicCache without offloading"
        )
