"""Budgets of FastKVzipPress and LUKVPress over heads and layers, and what the models ship with."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache

import hooks_impl
from experiments import UserError
from experiments.loading import load_model
from experiments.testbed.asking import answer_unseen
from experiments.testbed.facts import draw
from experiments.testbed.training import fitted as training
from experiments.testbed.training.fitted import (
    ASKED,
    HELD_OUT_SEED,
    RECENT,
    SINKS,
    correlations,
    fact_batches,
    scores_of_kvzip,
    train,
)
from press_core import HyperparameterError, UnsupportedInputError, kept_lengths, prefill
from press_core.budget import Tokens
from press_core.learned.calibration import CalibrationError
from press_core.learned.duo_attention import HeadScores, streaming_heads
from press_core.learned.lukv import BudgetCurves
from press_core.learned.query_statistics import qfilter_scores
from tests.support import both, build, filled, forwards, held, left_padded, snapshot, token_ids
from tests.test_learned_presses import LENGTH, close, learn, made_up, make, norms, same

# ---- budgets -------------------------------------------------------------------------------------


@pytest.mark.parametrize("ratio", [0.1, 0.37, 0.5, 0.9])
def test_gates_spend_one_budget_over_all_layers(package, ratio):
    model, ids = build("llama", num_layers=3, num_heads=4, num_kv_heads=2), token_ids(1, 41)
    press = make("FastKVzipPress", package, model, compression_ratio=ratio)
    counts = [int(n.sum()) for n in kept_lengths(filled(model, press, ids))]
    size = 3 * 2 * 41
    assert sum(counts) == max(6, size - int(size * ratio))
    assert press.evicted_ratio == pytest.approx(1 - sum(counts) / size)
    by_layer = make("FastKVzipPress", package, model, compression_ratio=ratio, layerwise=True)
    lengths = kept_lengths(filled(model, by_layer, ids))
    assert [int(n.sum()) for n in lengths] == [max(2, 82 - int(82 * ratio))] * 3
    assert len(set(counts)) > 1 or ratio == 0.1


def test_gates_protect_sinks_and_window_in_every_head(package):
    model = build("llama")
    press = make("FastKVzipPress", package, model, compression_ratio=0.7, n_sink=3)
    heads = [h for layer in held(filled(model, press, token_ids(2, 40))) for r in layer for h in r]
    assert all(head[:3] == [0, 1, 2] and head[-4:] == [36, 37, 38, 39] for head in heads)
    assert len(set(map(len, heads))) > 1


@pytest.mark.parametrize("tokens", [1, 9, 20])
@pytest.mark.parametrize("name", ["FastKVzipPress", "LUKVPress"])
def test_a_number_of_tokens_is_met_over_all_layers(package, name, tokens):
    model = build("llama", num_layers=3)
    press = make(name, package, model).with_budget(tokens)
    kept = torch.stack(kept_lengths(filled(model, press, token_ids(2, LENGTH))))
    assert float(kept.float().mean()) == tokens
    assert int(kept.min()) >= 1


def test_heads_lose_what_the_curves_say(package):
    model, ids = build("llama"), token_ids(2, LENGTH)
    rates = torch.zeros(99, 2, 2)
    rates[49] = torch.tensor([[0.2, 0.7], [0.5, 0.6]])
    press = package.LUKVPress(package.KnormPress(0.9), 0.5, curves=BudgetCurves(rates))
    cache = filled(model, press, ids)
    assert [n.tolist() for n in kept_lengths(cache)] == [[[32, 12]] * 2, [[20, 16]] * 2]
    assert all({0, 1, 2, 3, 39} <= set(h) for layer in held(cache) for row in layer for h in row)
    assert press.with_ratio(0.25).compression_ratio == 0.25
    whole = filled(model, press.with_ratio(0.25), ids)  # the curves say nothing
    assert [n.tolist() for n in kept_lengths(whole)] == [[[40, 40]] * 2] * 2


@pytest.mark.parametrize("layerwise", [False, True])
def test_a_prefill_in_chunks_or_of_embeddings_keeps_the_same(package, layerwise):
    model = build("llama", dtype=torch.float64)
    press = make("FastKVzipPress", package, model, layerwise=layerwise)
    ids, mask, positions = left_padded(2, LENGTH, [0, 7])
    at_once = filled(model, press, ids, attention_mask=mask, position_ids=positions)
    cache, states = DynamicCache(config=model.config), DynamicCache(config=model.config)
    with press(model):
        prefill(model, ids, cache, chunk_size=13, attention_mask=mask)
        embeddings = model.get_input_embeddings()(ids)
        given = {"attention_mask": mask, "position_ids": positions}
        model(inputs_embeds=embeddings, past_key_values=states, **given)
    assert held(cache) == held(at_once) == held(states)


def test_two_caches_in_turn_and_later_turns(package):
    model = build("llama")
    press = make("FastKVzipPress", package, model)
    caches, (question, token) = [DynamicCache(config=model.config) for _ in "12"], forwards([3, 1])
    with press(model):
        for seed, cache in enumerate(caches):
            model(token_ids(1, LENGTH, seed), past_key_values=cache)
        before = held(caches[0])
        model(question, past_key_values=caches[0])
        model(token, past_key_values=caches[1])
    assert before == held(filled(model, press, token_ids(1, LENGTH)))
    heads = [head for layer in held(caches[0]) for head in layer[0]]
    assert [head[:-3] for head in heads] == [head for layer in before for head in layer[0]]
    assert all(head[-3:] == [40, 41, 42] for head in heads)


def test_a_budget_that_leaves_all_changes_nothing(package):
    model, ids = build("llama"), token_ids(1, LENGTH)
    expected = model(ids).logits[:, -1]
    for amount in (0.0, 0.001, Tokens(LENGTH)):
        press = make("FastKVzipPress", package, model, compression_ratio=amount)
        cache = filled(model, press, ids[:, :-1])
        assert all(bool((n == LENGTH - 1).all()) for n in kept_lengths(cache))
        last = model(ids[:, -1:], past_key_values=cache).logits[:, -1]
        torch.testing.assert_close(last, expected)


@both
def test_drafts_are_refused(package):
    model = build("llama")
    before, ids = snapshot(model), token_ids(1, 12).repeat(1, 3)
    refused = pytest.raises(UnsupportedInputError, match=r"FastKVzipPress.*draft.*prefill first")
    with make("FastKVzipPress", package, model)(model), refused:
        model.generate(ids, max_new_tokens=4, prompt_lookup_num_tokens=3)
    assert snapshot(model) == before


@both
def test_a_layer_by_itself_cannot_spend_what_layers_share(package):
    model = build("llama")
    with pytest.raises(HyperparameterError, match="from each layer by itself"):
        package.PerLayerCompressionPress(make("FastKVzipPress", package, model), [0.2, 0.6])
    by_layer = make("FastKVzipPress", package, model, layerwise=True)
    press = package.PerLayerCompressionPress(by_layer, [0.2, 0.6])
    lengths = kept_lengths(filled(model, press, token_ids(1, LENGTH)))
    assert [int(n.sum()) for n in lengths] == [64, 32]


# ---- what curves are learned of ------------------------------------------------------------------


def test_texts_too_short_for_curves_are_refused(package):
    with pytest.raises(CalibrationError, match=r"longer than 4 \+ 1 protected"):
        package.LUKVPress.fit(build("llama"), [token_ids(4, 6)])


@both
def test_curves_are_learned_for_the_press_that_ranks(package):
    model, batches = build("llama"), [token_ids(4, 60)]
    filters = package.QFilterPress.fit(model, batches)
    ranking = [None, package.KnormPress(), package.QFilterPress(filters=filters)]
    fits = [package.LUKVPress.fit(model, batches, press) for press in ranking]
    assert not same(fits[0], fits[1])
    assert not same(fits[1], fits[2])
    default = package.LUKVPress().press
    assert default == package.ExpectedAttentionPress(epsilon=2e-2)
    assert same(fits[0], package.LUKVPress.fit(model, batches, default))
    with pytest.raises(HyperparameterError, match="scores tokens"):
        package.LUKVPress.fit(model, batches, package.ThinKPress())


def test_statistics_of_the_prompt_itself_keep_what_expected_attention_keeps(package):
    model, ids = build("gpt_neox", dtype=torch.float64), token_ids(1, 64)
    options = {"compression_ratio": 0.5, "n_sink": 3, "n_future_positions": 20}
    stats = package.ExpectedAttentionStatsPress.collect(model, [ids], n_sink=3)
    own = package.ExpectedAttentionStatsPress(stats=stats, **options)
    expected = filled(model, package.ExpectedAttentionPress(**options), ids)
    assert held(filled(model, own, ids)) == held(expected)


def test_correlations_know_nothing_from_something():
    model, ids = build("llama", num_layers=1), token_ids(8, 60, seed=9)
    taught: Any = learn("KVzapPress", hooks_impl, model, [token_ids(32, 60)])
    assert correlations(model, taught, ids, norms).min() > 0.5
    nothing = correlations(model, made_up("KVzapPress", model), ids, norms)
    assert nothing.abs().max() < 0.5


# ---- the shipped model ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shipped() -> Any:
    return load_model("facts-llama")[0]


def right(model: Any, press: Any) -> float:
    """Share of right answers about 16 contexts of the facts task."""
    batch = draw(16, 256, 8, torch.Generator().manual_seed(1))
    return float((answer_unseen(model, press, batch) == batch.answer_ids).float().mean())


def test_what_is_shipped_keeps_the_facts(shipped, package):
    assert right(shipped, package.FastKVzipPress(0.5)) > 0.97
    for press in (
        package.FastKVzipPress(0.9),
        package.FastKVzipPress(0.9, layerwise=True),
        package.KVzapPress(0.9, model_type="linear"),
        package.KVzapPress(0.9, model_type="mlp"),
    ):
        assert right(shipped, press) > 0.9
    expected = package.ExpectedAttentionPress(0.8, epsilon=2e-2)
    assert right(shipped, package.LUKVPress(compression_ratio=0.5)) > 0.97
    assert (
        right(shipped, package.LUKVPress(compression_ratio=0.8)) > right(shipped, expected) + 0.03
    )


def test_the_shipped_head_scores_tell_which_heads_can_stream(shipped, package):
    options: dict[str, Any] = {"sink_size": SINKS, "recent_size": RECENT}
    press = package.DuoAttentionPress(0.25, **options)
    ids = next(fact_batches(1, seed=5))[:1, :60]
    kept = torch.cat(kept_lengths(filled(shipped, press, ids)))  # 4 layers of 4 KV heads
    assert sorted(kept.flatten().tolist()) == [32] * 4 + [60] * 12
    scores = press.prepare(shipped).scores
    assert torch.equal(kept == 32, streaming_heads(scores, 0.25))
    other = HeadScores(-scores)
    streaming = [
        package.DuoAttentionPress(0.5, head_scores=given, **options) for given in (None, other)
    ]
    assert right(shipped, press) > 0.95
    assert right(shipped, streaming[0]) > right(shipped, streaming[1]) + 0.2


@pytest.mark.parametrize(
    ("press", "mean"),
    [
        (hooks_impl.FastKVzipPress(), 0.85),
        (hooks_impl.KVzapPress(model_type="linear"), 0.85),
        (hooks_impl.KVzapPress(model_type="mlp"), 0.9),
    ],
)
def test_what_is_shipped_predicts_scores_of_other_contexts(shipped, press, mean):
    (batch,) = fact_batches(1, seed=HELD_OUT_SEED)
    plus = isinstance(press, hooks_impl.KVzapPress)
    scores = scores_of_kvzip(shipped, plus=plus)
    found = correlations(shipped, press.prepare(shipped), batch[:16], scores)
    assert found.shape == (4, 4)
    assert found.mean() > mean
    assert found.min() > 0.75


def test_shipped_filters_tell_how_much_keys_are_looked_at(shipped):
    """On another text, scores go with the mean logit that the queries of a group give a key."""
    press, calls, found = hooks_impl.QFilterPress, list[Any](), []
    filters = press().prepare(shipped)
    with press.collector(calls.append)(shipped):
        shipped(next(fact_batches(1, seed=5))[:4])
    for call in calls:
        scores = qfilter_scores(call.keys, filters, call.site.layer_idx)
        groups = call.queries().unflatten(1, (scores.shape[1], -1))
        logits = (groups.mean(dim=(2, 3)).unsqueeze(-2) @ call.keys.mT).squeeze(-2)
        pairs = torch.stack((logits, scores)).transpose(1, 2).flatten(2).unbind(dim=1)
        found += [float(torch.corrcoef(pair)[0, 1]) for pair in pairs]
    assert min(found) > 0
    assert statistics.median(found) > 0.8


def test_the_shipped_files_are_what_learning_them_again_gives(shipped):
    """With hooks: patches learn the same, bit for bit."""
    for name in ("ExpectedAttentionStatsPress", "QFilterPress"):
        again = learn(name, hooks_impl, shipped, fact_batches())
        close(again, hooks_impl.PRESSES[name]().prepare(shipped))
    duo, lukv = hooks_impl.DuoAttentionPress, hooks_impl.LUKVPress
    close(duo.measure(shipped, fact_batches(), SINKS, RECENT), duo().prepare(shipped))
    again = lukv.fit(shipped, fact_batches(), horizon=ASKED)
    close(again, lukv().prepare(shipped), atol=1e-3)


def test_one_command_makes_all_files(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(training, "ROWS_PER_BATCH", 8)
    monkeypatch.setattr(training, "TOKENS_PER_BATCH", 1024)
    monkeypatch.setattr(training, "STEPS", 100)
    train("facts-llama", tmp_path, batches=1)
    printed = capsys.readouterr().out
    names = {path.name for path in tmp_path.iterdir()}
    folder = Path(load_model("facts-llama")[0].config.name_or_path)
    assert names == {path.name for path in folder.glob("*.safetensors")} - {"model.safetensors"}
    assert all(str(tmp_path / name) in printed for name in names)
    assert printed.count("correlation with KVzip+ on other contexts: 0.") == 2
    assert printed.count("correlation with KVzip on other contexts: 0.") == 1
    with pytest.raises(UserError, match="vocabulary"):
        train("stdlib-neox")
