"""The layout of heads of different lengths in blocks of equal length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

WASTE = 0.018
"""Share of slots that may stay empty: at the end of the last block, or of those of the rows."""

SIZE = 128
"""Slots per block: products with short blocks cost more, long blocks hold more heads."""

FEW_QUERIES = 2**6
"""Queries of all blocks up to which one product is faster than one for own and one for shared."""

FEW = 2**13
"""Logits per row up to which a single block, read by all query heads of the row, is fastest."""

FEW_ON_GPU = 2**18
"""The same on a GPU, where launching a kernel costs more than such a product."""


@dataclass(frozen=True)
class Blocks:
    """Which slots of which blocks each head occupies, and which heads read each block.

    A *reading* is one head reading one block; there are `P` of them. Blocks with a single head are
    stored first, then blocks that heads share. The queries of all heads that read a shared block
    are the rows of one product, so every shared block gets as many readings as the fullest one;
    the surplus readings are masked.

    Attributes:
        size: slots per block, `c`.
        n: number of blocks.
        n_own: number of blocks with a single head.
        heads: `(P,)` int64: the head of each reading, block after block.
        hidden: `(P, 1, c)`: added to the logits; minus infinity for slots of other heads.
        of_rows: whether each row of the batch has one block, which all of its heads read.
        starts: `(N,)` int64: first slot of each head before blocks are reordered.
        bounds: `(N + 1,)` int32: `starts` and the number of slots, on the device.
        lengths: `(N,)` int32: tokens of each head, on the device.
        stored_at: `(n,)` int64: index of each block after reordering.
    """

    size: int
    n: int
    n_own: int
    heads: Tensor
    hidden: Tensor
    of_rows: bool
    starts: Tensor
    bounds: Tensor
    lengths: Tensor
    stored_at: Tensor

    @classmethod
    def of(cls, counts: Sequence[int], n_heads: int, group: int, like: Tensor) -> Blocks:
        """The layout of heads that hold `counts` tokens.

        Args:
            n_heads: KV heads per row, `H_kv`.
            group: query heads per KV head, `G`.
            like: keys, for their device and dtype.
        """
        held = torch.tensor(counts)
        few = FEW_ON_GPU if like.is_cuda else FEW
        of_rows = _of_rows(held.view(-1, n_heads), group, few)
        size, taken = of_rows or (_size(int(held.sum())), held)
        starts = taken.cumsum(0) - taken
        n = max(1, -(-int(taken.sum()) // size))
        if of_rows:  # each head reads exactly one block, even if it holds no tokens
            readers = torch.arange(len(held)).view(n, -1)
        else:
            readers = _readers(held, starts, size, n)
        shared = readers[:, -1] != readers[:, 0]
        at_once = of_rows or group * readers.numel() <= FEW_QUERIES
        if at_once or like.is_cuda:  # torch's varlen kernel needs the heads in order, end to end
            shared = torch.ones_like(shared)
        order, n_own = shared.to(torch.int8).argsort(stable=True), n - int(shared.sum())
        blocks = torch.arange(n)[:, None].expand_as(readers)
        surplus = readers.diff(dim=1, prepend=readers[:, :1] - 1) == 0  # the last one, repeated

        def readings(x: Tensor) -> Tensor:
            return torch.cat((x[order[:n_own], 0], x[order[n_own:]].flatten()))

        heads, blocks, surplus = map(readings, (readers, blocks, surplus))
        slots = blocks[:, None] * size + torch.arange(size) - starts[heads, None]
        masked = (slots < 0) | (slots >= held[heads, None]) | surplus[:, None]
        hidden = torch.zeros(masked.shape, dtype=like.dtype).masked_fill_(masked, float("-inf"))
        bounds = torch.cat((starts, starts.new_tensor([n * size])))
        bounds, lengths = (x.to(like.device, torch.int32) for x in (bounds, held))
        hidden, heads = hidden.unsqueeze(1).to(like.device), heads.to(like.device)
        return cls(
            *(size, n, n_own, heads, hidden, of_rows is not None),
            *(starts, bounds, lengths, order.argsort()),
        )

    def slots(self, counts: Sequence[int]) -> Tensor:
        """`(sum(counts),)` int64: the slot of each token, head after head."""
        held = torch.tensor(counts)
        shift = self.starts - (held.cumsum(0) - held)
        slots = torch.arange(int(held.sum())) + shift.repeat_interleave(held)
        return self.stored_at[slots // self.size] * self.size + slots % self.size


def _of_rows(held: Tensor, group: int, few: int) -> tuple[int, Tensor] | None:
    """One block per row of the batch, if rows are short and of nearly equal length.

    Args:
        held: `(B, H_kv)`.
        few: logits up to which a row is short.

    Returns:
        Slots per block, and the slots that each head takes; None: such blocks do not fit.
    """
    of_rows = held.sum(dim=1)
    size = max(1, int(of_rows.max()))
    empty = size - of_rows
    n_logits = held.shape[1] * group * size
    if n_logits > few or int(empty.sum()) > WASTE * int(of_rows.sum()):
        return None
    taken = held.clone()
    taken[:, -1] += empty
    return size, taken.flatten()


def _size(n_tokens: int) -> int:
    """Slots per block for heads back to back, so that the last block is nearly full."""
    return next(size for size in range(SIZE, 0, -1) if -n_tokens % size <= WASTE * n_tokens)


def _readers(held: Tensor, starts: Tensor, size: int, n: int) -> Tensor:
    """`(n, w)` int64: the heads in each block, in order, padded by repeating the last one."""
    blocks = torch.arange(n) * size
    first = torch.searchsorted(starts + held, blocks, right=True).clamp(max=len(held) - 1)
    last = torch.searchsorted(starts, blocks + size) - 1
    width = int((last - first).max()) + 1
    return torch.minimum(first[:, None] + torch.arange(width), last[:, None])
