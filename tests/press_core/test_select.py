"""How many tokens are kept, and which."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from press_core.budget import Tokens, kept_of_chunks, n_kept, ratio_of
from press_core.select import best_first, protect, top_positions


@given(st.data())
def test_the_best_are_kept_in_temporal_order_of_equal_scores_the_first(data):
    length = data.draw(st.integers(1, 12))
    numbers = st.sampled_from([-math.inf, -1.0, 0.0, 1.0, math.inf])
    rows = data.draw(st.lists(st.lists(numbers, min_size=length, max_size=length), min_size=1))
    counts = [data.draw(st.integers(0, length)) for _ in rows]
    scores = torch.tensor(rows)[None]

    def slow(n, row):
        order = sorted(range(length), key=lambda token: -row[token])  # sorting is stable
        return [token in order[:n] for token in range(length)]

    wanted = [slow(counts[0], row) for row in rows]
    assert best_first(scores, counts[0])[0].tolist() == wanted
    positions = top_positions(scores, counts[0])
    assert positions.dtype == torch.int64
    assert positions[0].tolist() == [[t for t in range(length) if row[t]] for row in wanted]
    apart = best_first(scores.bfloat16(), torch.tensor(counts)[None, :, None])
    assert apart[0].tolist() == [slow(n, row) for n, row in zip(counts, rows, strict=True)]


def test_scores_that_are_no_numbers_take_no_place_away():
    scores = torch.tensor([[[1.0, math.nan, 3.0, 3.0], [3.0, 3.0, 3.0, 1.0]]])
    assert best_first(scores, 2).sum(dim=-1).tolist() == [[2, 2]]


@given(st.data())
def test_protected_tokens_stand_above_all_others_the_latest_highest(data):
    length = data.draw(st.integers(2, 24))
    magnitude = data.draw(st.sampled_from([1e-3, 1.0, 1e3, 1e6]))
    flags = st.lists(st.booleans(), min_size=length, max_size=length)
    protected = torch.tensor(data.draw(flags), dtype=torch.bool)
    seed = data.draw(st.integers(0, 1000))
    scores = magnitude * torch.randn(2, 3, length, generator=torch.Generator().manual_seed(seed))

    result = protect(scores, protected)

    assert torch.equal(result[..., ~protected], scores[..., ~protected])
    if protected.any():
        raised = result[..., protected]
        assert (raised.diff(dim=-1) > 0).all()
        if not protected.all():
            others = result[..., ~protected]
            assert (raised.amin(dim=-1) > others.amax(dim=-1)).all()


# ---- amounts -------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 7, 64, 100])
@pytest.mark.parametrize("step", [1, 16, 64, 1000])
def test_chunks_share_a_number_of_tokens(length, step):
    """Exactly, where there are no more chunks than tokens to keep; and none is left empty."""
    numbers = kept_of_chunks(length, step, Tokens(30))
    sizes = [min(step, length - start) for start in range(0, length, step)]
    assert all(1 <= n <= size for n, size in zip(numbers, sizes, strict=True))
    assert sum(numbers) == max(min(30, length), len(sizes))


def test_ratios_and_numbers_of_tokens():
    """What a ratio leaves is rounded down, and never nothing."""
    kept = {(10, 0.5): 5, (11, 0.5): 5, (100, 0.25): 75, (7, 0.0): 7, (3, 0.9): 1, (1, 0.5): 1}
    assert {of: n_kept(*of) for of in kept} == kept
    assert [Tokens(30).of(length) for length in (1, 30, 31, 500)] == [1, 30, 30, 30]
    assert [Tokens(10, 0.5).of(length) for length in (9, 40, 1000)] == [9, 20, 100]
    assert n_kept(500, Tokens(30)) == 30
    assert ratio_of(500, Tokens(30)) == pytest.approx(0.94)
    assert (repr(Tokens(30)), repr(Tokens(10, 0.5))) == ("Tokens(30)", "Tokens(10, 0.5)")


def test_what_is_best_is_found_while_a_graph_is_traced_for_export():
    class Picks(torch.nn.Module):
        def forward(self, scores):
            return top_positions(scores, 3), best_first(scores, 3)

    traced, other = torch.randperm(18).float().view(1, 2, 9), torch.arange(18.0).view(1, 2, 9)
    exported = torch.export.export(Picks(), (traced,)).module()
    for scores in (traced, other):
        for found, expected in zip(exported(scores), Picks()(scores), strict=True):
            assert torch.equal(found, expected)
