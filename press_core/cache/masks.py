"""Reading and building attention masks of every implementation.

`transformers` passes an attention module one of: None (causal, nothing else to mask), a bool
`(B, 1, q, kv)` (sdpa), a float `(B, 1, q, kv)` that is added to the logits (eager), a 2-d `(B, kv)`
(flash) or a `BlockMask` (flex).
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from press_core.errors import UnsupportedInputError


def is_visible(mask: Tensor) -> Tensor:
    """Which entries of a 2-d, bool, integer or additive float mask are not masked out, bool."""
    if mask.dim() == 2 or not mask.is_floating_point():
        return mask.bool()
    return mask > torch.finfo(mask.dtype).min / 2


def hides(mask: Any) -> bool:
    """Whether a 2-d mask hides any token; in graphs, where values are not known: no."""
    is_known = isinstance(mask, Tensor) and mask.dim() == 2 and not torch.compiler.is_compiling()
    return is_known and not bool(mask.all())


def assert_whole(mask: Tensor, n: Any) -> None:
    """Let a compiled forward fail if a 2-d mask hides any of its first `n` tokens.

    Args:
        n: a number, or a tensor.
    """
    columns = torch.arange(mask.shape[1], device=mask.device)
    whole = ((mask != 0) | (columns >= n)).all()
    torch._assert_async(whole, "the attention_mask hides tokens that were pruned")


def without_first(mask: Tensor, n: Tensor) -> Tensor:
    """A 2-d mask without its first `n` columns, as wide as before: the last one is repeated."""
    columns, last = torch.arange(mask.shape[1], device=mask.device), mask.shape[1] - 1
    return mask.index_select(1, (columns + n.clamp(min=0).to(mask.device)).clamp(max=last))


def for_full_attention(mask: Any) -> Any:
    """The mask for full attention, where `mask` is a dict of masks by layer type."""
    return mask.get("full_attention") if isinstance(mask, dict) else mask


def one_for_all_heads(mask: Tensor) -> Tensor:
    """`(B, 1, q, n)` from a mask `(B, 1 or H, q, n)`.

    Raises:
        UnsupportedInputError: if it differs from head to head.
    """
    if mask.shape[1] > 1 and not bool((mask == mask[:, :1]).all()):
        raise UnsupportedInputError(
            f"an attention mask of {mask.shape[1]} heads hides other tokens from each head, which "
            "presses do not support; use one of shape (B, 1, q, n)"
        )
    return mask[:, :1]


def columns_seen(mask: Any, n_queries: int, n: int, device: torch.device | str = "cpu") -> Tensor:
    """Which of the last `n` columns of a mask each of the last queries sees.

    Args:
        mask: in any of the forms above.
        device: of the result where `mask` is None.

    Returns:
        `(1 or B, 1 or H, q, n)` bool.
    """
    if mask is None:
        return causal(n_queries, n, device)[None, None]
    seen = columns_from(mask, n_queries, mask.shape[-1] - n, n)
    is_2d = isinstance(mask, Tensor) and mask.dim() == 2
    return seen & causal(n_queries, n, mask.device) if is_2d else seen


def columns_from(mask: Any, n_queries: int, first: Any, n: int) -> Tensor:
    """Which of the `n` columns from `first` on each of the last queries sees.

    Not made causal where `mask` is of two dimensions.

    Args:
        mask: in any of the forms above, except None.
        first: a number, or a tensor on the device of `mask`.

    Returns:
        `(1 or B, 1 or H, q, n)` bool, True for columns before the first, False past the last.
    """
    if isinstance(mask, BlockMask):
        tokens = torch.arange(max(n, n_queries), device=mask.kv_num_blocks.device)
        queries = mask.seq_lengths[0] - n_queries + tokens[:n_queries, None]
        return _sees(mask, queries, first + tokens[:n])
    columns, last = first + torch.arange(n, device=mask.device), mask.shape[-1] - 1
    seen = is_visible(mask.index_select(-1, columns.clamp(min=0, max=last)))
    seen = seen & (columns <= last) | (columns < 0)
    return seen[:, None, None] if mask.dim() == 2 else seen[:, :, seen.shape[2] - n_queries :]


def part_of(mask: Any, first: int, n: int) -> Any:
    """The `n` columns from `first` on of a mask in any form; of a `BlockMask` a bool one."""
    if isinstance(mask, BlockMask):
        return columns_from(mask, mask.seq_lengths[0], first, n)
    return None if mask is None else mask[..., first : first + n]


def causal(n_queries: int, n: int, device: torch.device | str) -> Tensor:
    """`(q, n)` bool: each of the last `q` of `n` tokens sees the tokens up to itself."""
    return torch.ones(n_queries, n, dtype=torch.bool, device=device).tril(n - n_queries)


def visible_tokens(mask: Any, length: int, batch: int) -> Tensor | None:
    """Which of the last `length` columns of `mask` the last query sees, `(B, length)` bool.

    None if it sees all of them.
    """
    if mask is None or length == 0:
        return None
    last = one_for_all_heads(columns_seen(mask, 1, length))[:, 0, 0]
    if not torch.compiler.is_compiling() and bool(last.all()):  # values are not known in graphs
        return None
    return last.expand(batch, -1)


def prefill_tokens(mask: Any, length: int, batch: int) -> Tensor | None:
    """Which of the `length` tokens of a prefill are not padding, `(B, length)` bool; None: all.

    Raises:
        UnsupportedInputError: if the mask is not causal with left padding, or if it adds biases to
            the logits.
    """
    if mask is None:
        return None
    if isinstance(mask, Tensor) and mask.dim() == 2:
        mask = mask[:, :length]  # it may have columns for tokens that are to come
    refuse_bias(mask)
    visible = visible_tokens(mask, length, batch)
    tokens = torch.ones(batch, length, dtype=torch.bool) if visible is None else visible
    n_visible = tokens.sum(dim=-1)
    columns = torch.arange(length, device=tokens.device)
    left_padded = columns >= (length - n_visible)[:, None]
    wrong = (tokens != left_padded).any(dim=-1) | (n_visible == 0)
    wrong |= _is_not_causal(mask, left_padded).to(wrong.device)
    if wrong.any():
        raise UnsupportedInputError(
            f"the mask of row {int(wrong.nonzero()[0])} of the batch hides tokens other than left "
            "padding, or all tokens; presses need left-padded batches (tokenizer.padding_side = "
            '"left") and no custom attention mask'
        )
    return visible


def refuse_bias(mask: Any) -> None:
    """Raise if a mask adds something to the logits of tokens that it does not hide.

    Raises:
        UnsupportedInputError: if so.
    """
    if not isinstance(mask, Tensor) or not mask.is_floating_point() or mask.dim() == 2:
        return
    if not torch.compiler.is_compiling() and bool(((mask != 0) & is_visible(mask)).any()):
        raise UnsupportedInputError(
            "the attention mask adds something to the logits of tokens that it does not mask out; "
            "presses take additive masks of 0 and the dtype's minimum only"
        )


def bidirectional_mask(mask: Any, n: int) -> Tensor | None:
    """Which later tokens each of the last `n` tokens sees, as image tokens do, `(B, n, n)` bool.

    A token that sees later tokens is assumed to see the next one.

    Returns:
        None if no token sees a later one.

    Raises:
        UnsupportedInputError: if tokens see later ones by a `BlockMask`, which has no dense form.
    """
    if mask is None or n < 2 or (isinstance(mask, Tensor) and mask.dim() == 2):
        return None
    tokens = torch.arange(n)
    if isinstance(mask, BlockMask):
        first = mask.seq_lengths[0] - n, mask.seq_lengths[1] - n
        if not bool(_sees(mask, first[0] + tokens[None, :-1], first[1] + tokens[1:]).any()):
            return None
        raise UnsupportedInputError(
            "a press reads attention weights, and under flex attention it is not known which later "
            "tokens the tokens of an image see; use sdpa or eager attention"
        )
    seen = is_visible(one_for_all_heads(mask[:, :, -n:, -n:])[:, 0])
    if not bool(seen.diagonal(1, dim1=-2, dim2=-1).any()):
        return None
    return seen & (tokens > tokens[:, None]).to(seen.device)


def _is_not_causal(mask: Any, tokens: Tensor) -> Tensor:
    """`(B,)` bool: whether a token does not see exactly the tokens before it and itself.

    Padding sees nothing. Later tokens are not checked: image tokens may see them. In packed
    sequences, where earlier tokens are hidden, every token sees itself.

    Args:
        tokens: which tokens are not left padding, `(B, n)` bool.
    """
    n = tokens.shape[1]
    if isinstance(mask, BlockMask):  # only the diagonal is checked: it has no dense form
        itself = _sees(mask, torch.arange(n)[None], torch.arange(n))[:, 0, 0]
        return (itself != tokens.to(itself.device)).any(dim=-1)
    tokens = tokens.to(mask.device)
    if mask.dim() == 2:
        return torch.zeros(len(tokens), dtype=torch.bool, device=tokens.device)
    visible = is_visible(one_for_all_heads(mask)[:, 0, -n:, -n:])
    expected = tokens[:, None] & tokens[:, :, None]
    return ((visible != expected) & causal(n, n, visible.device)).flatten(1).any(dim=-1)


def _sees(mask: BlockMask, queries: Tensor, keys: Tensor) -> Tensor:
    """`(B, 1 or H, q, n)` bool: whether `queries` `(q, 1)` or `(1, n)` see `keys` `(n,)`."""
    device, (batch, heads) = mask.kv_num_blocks.device, mask.shape[:2]
    rows, of_heads = (torch.arange(size, device=device) for size in (batch, heads))
    of_heads, rows = of_heads.view(-1, 1, 1), rows.view(-1, 1, 1, 1)
    seen = mask.mask_mod(rows, of_heads, queries.to(device), keys.to(device))
    return seen.expand(batch, heads, len(queries), len(keys))


def form_of(implementation: str) -> str:
    """The attention implementation of `transformers` that takes masks in the form this one does.

    Itself if it is one of them, or if a user has registered it with masks of another form.
    """
    known = ALL_MASK_ATTENTION_FUNCTIONS
    alike = (name for name, masks in known.items() if masks is known.get(implementation))
    return next(alike, implementation)


def masks_one(implementation: str) -> bool:
    """Whether models give this attention implementation a mask for a single token, too."""
    return not form_of(implementation).startswith(("sdpa", "flash"))


def in_form(seen: Tensor, implementation: str, dtype: torch.dtype, n_heads: int) -> Any:
    """A mask in the form of an attention implementation.

    Args:
        seen: `(1 or B, 1 or H_kv or H, q, n)` bool.
        implementation: its name.
        dtype: of the logits.
        n_heads: `H`.

    Raises:
        UnsupportedInputError: for flash attention, if heads differ.
    """
    form = form_of(implementation)
    if seen.shape[1] > 1:
        seen = seen.repeat_interleave(n_heads // seen.shape[1], dim=1)
    if form == "flex_attention":

        def mask_mod(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            return seen[b % seen.shape[0], h % seen.shape[1], q, kv]

        device = str(seen.device)
        heads = None if seen.shape[1] == 1 else seen.shape[1]
        q, n = seen.shape[2:]
        return create_block_mask(mask_mod, len(seen), heads, q, n, device=device)
    if form.startswith("flash"):
        if seen.shape[1] > 1:
            raise UnsupportedInputError(
                "the attention_mask hides tokens before the pruning, where heads keep different "
                "tokens, and flash attention takes one mask for all heads; use sdpa or eager"
            )
        return seen[:, 0, -1]
    if form == "eager":
        least = torch.finfo(dtype).min
        return torch.zeros_like(seen, dtype=dtype).masked_fill(~seen, least)
    return seen
