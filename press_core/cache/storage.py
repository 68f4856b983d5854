"""How the layers of `transformers` store keys and values: the same words for each of them.

Kinds of storage that are not here (static buffers, quantized states) register themselves, see
`press_core.running`.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import cache_utils
from transformers.cache_utils import DynamicLayer

from press_core.cache.recent import Recent
from press_core.copies import copied
from press_core.errors import UnsupportedCacheError


class Storage:
    """Keys and values `(B, H_kv, n, d)` in a growing layer of `transformers`.

    Attributes:
        layer: that layer.
        is_always_masked: class attribute; whether the model always makes a mask for it, also for
            one token that sees everything.
    """

    is_always_masked = False

    def __init__(self, layer: Any) -> None:
        self.layer = layer

    @property
    def n_slots(self) -> int:
        """How many slots hold something."""
        return int(self.layer.keys.shape[-2]) if self.layer.is_initialized else 0

    @property
    def batch(self) -> int:
        """`B`."""
        return len(self.layer.values)

    def columns(self, n_new: int) -> int:
        """Columns that the model's mask has for what is stored and `n_new` tokens more."""
        return self.n_slots + n_new

    def states(self) -> tuple[Tensor, Tensor]:
        """Keys and values as exactly as they are stored."""
        return self.layer.keys, self.layer.values

    def update(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append states; returns what attention reads."""
        return self.layer.update(*args, **kwargs)

    def holding(self, keys: Tensor, values: Tensor) -> Storage:
        """A storage of the same kind with `keys` and `values` `(B, H_kv, n, d)` in it."""
        layer = copied(self.layer)
        if not layer.is_initialized:
            layer.lazy_initialization(keys, values)
        layer.keys, layer.values = keys, values
        return type(self)(layer)

    def of_other_shape(self, left: str) -> Storage:
        """What stores states of which `left` is what is left, as this does.

        Raises:
            UnsupportedCacheError: if nothing does.
        """
        return self

    def settled(self) -> Storage:
        """What stores the states for good, once they have been judged."""
        return self

    def emptied(self) -> Storage:
        """An empty storage of the same kind."""
        layer = copied(self.layer)
        layer.keys = layer.values = None
        layer.is_initialized = False
        return type(self)(layer)

    def seen_of_buffer(self, n_old: int, n_queries: int, n: int, n_held: int) -> Tensor | None:
        """See `PrunedLayer.seen_of_buffer`; the pruned part has `n_old` slots."""
        return None

    def recent(self, n: int, keys: Tensor, values: Tensor) -> Recent:
        """Where `n` heads of different lengths put tokens to come, of states like these."""
        return Recent(*(x.new_empty(n, 0, x.shape[-1]) for x in (keys, values)))

    def drop_last(self, n: int) -> None:
        self.layer.keys = self.layer.keys[..., :-n, :]
        self.layer.values = self.layer.values[..., :-n, :]

    def select_rows(self, rows: Tensor) -> None:
        """Hold some rows of the batch."""
        self.layer.batch_select_indices(rows)

    def reorder(self, rows: Tensor) -> None:
        """The same, for beam search."""
        self.layer.reorder_cache(rows)


class HybridStorage(Storage):
    """Of a layer that keeps the state of a linear attention beside its keys and values."""

    def drop_last(self, n: int) -> None:
        raise UnsupportedCacheError(
            "a pruned layer with a linear state cannot give back its latest tokens"
        )

    def emptied(self) -> Storage:
        empty = super().emptied()
        empty.layer.reset()
        return empty


HybridLayer: Any = getattr(cache_utils, "LinearAttentionAndFullAttentionLayer", None)
"""The layer of models that attend and keep a linear state in one; transformers 5.2 has none."""

KINDS: dict[type, type[Storage]] = {DynamicLayer: Storage}
"""By type, how layers of `transformers` store states."""

OPEN_KINDS: list[type] = []
"""Types of `KINDS` whose subclasses store states in the same way."""

if HybridLayer is not None:
    KINDS[HybridLayer] = HybridStorage


def kind_of(layer: Any) -> type[Storage] | None:
    """How a layer of `transformers` stores states; None: in a way that cannot be pruned."""
    known = KINDS.get(type(layer))
    if known is None:  # layers that quantize are of a class for each library
        known = next((KINDS[kind] for kind in OPEN_KINDS if isinstance(layer, kind)), None)
    return known
