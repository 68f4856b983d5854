"""A cache layer in which every row and KV head keeps its own number of tokens.

What the heads hold of the context never changes until tokens are evicted again, so it is packed:
all heads one after the other in one tensor, which attention reads in blocks of equal length. Tokens
that come later are the same for all heads, and lie in a tensor of their own that has room to grow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from press_core.cache.pruned import Reader, check_crop, n_to_remove
from press_core.errors import ScopeError, UnsupportedCacheError

SPARE = 0.01
"""Room for tokens to come, as a share of the mean number of tokens that heads hold."""

WASTE = 0.018
"""Slots that may stay empty so that heads begin and end with a block, as a share of all."""

SIZES = 128, 96, 64, 48, 32
"""Slots of a block: products with shorter ones cost more, more heads lie in longer ones."""

START = 1600
"""Numbers of a key that a product over a block handles in the time that it takes to begin."""

FEW = 3 * 2**16
"""Up to so many numbers that the heads of a row read in vain, one block for each is quickest."""


@dataclass(frozen=True)
class Blocks:
    """Where heads of given lengths lie in blocks of equal length, and which heads read each one.

    A *reading* is one head reading one block. Blocks in which one head lies come first, then those
    that heads share. The queries of all heads that read a shared block are the rows of one product;
    so they all have as many readers as the one in which most heads lie, some of them in vain.

    Attributes:
        size: slots of a block, `c`.
        n: how many blocks there are.
        n_own: how many of them one head alone reads.
        heads: `(P,)` int64: which head reads, per reading, block after block.
        hidden: `(P, 1, c)`: what to add to the logits, minus infinity for slots of other heads.
        of_rows: whether each row of the batch has one block, which all of its heads read.
        starts: `(N,)` int64: where each head would begin if no block had been put elsewhere.
        places: `(n,)` int64: where each block has been put.
    """

    size: int
    n: int
    n_own: int
    heads: Tensor
    hidden: Tensor
    of_rows: bool
    starts: Tensor
    places: Tensor

    @classmethod
    def of(cls, counts: Sequence[int], n_heads: int, like: Tensor) -> Blocks:
        """The layout of heads that hold `counts` tokens.

        Args:
            n_heads: heads of a row, `H_kv`.
            like: has the width, the device and the dtype of keys.
        """
        held = torch.tensor(counts)
        of_rows = _of_rows(held.view(-1, n_heads), like.shape[-1])
        size, room = of_rows or _of_heads(held, like.shape[-1])
        starts = room.cumsum(0) - room
        n = max(1, -(-int(room.sum()) // size))
        if of_rows:  # a head without tokens reads its row, too, so that each head reads one block
            readers = torch.arange(len(held)).view(n, -1)
        else:
            readers = _readers(held, starts, size, n)
        shared = readers[:, -1] != readers[:, 0]
        if of_rows or like.is_cuda:  # where torch's kernel reads heads from end to end
            shared = torch.ones_like(shared)
        order, n_own = shared.to(torch.int8).argsort(stable=True), n - int(shared.sum())
        heads, blocks, in_vain = _readings(readers, order, n_own)
        slots = blocks[:, None] * size + torch.arange(size) - starts[heads, None]
        others = (slots < 0) | (slots >= held[heads, None]) | in_vain[:, None]
        hidden = torch.zeros(others.shape, dtype=like.dtype).masked_fill_(others, float("-inf"))
        hidden, heads = hidden.unsqueeze(1).to(like.device), heads.to(like.device)
        return cls(size, n, n_own, heads, hidden, of_rows is not None, starts, order.argsort())

    def slots(self, counts: Sequence[int]) -> Tensor:
        """`(sum(counts),)` int64: the slot of each token, head after head."""
        held = torch.tensor(counts)
        shift = self.starts - (held.cumsum(0) - held)
        slots = torch.arange(int(held.sum())) + shift.repeat_interleave(held)
        return self.places[slots // self.size] * self.size + slots % self.size


def _of_rows(held: Tensor, head_dim: int) -> tuple[int, Tensor] | None:
    """A block for each row of the batch, where these are short and of one length.

    Args:
        held: `(B, H_kv)`.

    Returns:
        Slots of a block, and how many slots each head takes; None: such blocks will not do.
    """
    of_rows = held.sum(dim=1)
    size = max(1, int(of_rows.max()))
    empty = size - of_rows
    in_vain = (held.shape[1] - 1) * size * head_dim
    if in_vain > FEW or int(empty.sum()) > WASTE * int(of_rows.sum()):
        return None
    room = held.clone()
    room[:, -1] += empty
    return size, room.flatten()


def _of_heads(held: Tensor, head_dim: int) -> tuple[int, Tensor]:
    """Whole blocks for every head where that wastes little; or heads behind each other.

    Blocks are as long as pays: to begin with one takes its time, and so do the slots of others that
    a head meets in its first and its last one. The very last one is nearly full.

    Args:
        held: `(N,)`.

    Returns:
        Slots of a block, and how many slots each head takes.
    """
    n_tokens = int(held.sum())
    allowed = WASTE * n_tokens
    longest = max(SIZES[-1], (START / head_dim * n_tokens / len(held)) ** 0.5)
    sizes = [size for size in SIZES if size <= longest]
    for size in sizes:
        room = (held + size - 1) // size * size
        if int(room.sum()) - n_tokens <= allowed:
            return size, room
    sizes += range(SIZES[-1] - 1, 0, -1)
    return next(size for size in sizes if -n_tokens % size <= allowed), held


def _readers(held: Tensor, starts: Tensor, size: int, n: int) -> Tensor:
    """`(n, w)` int64: the heads that lie in each block, in order, the last one again to fill up."""
    first = starts // size
    n_read = torch.where(held > 0, (starts + held - 1) // size - first + 1, 0)
    heads = torch.arange(len(held)).repeat_interleave(n_read)
    blocks = first[heads] + torch.arange(len(heads)) - (n_read.cumsum(0) - n_read)[heads]
    of_blocks = blocks.bincount(minlength=n)
    nth = torch.arange(len(blocks)) - (of_blocks.cumsum(0) - of_blocks)[blocks]
    readers = torch.full((n, max(1, int(of_blocks.max()))), -1)
    readers[blocks, nth] = heads
    return readers.cummax(dim=1).values.clamp(min=0)


def _readings(readers: Tensor, order: Tensor, n_own: int) -> tuple[Tensor, Tensor, Tensor]:
    """Every head and block of a reading, and whether it is in vain, `(P,)` each.

    Args:
        readers: `(n, w)`; see `_readers`.
        order: `(n,)` int64: the blocks, those in which one head lies first.
        n_own: how many these are.
    """
    again = torch.zeros_like(readers, dtype=torch.bool)
    again[:, 1:] = readers[:, 1:] == readers[:, :-1]
    own, shared = order.split((n_own, len(order) - n_own))
    return (
        torch.cat((readers[own, 0], readers[shared].flatten())),
        torch.cat((own, shared.repeat_interleave(readers.shape[1]))),
        torch.cat((torch.zeros_like(own, dtype=torch.bool), again[shared].flatten())),
    )


class RaggedLayer(DynamicLayer):
    """Keys and values of heads that hold different numbers of tokens.

    A head is one KV head of one row of the batch; there are `N = B * H_kv` of them, row by row.

    Attributes:
        keys, values: `(n, c, d)`, blocks of slots with what the heads hold of the context. On a CPU
            keys lie channel by channel within a block, which halves the time of the product with
            queries.
        slots: `(n, c)` int32: position in the sequence of what lies in each slot; -1: empty.
        held: how many of those tokens each head holds.
        blocks: where they lie.
        recent_keys, recent_values: `(N, room, d)`; the first `n_recent` came after the pruning.
        n_heads: `H_kv`.
        seen: tokens that the layer has seen, padding included.
        n_recent: the last tokens of every head, those that came after the pruning.
        mean_padding: padding per row of what the layer has seen, on average.
        remembered: `(B, H_kv, w)`, scores of the last `w` tokens, for presses that evict tokens
            some time after they have judged them; see `remember`.
        remembered_until: how many tokens the layer had seen then.
        attended_by: the kernel of `attention_patch` that attended over it last.
    """

    slots: Tensor
    held: list[int]
    blocks: Blocks
    recent_keys: Tensor
    recent_values: Tensor
    n_heads: int
    seen: int
    n_recent: int = 0
    mean_padding: float = 0.0
    remembered: Tensor | None = None
    attended_by: str | None = None
    remembered_until: int = 0
    _reader: Reader | None = None

    @classmethod
    def of(
        cls, keys: Tensor, values: Tensor, kept: Tensor, positions: Tensor, seen: int
    ) -> RaggedLayer:
        """The layer that holds what is `kept` of `seen` tokens.

        Gradients flow back to `keys` and `values`.

        Args:
            keys, values: `(B, H_kv, S, d)`.
            kept: `(B, H_kv, S)` bool.
            positions: `(1 or B, 1 or H_kv, S)`, in the sequence.
        """
        layer = cls()
        layer.dtype, layer.device, layer.is_initialized = keys.dtype, keys.device, True
        layer.seen, layer.n_heads = seen, keys.shape[1]
        layer._lay_out(
            keys.flatten(0, 2),
            values.flatten(0, 2),
            positions.expand(kept.shape).flatten().to(torch.int32),
            kept.flatten().nonzero().squeeze(1),  # far faster than a mask as an index
            kept.sum(dim=-1).flatten().tolist(),
        )
        return layer

    @classmethod
    def of_packed(
        cls,
        keys: Tensor,
        values: Tensor,
        slots: Tensor,
        held: list[int],
        n_heads: int,
        seen: int,
    ) -> RaggedLayer:
        """The layer whose heads hold these tokens, one head after the other: see `packed`.

        Args:
            held: how many tokens each head holds.
            n_heads: `H_kv`.
            seen: tokens that the layer has seen.
        """
        layer = cls()
        layer.dtype, layer.device, layer.is_initialized = keys.dtype, keys.device, True
        layer.seen, layer.n_heads = seen, n_heads
        layer._lay_out(keys, values, slots, torch.arange(len(keys), device=keys.device), held)
        return layer

    def packed(self) -> tuple[Tensor, Tensor, Tensor]:
        """Copies of what heads hold, one after the other, recent tokens left out.

        Returns:
            Keys and values `(sum(held), d)`, and their positions in the sequence.
        """
        index = self.blocks.slots(self.held).to(self.keys.device)
        states = (self.keys.flatten(0, 1), self.values.flatten(0, 1), self.slots.flatten())
        keys, values, slots = (x.index_select(0, index) for x in states)
        return keys, values, slots

    def hold_recent(self, keys: Tensor, values: Tensor, room: int) -> None:
        """Hold recent tokens `(N, n_recent, d)`, counted as seen before, with `room` for more."""
        self.n_recent = keys.shape[1]

        def with_room(states: Tensor) -> Tensor:
            storage = states.new_empty(len(states), max(room, self.n_recent), states.shape[2])
            storage[:, : self.n_recent] = states
            return storage

        self.recent_keys, self.recent_values = with_room(keys), with_room(values)

    def _lay_out(
        self, keys: Tensor, values: Tensor, positions: Tensor, chosen: Tensor, held: list[int]
    ) -> None:
        """Store the `chosen` tokens, head after head, and no recent ones.

        Args:
            keys, values: `(m, d)`.
            positions: `(m,)` int32.
            chosen: `(sum(held),)` int64, places among the `m`.
            held: how many of them each head holds.
        """
        self.held, self.n_recent = held, 0
        self.blocks = blocks = Blocks.of(held, self.n_heads, keys)
        slots = blocks.slots(held)
        free = torch.ones(blocks.n * blocks.size, dtype=torch.bool).index_fill_(0, slots, False)
        empty = free.nonzero().squeeze(1).to(keys.device)
        # What lies in each slot, so that each tensor is copied once; in an empty one whatever.
        source = chosen.new_zeros(len(free)).index_copy_(0, slots.to(keys.device), chosen)

        def packed(states: Tensor, nothing: float) -> Tensor:
            if not len(states):
                storage = states.new_full((len(source), *states.shape[1:]), nothing)
            else:
                storage = states.index_select(0, source).index_fill_(0, empty, nothing)
            return storage.view(blocks.n, blocks.size, *states.shape[1:])

        self.keys = packed(keys, 0)
        if keys.device.type == "cpu":
            self.keys = self.keys.mT.contiguous().mT
        self.values, self.slots = packed(values, 0), packed(positions, -1)
        self.recent_keys = keys.new_empty(len(held), 0, keys.shape[-1])
        self.recent_values = values.new_empty(len(held), 0, values.shape[-1])

    # ---- what attention needs --------------------------------------------------------------------

    @property
    def batch(self) -> int:
        """`B`."""
        return len(self.held) // self.n_heads

    @property
    def counts(self) -> list[int]:
        """How many tokens each head holds, recent ones included."""
        return [n + self.n_recent for n in self.held]

    @property
    def lengths(self) -> Tensor:
        """How many tokens each head holds, `(B, H_kv)` int64."""
        return torch.tensor(self.counts, device=self.device).view(-1, self.n_heads)

    @property
    def recent(self) -> tuple[Tensor, Tensor]:
        """Keys and values of the tokens that came after the pruning, `(N, n_recent, d)` each."""
        return self.recent_keys[:, : self.n_recent], self.recent_values[:, : self.n_recent]

    def head(self, index: int) -> tuple[Tensor, Tensor]:
        """Keys and values of one head, copies of `(n, d)`."""
        keys, values, _, _ = self._tokens([index])
        return keys, values

    def newest(self, n: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the last `n` tokens of every head, `(B, H_kv, n, d)` each."""
        if n > self.n_recent:
            keys, values, _ = self.dense()
            return keys[:, :, -n:], values[:, :, -n:]
        shape = self.batch, self.n_heads, n, -1
        keys, values = (states[:, self.n_recent - n :] for states in self.recent)
        return keys.reshape(shape), values.reshape(shape)

    def dense(self) -> tuple[Tensor, Tensor, Tensor]:
        """All heads at the length of the longest, aligned on the right.

        Returns:
            Keys and values `(B, H_kv, n, d)`, zeros where there is nothing, and their positions in
            the sequence, `(B, H_kv, n)`, -1 where there is nothing.
        """
        keys, values, positions, counts = self._tokens(range(len(self.held)))
        longest, held = max(counts), torch.tensor(counts)
        ends = (torch.arange(len(counts)) + 1) * longest
        shift = ends - held.cumsum(0)
        index = (torch.arange(len(keys)) + shift.repeat_interleave(held)).to(keys.device)

        def padded(states: Tensor, empty: float) -> Tensor:
            storage = states.new_full((len(counts) * longest, *states.shape[1:]), empty)
            storage = storage.index_copy(0, index, states)
            return storage.view(self.batch, self.n_heads, longest, *states.shape[1:])

        return padded(keys, 0), padded(values, 0), padded(positions, -1)

    def _tokens(self, heads: Sequence[int]) -> tuple[Tensor, Tensor, Tensor, list[int]]:
        """Copies of what `heads` hold: keys, values, positions, one head after the other; how many.

        Recent tokens included.
        """
        of_heads = self.blocks.slots(self.held).split(self.held)
        old = [of_heads[h] for h in heads]
        if not self.n_recent:
            index = torch.cat(old).to(self.keys.device)
            keys, values = self.keys.flatten(0, 1)[index], self.values.flatten(0, 1)[index]
            return keys, values, self.slots.flatten()[index], [self.held[h] for h in heads]
        n_slots = self.slots.numel()
        new = [n_slots + h * self.n_recent + torch.arange(self.n_recent) for h in heads]
        index = torch.cat([x for both in zip(old, new, strict=True) for x in both])
        index = index.to(self.keys.device)
        keys, values = self.recent
        first = self.seen - self.n_recent
        positions = torch.arange(first, self.seen, dtype=torch.int32, device=keys.device)
        return (
            torch.cat((self.keys.flatten(0, 1), keys.flatten(0, 1)))[index],
            torch.cat((self.values.flatten(0, 1), values.flatten(0, 1)))[index],
            torch.cat((self.slots.flatten(), positions.repeat(len(self.held))))[index],
            [self.held[h] + self.n_recent for h in heads],
        )

    def remember(self, scores: Tensor | None, until: int | None = None) -> None:
        """Keep the `scores` `(B, H_kv, w)` of the last `w` of `until` tokens; None: of all."""
        self.remembered = scores
        self.remembered_until = self.seen if until is None else until

    def recall(self, n_new: int) -> Tensor:
        """The scores of the last tokens before the `n_new` newest, `(B, H_kv, w)`.

        Infinite for tokens that came while nobody judged; there may be none at all.
        """
        if self.remembered is None:
            return self.keys.new_empty(self.batch, self.n_heads, 0)
        unjudged = self.seen - n_new - self.remembered_until
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
        self.recent_keys = self._appended(self.recent_keys, key_states.flatten(0, 1))
        self.recent_values = self._appended(self.recent_values, value_states.flatten(0, 1))
        self.seen += n_new
        self.n_recent += n_new
        return key_states, value_states

    def _appended(self, recent: Tensor, new: Tensor) -> Tensor:
        """`recent` with `new` states `(N, q, d)` behind what it holds."""
        n, n_new = self.n_recent, new.shape[1]
        if torch.is_grad_enabled() and (recent.requires_grad or new.requires_grad):
            return torch.cat((recent[:, :n], new.to(recent.dtype)), dim=1)
        # A tensor made in inference mode cannot be written to outside of it.
        locked = recent.is_inference() and not torch.is_inference_mode_enabled()
        if n + n_new > recent.shape[1] or locked:
            spare = int(SPARE * (sum(self.held) / len(self.held) + n + n_new))
            room = recent.new_empty(len(recent), n + n_new + spare, recent.shape[2])
            room[:, :n] = recent[:, :n]
            recent = room
        # Under autocast a decode step may come in another dtype than the prefill did.
        recent[:, n : n + n_new] = new
        return recent

    def keep(self, kept: Tensor) -> None:
        """Evict what is not `kept`, `(tokens of all heads,)` bool, head after head."""
        keys, values, positions, counts = self._tokens(range(len(self.held)))
        held = [int(part.sum()) for part in kept.split(counts)]
        self._lay_out(keys, values, positions, kept.nonzero().squeeze(1), held)

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
        self.seen -= remove
        self.n_recent -= remove
        unseen = self.remembered_until - self.seen
        if self.remembered is not None and unseen > 0:
            self.remember(self.remembered[..., : max(0, self.remembered.shape[-1] - unseen)])

    def reset(self) -> None:
        self.keys = self.values = None  # type: ignore[assignment]
        self.recent_keys = self.recent_values = None  # type: ignore[assignment]
        self.is_initialized, self.seen, self.n_recent, self.held = False, 0, 0, []

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.batch_select_indices(torch.arange(self.batch).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        if not self.is_initialized:
            return
        rows = torch.arange(self.batch)[indices.cpu()].tolist()
        heads = [row * self.n_heads + head for row in rows for head in range(self.n_heads)]
        recent, n_recent = self.recent, self.n_recent
        self.n_recent = 0  # they stay apart
        keys, values, positions, held = self._tokens(heads)
        chosen = torch.arange(len(keys), device=keys.device)
        self._lay_out(keys, values, positions, chosen, held)
        index = torch.tensor(heads, device=keys.device)
        self.recent_keys, self.recent_values = (states[index] for states in recent)
        self.n_recent = n_recent
        if self.remembered is not None:
            self.remembered = self.remembered[rows]

    def offload(self) -> None:
        raise UnsupportedCacheError(
            "a head-wise compressed cache cannot be offloaded: attention reads it in place; use a "
            "DynamicCache without offloading"
        )
