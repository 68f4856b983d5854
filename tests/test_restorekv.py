"""RestoreKV: what joins the cache, what the adapter touches, and how it is learned."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from safetensors.torch import save_file
from transformers import DynamicCache, integrations

import hooks_impl
from experiments.testbed.recipes import PROMPTS
from press_core import RaggedLayer, kept_lengths, kept_positions
from press_core.errors import HyperparameterError, UnsupportedModelError
from press_core.learned.calibration import CalibrationError
from press_core.learned.restorekv import RestoreAdapter, distillation_loss, first_adapter
from tests.slow import Whole
from tests.support import both, build, filled, make, token_ids
from tests.test_learned_presses import drawn_adapter

LENGTH = 60


def restoring(package, model, ratio=0.5, **fields):
    fields.setdefault("adapter", drawn_adapter(model))
    return package.RestoreKVPress(ratio, chunk_size=16, prompts=PROMPTS, **fields)


def test_an_adapter_that_was_read_in_inference_mode_may_be_used_with_gradients(package, tmp_path):
    model = build("llama")
    path = drawn_adapter(model).save(tmp_path)
    press, ids = restoring(package, model, adapter=path), token_ids(1, LENGTH)
    with torch.inference_mode():
        expected = filled(model, press, ids)
    with torch.enable_grad(), press(model):
        found = model(ids, use_cache=True).past_key_values
    for layer, other in zip(found.layers, expected.layers, strict=True):
        assert torch.equal(layer.dense()[0], other.dense()[0])


# ---- what joins ----------------------------------------------------------------------------------


def merged(model, adapter):
    """A model of its own whose weights have the adapter in them."""
    other = build("llama", dtype=model.dtype)
    for name, down in adapter.down.items():
        other.model.get_submodule(name).weight += (adapter.up[name] @ down).to(model.dtype)
    return other


def test_what_joins_is_made_by_a_model_with_the_adapter_in_its_weights(package):
    """Over the keys and values of the model without."""
    model, ids = build("llama", dtype=torch.float64), token_ids(1, LENGTH)
    adapter = drawn_adapter(model)
    cache = filled(model, restoring(package, model, adapter=adapter), ids)
    expected = filled(model, None, ids)
    states = adapter.embeddings[None].double()
    merged(model, adapter)(inputs_embeds=states, past_key_values=expected)
    for layer, whole in zip(cache.layers, expected.layers, strict=True):
        for head in range(2):
            keys, values = layer.head(head)
            torch.testing.assert_close(keys[-8:], whole.keys[0, head, -8:], rtol=0, atol=1e-6)
            torch.testing.assert_close(values[-8:], whole.values[0, head, -8:], rtol=0, atol=1e-6)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_later_tokens_see_what_is_left_and_what_joined(package, implementation):
    """As in a model with a plain cache of both, of which each head is shown what it keeps."""
    options = {"attn_implementation": implementation, "dtype": torch.float32}
    model, whole, ids = make(**options), Whole(make(**options)), token_ids(2, LENGTH)
    question, places = token_ids(2, 5, seed=1), LENGTH + torch.arange(5)[None]
    press, cache = restoring(package, model, 0.6), DynamicCache(config=model.config)
    with press(model):
        model(ids, past_key_values=cache)
        kept = [layer.dense() for layer in cache.layers]
        logits = model(question, past_key_values=cache).logits
    whole(ids)
    whole.shown = {}
    layers = enumerate(zip(kept, whole.cache.layers, strict=True))
    for index, ((keys, values, positions), layer) in layers:
        layer.keys = torch.cat((layer.keys, keys[:, :, -8:]), dim=2)
        layer.values = torch.cat((layer.values, values[:, :, -8:]), dim=2)
        joined = range(LENGTH, LENGTH + 8)
        whole.shown[index] = [
            [[p for p in head[:-8] if p >= 0] + [*joined] for head in row]
            for row in positions.tolist()
        ]
    expected = whole(question, position_ids=places)
    torch.testing.assert_close(logits, expected, rtol=0, atol=2e-5)


def test_ratios_that_leave_no_room_leave_what_restores(package):
    model = build("llama")
    for length, ratio in ((20, 0.9), (LENGTH, 0.99), (8, 0.9)):  # 8 tokens restore
        cache = filled(model, restoring(package, model, ratio), token_ids(1, length))
        assert {int(n) for x in kept_lengths(cache) for n in x.flatten()} == {8}
    assert kept_positions(cache)[0][0, 0].tolist() == list(range(8))
    model(token_ids(1, 1), past_key_values=cache)  # a whole context is like any other


# ---- what is touched -----------------------------------------------------------------------------


@both
def test_adapters_of_peft_go_on(package):
    peft = pytest.importorskip("peft", minversion=integrations.peft.MIN_PEFT_VERSION)
    torch.manual_seed(0)
    model = build("llama")
    adapter = drawn_adapter(model)
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model.add_adapter(config, "own")
    ids = token_ids(1, LENGTH)
    expected = model(ids).logits
    active = model.active_adapters()
    cache = filled(model, restoring(package, model, adapter=adapter), ids)
    assert isinstance(cache.layers[0], RaggedLayer)
    assert model.active_adapters() == active == ["own"]
    assert torch.equal(model(ids).logits, expected)


# ---- learning ------------------------------------------------------------------------------------


def divergence(model, package, adapter, rows):
    press = restoring(package, model, 0.6, adapter=adapter)
    losses = [distillation_loss(model, press, row[:, :-12], row[:, -12:]) for row in rows]
    return float(torch.stack(losses).mean())


def test_what_is_learned_brings_predictions_closer():
    model = build("llama")
    rows = [token_ids(1, LENGTH, seed) for seed in range(4)]
    fields = {"n_following": 12, "prompts": PROMPTS, "compression_ratios": (0.6,)}
    started = first_adapter(model, 8, 0)
    learned = hooks_impl.RestoreKVPress.fit(model, rows * 15, n_batches=60, **fields)
    before = divergence(model, hooks_impl, started, rows)
    assert divergence(model, hooks_impl, learned, rows) < 0.8 * before


def test_rows_without_a_context_teach_nothing():
    model, rows = build("llama"), [token_ids(2, 16)]
    with pytest.raises(CalibrationError, match="16 tokens"):
        hooks_impl.RestoreKVPress.fit(model, rows, n_following=8, prompts=PROMPTS)


def test_as_many_batches_are_learned_from_as_asked_for_apart_from_other_threads():
    model, ids, found = build("llama"), token_ids(1, LENGTH), []

    def beside(*_):
        if threading.get_ident() == here:
            found.append(ThreadPoolExecutor(1).submit(filled, model, None, ids).result())

    here, batches = threading.get_ident(), iter([ids] * 3)
    model.model.layers[0].register_forward_hook(beside)
    hooks_impl.RestoreKVPress.fit(model, batches, n_batches=1, prompts=PROMPTS)
    assert len([*batches]) == 2
    assert {cache.get_seq_length() for cache in found} == {LENGTH}
    assert {int(n) for cache in found for n in kept_lengths(cache)[0].flatten()} == {LENGTH}


# ---- files ---------------------------------------------------------------------------------------


def peft_folder(folder, adapter, **config):
    """`adapter` as PEFT has it, of alpha 6 and rank 3."""
    tensors = {}
    for name, down in adapter.down.items():
        tensors[f"base_model.model.model.{name}.lora_A.weight"] = down
        tensors[f"base_model.model.model.{name}.lora_B.weight"] = adapter.up[name] / 2
    save_file(tensors, folder / "adapter_model.safetensors")
    save_file({"restore_embeddings": adapter.embeddings}, folder / "restore_embeddings.safetensors")
    told = {"peft_type": "LORA", "r": 3, "lora_alpha": 6, **config}
    (folder / "adapter_config.json").write_text(json.dumps(told))
    return folder


def test_the_hub_is_asked_once(tmp_path, monkeypatch):
    """And not at every opening of a press."""
    folder, asked, fetched = tmp_path / "snapshot", [], []

    def hf_hub_download(source, name, local_files_only):
        if name not in RestoreAdapter.published_files or (local_files_only and not fetched):
            raise OSError("there is none")
        asked.append(local_files_only)
        if not fetched:
            folder.mkdir()
            peft_folder(folder, drawn_adapter(build("llama")))
        fetched.append(source)
        return str(folder / name)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", hf_hub_download)
    for _ in range(3):
        RestoreAdapter.load("you/yours")
    assert asked == [False] * 3 + [True] * 6, "each file once, and then those that are here"
    assert set(fetched) == {"you/yours"}


@pytest.mark.parametrize(
    "config",
    [{"peft_type": "IA3"}, {"use_dora": True}, {"bias": "all"}, {"rank_pattern": {"a": 1}}],
)
def test_other_adapters_are_refused(tmp_path, config):
    folder = peft_folder(tmp_path, drawn_adapter(build("llama")), **config)
    with pytest.raises(CalibrationError, match="LoRA"):
        RestoreAdapter.load(folder)


@both
@pytest.mark.parametrize("other", [{"head_dim": 8}, {"num_layers": 1}, {"num_kv_heads": 4}])
def test_an_adapter_of_another_model_is_refused(package, other):
    adapter, model = drawn_adapter(build("llama")), build("llama", **other)
    with pytest.raises(UnsupportedModelError, match=r"fit (it|one) to"):
        restoring(package, model, adapter=adapter).register(model)


def test_fields_are_checked():
    with pytest.raises(HyperparameterError, match=r"adapter .*RestoreAdapter"):
        hooks_impl.RestoreKVPress(0.5, adapter=3)
    with pytest.raises(CalibrationError, match=r"must (be|have)"):
        RestoreAdapter(torch.zeros(3), {}, {})
    with pytest.raises(CalibrationError, match=r"must have|needs both"):
        RestoreAdapter(torch.zeros(3, 4), {"a": torch.zeros(1, 4)}, {})
