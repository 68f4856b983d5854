"""The promises that only a GPU can test: `pytest -m gpu`."""

import pytest
import torch
from torch._inductor.cudagraph_trees import CUDAGraphTreeManager
from transformers import DynamicCache
from transformers.utils import is_flash_attn_2_available

import hooks_impl
from experiments.testbed.recipes import DELIMITER
from tests.support import GREEDY, PACKAGES, both, build, example_for, left_padded, ran, token_ids

pytestmark = pytest.mark.gpu


def assert_same(left, right):
    for one, other in zip(left.layers, right.layers, strict=True):
        assert torch.equal(one.keys.cuda(), other.keys.cuda())
        assert torch.equal(one.values.cuda(), other.values.cuda())


@pytest.mark.parametrize("name", sorted(hooks_impl.PRESSES))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("implementation", ["sdpa", "eager", "flash_attention_2"])
def test_mechanisms_agree_bit_for_bit(name, dtype, implementation):
    if implementation == "flash_attention_2":
        if not is_flash_attn_2_available():
            pytest.skip("needs the package flash-attn")
        if dtype == torch.float32:
            pytest.skip("flash-attn has no float32 kernel")
    model = build("llama", head_dim=64, dtype=dtype, attn_implementation=implementation).cuda()
    ids, mask, positions = left_padded(3, 200, [0, 30, 77])
    ids[:, -8] = DELIMITER if name == "FinchPress" else ids[:, -8]
    inputs = {"attention_mask": mask.cuda(), "position_ids": positions.cuda()}
    presses = [example_for(package, name, 0.5, model) for package in PACKAGES]
    runs = [ran(model, press, [ids.cuda()], **inputs) for press in presses]
    caches, logits = zip(*runs, strict=True)
    assert_same(*caches)
    assert torch.equal(*(of_prefill for (of_prefill,) in logits))


@both
@pytest.mark.parametrize("name", ["KnormPress", "SnapKVPress", "ExpectedAttentionPress"])
def test_an_offloaded_cache_keeps_the_same(package, name):
    model, ids = build("llama", num_layers=4).cuda(), token_ids(2, 200).cuda()
    press = example_for(package, name, 0.5, model)
    caches = DynamicCache(config=model.config), DynamicCache(config=model.config, offloading=True)
    plain, offloaded = (ran(model, press, [ids], cache)[0] for cache in caches)
    assert_same(plain, offloaded)
    after = [model(ids[:, :3], past_key_values=cache).logits for cache in (plain, offloaded)]
    assert torch.equal(*after)


@both
@pytest.mark.parametrize("name", ["KnormPress", "AdaKVPress", "PyramidKVPress"])
@pytest.mark.parametrize("padding", [0, 30])
def test_cuda_graphs_are_recorded_once(package, name, padding, monkeypatch):
    """In `generate`, which compiles decoding from static caches with `mode="reduce-overhead"`."""
    if torch.__version__ < (2, 13):
        pytest.skip("needs torch 2.13, which compiles patches and head-wise caches whole")
    recorded, record = [], CUDAGraphTreeManager.record_function
    counted = lambda *args: recorded.append(args) or record(*args)  # noqa: E731
    monkeypatch.setattr(CUDAGraphTreeManager, "record_function", counted)
    model, (ids, mask, _) = build("llama", head_dim=64).cuda(), left_padded(2, 200, [padding, 0])
    given = {"attention_mask": mask.cuda(), "max_new_tokens": 24} | GREEDY
    with example_for(package, name, 0.5, model)(model):
        expected = model.generate(ids.cuda(), **given)
        found = model.generate(ids.cuda(), cache_implementation="static", **given)
    assert torch.equal(expected, found)
    assert len(recorded) == 1


def test_random_numbers_are_those_of_the_cpu():
    model, ids = build("llama"), token_ids(1, 100)
    press = example_for(hooks_impl, "RandomPress", 0.5, model)
    (on_cpu, _), (on_gpu, _) = ran(model, press, [ids]), ran(model.cuda(), press, [ids.cuda()])
    assert torch.equal(on_cpu.layers[0].positions, on_gpu.layers[0].positions.cpu())
