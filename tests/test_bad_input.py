"""What a press cannot do is a clear error, and leaves nothing behind."""

from dataclasses import MISSING, fields, replace
from fractions import Fraction

import numpy
import pytest
import torch
from torch import nn
from transformers import DynamicCache

import hooks_impl
import patch_impl
from experiments.testbed.recipes import DELIMITER
from press_core import (
    HyperparameterError,
    PressError,
    Tokens,
    UnsupportedInputError,
    UnsupportedModelError,
    attention_sites,
    kept_lengths,
    prefill,
)
from tests import support
from tests.decoders import tiny_decoder
from tests.presses import TABLES, listed, read_press

TOLD_A_RATIO = sorted(
    name
    for name, press in hooks_impl.PRESSES.items()
    if "compression_ratio" in press.__dataclass_fields__
)


@support.both
@pytest.mark.parametrize("ratio", [-0.1, 1.0, 1.5, float("nan")])
@pytest.mark.parametrize("name", TOLD_A_RATIO)
def test_ratio_outside_of_its_range(package, ratio, name):
    with pytest.raises(HyperparameterError, match=r"compression_ratio .*\[0, 1\)"):
        package.PRESSES[name](compression_ratio=ratio)


WITHIN = listed("within")
REFUSED = support.table_beside(__file__, "refusals")


@support.both
@pytest.mark.parametrize("text", REFUSED)
def test_presses_that_cannot_be_made(package, text):
    names = {name: make(package) for name, make in WITHIN.items() if name in text}
    names["other"] = support.PACKAGES[package is hooks_impl].KnormPress(0.5)
    with pytest.raises(HyperparameterError, match=REFUSED[text]):
        read_press(text, package, **names)


MADE_OF_ONE_FIELD = [
    name
    for name, press in hooks_impl.PRESSES.items()
    if sum(f.default is MISSING and f.default_factory is MISSING for f in fields(press)) <= 1
]


@support.both
@pytest.mark.parametrize("name", MADE_OF_ONE_FIELD)
def test_a_model_in_place_of_a_press_made(package, name):
    """`with KnormPress(model): ...`, for which parentheses are missing."""
    with pytest.raises(HyperparameterError, match=rf"{name}\(\.\.\.\)\(model\)"):
        package.PRESSES[name](support.build("llama"))


def test_numbers_of_numpy_and_fractions_are_numbers(package):
    press = package.RKVPress(numpy.float16(0.5), numpy.uint8(4), 7, numpy.float64(0.5))
    assert [type(x) for x in vars(press).values()] == [float, int, int, float, float, int]
    assert press.with_ratio(Fraction(1, 3)).compression_ratio == 1 / 3
    assert (-press.window_size, 2 * Tokens(numpy.int8(100)).n) == (-4, 200)
    model, ids, caches = support.build("llama"), support.token_ids(1, 20), []
    for seed, n in ((100, 6), (numpy.int8(100), numpy.int64(6))):
        caches.append(DynamicCache(config=model.config))
        with package.RandomPress(0.5, seed)(model):
            prefill(model, ids, caches[-1], n)
    assert support.held(caches[0]) == support.held(caches[1])
    for n in (0, True, 2.5):
        with pytest.raises(HyperparameterError, match=f"chunk_size={n}: .* 1 or more"):
            prefill(model, ids, DynamicCache(), n)


@support.both
@pytest.mark.parametrize("wrapped", [False, True])
def test_a_field_changed_for_the_worse(package, wrapped):
    """Checked again when a scope opens, before anything is installed."""
    inner = package.KnormPress(0.5)
    press = package.ChunkPress(package.CriticalKVPress(inner)) if wrapped else inner
    inner.compression_ratio = 2.0
    support.assert_refused(
        press, support.build("llama"), HyperparameterError, r"compression_ratio=2.0"
    )


@support.both
@pytest.mark.parametrize("changed", TABLES["changed_for_the_worse"], ids=str)
def test_a_field_changed_for_the_worse_between_steps(package, changed):
    """Checked again before any layer gets the tokens of a step that prunes."""
    base, model, (name,) = package.SnapKVPress(window_size=4), support.build("llama"), changed
    press = package.DecodingPress(base, compression_interval=2, target_size=12)
    with press(model):
        cache, _ = support.ran(model, None, [support.token_ids(1, 20)])
        vars(base if hasattr(base, name) else press).update(changed)
        with pytest.raises(PressError, match=f"{name}|has changed"):
            support.ran(model, None, [support.token_ids(1, 1)] * 2, cache)
    assert {int(n) for kept in kept_lengths(cache) for n in kept[0]} <= {20, 21}


@support.both
def test_a_model_without_attention(package):
    model = nn.Sequential(nn.Linear(4, 4))
    with pytest.raises(UnsupportedModelError, match=r"Sequential .*attention"):
        package.KnormPress(0.5).register(model)
    assert not model[0]._forward_hooks
    with pytest.raises(UnsupportedModelError, match=r"not a str"):
        package.KnormPress(0.5).register("model")


@support.both
def test_a_model_of_sliding_layers_only(package):
    model = tiny_decoder("mistral")
    support.assert_refused(package.KnormPress(0.5), model, UnsupportedModelError, "sliding window")


@support.both
def test_rope_where_there_is_none(package):
    model, finch = support.build("gpt2"), package.FinchPress(delimiter_token_id=1)
    of_layers = package.PerLayerCompressionPress(finch, [0.5, 0.2])
    for press in (package.ExpectedAttentionPress(0.5), of_layers):
        match = rf"{type(press).__name__} .*rotary.*not"
        support.assert_refused(press, model, UnsupportedModelError, match)


def test_a_query_that_no_hook_can_find():
    """The one place where the mechanisms differ in reach: a patch sees the query all the same."""
    model = tiny_decoder("jetmoe")  # experts compute its queries
    hooks, patches = (package.SnapKVPress(0.5, window_size=4) for package in support.PACKAGES)
    support.assert_refused(hooks, model, UnsupportedModelError, "patch_impl")
    cache = support.filled(model, patches, support.token_ids(1, 40))
    assert [int(kept[0, 0]) for kept in kept_lengths(cache)] == [20, 20, 20, 20]
    hooks_impl.KnormPress(0.5).register(model).remove()  # needs no queries: nothing is in the way


@support.both
def test_queries_whose_temperature_is_another_later(package):
    model = tiny_decoder("ministral3")
    for name in ("CapPress", "ExpectedAttentionPress", "ExpectedAttentionStatsPress"):
        press = package.PRESSES[name](0.5)
        support.assert_refused(press, model, UnsupportedModelError, "temperature")
    with pytest.raises(UnsupportedModelError, match="temperature"):
        package.ExpectedAttentionStatsPress.collect(model, [support.token_ids(1, 20)])


@pytest.mark.parametrize("name", sorted(hooks_impl.PRESSES))
def test_never_zero(package, name, model):
    press = support.example_for(package, name, 0.999, model)
    for length in (70,) if name == "FinchPress" else (1, 2, 3, 70):  # which needs a delimiter
        cache = support.filled(model, press, support.context_for(name, length))
        assert all(int(kept.min()) >= 1 for kept in kept_lengths(cache))


def test_queries_that_no_patch_can_see():
    """The other way round: GPT-2 can be told to attend by itself, past the registry."""
    model = support.build("gpt2", attn_implementation="eager")
    for block in model.transformer.h:
        block.attn.reorder_and_upcast_attn = True
    support.assert_refused(patch_impl.TOVAPress(0.5), model, UnsupportedModelError, "hooks_impl")
    cache = support.filled(model, hooks_impl.TOVAPress(0.5), support.token_ids(1, 40))
    assert [int(kept[0, 0]) for kept in kept_lengths(cache)] == [20, 20]


@support.both
def test_a_bias_on_logits_is_no_padding(package):
    """A mask in the prefill that changes how much is seen of tokens, and hides none."""
    model = support.build("llama", attn_implementation="eager")
    least = torch.finfo(torch.float32).min
    mask = torch.full((60, 60), least).triu(1)[None, None]
    with package.KnormPress(0.5)(model):
        model(support.token_ids(1, 60), attention_mask=mask, past_key_values=DynamicCache())
        mask[..., :30] += mask[..., :30].eq(0) * -0.01
        with pytest.raises(UnsupportedInputError, match="logits"):
            model(support.token_ids(1, 60), attention_mask=mask, past_key_values=DynamicCache())


@support.both
def test_padding_on_the_right(package):
    mask = torch.ones(2, 40, dtype=torch.long)
    mask[1, -5:] = 0
    press = package.SnapKVPress(0.5, window_size=8)
    with pytest.raises(UnsupportedInputError, match="row 1"):
        support.filled(support.build("llama"), press, support.token_ids(2, 40), attention_mask=mask)


@support.both
@pytest.mark.parametrize("ratios", [[0.5], [0.5, 0.2, 0.1]])
def test_a_ratio_for_each_layer_and_no_more(package, ratios):
    model, match = support.build("llama"), f"{len(ratios)} .* 2 layers"
    press = package.PerLayerCompressionPress(package.KnormPress(), ratios)
    support.assert_refused(press, model, PressError, match)
    refused = pytest.raises(PressError, match=match)
    with replace(press, compression_ratios=[0.5, 0.2])(model) as scope, refused:
        scope.press.compression_ratios = ratios
        model(support.token_ids(1, 20))


def quantized(model):
    attention_sites(model)  # runs it, which needs the weights
    projection = model.model.layers[1].self_attn.o_proj
    codes = projection.weight.to(torch.int8)
    projection.weight = torch.nn.Parameter(codes, requires_grad=False)
    return model


def adapted(model):
    peft = pytest.importorskip("peft", reason="needs peft")
    return peft.get_peft_model(model, peft.LoraConfig(target_modules=["o_proj"]))


@support.both
@pytest.mark.parametrize("change", [quantized, adapted])
@pytest.mark.parametrize("name", ["CriticalKVPress", "CriticalAdaKVPress"])
def test_output_projections_without_weights_to_read_are_refused(package, name, change, model):
    press = package.PRESSES[name](package.KnormPress(0.5))
    support.assert_refused(press, change(model), UnsupportedModelError, "floating-point")


@support.both
def test_finch_knows_which_column_of_a_padded_batch_is_the_delimiter(package):
    model, (ids, mask, positions) = support.build("llama"), support.left_padded(2, 40, [9, 0])
    ids[:, -6] = DELIMITER
    finch = package.FinchPress(0.5, delimiter_token_id=DELIMITER)
    streaming = package.StreamingLLMDecodingPress(16)
    given = {"attention_mask": mask, "position_ids": positions}
    for whole_or_not in ({}, given):
        with pytest.raises(UnsupportedInputError, match="outermost"):
            support.ran(model, support.nested(streaming, finch), [ids], **whole_or_not)
    with support.nested(finch, streaming)(model):
        cache, _ = support.ran(model, None, [ids], **given)
        wide = torch.cat((mask, torch.ones_like(mask[:, :4])), dim=1)
        with pytest.raises(UnsupportedInputError, match=r"44 columns .* one of 41 columns"):
            support.ran(model, None, [ids[:, :1]], cache, attention_mask=wide)


@support.both
def test_finch_takes_its_delimiter_out_of_masks_of_two_dimensions(package):
    model, ids = support.build("llama"), support.context_for("FinchPress", 48)
    press, logits = support.example_for(package, "FinchPress", 0.5, model), []
    causal = torch.ones(48, 48, dtype=torch.bool).tril()[None, None]
    with press(model), pytest.raises(UnsupportedInputError, match="2-d"):
        model(ids, attention_mask=causal, past_key_values=DynamicCache())
    for dtype, own in ((torch.long, press), (torch.bool, package.ComposedPress([press]))):
        cache, mask = DynamicCache(config=model.config), torch.ones(1, 50, dtype=dtype)
        with own(model):
            model(ids, attention_mask=mask[:, :48], past_key_values=cache)
            logits.append(model(ids[:, :2], attention_mask=mask, past_key_values=cache).logits)
    assert torch.equal(*logits)
