"""Masks of every form tell padding, and are fitted to what a pruned layer holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from press_core import UnsupportedInputError
from press_core.cache.masks import mask_for_pruned, prefill_tokens, visible_tokens

LENGTH = 6


# ---- masks of a prefill, as transformers makes them ----------------------------------------------


def _visible(tokens: Tensor) -> Tensor:
    """`(B, 1, S, S)` bool: causal attention to the `tokens` `(B, S)` that are not padding."""
    causal = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool).tril()
    return causal & tokens[:, None, None]


def _bool_mask(tokens: Tensor) -> Tensor:
    return _visible(tokens)


def _float_mask(tokens: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    mask = torch.zeros(_visible(tokens).shape, dtype=dtype)
    return mask.masked_fill(~_visible(tokens), torch.finfo(dtype).min)


def _half_mask(tokens: Tensor) -> Tensor:
    return _float_mask(tokens, torch.bfloat16)


def _infinite_mask(tokens: Tensor) -> Tensor:
    return _float_mask(tokens).masked_fill(~_visible(tokens), float("-inf"))


def _flat_mask(tokens: Tensor) -> Tensor:
    return tokens.long()


def _block_mask(tokens: Tensor) -> BlockMask:
    def mask_mod(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (kv <= q) & tokens[b, kv]

    length = tokens.shape[1]
    return create_block_mask(mask_mod, len(tokens), None, length, length, device="cpu")


FORMS: list[Callable[[Tensor], Any]] = [
    _bool_mask,
    _float_mask,
    _half_mask,
    _infinite_mask,
    _flat_mask,
    _block_mask,
]
of_every_form = pytest.mark.parametrize("form", FORMS)


def _tokens(*rows: str) -> Tensor:
    return torch.tensor([[mark == "x" for mark in row] for row in rows])


def _expected(tokens: Tensor | None) -> list[list[bool]] | None:
    return None if tokens is None else tokens.tolist()


def test_no_mask_is_no_padding() -> None:
    assert prefill_tokens(None, LENGTH, 2) is None
    assert visible_tokens(None, LENGTH, 2) is None


@of_every_form
def test_a_full_batch_has_no_padding(form: Callable[[Tensor], Any]) -> None:
    assert prefill_tokens(form(_tokens("xxxxxx", "xxxxxx")), LENGTH, 2) is None


@of_every_form
def test_padding_on_the_left_is_told_row_by_row(form: Callable[[Tensor], Any]) -> None:
    tokens = _tokens("..xxxx", "xxxxxx", ".....x")
    assert _expected(prefill_tokens(form(tokens), LENGTH, 3)) == tokens.tolist()


@of_every_form
def test_one_row_may_stand_for_the_whole_batch(form: Callable[[Tensor], Any]) -> None:
    found = prefill_tokens(form(_tokens("...xxx")), LENGTH, 2)
    assert _expected(found) == _tokens("...xxx", "...xxx").tolist()


@of_every_form
@pytest.mark.parametrize("row", ["xxxx..", "..xx..", "x.xxxx", ".x.xxx"])
def test_padding_elsewhere_is_refused_by_its_row(form: Callable[[Tensor], Any], row: str) -> None:
    mask = form(_tokens("xxxxxx", row))
    with pytest.raises(UnsupportedInputError, match=r"row 1 .*left-padded"):
        prefill_tokens(mask, LENGTH, 2)


def _of_form(form: str, visible: Tensor) -> Any:
    """`(B, 1 or H, q, S)` bool in the form that an attention implementation takes."""
    if form == "float":
        return torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)
    if form == "block":

        def mask_mod(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            return visible[b, h, q, kv]

        return create_block_mask(mask_mod, len(visible), None, LENGTH, LENGTH, device="cpu")
    return visible


@pytest.mark.parametrize("form", ["bool", "float", "block"])
def test_sequences_packed_one_after_the_other_are_not_taken_for_padding(form: str) -> None:
    sequence = torch.tensor([0, 0, 0, 1, 1, 1])
    visible = (sequence[:, None] == sequence) & torch.ones(LENGTH, LENGTH).tril().bool()
    with pytest.raises(UnsupportedInputError, match="row 0"):
        prefill_tokens(_of_form(form, visible[None, None]), LENGTH, 1)


@of_every_form
def test_a_row_of_padding_alone_is_refused(form: Callable[[Tensor], Any]) -> None:
    with pytest.raises(UnsupportedInputError, match="row 1"):
        prefill_tokens(form(_tokens("xxxxxx", "......")), LENGTH, 2)


@pytest.mark.parametrize("form", ["bool", "float"])
@pytest.mark.parametrize(("query", "key"), [(3, 1), (4, 4), (5, 2), (2, 0)])
def test_a_token_hidden_from_another_in_the_middle_is_refused(
    form: str, query: int, key: int
) -> None:
    visible = _visible(_tokens("xxxxxx", "xxxxxx"))
    visible[1, 0, query, key] = False
    with pytest.raises(UnsupportedInputError, match=r"row 1 .*no custom attention mask"):
        prefill_tokens(_of_form(form, visible), LENGTH, 2)


@pytest.mark.parametrize("form", ["bool", "float"])
def test_a_window_is_refused(form: str) -> None:
    visible = _visible(_tokens("xxxxxx")) & torch.ones(LENGTH, LENGTH).triu(-2).bool()
    with pytest.raises(UnsupportedInputError, match="row 0"):
        prefill_tokens(_of_form(form, visible), LENGTH, 1)


@pytest.mark.parametrize("form", ["bool", "float"])
def test_tokens_may_see_ahead(form: str) -> None:
    tokens = _tokens("..xxxx")
    visible = _visible(tokens)
    visible[0, 0, 3, 4] = True  # as image tokens do
    found = prefill_tokens(_of_form(form, visible), LENGTH, 1)
    assert _expected(found) == tokens.tolist()


@pytest.mark.parametrize("function", [prefill_tokens, visible_tokens])
@pytest.mark.parametrize("form", ["bool", "float"])
def test_a_mask_that_differs_from_head_to_head_is_refused(form: str, function: Any) -> None:
    visible = _visible(_tokens("xxxxxx")).repeat(1, 3, 1, 1)
    assert function(_of_form(form, visible), LENGTH, 1) is None
    visible[0, 1, 4, 2] = False
    with pytest.raises(UnsupportedInputError, match=r"\(1, 3, 6, 6\).*each head"):
        function(_of_form(form, visible), LENGTH, 1)


@of_every_form
def test_the_last_columns_are_told_wherever_the_holes_are(form: Callable[[Tensor], Any]) -> None:
    tokens = _tokens("..x.xx", ".xxxxx")
    assert _expected(visible_tokens(form(tokens), 4, 2)) == tokens[:, 2:].tolist()
    assert visible_tokens(form(tokens), 2, 2) is None
    assert visible_tokens(form(tokens), 0, 2) is None


# ---- masks for a pruned layer --------------------------------------------------------------------

OCCUPIED = _tokens(".xx", "xxx")
"""What the pruned part of two rows holds."""
N_PRUNED, N_RECENT, N_QUERIES, HEADS = 3, 4, 2, 2
RECENT = _tokens("xxx.", "xxxx"), _tokens("xxxx", ".xxx")
"""What the two queries may see of what came after the pruning, per row: drawn freely, so that a
mask of one's own is carried over and not replaced by a causal one."""
EXPECTED = torch.stack(
    [torch.cat((OCCUPIED[row].expand(N_QUERIES, -1), RECENT[row]), dim=-1) for row in range(2)]
)[:, None]
"""`(B, 1, q, n + n_recent)`: what the queries should see."""
CAUSAL = torch.stack(
    [
        torch.cat((OCCUPIED[row].expand(N_QUERIES, -1), _tokens("xxx.", "xxxx")), dim=-1)
        for row in range(2)
    ]
)[:, None]
LIKE = torch.zeros(2, N_QUERIES, 8)


def _uncompressed(n_columns: int) -> Tensor:
    """What the model built: `n_columns` of the uncompressed sequence, the recent ones last."""
    old = torch.zeros(2, 1, N_QUERIES, n_columns - N_RECENT, dtype=torch.bool)
    old[..., ::2] = True  # stands for other tokens than those that are left
    return torch.cat((old, torch.stack(RECENT)[:, None]), dim=-1)


@pytest.mark.parametrize("n_columns", [N_RECENT, N_PRUNED + N_RECENT, 11])
def test_a_bool_mask_keeps_its_recent_columns(n_columns: int) -> None:
    mask = mask_for_pruned(_uncompressed(n_columns), OCCUPIED, N_RECENT, LIKE, "sdpa")
    assert mask.dtype == torch.bool
    assert torch.equal(mask, EXPECTED)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str
)
@pytest.mark.parametrize("form", ["eager", "sdpa"])  # sdpa takes what a user made as it is
def test_a_float_mask_keeps_its_recent_columns_and_its_dtype(form: str, dtype: torch.dtype) -> None:
    lowest = torch.finfo(dtype).min
    given = torch.zeros(2, 1, N_QUERIES, 11, dtype=dtype).masked_fill(~_uncompressed(11), lowest)
    mask = mask_for_pruned(given, OCCUPIED, N_RECENT, LIKE.to(dtype), form)
    assert mask.dtype == dtype
    assert torch.equal(mask == 0, EXPECTED)
    assert torch.equal(mask == lowest, ~EXPECTED)


def test_a_mask_of_one_row_serves_all_rows() -> None:
    given = _uncompressed(11)[:1]
    mask = mask_for_pruned(given, OCCUPIED, N_RECENT, LIKE, "sdpa")
    for row in range(2):
        assert torch.equal(mask[row, :, :, :N_PRUNED], EXPECTED[row, :, :, :N_PRUNED])
        assert torch.equal(mask[row, :, :, N_PRUNED:], EXPECTED[0, :, :, N_PRUNED:])


def test_no_sdpa_mask_means_causal() -> None:
    mask = mask_for_pruned(None, OCCUPIED, N_RECENT, LIKE, "sdpa")
    assert mask.dtype == torch.bool
    assert torch.equal(mask, CAUSAL)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_no_eager_mask_means_causal_and_is_added(dtype: torch.dtype) -> None:
    mask = mask_for_pruned(None, OCCUPIED, N_RECENT, LIKE.to(dtype), "eager")
    assert mask.dtype == dtype  # a bool mask added to logits would hide nothing
    assert torch.equal(mask == 0, CAUSAL)
    assert torch.equal(mask == torch.finfo(dtype).min, ~CAUSAL)


@pytest.mark.parametrize("form", ["flash_attention_2", "flash_attention_3"])
def test_a_flash_mask_names_the_occupied_columns(form: str) -> None:
    given = torch.tensor([[1, 0, 1, 0, 1, 1, 0, 1, 1], [1, 1, 1, 1, 1, 1, 1, 1, 1]])
    mask = mask_for_pruned(given, OCCUPIED, N_RECENT, LIKE, form)
    assert torch.equal(mask, _tokens(".xxx.xx", "xxxxxxx"))
    mask = mask_for_pruned(None, OCCUPIED, N_RECENT, LIKE, form)
    assert torch.equal(mask, _tokens(".xxxxxx", "xxxxxxx"))


def test_a_flex_mask_asks_the_models_own_function_about_recent_columns() -> None:
    seen = _uncompressed(11)

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return seen[b, 0, q, kv.clamp(max=10)]

    given = create_block_mask(mask_mod, 2, None, N_QUERIES, 11, device="cpu")
    mask = mask_for_pruned(given, OCCUPIED, N_RECENT, LIKE, "flex_attention")
    assert mask.shape == (2, 1, N_QUERIES, N_PRUNED + N_RECENT)
    assert torch.equal(_dense(mask), EXPECTED)


def test_no_flex_mask_means_causal() -> None:
    mask = mask_for_pruned(None, OCCUPIED, N_RECENT, LIKE, "flex_attention")
    assert isinstance(mask, BlockMask)
    assert mask.shape == (2, 1, N_QUERIES, N_PRUNED + N_RECENT)
    assert torch.equal(_dense(mask), CAUSAL)


def _dense(mask: BlockMask) -> Tensor:
    """Every element that `mask` stands for, asked for one by one."""
    batch, _, n_queries, n_keys = mask.shape
    zero = torch.tensor(0)
    return torch.tensor(
        [
            [
                [
                    [
                        bool(mask.mask_mod(torch.tensor(b), zero, torch.tensor(q), torch.tensor(k)))
                        for k in range(n_keys)
                    ]
                    for q in range(n_queries)
                ]
            ]
            for b in range(batch)
        ]
    )
