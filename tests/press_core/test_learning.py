"""What presses learn from examples is what there was to learn."""

from dataclasses import replace
from functools import partial

import pytest
import torch

import patch_impl
from press_core.learned.calibration import CalibrationError
from press_core.learned.fast_kvzip import Gate, fit_gates
from press_core.learned.kvzap import KVzap, fit_regressor
from press_core.learned.measured import ExpectedAttentionStats, filter_directions
from press_core.learned.running import Examples, rows_alone
from tests.press_core.drawn import BATCH, DIM, KV_HEADS, LAYERS, WIDTH, Prepared, drawn
from tests.press_core.test_learned_budgets import GATES, LENGTH, N_BASE, RANK, a_call

# ---- measured ------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_sink", [0, 4])
def test_statistics_of_the_context_itself_give_expected_attention(n_sink):
    call = a_call(batch=1)
    press = patch_impl.ExpectedAttentionPress(n_future_positions=9, n_sink=n_sink)
    measured = [x.expand(LAYERS, *x.shape[1:]) for x in press.statistics(call)]
    known = Prepared(ExpectedAttentionStats(*measured))
    learned = patch_impl.ExpectedAttentionStatsPress(n_future_positions=9, n_sink=n_sink)
    found = learned.score(call.replace(scope=known))
    torch.testing.assert_close(found, press.score(call))


@pytest.mark.parametrize("offset", [-2.0, 2.0])
def test_a_filter_is_the_first_right_singular_vector_turned_from_the_mean(offset):
    queries = drawn(KV_HEADS, 100, DIM) + offset
    second = queries.mT @ queries / 100
    directions = filter_directions(queries.mean(dim=1), second)
    for head in range(KV_HEADS):
        singular = torch.linalg.svd(queries[head]).Vh[0]
        assert abs(float(singular @ directions[head])) == pytest.approx(1)
        assert float(directions[head] @ queries[head].mean(dim=0)) < 0


# ---- trained -------------------------------------------------------------------------------------


def of_layer_1(scores):
    return [torch.zeros(0), scores, torch.zeros(0)]


def examples(target, n=400, max_tokens=10_000, dtype=torch.float32):
    """Hidden states of layer 1, with scores whose logarithm is `target` of them."""
    learned = Examples(max_tokens)
    for seed in range(2):
        call = a_call(n // 2 // BATCH, dtype=dtype)
        states = (2 + 3 * drawn(*call.hidden_states.shape, seed=seed)).to(dtype)
        scores = of_layer_1(target(states.double()).mT.exp())
        learned.add(scores, replace(call, hidden_states=states))
    return learned


WEIGHT = drawn(KV_HEADS, WIDTH, seed=7) / WIDTH


def a_line(states):
    return states @ WEIGHT.mT - 3


def a_bend(states):
    return (states @ WEIGHT.mT - 0.3).abs() - 3


def left_over(given, learned):
    """Share of the variance of the targets that the regressor leaves unexplained."""
    states = torch.cat(learned.states[1])[None]
    call = a_call(states.shape[1], batch=1, dtype=torch.float32, scope=Prepared(given))
    targets = torch.cat(learned.targets[1]).log().mT[None]
    scores = KVzap(0.5).score(call.replace(hidden_states=states))
    return float((scores - targets).var() / targets.var())


def test_regression_finds_a_line_and_a_hidden_layer_what_is_none():
    learned, bent = examples(a_line), examples(a_bend)
    line = fit_regressor(learned, "linear", None, 0, 0)
    assert line.model_type == "linear"
    assert line.sizes == {"layers": LAYERS, "kv_heads": KV_HEADS, "hidden_size": WIDTH}
    assert left_over(line, learned) < 1e-4
    torch.testing.assert_close(line.weight[1].double(), WEIGHT, atol=1e-3, rtol=1e-2)
    straight = left_over(fit_regressor(bent, "linear", None, 0, 0), bent)
    given = fit_regressor(bent, "mlp", 16, 1000, 0)
    assert given.model_type == "mlp"
    assert left_over(given, bent) < 0.25 * straight
    for regressor, width in ((given, 16), (fit_regressor(learned, "mlp", None, 1, 0), WIDTH // 8)):
        assert regressor.hidden_bias.shape == (LAYERS, width)


def gate_examples(target, n=600):
    """States whose scores a gate tells."""
    learned = Examples(10_000)
    call = a_call(n, batch=1, dtype=torch.float32)
    learned.add(of_layer_1(target(call.hidden_states.double())), call)
    return learned


def test_gates_learn_what_a_gate_says():
    target = Gate(*(x.float() for x in GATES.of_layer(0)))
    with pytest.raises(CalibrationError, match=r"scores from 2 to 2: .*\[0, 1\]"):
        fit_gates(gate_examples(lambda states: 2 * torch.ones_like(target(states))))
    learned = gate_examples(target)
    states = learned.states[1][0][None]
    before = fit_gates(learned, RANK, N_BASE, 0, 0).of_layer(1)(states)
    given = fit_gates(learned, RANK, N_BASE, 600, 0)
    after, wanted = given.of_layer(1)(states), target(states)
    assert given.sizes == GATES.sizes
    assert float((after - wanted).square().mean()) < 0.1 * float(wanted.var())
    assert float((before - wanted).square().mean()) > 0.5 * float(wanted.var())
    torch.testing.assert_close(before.mean(dim=-1), wanted.mean(dim=-1), atol=0.15, rtol=0)


def regressor(seed):
    return fit_regressor(examples(a_bend, dtype=torch.bfloat16), "mlp", 4, 20, seed)


def gates(seed):
    target = Gate(*(x.float() for x in GATES.of_layer(0)))
    return fit_gates(gate_examples(target, 80), 2, 2, 10, seed)


@pytest.mark.parametrize("learn", [regressor, gates])
def test_a_seed_decides_all_whatever_else_is_drawn(learn, request):
    one = learn(5)
    state = torch.manual_seed(2).get_state()
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        two = learn(5)
    assert torch.equal(torch.get_rng_state(), state)
    other = learn(6)
    for name, tensor in one.tensors.items():
        assert torch.equal(tensor, two.tensors[name])
        assert (tensor.dtype, tensor.requires_grad) == (torch.float32, False)
        assert not two.tensors[name].is_inference()
    assert any(not torch.equal(x, other.tensors[name]) for name, x in one.tensors.items())
    request.addfinalizer(partial(torch.set_default_dtype, torch.get_default_dtype()))
    torch.set_default_dtype(torch.float64)
    assert learn(5).sizes == one.sizes


# ---- examples ------------------------------------------------------------------------------------


def test_no_more_tokens_are_held_than_asked_for():
    learned = examples(a_line, n=400, max_tokens=250)
    assert learned.n_tokens == learned.max_tokens == 250
    assert len(torch.cat(learned.states[1])) == len(torch.cat(learned.targets[1])) == 250


def test_tokens_of_infinite_score_are_not_learned_from_those_of_zero_are():
    learned, call = Examples(1000), a_call(dtype=torch.float32)
    scores = torch.ones(BATCH, KV_HEADS, LENGTH)
    scores[1, 0, 5] = 0
    scores[0, 1, :3] = float("inf")  # such as those that a chat template begins with
    learned.add(of_layer_1(scores), call)
    assert learned.n_tokens == BATCH * LENGTH - 3
    assert torch.equal(learned.states[1][0], call.hidden_states.flatten(0, 1)[3:])
    assert int((learned.targets[1][0] != 1).sum()) == 1
    assert fit_regressor(learned, "linear", None, 0, 0).bias.isfinite().all()
    learned.add([scores / 0] * 3, replace(call, site=replace(call.site, layer_idx=0)))
    with pytest.raises(CalibrationError, match="no token"):
        fit_regressor(learned, "linear", None, 0, 0)


def test_scores_of_another_shape_are_refused():
    right = torch.zeros(BATCH, KV_HEADS, LENGTH)
    for scores in (of_layer_1(right[..., 1:]), [right] * 2, [[]] * 3, None):
        with pytest.raises(CalibrationError, match=r"3 layers.*layer 1 .*\(2, 2, 31\)"):
            Examples(1000).add(scores, a_call())


def test_batches_without_padding_are_run_whole():
    ids, mask = torch.arange(8).view(2, 4), torch.ones(2, 4, dtype=torch.int64)
    padded = mask.clone()
    padded[0, :3] = 0
    batches = [ids, {"input_ids": ids}, {"input_ids": ids, "attention_mask": mask}]
    whole = list(rows_alone(batches))
    assert len(whole) == 3
    assert all(torch.equal(batch, ids) for batch in whole)
    for no_batches in (ids, batches[-1], [[ids]], [{}]):
        with pytest.raises(CalibrationError, match=r"list of token ids \(B, S\)"):
            list(rows_alone(no_batches))
    alone = rows_alone([{"input_ids": ids, "attention_mask": padded}])
    assert [row.tolist() for row in alone] == [[[3]], [[4, 5, 6, 7]]]
