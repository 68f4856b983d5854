"""Reading, pruning and measuring the layers of a `transformers` cache.

What was evicted is known by the cache layer and by nothing else: a pruned layer carries the
positions of the tokens it keeps, so that lengths, positions and masks continue correctly.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from press_core.errors import ScopeError, UnsupportedCacheError

# transformers 5.2 crops to a length, later releases crop a number of tokens away.
_CROP_TAKES_LENGTH = "max_length" in inspect.signature(DynamicLayer.crop).parameters


class PrunedLayer(DynamicLayer):
    """A cache layer some of whose tokens were evicted.

    It counts the tokens it has *seen* (`get_seq_length`), so that positions continue, and tells the
    mask builder which columns are still there (`get_mask_sizes`). Tokens that arrive later are
    appended as in any `DynamicLayer`.

    Attributes:
        positions: `(B, H_kv, n)` int32: position in the sequence of each slot of the pruned part,
            ascending; -1 marks an empty slot (rows of a padded batch keep different numbers of
            tokens, aligned on the right). None if the press that pruned did not say.
        evicted: tokens seen minus slots held.
        n_pruned: slots of the pruned part, those before the tokens that came later.
        padded: whether the batch was padded, so that the mask the model builds from the
            uncompressed sequence would hide the wrong keys.
        uneven: whether it holds another number of slots than the layer that the model builds the
            mask of all layers for.
        steps_masked: whether the attention implementation takes a mask for single tokens too.
    """

    positions: Tensor | None = None
    evicted: int = 0
    n_pruned: int = 0
    padded: bool = False
    uneven: bool = False
    steps_masked: bool = False
    _mask_in_hand: bool = False

    @property
    def n_slots(self) -> int:
        """Slots physically held per head."""
        return 0 if not self.is_initialized or self.keys.numel() == 0 else int(self.keys.shape[-2])

    def hold(
        self, keys: Tensor, values: Tensor, positions: Tensor | None, seen: int, padded: bool
    ) -> None:
        """Store `keys` and `values` `(B, H_kv, n, d)` as what is left of `seen` tokens."""
        self.lazy_initialization(keys, values)
        self.keys, self.values = keys, values
        self.positions = None if positions is None else positions.to(torch.int32)
        self.padded = padded
        self.n_pruned = int(keys.shape[-2])
        self.evicted = seen - self.n_pruned

    def occupied(self) -> Tensor:
        """`(B, n)` bool: which slots of the pruned part hold a token."""
        if self.positions is None:  # the press did not say, so rows are of one length
            shape = self.keys.shape[0], self.n_pruned
            return torch.ones(shape, dtype=torch.bool, device=self.keys.device)
        return self.positions[:, 0] >= 0

    def expect_mask(self) -> None:
        """Told by an open scope that the next update comes with a mask made for this layer."""
        self._mask_in_hand = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        needs_mask = self.padded or (self.uneven and (key_states.shape[2] > 1 or self.steps_masked))
        if needs_mask and not self._mask_in_hand:
            raise ScopeError(
                "this cache holds rows or layers of different lengths, which the model's own "
                "attention mask does not fit; keep the scope of the press open while decoding: "
                "`with press(model): model.generate(...)`"
            )
        self._mask_in_hand = False
        keys, values = super().update(key_states, value_states, *args, **kwargs)
        return keys, values

    def get_seq_length(self) -> int:
        return self.n_slots + self.evicted

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        if isinstance(query_length, Tensor):  # transformers 5.2 passes cache_position
            query_length = query_length.shape[0]
        return self.n_slots + query_length, self.evicted

    def crop(self, tokens: int) -> None:
        """Take the most recent tokens away again, down to where the layer was pruned.

        Args:
            tokens: as the installed transformers has it: minus the number of tokens to remove, or
                (5.2 also) the length to crop to.

        Raises:
            UnsupportedCacheError: if that would reach into the pruned part.
        """
        to_length = tokens > 0 or (tokens == 0 and _CROP_TAKES_LENGTH)
        remove = max(0, self.get_seq_length() - tokens) if to_length else -tokens
        recent = self.n_slots - self.n_pruned
        if remove > recent:
            raise UnsupportedCacheError(
                f"cannot crop {remove} tokens off a pruned layer: {recent} came after the pruning, "
                "what was evicted before them cannot come back"
            )
        if remove:
            self.keys, self.values = self.keys[..., :-remove, :], self.values[..., :-remove, :]

    def reset(self) -> None:
        self.keys = self.values = None  # type: ignore[assignment]
        self.positions = None
        self.is_initialized = self.padded = self.uneven = self._mask_in_hand = False
        self.evicted = self.n_pruned = 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        super().reorder_cache(beam_idx)
        self._select_positions(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        self._select_positions(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        if self.positions is not None:
            self.positions = self.positions.repeat_interleave(repeats, dim=0)

    def _select_positions(self, rows: Tensor) -> None:
        if self.positions is not None:
            self.positions = self.positions[rows.to(self.positions.device)]


def prunable_layer(cache: Any, layer_idx: int) -> DynamicLayer:
    """The layer of `cache` that a press may prune.

    Raises:
        UnsupportedCacheError: for anything but a growing layer of plain keys and values.
    """
    if not isinstance(cache, Cache) or not hasattr(cache, "layers"):
        raise UnsupportedCacheError(
            f"cannot prune a {type(cache).__name__}; pass a DynamicCache as past_key_values, or "
            "nothing and let the model make one"
        )
    layer = cache.layers[layer_idx]
    if type(layer) not in (DynamicLayer, PrunedLayer):
        raise UnsupportedCacheError(
            f"cannot prune layer {layer_idx} of a {type(cache).__name__}: it is a "
            f"{type(layer).__name__}, and only growing layers (DynamicCache) can give tokens up"
        )
    return layer


def mask_layer(cache: Cache) -> Any:
    """The layer whose length the model builds its one mask for: the first that does not slide."""
    return next(
        layer for layer in cache.layers if isinstance(layer, DynamicLayer) and not layer.is_sliding
    )


def check_prunable(cache: Any, layer_idx: int) -> None:
    """Refuse, before the layer is run, a cache that could not be pruned afterwards."""
    if isinstance(cache, Cache) and layer_idx >= len(cache.layers):
        replicate = getattr(cache, "layer_class_to_replicate", None)
        if replicate is DynamicLayer:
            return  # created as it is needed
        raise UnsupportedCacheError(
            f"cannot prune a {type(cache).__name__} of {getattr(replicate, '__name__', 'no')} "
            "layers; pass a DynamicCache"
        )
    prunable_layer(cache, layer_idx)


def kept_lengths(cache: Cache) -> list[Tensor]:
    """How many positions each head physically keeps.

    Returns:
        Per layer an int64 tensor `(B, H_kv)`; empty slots of padded rows do not count. A layer that
        has seen nothing yet gives a tensor of shape `(0, 0)`.
    """
    return [_kept(layer) for layer in cache.layers]


def _kept(layer: Any) -> Tensor:
    keys = layer.keys
    if keys is None or keys.numel() == 0:
        return torch.zeros(0, 0, dtype=torch.int64)
    kept = torch.full(keys.shape[:2], keys.shape[2], dtype=torch.int64, device=keys.device)
    if isinstance(layer, PrunedLayer) and layer.positions is not None:
        kept -= (layer.positions < 0).sum(dim=-1).to(kept.device)
    return kept


def cache_nbytes(cache: Cache) -> int:
    """Bytes of key and value storage that `cache` holds, spare capacity included."""
    storages = {
        storage.data_ptr(): storage.nbytes()
        for layer in cache.layers
        for states in (layer.keys, layer.values)
        if states is not None and (storage := states.untyped_storage()).nbytes()
    }
    return sum(storages.values())
