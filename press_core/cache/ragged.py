"""A cache layer in which every row and KV head keeps a different number of tokens.

The kept context does not change until the next eviction, so it is packed: all heads one after
another in one tensor, which attention reads in blocks of equal length. New tokens are the same for
all heads and are stored in separate tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence
from transformers.cache_utils import DynamicLayer

from press_core.cache.in_place import UNREADABLE, InPlaceLayer
from press_core.cache.layout import Blocks
from press_core.cache.pruned import PrunedLayer
from press_core.cache.tokens import Kept, ReadingNeeds
from press_core.model.graphs import stay_in_place

RESERVED = 2
"""Empty slots before recent tokens: torch.compile specializes graphs for lengths 0 and 1."""


def _of_recent(name: str) -> Any:
    """The attribute `name` of the layer that holds the recent tokens."""
    return property(lambda layer: getattr(layer.recent, name))


class RaggedLayer(InPlaceLayer):
    """Keys and values of heads that hold different numbers of tokens.

    Here a head is one KV head of one row of the batch: `N = B * H_kv` heads, row by row.

    Attributes:
        keys, values: `(n, c, d)`, blocks of slots with the kept context of all heads. On a CPU
            values are stored channel by channel within a block, which takes a third off the time of
            their product with weights.
        slots: `(n, c)` int32: sequence position of the token in each slot; -1: empty.
        held: tokens of the context per head.
        blocks: the layout of the heads in blocks.
        recent: the tokens appended after pruning, in an even layer; see `no_recent`.
        n_heads: `H_kv`.
        group: query heads per KV head, `G`, which the layout is chosen for.
        carried: by name, `(B, H_kv, w)` values of the last `w` of the first `carried_until` tokens,
            for a press that evicts tokens some time after scoring them.
        attended_by: the kernel of `attention_patch` that last attended over this layer.
    """

    refusal = "heads of different lengths"
    unreadable = "the heads of this cache hold different numbers of tokens" + UNREADABLE

    keys: Any = None
    values: Any = None
    recent: PrunedLayer
    attended_by: str | None = None
    max_cache_len = 0  # so that `generate` of transformers 5.2 does not use the cache again
    carried_until: int = 0

    n_recent: Any = _of_recent("n_recent")
    n_counted: Any = _of_recent("n_counted")
    room: Any = _of_recent("room")
    get_max_length: Any = _of_recent("get_max_length")

    def __init__(self, kept: Kept, n_heads: int, group: int) -> None:
        self._reset_metadata()
        self.kept, self.n_heads, self.group = kept, n_heads, group
        self.needs, self.is_initialized = ReadingNeeds.ATTENTION, True

    @classmethod
    def of(
        cls,
        keys: Tensor,
        values: Tensor,
        chosen: Tensor,
        positions: Tensor,
        kept: Kept,
        like: PrunedLayer | None = None,
        group: int = 2,
    ) -> RaggedLayer:
        """A layer that keeps the `chosen` tokens of each head.

        Gradients flow back to `keys` and `values`.

        Args:
            keys, values: `(B, H_kv, S, d)`.
            chosen: which of the `S` tokens each head keeps, `(B, H_kv, S)` bool.
            positions: sequence positions, `(1 or B, 1 or H_kv, S)`.
            kept: how many tokens were seen, and which of them were padding.
            like: a layer of the kind that stores new tokens; None: a `DynamicLayer`.
            group: query heads per KV head; affects the layout only.
        """
        layer = cls(kept, chosen.shape[1], group)
        layer.recent = no_recent(keys, values, like)
        layer.lay_out(
            keys.flatten(0, 2),
            values.flatten(0, 2),
            positions.expand(chosen.shape).flatten().to(torch.int32),
            chosen.flatten().nonzero().squeeze(1),  # far faster than a mask as an index
            chosen.sum(dim=-1).flatten().tolist(),
        )
        return layer

    def lay_out(
        self, keys: Tensor, values: Tensor, positions: Tensor, chosen: Tensor, held: list[int]
    ) -> None:
        """Store the `chosen` tokens in blocks.

        Args:
            keys, values: `(m, d)`.
            positions: `(m,)` int32.
            chosen: `(sum(held),)` int64, indices into the `m` tokens, head after head.
            held: tokens per head.
        """
        self.device = keys.device
        self.held, self.blocks = held, Blocks.of(held, self.n_heads, self.group, keys)
        blocks, slots = self.blocks, self.blocks.slots(held)
        free = torch.ones(blocks.n * blocks.size, dtype=torch.bool).index_fill_(0, slots, False)
        empty = free.nonzero().squeeze(1).to(keys.device)
        # The token for each slot, so that each tensor is copied once; arbitrary for empty slots.
        source = chosen.new_zeros(len(free)).index_copy_(0, slots.to(keys.device), chosen)

        def packed(states: Tensor, nothing: float) -> Tensor:
            if not len(states):
                storage = states.new_full((len(source), *states.shape[1:]), nothing)
            else:
                storage = states.index_select(0, source).index_fill_(0, empty, nothing)
            return storage.view(blocks.n, blocks.size, *states.shape[1:])

        self.keys, self.values = packed(keys, 0), packed(values, 0)
        if keys.device.type == "cpu":
            self.values = self.values.mT.contiguous().mT
        self.slots = packed(positions, -1)
        if self.room is not None:
            stay_in_place(self.keys, self.values, blocks.heads, blocks.hidden)

    # ---- contents --------------------------------------------------------------------------------

    @property
    def batch(self) -> int:
        """`B`."""
        return len(self.held) // self.n_heads

    @property
    def counts(self) -> list[int]:
        """Tokens per head, recent ones included."""
        return [n + self.n_recent for n in self.held]

    @property
    def n_slots(self) -> int:
        return max([0, *self.counts])

    @property
    def n_old(self) -> int:
        return self.kept.n_seen

    def old_seen(self, context: Tensor | None) -> Tensor | None:
        return None if context is None else context[..., : self.n_old]

    def lengths(self) -> Tensor:
        return torch.tensor(self.counts, device=self.device).view(-1, self.n_heads)

    def states(self) -> tuple[Tensor, Tensor]:
        """Keys and values, left-padded to the longest head, `(B, H_kv, n, d)` each."""
        return self.dense()[:2]

    def all_positions(self) -> Tensor:
        return self.dense()[2].long()

    def head(self, index: int) -> tuple[Tensor, Tensor]:
        """Keys and values of one head, copies of `(n, d)`."""
        keys, values, _ = (x.split(self.counts)[index] for x in self.tokens())
        return keys, values

    def newest(self, n: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the last `n` tokens of every head, `(B, H_kv, n, d)` each."""
        # An inner scope may have packed them with the context.
        keys, values = (self.recent if n <= self.n_recent else self).states()
        return keys[:, :, -n:], values[:, :, -n:]

    def recent_states(self) -> tuple[Tensor, Tensor]:
        """Keys and values of recent tokens, `(N, m, d)` each; of a buffer all its slots."""
        keys, values = (x[:, :, RESERVED:] for x in (self.recent.keys, self.recent.values))
        return keys.flatten(0, 1), values.flatten(0, 1)

    def dense(self) -> tuple[Tensor, Tensor, Tensor]:
        """Keys, values and positions `(B, H_kv, n, ...)`; empty slots hold zeros and -1."""
        keys, values, positions = self.tokens()

        def padded(states: Tensor, empty: float) -> Tensor:
            heads = pad_sequence(states.split(self.counts), True, empty, "left")
            return heads.unflatten(0, (self.batch, self.n_heads))

        return padded(keys, 0), padded(values, 0), padded(positions, -1)

    def tokens(self) -> tuple[Tensor, Tensor, Tensor]:
        """Copies of the keys, values and positions of all tokens, head after head."""
        index, n = self.blocks.slots(self.held).to(self.device), self.n_recent
        later = torch.arange(self.kept.n_seen, self.n_seen).to(self.slots)

        def joined(stored: Tensor, recent: Tensor) -> Tensor:
            old = stored.flatten(0, 1).index_select(0, index).split(self.held)
            both = zip(old, recent[:, :n], strict=True)
            return torch.cat([part for head in both for part in head])

        (keys, values), positions = self.recent_states(), later.expand(len(self.held), n)
        return joined(self.keys, keys), joined(self.values, values), joined(self.slots, positions)

    # ---- late eviction ---------------------------------------------------------------------------

    def carry(self, known: Mapping[str, Tensor]) -> None:
        """Store values of the last `w` tokens, `(B, H_kv, w)` each, for the next call."""
        self.carried, self.carried_until = dict(known), self.n_seen

    def carried_to(self, n_new: int) -> dict[str, Tensor]:
        """The carried values up to the `n_new` newest tokens, `(B, H_kv, w)` each.

        Tokens that were appended without being scored get infinity.
        """
        unscored = self.n_seen - n_new - self.carried_until
        return {n: pad(x, (0, unscored), value=float("inf")) for n, x in self.carried.items()}

    def evict(self, evicted: Tensor, real: Tensor | None) -> None:
        """Evict some of the last tokens of each head.

        Args:
            evicted: `(B, H_kv, m)` bool, which of the last `m` tokens; a head may hold fewer.
            real: see `Kept`.
        """
        n = self.n_slots
        occupied = torch.arange(n, device=self.device) >= n - self.lengths().view(-1, 1)
        left = occupied & ~pad(evicted.flatten(0, 1), (n - evicted.shape[-1], 0))
        tokens, chosen = self.tokens(), left[occupied].nonzero().squeeze(1)
        self.kept = Kept(n_seen=self.n_seen, real=real)
        self.recent = no_recent(self.recent.keys, self.recent.values, self.recent)
        self.lay_out(*tokens, chosen, left.sum(dim=-1).tolist())

    # ---- cache layer interface -------------------------------------------------------------------

    def append(self, keys: Tensor, values: Tensor) -> None:
        # Under autocast the dtype of a decode step can differ from that of the prefill.
        self.recent.update(keys.to(self.keys.dtype), values.to(self.values.dtype))

    def drop_last(self, n: int) -> None:
        self.recent.drop_last(n)
        removed = self.carried_until - self.n_seen
        if removed > 0:
            self.carry({name: x[..., :-removed] for name, x in self.carried.items()})

    def reset(self) -> None:
        self._reset_metadata()
        self.keys = self.values = None
        self.is_initialized, self.held = False, []
        self.recent.reset()

    def select_rows(self, rows: Tensor) -> None:
        heads = [row * self.n_heads + h for row in rows.tolist() for h in range(self.n_heads)]
        of_heads = self.blocks.slots(self.held).to(self.device).split(self.held)
        chosen = torch.cat([of_heads[h] for h in heads])
        keys, values, positions = (x.flatten(0, 1) for x in (self.keys, self.values, self.slots))
        self.lay_out(keys, values, positions, chosen, [self.held[h] for h in heads])
        self.recent.select_rows(rows)


def no_recent(keys: Tensor, values: Tensor, like: PrunedLayer | None = None) -> PrunedLayer:
    """An empty layer for the tokens appended after `keys` and `values` `(B, H_kv, S, d)`.

    Args:
        like: see `RaggedLayer.of`.
    """
    ahead = [x.new_zeros(*x.shape[:2], RESERVED, x.shape[-1]) for x in (keys, values)]
    layer = (like or PrunedLayer(DynamicLayer())).beginning(*ahead)
    layer.kept = Kept(n_slots=RESERVED)
    return layer
