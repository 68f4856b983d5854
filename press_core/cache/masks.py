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
from press_core.model.generation import innermost_frame


def visible_tokens(mask: Any, length: int, batch: int) -> Tensor | None:
    """Which of the last `length` columns of `mask` the last query sees, `(B, length)` bool.

    Args:
        mask: in any form named above.
        length: no more than the mask has columns.

    Returns:
        None where it sees them all.

    Raises:
        UnsupportedInputError: if the mask differs from head to head.
    """
    if mask is None or length == 0:
        return None
    if isinstance(mask, BlockMask):
        first = mask.seq_lengths[1] - length
        last = torch.full((length,), mask.seq_lengths[0] - 1)
        visible = _ask(mask, last, torch.arange(first, first + length))
    elif mask.dim() == 2:
        visible = mask[:, mask.shape[1] - length :].bool()
    else:
        visible = _one_for_all_heads(mask)[:, -1, mask.shape[-1] - length :]
    return None if bool(visible.all()) else visible.expand(batch, -1)


def given_mask() -> Tensor | None:
    """The mask of the user, `(B, n)`, while `transformers` builds that of the model from it.

    A cache is asked how many columns it needs, and not told which mask they are taken from: that is
    read off the call stack.

    Returns:
        None where it was given none, or no such mask is being built.
    """
    frame = innermost_frame("transformers.masking_utils")
    mask = None if frame is None else frame.f_locals.get("attention_mask")
    return mask if isinstance(mask, Tensor) and mask.dim() == 2 else None


def prefill_tokens(mask: Any, length: int, batch: int) -> Tensor | None:
    """Which of the `length` tokens of a prefill are no padding, `(B, length)` bool; None: all.

    Raises:
        UnsupportedInputError: if the mask hides anything but padding on the left and later tokens.
    """
    visible = visible_tokens(mask, length, batch)
    if mask is None:
        return None
    tokens = torch.ones(batch, length, dtype=torch.bool) if visible is None else visible
    n_visible = tokens.sum(dim=-1)
    columns = torch.arange(length, device=tokens.device)
    left_padded = columns >= (length - n_visible)[:, None]
    wrong = (tokens != left_padded).any(dim=-1) | (n_visible == 0)
    wrong |= _is_not_causal(mask, left_padded.to(_device_of(mask))).to(wrong.device)
    if wrong.any():
        raise UnsupportedInputError(
            f"row {int(wrong.nonzero()[0])} of the batch masks other tokens than padding on its "
            "left, or all of them; presses need left-padded batches (tokenizer.padding_side = "
            '"left") and no custom attention mask'
        )
    return visible


def later_tokens(mask: Any, n: int) -> Tensor | None:
    """Which later ones the last `n` tokens see, as those of an image do: `(B, n, n)` bool.

    Returns:
        None where they see none. Who sees a later token is taken to see the next one too.

    Raises:
        UnsupportedInputError: if there are some in a mask that has no dense form.
    """
    if mask is None or n < 2 or (isinstance(mask, Tensor) and mask.dim() == 2):
        return None
    tokens = torch.arange(n)
    if isinstance(mask, BlockMask):
        first = mask.seq_lengths[0] - n, mask.seq_lengths[1] - n
        if not bool(_ask(mask, first[0] + tokens[:-1], first[1] + tokens[1:]).any()):
            return None
        raise UnsupportedInputError(
            "a press reads attention weights, and under flex attention it is not known which later "
            "tokens those of an image see; use sdpa or eager attention"
        )
    seen = _as_bool(_of_all_heads(mask[:, :, -n:, -n:])[:, 0])
    if not bool(seen.diagonal(1, dim1=-2, dim2=-1).any()):
        return None
    return seen & (tokens > tokens[:, None]).to(seen.device)


def _is_not_causal(mask: Any, tokens: Tensor) -> Tensor:
    """`(B,)` bool: whether one of `tokens` `(B, n)` misses an earlier one, or padding sees itself.

    Padding sees nothing; of sequences packed one after the other each token sees itself.
    """
    n = tokens.shape[1]
    if isinstance(mask, BlockMask):  # asked about the diagonal only: it has no dense form
        itself = _ask(mask, torch.arange(n), torch.arange(n))
        return (itself != tokens).any(dim=-1)
    if mask.dim() == 2:
        return torch.zeros(len(tokens), dtype=torch.bool, device=tokens.device)
    visible = _one_for_all_heads(mask)[:, -n:, -n:]
    packed = visible.diagonal(dim1=-2, dim2=-1) & ~tokens
    causal = torch.ones(n, n, dtype=torch.bool, device=visible.device).tril()
    missed = ~visible & causal & tokens[:, None] & tokens[:, :, None]
    return packed.any(dim=-1) | missed.flatten(1).any(dim=-1)


def _one_for_all_heads(mask: Tensor) -> Tensor:
    """`(B, q, n)` bool from a mask `(B, 1 or H, q, n)`."""
    return _as_bool(_of_all_heads(mask)[:, 0])


def _of_all_heads(mask: Tensor) -> Tensor:
    """`(B, 1, q, n)` from a mask `(B, 1 or H, q, n)`.

    Raises:
        UnsupportedInputError: if it differs from head to head.
    """
    if mask.shape[1] > 1 and not bool((mask == mask[:, :1]).all()):
        raise UnsupportedInputError(
            f"an attention mask of shape {tuple(mask.shape)} hides other tokens from each head, "
            "which presses cannot judge; use one of shape (B, 1, q, n)"
        )
    return mask[:, :1]


def _device_of(mask: Any) -> torch.device:
    return mask.kv_num_blocks.device if isinstance(mask, BlockMask) else mask.device


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
        recent = _of_all_heads(mask)[..., -n_recent:]
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
