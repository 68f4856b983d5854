"""Masks of every form tell padding and what is seen, and are made of what is seen."""

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

from press_core import UnsupportedInputError
from press_core.cache.masks import causal, columns_seen, in_form, prefill_tokens, visible_tokens

LENGTH, HEADS = 6, 4
LEAST = torch.finfo(torch.float32).min


def block_mask(seen):
    def mask_mod(b, h, q, kv):
        return seen[b, h % seen.shape[1], q, kv]

    heads = None if seen.shape[1] == 1 else seen.shape[1]
    return create_block_mask(mask_mod, len(seen), heads, *seen.shape[2:], device="cpu")


def added(seen, dtype, least):
    return torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, least)


DENSE = {
    "bool": lambda seen: seen,
    "float": lambda seen: added(seen, torch.float32, LEAST),
    "half": lambda seen: added(seen, torch.bfloat16, torch.finfo(torch.bfloat16).min),
    "infinite": lambda seen: added(seen, torch.float32, float("-inf")),
    "block": block_mask,
}
"""Of `(B, 1 or H, q, n)` bool, what is seen, a mask as `transformers` makes it."""


def visible(tokens):
    """`(B, 1, S, S)` bool: causal attention to the `tokens` `(B, S)` that are no padding."""
    n = tokens.shape[1]
    return causal(n, n, tokens.device) & tokens[:, None, None]


PADDED = {"flat": lambda tokens: tokens.long()}
PADDED |= {name: lambda t, make=make: make(visible(t)) for name, make in DENSE.items()}
of_every_form = pytest.mark.parametrize("form", PADDED.values(), ids=PADDED)


def tokens(*rows):
    return torch.tensor([[mark == "x" for mark in row] for row in rows])


# ---- of a prefill --------------------------------------------------------------------------------


@of_every_form
def test_padding_on_the_left_is_told_row_by_row(form):
    rows = tokens("..xxxx", "xxxxxx", ".....x")
    assert prefill_tokens(form(rows), LENGTH, 3).tolist() == rows.tolist()
    one_for_all = prefill_tokens(form(rows[:1]), LENGTH, 2)
    assert one_for_all.tolist() == rows[[0, 0]].tolist()
    assert prefill_tokens(form(rows[1:2]), LENGTH, 1) is None
    assert visible_tokens(form(rows), 4, 3).tolist() == rows[:, 2:].tolist()
    assert visible_tokens(form(rows[:2]), 4, 2) is None
    assert prefill_tokens(None, LENGTH, 2) is None


@of_every_form
@pytest.mark.parametrize("row", ["xxxx..", "..xx..", "x.xxxx", ".x.xxx", "......"])
def test_padding_elsewhere_is_refused_by_its_row(form, row):
    with pytest.raises(UnsupportedInputError, match=r"row 1 .*left-padded"):
        prefill_tokens(form(tokens("xxxxxx", row)), LENGTH, 2)


@pytest.mark.parametrize("form", DENSE)
def test_a_window_is_no_padding(form):
    seen = visible(tokens("xxxxxx")).triu(-2)
    with pytest.raises(UnsupportedInputError):
        prefill_tokens(DENSE[form](seen), LENGTH, 1)


@pytest.mark.parametrize("form", ["bool", "float"])
@pytest.mark.parametrize("query", [1, 3], ids=["padding", "token"])
def test_padding_that_anything_sees_is_refused(form, query):
    seen = visible(tokens("..xxxx"))
    seen[0, 0, query, 0] = True
    with pytest.raises(UnsupportedInputError, match="row 0"):
        prefill_tokens(DENSE[form](seen), LENGTH, 1)


@pytest.mark.parametrize("function", [prefill_tokens, visible_tokens])
@pytest.mark.parametrize("form", ["bool", "float"])
def test_a_mask_that_differs_from_head_to_head_is_refused(form, function):
    seen = visible(tokens("xxxxxx")).repeat(1, 3, 1, 1)
    assert function(DENSE[form](seen), LENGTH, 1) is None
    seen[0, 1, 5, 2] = False
    with pytest.raises(UnsupportedInputError, match=r"3 heads .*each head"):
        function(DENSE[form](seen), LENGTH, 1)


# ---- what is seen --------------------------------------------------------------------------------


def drawn(batch, heads):
    """Seen or not, by chance: a mask of one's own is carried over as it is."""
    generator = torch.Generator().manual_seed(batch + 10 * heads)
    return torch.rand(batch, heads, LENGTH, LENGTH + 3, generator=generator) < 0.6


def test_queries_see_no_later_token_under_a_flat_mask():
    found = columns_seen(tokens(".xx.xx", "xxxxxx").long(), 2, 4)
    assert found[0, 0].tolist() == tokens("x.x.", "x.xx").tolist()
    assert found[1, 0].tolist() == tokens("xxx.", "xxxx").tolist()


@pytest.mark.parametrize("form", ["sdpa", "eager", "flex_attention"])
@pytest.mark.parametrize(("batch", "kv_heads"), [(1, 1), (2, 1), (2, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_an_implementation_gets_what_is_seen(form, batch, kv_heads, dtype):
    seen = drawn(batch, kv_heads)
    mask = in_form(seen, form, dtype, HEADS)
    if form == "eager":  # a bool mask added to logits would hide nothing
        assert mask.dtype == dtype
        assert set(mask.unique().tolist()) == {0.0, torch.finfo(dtype).min}
    elif form == "sdpa":
        assert mask.dtype == torch.bool
    of_heads = seen if kv_heads == 1 else seen.repeat_interleave(HEADS // kv_heads, dim=1)
    for q, n in ((LENGTH, LENGTH + 3), (2, 5), (1, 1)):
        found = columns_seen(mask, q, n)
        assert torch.equal(found, of_heads[:, :, -q:, -n:])


@pytest.mark.parametrize("form", ["flash_attention_2", "flash_attention_3"])
def test_flash_attention_gets_what_the_last_query_sees(form):
    seen = drawn(2, 1)
    assert torch.equal(in_form(seen, form, torch.float16, HEADS), seen[:, 0, -1])
    with pytest.raises(UnsupportedInputError, match="one mask for all heads"):
        in_form(drawn(2, 2), form, torch.float16, HEADS)
