"""A cache layer in which every row and KV head keeps its own number of tokens.

All heads lie one after the other in one tensor, each with a little room behind it for the tokens to
come. What a head evicts is really gone; the attention function has to know where each head begins
and ends, and `attention_patch` attends over it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from press_core.cache.pruned import Reader, check_crop, n_to_remove
from press_core.errors import ScopeError, UnsupportedCacheError

SPARE = 0.02
"""Room behind each head, as a share of the mean number of tokens that heads hold."""


class RaggedLayer(DynamicLayer):
    """Keys and values of heads that hold different numbers of tokens.

    A head is one KV head of one row of the batch; there are `B * H_kv` of them, row by row.

    Attributes:
        keys, values: `(T, d)`, head after head, each followed by its spare room.
        slots: `(T,)` int32: position in the sequence of what lies in each slot; -1: spare room.
        starts: where each head begins.
        counts: how many tokens each head holds.
        spare: slots of room behind each head.
        n_heads: `H_kv`.
        seen: tokens that the layer has seen, padding included.
        n_recent: the last tokens of every head, those that came after the pruning.
        mean_padding: padding per row of what the layer has seen, on average.
        remembered: `(B, H_kv, w)`, scores of the last `w` tokens, for presses that evict tokens
            some time after they have judged them; see `remember`.
        attended_by: the back end of `attention_patch` that attended over it last.
    """

    slots: Tensor
    starts: list[int]
    counts: list[int]
    spare: int
    n_heads: int
    seen: int
    n_recent: int = 0
    mean_padding: float = 0.0
    remembered: Tensor | None = None
    attended_by: str | None = None
    _remembered_until: int = 0
    _ends: Tensor
    _reader: Reader | None = None

    @classmethod
    def of(
        cls, keys: Tensor, values: Tensor, kept: Tensor, positions: Tensor, seen: int
    ) -> RaggedLayer:
        """The layer that holds what is `kept` of `seen` tokens.

        Args:
            keys, values: `(B, H_kv, S, d)`.
            kept: `(B, H_kv, S)` bool.
            positions: `(1 or B, 1 or H_kv, S)`, in the sequence.
        """
        layer = cls()
        layer.dtype, layer.device, layer.is_initialized = keys.dtype, keys.device, True
        layer.seen, layer.n_heads = seen, keys.shape[1]
        layer.counts = kept.sum(dim=-1).flatten().tolist()
        chosen = kept.flatten().nonzero().squeeze(1)  # far faster than a mask as an index

        def of_chosen(states: Tensor) -> Tensor:  # (B * H_kv * S, ...)
            return states.detach().index_select(0, chosen)

        slots = of_chosen(positions.expand(kept.shape).flatten()).to(torch.int32)
        layer._lay_out(of_chosen(keys.flatten(0, 2)), of_chosen(values.flatten(0, 2)), slots, 0)
        return layer

    def _lay_out(self, keys: Tensor, values: Tensor, slots: Tensor, at_least: int) -> None:
        """Store heads that come without room between them, with room between them."""
        self.spare = max(at_least, int(SPARE * sum(self.counts) / len(self.counts)))
        *self.starts, _ = itertools.accumulate(
            (count + self.spare for count in self.counts), initial=0
        )

        def spaced(states: Tensor, empty: float) -> Tensor:
            room = states.new_full((self.spare, *states.shape[1:]), empty)
            return torch.cat([x for head in states.split(self.counts) for x in (head, room)])

        self.keys, self.values, self.slots = spaced(keys, 0), spaced(values, 0), spaced(slots, -1)
        self._ends = self._count_ends()

    def _count_ends(self) -> Tensor:
        ends = [start + count for start, count in zip(self.starts, self.counts, strict=True)]
        return torch.tensor(ends, device=self.device)

    def _indices(self, heads: Iterable[int]) -> Tensor:
        """Indices of all slots in which `heads` hold tokens, one head after the other."""
        runs = [torch.arange(self.starts[h], self.starts[h] + self.counts[h]) for h in heads]
        return torch.cat(runs).to(self.device)

    # ---- what attention needs --------------------------------------------------------------------

    @property
    def batch(self) -> int:
        """`B`."""
        return len(self.counts) // self.n_heads

    @property
    def lengths(self) -> Tensor:
        """How many tokens each head holds, `(B, H_kv)` int64."""
        return torch.tensor(self.counts, device=self.device).view(-1, self.n_heads)

    def head(self, index: int) -> tuple[Tensor, Tensor]:
        """Keys and values of one head, views of `(n, d)`."""
        start, stop = self.starts[index], self.starts[index] + self.counts[index]
        return self.keys[start:stop], self.values[start:stop]

    def newest(self, n: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the last `n` tokens of every head, `(B, H_kv, n, d)` each."""
        index = (self._ends[:, None] - n + torch.arange(n, device=self.device)).flatten()
        shape = self.batch, self.n_heads, n, -1
        return self.keys[index].view(shape), self.values[index].view(shape)

    def dense(self) -> tuple[Tensor, Tensor, Tensor]:
        """All heads at the length of the longest, aligned on the right.

        Returns:
            Keys and values `(B, H_kv, n, d)`, zeros where there is nothing, and their positions in
            the sequence, `(B, H_kv, n)`, -1 where there is nothing.
        """
        longest = max(self.counts)
        index = self._ends[:, None] - longest + torch.arange(longest, device=self.device)
        lengths = torch.tensor(self.counts, device=self.device)
        held = torch.arange(longest, device=self.device) >= longest - lengths[:, None]
        index = index.clamp(min=0).flatten()
        shape = self.batch, self.n_heads, longest
        empty = ~held.view(shape)
        keys = self.keys[index].view(*shape, -1).masked_fill_(empty.unsqueeze(-1), 0)
        values = self.values[index].view(*shape, -1).masked_fill_(empty.unsqueeze(-1), 0)
        return keys, values, self.slots[index].view(shape).masked_fill(empty, -1)

    def remember(self, scores: Tensor) -> None:
        """Keep the `scores` `(B, H_kv, w)` of the last `w` tokens."""
        self.remembered, self._remembered_until = scores, self.seen

    def recall(self, n_new: int) -> Tensor:
        """The scores of the last tokens before the `n_new` newest, `(B, H_kv, w)`.

        Infinite for tokens that came while nobody judged; there may be none at all.
        """
        if self.remembered is None:
            return self.keys.new_empty(self.batch, self.n_heads, 0)
        unjudged = self.seen - n_new - self._remembered_until
        if unjudged < 0:  # cropped
            return self.remembered[..., :unjudged]
        return torch.nn.functional.pad(self.remembered, (0, unjudged), value=float("inf"))

    def allow_update(self, reader: Reader) -> None:
        """Let the next update happen: the attention function of `reader` reads the layer itself."""
        self._reader = reader

    def disallow_update(self) -> None:
        """No longer let it happen."""
        self._reader = None

    @property
    def is_allowed(self) -> bool:
        """Whether the next update may happen: while the scope that said so is open."""
        return self._reader is not None and self._reader.is_open

    # ---- what caches do --------------------------------------------------------------------------

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append `(B, H_kv, q, d)` states to every head.

        Returns:
            The new states alone; attention over all of them needs the layer itself.

        Raises:
            ScopeError: if no scope is open that attends over it.
        """
        if not self.is_initialized:  # reset
            raise ScopeError("this cache was reset while head-wise compressed; make a new one")
        if not self.is_allowed:
            raise ScopeError(
                "the heads of this cache hold different numbers of tokens, which the model's own "
                "attention cannot read; decode inside the scope of the press, or inside "
                "`with attention_patch.headwise(model): ...`"
            )
        self._reader = None
        n_new = key_states.shape[2]
        if self.spare < n_new:
            index = self._indices(range(len(self.counts)))
            self._lay_out(self.keys[index], self.values[index], self.slots[index], n_new)
        if self.keys.is_inference() and not torch.is_inference_mode_enabled():
            self.keys, self.values = self.keys.clone(), self.values.clone()
            self.slots, self._ends = self.slots.clone(), self._ends.clone()
        steps = torch.arange(n_new, device=self.device)
        index = (self._ends[:, None] + steps).flatten()
        # Under autocast a decode step may come in another dtype than the prefill did.
        keys, values = (states.detach().flatten(0, 2) for states in (key_states, value_states))
        self.keys.index_copy_(0, index, keys.to(self.keys.dtype))
        self.values.index_copy_(0, index, values.to(self.values.dtype))
        self.slots[index] = (self.seen + steps).to(torch.int32).repeat(len(self.counts))
        self._ends += n_new
        self.counts = [count + n_new for count in self.counts]
        self.spare -= n_new
        self.seen += n_new
        self.n_recent += n_new
        return key_states, value_states

    def keep(self, kept: Tensor) -> None:
        """Evict what is not `kept`, `(tokens of all heads,)` bool, head after head."""
        index = self._indices(range(len(self.counts)))
        self.counts = [int(part.sum()) for part in kept.split(self.counts)]
        index = index[kept]
        self.n_recent = 0
        self._lay_out(self.keys[index], self.values[index], self.slots[index], 0)

    def get_seq_length(self) -> int:
        return self.seen if self.is_initialized else 0

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        if isinstance(query_length, Tensor):  # transformers 5.2 passes cache_position
            query_length = query_length.shape[0]
        return self.seen + query_length, 0

    def crop(self, tokens: int) -> None:
        """Take the most recent tokens away again; see `Pruned.crop`."""
        remove = n_to_remove(self, tokens)
        if not remove:
            return
        check_crop(self, remove)
        self.counts = [count - remove for count in self.counts]
        self.spare += remove
        self.seen -= remove
        self.n_recent -= remove
        self._ends = self._count_ends()
        gone = self._ends[:, None] + torch.arange(remove, device=self.device)
        self.slots = self.slots.index_fill(0, gone.flatten(), -1)

    def reset(self) -> None:
        self.keys = self.values = None  # type: ignore[assignment]
        self.is_initialized, self.seen, self.n_recent, self.counts = False, 0, 0, []

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.batch_select_indices(torch.arange(self.batch).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        if not self.is_initialized:
            return
        rows = torch.arange(self.batch)[indices.cpu()].tolist()
        heads = [row * self.n_heads + head for row in rows for head in range(self.n_heads)]
        index = self._indices(heads)
        self.counts = [self.counts[head] for head in heads]
        self._lay_out(self.keys[index], self.values[index], self.slots[index], 0)
        if self.remembered is not None:
            self.remembered = self.remembered[rows]

    def offload(self) -> None:
        raise UnsupportedCacheError(
            "a head-wise compressed cache cannot be offloaded: attention reads it in place; use a "
            "DynamicCache without offloading"
        )
