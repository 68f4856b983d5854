"""The nine formulas against slow references in plain Python, and the properties of their papers."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from experiments.testbed.families import FAMILIES
from press_core import AttentionCall, AttentionSite, HyperparameterError, attention_sites
from press_core.attention import attention_blocks, mean_attention, window_attention
from press_core.blocks import NUMBERS
from press_core.presses.expected_attention import (
    ExpectedAttention,
    expected_attention_scores,
    query_statistics,
)
from press_core.presses.keydiff import keydiff_scores
from press_core.presses.knorm import knorm_scores
from press_core.presses.lagkv import LagKV, lagkv_scores
from press_core.presses.observed_attention import observed_attention_scores
from press_core.presses.random import random_scores
from press_core.presses.snapkv import SnapKV, snapkv_scores
from press_core.presses.streaming_llm import StreamingLLM, streaming_llm_scores
from press_core.presses.tova import TOVA, tova_scores
from press_core.select import n_kept, top_positions
from tests.support import build

BATCH, HEADS, KV_HEADS, GROUP, LENGTH, DIM = 2, 4, 2, 2, 23, 8
KV = [(row, head) for row in range(BATCH) for head in range(KV_HEADS)]

SCORES: dict[str, Callable[[AttentionCall], Tensor]] = {
    "random": lambda call: random_scores(call.keys, 0, 1),
    "knorm": lambda call: knorm_scores(call.keys),
    "streaming_llm": lambda call: streaming_llm_scores(call.keys, 11, 4),
    "snapkv": lambda call: snapkv_scores(call, 6, 5),
    "tova": tova_scores,
    "observed_attention": observed_attention_scores,
    "expected_attention": lambda call: _expected(call, ExpectedAttention(n_future_positions=9)),
    "keydiff": lambda call: keydiff_scores(call.keys),
    "lagkv": lambda call: lagkv_scores(call.keys, call.values, LagKV(n_sink=3, lag_size=4)),
}
DETERMINISTIC = [name for name in SCORES if name != "random"]


# ---- calls made of small tensors -----------------------------------------------------------------


@lru_cache
def _site(sinks: bool = False, **fields: Any) -> AttentionSite:
    """The site of a Llama with heads as above, `fields` changed."""
    model = build("llama", num_layers=1, num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=DIM)
    site = replace(attention_sites(model)[0], **fields)
    if sinks:
        module = nn.Module()
        module.sinks = nn.Parameter(torch.tensor([0.5, -1.0, 2.0, 0.0]), requires_grad=False)
        site = replace(site, module=module)
    return site


def _call(
    seed: int = 0,
    length: int = LENGTH,
    dtype: torch.dtype = torch.float64,
    site: AttentionSite | None = None,
) -> AttentionCall:
    """A prefill whose states are drawn; the query is given as it is before RoPE."""
    site = site or _site()
    generator = torch.Generator().manual_seed(seed)

    def draw(heads: int) -> Tensor:
        return torch.randn(BATCH, heads, length, DIM, generator=generator, dtype=torch.float64)

    positions = torch.arange(length)[None]
    cos, sin = site.rotary.embeddings(torch.zeros(1, dtype=dtype), positions)  # type: ignore[union-attr]
    return AttentionCall(
        site=site,
        hidden_states=torch.zeros(BATCH, length, HEADS * DIM, dtype=dtype),
        keys=draw(KV_HEADS).to(dtype),
        values=draw(KV_HEADS).to(dtype),
        position_embeddings=(cos, sin),
        position_ids=positions,
        query=draw(HEADS).to(dtype),
    )


def _row(call: AttentionCall, row: int) -> AttentionCall:
    """The same prefill of one row of the batch alone."""
    query = call.query
    assert query is not None
    return replace(
        call,
        hidden_states=call.hidden_states[row : row + 1],
        keys=call.keys[row : row + 1],
        values=call.values[row : row + 1],
        query=query[row : row + 1],
    )


def _kept(scores: Tensor, n: int) -> list[list[list[int]]]:
    kept: list[list[list[int]]] = top_positions(scores, n).tolist()
    return kept


# ---- plain Python, one number at a time ----------------------------------------------------------

Vector = list[float]
Matrix = list[Vector]


def _dot(a: Vector, b: Vector) -> float:
    return math.fsum(x * y for x, y in zip(a, b, strict=True))


def _norm(a: Vector) -> float:
    return math.sqrt(_dot(a, a))


def _mean(rows: list[Vector]) -> Vector:
    return [math.fsum(column) / len(rows) for column in zip(*rows, strict=True)]


def _softmax(logits: Vector, beside: float | None = None) -> Vector:
    """Softmax over `logits`, a logit `beside` them taking its share."""
    top = max(logits)
    total = math.fsum(math.exp(x - top) for x in logits)
    total += 0.0 if beside is None else math.exp(beside - top)
    return [math.exp(x - top) / total for x in logits]


def _rotated(x: Vector, position: int, theta: float = 10000.0) -> Vector:
    """RoPE as RoFormer has it, channels paired by halves as in Llama."""
    half = len(x) // 2
    out = [0.0] * len(x)
    for i in range(half):
        angle = position * theta ** (-2 * i / len(x))
        out[i] = x[i] * math.cos(angle) - x[i + half] * math.sin(angle)
        out[i + half] = x[i] * math.sin(angle) + x[i + half] * math.cos(angle)
    return out


def _weights(call: AttentionCall, row: int, head: int, position: int) -> Vector:
    """Causal attention of one query of one head, over all `S` keys."""
    assert call.query is not None
    site = call.site
    query = _rotated(call.query[row, head, position].tolist(), position)
    keys: Matrix = call.keys[row, head // GROUP].tolist()
    logits = [site.scaling * _dot(query, key) for key in keys[: position + 1]]
    if site.softcap is not None:
        logits = [site.softcap * math.tanh(x / site.softcap) for x in logits]
    sink = None if site.sinks is None else float(site.sinks[head])
    return _softmax(logits, sink) + [0.0] * (len(keys) - position - 1)


def _group_mean(call: AttentionCall, row: int, kv_head: int, position: int) -> Vector:
    heads = range(kv_head * GROUP, (kv_head + 1) * GROUP)
    return _mean([_weights(call, row, head, position) for head in heads])


def _assert_scores(
    scores: Tensor, expected: Callable[[int, int], Vector], protected: set[int]
) -> None:
    """Scores of unprotected tokens are those `expected(row, kv_head)`; protected ones are above."""
    length = scores.shape[-1]
    judged = [j for j in range(length) if j not in protected]
    for row, head in KV:
        wanted = expected(row, head)
        assert len(wanted) == length
        torch.testing.assert_close(
            scores[row, head, judged],
            torch.tensor([wanted[j] for j in judged], dtype=scores.dtype),
            atol=1e-6,
            rtol=1e-5,
        )
        if protected and judged:
            assert scores[row, head, sorted(protected)].min() > scores[row, head, judged].max()


# ---- attention weights ---------------------------------------------------------------------------

CAPPED = {"softcap": 0.7, "scaling": 0.9}
SITES: dict[str, Callable[[], AttentionSite]] = {
    "plain": _site,
    "scaled": lambda: _site(scaling=0.11),
    "softcapped": lambda: _site(**CAPPED),
    "with sinks": lambda: _site(sinks=True),
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
                torch.testing.assert_close(
                    weights[row, head, member, query],
                    torch.tensor(expected).double(),
                    atol=1e-6,
                    rtol=1e-5,
                )


@pytest.mark.parametrize("at_once", [1, 4, 100, 1000, 100_000])
@pytest.mark.parametrize("window", [1, 5, LENGTH])
def test_blocks_of_attention_are_parts_of_all_of_it(
    window: int, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(NUMBERS, "cpu", at_once)
    call = _call(site=_site(sinks=True))
    whole, seen = window_attention(call, window), torch.zeros(KV_HEADS, window)
    smallest = BATCH * GROUP * LENGTH
    for block in attention_blocks(call.site, call.queries(window), call.keys):
        assert block.weights.numel() <= max(at_once, smallest)
        end = LENGTH - window + block.rows.stop
        assert block.weights.shape[-1] == end
        part = whole[:, block.heads, :, block.rows]
        torch.testing.assert_close(block.weights, part[..., :end])
        assert not part[..., end:].any()
        seen[block.heads, block.rows] += 1
    assert (seen == 1).all()


@pytest.mark.parametrize("window", [1, 5, LENGTH])
def test_mean_attention_is_the_mean_of_all_rows(window: int) -> None:
    call = _call(site=_site(sinks=True))
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
    call = _of_family(recorded)
    weights = window_attention(call, 9).flatten(1, 2)
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
    site = attention_sites(model)[2]
    projected: list[Tensor] = []
    with (
        site.query_source.module.register_forward_hook(lambda *call: projected.append(call[2])),
        torch.no_grad(),
    ):
        output = model(torch.arange(3, 12)[None], output_attentions=True)
    query, key, value = (x.view(1, 9, 2, 8).transpose(1, 2) for x in projected[0].chunk(3, dim=-1))
    call = AttentionCall(site, torch.zeros(1, 9, 16), key, value, query=query)
    weights = window_attention(call, 9).flatten(1, 2)
    torch.testing.assert_close(weights, output.attentions[2], atol=1e-5, rtol=1e-4)


def _of_family(recorded: Any) -> AttentionCall:
    return AttentionCall(
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
@pytest.mark.parametrize("name", SCORES)
def test_scores_are_single_precision_and_finite(name: str, dtype: torch.dtype) -> None:
    scores = SCORES[name](_call(dtype=dtype))
    assert scores.shape == (BATCH, KV_HEADS, LENGTH)
    assert scores.dtype == torch.float32
    assert scores.isfinite().all()


@pytest.mark.parametrize("name", SCORES)
def test_states_that_are_all_alike_give_finite_scores(name: str) -> None:
    call = _call(dtype=torch.float32)
    for fill in (0.0, 1.0):
        alike = replace(
            call, keys=torch.full_like(call.keys, fill), values=torch.full_like(call.values, fill)
        )
        assert SCORES[name](alike).isfinite().all()


@pytest.mark.parametrize("name", SCORES)
def test_a_row_of_a_batch_scores_as_it_does_alone(name: str) -> None:
    call = _call()
    scores = SCORES[name](call)
    for row in range(BATCH):
        torch.testing.assert_close(SCORES[name](_row(call, row))[0], scores[row])


@pytest.mark.parametrize("name", SCORES)
def test_scoring_changes_none_of_its_inputs(name: str) -> None:
    call, untouched = _call(dtype=torch.float32), _call(dtype=torch.float32)
    SCORES[name](call)
    assert call.query is not None
    assert untouched.query is not None
    assert torch.equal(call.query, untouched.query)
    assert torch.equal(call.keys, untouched.keys)
    assert torch.equal(call.values, untouched.values)


@pytest.mark.parametrize("name", DETERMINISTIC)
def test_the_query_may_be_given_before_or_after_rope(name: str) -> None:
    before = _call(dtype=torch.float32)
    after = replace(before, query=before.queries(), query_is_rotated=True)
    torch.testing.assert_close(SCORES[name](after), SCORES[name](before))


@pytest.mark.parametrize(
    ("method", "field", "value"),
    [
        (TOVA, "compression_ratio", 1.0),
        (TOVA, "compression_ratio", -0.1),
        (TOVA, "compression_ratio", math.nan),
        (SnapKV, "window_size", 0),
        (SnapKV, "kernel_size", 4),
        (SnapKV, "kernel_size", -1),
        (StreamingLLM, "n_sink", -1),
        (ExpectedAttention, "n_sink", -1),
        (ExpectedAttention, "n_future_positions", 0),
        (ExpectedAttention, "epsilon", -1e-3),
        (LagKV, "n_sink", -1),
        (LagKV, "lag_size", 0),
    ],
)
def test_a_field_out_of_range_is_named_with_its_value(
    method: Any, field: str, value: float
) -> None:
    with pytest.raises(HyperparameterError, match=f"{field}={value}.*must be"):
        method(**{field: value})


@pytest.mark.parametrize(
    ("method", "too_short"),
    [
        (SnapKV(window_size=5), 5),
        (StreamingLLM(n_sink=3), 3),
        (ExpectedAttention(n_sink=4), 4),
    ],
)
def test_a_context_no_longer_than_what_is_protected_is_left_whole(
    method: Any, too_short: int
) -> None:
    assert not method.is_long_enough(too_short)
    assert method.is_long_enough(too_short + 1)


# ---- random --------------------------------------------------------------------------------------


def test_random_depends_on_seed_and_layer_and_on_nothing_else() -> None:
    first, other = _call(seed=1).keys, _call(seed=2, dtype=torch.bfloat16).keys
    torch.manual_seed(3)
    scores = random_scores(first, 7, 2)
    torch.manual_seed(4)
    assert torch.equal(random_scores(other, 7, 2), scores)
    assert not torch.equal(random_scores(first, 8, 2), scores)
    assert not torch.equal(random_scores(first, 7, 3), scores)


def test_random_is_the_same_for_each_row_and_not_for_each_head() -> None:
    scores = random_scores(_call().keys, 7, 2)
    assert torch.equal(scores[0], scores[1])
    assert not torch.equal(scores[:, 0], scores[:, 1])


def test_random_without_a_seed_follows_the_global_generator() -> None:
    keys = _call().keys
    torch.manual_seed(3)
    one, two = random_scores(keys, None, 0), random_scores(keys, None, 0)
    torch.manual_seed(3)
    assert torch.equal(random_scores(keys, None, 0), one)
    assert not torch.equal(one, two)


def test_random_with_a_seed_leaves_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    random_scores(_call().keys, 7, 2)
    assert torch.equal(torch.get_rng_state(), before)


def test_random_is_uniform() -> None:
    scores = random_scores(torch.zeros(1, 4, 5000, 1), 0, 0)
    counts = scores.flatten().histc(bins=10, min=0, max=1)
    assert counts.sum() == 20_000
    assert counts.min() > 1850  # 2000 expected in each, standard deviation 42
    assert counts.max() < 2150


# ---- knorm ---------------------------------------------------------------------------------------


def test_knorm_is_the_negative_length_of_the_key() -> None:
    call = _call()
    _assert_scores(
        knorm_scores(call.keys),
        lambda row, head: [-_norm(key) for key in call.keys[row, head].tolist()],
        set(),
    )


def test_knorm_follows_the_keys_wherever_they_stand() -> None:
    keys, order = _call().keys, torch.randperm(LENGTH)
    assert torch.equal(knorm_scores(keys[:, :, order]), knorm_scores(keys)[:, :, order])


def test_knorm_keeps_the_shortest_keys() -> None:
    keys = torch.ones(1, 1, 5, 2) * torch.tensor([3.0, 1.0, 5.0, 2.0, 4.0])[:, None]
    assert _kept(knorm_scores(keys), 2) == [[[1, 3]]]


# ---- streaming_llm -------------------------------------------------------------------------------


@given(st.integers(1, 80), st.floats(0, 0.999), st.integers(0, 12))
@settings(deadline=None)
def test_streaming_llm_keeps_exactly_the_sinks_and_the_most_recent(
    length: int, ratio: float, n_sink: int
) -> None:
    n = n_kept(length, ratio)
    scores = streaming_llm_scores(torch.zeros(1, 2, length, 1), n, n_sink)
    if n_sink >= n:
        expected = list(range(n))  # the budget has room for sinks only
    else:
        expected = [*range(n_sink), *range(length - (n - n_sink), length)]
    assert _kept(scores, n) == [[expected, expected]]


# ---- snapkv --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", SITES)
@pytest.mark.parametrize(("window", "kernel"), [(1, 1), (6, 5), (7, 3), (LENGTH - 2, 5)])
def test_snapkv_is_the_pooled_mean_attention_of_the_window(
    kind: str, window: int, kernel: int
) -> None:
    call = _call(site=SITES[kind]())
    before = LENGTH - window

    def expected(row: int, head: int) -> Vector:
        queries = range(before, LENGTH)
        votes = _mean([_group_mean(call, row, head, query) for query in queries])[:before]
        reach = kernel // 2
        pooled = [
            math.fsum(votes[max(0, j - reach) : j + reach + 1]) / kernel for j in range(before)
        ]
        return pooled + [0.0] * window

    _assert_scores(snapkv_scores(call, window, kernel), expected, set(range(before, LENGTH)))


@given(st.integers(1, 12), st.floats(0.05, 0.95), st.integers(0, 100))
@settings(deadline=None)
def test_snapkv_keeps_its_window_or_as_much_of_it_as_the_budget_allows(
    window: int, ratio: float, seed: int
) -> None:
    n = n_kept(LENGTH, ratio)
    scores = snapkv_scores(_call(seed, dtype=torch.float32), window, 3)
    recent = set(range(LENGTH - min(n, window), LENGTH))
    for row in _kept(scores, n):
        for kept in row:
            assert recent <= set(kept)


# ---- tova ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", SITES)
def test_tova_is_the_last_querys_attention_over_all_heads(kind: str) -> None:
    call = _call(site=SITES[kind]())

    def expected(row: int, _: int) -> Vector:
        return _mean([_weights(call, row, head, LENGTH - 1) for head in range(HEADS)])

    _assert_scores(tova_scores(call), expected, {LENGTH - 1})


def test_tova_scores_all_kv_heads_alike() -> None:
    scores = tova_scores(_call())
    assert torch.equal(scores[:, 0], scores[:, 1])
    assert not torch.equal(scores[0], scores[1])


def test_tova_keeps_the_last_token_under_any_budget() -> None:
    call = _call()
    for n in range(1, LENGTH):
        assert all(LENGTH - 1 in kept for row in _kept(tova_scores(call), n) for kept in row)


# ---- observed_attention --------------------------------------------------------------------------


@pytest.mark.parametrize("kind", SITES)
def test_observed_attention_is_the_mean_over_the_queries_that_see_a_key(kind: str) -> None:
    call = _call(site=SITES[kind](), length=15)

    def expected(row: int, head: int) -> Vector:
        rows = [_group_mean(call, row, head, query) for query in range(15)]
        return [statistics.fmean(rows[i][j] for i in range(j, 15)) for j in range(15)]

    _assert_scores(observed_attention_scores(call), expected, set())


@pytest.mark.parametrize("family", FAMILIES)
def test_observed_attention_is_the_same_from_the_eager_weights(
    family: str, record: Callable[..., Any]
) -> None:
    recorded = record(family, 9)
    computed = _of_family(recorded)
    given_weights = replace(computed, attentions=recorded.weights, query=None)
    torch.testing.assert_close(
        observed_attention_scores(computed),
        observed_attention_scores(given_weights),
        atol=1e-5,
        rtol=1e-4,
    )


def test_observed_attention_is_the_same_over_several_blocks() -> None:
    call = _call(length=300)  # longer than two blocks
    weights = window_attention(call, 300).flatten(1, 2)
    torch.testing.assert_close(
        observed_attention_scores(call),
        observed_attention_scores(replace(call, attentions=weights)),
    )


def test_observed_attention_of_indifferent_queries_falls_with_position() -> None:
    call = _call()
    call = replace(call, query=torch.zeros_like(call.query))  # type: ignore[arg-type]
    for row, head in KV:
        for j in range(LENGTH):  # the query at i gives each of its i + 1 keys the same
            expected = statistics.fmean(1 / (i + 1) for i in range(j, LENGTH))
            score = float(observed_attention_scores(call)[row, head, j])
            assert score == pytest.approx(expected)


# ---- expected_attention --------------------------------------------------------------------------


def _expected(call: AttentionCall, press: ExpectedAttention) -> Tensor:
    return expected_attention_scores(call, *query_statistics(call, press.n_sink), press)


@pytest.mark.parametrize("n_sink", [0, 4])
def test_query_statistics_are_mean_and_covariance_before_rope_without_sinks(n_sink: int) -> None:
    call = _call()
    assert call.query is not None
    mean, covariance = query_statistics(call, n_sink)
    for row in range(BATCH):
        for head in range(HEADS):
            queries: Matrix = call.query[row, head, n_sink:].tolist()
            expected = _mean(queries)
            torch.testing.assert_close(
                mean[row, head], torch.tensor(expected).double(), atol=1e-6, rtol=1e-5
            )
            for a in range(DIM):
                for b in range(DIM):
                    product = [(q[a] - expected[a]) * (q[b] - expected[b]) for q in queries]
                    assert float(covariance[row, head, a, b]) == pytest.approx(
                        math.fsum(product) / len(queries), abs=1e-6
                    )


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
    units = torch.eye(DIM).tolist()
    columns = [_mean([_rotated(unit, position) for position in future]) for unit in units]
    average = [list(line) for line in zip(*columns, strict=True)]  # the mean rotation matrix

    def of_head(row: int, head: int) -> Vector:
        queries: Matrix = query[row, head, press.n_sink :].tolist()
        # The mean over all queries of all future positions, each query rotated to each of them.
        mean = _mean([_mean([_rotated(q, position) for position in future]) for q in queries])
        centre = _mean(queries)
        deviations = [[x - c for x, c in zip(q, centre, strict=True)] for q in queries]
        turned = [[_dot(line, deviation) for line in average] for deviation in deviations]
        logits = []
        for key in call.keys[row, head // GROUP, press.n_sink :].tolist():
            logit = _dot(key, mean) / math.sqrt(DIM)
            if press.use_covariance:  # k'Ck is the variance of <k, q> over the turned queries
                spread = statistics.fmean(_dot(key, deviation) ** 2 for deviation in turned)
                logit += spread / (2 * DIM)
            logits.append(logit)
        return _softmax(logits)

    def expected(row: int, head: int) -> Vector:
        scores = _mean([of_head(row, head * GROUP + member) for member in range(GROUP)])
        if press.use_vnorm:
            values: Matrix = call.values[row, head, press.n_sink :].tolist()
            scores = [
                (score + press.epsilon) * _norm(value)
                for score, value in zip(scores, values, strict=True)
            ]
        return [0.0] * press.n_sink + scores

    _assert_scores(_expected(call, press), expected, set(range(press.n_sink)))


def test_expected_attention_looks_from_after_the_last_position() -> None:
    call = _call()
    moved = replace(call, position_ids=1000 + torch.arange(LENGTH)[None])
    press = ExpectedAttention(n_future_positions=3)
    assert not torch.allclose(_expected(moved, press), _expected(call, press))
    unnamed = replace(call, position_ids=None)  # then positions count from 0
    assert torch.equal(_expected(unnamed, press), _expected(call, press))


def test_expected_attention_keeps_its_sinks() -> None:
    scores = _expected(_call(), ExpectedAttention(n_sink=4))
    for n in range(4, LENGTH):
        assert all({0, 1, 2, 3} <= set(kept) for row in _kept(scores, n) for kept in row)


# ---- keydiff -------------------------------------------------------------------------------------


def test_keydiff_is_the_negative_cosine_to_the_mean_of_the_unit_keys() -> None:
    call = _call()

    def expected(row: int, head: int) -> Vector:
        keys: Matrix = call.keys[row, head].tolist()
        anchor = _mean([[x / _norm(key) for x in key] for key in keys])
        return [-_dot(key, anchor) / (_norm(key) * _norm(anchor)) for key in keys]

    _assert_scores(keydiff_scores(call.keys), expected, set())


def test_keydiff_does_not_see_the_length_of_keys() -> None:
    keys = _call().keys
    lengths = torch.rand(BATCH, KV_HEADS, LENGTH, 1).double() * 10 + 0.1
    torch.testing.assert_close(keydiff_scores(keys * lengths), keydiff_scores(keys))


def test_keydiff_keeps_the_odd_one_out() -> None:
    keys = torch.ones(1, 1, 9, 4)
    keys[0, 0, 5] = torch.tensor([1.0, -1.0, 1.0, -1.0])
    assert _kept(keydiff_scores(keys), 1) == [[[5]]]


# ---- lagkv ---------------------------------------------------------------------------------------

SINKS, LAG = 3, 4
BLOCKS = (LENGTH - SINKS) // LAG
"""Whole blocks, the last of which is protected as all that follows is."""
PROTECTED = {*range(SINKS), *range(SINKS + (BLOCKS - 1) * LAG, LENGTH)}


def _lagkv_reference(call: AttentionCall, row: int, head: int) -> Vector:
    scores = [0.0] * LENGTH
    for block in range(BLOCKS - 1):
        judged = range(SINKS + block * LAG, SINKS + (block + 1) * LAG)
        reference = range(judged.stop, judged.stop + LAG)
        for states in (call.keys, call.values):
            rows: Matrix = states[row, head].tolist()
            low = [min(rows[t][c] for t in reference) for c in range(DIM)]
            high = [max(rows[t][c] for t in reference) for c in range(DIM)]
            spreads = [
                statistics.stdev((rows[t][c] - low[c]) / (high[c] - low[c]) for c in range(DIM))
                for t in judged
            ]
            for t, share in zip(judged, _softmax(spreads), strict=True):
                scores[t] += share / 2
    return scores


def test_lagkv_is_the_variation_against_the_next_block() -> None:
    call = _call()
    scores = lagkv_scores(call.keys, call.values, LagKV(0.5, SINKS, LAG, cross_scoring=True))
    _assert_scores(scores, lambda row, head: _lagkv_reference(call, row, head), PROTECTED)


def test_lagkv_ranks_within_each_block() -> None:
    call = _call()
    scores = lagkv_scores(call.keys, call.values, LagKV(0.5, SINKS, LAG))
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


def test_lagkv_keeps_as_many_of_each_block() -> None:
    call = _call()
    scores = lagkv_scores(call.keys, call.values, LagKV(0.5, SINKS, LAG))
    n = len(PROTECTED) + 2 * (BLOCKS - 1)
    for row in _kept(scores, n):
        for kept in row:
            assert set(kept) >= PROTECTED
            for block in range(BLOCKS - 1):
                tokens = range(SINKS + block * LAG, SINKS + (block + 1) * LAG)
                assert len(set(kept) & set(tokens)) == 2


@pytest.mark.parametrize("cross_scoring", [False, True])
def test_lagkv_survives_channels_that_are_constant_over_a_block(cross_scoring: bool) -> None:
    call = _call()
    keys = call.keys.clone()
    keys[..., :3] = 0.5
    press = LagKV(0.5, SINKS, LAG, cross_scoring)
    assert lagkv_scores(keys, call.values, press).isfinite().all()


@pytest.mark.parametrize("length", [1, 2, 3, 5, SINKS + 2 * LAG - 1])
def test_lagkv_prefers_the_recent_in_a_short_context(length: int) -> None:
    call = _call(length=length)
    scores = lagkv_scores(call.keys, call.values, LagKV(0.5, SINKS, LAG))
    for n in range(1, length + 1):
        sinks = list(range(min(SINKS, length)))
        recent = list(range(max(SINKS, length - max(0, n - SINKS)), length))
        expected = (sinks + recent)[-n:]
        assert _kept(scores, n) == [[expected] * KV_HEADS] * BATCH


def test_lagkv_begins_where_two_blocks_fit() -> None:
    call = _call(length=SINKS + 2 * LAG)
    scores = lagkv_scores(call.keys, call.values, LagKV(0.5, SINKS, LAG))
    judged = scores[..., SINKS : SINKS + LAG]
    assert (judged.diff(dim=-1) < 0).any()  # no longer by recency alone
    assert (judged.amax(dim=-1) < scores[..., SINKS + LAG :].amin(dim=-1)).all()
