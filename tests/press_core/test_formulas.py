"""The formulas of single presses against slow references, and the properties of their papers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import AutoConfig, AutoModelForCausalLM

import patch_impl
from experiments.testbed.families import FAMILIES
from press_core import AttentionCall, AttentionSite, HyperparameterError, attention_sites
from press_core import presses as formulas
from press_core.attention import attention_tiles, mean_attention, window_attention
from press_core.budget import n_kept
from press_core.model.sites import Softmax
from press_core.observed import Query
from press_core.presses.expected_attention import ExpectedAttention, query_statistics
from press_core.presses.knorm import knorm_scores
from press_core.presses.lagkv import LagKV
from press_core.select import top_positions
from press_core.tiles import NUMBERS
from tests.press_core.drawn import (
    BATCH,
    DIM,
    GROUP,
    HEADS,
    KV,
    KV_HEADS,
    attention_row,
    called,
    drawn_call,
    rotated,
    site,
)

LENGTH = 23
PRESSES: dict[str, Any] = {
    "random": formulas.Random(0.5, seed=0),
    "knorm": formulas.Knorm(0.5),
    "streaming_llm": formulas.StreamingLLM(0.5, n_sink=4),
    "snapkv": formulas.SnapKV(0.5, window_size=6, kernel_size=5),
    "tova": formulas.TOVA(0.5),
    "observed_attention": formulas.ObservedAttention(0.5),
    "expected_attention": ExpectedAttention(0.5, n_future_positions=9),
    "keydiff": formulas.KeyDiff(0.5),
    "lagkv": LagKV(0.5, n_sink=3, lag_size=4),
    "leverage": formulas.LeverageScore(0.5, sketch_dimension=5),
    "leverage of a wide sketch": formulas.LeverageScore(0.5),
    "non-causal attention": formulas.NonCausalAttn(0.5, chunk_size=4),
    "compactor": formulas.Compactor(0.3, 3, 2, chunk_size=4, sketch_dimension=5),
    "cur": formulas.CUR(0.5),
    "cur of random channels": formulas.CUR(0.5, use_random_leverage=True),
    "cap": formulas.Cap(0.5, n_future_positions=9),
    "dropkv": formulas.DropKV(0.5, window_size=4),
    "rkv": formulas.RKV(0.5, window_size=4),
}


def _call(seed: int = 0, length: int = LENGTH, **fields: Any) -> AttentionCall:
    return drawn_call(length, seed, **fields)


def _kept(scores: Tensor, n: int) -> list[list[list[int]]]:
    kept: list[list[list[int]]] = top_positions(scores, n).tolist()
    return kept


def _weights(call: AttentionCall, row: int, head: int, position: int) -> Tensor:
    """Causal attention of one query of one head, over all `S` keys."""
    return pad(attention_row(call, row, head, position), (0, call.length - position - 1))


def _group_mean(call: AttentionCall, row: int, kv_head: int, position: int) -> Tensor:
    heads = range(kv_head * GROUP, (kv_head + 1) * GROUP)
    return torch.stack([_weights(call, row, head, position) for head in heads]).mean(dim=0)


def _assert_scores(
    scores: Tensor, expected: Callable[[int, int], Tensor], protected: set[int]
) -> None:
    """Scores of unprotected tokens are those `expected(row, kv_head)`; protected ones are above."""
    judged = [j for j in range(scores.shape[-1]) if j not in protected]
    for row, head in KV:
        wanted = expected(row, head)[judged].to(scores.dtype)
        torch.testing.assert_close(scores[row, head, judged], wanted, atol=1e-6, rtol=1e-5)
        if protected and judged:
            assert scores[row, head, sorted(protected)].min() > scores[row, head, judged].max()


# ---- attention weights ---------------------------------------------------------------------------


def _with_sinks() -> AttentionSite:
    module = nn.Module()
    module.sinks = nn.Parameter(torch.tensor([0.5, -1.0, 2.0, 0.0]), requires_grad=False)
    return replace(site(), module=module)


SITES: dict[str, Callable[[], AttentionSite]] = {
    "plain": site,
    "scaled": lambda: replace(site(), softmax=Softmax(0.11)),
    "softcapped": lambda: replace(site(), softmax=Softmax(scaling=0.9, softcap=0.7)),
    "with sinks": _with_sinks,
}


@pytest.mark.parametrize("kind", SITES)
@pytest.mark.parametrize("window", [1, 5, LENGTH])
def test_window_attention_is_an_explicit_softmax(kind: str, window: int) -> None:
    call = _call(site=SITES[kind]())
    weights = window_attention(call, window)
    assert weights.shape == (BATCH, KV_HEADS, GROUP, window, LENGTH)
    for row, head in KV:
        for member in range(GROUP):
            for query in {0, window // 2, window - 1}:
                position = LENGTH - window + query
                expected = _weights(call, row, head * GROUP + member, position)
                found = weights[row, head, member, query]
                torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("at_once", [1, 4, 100, 1000, 100_000])
@pytest.mark.parametrize("window", [1, 5, LENGTH])
def test_tiles_of_attention_are_parts_of_all_of_it(
    window: int, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(NUMBERS, "cpu", at_once)
    call = _call(site=_with_sinks())
    whole, seen = window_attention(call, window), torch.zeros(KV_HEADS, window)
    smallest = BATCH * GROUP * LENGTH
    for tile in attention_tiles(call.site, call.queries(window), call.keys):
        assert tile.weights.numel() <= max(at_once, smallest)
        end = LENGTH - window + tile.rows.stop
        assert tile.weights.shape[-1] == end
        part = whole[:, tile.heads, :, tile.rows]
        torch.testing.assert_close(tile.weights, part[..., :end])
        assert not part[..., end:].any()
        seen[tile.heads, tile.rows] += 1
    assert (seen == 1).all()


@pytest.mark.parametrize("window", [1, 5, LENGTH])
def test_mean_attention_is_the_mean_of_all_rows(window: int) -> None:
    call = _call(site=_with_sinks())
    weights, factors = window_attention(call, window), torch.arange(1.0, window + 1)
    found = mean_attention(call, call.queries(window))
    torch.testing.assert_close(found, weights.mean(dim=(2, 3)))
    weighed = mean_attention(call, call.queries(window), factors)
    torch.testing.assert_close(weighed, (weights * factors.view(-1, 1)).mean(dim=(2, 3)))


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_are_those_that_the_family_itself_computes(
    family: str, record: Callable[..., Any]
) -> None:
    recorded = record(family, 9)
    weights = window_attention(_of_family(recorded), 9).flatten(1, 2)
    torch.testing.assert_close(weights, recorded.weights, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    "option", [{"scale_attn_by_inverse_layer_idx": True}, {"scale_attn_weights": False}]
)
def test_weights_are_scaled_as_the_options_of_gpt2_say(option: dict[str, bool]) -> None:
    config = AutoConfig.for_model(
        "gpt2",
        vocab_size=32,
        n_embd=16,
        n_layer=3,
        n_head=2,
        bos_token_id=1,
        eos_token_id=2,
        **option,
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    of_gpt2 = attention_sites(model)[2]
    projected: list[Tensor] = []
    with (
        of_gpt2.query_module.register_forward_hook(lambda *call: projected.append(call[2])),
        torch.no_grad(),
    ):
        output = model(torch.arange(3, 12)[None], output_attentions=True)
    query, key, value = (x.view(1, 9, 2, 8).transpose(1, 2) for x in projected[0].chunk(3, dim=-1))
    states = torch.zeros(1, 9, 16)
    call = called(query, site=of_gpt2, hidden_states=states, keys=key, values=value)
    weights = window_attention(call, 9).flatten(1, 2)
    torch.testing.assert_close(weights, output.attentions[2], atol=1e-5, rtol=1e-4)


def _of_family(recorded: Any) -> AttentionCall:
    return called(
        site=recorded.site,
        hidden_states=recorded.hidden_states,
        keys=recorded.keys,
        values=recorded.values,
        position_embeddings=recorded.position_embeddings,
        query=recorded.query,
        query_is_rotated=True,
    )


# ---- what holds for every formula ----------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", PRESSES)
def test_scores_are_single_precision_and_finite(name: str, dtype: torch.dtype) -> None:
    for length in (12, LENGTH):
        for scale in (1e-6, 1.0, 30.0):
            scores = PRESSES[name].score(_call(length=length, dtype=dtype, scale=scale))
            assert scores.shape == (BATCH, KV_HEADS, length)
            assert scores.dtype == torch.float32
            assert scores.isfinite().all()


@pytest.mark.parametrize("fill", [0.0, 1.0, 300.0])
@pytest.mark.parametrize("name", PRESSES)
def test_states_that_are_all_alike_give_finite_scores(name: str, fill: float) -> None:
    call = _call(dtype=torch.float16)
    alike = {x: torch.full_like(getattr(call, x), fill) for x in ("keys", "values")}
    assert PRESSES[name].score(replace(call, **alike)).isfinite().all()


@pytest.mark.parametrize("name", PRESSES)
def test_a_row_of_a_batch_scores_as_it_does_alone(name: str) -> None:
    call = _call()
    scores = PRESSES[name].score(call)
    for row in range(BATCH):
        alone = PRESSES[name].score(call.of_rows([row], None))
        torch.testing.assert_close(alone[0], scores[row])


@pytest.mark.parametrize("name", PRESSES)
def test_scoring_changes_none_of_its_inputs(name: str) -> None:
    call, untouched = _call(dtype=torch.float32), _call(dtype=torch.float32)
    before = torch.get_rng_state()
    PRESSES[name].score(call)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(call.queries(), untouched.queries())
    assert torch.equal(call.keys, untouched.keys)
    assert torch.equal(call.values, untouched.values)


@pytest.mark.parametrize("name", PRESSES)
def test_the_query_may_be_given_before_or_after_rope(name: str) -> None:
    before = _call(dtype=torch.float32)
    after = replace(before, query=Query(before.queries(), is_rotated=True))
    torch.testing.assert_close(PRESSES[name].score(after), PRESSES[name].score(before))


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("SnapKV", {"kernel_size": -1}),
        ("LeverageScore", {"sketch_dimension": 0}),
        ("NonCausalAttn", {"chunk_size": 0}),
        ("Compactor", {"sink_size_start": -1}),
        ("Compactor", {"sink_size_end": -1}),
        ("Compactor", {"chunk_size": 0}),
        ("Compactor", {"sketch_dimension": 0}),
        ("Compactor", {"blending": -0.5}),
        ("Compactor", {"blending": math.nan}),
        ("CUR", {"num_sinks": -1}),
        ("CUR", {"local_window_size": 0}),
        ("CUR", {"leverage_type": "both"}),
        ("KVCompose", {"agg_task": "median"}),
        ("KVCompose", {"agg_group": "median"}),
        ("KVCompose", {"agg_head": "median"}),
        ("FastKVzip", {"n_sink": -1}),
        ("FastKVzip", {"window_size": -1}),
        ("FastKVzip", {"window_ratio": 1.1}),
        ("FastKVzip", {"gates": 3}),
        ("QFilter", {"filters": 3}),
        ("ExpectedAttentionStats", {"stats": 3}),
        ("ExpectedAttentionStats", {"stats": "somewhere", "stats_folder": "elsewhere"}),
        ("KVzap", {"regressor": 3}),
        ("KVzap", {"model_type": "cubic"}),
    ],
)
def test_a_field_out_of_range_is_named_with_its_value(name: str, fields: dict[str, Any]) -> None:
    (field, value), *_ = reversed(fields.items())
    with pytest.raises(HyperparameterError, match=rf"{name}Press\({field}={value!r}.*must be"):
        patch_impl.PRESSES[f"{name}Press"](**fields)


@pytest.mark.parametrize(
    ("method", "too_short"),
    [
        (formulas.SnapKV(window_size=5), 5),
        (formulas.StreamingLLM(n_sink=3), 3),
        (ExpectedAttention(n_sink=4), 4),
        (formulas.CUR(num_sinks=4), 4),
        (formulas.Compactor(sink_size_start=5, sink_size_end=2), 7),
        (formulas.Compactor(sink_size_start=0, sink_size_end=0), 0),
    ],
)
def test_a_context_no_longer_than_what_is_protected_is_left_whole(
    method: Any, too_short: int
) -> None:
    assert not method.is_long_enough(too_short)
    assert method.is_long_enough(too_short + 1)


# ---- random --------------------------------------------------------------------------------------


def _random(of: int | None, layer: int = 0, **fields: Any) -> Tensor:
    return formulas.Random(seed=of).score(_call(site=site(layer), **fields))


def test_random_depends_on_seed_layer_and_head_and_on_nothing_else() -> None:
    torch.manual_seed(3)
    scores = _random(7, layer=2)
    torch.manual_seed(4)
    assert torch.equal(_random(7, layer=2, seed=2, dtype=torch.bfloat16), scores)
    assert torch.equal(scores[0], scores[1])
    for changed in (scores.flip(1), _random(8, layer=2), _random(7, layer=1)):
        assert not torch.equal(changed, scores)


def test_random_without_a_seed_follows_the_global_generator() -> None:
    torch.manual_seed(3)
    one, two = _random(None), _random(None)
    torch.manual_seed(3)
    assert torch.equal(_random(None), one)
    assert not torch.equal(one, two)


def test_random_is_uniform() -> None:
    scores = _random(0, length=10_000)[0]
    counts = scores.flatten().histc(bins=10, min=0, max=1)
    assert counts.sum() == 20_000
    assert counts.min() > 1850  # 2000 expected in each, standard deviation 42
    assert counts.max() < 2150


# ---- knorm ---------------------------------------------------------------------------------------


def test_knorm_is_the_negative_length_of_the_key() -> None:
    call = _call()
    _assert_scores(
        knorm_scores(call.keys),
        lambda row, head: torch.stack([-(key @ key).sqrt() for key in call.keys[row, head]]),
        set(),
    )


# ---- streaming_llm -------------------------------------------------------------------------------


@given(st.integers(1, 80), st.floats(0, 0.999), st.integers(0, 12))
@settings(deadline=None)
def test_streaming_llm_keeps_exactly_the_sinks_and_the_most_recent(
    length: int, ratio: float, n_sink: int
) -> None:
    n = n_kept(length, ratio)
    scores = formulas.StreamingLLM(ratio, n_sink).score(_call(length=length, budget=n))
    if n_sink >= n:
        expected = list(range(n))  # the budget has room for sinks only
    else:
        expected = [*range(n_sink), *range(length - (n - n_sink), length)]
    assert _kept(scores, n) == [[expected] * KV_HEADS] * BATCH


# ---- snapkv --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", SITES)
@pytest.mark.parametrize(("window", "kernel"), [(1, 1), (6, 5), (7, 3), (LENGTH - 2, 5)])
def test_snapkv_is_the_pooled_mean_attention_of_the_window(
    kind: str, window: int, kernel: int
) -> None:
    call = _call(site=SITES[kind]())
    before, reach = LENGTH - window, kernel // 2

    def expected(row: int, head: int) -> Tensor:
        rows = [_group_mean(call, row, head, query) for query in range(before, LENGTH)]
        votes = torch.stack(rows).mean(dim=0)[:before]
        pooled = [votes[max(0, j - reach) : j + reach + 1].sum() / kernel for j in range(before)]
        return pad(torch.stack(pooled), (0, window))

    _assert_scores(
        formulas.SnapKV(0.5, window, kernel).score(call), expected, set(range(before, LENGTH))
    )


# ---- tova ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", SITES)
def test_tova_is_the_last_querys_attention_over_all_heads(kind: str) -> None:
    call = _call(site=SITES[kind]())

    def expected(row: int, _: int) -> Tensor:
        rows = [_weights(call, row, head, LENGTH - 1) for head in range(HEADS)]
        return torch.stack(rows).mean(dim=0)

    _assert_scores(PRESSES["tova"].score(call), expected, {LENGTH - 1})


# ---- observed_attention --------------------------------------------------------------------------


@pytest.mark.parametrize("kind", SITES)
def test_observed_attention_is_the_mean_over_the_queries_that_see_a_key(kind: str) -> None:
    call = _call(site=SITES[kind](), length=15)

    def expected(row: int, head: int) -> Tensor:
        rows = torch.stack([_group_mean(call, row, head, query) for query in range(15)])
        return torch.stack([rows[j:, j].mean() for j in range(15)])

    _assert_scores(PRESSES["observed_attention"].score(call), expected, set())


@pytest.mark.parametrize("family", FAMILIES)
def test_observed_attention_is_the_same_from_the_eager_weights(
    family: str, record: Callable[..., Any]
) -> None:
    recorded = record(family, 9)
    computed = _of_family(recorded)
    given_weights = replace(computed, attentions=recorded.weights, query=None)
    torch.testing.assert_close(
        PRESSES["observed_attention"].score(computed),
        PRESSES["observed_attention"].score(given_weights),
        atol=1e-5,
        rtol=1e-4,
    )


def test_observed_attention_is_the_same_over_several_blocks() -> None:
    call = _call(length=300)  # longer than two blocks
    weights = window_attention(call, 300).flatten(1, 2)
    torch.testing.assert_close(
        PRESSES["observed_attention"].score(call),
        PRESSES["observed_attention"].score(replace(call, attentions=weights)),
    )


# ---- expected_attention --------------------------------------------------------------------------


@pytest.mark.parametrize("n_sink", [0, 4])
def test_query_statistics_are_mean_and_covariance_before_rope_without_sinks(n_sink: int) -> None:
    call = _call()
    assert call.query is not None
    mean, covariance = query_statistics(call, n_sink)
    for row in range(BATCH):
        for head in range(HEADS):
            queries = call.query.states[row, head, n_sink:]
            expected = queries.mean(dim=0)
            scatter = [torch.outer(query - expected, query - expected) for query in queries]
            spread = torch.stack(scatter).mean(dim=0)
            torch.testing.assert_close(mean[row, head], expected, atol=1e-6, rtol=1e-5)
            torch.testing.assert_close(covariance[row, head], spread, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"n_sink": 0},
        {"n_future_positions": 1},
        {"use_covariance": False},
        {"use_vnorm": False},
        {"epsilon": 0.02},
        {"use_covariance": False, "use_vnorm": False, "n_sink": 7},
    ],
)
def test_expected_attention_is_that_of_the_rotated_statistics(fields: dict[str, Any]) -> None:
    call = _call()
    press = ExpectedAttention(**{"n_future_positions": 17, **fields})
    query = call.query
    assert query is not None
    future = range(LENGTH, LENGTH + press.n_future_positions)

    def mean_rotation(state: Tensor) -> Tensor:
        return torch.stack([rotated(state, position) for position in future]).mean(dim=0)

    def of_head(row: int, head: int) -> Tensor:
        queries = query.states[row, head, press.n_sink :]
        mean = queries.mean(dim=0)
        turned = [mean_rotation(state - mean) for state in queries]
        logits = []
        for key in call.keys[row, head // GROUP, press.n_sink :]:
            logit = key @ mean_rotation(mean) / math.sqrt(DIM)
            if press.use_covariance:  # k'Ck is the variance of <k, q> over the turned queries
                spread = torch.stack([(key @ deviation) ** 2 for deviation in turned]).mean()
                logit = logit + spread / (2 * DIM)
            logits.append(logit)
        return torch.stack(logits).softmax(dim=0)

    def expected(row: int, head: int) -> Tensor:
        of_group = [of_head(row, head * GROUP + member) for member in range(GROUP)]
        scores = torch.stack(of_group).mean(dim=0)
        if press.use_vnorm:
            scores = (scores + press.epsilon) * call.values[row, head, press.n_sink :].norm(dim=-1)
        return pad(scores, (press.n_sink, 0))

    _assert_scores(press.score(call), expected, set(range(press.n_sink)))


def test_expected_attention_looks_from_after_the_last_position() -> None:
    press = ExpectedAttention(n_future_positions=3)
    scores = press.score(_call())
    moved = _call(position_ids=1000 + torch.arange(LENGTH)[None])
    assert not torch.allclose(press.score(moved), scores)
    assert torch.equal(press.score(_call(position_ids=None)), scores)  # they count from 0 then


# ---- keydiff -------------------------------------------------------------------------------------


def test_keydiff_is_the_negative_cosine_to_the_mean_of_the_unit_keys() -> None:
    call = _call()

    def expected(row: int, head: int) -> Tensor:
        units = torch.stack([key / (key @ key).sqrt() for key in call.keys[row, head]])
        anchor = units.mean(dim=0)
        return -(units @ anchor) / (anchor @ anchor).sqrt()

    _assert_scores(PRESSES["keydiff"].score(call), expected, set())


# ---- lagkv ---------------------------------------------------------------------------------------

SINKS, LAG = 3, 4
BLOCKS = (LENGTH - SINKS) // LAG
"""Whole blocks, the last of which is protected as all that follows is."""
PROTECTED = {*range(SINKS), *range(SINKS + (BLOCKS - 1) * LAG, LENGTH)}


def _lagkv_reference(call: AttentionCall, row: int, head: int) -> Tensor:
    scores = torch.zeros(LENGTH, dtype=torch.float64)
    for block in range(BLOCKS - 1):
        judged = slice(SINKS + block * LAG, SINKS + (block + 1) * LAG)
        reference = slice(judged.stop, judged.stop + LAG)
        for states in (call.keys[row, head], call.values[row, head]):
            low, high = states[reference].amin(dim=0), states[reference].amax(dim=0)
            spreads = [((state - low) / (high - low)).std() for state in states[judged]]
            scores[judged] += torch.stack(spreads).softmax(dim=0) / 2
    return scores


def test_lagkv_is_the_variation_against_the_next_block() -> None:
    call = _call()
    scores = LagKV(0.5, SINKS, LAG, cross_scoring=True).score(call)
    _assert_scores(scores, lambda row, head: _lagkv_reference(call, row, head), PROTECTED)


def test_lagkv_ranks_within_each_block() -> None:
    call = _call()
    scores = LagKV(0.5, SINKS, LAG).score(call)
    for row, head in KV:
        expected = _lagkv_reference(call, row, head)
        ranks: list[list[float]] = []
        for block in range(BLOCKS - 1):
            tokens = range(SINKS + block * LAG, SINKS + (block + 1) * LAG)
            found = {token: float(scores[row, head, token]) for token in tokens}
            assert sorted(tokens, key=found.__getitem__) == sorted(tokens, key=expected.__getitem__)
            ranks.append(sorted(found.values()))
        assert all(block == ranks[0] for block in ranks)  # so that no block is favoured
        assert len(set(ranks[0])) == LAG
        assert scores[row, head, sorted(PROTECTED)].min() > max(ranks[0])


@pytest.mark.parametrize("length", [1, 2, 3, 5, SINKS + 2 * LAG - 1])
def test_lagkv_prefers_the_recent_in_a_short_context(length: int) -> None:
    call = _call(length=length)
    scores = LagKV(0.5, SINKS, LAG).score(call)
    for n in range(1, length + 1):
        sinks = list(range(min(SINKS, length)))
        recent = list(range(max(SINKS, length - max(0, n - SINKS)), length))
        expected = (sinks + recent)[-n:]
        assert _kept(scores, n) == [[expected] * KV_HEADS] * BATCH
