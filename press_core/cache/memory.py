"""What an open scope remembers about a cache layer; discarded when the scope closes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn.functional import pad

FIRST = 2
"""Counters start at 2: torch.compile specializes graphs for 0 and 1."""


class Key:
    """Identifies a scope within the process. Only the scope holds it, until it closes.

    Attributes:
        is_open: whether the scope takes part in forwards that begin now.
    """

    is_open = False


@dataclass(frozen=True, eq=False)
class Step:
    """States observed for the tokens of one forward.

    Attributes:
        n: number of tokens.
        states: by name, `(1 or B, ..., n, channels)`.
    """

    n: int
    states: Mapping[str, Tensor]


@dataclass(frozen=True, eq=False)
class Memory:
    """What one scope remembers about one layer.

    Attributes:
        ticks: `FIRST` plus the decode forwards since the scope last pruned the layer.
        all_ticks: `FIRST` plus all decode forwards.
        steps: states observed for the latest tokens.
        slots: by name, a value per slot, `(B, H_kv, n)`; slots appended since the last update have
            none yet.
        in_prefill: whether a chunked prefill is in progress.
        n_known: number of tokens that `steps` cover.
    """

    ticks: int = FIRST
    all_ticks: int = FIRST
    steps: tuple[Step, ...] = ()
    slots: Mapping[str, Tensor] = field(default_factory=dict)
    in_prefill: bool = False
    n_known: int = 0

    def after_forward(self) -> Memory:
        """The memory with both counters advanced by one forward."""
        return replace(self, ticks=self.ticks + 1, all_ticks=self.all_ticks + 1)

    def with_step(self, step: Step, limit: int | None = None) -> Memory:
        """The memory with the states of the newest tokens appended.

        Args:
            limit: how many of the tokens before this step are still needed; None: all. Older steps
                are dropped only when the next one arrives, so that a crop can remove new tokens.
        """
        steps, n_known = self.steps, self.n_known
        while limit is not None and steps and n_known - steps[0].n >= limit:
            n_known, steps = n_known - steps[0].n, steps[1:]
        return replace(self, steps=(*steps, step), n_known=n_known + step.n)

    def last(self, limit: int | None = None) -> dict[str, Tensor]:
        """By name, the states of the last `limit` tokens, `(B, ..., limit, channels)`."""
        found = {}
        for name in self.steps[-1].states if self.steps else ():
            parts = [step.states[name] for step in self.steps]
            batch = max(len(x) for x in parts)
            parts = [x if len(x) == batch else x.expand(batch, *x.shape[1:]) for x in parts]
            joined = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-2)
            found[name] = joined if limit is None else joined[..., -limit:, :]
        return found

    def after_pruning(self, slots: Mapping[str, Tensor], by_this_scope: bool) -> Memory:
        """The memory after a pruning.

        Args:
            slots: values of the kept slots.
            by_this_scope: whether this scope pruned the layer.
        """
        if self.in_prefill and not by_this_scope:
            return replace(self, slots=slots)
        ticks = FIRST if by_this_scope else self.ticks
        return Memory(ticks, self.all_ticks, slots=slots)

    def of_slots(self, n: int) -> dict[str, Tensor]:
        """Values of the first `n` slots; zeros for slots appended since the last update."""
        return {name: pad(x, (0, n - x.shape[-1])) for name, x in self.slots.items()}

    def without_last(self, n: int) -> Memory:
        """The memory after the last `n` tokens were removed, counted as one forward each."""
        ticks, all_ticks = (max(FIRST, x - n) for x in (self.ticks, self.all_ticks))
        n_known = max(0, self.n_known - n)
        states = {name: x[..., :n_known, :] for name, x in self.last().items()}
        steps = (Step(n_known, states),) if n_known else ()
        return replace(self, ticks=ticks, all_ticks=all_ticks, steps=steps, n_known=n_known)


class Memories(WeakKeyDictionary[Key, Memory]):
    """What open scopes remember about one layer: dropped with their keys, and not pickled."""

    def __reduce__(self) -> Any:
        return Memories, ()
