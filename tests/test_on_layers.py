"""What scopes put on attention modules is there while forwards need it, and only then."""

import copy

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from transformers import DynamicCache, OPTConfig, OPTForCausalLM

import hooks_impl
import patch_impl
from press_core import ScopeError, kept_lengths, kept_positions
from tests.presses import TABLES, read_press
from tests.snapshot import unchanged
from tests.support import IS_5_2, both, build, filled, left_padded, make, token_ids, tolerance
from tests.test_changing_scopes_while_running import running

CONTEXT, NEXT = token_ids(1, 40), token_ids(1, 1)
OFF, ON = [False] * 3, [True] * 3


def covered(model):
    """Whether there is anything on each attention module that an untouched one has not."""
    modules = [layer.self_attn for layer in model.model.layers]
    return [
        bool(m._forward_hooks or m._forward_pre_hooks or m.q_proj._forward_hooks)
        or "forward" in vars(m)
        for m in modules
    ]


def step(model, cache, n=1):
    """Which attention modules are `covered` after a forward of `n` tokens."""
    model(token_ids(1, n), past_key_values=cache)
    return covered(model)


def assert_they_stay(model):
    """In each step behind a context."""
    cache = prefilled(model)
    for _ in range(2):
        assert step(model, cache) == ON


def lengths(cache):
    return [layer.shape[-1] for layer in kept_positions(cache)]


def assert_lengths_after_steps(model, cache, *expected):
    for n in expected:
        step(model, cache)
        assert lengths(cache) == [n] * 3


def prefilled(model):
    return filled(model, None, CONTEXT)


@both
@pytest.mark.parametrize(("press", "n_kept"), TABLES["untouched"])
def test_steps_in_which_no_layer_is_pruned_find_untouched_layers(package, press, n_kept, model):
    with read_press(press, package)(model):
        assert covered(model) == ON
        cache = prefilled(model)
        assert step(model, cache) == step(model, cache) == OFF
        again = prefilled(model)
        assert step(model, cache) == OFF
    assert [lengths(cache), lengths(again)] == [[n] * 3 for n in n_kept]


@both
def test_layers_that_need_help_keep_it(package, model):
    press = package.AdaKVPress(package.SnapKVPress(compression_ratio=0.5, window_size=4))
    with press(model):
        assert_they_stay(model)


@both
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("kind", ["sdpa", "eager", "opt"])
def test_one_mask_reads_padded_rows(kind, n, package):
    if kind == "opt":  # which counts positions by the mask where it is not told any
        sizes = {"hidden_size": 32, "ffn_dim": 32, "num_attention_heads": 2, "vocab_size": 300}
        config = OPTConfig(**sizes, num_hidden_layers=3, word_embed_proj_dim=32)
        model = OPTForCausalLM(config).double().eval()
        attention = [layer.self_attn for layer in model.model.decoder.layers]
    else:
        model = make("llama", num_layers=3, attn_implementation=kind)
        attention = [layer.self_attn for layer in model.model.layers]
    ids, mask, positions = left_padded(2, 40 + n, [0, 14])
    cache, alone = DynamicCache(config=model.config), DynamicCache(config=model.config)
    with torch.no_grad(), package.KnormPress(compression_ratio=0.5)(model):
        for part in (slice(0, 40), slice(40, 40 + n)):
            told = {} if kind == "opt" else {"position_ids": positions[:, part]}
            seen = mask[:, : part.stop]
            found = model(ids[:, part], attention_mask=seen, past_key_values=cache, **told).logits
        assert not any(m._forward_hooks or "forward" in vars(m) for m in attention)
        model(ids[1:, 14:40], past_key_values=alone)
        expected = model(ids[1:, 40:], past_key_values=alone).logits
    assert (found[1:] - expected).abs().max() < tolerance(model)


@both
@pytest.mark.parametrize("masked", [True, False], ids=["mask", "no mask"])
def test_one_column_is_a_mask_for_a_token_over_layers_of_any_length(package, masked):
    press = package.PyramidKVPress(compression_ratio=0.5, window_size=4, beta=3)
    ids, model = token_ids(1, 41), build("llama", num_layers=3)
    told = {"attention_mask": torch.ones(1, 41, dtype=torch.long)} if masked else {}
    logits = []
    for kind in ("eager", "sdpa"):
        model.set_attn_implementation(kind)
        with torch.no_grad(), press(model):
            cache = prefilled(model)
            logits.append(model(ids[:, -1:], past_key_values=cache, **told).logits)
            assert len(set(lengths(cache))) == 3
            assert covered(model) == OFF
            step(model, cache, n=3)  # for which each layer needs a mask of its own
            assert covered(model) == ON
    assert (logits[0] - logits[1]).abs().max() < 1e-5


@both
def test_steps_are_observed_when_their_tokens_may_be_asked_for(package, model):
    base, seen = package.SnapKVPress(window_size=2), []
    press = package.DecodingPress(base, 6, target_size=16, hidden_states_buffer_size=3)
    with press(model):
        cache = prefilled(model)
        for _ in range(12):
            seen.append(step(model, cache) == ON)
    assert seen == [False, False, False, True, True, True] * 2
    assert lengths(cache) == [16] * 3


@both
def test_nested_scopes_come_back_in_their_order(package, model):
    inner = package.StreamingLLMPress(compression_ratio=0.25)
    with package.KnormPress(compression_ratio=0.5)(model), inner(model):
        fresh = kept_positions(prefilled(model))
        step(model, prefilled(model))
        assert covered(model) == OFF
        back = kept_positions(prefilled(model))
    assert all(torch.equal(a, b) for a, b in zip(fresh, back, strict=True))
    with inner(model), package.KnormPress(compression_ratio=0.5)(model):
        other = kept_positions(prefilled(model))
    assert not all(torch.equal(a, b) for a, b in zip(fresh, other, strict=True))


@both
def test_an_outer_scope_that_has_nothing_to_do_leaves_the_inner_one_on(package, model):
    inner = package.DecodingPress(package.SnapKVPress(window_size=2), compression_interval=9)
    with package.KnormPress(compression_ratio=0.5)(model), inner(model):
        assert_they_stay(model)


@both
def test_they_stay_for_a_forward_of_another_thread(package, model):
    with package.KnormPress(compression_ratio=0.5)(model):
        cache = prefilled(model)
        with running(model, index=0) as other:
            assert step(model, cache) == ON
        assert step(model, cache) == OFF
    assert lengths(other) == [20] * 3


@both
def test_what_cannot_be_put_back_leaves_nothing_half(package, model):
    class Failing(package.KnormPress):
        fails = False

        def install_on_layers(self, scope):
            for n, removable in enumerate(super().install_on_layers(scope)):
                yield removable
                if n == 1 and type(self).fails:
                    raise RuntimeError("on purpose")

    with Failing(compression_ratio=0.5)(model):
        cache = prefilled(model)
        step(model, cache)
        Failing.fails = True
        with pytest.raises(RuntimeError, match="on purpose"):
            prefilled(model)
        assert covered(model) == OFF
        Failing.fails = False
        assert lengths(prefilled(model)) == [20] * 3
    assert covered(model) == OFF


def test_a_patch_that_was_lost_is_told_of_though_it_has_come_off(model):
    attention = [layer.self_attn for layer in model.model.layers]
    former = [module.forward for module in attention]
    with patch_impl.KnormPress(compression_ratio=0.5)(model) as scope:
        for module, forward in zip(attention, former, strict=True):
            module.forward = forward
        cache = prefilled(model)
        assert lengths(cache) == [40] * 3
        step(model, cache)
        assert lengths(prefilled(model)) == [20] * 3  # they have come back
        with pytest.warns(RuntimeWarning, match="put back"):
            scope.remove()


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_hooks_of_accelerate_that_go_once_a_step_was_pruned_take_nothing_away(model):
    with patch_impl.DecodingPress(patch_impl.KnormPress(), 2, target_size=20)(model):
        cache = prefilled(model)
        for layer in model.model.layers:
            add_hook_to_module(layer.self_attn, ModelHook())
        assert_lengths_after_steps(model, cache, 41, 20)
        remove_hook_from_module(model, recurse=True)
        assert_lengths_after_steps(model, cache, 21, 20, 21)


@both
def test_steps_that_pass_by_all_layers_are_not_silent(package, model):
    scope = package.DecodingPress(package.KnormPress(), 2, target_size=20).register(model)
    cache = prefilled(model)
    for layer in model.model.layers:
        layer.self_attn = copy.deepcopy(layer.self_attn)
    assert_lengths_after_steps(model, cache, 41, 42, 43)
    with pytest.warns(RuntimeWarning, match="nothing was pruned there"):
        scope.remove()


def test_a_module_that_was_replaced_meanwhile_is_not_taken_for_the_verified_one(model):
    with hooks_impl.SnapKVPress(compression_ratio=0.5, window_size=4)(model):
        step(model, prefilled(model))
        attention = model.model.layers[1].self_attn
        attention.q_proj = copy.deepcopy(attention.q_proj)
        with pytest.raises(ScopeError, match="replaced"):
            prefilled(model)


@both
@pytest.mark.usefixtures("no_graphs_after")
@pytest.mark.filterwarnings("ignore:AdaKVPress evicted nothing")
def test_a_compiled_step_that_needs_help_puts_it_back(package):
    model = build("llama", num_layers=1)
    press = package.AdaKVPress(package.SnapKVPress(compression_ratio=0.5, window_size=4))
    whole, compiled = prefilled(model), torch.compile(model.model, backend="eager")
    with press(model):
        cache = prefilled(model)
    other = copy.deepcopy(cache)
    with press(model):
        expected = [model.model(NEXT, past_key_values=other)[0] for _ in range(2)]
    with press(compiled):  # as good as on the model that it was made of
        step(model, whole)
        assert covered(model) == [False]
        found = [compiled(NEXT, past_key_values=cache)[0] for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


@both
@pytest.mark.usefixtures("no_graphs_after")
def test_an_exported_step_over_layers_of_different_lengths_needs_a_scope(package):
    """Its masks are made for a single token, too, unlike those of a compiled step.

    Where it fails, PyTorch calls no hooks.
    """
    model, reads = build("llama"), torch.nn.Module()
    for _ in range(2):
        with package.PerLayerCompressionPress(package.KnormPress(), [0.5, 0.25])(model):
            cache = prefilled(model)
            assert lengths(cache) == [20, 30]
            reads.forward = lambda ids, cache=cache: model(ids, past_key_values=cache).logits
            with pytest.raises(RuntimeError, match="indices"):
                torch.export.export(reads, (NEXT.float(),), strict=False)
        with pytest.raises(ScopeError, match="different lengths"):
            torch.export.export(reads, (NEXT,), strict=False)
        if not IS_5_2:  # which masks it, too
            torch.compile(reads.forward, fullgraph=True, backend="eager")(NEXT)


@both
@pytest.mark.usefixtures("no_graphs_after")
def test_they_stay_where_graphs_were_compiled_around_them(package):
    model = build("llama", num_layers=1)
    fresh = kept_positions(filled(model, package.KnormPress(0.5), CONTEXT))
    for layer in model.model.layers:
        layer.forward = torch.compile(layer.forward, backend="eager")
    with package.KnormPress(compression_ratio=0.5)(model):
        for _ in range(2):
            cache = prefilled(model)
            assert all(torch.equal(a, b) for a, b in zip(fresh, kept_positions(cache), strict=True))
            assert step(model, cache) == [True]


@both
@pytest.mark.usefixtures("no_graphs_after")
def test_a_compiled_decoder_may_be_told_to_compile_no_more(package):
    model = build("llama", num_layers=1)
    model.model.compile(backend="eager")
    step(model, prefilled(model))
    with package.KnormPress(0.5)(model):
        for stance in ("default", "eager_on_recompile"):
            with torch.compiler.set_stance(stance):
                cache = prefilled(model)
                step(model, cache)
            assert lengths(cache) == [21]


def n_graphs() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


@both
@pytest.mark.usefixtures("no_graphs_after")
def test_a_compiled_context_and_what_prunes_behind_it_run_as_they_were_written(package):
    model, base = build("llama", num_layers=1), package.SnapKVPress(0.5, window_size=4)
    press = package.PrefillDecodingPress(base, package.DecodingPress(base, 1, 9))
    ids, mask, _ = left_padded(2, 22, [6, 0])
    compiled, kept = torch.compile(model.forward, backend="eager", dynamic=True), []
    with torch.no_grad(), press(model):
        for run in (model, compiled):
            cache, before = DynamicCache(config=model.config), n_graphs()
            run(ids[:, :-1], attention_mask=mask[:, :-1], past_key_values=cache)
            in_context = n_graphs() - before
            run(ids[:, -1:], attention_mask=mask, past_key_values=cache)
            kept.append(kept_positions(cache)[0])
    assert in_context == 2  # what is before the decoder, and behind it
    assert torch.equal(*kept)


@both
def test_an_interrupt_while_scopes_come_off_leaves_no_layer_without(package):
    model, ids = build("llama"), token_ids(1, 20)
    with unchanged(model), package.KnormPress(0.5)(model) as scope:
        cache = filled(model, None, ids)
        last = scope.state.on_layers.by_scope[scope.state][-1]

        def interrupted():
            del last.remove
            raise KeyboardInterrupt

        last.remove = interrupted
        with pytest.raises(KeyboardInterrupt):
            model(ids[:, :1], past_key_values=cache)
        assert [int(kept.max()) for kept in kept_lengths(filled(model, None, ids))] == [10, 10]
