"""Presses that learned something about a model, with both mechanisms."""

from __future__ import annotations

import dataclasses
import inspect
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

import hooks_impl
import patch_impl
from experiments import UserError
from experiments.loading import load_model
from experiments.testbed.asking import answer_unseen
from experiments.testbed.compare import Inputs, compare, run
from experiments.testbed.facts import draw
from experiments.testbed.families import FAMILIES, NO_ROPE, supported_implementations
from experiments.testbed.training import fitted as training
from experiments.testbed.training.fitted import (
    HELD_OUT_SEED,
    RECENT,
    SINKS,
    correlations,
    fact_batches,
    fit,
    scores_of_kvzip,
    train,
)
from press_core import (
    Needs,
    Press,
    PressError,
    UnsupportedModelError,
    attention_sites,
    kept_lengths,
)
from press_core.learned.calibration import Calibration, CalibrationError, model_sizes
from press_core.learned.duo_attention import HeadScores, streaming_heads
from press_core.learned.expected_attention_stats import ExpectedAttentionStats
from press_core.learned.kvzap import KVzapRegressor
from press_core.learned.qfilter import QFilters, qfilter_scores
from tests.support import build, left_padded, snapshot, token_ids

PRESSES: dict[str, tuple[Any, Any]] = {
    "ExpectedAttentionStatsPress": (
        hooks_impl.ExpectedAttentionStatsPress,
        patch_impl.ExpectedAttentionStatsPress,
    ),
    "QFilterPress": (hooks_impl.QFilterPress, patch_impl.QFilterPress),
    "KVzapPress": (hooks_impl.KVzapPress, patch_impl.KVzapPress),
}
FIELD = {
    "ExpectedAttentionStatsPress": "stats",
    "QFilterPress": "filters",
    "KVzapPress": "regressor",
}


@pytest.fixture(params=PRESSES)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=[0, 1], ids=["hooks", "patches"])
def mechanism(request: pytest.FixtureRequest) -> int:
    return request.param


def stand_in_scores(model: PreTrainedModel, ids: Tensor) -> list[Tensor]:
    """Scores that cost nothing, for regressors to learn: norms of the values."""
    with torch.no_grad():
        cache = model(ids, use_cache=True).past_key_values
    return [layer.values.norm(dim=-1) for layer in cache.layers]


def learn(name: str, mechanism: int, model: PreTrainedModel, batches: Any) -> Calibration:
    press = PRESSES[name][mechanism]
    if name == "ExpectedAttentionStatsPress":
        return press.collect(model, batches)
    if name == "QFilterPress":
        return press.fit(model, batches)
    return press.fit(model, batches, stand_in_scores, model_type="linear")


def learned(name: str, *args: Any) -> dict[str, Any]:
    return {FIELD[name]: learn(name, *args)}


def random_fields(name: str, model: PreTrainedModel, seed: int = 0) -> dict[str, Any]:
    """Fields of the press `name` that hold something drawn at random, of the sizes of `model`."""
    generator = torch.Generator().manual_seed(seed)
    sizes = model_sizes(attention_sites(model)[0])
    n, kv_heads, d = sizes["layers"], sizes["kv_heads"], sizes["head_dim"]

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    if name == "ExpectedAttentionStatsPress":
        spread = drawn(n, sizes["heads"], d, d)
        covariance = spread @ spread.mT / d
        return {"stats": ExpectedAttentionStats(drawn(n, sizes["heads"], d), covariance)}
    if name == "QFilterPress":
        return {"filters": QFilters(drawn(n, kv_heads, d))}
    width, hidden = sizes["hidden_size"], 8
    output = drawn(n, kv_heads, hidden), drawn(n, kv_heads)
    return {"regressor": KVzapRegressor(*output, drawn(n, hidden, width), drawn(n, hidden))}


def same(one: Calibration, two: Calibration) -> bool:
    return all(torch.equal(x, two.tensors[key]) for key, x in one.tensors.items())


def close(one: Calibration, two: Calibration) -> None:
    for key, tensor in one.tensors.items():
        torch.testing.assert_close(tensor, two.tensors[key], atol=1e-4, rtol=1e-3)


# ---- both mechanisms -----------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_both_mechanisms_learn_the_same(name: str, family: str) -> None:
    if family in NO_ROPE and name == "ExpectedAttentionStatsPress":
        pytest.skip(f"{family} has no rotary embeddings, which {name} needs")
    model = build(family, attn_implementation=supported_implementations(family)[0])
    batches = [token_ids(2, 30), token_ids(1, 20, seed=1)]
    assert same(learn(name, 0, model, batches), learn(name, 1, model, batches))


@pytest.mark.parametrize("family", FAMILIES)
def test_both_mechanisms_measure_the_same_heads(family: str) -> None:
    model = build(family, attn_implementation=supported_implementations(family)[0])
    batches = [token_ids(2, 30), token_ids(1, 20, seed=1)]
    packages: tuple[Any, ...] = (hooks_impl, patch_impl)
    assert same(*(package.DuoAttentionPress.measure(model, batches, 2, 6) for package in packages))


@pytest.mark.parametrize("padded", [False, True], ids=["equal", "padded"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "gpt_neox", "qwen3", "gemma2"])
def test_both_mechanisms_keep_the_same(
    name: str, family: str, dtype: torch.dtype, padded: bool
) -> None:
    implementation = supported_implementations(family)[0]
    model = build(family, dtype=dtype, attn_implementation=implementation)
    fields = {"compression_ratio": 0.6, **random_fields(name, model)}
    hook, patch = (press(**fields) for press in PRESSES[name])
    inputs = Inputs.random(model.config.vocab_size, (40, 23, 9) if padded else (40, 40))
    assert compare(model, hook, patch, inputs) is None


def test_both_mechanisms_keep_the_same_of_what_another_press_has_left(name: str) -> None:
    model = build("llama")
    fields = {"compression_ratio": 0.5, **random_fields(name, model)}
    pairs = []
    for package, press in zip((hooks_impl, patch_impl), PRESSES[name], strict=True):
        pairs.append([press(**fields), package.KnormPress(compression_ratio=0.4)])
    inputs = Inputs.random(model.config.vocab_size, (40, 23), distinct=True)
    assert compare(model, *pairs, inputs) is None
    kept = run(model, pairs[0], inputs).pruned[0].keys.shape[2]
    assert kept == int(int(40 * 0.6) * 0.5)


def test_both_have_the_same_fields(name: str) -> None:
    hook, patch = PRESSES[name]
    assert [(f.name, f.type, f.default) for f in dataclasses.fields(hook)] == [
        (f.name, f.type, f.default) for f in dataclasses.fields(patch)
    ]
    assert inspect.getdoc(hook) == inspect.getdoc(patch)


def test_no_queries_are_read(name: str) -> None:
    """What was learned replaces them, so the presses work wherever keys can be seen."""
    assert not any(Needs.QUERIES in press().needs for press in PRESSES[name])


# ---- learning ------------------------------------------------------------------------------------


@pytest.fixture
def batches() -> list[Tensor]:
    return [token_ids(3, 25), token_ids(2, 40, seed=1), token_ids(1, 3, seed=2)]


def test_learning_leaves_nothing_on_the_model(
    name: str, mechanism: int, batches: list[Tensor]
) -> None:
    model = build("llama")
    before, state = snapshot(model), torch.get_rng_state()
    learn(name, mechanism, model, batches)
    assert snapshot(model) == before
    assert torch.equal(torch.get_rng_state(), state)


def test_how_tokens_are_batched_does_not_matter(
    name: str, mechanism: int, batches: list[Tensor]
) -> None:
    model = build("llama")
    rows = (row[None] for batch in reversed(batches) for row in batch)
    close(learn(name, mechanism, model, rows), learn(name, mechanism, model, batches))


def test_padding_is_not_learned_from(name: str, mechanism: int) -> None:
    model = build("llama")
    ids, mask, _ = left_padded(3, 20, [0, 7, 13])
    padded = [{"input_ids": ids, "attention_mask": mask}]
    alone = [ids[row : row + 1, n:] for row, n in enumerate([0, 7, 13])]
    close(learn(name, mechanism, model, padded), learn(name, mechanism, model, alone))


def test_nothing_to_learn_from_is_refused(name: str, mechanism: int) -> None:
    model = build("llama")
    with pytest.raises(CalibrationError, match="no token"):
        learn(name, mechanism, model, [])


def test_statistics_need_rotary_embeddings(mechanism: int) -> None:
    press = PRESSES["ExpectedAttentionStatsPress"][mechanism]
    with pytest.raises(UnsupportedModelError, match="rotary"):
        press.collect(build("gpt2"), [token_ids(1, 9)])


def test_filters_tell_how_much_keys_are_looked_at() -> None:
    """On another text, scores go with the mean logit that the queries of a group give a key."""
    model, _ = load_model("facts-llama")
    press = PRESSES["QFilterPress"][0]
    filters, calls = press().prepare(model), list[Any]()
    with torch.no_grad(), press.collector(calls.append)(model):
        model(next(fact_batches(1, seed=5))[:4])
    found = []
    for call in calls:
        scores = qfilter_scores(call.keys, filters, call.site.layer_idx)
        groups = call.queries().unflatten(1, (scores.shape[1], -1))
        logits = (groups.mean(dim=(2, 3)).unsqueeze(-2) @ call.keys.mT).squeeze(-2)
        pairs = torch.stack((logits, scores)).transpose(1, 2).flatten(2).unbind(dim=1)
        found += [float(torch.corrcoef(pair)[0, 1]) for pair in pairs]
    assert min(found) > 0
    assert statistics.median(found) > 0.8


def test_a_regressor_predicts_what_it_was_taught(mechanism: int) -> None:
    model, press = build("llama", num_layers=1), PRESSES["KVzapPress"][mechanism]
    found = press.fit(model, [token_ids(32, 60)], stand_in_scores, model_type="linear")
    ids = token_ids(1, 40, seed=9)
    cache = DynamicCache(config=model.config)
    with torch.no_grad(), press(0.5, regressor=found)(model):
        model(ids, past_key_values=cache)
    wanted = stand_in_scores(model, ids)[0][0].topk(20).indices
    kept = cache.layers[0].positions[0]
    overlap = [len(set(a.tolist()) & set(b.tolist())) for a, b in zip(wanted, kept, strict=True)]
    assert min(overlap) >= 13, "by chance there would be 10"


# ---- statistics of the prompt itself -------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt_neox"])
def test_statistics_of_the_prompt_itself_keep_what_expected_attention_keeps(
    family: str, mechanism: int
) -> None:
    model = build(family, dtype=torch.float64)
    inputs = Inputs.random(model.config.vocab_size, (64,), distinct=True)
    press = PRESSES["ExpectedAttentionStatsPress"][mechanism]
    package = (hooks_impl, patch_impl)[mechanism]
    options: dict[str, Any] = {"compression_ratio": 0.5, "n_sink": 3, "n_future_positions": 20}
    stats = press.collect(model, [inputs.context], n_sink=3)
    own = run(model, press(stats=stats, **options), inputs)
    expected = run(model, package.ExpectedAttentionPress(**options), inputs)
    for layer, reference in zip(own.pruned, expected.pruned, strict=True):
        assert torch.equal(layer.positions, reference.positions)


# ---- what belongs to which model -----------------------------------------------------------------


@pytest.fixture
def two_models(tmp_path: Path) -> list[PreTrainedModel]:
    """Two models of different shapes, each loaded from its folder."""
    models = []
    for index, shape in enumerate([(4, 2, 16), (6, 3, 8)]):
        folder = tmp_path / f"model-{index}"
        heads, kv_heads, head_dim = shape
        model = build("llama", num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim)
        model.save_pretrained(folder)
        models.append(type(model).from_pretrained(folder))
    return models


def opens(press: Press, model: PreTrainedModel) -> list[int]:
    cache = DynamicCache(config=model.config)
    with torch.no_grad(), press(model):
        model(token_ids(1, 20), past_key_values=cache)
    return [int(kept.max()) for kept in kept_lengths(cache)]


def test_one_press_finds_what_belongs_to_each_of_two_models(
    name: str, mechanism: int, two_models: list[PreTrainedModel]
) -> None:
    press = PRESSES[name][mechanism](compression_ratio=0.5)
    for model in two_models:
        given = random_fields(name, model)[FIELD[name]]
        given.save(model.config.name_or_path)
    for model in [*two_models, two_models[0]]:
        assert opens(press, model) == [10, 10]
        assert same(press.prepare(model), random_fields(name, model)[FIELD[name]])
        assert getattr(press, FIELD[name]) is None, "a press is not changed by opening it"
    with press(two_models[0]), press(two_models[1]):
        pass


def test_what_is_missing_is_told_before_anything_is_installed(
    name: str, mechanism: int, two_models: list[PreTrainedModel]
) -> None:
    model, press = two_models[0], PRESSES[name][mechanism](compression_ratio=0.5)
    before = snapshot(model)
    with pytest.raises(
        CalibrationError, match=rf"{name}\.(fit|collect)\(model, token_batches.*save"
    ):
        press.register(model)
    assert snapshot(model) == before


def test_what_belongs_to_another_model_is_refused(
    name: str, mechanism: int, two_models: list[PreTrainedModel]
) -> None:
    model, other = two_models
    press = PRESSES[name][mechanism](compression_ratio=0.5, **random_fields(name, other))
    before = snapshot(model)
    heads = "heads=6" if name == "ExpectedAttentionStatsPress" else "kv_heads=3"
    with pytest.raises(UnsupportedModelError, match=rf"layers=2, {heads}.*cannot.*layers=2"):
        press.register(model)
    assert snapshot(model) == before


def test_the_number_of_layers_counts(name: str, mechanism: int) -> None:
    press = PRESSES[name][mechanism](0.5, **random_fields(name, build("llama", num_layers=3)))
    with pytest.raises(UnsupportedModelError, match=r"layers=3.*layers=2"):
        press.register(build("llama", num_layers=2))


def test_fields_may_be_paths(name: str, mechanism: int, tmp_path: Path) -> None:
    model = build("llama")
    path = random_fields(name, model)[FIELD[name]].save(tmp_path)
    for given in (path, str(path), tmp_path, str(tmp_path)):
        assert opens(PRESSES[name][mechanism](0.5, **{FIELD[name]: given}), model) == [10, 10]


def test_a_given_regressor_decides_its_type(mechanism: int, tmp_path: Path) -> None:
    model = build("llama")
    given = learn("KVzapPress", mechanism, model, [token_ids(2, 30)])
    assert isinstance(given, KVzapRegressor)
    press = PRESSES["KVzapPress"][mechanism](0.5, regressor=given)
    assert press.model_type == "mlp"
    assert press.prepare(model).model_type == "linear"
    given.save(tmp_path)
    by_type = PRESSES["KVzapPress"][mechanism](0.5, model_type="linear", regressor=tmp_path)
    assert opens(by_type, model) == [10, 10]
    with pytest.raises(CalibrationError, match=r"no kvzap-mlp\.safetensors"):
        opens(PRESSES["KVzapPress"][mechanism](0.5, regressor=tmp_path), model)


# ---- the shipped model ---------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"model_type": "linear"}], ids=["default", "linear"])
def test_the_shipped_model_comes_with_what_was_learned(
    name: str, mechanism: int, options: dict[str, Any]
) -> None:
    model, _ = load_model("facts-llama")
    options = options if name == "KVzapPress" else {}
    assert opens(PRESSES[name][mechanism](compression_ratio=0.5, **options), model) == [10] * 4


@pytest.mark.parametrize("model_type", ["linear", "mlp"])
def test_shipped_regressors_keep_the_facts(model_type: str, mechanism: int) -> None:
    model, _ = load_model("facts-llama")
    press = PRESSES["KVzapPress"][mechanism](compression_ratio=0.9, model_type=model_type)
    batch = draw(4, 256, 8, torch.Generator().manual_seed(1))
    right = answer_unseen(model, press, batch) == batch.answer_ids
    assert right.float().mean() > 0.9


def test_the_shipped_files_are_what_learning_them_again_gives() -> None:
    """With hooks: patches learn the same, bit for bit."""
    model, _ = load_model("facts-llama")
    for name in ("ExpectedAttentionStatsPress", "QFilterPress"):
        shipped = PRESSES[name][0]().prepare(model)
        close(learn(name, 0, model, fact_batches()), shipped)
    duo: Any = hooks_impl.DuoAttentionPress
    measured = duo.measure(model, fact_batches(), SINKS, RECENT)
    close(measured, duo().prepare(model))


@pytest.mark.parametrize("package", [hooks_impl, patch_impl], ids=["hooks", "patches"])
def test_the_shipped_model_comes_with_head_scores(package: Any) -> None:
    model, _ = load_model("facts-llama")
    press = package.DuoAttentionPress(0.25, sink_size=SINKS, recent_size=RECENT)
    cache = DynamicCache(config=model.config)
    with torch.no_grad(), press(model):
        model(next(fact_batches(1, seed=5))[:1, :60], past_key_values=cache)
    kept = torch.cat(kept_lengths(cache))  # 4 layers of 4 KV heads
    assert sorted(kept.flatten().tolist()) == [32] * 4 + [60] * 12
    shipped = press.prepare(model)
    assert torch.equal(kept == 32, streaming_heads(shipped.scores, 0.25))


def test_the_shipped_head_scores_tell_which_heads_can_stream() -> None:
    model, _ = load_model("facts-llama")
    scores = hooks_impl.DuoAttentionPress().prepare(model).scores
    batch = draw(8, 256, 8, torch.Generator().manual_seed(1))

    def right(scores: Tensor, share: float) -> float:
        options: dict[str, Any] = {"sink_size": SINKS, "recent_size": RECENT}
        press = hooks_impl.DuoAttentionPress(share, head_scores=HeadScores(scores), **options)
        return float((answer_unseen(model, press, batch) == batch.answer_ids).float().mean())

    assert right(scores, 0.25) > 0.95
    assert right(scores, 0.5) > right(-scores, 0.5) + 0.2


@pytest.mark.parametrize(("model_type", "mean"), [("linear", 0.85), ("mlp", 0.9)])
def test_shipped_regressors_predict_scores_of_other_contexts(model_type: Any, mean: float) -> None:
    model, _ = load_model("facts-llama")
    shipped: Any = hooks_impl.KVzapPress(model_type=model_type).prepare(model)
    (batch,) = fact_batches(1, seed=HELD_OUT_SEED)
    found = correlations(model, shipped, batch[:16], scores_of_kvzip(model, plus=True))
    assert found.shape == (4, 4)
    assert found.mean() > mean
    assert found.min() > 0.75


def test_correlations_know_nothing_from_something() -> None:
    model = build("llama", num_layers=1)
    taught: Any = hooks_impl.KVzapPress.fit(
        model, [token_ids(32, 60)], stand_in_scores, model_type="linear"
    )
    nothing = random_fields("KVzapPress", model)["regressor"]
    ids = token_ids(8, 60, seed=9)
    assert correlations(model, taught, ids, stand_in_scores).min() > 0.5
    assert correlations(model, nothing, ids, stand_in_scores).abs().max() < 0.5


def test_one_command_makes_all_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "ROWS_PER_BATCH", 8)
    monkeypatch.setattr(training, "TOKENS_PER_BATCH", 1024)
    monkeypatch.setattr(training, "STEPS", 200)
    train("facts-llama", tmp_path, batches=1)
    printed = capsys.readouterr().out
    names = {path.name for path in tmp_path.iterdir()}
    shipped = Path(load_model("facts-llama")[0].config.name_or_path)
    assert names == {path.name for path in shipped.glob("*.safetensors")} - {"model.safetensors"}
    assert all(str(tmp_path / name) in printed for name in names)
    assert printed.count("correlation with KVzip+ on other contexts: 0.") == 2
    assert printed.count("correlation with KVzip on other contexts: 0.") == 1


def test_a_model_that_knows_no_facts_is_refused() -> None:
    with pytest.raises(UserError, match="vocabulary"):
        train("stdlib-neox")


def test_all_kinds_can_be_fitted_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "STEPS", 20)
    model, scores = build("llama"), (stand_in_scores, stand_in_scores)
    learned = fit(model, lambda _: [token_ids(2, 40)], *scores)
    kinds = [(type(fitted).__name__, fitted.file_name) for fitted in learned]
    assert kinds == [
        ("ExpectedAttentionStats", "expected_attention_stats.safetensors"),
        ("QFilters", "qfilters.safetensors"),
        ("HeadScores", "duo_head_scores.safetensors"),
        ("BudgetCurves", "lukv_curves.safetensors"),
        ("KVzipGates", "fast_kvzip_gates.safetensors"),
        ("KVzapRegressor", "kvzap-linear.safetensors"),
        ("KVzapRegressor", "kvzap-mlp.safetensors"),
    ]


def test_kvzip_is_what_regressors_learn_by_default(
    mechanism: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, press = build("llama"), PRESSES["KVzapPress"][mechanism]
    made: list[Any] = []

    class Teacher:
        def __init__(self, **fields: Any) -> None:
            made.append(fields)

        def bind(self, _: Any) -> Teacher:
            return self

        scores = staticmethod(stand_in_scores)

    batches = [token_ids(2, 30)]
    package = ("hooks_impl", "patch_impl")[mechanism]
    assert press.teacher.__module__ == f"{package}.presses"
    monkeypatch.setattr(press, "teacher", Teacher)
    taught = press.fit(model, batches, model_type="linear")
    assert made == [{"kvzip_plus_normalization": True}]
    assert same(taught, press.fit(model, batches, stand_in_scores, model_type="linear"))


def test_errors_are_of_one_family() -> None:
    assert issubclass(CalibrationError, PressError)
