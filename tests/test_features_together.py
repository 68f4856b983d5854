"""Two features at once: what each does alone, they do together, or it is refused."""

from contextlib import suppress
from copy import deepcopy

import pytest
import torch
import transformers
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, StaticCache
from transformers.masking_utils import eager_mask
from transformers.models.llama.modeling_llama import eager_attention_forward

import hooks_impl
import patch_impl
from attention_patch import headwise
from experiments.loading import load_model
from experiments.testbed.recipes import DELIMITER
from press_core import (
    Eviction,
    Needs,
    Phase,
    UnsupportedCacheError,
    UnsupportedInputError,
    UnsupportedModelError,
    kept_lengths,
    kept_positions,
    prefill,
)
from press_core.replay.kvzip import RepeatPrompts
from tests.decoders import tiny_decoder
from tests.presses import TABLES, read_press
from tests.support import (
    GREEDY,
    IS_5_2,
    Latest,
    build,
    filled,
    forwards,
    in_parts,
    left_padded,
    nested,
    ran,
    token_ids,
)

# ---- masks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("press", ["KnormPress(0.5)", "DecodingPress(KnormPress(), 1, 8)"])
def test_a_later_mask_that_adds_to_logits_is_refused(package, press):
    """Also one whose least number is not its dtype's, and before a whole cache is pruned by it."""
    model, press = build("llama"), read_press(press, package)
    hidden = ~torch.ones(4, 24, dtype=torch.bool).tril(20)
    mask = torch.zeros(1, 1, 4, 24).masked_fill(hidden, -1e9)
    cache, positions = filled(model, press, token_ids(1, 20)), torch.arange(20, 24)[None]
    with pytest.raises(UnsupportedInputError, match="adds"):
        ran(model, press, [token_ids(1, 4)], cache, attention_mask=mask, position_ids=positions)


def test_a_mask_of_floats_over_tokens_hides_padding(package):
    model, press = build("llama"), package.StreamingLLMDecodingPress(max_capacity=12)
    ids, mask, positions = left_padded(2, 20, [6, 0])
    longer, logits = torch.cat((mask, torch.ones_like(mask[:, :3])), dim=1), []
    for dtype in (torch.long, torch.float32):
        cache = filled(model, press, ids, attention_mask=mask.to(dtype), position_ids=positions)
        given = {"position_ids": (longer.cumsum(-1) - 1)[:, -3:]}
        given["attention_mask"] = longer.to(dtype)
        logits += ran(model, press, [token_ids(2, 3)], cache, **given)[1]
    assert torch.equal(*logits)


def test_positions_of_one_row_may_stand_for_all(package):
    model, press = build("llama"), package.StreamingLLMDecodingPress(max_capacity=12)
    mask, logits = torch.ones(2, 24, dtype=torch.long), []
    mask[0, 20] = 0
    for rows in (1, 2):
        given = {"attention_mask": mask, "position_ids": torch.arange(20, 24).expand(rows, -1)}
        cache = filled(model, press, token_ids(2, 20))
        logits += ran(model, press, [token_ids(2, 4)], cache, **given)[1]
    assert torch.equal(*logits)


def test_a_mask_that_hides_tokens_is_read_anew_once_a_scope_has_pruned(package):
    model, cache = build("llama"), DynamicCache()
    with package.KnormPress(0.5)(model), package.StreamingLLMDecodingPress(16)(model):
        model(token_ids(1, 40), past_key_values=cache)
        for n in (41, 42):
            mask = (torch.arange(n)[None] != 5).long()
            model(token_ids(1, 1), past_key_values=cache, attention_mask=mask)
    assert kept_lengths(cache)[0].tolist() == [[17, 17]]


def test_a_mask_hides_context_tokens_behind_rerotated_keys(package):
    model, press = build("llama"), package.KeyRerotationPress(package.StreamingLLMPress(0.5))
    cache, _ = ran(model, press, [token_ids(1, 20)])
    without = DynamicCache()
    for index, layer in enumerate(cache.layers):
        without.update(*(x[:, :, [0, *range(2, 10)]] for x in layer.states()), index)
    mask, new = torch.arange(21)[None, None, None] != 1, [token_ids(1, 1)]
    _, found = ran(model, press, new, cache, attention_mask=mask)
    _, expected = ran(model, None, new, without, position_ids=torch.tensor([[10]]))
    torch.testing.assert_close(found, expected)


def test_a_mask_that_was_built_for_a_step_is_not_taken_for_a_callers(package):
    prefilling = package.PerLayerCompressionPress(package.KnormPress(), [0.0, 0.5])
    press = package.PrefillDecodingPress(prefilling, package.DecodingPress(package.KnormPress()))
    model, mask, logits = build("llama"), torch.arange(44)[None] != 5, []
    for own in (mask.long(), (mask & torch.ones(44, 44).tril().bool())[None, None, -3:]):
        with press(model):
            cache, _ = ran(model, None, [token_ids(1, 40), token_ids(1, 1)])
            logits += ran(model, None, [token_ids(1, 3)], cache, attention_mask=own)[1]
    torch.testing.assert_close(*logits)


# ---- models --------------------------------------------------------------------------------------

after_5_2 = pytest.mark.skipif(IS_5_2, reason="transformers 5.2 caches other states")


@after_5_2
@pytest.mark.parametrize(("family", "text"), TABLES["unreadable"])
def test_states_that_a_press_cannot_read_are_refused(package, family, text):
    press = read_press(text, package)
    with pytest.raises(UnsupportedModelError, match=r"latents|rotat"):
        press.register(tiny_decoder(family))


@after_5_2
def test_keys_that_no_model_rotates_are_unrotated(package):
    for family in ("ctrl", "gpt2"):
        package.LeverageScorePress(0.5).register(tiny_decoder(family)).remove()


@after_5_2
def test_finch_decodes_beside_layers_without_a_length(package):
    model, ids = tiny_decoder("jamba"), token_ids(1, 40)
    ids[:, -8] = DELIMITER
    press = package.FinchPress(0.5, rerotate_keys=False, delimiter_token_id=DELIMITER)
    ran(model, press, [ids, token_ids(1, 1)])


def test_a_cache_that_no_press_prunes_is_told_and_left_alone():
    quantized = getattr(transformers.cache_utils, "Fp8QuantizedLayer", None)
    if quantized is None:
        pytest.skip("this transformers has no cache in fp8")
    model, cache = build("llama"), transformers.QuantizedCache("fp8", build("llama").config)
    filled(model, headwise, token_ids(1, 8), cache)
    assert kept_lengths(cache)[0].tolist() == [[8, 8]]
    assert kept_positions(cache)[0].tolist() == [[[*range(8)]]]
    with pytest.raises(UnsupportedCacheError, match="QuantizedCache of quanto or hqq"):
        filled(model, hooks_impl.KnormPress(0.5), token_ids(1, 8), type(cache)("fp8", model.config))


def test_a_model_of_anybodys_is_refused_in_words():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    model.config = {"n_layer": 1}
    with pytest.raises(UnsupportedModelError):
        hooks_impl.KnormPress(0.5).register(model)


# ---- chat templates ------------------------------------------------------------------------------


def test_prompts_that_repeat_a_context_are_those_of_its_template(package):
    """Without thinking; what comes before it is kept where it is there, and not elsewhere."""
    model, tokenizer = load_model("facts-llama")
    tokenizer.chat_template = "alice {{ messages[0].content }} bob{% if not enable_thinking %} tea"
    tokenizer.chat_template += "{% endif %}"
    prompts = RepeatPrompts.from_tokenizer(tokenizer)
    ids = tokenizer.encode("alice bob tea", add_special_tokens=False)
    assert (prompts.prefix, prompts.suffix) == (ids[:1], ids[1:])
    press = package.KVzipPress(0.75, layerwise=True, n_sink=0, prompts=prompts)
    context, always = token_ids(1, 40), []
    for first in (ids[0], ids[1]):
        context[0, 0] = first
        kept = kept_positions(filled(model, press, context))
        always.append(all(0 in head for layer in kept for head in layer[0]))
    assert always == [True, False]


# ---- draft tokens --------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [21, 41])
def test_draft_tokens_behind_turned_keys_are_right_or_refused(package, n):
    """Of 41 tokens the cache has seen 40, and counts 20."""
    model, ids, found = build("llama"), token_ids(1, 41), []
    ids[:, 40] = ids[:, 10]
    press = package.KeyRerotationPress(package.KnormPress(0.5))
    for given, more in ((ids[:, -21:], {}), (ids[:, -n:], {"assistant_model": model})):
        with press(model), suppress(UnsupportedInputError):
            cache = filled(model, None, ids[:, :40])
            more |= GREEDY | {"max_new_tokens": 8, "past_key_values": cache}
            found.append(model.generate(given, attention_mask=torch.ones_like(given), **more))
    assert all(torch.equal(x[:, -8:], found[0][:, -8:]) for x in found)


@pytest.mark.skipif(IS_5_2, reason="in transformers 5.2 Phi-3 goes by positions, and goes on")
def test_a_cache_that_generate_leaves_out_is_refused(package):
    """Phi-3 begins anew where its frequencies change, by the tokens that the cache counts."""
    scaled = {"original_max_position_embeddings": 28, "short_factor": 8 * [1.0]}
    known = {"rope_type": "longrope", "rope_theta": 1e4, "long_factor": 8 * [2.0]} | scaled
    config = {"original_max_position_embeddings": 28, "rope_parameters": known}
    model = tiny_decoder("phi3", fields=config)
    press = package.KeyRerotationPress(package.KnormPress(0.5))
    with press(model), pytest.raises(UnsupportedInputError, match="LongRoPE"):
        model.generate(token_ids(1, 40), max_new_tokens=3, **GREEDY)


def test_a_logits_processor_may_fill_a_cache_of_its_own(package):
    """That of classifier-free guidance does; away from its own prompt nothing leads."""
    model, ids, found = build("llama", dtype=torch.float64), token_ids(1, 20).repeat(1, 2), []
    given = {**GREEDY, "max_new_tokens": 4, "eos_token_id": 1}
    guided = {"guidance_scale": 2.0, "negative_prompt_ids": ids}
    with package.KeyRerotationPress(package.KnormPress(0.5))(model):
        expected = model.generate(ids, **given)
        assert torch.equal(model.generate(ids, **guided, **given), expected)
    with package.KnormPress(0.5)(model):
        for more in (guided, {"prompt_lookup_num_tokens": 3, **guided}):
            cache = DynamicCache(config=model.config)
            model(ids[:, :-1], past_key_values=cache)
            more = more | given | {"attention_mask": torch.ones_like(ids), "past_key_values": cache}
            found.append(model.generate(ids if IS_5_2 else ids[:, -1:], **more)[:, -4:])
    assert IS_5_2 or torch.equal(*found)  # 5.2 guides drafts otherwise, with or without a press


# ---- presses of one's own ------------------------------------------------------------------------


ROTATES = {
    "long rows": lambda call: call.length > 10,
    "the first layer": lambda call: not call.site.layer_idx,
    "the first layer, later": lambda call: not (call.site.layer_idx and call.when.decoding),
}


@pytest.mark.parametrize("others", [Eviction.keep, lambda call, _: Eviction.nothing(call)])
@pytest.mark.parametrize("rotates", ROTATES.values(), ids=ROTATES)
def test_rows_and_layers_that_are_rerotated_beside_others_that_are_not(rotates, others):
    class Some(patch_impl.BasePress):
        needs, row_by_row = Needs.ROPE | Needs.NEW_POSITIONS, True
        phases, is_due = Phase.PREFILL | Phase.DECODING, lambda self, n_steps, _: n_steps == 2

        def compress(self, call):
            kept = torch.arange(0, call.length, 2).expand(*call.keys.shape[:2], -1)
            return Eviction.keep(call, kept).rerotated() if rotates(call) else others(call, kept)

    model, press, padded = build("llama"), Some(), left_padded(2, 22, (0, 8))
    together = torch.cat(in_parts(model, press, padded, [0, 16, 17, 18, 19, 22])[1][1:], dim=1)
    for row, start in ((0, 0), (1, 8)):
        alone = padded[0][[row], start:].split((16 - start, 1, 1, 1, 3), dim=1)
        expected = torch.cat(ran(model, press, alone)[1][1:], dim=1)
        torch.testing.assert_close(together[[row]], expected)


def test_a_pruning_that_is_refused_leaves_a_buffer_as_it_was():
    model, cache = build("llama"), StaticCache(build("llama").config, max_cache_len=48)
    press = hooks_impl.StreamingLLMDecodingPress(max_capacity=16, rerotate=True)
    before = ran(model, press, forwards([20, 1]), cache)[0].layers[0].keys[:, :, :17].clone()
    with pytest.raises(UnsupportedInputError, match="sinks"):
        ran(model, hooks_impl.DecodingPress(hooks_impl.KnormPress(), 1, 8), forwards([1]), cache)
    assert torch.equal(cache.layers[0].keys[:, :, :17], before)


def test_positions_continue_though_the_last_rerotated_key_is_evicted():
    class First(hooks_impl.KnormPress):
        def compress(self, call):
            kept = torch.arange(call.length - 2).expand(*call.keys.shape[:2], -1)
            return Eviction.keep(call, kept)

    presses = First(0.5), First(0.5), hooks_impl.KeyRerotationPress(hooks_impl.KnormPress(0.5))
    cache = filled(build("llama"), nested(*presses), token_ids(1, 20))  # the last one acts first
    assert [layer.kept.following for layer in cache.layers] == [(10,)] * 2


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("n_steps", [2, 12])
@pytest.mark.parametrize("phase", [Phase.DECODING, Phase.BEFORE_DECODING])
def test_layers_that_a_later_pruning_makes_unequal(attention, phase, n_steps):
    class FirstLayer(patch_impl.BasePress):
        phases, due = Phase.PREFILL | phase, True

        def is_due(self, n_steps, n_new):
            return self.due

        def compress(self, call):
            waits = call.when.decoding and (call.site.layer_idx or not self.due)
            if waits or call.length < 9:
                return Eviction.nothing(call)
            return Eviction.keep(call, torch.arange(8).expand(*call.keys.shape[:2], -1))

    model, logits = build("llama", attn_implementation=attention), []
    for made in (DynamicCache(config=model.config), StaticCache(model.config, max_cache_len=64)):
        press = FirstLayer()
        with torch.no_grad(), press(model):
            cache, _ = ran(model, None, [token_ids(1, n) for n in (20, *[1] * n_steps)], made)
            press.due = False
            n_first = 8 + (phase is Phase.BEFORE_DECODING)  # and the step's own token
            n_held = [n.tolist() for n in kept_lengths(cache)]
            assert n_held == [[[n_first] * 2], [[8 + n_steps] * 2]]
            for parts in ([token_ids(1, 3)], token_ids(1, 3).split(1, dim=1)):
                logits.append(torch.cat(ran(model, None, parts, deepcopy(cache))[1], dim=1))
    for other in logits[1:]:
        torch.testing.assert_close(other, logits[0])


def test_a_press_acts_before_a_forward():
    press = type("Window", (Latest,), {"phases": Phase.BEFORE_DECODING})()
    cache, _ = ran(build("llama"), press, [token_ids(1, 40), *token_ids(2, 1).split(1)])
    assert kept_lengths(cache)[0].tolist() == [[9, 9]]


# ---- layers that slide, or read another's --------------------------------------------------------


def test_a_cache_that_does_not_slide_where_the_model_does(package):
    model = tiny_decoder("qwen2 (sliding)")
    press = package.DecodingPress(package.KnormPress(), 1, target_size=8)
    bare = filled(model, None, token_ids(1, 40), DynamicCache())
    with pytest.raises(UnsupportedCacheError, match=r"config=model\.config"):
        ran(model, press, [token_ids(1, 1)], bare)
    ran(model, press, [token_ids(1, 1)], filled(model, None, token_ids(1, 40)))
    new = DynamicCache()
    new.layers.extend(type(bare.layers[0])() for _ in range(4))
    cache = filled(model, package.KnormPress(0.5), token_ids(1, 40), new)
    assert [x.tolist() for x in kept_lengths(cache)] == [[[20, 20]], [[15, 15]]] * 2


@pytest.mark.parametrize(("family", "press"), TABLES["read alike"])
def test_padded_rows_are_read_alike_by_headwise_and_without_a_mask(package, family, press):
    model, press = tiny_decoder(family), read_press(press, package)
    model.set_attn_implementation("sdpa")  # which takes no mask for a single token
    ids, mask, positions = left_padded(2, 31, [0, 3])
    context = {"attention_mask": mask[:, :30], "position_ids": positions[:, :30]}
    cache, logits = filled(model, press, ids[:, :30], **context), []
    for scope, of_step in ((press, mask), (headwise, mask), (press, None)):
        given = {"attention_mask": of_step, "position_ids": positions[:, 30:]}
        logits.append(ran(model, scope, [ids[:, 30:]], deepcopy(cache), **given)[1])
    for other in logits[1:]:
        torch.testing.assert_close(other, logits[0])


def test_rotated_sinks_are_not_taken_for_others(package):
    model, streaming = build("llama"), package.StreamingLLMDecodingPress
    cache, _ = ran(model, streaming(16, 4, rerotate=True), [token_ids(1, 30), token_ids(1, 1)])
    decoding = package.DecodingPress(package.KnormPress(), 1, 8)
    for other in (streaming(16, 8, rerotate=True), streaming(16, 4), decoding):
        with pytest.raises(UnsupportedInputError, match="sinks"):
            ran(model, other, [token_ids(1, 1)], deepcopy(cache))


def test_attention_that_is_set_between_steps_gets_its_masks(package, monkeypatch):
    """Also one of a user's own, registered with the masks of another."""
    monkeypatch.setitem(AttentionInterface._global_mapping, "own", eager_attention_forward)
    monkeypatch.setitem(AttentionMaskInterface._global_mapping, "own", eager_mask)
    model, press = build("llama"), package.PyramidKVPress(0.5, 4, beta=4)
    cache, logits = filled(model, press, token_ids(1, 40)), []
    for attention in ("sdpa", "eager", "own"):
        model.set_attn_implementation(attention)
        logits.append(torch.cat(ran(model, press, forwards([1, 3]), deepcopy(cache))[1], dim=1))
    torch.testing.assert_close([logits[0]] * 2, logits[1:])


def test_a_refused_crop_leaves_rerotated_layers_of_unlike_lengths_usable(package):
    press = package.KeyRerotationPress(package.PyramidKVPress(0.5, 4, beta=4))
    cache = filled(model := build("llama"), press, token_ids(1, 40))
    with pytest.raises(UnsupportedCacheError, match=r"crop|remove"):
        cache.crop(-5)
    ran(model, press, [token_ids(1, 1)], cache)


def test_chunks_and_replays_begin_at_the_position_that_the_model_counts_from():
    model, ids = tiny_decoder("roberta"), token_ids(1, 20)
    given = {"attention_mask": torch.ones_like(ids)}
    chunked = prefill(model, ids, DynamicCache(config=model.config), 7, **given).logits[:, -1]
    torch.testing.assert_close(chunked, model(ids, **given).logits[:, -1])
    given, press = {"position_ids": torch.arange(1, 21)[None]}, hooks_impl.KVComposePress(0.5)
    kept = [kept_positions(filled(model, press, ids, **more)) for more in ({}, given)]
    torch.testing.assert_close(*kept)


def test_a_context_in_chunks_that_a_static_cache_cannot_hold(package):
    model, press = build("llama"), package.KnormPress(0.5)
    cache = transformers.StaticCache(config=model.config, max_cache_len=64)
    with pytest.raises(UnsupportedCacheError, match="64 tokens, and 100"), press(model):
        prefill(model, token_ids(1, 100), cache, 32)
