"""What an open scope remembers of a cache layer beside what lies in it; it ends with the scope."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from press_core.copies import copied

FIRST = 2
"""Where steps are counted from: a compiler makes other graphs for 0, for 1 and for all numbers."""


class Key:
    """Tells one scope from all others of the process, in copies of a cache too."""

    is_open = False

    def __deepcopy__(self, _: Any) -> Key:
        return self

    def __reduce__(self) -> Any:
        return Key, ()


@dataclass(frozen=True, eq=False)
class Step:
    """What was observed of the tokens of one forward.

    Attributes:
        n: how many there were.
        states: by name, `(1 or B, ..., n, channels)`.
    """

    n: int
    states: Mapping[str, Tensor]

    def cut(self, start: int, stop: int) -> Step:
        """Some of the tokens."""
        kept = {name: x[..., start:stop, :] for name, x in self.states.items()}
        return Step(stop - start, kept)


@dataclass(frozen=True, eq=False)
class Memory:
    """What a scope knows of a layer.

    Attributes:
        ticks: forwards while decoding since the scope pruned the layer last, from `FIRST` on.
        all_ticks: all forwards while decoding, likewise.
        steps: what was observed of the latest tokens.
        slots: by name, what is known of each slot, `(B, H_kv, n)`; tokens that came since it was
            brought up to date have none yet.
        in_prefill: whether a prefill is under way, which comes in chunks.
        n_known: tokens that `steps` are of.
    """

    ticks: int = FIRST
    all_ticks: int = FIRST
    steps: tuple[Step, ...] = ()
    slots: Mapping[str, Tensor] = field(default_factory=dict)
    in_prefill: bool = False
    n_known: int = 0

    def after_forward(self) -> Memory:
        """The same, one forward later."""
        return copied(self, ticks=self.ticks + 1, all_ticks=self.all_ticks + 1)

    def with_step(self, step: Step, limit: int | None = None) -> Memory:
        """The same with what was observed of the latest tokens.

        Args:
            limit: of how many tokens before those it is still needed; None: of all. What is there
                stays until more follow, so that the new tokens can be taken back.
        """
        steps, over = self.steps, 0 if limit is None else max(0, self.n_known - limit)
        n_known = self.n_known - over + step.n
        while over and steps[0].n <= over:
            over, steps = over - steps[0].n, steps[1:]
        if over:
            steps = (steps[0].cut(over, steps[0].n), *steps[1:])
        return copied(self, steps=(*steps, step), n_known=n_known)

    def last(self, limit: int | None = None) -> dict[str, Tensor]:
        """By name, what was observed of the last `limit` tokens, `(B, ..., limit, channels)`."""
        found = {}
        for name in self.steps[-1].states if self.steps else ():
            parts = [step.states[name] for step in self.steps]
            batch = max(len(x) for x in parts)
            parts = [x if len(x) == batch else x.expand(batch, *x.shape[1:]) for x in parts]
            joined = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-2)
            found[name] = joined if limit is None else joined[..., -limit:, :]
        return found

    def after_pruning(self, slots: Mapping[str, Tensor], by_this_scope: bool) -> Memory:
        """The memory of a layer of which `slots` is what is known of those that are left."""
        if self.in_prefill and not by_this_scope:
            return copied(self, slots=slots)
        ticks = FIRST if by_this_scope else self.ticks
        return Memory(ticks, self.all_ticks, slots=slots)

    def of_slots(self, n: int) -> dict[str, Tensor]:
        """What is known of the first `n` slots, zeros of those that came since."""
        return {name: pad(x, (0, n - x.shape[-1])) for name, x in self.slots.items()}

    def without_last(self, n: int, n_slots: int) -> Memory:
        """The same without the last `n` tokens, which were taken back; a forward for each.

        Args:
            n_slots: what is then left in the layer.
        """
        ticks, all_ticks = (max(FIRST, x - n) for x in (self.ticks, self.all_ticks))
        steps = self.steps
        while n and steps:
            *before, last = steps
            left = [last.cut(0, last.n - n)] if last.n > n else []
            n, steps = max(0, n - last.n), (*before, *left)
        slots = {name: x[..., :n_slots] for name, x in self.slots.items()}
        n_known = sum([step.n for step in steps])
        return copied(
            self, ticks=ticks, all_ticks=all_ticks, steps=steps, slots=slots, n_known=n_known
        )
