"""Which tokens a layer has seen and which it keeps: metadata that all pruned layers share."""

from collections.abc import Mapping
from dataclasses import dataclass, is_dataclass, replace
from enum import Flag, auto
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class ReadingNeeds(Flag):
    """What a forward needs to read a pruned layer beyond what the model provides."""

    NOTHING = 0
    MASK = auto()
    """A mask, or positions, for this layer."""
    MASK_OF_MANY = auto()
    """A mask for this layer in forwards of several tokens."""
    ATTENTION = auto()
    """An attention function that reads this kind of layer."""


@dataclass(frozen=True, eq=False)
class Kept:
    """Which of the tokens seen up to the last pruning a layer keeps.

    Rows that keep fewer tokens than others have empty slots on the left.

    Attributes:
        positions: `(B, H_kv, n)` int32, ascending: sequence position of each slot, -1 for an empty
            slot. None: the press did not report positions.
        n_slots: `n`.
        n_seen: tokens seen up to the last pruning, padding included.
        rows: filled slots per row, where the batch was padded or rows keep different numbers of
            tokens (the mask that the model builds would hide the wrong keys); None: all slots.
        real: `(B, n_seen)` bool, which of the tokens seen are not padding; None: all.
        rotary: `(B, H_kv, n)` int32, the position that each kept key is rotated to, where it
            differs from `positions`: after rerotation, or with padding between turns. None
            elsewhere.
        following: per row, the next rotary position after rerotated keys; None: the model's own
            count continues.
        shift: `n_seen` minus the model's token count after rerotation.
    """

    positions: Tensor | None = None
    n_slots: int = 0
    n_seen: int = 0
    rows: tuple[int, ...] | None = None
    real: Tensor | None = None
    rotary: Tensor | None = None
    following: tuple[int, ...] | None = None
    shift: int = 0

    @property
    def is_padded(self) -> bool:
        return self.rows is not None

    def occupied(self, device: torch.device) -> Tensor | None:
        """Which slots hold a token, `(B, n)` bool; None: all."""
        if self.rows is None:
            return None
        slots = torch.arange(self.n_slots, device=device)
        return slots >= self.n_slots - torch.tensor(self.rows, device=device)[:, None]


def of_rows(known: T, rows: Tensor, batch: int) -> T:
    """Select batch rows of a layer's metadata.

    Tensors with `batch` rows and tuples of ints are indexed; mappings, other tuples and dataclasses
    are selected recursively; everything else is returned unchanged.

    Args:
        rows: indices of the rows to select, of `batch` rows.
    """

    def chosen(x: Any) -> Any:
        if isinstance(x, Tensor):
            return x[rows.to(x.device)] if len(x) == batch else x
        if isinstance(x, Mapping):
            return {name: chosen(part) for name, part in x.items()}
        if isinstance(x, tuple) and all(type(part) is int for part in x):
            return tuple([x[row] for row in rows.tolist()]) if x else x
        if isinstance(x, tuple):
            return tuple(map(chosen, x))
        return replace(x, **chosen(vars(x))) if is_dataclass(x) else x  # type: ignore[type-var]

    return chosen(known)


def extended(positions: Tensor, recent: Tensor) -> Tensor:
    """`positions` `(B, H_kv, n)` followed by `recent`, the same for all heads, as int64."""
    batch, heads, _ = positions.shape
    return torch.cat((positions.long(), recent.expand(batch, heads, -1)), dim=-1)
