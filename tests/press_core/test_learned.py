"""What presses have learned: one contract for files, where they are looked for, and refusals."""

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors import safe_open
from safetensors.torch import save_file

from press_core import formulas
from press_core.learned.calibration import CalibrationError
from press_core.learned.fast_kvzip import KVzipGates
from press_core.learned.kvzap import KVzapRegressor
from press_core.learned.measured import ExpectedAttentionStats, QFilters
from press_core.learned.restorekv import RestoreAdapter
from tests.press_core.drawn import DIM, FITS, KV_HEADS, LAYERS, PUBLISHED, TABLES, drawn

FILTERS, STATS, _, MLP, GATES, *_ = FITS.values()
of_every_kind = pytest.mark.parametrize("name", FITS)
SPOILT = [
    *((FITS[name], field, eval(text, vars(torch))) for name, field, text in TABLES["spoilt"]),
    *((GATES, name, tensor[..., :-1]) for name, tensor in GATES.tensors.items()),
    *((GATES, name, tensor[0]) for name, tensor in GATES.tensors.items()),
]


@pytest.mark.parametrize(("fit", "field", "tensor"), SPOILT)
def test_tensors_that_do_not_fit_each_other_are_refused(fit, field, tensor):
    with pytest.raises(CalibrationError, match=field):
        replace(fit, **{field: tensor})


def test_what_was_learned_says_what_it_is_for():
    assert repr(STATS) == "ExpectedAttentionStats(layers=3, heads=4, head_dim=8)"
    assert repr(FILTERS) == "QFilters(layers=3, kv_heads=2, head_dim=8)"
    assert repr(MLP) == "KVzapRegressor(layers=3, kv_heads=2, hidden_size=32)"


def same(one, two):
    a, b = one.tensors, two.tensors
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@of_every_kind
def test_what_is_saved_is_loaded(name, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    fit, in_home = FITS[name], "~/other.safetensors"
    beside = fit.save(tmp_path / "new" / "folder")
    alone = fit.save(in_home)
    assert beside == tmp_path / "new" / "folder" / f"{TABLES['file_names'][name]}.safetensors"
    assert alone == tmp_path / "other.safetensors"
    for source in (beside, str(beside.parent), alone, str(alone), in_home, "~/new/folder"):
        assert same(type(fit).load(source), fit)
    assert beside.stat().st_mode & 0o044, "as readable as any file"
    with safe_open(beside, framework="pt") as file:
        metadata = file.metadata()
    about = {"kind": fit.kind, "version": 1, "model": fit.sizes}
    assert {key: json.loads(text) for key, text in metadata.items()} == {"hook-or-patch": about}


def test_what_cannot_be_written_is_told_with_its_path(tmp_path):
    (tmp_path / "folder").touch()
    with pytest.raises(CalibrationError, match=r"folder/qfilters\.safetensors' cannot be written"):
        FILTERS.save(tmp_path / "folder")


def test_a_file_that_changed_is_read_again(tmp_path):
    FILTERS.save(tmp_path)
    QFilters.load(tmp_path)
    changed = QFilters(drawn(LAYERS, KV_HEADS, DIM, seed=9))
    changed.save(tmp_path)
    assert same(QFilters.load(tmp_path), changed)


def test_a_file_beside_it_that_changed_is_read_again(tmp_path):
    about = {"peft_type": "LORA", "r": 2}
    parts = {f"base_model.model.q.lora_{part}.weight": torch.ones(2, 2) for part in "AB"}
    save_file(parts, tmp_path / "adapter_model.safetensors")
    for number in (1, 2):
        embeddings = {"restore_embeddings": torch.full((8, 2), float(number))}
        save_file(embeddings, tmp_path / "restore_embeddings.safetensors")
        (tmp_path / "adapter_config.json").write_text(
            json.dumps({**about, "lora_alpha": 2 * number})
        )
        found = RestoreAdapter.load(tmp_path)
        assert torch.equal(found.embeddings, embeddings["restore_embeddings"])
        assert torch.equal(found.up["q"], torch.full((2, 2), float(number)))


@pytest.mark.parametrize("name", ["filters", "stats", "linear", "mlp", "gates"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_what_is_published_is_read(name, dtype, tmp_path):
    tensors = {key: tensor.to(dtype) for key, tensor in PUBLISHED[name].items()}
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    fit = FITS[name].of({key: tensor.to(dtype) for key, tensor in FITS[name].tensors.items()})
    assert same(type(fit).load(tmp_path), fit)


def test_files_of_something_else_are_refused(tmp_path, monkeypatch):
    path = tmp_path / "model.safetensors"
    with pytest.raises(CalibrationError, match=r"'Q-filters'.*KVzap"):
        KVzapRegressor.load(FILTERS.save(tmp_path))
    save_file({"embed_tokens.weight": torch.zeros(2, 2)}, path)
    with pytest.raises(CalibrationError, match=r"model\.safetensors' .*not Q-filters"):
        FILTERS.save(path)
    monkeypatch.setattr(torch.Tensor, "clone", None)  # not read before it is refused
    for kind in (QFilters, ExpectedAttentionStats, KVzapRegressor):
        with pytest.raises(CalibrationError, match=r"'embed_tokens\.weight'"):
            kind.load(path)
    about = {"hook-or-patch": json.dumps({"kind": "Q-filters", "version": 2})}
    save_file({"directions": torch.zeros(1, 1, 2)}, path, about)
    with pytest.raises(CalibrationError, match=r"version 2.* reads 1"):
        QFilters.load(path)
    for name in ("gate.pt", "gate.bin"):
        (tmp_path / name).touch()
        with pytest.raises(CalibrationError, match=f"{name}' is a pickle"):
            KVzipGates.load(tmp_path / name)


# ---- the hub -------------------------------------------------------------------------------------


class Hub:
    """Stands for `hf_hub_download`: remembers what was asked, and has some files."""

    def __init__(self, monkeypatch, files=None):
        self.files, self.asked = files or {}, list[tuple[str, str, bool]]()
        monkeypatch.setattr(huggingface_hub, "hf_hub_download", self)

    def __call__(self, repo, name, *, local_files_only):
        self.asked.append((repo, name, local_files_only))
        if f"{repo}/{name}" not in self.files:
            raise LocalEntryNotFoundError("check your connection. And more.")
        return str(self.files[f"{repo}/{name}"])


@of_every_kind
def test_a_hub_without_network_is_an_error_that_names_the_id(name, monkeypatch):
    hub = Hub(monkeypatch)
    with pytest.raises(CalibrationError, match=r"'owner/thing'.*no network.*your connection"):
        type(FITS[name]).load("owner/thing")
    asked_online = [asked for asked in hub.asked if not asked[2]]
    assert len(asked_online) == 1, "nobody waits for a dead network twice"


# ---- finding what belongs to a model -------------------------------------------------------------


def looked_for(given, name):
    config = SimpleNamespace() if name is None else SimpleNamespace(name_or_path=name)
    return formulas.QFilter(0.5, given).find(SimpleNamespace(config=config))


@pytest.mark.parametrize(("look", "match"), TABLES["missing"])
def test_what_is_missing_here_is_not_looked_for_on_the_hub(look, match, tmp_path, monkeypatch):
    """Unasked; it is told how to get one."""
    hub, folder = Hub(monkeypatch), tmp_path / "a-model"
    folder.mkdir()
    known = {"QFilters": QFilters, "looked_for": looked_for, "Path": Path, "folder": folder}
    with pytest.raises(CalibrationError, match=match):
        eval(look, known)
    assert not hub.asked


def test_a_model_of_the_hub_gets_what_is_published_or_is_told_how_to_get_one(tmp_path, monkeypatch):
    hub, file = Hub(monkeypatch), "nthngdy/Model-8B_qfilt/model.safetensors"
    with pytest.raises(CalibrationError, match=r"_qfilt'.*company/Model-8B.*QFilter\.fit"):
        looked_for(None, "company/Model-8B")
    save_file({"q_filters": FILTERS.directions}, tmp_path / "model.safetensors")
    hub.files[file] = tmp_path / "model.safetensors"
    assert same(looked_for(None, "company/Model-8B"), FILTERS)


def test_what_is_given_is_taken(tmp_path, monkeypatch):
    path = FILTERS.save(tmp_path)
    Hub(monkeypatch, {"owner/mine/qfilters.safetensors": path})
    for given in (FILTERS, path, str(path), tmp_path, "owner/mine"):
        assert same(looked_for(given, None), FILTERS)
    assert same(looked_for(None, str(tmp_path)), FILTERS), "beside the model"
    STATS.save(tmp_path)
    press = formulas.ExpectedAttentionWithStats(stats_folder=str(tmp_path))
    assert same(press.find(None), STATS)


@pytest.mark.parametrize(("press", "model", "repository"), TABLES["repositories"])
def test_the_repositories_are_those_of_kvpress(press, model, repository, monkeypatch):
    hub = Hub(monkeypatch)
    with pytest.raises(CalibrationError, match=re.escape(repository)):
        eval(press, vars(formulas)).find(
            SimpleNamespace(config=SimpleNamespace(name_or_path=model))
        )
    assert {asked[:2] for asked in hub.asked} == {(repository, "model.safetensors")}
