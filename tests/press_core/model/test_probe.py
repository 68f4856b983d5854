"""What a probe finds out about a model, what it refuses, and that it leaves nothing behind."""

import copy
import cProfile
import pstats
import threading
import time
from functools import partial
from operator import attrgetter
from types import MethodType

import pytest
import torch
import transformers
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

import hooks_impl
import patch_impl
from experiments.framework.timing import threads
from experiments.testbed import families
from press_core import UnsupportedModelError, attention_sites, kept_lengths, probe
from press_core.model.rotary import NoRotation
from tests.decoders import tiny_decoder
from tests.support import IS_5_2, filled, ran, rotating, table_beside, unchanged

FACTS = table_beside(__file__, "facts")


def tiny(name):
    if IS_5_2 and name in FACTS["else on 5.2"]:
        pytest.skip(f"{name} of transformers 5.2 {FACTS['else on 5.2'][name]}")
    return tiny_decoder(name)


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch):
    monkeypatch.setattr(probe, "_known", probe.weakref.WeakKeyDictionary())


# ---- what it finds -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FACTS["known"])
def test_what_is_known_of_a_model(name):
    for site in attention_sites(tiny(name)):
        expected = FACTS["known"][name]
        found = {of: attrgetter(of)(site) for of in expected}
        assert {of: list(x) if isinstance(x, tuple) else x for of, x in found.items()} == expected


def test_layers_without_positions_are_told_from_those_that_rotate():
    rotations = [type(site.rotary) for site in attention_sites(tiny("smollm3"))]
    assert [kind is NoRotation for kind in rotations] == [False, False, False, True]
    assert all(type(site.rotary) is NoRotation for site in attention_sites(tiny("cohere2")))


@pytest.mark.parametrize("name", ["glm4v", "ernie4_5_vl_moe", "qwen3_vl"])
def test_positions_in_three_dimensions(name):
    """Cosines and sines at positions of one's own are those that the model makes of them."""
    (site, *_) = attention_sites(tiny(name))
    assert "rope" not in site.refusals
    assert site.rotary is not None
    cos, _ = site.rotary.embeddings(torch.zeros(1), torch.arange(7)[None])
    assert cos.shape[:2] == (1, 7)


@pytest.mark.parametrize(("name", "need"), FACTS["refused"].items())
def test_what_a_model_does_not_do_is_refused_by_need(name, need):
    for site in attention_sites(tiny(name)):
        assert need in site.refusals
        if name == "nanochat":  # its norm, without weights, commutes with rotations
            assert "rope" not in site.refusals


def test_sites_are_named_and_tell_the_implementation_in_force():
    model = tiny("llama")
    sites = attention_sites(torch.compile(model))  # are those of the model that it compiles
    assert [site.name for site in sites] == [f"model.layers.{i}.self_attn" for i in range(4)]
    assert all(site.module is model.get_submodule(site.name) for site in sites)
    for implementation in ("eager", "sdpa"):
        model.set_attn_implementation(implementation)
        assert sites[0].attn_implementation == implementation


# ---- what it leaves ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "gemma2", "cohere2", "jamba", "bart (seq2seq)"])
def test_a_probe_leaves_nothing_behind(name):
    model = tiny(name)
    model.train()
    random_state = torch.get_rng_state()
    with unchanged(model):
        attention_sites(model)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert model.training


def test_a_probe_leaves_no_attribute_that_a_first_forward_sets():
    scaled = {"original_max_position_embeddings": 32, "short_factor": 8 * [1.0]}
    model = rotating(families.build("llama"), "longrope", long_factor=8 * [2.0], **scaled)
    with unchanged(model):
        hooks_impl.KnormPress(0.5).register(model).remove()


def test_a_probe_undoes_what_hooks_of_others_do():
    model = tiny("llama")
    layer = model.model.layers[1]
    layer.register_buffer("count", torch.zeros(1))

    def counting(module, *_):
        module.count += 1

    layer.register_forward_hook(counting)
    attention_sites(model)
    assert not layer.count.any()


@pytest.mark.parametrize("package", [hooks_impl, patch_impl])
def test_a_probe_leaves_what_other_threads_patch_meanwhile(package):
    """A decode step of another thread takes them off its layers, and a prefill puts them back."""
    model, ids = tiny("llama"), torch.arange(40)[None]

    def off_and_on():
        filled(model, None, ids[:, :1], filled(model, None, ids))
        filled(model, None, ids)

    with package.KnormPress(0.5)(model):
        with probe.watching.as_if_nothing_happened(model):
            thread = threading.Thread(target=off_and_on)
            thread.start()
            thread.join()
        found = kept_lengths(filled(model, None, ids))
        assert all(bool((lengths == 20).all()) for lengths in found)


def test_a_profiler_goes_on_behind_a_probe():
    """What it has seen of the calls around the probe ends there; later ones are counted."""
    model, profiler = tiny("llama"), cProfile.Profile()

    def behind():
        pass

    profiler.enable()
    with hooks_impl.KnormPress(0.5)(model):
        behind()
    profiler.disable()
    called = {name: n for (_, _, name), (n, *_) in pstats.Stats(profiler).stats.items()}
    assert called["behind"] == 1


def test_a_model_is_run_once_per_class_and_configuration():
    model, calls = tiny("llama"), 0

    def count(*_):
        nonlocal calls
        calls += 1

    model.model.layers[0].self_attn.q_proj.register_forward_hook(count)
    twin = copy.deepcopy(model)
    attention_sites(model)
    first = calls
    assert first > 0
    with hooks_impl.KnormPress(0.5)(model):
        attention_sites(model)
    (site, *_) = attention_sites(twin)
    assert calls == first
    assert site.rotary.embedding is twin.model.rotary_emb
    twin.config.rope_parameters = {**twin.config.rope_parameters, "rope_theta": 5.0}
    attention_sites(twin)
    assert calls > first


def test_a_changed_attention_is_probed_anew():
    model = tiny("llama")
    attention_sites(model)
    attention = model.model.layers[0].self_attn
    attention.q_proj = nn.Sequential(attention.q_proj, Halved())
    (site, *_) = attention_sites(model)
    assert site.query_module is attention.q_proj
    model.config._attn_implementation = "eager"
    model.model.layers[0].self_attn.forward = lambda *_, **__: None
    probe._known.clear()
    with pytest.raises(UnsupportedModelError, match="could not be verified"):
        attention_sites(model)


def test_models_in_a_wrapper_without_a_configuration_are_told_apart():
    few, many = (families.build("llama", num_heads=2 * n, num_kv_heads=n) for n in (2, 4))
    sites = [attention_sites(nn.Sequential(model))[0] for model in (few, many)]
    assert [(site.num_heads, site.num_kv_heads) for site in sites] == [(4, 2), (8, 4)]


def test_what_depends_on_weights_is_found_anew_when_they_are_loaded():
    """Qwen3 has norms of keys that are all ones until they are trained."""
    trained, model = families.build("qwen3"), families.build("qwen3")
    weights = trained.state_dict()
    for module in model.modules():
        if "RMSNorm" in type(module).__name__:
            nn.init.ones_(module.weight)
    assert "key norms" in attention_sites(model)[0].refusals
    model.load_state_dict(weights)
    assert not attention_sites(model)[0].refusals
    zeros = families.build("llama")
    for parameter in zeros.parameters():
        nn.init.zeros_(parameter)
    with pytest.raises(UnsupportedModelError, match="not loaded"):
        attention_sites(zeros)


def test_a_model_that_could_not_be_run_once_is_run_again():
    model = tiny("llama")
    failing = model.model.layers[1].mlp.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(UnsupportedModelError, match="ZeroDivisionError"):
        attention_sites(model)
    failing.remove()
    model.half().model.layers[0].self_attn.o_proj.weight.mul_(1e8)  # more than float16 holds
    with pytest.raises(UnsupportedModelError, match=r"NaN or infinity in torch\.float16"):
        attention_sites(model)
    model.float().model.layers[0].self_attn.o_proj.weight.fill_(0.1)
    model.config.attention_dropout = model.model.layers[0].self_attn.attention_dropout = 0.5
    model.train()
    assert not attention_sites(model)[0].refusals


class Halved(nn.Module):
    def forward(self, x):
        return x / 2


def test_open_scopes_take_no_part():
    """A press that is open already does not prune what the probe of another runs over."""
    model = tiny("llama")
    outer = patch_impl.KnormPress(0.5).register(model)
    probe._known.clear()
    inner = hooks_impl.SnapKVPress(0.25, window_size=4).register(model)
    assert all(not site.refusals for site in attention_sites(model))
    assert not outer.state.tally.n_forwards
    assert not inner.state.tally.n_forwards
    inner.remove()
    outer.remove()


@pytest.mark.usefixtures("no_graphs_after")
def test_a_model_that_is_compiled_is_run_as_it_was_written():
    model = tiny("llama")
    model.compile(backend="eager")
    (site, *_) = attention_sites(model)
    assert not site.refusals


def test_a_probe_of_a_small_model_is_quick():
    """Under 100 ms of processor time; the best of several, as caches warm."""
    model, times = tiny("llama"), []
    for _ in range(8):
        probe._known.clear()
        with threads(1):  # others spin while they wait, which counts
            begin = time.process_time()
            attention_sites(model)
            times.append(time.process_time() - begin)
    assert min(times) < 0.1


# ---- layers beside those that are pruned ---------------------------------------------------------


def test_a_bare_cache_slides_where_the_model_does(package):
    model = tiny("qwen2 (sliding)")
    cache = filled(model, package.KnormPress(0.5), torch.arange(5, 45)[None], DynamicCache())
    assert [int(kept[0, 0]) for kept in kept_lengths(cache)] == [20, 15, 20, 15]
    assert [layer.is_sliding for layer in cache.layers] == [False, True, False, True]


def test_layers_beside_that_keep_all_tokens_share_no_mask():
    """Under eager attention, a trial finds it out, too."""
    model = tiny("minimax_m3_vl_text (sparse)")
    model.set_attn_implementation("sdpa")
    assert all("tokens" in site.refusals for site in attention_sites(model))


def test_positions_that_do_not_go_on_behind_the_cache_are_known():
    model = tiny("llama")
    assert not any(site.place.keeps_count for site in attention_sites(model))
    model.__class__ = FromZero
    assert all(site.place.keeps_count for site in attention_sites(model))


class FromZero(transformers.LlamaForCausalLM):
    """Counts positions as if every forward were the first; Bamba does."""

    def forward(self, input_ids, **kwargs):
        kwargs.setdefault("position_ids", torch.arange(input_ids.shape[1])[None])
        return super().forward(input_ids, **kwargs)


@pytest.mark.parametrize("package", [hooks_impl, patch_impl])
def test_an_attention_function_names_its_parameters_as_it_likes(package, monkeypatch):
    def own(module, query, key, value, attention_mask, **further):
        return sdpa_attention_forward(module, query, key, value, attention_mask, **further)

    model = families.build("llama")
    for registry, function in ((AttentionInterface, own), (AttentionMaskInterface, sdpa_mask)):
        monkeypatch.setitem(registry._global_mapping, "own", function)
    model.set_attn_implementation("own")
    for press in (package.SnapKVPress(0.5, 4), package.AdaKVPress(package.KnormPress(0.5))):
        cache = filled(model, press, torch.arange(5, 45)[None])
        assert kept_lengths(cache)[0].sum() == 40


def test_a_forward_that_is_replaced_is_probed_again(monkeypatch):
    """Of a module or of its class, and whatever the function is called."""
    model = families.build("llama")
    attention = model.model.layers[0].self_attn
    replaced = (attention, MethodType(backwards, attention)), (type(attention), backwards)
    for owner, forward in replaced:
        assert "rope" not in attention_sites(model)[0].refusals
        with monkeypatch.context() as patch:
            patch.setattr(owner, "forward", forward)
            assert "rope" in attention_sites(model)[0].refusals


def backwards(self, hidden_states, position_embeddings, **given):
    cos, sin = position_embeddings
    return UNPATCHED(self, hidden_states, (cos, -sin), **given)


UNPATCHED = transformers.models.llama.modeling_llama.LlamaAttention.forward


def test_layers_that_share_the_module_that_computes_their_queries():
    model = families.build("llama")
    first, second = (layer.self_attn for layer in model.model.layers)
    second.q_proj = first.q_proj
    presses = (package.SnapKVPress(0.5, 4) for package in (hooks_impl, patch_impl))
    by_hooks, by_patches = (filled(model, press, torch.arange(5, 45)[None]) for press in presses)
    for one, other in zip(by_hooks.layers, by_patches.layers, strict=True):
        assert torch.equal(one.keys, other.keys)


def test_an_attention_that_calls_the_one_it_inherits_from():
    """First it rotates by what it is given, then by itself, which looks like no rotation."""
    model = tiny("llama")
    for layer in model.model.layers:
        layer.self_attn.__class__ = Inheriting
    assert all(not site.refusals and site.num_heads == 4 for site in attention_sites(model))
    assert all(site.signature.hands_on for site in attention_sites(model))
    for layer in model.model.layers:
        layer.self_attn.rotary = copy.deepcopy(model.model.rotary_emb)
        layer.register_forward_pre_hook(
            lambda _, args, given: (args, {**given, "position_embeddings": None}), with_kwargs=True
        )
    assert all("rope" in site.refusals for site in attention_sites(model))


class Inheriting(transformers.models.llama.modeling_llama.LlamaAttention):
    def forward(self, **given):
        rotate = getattr(self, "rotary", lambda *_: given["position_embeddings"])
        angles = rotate(given["hidden_states"], given["position_ids"])
        return super().forward(**{**given, "position_embeddings": angles})


def test_a_model_that_masks_single_tokens_too(package, monkeypatch):
    """Under sdpa, where those of transformers do not."""
    modeling = transformers.models.llama.modeling_llama
    always = partial(modeling.create_causal_mask, and_mask_function=lambda b, h, q, k: q >= k)
    model, ids = families.build("llama", attn_implementation="sdpa"), torch.arange(5, 46)[None]
    press = package.PyramidKVPress(0.5, 4, beta=4)
    logits = []
    for make_mask in (modeling.create_causal_mask, always):
        monkeypatch.setattr(modeling, "create_causal_mask", make_mask)
        probe._known.clear()
        cache = filled(model, press, ids[:, :-1])
        logits += ran(model, press, [ids[:, -1:]], cache)[1]
    torch.testing.assert_close(*logits)
