"""What holds for the formulas of all presses, and for some of them alone."""

from dataclasses import replace
from functools import partial
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import patch_impl
from press_core import AttentionCall, HyperparameterError, formulas
from press_core.attention import window_attention
from press_core.budget import n_kept
from press_core.observed import Positions, Query
from press_core.presses.keys import leverage_scores, non_causal_scores, sketch
from press_core.presses.queries import similarity, weighted_leverage
from press_core.select import top_positions
from tests.press_core.drawn import BATCH, DIM, FITS, GROUP, KV, KV_HEADS, Prepared, drawn_call, site
from tests.support import table_beside

LENGTH = 23
OUT_OF_RANGE = table_beside(__file__, "out_of_range")
PRESSES = {
    name: (eval(text, vars(formulas)), FITS.get(name))
    for name, text in table_beside(__file__, "formulas").items()
}
"""By name, a press of each formula, and what it has learned."""
of_every_formula = pytest.mark.parametrize("name", PRESSES)


def _call(seed=0, length=LENGTH, **fields):
    return drawn_call(length, seed, **fields)


def scores_of(name, call):
    press, known = PRESSES[name]
    return press.score(call.replace(scope=Prepared(known)))


def _kept(scores, n):
    return top_positions(scores, n).tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@of_every_formula
def test_scores_are_single_precision_and_finite(name, dtype, request):
    sizes = product((6, 7, 12, LENGTH), (1e-6, 1.0, 1e3))
    calls = [_call(length=length, dtype=dtype, scale=scale) for length, scale in sizes]
    request.addfinalizer(partial(torch.set_default_dtype, torch.get_default_dtype()))
    torch.set_default_dtype(dtype)
    for call in calls:
        if PRESSES[name][0].is_long_enough(call.length):
            scores = scores_of(name, call)
            assert scores.shape == (BATCH, KV_HEADS, call.length)
            assert scores.dtype == torch.float32
            assert scores.isfinite().all()


@pytest.mark.parametrize("fill", [0.0, 1.0, 300.0])
@of_every_formula
def test_states_that_are_all_alike_give_finite_scores(name, fill):
    call = _call(dtype=torch.float16)
    alike = {x: torch.full_like(getattr(call, x), fill) for x in ("keys", "values")}
    assert scores_of(name, replace(call, **alike)).isfinite().all()


@of_every_formula
def test_scoring_changes_none_of_its_inputs(name):
    call, untouched = _call(dtype=torch.float32), _call(dtype=torch.float32)
    before = torch.get_rng_state()
    scores_of(name, call)
    assert torch.equal(torch.get_rng_state(), before)
    for states in (AttentionCall.queries, lambda call: call.keys, lambda call: call.values):
        assert torch.equal(states(call), states(untouched))


@of_every_formula
def test_the_query_may_be_given_before_or_after_rope(name):
    before = _call(dtype=torch.float32)
    after = replace(before, query=Query(before.queries(), is_rotated=True))
    torch.testing.assert_close(scores_of(name, after), scores_of(name, before))


@pytest.mark.parametrize("name", ["knorm", "filters", "linear", "mlp"])
def test_scores_of_single_tokens_follow_the_keys_that_are_left(name):
    call, positions = _call(), torch.rand(BATCH, KV_HEADS, LENGTH).topk(6).indices.sort().values
    left = scores_of(name, call.select(positions))
    torch.testing.assert_close(left, scores_of(name, call).gather(-1, positions))


@pytest.mark.parametrize(("name", "fields"), OUT_OF_RANGE)
def test_a_field_out_of_range_is_named_with_its_value(name, fields):
    (field, value), *_ = reversed(fields.items())
    with pytest.raises(HyperparameterError, match=rf"{name}Press\({field}={value!r}"):
        patch_impl.PRESSES[f"{name}Press"](**fields)


@pytest.mark.parametrize(("text", "too_short"), table_beside(__file__, "too_short"))
def test_a_context_no_longer_than_what_is_protected_is_left_whole(text, too_short):
    method = eval(text, vars(formulas))
    assert not method.is_long_enough(too_short)
    assert method.is_long_enough(too_short + 1)


# ---- random --------------------------------------------------------------------------------------


def _random(of, layer=0, **fields):
    return formulas.Random(seed=of).score(_call(site=site(layer), **fields))


def test_random_depends_on_seed_layer_and_head_and_on_nothing_else():
    torch.manual_seed(3)
    scores = _random(7, layer=2)
    torch.manual_seed(4)
    assert torch.equal(_random(7, layer=2, seed=2, dtype=torch.bfloat16), scores)
    assert torch.equal(scores[0], scores[1])
    for changed in (scores.flip(1), _random(8, layer=2), _random(7, layer=1)):
        assert not torch.equal(changed, scores)


def test_random_without_a_seed_follows_the_global_generator():
    torch.manual_seed(3)
    one, two = _random(None), _random(None)
    torch.manual_seed(3)
    assert torch.equal(_random(None), one)
    assert not torch.equal(one, two)


def test_random_is_uniform():
    counts = _random(0, length=10_000)[0].flatten().histc(bins=10, min=0, max=1)
    assert counts.sum() == 20_000
    assert counts.min() > 1850  # 2000 expected in each, standard deviation 42
    assert counts.max() < 2150


def test_a_sketch_depends_on_the_layer_alone():
    torch.manual_seed(3)
    drawn = sketch((2, 3), 7, torch.zeros(1))
    torch.manual_seed(4)
    again = sketch((2, 3), 7, torch.ones(1, dtype=torch.bfloat16))
    assert torch.equal(again, drawn.to(torch.bfloat16))
    assert not torch.equal(sketch((2, 3), 8, drawn), drawn)


# ---- single presses ------------------------------------------------------------------------------


@given(st.integers(1, 80), st.floats(0, 0.999), st.integers(0, 12))
def test_streaming_llm_keeps_exactly_the_sinks_and_the_most_recent(length, ratio, n_sink):
    n = n_kept(length, ratio)
    scores = formulas.StreamingLLM(ratio, n_sink).score(_call(length=length, budget=n))
    n_sink = min(n_sink, n)
    expected = [*range(n_sink), *range(length - (n - n_sink), length)]
    assert _kept(scores, n) == [[expected] * KV_HEADS] * BATCH


def test_observed_attention_is_the_same_over_several_blocks():
    call, press = _call(length=300), formulas.ObservedAttention(0.5)  # longer than two blocks
    weights = window_attention(call, 300).flatten(1, 2)
    torch.testing.assert_close(press.score(call), press.score(replace(call, attentions=weights)))


def test_expected_attention_looks_from_after_the_last_position():
    press = formulas.ExpectedAttention(n_future_positions=3)
    scores = press.score(_call())
    moved = _call(position_ids=1000 + torch.arange(LENGTH)[None])
    assert not torch.allclose(press.score(moved), scores)
    assert torch.equal(press.score(_call(position_ids=None)), scores)  # they count from 0 then


def test_no_layer_is_lazy_at_a_threshold_of_one():
    """Not by rounding, either: the last query sees the first and recent tokens alone."""
    for length in range(8, 60):
        keys = torch.zeros(1, KV_HEADS, length, DIM)
        keys[:, :, [2, 3, -1]] = -1e4
        query = torch.ones(1, 4, length, DIM)
        call = _call(length=length, batch=1, keys=keys, query=query, query_is_rotated=True)
        assert formulas.SimLayerKV(n_initial=2, n_recent=length - 5).compress(call).is_whole


def test_lagkv_ranks_within_each_block():
    call, press = _call(), formulas.LagKV(0.5, 3, 4)
    scores, raw = press.score(call), replace(press, cross_scoring=True).score(call)
    blocks = [range(start, start + 4) for start in (3, 7, 11, 15)]  # and then the last, protected
    for row, head in KV:
        of_head, ranks = scores[row, head], []
        for tokens in blocks:
            found = of_head[list(tokens)]
            assert torch.equal(found.argsort(), raw[row, head, list(tokens)].argsort())
            ranks.append(sorted(found.tolist()))
        assert all(block == ranks[0] for block in ranks)  # so that no block is favoured
        assert len(set(ranks[0])) == 4
        assert of_head[[0, 1, 2, *range(19, LENGTH)]].min() > max(ranks[0])


@pytest.mark.parametrize("length", [1, 2, 3, 5, 10])
def test_lagkv_prefers_the_recent_in_a_short_context(length):
    scores = formulas.LagKV(0.5, 3, 4).score(_call(length=length))
    for n in range(1, length + 1):
        sinks = list(range(min(3, length)))
        recent = list(range(max(3, length - max(0, n - 3)), length))
        expected = (sinks + recent)[-n:]
        assert _kept(scores, n) == [[expected] * KV_HEADS] * BATCH


def test_rkv_compares_keys_in_blocks():
    blocks = (similarity(_call().keys, 0.3, 1, block) for block in (4, 256))
    torch.testing.assert_close(*blocks, rtol=1e-6, atol=1e-12)


# ---- leverage, where tokens are few, gone or old -------------------------------------------------

SKETCH, CHUNK = 5, 4
COMPACTOR = PRESSES["compactor"][0]


def _rotated(length=LENGTH, **fields):
    """A prefill whose queries are given as they are after RoPE, of the layer 1."""
    return _call(length=length, **{"site": site(1), "query_is_rotated": True, **fields})


def _non_causal(call, chunk_size):
    return formulas.NonCausalAttn(0.5, chunk_size).score(call)


def test_the_blending_is_the_share_that_is_evicted_where_the_budget_comes_from_outside():
    call = _rotated()
    given = COMPACTOR.score(replace(call, budget=4))
    asked = replace(COMPACTOR, blending=1 - 4 / LENGTH).score(call)
    torch.testing.assert_close(given, asked)


@pytest.mark.parametrize("name", ["leverage", "leverage of a wide sketch", "non-causal attention"])
def test_a_single_token_scores_zero(name):
    call = _rotated(1, batch=1, dtype=torch.float32)
    assert PRESSES[name][0].score(call).isfinite().all()
    of_one_head = call.replace(keys=call.keys[:, :1] * 0, values=call.values[:, :1])
    assert not PRESSES[name][0].score(of_one_head).any()


@pytest.mark.parametrize("same_heads", [True, False])
def test_a_call_that_another_press_has_pruned_is_scored_over_what_is_left(same_heads):
    """Keys and queries follow the tokens: the scores are those of a call with these states."""
    call, tokens = _rotated(), torch.randperm(LENGTH)[:9].sort().values
    other = tokens if same_heads else LENGTH - 1 - tokens.flip(0)
    positions = torch.stack((tokens, other)).expand(BATCH, -1, -1)
    left = call.select(positions)
    before_rope = call.keys_before_rope().gather(2, positions[..., None].expand(-1, -1, -1, DIM))
    expected = leverage_scores(before_rope, SKETCH, 1)
    torch.testing.assert_close(leverage_scores(left.keys_before_rope(), SKETCH, 1), expected)
    for_heads = positions.repeat_interleave(GROUP, dim=1)[..., None].expand(-1, -1, -1, DIM)
    queries = call.query.states.gather(2, for_heads)
    expected = non_causal_scores(queries, left.keys, left.values, CHUNK)
    torch.testing.assert_close(_non_causal(left, CHUNK), expected)
    assert COMPACTOR.score(left).isfinite().all()


@pytest.mark.parametrize("size", [1.0, 1e4, 1e7])
@pytest.mark.parametrize("length", [3, 60, 3000])
def test_leverage_stands_states_of_low_rank_however_large(length, size):
    for rank in (1, 2):
        generator = torch.Generator().manual_seed(rank)
        along = torch.randn(1, 2, length, rank, generator=generator)
        keys = size * (along @ torch.randn(1, 2, rank, 64, generator=generator) + 1000)
        for width in (2, 48):
            assert leverage_scores(keys, width, 0).isfinite().all()
        weights = torch.rand(1, 2, 1, length, generator=generator)
        assert weighted_leverage(keys, weights, 1e-6).isfinite().all()


def test_leverage_works_without_rope():
    call = _rotated(site=replace(site(1), rotary=None), position_embeddings=None)
    assert torch.equal(PRESSES["leverage"][0].score(call), leverage_scores(call.keys, SKETCH, 1))


@pytest.mark.parametrize("rows", [1, 3, 7])
def test_the_rows_held_at_a_time_do_not_change_the_scores(rows, monkeypatch):
    whole = _non_causal(_rotated(), 10)
    monkeypatch.setattr("press_core.presses.keys._ROWS", rows)
    torch.testing.assert_close(_non_causal(_rotated(), 10), whole)


def test_a_call_of_a_decoding_step_is_scored_over_all_keys():
    """Leverage as in a prefill; attention from the queries that are known."""
    call = _rotated()
    cos, sin = call.at.embeddings
    step = replace(
        call,
        hidden_states=call.hidden_states[:, -4:],
        query=Query(call.query.states[:, :, -4:]),
        at=Positions((cos[:, -4:], sin[:, -4:]), call.at.ids[:, -4:], rotary=call.at.ids[:, None]),
        budget=10,
    )
    torch.testing.assert_close(scores_of("leverage", step), scores_of("leverage", call))
    all_queries = call.query.states[:, :, -4:].repeat(1, 1, 6, 1)[:, :, -LENGTH:]
    repeated = replace(call, query=Query(all_queries), budget=10)
    for name in ("non-causal attention", "compactor"):
        torch.testing.assert_close(scores_of(name, step), scores_of(name, repeated))
