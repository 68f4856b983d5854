"""FastKVzipPress and LUKVPress: learned beforehand, and head-wise, with both mechanisms."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

import hooks_impl
import patch_impl
from experiments.loading import load_model
from experiments.testbed.asking import answer_unseen
from experiments.testbed.compare import Inputs, compare
from experiments.testbed.facts import draw
from experiments.testbed.families import FAMILIES, supported_implementations
from experiments.testbed.training.fitted import (
    ASKED,
    HELD_OUT_SEED,
    correlations,
    fact_batches,
    scores_of_kvzip,
)
from press_core import (
    HyperparameterError,
    Press,
    RaggedLayer,
    UnsupportedInputError,
    UnsupportedModelError,
    attention_sites,
    cache_nbytes,
    kept_lengths,
    prefill,
)
from press_core.budget import Tokens
from press_core.learned.calibration import Calibration, CalibrationError, model_sizes
from press_core.learned.fast_kvzip import KVzipGates
from press_core.learned.lukv import BudgetCurves
from tests.support import build, left_padded, snapshot, token_ids

FIELD = {"FastKVzipPress": "gates", "LUKVPress": "curves"}
both = pytest.mark.parametrize("package", [hooks_impl, patch_impl], ids=["hooks", "patches"])
learned = pytest.mark.parametrize("name", FIELD)
LENGTH = 40


def norms(model: PreTrainedModel, ids: Tensor) -> list[Tensor]:
    """Scores that cost nothing, for gates to learn: norms of the values, in [0, 1]."""
    with torch.no_grad():
        cache = model(ids, use_cache=True).past_key_values
    return [layer.values.norm(dim=-1).tanh() for layer in cache.layers]


def learn(name: str, package: Any, model: PreTrainedModel, batches: Any) -> Calibration:
    if name == "LUKVPress":
        fitted = package.LUKVPress.fit(model, batches, package.SnapKVPress(window_size=4))
    else:
        fitted = package.FastKVzipPress.fit(model, batches, norms, rank=3, n_base=2, steps=15)
    assert isinstance(fitted, Calibration)
    return fitted


def made_up(name: str, model: PreTrainedModel, seed: int = 0) -> Any:
    """Something drawn at random, of the sizes of `model`."""
    generator, sizes = torch.Generator().manual_seed(seed), model_sizes(attention_sites(model)[0])
    n, heads, kv_heads = sizes["layers"], sizes["heads"], sizes["kv_heads"]
    rank, width = 4, sizes["hidden_size"]

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    if name == "LUKVPress":
        rates = 0.5 + 0.3 * torch.linspace(-1, 1, n * kv_heads).view(n, kv_heads)
        return BudgetCurves(rates.expand(99, -1, -1).contiguous())
    return KVzipGates(
        drawn(n, heads, rank, width),
        drawn(n, heads, rank),
        drawn(n, kv_heads, rank, width),
        torch.ones(n, rank),
        torch.ones(n, rank),
        drawn(n, kv_heads, 3, rank),
        drawn(n, heads),
    )


def make(name: str, package: Any, model: PreTrainedModel, **fields: Any) -> Any:
    """A press that evicts half, by something made up."""
    known: dict[str, Any] = {"compression_ratio": 0.5, FIELD[name]: made_up(name, model)}
    if name == "LUKVPress":
        known["press"] = package.SnapKVPress(window_size=4)
    else:
        known |= {"n_sink": 2, "window_ratio": 0.1}
    return package.PRESSES[name](**{**known, **fields})


def after(press: Press, model: PreTrainedModel, ids: Tensor, **given: Any) -> DynamicCache:
    cache = DynamicCache(config=model.config)
    with torch.no_grad(), press(model):
        model(ids, past_key_values=cache, **given)
    return cache


def held(cache: DynamicCache) -> list[list[list[int]]]:
    """Positions per layer and head, rows one after the other."""
    return [
        [[p for p in head if p >= 0] for row in layer.dense()[2].tolist() for head in row]
        for layer in cache.layers
    ]


def same(one: Calibration, two: Calibration) -> bool:
    return all(torch.equal(x, two.tensors[key]) for key, x in one.tensors.items())


def close(one: Calibration, two: Calibration, atol: float = 1e-4) -> None:
    for key, tensor in one.tensors.items():
        torch.testing.assert_close(tensor, two.tensors[key], atol=atol, rtol=1e-3)


# ---- both mechanisms -----------------------------------------------------------------------------


@learned
@pytest.mark.parametrize("family", FAMILIES)
def test_both_mechanisms_learn_the_same(name: str, family: str) -> None:
    model = build(family, attn_implementation=supported_implementations(family)[0])
    batches = [token_ids(2, 30), token_ids(1, 20, seed=1)]
    if name == "FastKVzipPress":  # whose stand-in scores come from a plain cache
        scores = [
            torch.rand(len(ids), kv, ids.shape[1], generator=torch.Generator().manual_seed(0))
            for ids in batches
            for kv in [attention_sites(model)[0].num_kv_heads]
        ]
        by_length = {ids.shape[1]: score for ids, score in zip(batches, scores, strict=True)}
        n_layers = model.config.num_hidden_layers

        def told(_: Any, ids: Tensor) -> list[Tensor]:
            return [by_length[ids.shape[1]]] * n_layers

        fits = [
            package.FastKVzipPress.fit(model, batches, told, rank=2, n_base=2, steps=5)
            for package in (hooks_impl, patch_impl)
        ]
    else:
        fits = [learn(name, package, model, batches) for package in (hooks_impl, patch_impl)]
    assert same(*fits)


@learned
@pytest.mark.parametrize("padded", [False, True], ids=["equal", "padded"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "gpt_neox", "qwen3", "gemma2"])
def test_both_mechanisms_keep_the_same(
    name: str, family: str, dtype: torch.dtype, padded: bool
) -> None:
    model = build(family, dtype=dtype, attn_implementation=supported_implementations(family)[0])
    inputs = Inputs.random(
        model.config.vocab_size, (40, 23, 9) if padded else (40, 40), question=3, steps=2
    )
    hook, patch = (make(name, package, model) for package in (hooks_impl, patch_impl))
    assert compare(model, hook, patch, inputs) is None


@learned
@pytest.mark.parametrize("nested", [False, True], ids=["composed", "nested"])
def test_both_keep_the_same_of_what_another_press_has_left(name: str, nested: bool) -> None:
    model, pairs = build("llama"), list[Any]()
    for package in (hooks_impl, patch_impl):
        presses = [package.KnormPress(0.4), make(name, package, model)]
        pairs.append(presses[::-1] if nested else package.ComposedPress(presses))
    inputs = Inputs.random(model.config.vocab_size, (40, 23), distinct=True, steps=2)
    assert compare(model, *pairs, inputs) is None


@both
def test_an_outer_scope_prunes_layers_before_all_of_them_have_run(package: Any) -> None:
    model, ids = build("llama", dtype=torch.float64), token_ids(1, LENGTH)
    press = make("FastKVzipPress", package, model)
    with package.KnormPress(0.4)(model):
        inside = after(press, model, ids)
    composed = after(package.ComposedPress([package.KnormPress(0.4), press]), model, ids)
    assert held(inside) == held(composed)
    assert sum(int(n.sum()) for n in kept_lengths(inside)) == 4 * 24 // 2


# ---- budgets -------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("ratio", [0.1, 0.37, 0.5, 0.9])
def test_gates_spend_one_budget_over_all_layers(package: Any, ratio: float) -> None:
    model = build("llama", num_layers=3, num_heads=4, num_kv_heads=2)
    press = make("FastKVzipPress", package, model, compression_ratio=ratio)
    counts = [int(n.sum()) for n in kept_lengths(after(press, model, token_ids(1, 41)))]
    size = 3 * 2 * 41
    assert sum(counts) == max(6, size - int(size * ratio))
    assert press.evicted_ratio == pytest.approx(1 - sum(counts) / size)
    by_layer = make("FastKVzipPress", package, model, compression_ratio=ratio, layerwise=True)
    cache = after(by_layer, model, token_ids(1, 41))
    assert [int(n.sum()) for n in kept_lengths(cache)] == [max(2, 82 - int(82 * ratio))] * 3
    assert len(set(counts)) > 1 or ratio == 0.1


@both
def test_gates_protect_sinks_and_window_in_every_head(package: Any) -> None:
    model = build("llama")
    press = make("FastKVzipPress", package, model, compression_ratio=0.7, n_sink=3)
    for layer in held(after(press, model, token_ids(2, LENGTH))):
        for head in layer:
            assert head[:3] == [0, 1, 2]
            assert head[-4:] == [36, 37, 38, 39]
    assert (
        len({len(head) for layer in held(after(press, model, token_ids(2, 40))) for head in layer})
        > 1
    )


@both
@pytest.mark.parametrize("tokens", [1, 9, 20])
@learned
def test_a_number_of_tokens_is_met_over_all_layers(package: Any, name: str, tokens: int) -> None:
    model = build("llama", num_layers=3)
    press = make(name, package, model).with_budget(tokens)
    cache = after(press, model, token_ids(2, LENGTH))
    kept = torch.stack([n.flatten() for n in kept_lengths(cache)])
    assert float(kept.float().mean()) == tokens
    assert int(kept.min()) >= 1


@both
def test_heads_lose_what_the_curves_say(package: Any) -> None:
    model = build("llama", num_layers=2, num_heads=4, num_kv_heads=2)
    rates = torch.zeros(99, 2, 2)
    rates[49] = torch.tensor([[0.2, 0.7], [0.5, 0.6]])
    press = package.LUKVPress(package.KnormPress(0.9), 0.5, curves=BudgetCurves(rates))
    cache = after(press, model, token_ids(2, LENGTH))
    assert [n.tolist() for n in kept_lengths(cache)] == [[[32, 12]] * 2, [[20, 16]] * 2]
    for layer in held(cache):
        assert all({0, 1, 2, 3, 39} <= set(head) for head in layer)
    assert press.with_ratio(0.25).compression_ratio == 0.25
    whole = after(press.with_ratio(0.25), model, token_ids(2, LENGTH))  # the curves say nothing
    assert [n.tolist() for n in kept_lengths(whole)] == [[[40, 40]] * 2] * 2


@both
@learned
def test_rows_of_a_padded_batch_are_as_alone(package: Any, name: str) -> None:
    model, padding = build("llama", dtype=torch.float64), [0, 11, 25]
    press = make(name, package, model)
    ids, mask, positions = left_padded(3, LENGTH, padding)
    together = after(press, model, ids, attention_mask=mask, position_ids=positions)
    for row, n in enumerate(padding):
        alone = after(press, model, ids[row : row + 1, n:])
        for layer, layer_alone in zip(held(together), held(alone), strict=True):
            assert [[p - n for p in head] for head in layer[2 * row : 2 * row + 2]] == layer_alone


@both
@learned
def test_memory_is_freed(package: Any, name: str) -> None:
    model = build("llama")
    ids = token_ids(2, 400)
    whole = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids, past_key_values=whole)
    cache = after(make(name, package, model), model, ids)
    assert cache_nbytes(cache) < 0.56 * cache_nbytes(whole)
    assert all(isinstance(layer, RaggedLayer) for layer in cache.layers)


# ---- ways of running -----------------------------------------------------------------------------


@both
@pytest.mark.parametrize("layerwise", [False, True])
def test_a_prefill_in_chunks_keeps_the_same(package: Any, layerwise: bool) -> None:
    model = build("llama", dtype=torch.float64)
    press = make("FastKVzipPress", package, model, layerwise=layerwise)
    ids, mask, positions = left_padded(2, LENGTH, [0, 7])
    at_once = after(press, model, ids, attention_mask=mask, position_ids=positions)
    cache = DynamicCache(config=model.config)
    with torch.no_grad(), press(model):
        prefill(model, ids, cache, chunk_size=13, attention_mask=mask)
    assert held(cache) == held(at_once)


@both
def test_embeddings_can_be_given_in_place_of_tokens(package: Any) -> None:
    """Unlike KVzip, gates need no token ids."""
    model = build("llama")
    press, ids = make("FastKVzipPress", package, model), token_ids(2, LENGTH)
    cache = DynamicCache(config=model.config)
    with torch.no_grad(), press(model):
        embeddings = model.get_input_embeddings()(ids)
        model(inputs_embeds=embeddings, past_key_values=cache)
    assert held(cache) == held(after(press, model, ids))


@both
@torch.no_grad()
def test_two_caches_in_turn_and_later_turns(package: Any) -> None:
    model, press = build("llama"), None
    press = make("FastKVzipPress", package, model)
    first, second = (DynamicCache(config=model.config) for _ in range(2))
    with press(model):
        model(token_ids(1, LENGTH), past_key_values=first)
        model(token_ids(1, 30, seed=1), past_key_values=second)
        before = held(first)
        model(token_ids(1, 3, seed=2), past_key_values=first)
        model(token_ids(1, 1, seed=3), past_key_values=second)
    assert before == held(after(press, model, token_ids(1, LENGTH)))
    assert [[head[:-3] for head in layer] for layer in held(first)] == before
    assert all(head[-3:] == [40, 41, 42] for layer in held(first) for head in layer)


@both
@torch.no_grad()
def test_a_budget_that_leaves_all_changes_nothing(package: Any) -> None:
    model = build("llama")
    expected = model(token_ids(1, LENGTH)).logits[:, -1]
    for amount in (0.0, 0.001, Tokens(LENGTH)):
        press = make("FastKVzipPress", package, model, compression_ratio=amount)
        cache = DynamicCache(config=model.config)
        with press(model):
            model(token_ids(1, LENGTH)[:, :-1], past_key_values=cache)
        assert {n for layer in kept_lengths(cache) for n in layer.flatten().tolist()} == {39}
        last = model(token_ids(1, LENGTH)[:, -1:], past_key_values=cache).logits[:, -1]
        torch.testing.assert_close(last, expected)


@both
def test_drafts_are_refused(package: Any) -> None:
    model = build("llama")
    before, ids = snapshot(model), token_ids(1, 12).repeat(1, 3)
    options: dict[str, Any] = {"max_new_tokens": 4, "prompt_lookup_num_tokens": 3}
    with (
        make("FastKVzipPress", package, model)(model),
        pytest.raises(UnsupportedInputError, match=r"FastKVzipPress.*draft tokens.*prefill first"),
    ):
        model.generate(ids, **options)
    assert snapshot(model) == before


@both
def test_a_layer_by_itself_cannot_spend_what_layers_share(package: Any) -> None:
    model = build("llama")
    press = make("FastKVzipPress", package, model)
    with pytest.raises(HyperparameterError, match="from each layer by itself"):
        package.PerLayerCompressionPress(press, [0.2, 0.6])
    by_layer = make("FastKVzipPress", package, model, layerwise=True)
    cache = after(
        package.PerLayerCompressionPress(by_layer, [0.2, 0.6]), model, token_ids(1, LENGTH)
    )
    assert [int(n.sum()) for n in kept_lengths(cache)] == [64, 32]


@both
@pytest.mark.parametrize("fails_in", [0, 1])
def test_a_forward_that_fails_leaves_nothing_on_the_model(package: Any, fails_in: int) -> None:
    model = build("llama")
    press, before = make("FastKVzipPress", package, model), snapshot(model)

    def fail(*_: Any) -> None:
        raise RuntimeError("failed")

    handle = model.model.layers[fails_in].mlp.register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="failed"):
        after(press, model, token_ids(1, LENGTH))
    handle.remove()
    assert snapshot(model) == before
    assert held(after(press, model, token_ids(1, LENGTH)))


# ---- learning ------------------------------------------------------------------------------------


@both
@learned
def test_learning_leaves_nothing_on_the_model(package: Any, name: str) -> None:
    model = build("llama")
    before, state = snapshot(model), torch.get_rng_state()
    learn(name, package, model, [token_ids(3, 25)])
    assert snapshot(model) == before
    assert torch.equal(torch.get_rng_state(), state)


@both
@learned
def test_padding_is_not_learned_from(package: Any, name: str) -> None:
    model = build("llama")
    ids, mask, _ = left_padded(3, 30, [0, 7, 13])
    padded = [{"input_ids": ids, "attention_mask": mask}]
    alone = [ids[row : row + 1, n:] for row, n in enumerate([0, 7, 13])]
    close(learn(name, package, model, padded), learn(name, package, model, alone))


@both
def test_texts_count_alike_for_curves_however_they_are_batched(package: Any) -> None:
    model = build("llama", dtype=torch.float64)
    batches = [token_ids(3, 25), token_ids(2, 40, seed=1), token_ids(1, 3, seed=2)]
    rows = (row[None] for batch in reversed(batches) for row in batch)
    fits = [learn("LUKVPress", package, model, given) for given in (rows, batches)]
    close(*fits, atol=1e-6)
    mean = fits[0].tensors["rates"].mean(dim=(1, 2))
    torch.testing.assert_close(mean, torch.arange(1, 100) / 100, atol=0.01, rtol=0)


@both
@learned
def test_nothing_to_learn_from_is_refused(package: Any, name: str) -> None:
    with pytest.raises(CalibrationError, match="no token"):
        learn(name, package, build("llama"), [])


@both
def test_texts_too_short_for_curves_are_refused(package: Any) -> None:
    with pytest.raises(CalibrationError, match=r"longer than 4 \+ 1 protected"):
        package.LUKVPress.fit(build("llama"), [token_ids(4, 6)])


@both
def test_curves_are_learned_for_the_press_that_ranks(package: Any) -> None:
    model = build("llama")
    batches = [token_ids(4, 60)]
    kinds: list[Callable[[], Any]] = [
        lambda: None,
        package.KnormPress,
        lambda: package.QFilterPress(filters=package.QFilterPress.fit(model, batches)),
    ]
    fits = [package.LUKVPress.fit(model, batches, kind()) for kind in kinds]
    assert not same(fits[0], fits[1])
    assert not same(fits[1], fits[2])
    default = package.LUKVPress().press
    assert default == package.ExpectedAttentionPress(epsilon=2e-2)
    assert same(fits[0], package.LUKVPress.fit(model, batches, default))
    with pytest.raises(HyperparameterError, match="scores tokens"):
        package.LUKVPress.fit(model, batches, package.ThinKPress())


@both
def test_kvzip_is_what_gates_learn_by_default(
    package: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build("llama")
    made: list[Any] = []

    class Teacher:
        def __init__(self, **fields: Any) -> None:
            made.append(fields)

        def bind(self, _: Any) -> Teacher:
            return self

        scores = staticmethod(norms)

    batches, size = [token_ids(2, 30)], {"rank": 2, "n_base": 2, "steps": 3}
    press = package.FastKVzipPress
    assert press.teacher is package.KVzipPress
    monkeypatch.setattr(press, "teacher", Teacher)
    taught = press.fit(model, batches, **size)
    assert made == [{}]
    assert same(taught, press.fit(model, batches, norms, **size))


# ---- what belongs to which model -----------------------------------------------------------------


@pytest.fixture
def two_models(tmp_path: Path) -> list[PreTrainedModel]:
    """Two models of different shapes, each loaded from its folder."""
    models = []
    for index, (heads, kv_heads, head_dim) in enumerate([(4, 2, 16), (6, 3, 8)]):
        folder = tmp_path / f"model-{index}"
        model = build("llama", num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim)
        model.save_pretrained(folder)
        models.append(type(model).from_pretrained(folder))
    return models


@both
@learned
def test_one_press_finds_what_belongs_to_each_of_two_models(
    package: Any, name: str, two_models: list[PreTrainedModel]
) -> None:
    press = make(name, package, two_models[0], **{FIELD[name]: None})
    for model in two_models:
        made_up(name, model).save(model.config.name_or_path)
    for model in [*two_models, two_models[0]]:
        given = make(name, package, model)
        assert held(after(press, model, token_ids(1, LENGTH))) == held(
            after(given, model, token_ids(1, LENGTH))
        )
    assert getattr(press, FIELD[name]) is None, "a press is not changed by opening it"


@both
@learned
def test_what_is_missing_is_told_before_anything_is_installed(
    package: Any, name: str, two_models: list[PreTrainedModel]
) -> None:
    model = two_models[0]
    before = snapshot(model)
    with pytest.raises(CalibrationError, match=rf"{name}\.fit\(model, token_batches.*save"):
        make(name, package, model, **{FIELD[name]: None}).register(model)
    with pytest.raises(CalibrationError, match="nothing was learned"):
        make(name, package, model, **{FIELD[name]: None}).register(build("llama"))
    assert snapshot(model) == before


@both
@learned
def test_what_belongs_to_another_model_is_refused(
    package: Any, name: str, two_models: list[PreTrainedModel]
) -> None:
    model, other = two_models
    before = snapshot(model)
    heads = "kv_heads=3" if name == "LUKVPress" else "heads=6"
    with pytest.raises(UnsupportedModelError, match=rf"layers=2, {heads}.*cannot.*layers=2"):
        make(name, package, model, **{FIELD[name]: made_up(name, other)}).register(model)
    deeper = made_up(name, build("llama", num_layers=3))
    with pytest.raises(UnsupportedModelError, match=r"layers=3.*layers=2"):
        make(name, package, model, **{FIELD[name]: deeper}).register(model)
    assert snapshot(model) == before


@both
@learned
def test_fields_may_be_paths(package: Any, name: str, tmp_path: Path) -> None:
    model = build("llama")
    path = made_up(name, model).save(tmp_path)
    expected = held(after(make(name, package, model), model, token_ids(1, LENGTH)))
    for given in (path, str(path), tmp_path, str(tmp_path)):
        press = make(name, package, model, **{FIELD[name]: given})
        assert held(after(press, model, token_ids(1, LENGTH))) == expected


# ---- the shipped model ---------------------------------------------------------------------------


def right(press: Any, words: int = 256) -> float:
    """Share of right answers about 16 contexts of the facts task."""
    model, _ = load_model("facts-llama")
    batch = draw(16, words, 8, torch.Generator().manual_seed(1))
    return float((answer_unseen(model, press, batch) == batch.answer_ids).float().mean())


@both
def test_shipped_gates_keep_the_facts(package: Any) -> None:
    assert right(package.FastKVzipPress(0.5)) > 0.97
    assert right(package.FastKVzipPress(0.9)) > 0.9
    assert right(package.FastKVzipPress(0.9, layerwise=True)) > 0.9


@both
def test_shipped_curves_keep_more_facts_than_even_budgets(package: Any) -> None:
    expected = package.ExpectedAttentionPress(0.8, epsilon=2e-2)
    assert right(package.LUKVPress(compression_ratio=0.5)) > 0.97
    assert right(package.LUKVPress(compression_ratio=0.8)) > right(expected) + 0.03


def test_shipped_gates_predict_scores_of_other_contexts() -> None:
    model, _ = load_model("facts-llama")
    press: Any = hooks_impl.FastKVzipPress().prepare(model)
    (batch,) = fact_batches(1, seed=HELD_OUT_SEED)
    found = correlations(model, press, batch[:16], scores_of_kvzip(model))
    assert found.shape == (4, 4)
    assert found.mean() > 0.85
    assert found.min() > 0.75


def test_the_shipped_curves_are_what_learning_them_again_gives() -> None:
    """With hooks: patches learn the same, bit for bit."""
    model, _ = load_model("facts-llama")
    press: Any = hooks_impl.LUKVPress
    again = press.fit(model, fact_batches(), horizon=ASKED)
    close(again, press().prepare(model), atol=1e-3)
