"""Presses that learned something about a model: one contract for all, with both mechanisms."""

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

import hooks_impl
import patch_impl
from experiments.testbed.compare import Inputs, compare
from experiments.testbed.recipes import PROMPTS
from press_core import (
    HyperparameterError,
    Needs,
    PressError,
    UnsupportedModelError,
    attention_sites,
)
from press_core.forward import current
from press_core.learned.calibration import CalibrationError, model_sizes
from press_core.learned.restorekv import RestoreAdapter, first_adapter
from tests.press_core.drawn import learned
from tests.press_core.test_learned import same
from tests.presses import TABLES
from tests.support import PACKAGES, both, build, filled, held, left_padded, snapshot, token_ids

LENGTH = 40


def norms(model, ids):
    """Scores that cost nothing, for presses to learn: norms of the values, in [0, 1]."""
    with current.apart():
        return [layer.values.norm(dim=-1).tanh() for layer in filled(model, None, ids).layers]


FIELD = TABLES["learned"]
"""By press, the field with what it has learned."""
RESTORE = "RestoreKVPress"
SCORING = [name for name in FIELD if name != RESTORE]
every_press = pytest.mark.parametrize("name", SCORING)
all_presses = pytest.mark.parametrize("name", FIELD)


def drawn_adapter(model):
    """One that changes what it is added to."""
    generator, started = torch.Generator().manual_seed(0), first_adapter(model, rank=3, seed=0)
    up = {n: torch.randn(x.shape, generator=generator) / 3 for n, x in started.up.items()}
    return RestoreAdapter(started.embeddings, started.down, up)


def made_up(name, model):
    """Something drawn at random, of the sizes of `model`."""
    if name == RESTORE:
        return drawn_adapter(model)
    part = "MLP" if name == "KVzapPress" else FIELD[name].upper()
    fit = learned(**model_sizes(attention_sites(model)[0]))[part]
    return fit.of({part: tensor.float() for part, tensor in fit.tensors.items()})


def make(name, package, model, **fields):
    """A press that evicts half, by something made up."""
    known = {"compression_ratio": 0.5, FIELD[name]: made_up(name, model)}
    known |= {"press": package.SnapKVPress(window_size=4)} if name == "LUKVPress" else {}
    known |= {"n_sink": 2, "window_ratio": 0.1} if name == "FastKVzipPress" else {}
    known |= {"prompts": PROMPTS} if name == RESTORE else {}
    return package.PRESSES[name](**{**known, **fields})


def learn(name, package, model, batches):
    press, kvzip = package.PRESSES.get(name), package.KVzipPress(prompts=PROMPTS)
    ways = {
        "ExpectedAttentionStatsPress": lambda: press.collect(model, batches),
        "QFilterPress": lambda: press.fit(model, batches),
        "KVzapPress": lambda: press.fit(model, batches, norms, model_type="linear"),
        "KVzip": lambda: package.KVzapPress.fit(model, batches, kvzip.scores, model_type="linear"),
        "FastKVzipPress": lambda: press.fit(model, batches, norms, rank=3, n_base=2, steps=15),
        "LUKVPress": lambda: press.fit(model, batches, package.SnapKVPress(window_size=4)),
        "DuoAttentionPress": lambda: press.measure(model, batches, 2, 6),
        RESTORE: lambda: press.fit(model, batches, n_following=8, rank=2, prompts=PROMPTS),
    }
    return ways[name]()


def close(one, two, atol=1e-4):
    for key, tensor in one.tensors.items():
        torch.testing.assert_close(tensor, two.tensors[key], atol=atol, rtol=1e-3)


def kept_by(press, model):
    return held(filled(model, press, token_ids(1, LENGTH)))


# ---- both mechanisms -----------------------------------------------------------------------------


@every_press
@pytest.mark.parametrize("nested", [False, True], ids=["composed", "nested"])
def test_both_keep_the_same_of_what_another_press_has_left(name, nested):
    model, pairs = build("llama"), []
    for package in PACKAGES:
        presses = [package.KnormPress(0.4), make(name, package, model)]
        pairs.append(presses[::-1] if nested else package.ComposedPress(presses))
    inputs = Inputs.random(model.config.vocab_size, (40, 23), distinct=True, steps=2)
    assert compare(model, *pairs, inputs) is None


@pytest.mark.parametrize("name", SCORING[:3])
def test_no_queries_are_read(package, name):
    """What was learned replaces them, so the presses work wherever keys can be seen."""
    assert Needs.QUERIES not in package.PRESSES[name]().needs


# ---- learning ------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gpt_neox", "qwen3"])
@pytest.mark.parametrize("name", [*FIELD, "DuoAttentionPress"])
def test_both_mechanisms_learn_the_same_and_leave_nothing_on_the_model(name, family):
    model, fits = build(family), []
    before, state = snapshot(model), torch.get_rng_state()
    weights = [x.clone() for x in model.parameters()]
    for package in PACKAGES:
        with torch.inference_mode(name == RESTORE):
            fits.append(learn(name, package, model, [token_ids(3, 25)]))
        assert snapshot(model) == before
        assert torch.equal(torch.get_rng_state(), state)
    for weight, parameter in zip(weights, model.parameters(), strict=True):
        assert torch.equal(weight, parameter)
        assert parameter.grad is None
        assert parameter.requires_grad
    assert same(*fits)
    assert not any(x.requires_grad or x.is_inference() for x in fits[0].tensors.values())


@pytest.mark.parametrize("name", [*SCORING[:3], "LUKVPress", "DuoAttentionPress", "KVzip"])
def test_how_tokens_are_batched_does_not_matter(package, name):
    """Nor outer scopes, nor other threads that run the model."""
    model = build("llama", dtype=torch.float64 if name == "LUKVPress" else torch.float32)
    batches = [token_ids(3, 25), token_ids(2, 40, seed=1), token_ids(1, 3, seed=2)]
    rows = (row[None] for batch in reversed(batches) for row in batch)

    def batched():
        ThreadPoolExecutor(1).submit(model, token_ids(1, 30, seed=3)).result()
        yield from batches

    fits = [learn(name, package, model, rows)]
    with patch_impl.KnormPress(0.5)(model):
        fits.append(learn(name, package, model, batched()))
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
    for batches in ([], [token_ids(1, 0)], [token_ids(0, 9)]):
        with pytest.raises(CalibrationError, match="no token"):
            learn(name, package, build("llama"), batches)


@pytest.mark.parametrize(("name", "method", "given"), TABLES["wrong_fits"])
def test_arguments_of_fits_are_checked_before_the_model_is_run(name, method, given):
    learns = getattr(hooks_impl.PRESSES[name], method)
    with pytest.raises(HyperparameterError, match=f"{min(given)} must be"):
        learns(None, [token_ids(1, 25)], **given)


@both
def test_statistics_need_rotary_embeddings(package):
    with pytest.raises(UnsupportedModelError, match="rotary"):
        package.ExpectedAttentionStatsPress.collect(build("gpt2"), [token_ids(1, 9)])


@pytest.mark.parametrize("name", ["KVzapPress", "FastKVzipPress"])
@both
def test_kvzip_is_what_is_learned_by_default(package, name, monkeypatch):
    """Plus its normalization, for KVzap."""
    model, press = build("llama"), package.PRESSES[name]
    fields = {"model_type": "linear"} if name == "KVzapPress" else {"rank": 2, "steps": 3}
    teacher = SimpleNamespace(bind=lambda _: teacher, scores=norms)
    assert press.teacher() == package.KVzipPress(kvzip_plus_normalization=name == "KVzapPress")
    monkeypatch.setattr(press, "teacher", lambda: teacher)
    taught = press.fit(model, [token_ids(2, 30)], **fields)
    assert same(taught, press.fit(model, [token_ids(2, 30)], norms, **fields))


# ---- what belongs to which model -----------------------------------------------------------------


@pytest.fixture
def two_models(tmp_path):
    """Two models of different shapes, each loaded from its folder."""
    models = []
    for index, (heads, kv_heads, head_dim) in enumerate([(4, 2, 16), (6, 3, 8)]):
        folder = tmp_path / f"model-{index}"
        model = build("llama", num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim)
        model.save_pretrained(folder)
        models.append(type(model).from_pretrained(folder))
    return models


@both
@all_presses
def test_one_press_finds_what_belongs_to_each_of_two_models(package, name, two_models):
    press = make(name, package, two_models[0], **{FIELD[name]: None})
    for model in two_models:
        made_up(name, model).save(model.config.name_or_path)
    for model in [*two_models, two_models[0]]:
        assert kept_by(press, model) == kept_by(make(name, package, model), model)
        assert name == RESTORE or same(press.prepare(model), made_up(name, model))
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
    missing = rf"{name}\.(fit|collect)\(.*save"
    with pytest.raises(CalibrationError, match=missing):
        make(name, package, model, **{FIELD[name]: None}).register(model)
    heads = r"(kv_heads=3|heads=6)"
    with pytest.raises(UnsupportedModelError, match=rf"layers=2, {heads}.*layers=2"):
        make(name, package, model, **{FIELD[name]: made_up(name, other)}).register(model)
    deeper = made_up(name, build("llama", num_layers=3))
    with pytest.raises(UnsupportedModelError, match=r"layers=3.*layers=2"):
        make(name, package, model, **{FIELD[name]: deeper}).register(model)
    assert snapshot(model) == before


@both
@all_presses
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
    with pytest.raises(CalibrationError, match=r"no file .*no kvzap-mlp\.safetensors"):
        press(0.5, regressor=tmp_path).register(model)
