"""Where heads of different lengths lie in blocks of equal length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

WASTE = 0.018
"""Slots that may stay empty so that heads begin and end with a block, as a share of all."""

SIZES = 128, 96, 64, 48, 32
"""Slots of a block: products with shorter ones cost more, more heads lie in longer ones."""

START = 1600
"""Numbers of a key that a product over a block handles in the time that it takes to begin."""

FEW = 2**15
"""Logits of a row whose query heads all read one block; with no more of them that is quickest."""


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
        stored_at: `(n,)` int64: where each block has been put.
    """

    size: int
    n: int
    n_own: int
    heads: Tensor
    hidden: Tensor
    of_rows: bool
    starts: Tensor
    stored_at: Tensor

    @classmethod
    def of(cls, counts: Sequence[int], n_heads: int, group: int, like: Tensor) -> Blocks:
        """The layout of heads that hold `counts` tokens.

        Args:
            n_heads: heads of a row, `H_kv`.
            group: query heads of each, `G`.
            like: has the width, the device and the dtype of keys.
        """
        held = torch.tensor(counts)
        of_rows = _of_rows(held.view(-1, n_heads), group)
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
        return self.stored_at[slots // self.size] * self.size + slots % self.size


def _of_rows(held: Tensor, group: int) -> tuple[int, Tensor] | None:
    """A block for each row of the batch, where these are short and of one length.

    Args:
        held: `(B, H_kv)`.

    Returns:
        Slots of a block, and how many slots each head takes; None: such blocks will not do.
    """
    of_rows = held.sum(dim=1)
    size = max(1, int(of_rows.max()))
    empty = size - of_rows
    n_logits = held.shape[1] * group * size
    if n_logits > FEW or int(empty.sum()) > WASTE * int(of_rows.sum()):
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
