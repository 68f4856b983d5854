"""Padded batches: each row is pruned as it would be without padding, and the rows are rejoined."""

from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from press_core.call import AttentionCall
from press_core.eviction import Eviction


class RowGroup(NamedTuple):
    """Rows of a batch with the same padding.

    Attributes:
        rows: indices into the batch.
        slots: `(m,)` int64, the slots that hold tokens; None: all.
        call: the call of these rows, without padding.
    """

    rows: list[int]
    slots: Tensor | None
    call: AttentionCall


def groups_of(call: AttentionCall, row_by_row: bool = False) -> Iterator[RowGroup]:
    """Split a call into groups of rows.

    While decoding, rows that held different numbers of tokens before are apart as well.

    Args:
        row_by_row: whether each row is a group; else rows with the same padding are.
    """
    batch, device, occupied = call.keys.shape[0], call.keys.device, call.when.occupied
    if occupied is None and (not row_by_row or batch == 1):
        yield RowGroup(list(range(batch)), None, call)
        return
    occupied = None if occupied is None else occupied.cpu()
    patterns: dict[Any, list[int]] = {}
    for row, held in enumerate(call.when.held or [0] * batch):
        alike = row if occupied is None or row_by_row else (held, *occupied[row].tolist())
        patterns.setdefault(alike, []).append(row)
    for rows in patterns.values():
        slots = None if occupied is None else occupied[rows[0]].nonzero().squeeze(1).to(device)
        yield RowGroup(rows, slots, call.of_rows(rows, slots))


Decide = Callable[[AttentionCall], Eviction]
"""Returns what is kept of the call of a row group."""


class Decisions:
    """The decisions about a whole batch: shorter groups get empty slots on the left.

    Attributes:
        call: the call of the whole batch.
        groups: the row groups.
        occupied: `(B, S)` bool, which slots hold tokens; None: all.
        evictions: the eviction of each group.
        length: number of slots that the longest group keeps.
        is_whole: whether nothing is evicted in any group.
    """

    def __init__(self, call: AttentionCall, decide: Decide, row_by_row: bool = False) -> None:
        self.call, self.groups, occupied = call, [*groups_of(call, row_by_row)], call.when.occupied
        self.occupied = None if occupied is None else occupied.to(call.keys.device)
        self.evictions = [decide(group.call) for group in self.groups]
        self.length = max([eviction.length for eviction in self.evictions])
        self.is_whole = all([eviction.is_whole for eviction in self.evictions])
        rows = [row for group in self.groups for row in group.rows]
        self._order = None if len(self.groups) == 1 else torch.tensor(rows).argsort()

    def any(self, name: str) -> bool:
        """Whether the field `name` is set in any eviction."""
        return any([getattr(eviction, name) is not None for eviction in self.evictions])

    @cached_property
    def rows(self) -> tuple[int, ...] | None:
        """Number of slots that each row fills; None: all of them, and there was no padding."""
        lengths = self.numbers(lambda eviction: eviction.length)
        return None if self.occupied is None and min(lengths) == self.length else lengths

    def numbers(self, of_group: Callable[[Eviction], int]) -> tuple[int, ...]:
        """A number per row, from `of_group` of its group's eviction."""
        both = zip(self.groups, self.evictions, strict=True)
        found = {row: of_group(eviction) for group, eviction in both for row in group.rows}
        return tuple([found[row] for row in range(len(found))])

    def joined(self, of_group: Callable[[Eviction], Any], empty: float = 0) -> Tensor:
        """`of_group` of each eviction, `(b, H_kv, n, ...)`, padded left and joined to a batch."""
        parts = [of_group(eviction) for eviction in self.evictions]
        longest = max([part.shape[2] for part in parts])
        return self.together([pad_left(part, longest, empty) for part in parts])

    def together(self, parts: list[Tensor]) -> Tensor:
        """Concatenate tensors of each group's rows, in the order of the batch."""
        order = self._order
        return parts[0] if order is None else torch.cat(parts)[order.to(parts[0].device)]

    def slots(self) -> Tensor | None:
        """Indices of the kept slots, `(B, H_kv, n)` int64, -1 if empty; None: not reported.

        Raises:
            UnsupportedInputError: if slots can be empty, and an eviction does not report its own.
        """
        if self.rows is None and any([eviction.kept is None for eviction in self.evictions]):
            return None
        parts = []
        for group, eviction in zip(self.groups, self.evictions, strict=True):
            kept = eviction.known_kept
            parts.append(kept if group.slots is None else group.slots[kept])
        return self.together([pad_left(part, self.length, -1) for part in parts])

    def of_slots(self, known: Tensor | None, empty: float = -1) -> Tensor | None:
        """Values of the kept slots, from `known` values of all, `(1 or B, 1 or H_kv, S)`."""
        slots = self.slots()
        if known is None or slots is None:
            return None
        known = known.to(slots.device).expand(*slots.shape[:2], -1)
        if self.rows is None:
            return known.gather(-1, slots)
        return known.gather(-1, slots.clamp(min=0)).masked_fill(slots < 0, empty)


def pad_left(states: Tensor, n: int, value: float) -> Tensor:
    """Pad `states` `(B, H, m, ...)` on the left with `value`, to `n` slots."""
    missing = n - states.shape[2]
    if not missing:
        return states
    shape = (*states.shape[:2], missing, *states.shape[3:])
    return torch.cat((states.new_full(shape, value), states), dim=2)
