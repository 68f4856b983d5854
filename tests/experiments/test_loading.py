"""Models by short name, by path and by hub id, and errors that say what to give instead."""

import shutil
from pathlib import Path

import huggingface_hub.constants
import pytest
import torch
from transformers import LlamaForCausalLM
from transformers.utils import logging

from experiments import UserError, loading
from experiments.answers.cells import loaded
from experiments.answers.settings import Settings
from experiments.loading import SHIPPED, ModelNotFoundError, load_model, short_name
from experiments.questions import equivalence
from experiments.testbed.facts import build_tokenizer
from tests.experiments.tiny import CASES, saved
from tests.support import build


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("models") / "tiny", num_layers=1)


def test_a_local_model_is_loaded_as_asked_for(folder):
    model, tokenizer = load_model(str(folder), dtype=torch.bfloat16, attn_implementation="eager")
    assert not model.training
    assert model.config._attn_implementation == "eager"
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert tokenizer.get_vocab() == build_tokenizer().get_vocab()
    expected = build("llama", num_layers=1).to(torch.bfloat16).state_dict()
    loaded = model.state_dict()
    assert all(torch.equal(loaded[name], value) for name, value in expected.items())


def test_defaults_are_float32_and_sdpa(folder):
    model, _ = load_model(str(folder), device="cpu", max_position_embeddings=77)
    assert model.dtype == torch.float32
    assert model.config._attn_implementation == "sdpa"
    assert model.device.type == "cpu"
    assert model.config.max_position_embeddings == 77


def test_a_model_without_sdpa_runs_with_eager_attention(folder, monkeypatch):
    """In sweeps and comparisons, too, unless sdpa is asked for alone."""
    monkeypatch.setattr(LlamaForCausalLM, "_supports_sdpa", False)
    assert load_model(str(folder))[0].config._attn_implementation == "eager"
    assert loaded(Settings(model=str(folder)))[0].config._attn_implementation == "eager"
    for attn, left in (("eager", "sdpa"), ["eager"]), (("sdpa",), ["sdpa"]):
        own = equivalence.Options(model=str(folder), dtype=("float32",), attn=attn)
        assert [cell[2] for cell in equivalence.variants(own)] == left


@pytest.mark.parametrize("enabled", [True, False])
def test_transformers_shows_progress_as_before(folder, enabled):
    before = logging.is_progress_bar_enabled()
    switch = {True: logging.enable_progress_bar, False: logging.disable_progress_bar}
    try:
        switch[enabled]()
        load_model(str(folder))
        assert logging.is_progress_bar_enabled() is enabled
    finally:
        switch[before]()


@pytest.mark.parametrize("name", ["facts-lama", "owner/no-such-model"])
def test_a_name_that_only_the_hub_could_know(name, monkeypatch):
    """Without a network: what was given, and what would have done."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelNotFoundError, match="no network") as caught:
        load_model(name)
    assert name in str(caught.value)
    assert all(shipped in str(caught.value) for shipped in SHIPPED)


@pytest.mark.parametrize(
    "name", ["facts-llama", "TMP", "/no/such/folder", "./here/not/there", "two words", "a/b/c"]
)
def test_a_path_that_holds_no_model_is_not_looked_for_on_the_hub(name, monkeypatch, tmp_path):
    build("llama", num_layers=1).save_pretrained(tmp_path)  # without a tokenizer
    monkeypatch.setattr(loading, "_MODELS", tmp_path)
    hub = loading.AutoModelForCausalLM
    monkeypatch.setattr(hub, "from_pretrained", lambda *_, **__: pytest.fail("asked the hub"))
    name = name.replace("TMP", str(tmp_path))
    with pytest.raises(ModelNotFoundError, match=r"config\.json and a tokenizer") as no:
        load_model(name)
    assert Path(name).name in str(no.value)


@pytest.mark.parametrize(("name", "content", "words"), CASES["broken"])
def test_a_broken_model_is_not_said_to_be_missing(folder, tmp_path, name, content, words):
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=f"{tmp_path}.*{words}") as caught:
        load_model(str(tmp_path))
    assert not isinstance(caught.value, ModelNotFoundError)


@pytest.mark.parametrize("device", ["nonsense", "cuda:99"])
def test_a_device_that_is_not_there(folder, device):
    with pytest.raises(UserError, match=device):
        load_model(str(folder), device=device)


def test_a_model_may_be_spread_over_what_there_is():
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        logits = [load_model("facts-llama", device=d)[0](ids).logits.cpu() for d in (None, "auto")]
    torch.testing.assert_close(*logits)


def test_tables_call_a_model_by_its_last_folder(folder):
    assert short_name(str(folder)) == short_name(f"{folder}/") == "tiny"
    assert short_name("facts-llama") == "facts-llama"
    assert short_name("owner/model") == "owner/model"
