"""Which tokens a layer has seen and which are left: what every kind of pruned layer knows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, is_dataclass, replace
from enum import Flag, auto
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class ReadingNeeds(Flag):
    """What a forward needs to read a pruned layer, and the model does not give it."""

    NOTHING = 0
    MASK = auto()
    """A mask, or positions, of its own."""
    MASK_OF_MANY = auto()
    """A mask of its own where several tokens come at once."""
    ATTENTION = auto()
    """An attention function of its own."""


@dataclass(frozen=True, eq=False)
class Kept:
    """What is left of the tokens that a layer had seen when it was pruned last.

    Slots of rows that keep fewer tokens are empty on the left.

    Attributes:
        positions: `(B, H_kv, n)` int32, ascending: position in the sequence of each slot, -1 of an
            empty one. None: the press did not say.
        n_slots: `n`.
        n_seen: tokens that the layer had seen, padding included.
        rows: slots that each row fills, where the batch was padded or rows keep different numbers,
            so that the mask that the model builds would hide the wrong keys; None: all of them.
        real: `(B, n_seen)` bool, which tokens seen were no padding; None: all.
        rotary: `(B, H_kv, n)` int32: to which position each kept key is rotated, where keys were
            rerotated, or padding between turns separates that from `positions`; None elsewhere.
        following: where keys were rerotated, the position from which later tokens of each row
            continue; None: where the model counts on.
        shift: by how many tokens the model then counts less than the layer had seen.
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
        """`(B, n)` bool: which slots hold a token; None: all."""
        if self.rows is None:
            return None
        slots = torch.arange(self.n_slots, device=device)
        return slots >= self.n_slots - torch.tensor(self.rows, device=device)[:, None]


def of_rows(known: T, rows: Tensor, batch: int) -> T:
    """What is `known` of the `batch` rows of a layer, of some of them.

    Of tensors whatever has as many rows, of tuples a number for each; the rest is the same for all.
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
    """`positions` `(B, H_kv, n)` and after them `recent`, the same for all heads, int64."""
    batch, heads, _ = positions.shape
    return torch.cat((positions.long(), recent.expand(batch, heads, -1)), dim=-1)
