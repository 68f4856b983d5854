"""Attention masks of every implementation: which keys a row may see, and masks for pruned layers.

`transformers` gives an attention module one of: None (nothing to mask beyond causality), a bool
`(B, 1, q, kv)` (sdpa), a float `(B, 1, q, kv)` (eager), a 2-d `(B, kv)` (flash) or a `BlockMask`
(flex).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from press_core.errors import UnsupportedInputError


def padding(mask: Any, length: int, prefill: bool = True) -> list[int]:
    """How many tokens of padding stand on the left of each row.

    Args:
        mask: a mask of which the first `length` columns are asked about, in any form named above.
        prefill: whether its queries are those same `length` tokens.

    Returns:
        One number per row of the mask, or an empty list where nothing is padded.

    Raises:
        UnsupportedInputError: if what is masked is not padding on the left.
    """
    if mask is None:
        return []
    visible = _visible_to_last_query(mask, length, prefill)
    n_visible = visible.sum(dim=-1)
    columns = torch.arange(length, device=visible.device)
    left_padded = columns >= (length - n_visible)[:, None]
    # Padding sees nothing; of sequences packed one after the other each token sees itself.
    wrong = (visible != left_padded) | (n_visible == 0)[:, None]
    if prefill:
        wrong |= _visible_to_itself(mask, length) > left_padded
    if wrong.any():
        row = int(wrong.any(dim=-1).nonzero()[0])
        raise UnsupportedInputError(
            f"row {row} of the batch masks other tokens than padding on its left, or all of them; "
            'presses need left-padded batches (tokenizer.padding_side = "left") and no custom '
            "attention mask"
        )
    lengths: list[int] = (length - n_visible).tolist()
    return lengths if any(lengths) else []


def _visible_to_last_query(mask: Any, length: int, prefill: bool) -> Tensor:
    """`(B, length)` bool: the keys that the last query may see."""
    if isinstance(mask, BlockMask):
        last = mask.seq_lengths[0] - 1
        return _ask(mask, torch.full((length,), last), torch.arange(length))
    if mask.dim() == 2:
        return (mask[:, -length:] if prefill else mask[:, :length]).bool()
    return _as_bool(mask[:, 0, -1, :length])


def _visible_to_itself(mask: Any, length: int) -> Tensor:
    """`(B, length)` bool: the tokens that may see themselves."""
    if isinstance(mask, BlockMask):
        return _ask(mask, torch.arange(length), torch.arange(length))
    if mask.dim() == 2:
        return mask[:, -length:].bool()
    return _as_bool(mask[:, 0].diagonal(dim1=-2, dim2=-1)[:, :length])


def _as_bool(mask: Tensor) -> Tensor:
    return mask if mask.dtype == torch.bool else mask >= 0


def _ask(mask: BlockMask, queries: Tensor, keys: Tensor) -> Tensor:
    """`(B, n)` bool: whether each of `n` queries may see the key beside it."""
    batch, device = mask.shape[0], mask.kv_num_blocks.device
    rows = torch.arange(batch, device=device)[:, None]
    asked = mask.mask_mod(rows, torch.zeros_like(rows), queries.to(device), keys.to(device))
    return asked.expand(batch, len(keys))


def mask_for_pruned(mask: Any, occupied: Tensor, n_recent: int, like: Tensor, form: str) -> Any:
    """The mask for a layer whose pruned part has been laid out anew.

    The model's mask counts columns in the uncompressed sequence; only its last columns, those of
    the tokens that came after the pruning, still stand for what is stored.

    Args:
        mask: the mask that the model built, in any form.
        occupied: `(B, n)` bool, which slots of the pruned part hold a token of that row.
        n_recent: tokens after the pruned part, those of this call included.
        like: the hidden states of this call, `(B, q, D)`.
        form: the attention implementation in force.

    Returns:
        A mask of the same form over `n + n_recent` keys.
    """
    batch, n_queries = like.shape[:2]
    if isinstance(mask, BlockMask) or form == "flex_attention":
        return _flex_mask(mask, occupied, n_recent, batch, n_queries)
    if form.startswith("flash"):
        recent = _ones(batch, n_recent, like) if mask is None else mask[:, -n_recent:].bool()
        return torch.cat((occupied, recent), dim=-1)
    if mask is None:
        recent = _ones(n_queries, n_recent, like).tril(n_recent - n_queries)[None, None]
    else:
        recent = mask[..., -n_recent:]
    recent = recent.expand(batch, 1, n_queries, n_recent)
    old = occupied[:, None, None].expand(-1, 1, n_queries, -1)
    if form == "eager" or recent.dtype != torch.bool:  # added to the logits
        dtype = like.dtype if recent.dtype == torch.bool else recent.dtype
        old, recent = _as_float(old, dtype), _as_float(recent, dtype)
    return torch.cat((old, recent), dim=-1)


def _as_float(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)


def _ones(rows: int, columns: int, like: Tensor) -> Tensor:
    return torch.ones(rows, columns, dtype=torch.bool, device=like.device)


def _flex_mask(mask: Any, occupied: Tensor, n_recent: int, batch: int, n_queries: int) -> BlockMask:
    n_pruned = occupied.shape[1]
    n_keys = n_pruned + n_recent
    # The model's own function, asked about the columns of its own mask.
    shift = 0 if mask is None else mask.seq_lengths[1] - n_keys

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        in_pruned = kv < n_pruned
        old = occupied[b, kv.clamp(max=n_pruned - 1)]
        if mask is None:
            recent = kv - n_pruned <= q + n_recent - n_queries
        else:
            recent = mask.mask_mod(b, h, q, (kv + shift).clamp(min=0))
        return torch.where(in_pruned, old, recent)

    return create_block_mask(mask_mod, batch, None, n_queries, n_keys, device=str(occupied.device))
