"""Presses that learned something about a model: one contract for all, with both mechanisms."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from experiments.testbed.compare import Inputs, compare
from experiments.testbed.families import FAMILIES, NO_ROPE, supported_implementations
from press_core import Needs, PressError, UnsupportedModelError, attention_sites
from press_core.learned.calibration import Calibration, CalibrationError, model_sizes
from press_core.learned.fast_kvzip import KVzipGates
from press_core.learned.kvzap import KVzapRegressor
from press_core.learned.lukv import BudgetCurves
from press_core.learned.query_statistics import ExpectedAttentionStats, QFilters
from tests.support import (
    PACKAGES,
    both,
    build,
    filled,
    held,
    left_padded,
    snapshot,
    token_ids,
)

LENGTH = 40


def norms(model: PreTrainedModel, ids: Tensor) -> list[Tensor]:
    """Scores that cost nothing, for presses to learn: norms of the values, in [0, 1]."""
    return [layer.values.norm(dim=-1).tanh() for layer in filled(model, None, ids).layers]


Drawn = Callable[..., Tensor]
Sizes = dict[str, int]


def stats(of: Sizes, drawn: Drawn) -> ExpectedAttentionStats:
    n, heads, d = of["layers"], of["heads"], of["head_dim"]
    spread = drawn(n, heads, d, d)
    return ExpectedAttentionStats(drawn(n, heads, d), spread @ spread.mT / d)


def regressor(of: Sizes, drawn: Drawn) -> KVzapRegressor:
    n, kv, width = of["layers"], of["kv_heads"], of["hidden_size"]
    return KVzapRegressor(drawn(n, kv, 8), drawn(n, kv), drawn(n, 8, width), drawn(n, 8))


def gates(of: Sizes, drawn: Drawn) -> KVzipGates:
    n, heads, kv, width = of["layers"], of["heads"], of["kv_heads"], of["hidden_size"]
    asked, read = (drawn(n, heads, 4, width), drawn(n, heads, 4)), drawn(n, kv, 4, width)
    ones = torch.ones(n, 4), torch.ones(n, 4)
    return KVzipGates(*asked, read, *ones, drawn(n, kv, 3, 4), drawn(n, heads))


def curves(of: Sizes, drawn: Drawn) -> BudgetCurves:
    n, kv = of["layers"], of["kv_heads"]
    rates = 0.5 + 0.3 * torch.linspace(-1, 1, n * kv).view(n, kv)
    return BudgetCurves(rates.expand(99, -1, -1).contiguous())


FIELD = {
    "ExpectedAttentionStatsPress": "stats",
    "QFilterPress": "filters",
    "KVzapPress": "regressor",
    "FastKVzipPress": "gates",
    "LUKVPress": "curves",
}
MADE_UP: dict[str, Callable[[Sizes, Drawn], Calibration]] = {
    "stats": stats,
    "filters": lambda of, drawn: QFilters(drawn(of["layers"], of["kv_heads"], of["head_dim"])),
    "regressor": regressor,
    "gates": gates,
    "curves": curves,
}
every_press = pytest.mark.parametrize("name", FIELD)


def made_up(name: str, model: PreTrainedModel) -> Calibration:
    """Something drawn at random, of the sizes of `model`."""
    generator = torch.Generator().manual_seed(0)
    sizes = model_sizes(attention_sites(model)[0])
    return MADE_UP[FIELD[name]](sizes, lambda *shape: torch.randn(*shape, generator=generator))


def make(name: str, package: Any, model: PreTrainedModel, **fields: Any) -> Any:
    """A press that evicts half, by something made up."""
    known: dict[str, Any] = {"compression_ratio": 0.5, FIELD[name]: made_up(name, model)}
    known |= {"press": package.SnapKVPress(window_size=4)} if name == "LUKVPress" else {}
    known |= {"n_sink": 2, "window_ratio": 0.1} if name == "FastKVzipPress" else {}
    return package.PRESSES[name](**{**known, **fields})


def learn(name: str, package: Any, model: PreTrainedModel, batches: Any) -> Calibration:
    press = package.PRESSES[name]
    ways: dict[str, Callable[[], Calibration]] = {
        "ExpectedAttentionStatsPress": lambda: press.collect(model, batches),
        "QFilterPress": lambda: press.fit(model, batches),
        "KVzapPress": lambda: press.fit(model, batches, norms, model_type="linear"),
        "FastKVzipPress": lambda: press.fit(model, batches, norms, rank=3, n_base=2, steps=15),
        "LUKVPress": lambda: press.fit(model, batches, package.SnapKVPress(window_size=4)),
    }
    return ways[name]()


def same(one: Calibration, two: Calibration) -> bool:
    return all(torch.equal(x, two.tensors[key]) for key, x in one.tensors.items())


def close(one: Calibration, two: Calibration, atol: float = 1e-4) -> None:
    for key, tensor in one.tensors.items():
        torch.testing.assert_close(tensor, two.tensors[key], atol=atol, rtol=1e-3)


def kept_by(press: Any, model: PreTrainedModel) -> Any:
    return held(filled(model, press, token_ids(1, LENGTH)))


# ---- both mechanisms -----------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", [*FIELD, "DuoAttentionPress"])
def test_both_mechanisms_learn_the_same(name, family):
    if family in NO_ROPE and name == "ExpectedAttentionStatsPress":
        return
    model = build(family, attn_implementation=supported_implementations(family)[0])
    batches = [token_ids(2, 30), token_ids(1, 20, seed=1)]
    if name == "DuoAttentionPress":
        fits = [p.DuoAttentionPress.measure(model, batches, 2, 6) for p in PACKAGES]
    elif name in ("FastKVzipPress", "KVzapPress"):  # sliding layers hold not all that was scored
        shape = attention_sites(model)[0].num_kv_heads
        layers = model.config.num_hidden_layers

        def scores(_: Any, ids: Tensor) -> list[Tensor]:
            drawn = torch.Generator().manual_seed(ids.shape[1])
            return [torch.rand(len(ids), shape, ids.shape[1], generator=drawn)] * layers

        fields = {"rank": 2, "n_base": 2, "steps": 5}
        fields = fields if name == "FastKVzipPress" else {"model_type": "linear"}
        fits = [p.PRESSES[name].fit(model, batches, scores, **fields) for p in PACKAGES]
    else:
        fits = [learn(name, package, model, batches) for package in PACKAGES]
    assert same(*fits)


@every_press
@pytest.mark.parametrize("nested", [False, True], ids=["composed", "nested"])
def test_both_keep_the_same_of_what_another_press_has_left(name, nested):
    model, pairs = build("llama"), list[Any]()
    for package in PACKAGES:
        presses = [package.KnormPress(0.4), make(name, package, model)]
        pairs.append(presses[::-1] if nested else package.ComposedPress(presses))
    inputs = Inputs.random(model.config.vocab_size, (40, 23), distinct=True, steps=2)
    assert compare(model, *pairs, inputs) is None


@pytest.mark.parametrize("name", list(FIELD)[:3])
def test_no_queries_are_read(package, name):
    """What was learned replaces them, so the presses work wherever keys can be seen."""
    assert Needs.QUERIES not in package.PRESSES[name]().needs


# ---- learning ------------------------------------------------------------------------------------


@both
@every_press
def test_learning_leaves_nothing_on_the_model(package, name):
    model = build("llama")
    before, state = snapshot(model), torch.get_rng_state()
    learn(name, package, model, [token_ids(3, 25)])
    assert snapshot(model) == before
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("name", [name for name in FIELD if name != "FastKVzipPress"])
def test_how_tokens_are_batched_does_not_matter(package, name):
    model = build("llama", dtype=torch.float64 if name == "LUKVPress" else torch.float32)
    batches = [token_ids(3, 25), token_ids(2, 40, seed=1), token_ids(1, 3, seed=2)]
    rows = (row[None] for batch in reversed(batches) for row in batch)
    fits = [learn(name, package, model, given) for given in (rows, batches)]
    close(*fits, atol=1e-6 if name == "LUKVPress" else 1e-4)
    if name == "LUKVPress":
        mean = fits[0].tensors["rates"].mean(dim=(1, 2))
        torch.testing.assert_close(mean, torch.arange(1, 100) / 100, atol=0.01, rtol=0)


@every_press
def test_padding_is_not_learned_from(package, name):
    model = build("llama")
    ids, mask, _ = left_padded(3, 30, [0, 7, 13])
    padded = [{"input_ids": ids, "attention_mask": mask}]
    alone = [ids[row : row + 1, n:] for row, n in enumerate([0, 7, 13])]
    close(learn(name, package, model, padded), learn(name, package, model, alone))


@every_press
def test_nothing_to_learn_from_is_refused(package, name):
    assert issubclass(CalibrationError, PressError)
    with pytest.raises(CalibrationError, match="no token"):
        learn(name, package, build("llama"), [])


@both
def test_statistics_need_rotary_embeddings(package):
    with pytest.raises(UnsupportedModelError, match="rotary"):
        package.ExpectedAttentionStatsPress.collect(build("gpt2"), [token_ids(1, 9)])


@pytest.mark.parametrize(
    ("name", "fields", "asked"),
    [
        ("KVzapPress", {"model_type": "linear"}, {"kvzip_plus_normalization": True}),
        ("FastKVzipPress", {"rank": 2, "n_base": 2, "steps": 3}, {}),
    ],
)
@both
def test_kvzip_is_what_is_learned_by_default(package, name, fields, asked, monkeypatch):
    model, press, made = build("llama"), package.PRESSES[name], []

    class Teacher:
        def __init__(self, **fields: Any) -> None:
            made.append(fields)

        def bind(self, _: Any) -> Teacher:
            return self

        scores = staticmethod(norms)

    assert press.teacher is package.KVzipPress
    monkeypatch.setattr(press, "teacher", Teacher)
    taught = press.fit(model, [token_ids(2, 30)], **fields)
    assert made == [asked]
    assert same(taught, press.fit(model, [token_ids(2, 30)], norms, **fields))


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
@every_press
def test_one_press_finds_what_belongs_to_each_of_two_models(package, name, two_models):
    press = make(name, package, two_models[0], **{FIELD[name]: None})
    for model in two_models:
        made_up(name, model).save(model.config.name_or_path)
    for model in [*two_models, two_models[0]]:
        assert kept_by(press, model) == kept_by(make(name, package, model), model)
        assert same(press.prepare(model), made_up(name, model))
    assert getattr(press, FIELD[name]) is None, "a press is not changed by opening it"
    with press(two_models[0]), press(two_models[1]):
        pass


@both
@every_press
def test_what_is_missing_or_of_another_model_is_told_before_anything_is_installed(
    package, name, two_models
):
    model, other = two_models
    before = snapshot(model)
    missing = rf"{name}\.(fit|collect)\(model, token_batches.*save"
    with pytest.raises(CalibrationError, match=missing):
        make(name, package, model, **{FIELD[name]: None}).register(model)
    heads = r"(kv_heads=3|heads=6)"
    with pytest.raises(UnsupportedModelError, match=rf"layers=2, {heads}.*cannot.*layers=2"):
        make(name, package, model, **{FIELD[name]: made_up(name, other)}).register(model)
    deeper = made_up(name, build("llama", num_layers=3))
    with pytest.raises(UnsupportedModelError, match=r"layers=3.*layers=2"):
        make(name, package, model, **{FIELD[name]: deeper}).register(model)
    assert snapshot(model) == before


@both
@every_press
def test_fields_may_be_paths(package, name, tmp_path):
    model = build("llama")
    path = made_up(name, model).save(tmp_path)
    expected = kept_by(make(name, package, model), model)
    for given in (path, str(path), tmp_path, str(tmp_path)):
        fields = {FIELD[name]: given}
        fields |= {"model_type": "mlp"} if name == "KVzapPress" else {}
        assert kept_by(make(name, package, model, **fields), model) == expected


@both
def test_a_given_regressor_decides_its_type(package, tmp_path):
    model, press = build("llama"), package.KVzapPress
    given = learn("KVzapPress", package, model, [token_ids(2, 30)])
    assert press(0.5, regressor=given).model_type == "mlp"
    assert press(0.5, regressor=given).prepare(model).model_type == "linear"
    given.save(tmp_path)
    kept_by(press(0.5, model_type="linear", regressor=tmp_path), model)
    with pytest.raises(CalibrationError, match=r"no kvzap-mlp\.safetensors"):
        press(0.5, regressor=tmp_path).register(model)
