"""Rotations are the model's own, and can be undone and averaged."""

import copy

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module

from experiments.testbed.families import FAMILIES, NO_ROPE
from press_core import attention_sites
from press_core.tiles import NUMBERS
from tests.press_core.recorded import record
from tests.support import build, rotating

ROPE_FAMILIES = [family for family in FAMILIES if family not in NO_ROPE]


@pytest.mark.parametrize("family", ROPE_FAMILIES)
def test_parts_of_a_long_context_have_the_bits_of_the_whole(family, monkeypatch):
    recorded = record(family, 7, torch.float32)
    rotary, cos_sin = recorded.site.rotary, recorded.position_embeddings
    turns = (rotary.rotate, rotary.unrotate)
    whole = [turn(recorded.query, *cos_sin) for turn in turns]
    monkeypatch.setitem(NUMBERS, "cpu", 4 * recorded.query[:, :, :3].numel())  # 3, 3 and 1
    for turn, expected in zip(turns, whole, strict=True):
        assert torch.equal(turn(recorded.query, *cos_sin), expected)


def test_unrotate_undoes_the_scale_of_yarn():
    rotary = _llama_rotary("yarn", factor=8.0, original_max_position_embeddings=64)
    x = torch.randn(1, 2, 9, 8)
    cos, sin = rotary.embeddings(x, torch.arange(9)[None])
    assert (cos.square() + sin.square() > 1.1).all()  # scaled: not a rotation alone
    torch.testing.assert_close(rotary.unrotate(rotary.rotate(x, cos, sin), cos, sin), x)


@pytest.mark.parametrize("family", ROPE_FAMILIES)
def test_the_average_is_the_mean_of_all_rotations(family):
    site = attention_sites(build(family, num_layers=1, attn_implementation="eager"))[0]
    rotary = site.rotary
    x, start = torch.randn(2, 4, 16), torch.tensor([[5], [40]])

    average = rotary.average(x, start, 30)

    assert average.shape == (2, 1, 16, 16)
    of_layer = () if rotary.layer_type is None else (rotary.layer_type,)
    for row in range(2):
        total = torch.zeros(4, 16)
        for position in range(30):
            at = torch.tensor([[int(start[row, 0]) + position]])
            cos, sin = rotary.embedding(x, at, *of_layer)
            total += rotary.rotate(x[row][None, :, None], cos, sin)[0, :, 0]
        torch.testing.assert_close(x[row] @ average[row, 0].mT, total / 30, atol=1e-5, rtol=1e-4)


def test_a_layer_of_its_own_kind_gets_its_own_frequencies():
    recorded = record("gemma3_text", 7)  # sliding and full layers differ in their base frequency
    cos, sin = recorded.site.rotary.embeddings(recorded.query, torch.arange(7)[None])
    given = recorded.position_embeddings
    assert torch.equal(cos, given[0])
    assert torch.equal(sin, given[1])


@pytest.mark.parametrize("dispatched", [False, True])
def test_asking_for_far_positions_leaves_no_trace_on_the_model(dispatched):
    rotary = _llama_rotary("dynamic", factor=2.0)
    if dispatched:  # accelerate assigns it a forward
        add_hook_to_module(rotary.embedding, ModelHook())
    x = torch.zeros(1, 8)
    before = copy.deepcopy([*rotary.embedding.buffers()])
    near = rotary.embeddings(x, torch.arange(4)[None])
    rotary.average(x, torch.tensor([[100_000]]), 8)
    assert all(torch.equal(a, b) for a, b in zip(rotary.embedding.buffers(), before, strict=True))
    again = rotary.embeddings(x, torch.arange(4)[None])
    assert all(torch.equal(a, b) for a, b in zip(near, again, strict=True))


def _llama_rotary(rope_type, **parameters):
    model = rotating(build("llama", num_layers=1, head_dim=8), rope_type, **parameters)
    return attention_sites(model)[0].rotary
