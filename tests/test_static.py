"""Static caches hold what dynamic ones hold, and a step over either compiles as one graph."""

import pytest
import torch
from torch.nn.functional import pad
from transformers import CompileConfig, DynamicCache, StaticCache

import hooks_impl
from press_core import kept_lengths, kept_positions, prefill
from press_core.errors import UnsupportedCacheError, UnsupportedInputError
from press_core.running import static
from tests.decoders import tiny_decoder
from tests.presses import TABLES, listed, presses_of
from tests.support import GREEDY, Latest, both, build, filled, in_turn, left_padded, ran, token_ids

PRESSES = listed("static")
FORWARDS = 1, 1, 1, 1, 3, 1, 1
"""New tokens of the forwards after the context."""


def run(model, press, cache, padding):
    """The logits of forwards after a context, of which one row is padded; rows change places."""
    ids, mask, positions = left_padded(2, 20, [padding, 0])
    logits = []
    with press(model):
        model(ids, attention_mask=mask, position_ids=positions, past_key_values=cache)
        for seed, n in enumerate(FORWARDS):
            if seed == 2:
                cache.reorder_cache(torch.tensor([1, 0]))
                mask = mask.flip(0)
            mask = torch.cat((mask, torch.ones(2, n, dtype=torch.long)), dim=1)
            given = {"attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1)[:, -n:]}
            logits.append(model(token_ids(2, n, seed), past_key_values=cache, **given).logits)
    return torch.cat(logits, dim=1)


@in_turn("name, attention, padding", PRESSES, ["sdpa", "eager"], [0, 6])
def test_the_same_tokens_and_logits(package, name, attention, padding):
    runs_alike(build("llama", attn_implementation=attention), PRESSES[name](package), padding)


def runs_alike(model, press, padding):
    caches = DynamicCache(config=model.config), StaticCache(config=model.config, max_cache_len=48)
    expected, found = (run(model, press, cache, padding) for cache in caches)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(*map(kept_positions, caches), rtol=0, atol=0)


@pytest.mark.skipif(not static.StaticHybridLayer, reason="transformers 5.2 has no such layer")
@in_turn("name, padding", ["queries", "rerotated", "decoding", "turns"], [0, 6])
def test_a_layer_may_hold_the_state_of_a_linear_attention_too(package, name, padding):
    model = tiny_decoder("falcon_h1")
    model.set_attn_implementation("sdpa")
    runs_alike(model, PRESSES[name](package), padding)


@pytest.mark.usefixtures("not_compiled")
@in_turn("name, padding", ["queries", "decoding"], [0, 6])
def test_a_block_mask_covers_empty_slots(package, name, padding):
    model = build("llama", attn_implementation="flex_attention")
    runs_alike(model, PRESSES[name](package), padding)


def test_layers_read_a_buffer_as_it_was_before_another_layer_was_pruned(package):
    model = tiny_decoder("gemma4_text")
    press = package.DecodingPress(package.StreamingLLMPress(), 2, target_size=10)
    caches = DynamicCache(config=model.config), StaticCache(model.config, max_cache_len=48)
    found = [run(model, press, cache, 0) for cache in caches]
    torch.testing.assert_close(*found, rtol=0, atol=1e-5)


def test_keys_of_padding_may_be_zeros(package):
    model = build("llama")
    torch.nn.init.zeros_(model.get_input_embeddings().weight[0])
    runs_alike(model, PRESSES["keys"](package), 6)


@pytest.mark.usefixtures("not_compiled")
def test_generate_builds_block_masks(package):
    for room in (12, 1):
        in_generate(package, "streaming", 6, "flex_attention", room)


@in_turn("name, padding", PRESSES, [0, 6])
def test_generate_builds_a_mask_that_may_be_as_wide_as_one_over_all_tokens(package, name, padding):
    in_generate(package, name, padding, "sdpa", 12)
    if name == "streaming":  # the buffer is full when a mask is built, before the press makes room
        in_generate(package, name, padding, "sdpa", 1)


def in_generate(package, name, padding, attention, room):
    model = build("llama", attn_implementation=attention)
    ids, mask, _ = left_padded(2, 20, [padding, 0])
    caches = DynamicCache(config=model.config), StaticCache(model.config, max_cache_len=20 + room)
    given = {"attention_mask": mask, "max_new_tokens": 12} | GREEDY
    with PRESSES[name](package)(model):
        found = [model.generate(ids, past_key_values=cache, **given) for cache in caches]
    assert torch.equal(*found)
    torch.testing.assert_close(*map(kept_positions, caches), rtol=0, atol=0)


@presses_of("static at different times")
@pytest.mark.parametrize("n_hidden", [0, 3])
def test_layers_that_were_pruned_at_different_times(package, make_press, n_hidden):
    """Buffers may be as long as one another, and filled to other slots."""
    model, logits = build("llama", dtype=torch.float64), []
    for cache in (DynamicCache(config=model.config), StaticCache(model.config, max_cache_len=110)):
        with make_press(package)(model):
            for n, seed in ((40, 0), (8, 1), (3, 2), (3, 3), (1, 4), (1, 5)):
                mask = torch.ones(1, cache.get_seq_length() + n, dtype=torch.long)
                mask[:, : n_hidden * (n == 1)] = 0
                given = {"attention_mask": mask, "past_key_values": cache}
                logits.append(model(token_ids(1, n, seed), **given).logits)
    torch.testing.assert_close(logits[6:], logits[:6], rtol=0, atol=1e-9)


def test_a_buffer_is_replaced_by_a_part_of_itself():
    """Twelve slots by the last eight of them."""
    model, found = build("llama", num_heads=2, num_kv_heads=1), []
    for cache in (DynamicCache(config=model.config), StaticCache(model.config, max_cache_len=48)):
        with Latest()(model):
            filled(model, hooks_impl.KnormPress(0.7), token_ids(1, 40), cache)
        found.append(cache.layers[0].states())
    assert all(map(torch.equal, *found))


@both
@pytest.mark.parametrize("name", ["keys", "heads", "layers", "rerotated"])
def test_a_mask_over_all_tokens_hides_those_that_it_names(package, name):
    """Its columns are no slots of a buffer; those of the first tokens may be missing."""
    model, ids = build("llama"), token_ids(1, 24)
    seen = torch.ones(24, 24, dtype=torch.bool).tril()[None, None, 20:]
    seen[..., 1:, 20] = False
    static = [StaticCache(config=model.config, max_cache_len=n) for n in (34, 48)]
    logits = []
    for cache, first in zip((DynamicCache(config=model.config), *static), (0, 0, 9), strict=True):
        with PRESSES[name](package)(model):
            model(ids[:, :20], past_key_values=cache)
            given = {"position_ids": torch.arange(20, 24)[None], "past_key_values": cache}
            logits.append(model(ids[:, 20:], attention_mask=seen[..., first:], **given).logits)
        torch.testing.assert_close(logits[-1], logits[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["keys", "heads", "layers"])
def test_a_mask_may_have_a_column_for_each_token_that_the_cache_was_made_for(package, name):
    model, ids, logits = build("llama"), token_ids(1, 23), []
    seen = torch.ones(23, 48, dtype=torch.bool).tril()[None, None, 20:]
    seen[..., :7] = False
    static = StaticCache(config=model.config, max_cache_len=48)
    for cache, n in ((DynamicCache(config=model.config), 23), (static, 48)):
        with PRESSES[name](package)(model):
            model(ids[:, :20], past_key_values=cache)
            given = {"attention_mask": seen[..., :n], "past_key_values": cache}
            logits.append(model(ids[:, 20:], **given).logits)
    torch.testing.assert_close(*logits, rtol=0, atol=1e-5)
    if name == "keys":  # which the model reads outside of the scope, too
        with pytest.raises(UnsupportedInputError, match="column for each of the 24 tokens"):
            model(ids[:, :1], attention_mask=seen[:, :, :1], past_key_values=static)


@in_turn("name, later", ["keys", "rerotated", "streaming", "heavy hitters"], [0, 1])
def test_a_mask_may_have_columns_for_tokens_that_are_to_come(package, name, later):
    """Of any value, as for tokens seen: they hide padding, also in a question."""
    model, (ids, mask, positions), found = build("llama"), left_padded(2, 32, [6, 0]), []
    mask[1, 20:22] = 0
    positions = (mask.cumsum(dim=-1) - 1).clamp(min=0)
    for n_later in (0, 9):
        cache = StaticCache(config=model.config, max_cache_len=48)
        with PRESSES[name](package)(model):
            for start, end in ((0, 20), (20, 25), *((n, n + 1) for n in range(25, 32))):
                given = {"attention_mask": pad(mask[:, :end], (0, n_later), value=later)}
                given |= {"position_ids": positions[:, start:end], "past_key_values": cache}
                found.append(model(ids[:, start:end], **given).logits[:, -1])
        found += kept_positions(cache)
    torch.testing.assert_close(found[: len(found) // 2], found[len(found) // 2 :])


@pytest.mark.usefixtures("no_graphs_after")
@pytest.mark.parametrize(("name", "is_static", "masked", "dynamic"), TABLES["compiled"])
def test_a_step_compiles_as_one_graph(package, name, is_static, masked, dynamic):
    layers = 2 if name == "layers" else 1  # each is compiled again
    model, ids = build("llama", num_layers=layers), token_ids(1, 26)
    logits = []
    with PRESSES[name](package)(model):
        for step in (model, torch.compile(model, fullgraph=True, backend="eager", dynamic=dynamic)):
            cache = StaticCache(config=model.config, max_cache_len=48)
            cache = cache if is_static else DynamicCache(config=model.config)
            model(ids[:, :20], past_key_values=cache)
            steps = []
            for n in range(20, 26):
                mask = torch.ones(1, n + 1, dtype=torch.long) if masked else None
                given = {"attention_mask": mask, "past_key_values": cache, "return_dict": True}
                steps.append(step(ids[:, n : n + 1], **given).logits)
            logits.append(torch.cat(steps))
    torch.testing.assert_close(*logits, rtol=0, atol=1e-5)


@pytest.mark.usefixtures("no_graphs_after")
@pytest.mark.parametrize("n_later", [0, 9])
@pytest.mark.parametrize("hidden", [0, 8])
def test_a_mask_of_a_compiled_step_hides_tokens_from_all_layers(package, hidden, n_later):
    """It may have columns for tokens to come; where it hides none, keys are rotated as well."""
    model, ids, logits, press = build("llama"), token_ids(1, 21), [], package.KnormPress(0.5)
    mask = pad((torch.arange(21)[None] >= hidden).long(), (0, n_later))
    with (press if hidden else package.KeyRerotationPress(press))(model):
        for step in (model, torch.compile(model, fullgraph=True, backend="eager")):
            cache = None if hidden else StaticCache(config=model.config, max_cache_len=30)
            cache = filled(model, None, ids[:, :20], cache)
            given = {"attention_mask": mask, "past_key_values": cache, "return_dict": True}
            logits.append(step(ids[:, 20:], **given).logits)
    torch.testing.assert_close(*logits, rtol=0, atol=1e-5)


@both
@pytest.mark.usefixtures("no_graphs_after")
def test_a_compiled_model_is_pruned_in_chunks_and_after_a_reset(package):
    model, ids = build("llama", num_layers=1), token_ids(1, 40)
    chunked, again = DynamicCache(), StaticCache(config=model.config, max_cache_len=48)
    model(ids, past_key_values=again)
    again.reset()
    model.compile(backend="eager")
    with package.KnormPress(0.5)(model):
        prefill(model, ids, chunked, 16)
        model(ids, past_key_values=again)
    assert [kept_lengths(cache)[0].tolist() for cache in (chunked, again)] == [[[20, 20]]] * 2


@pytest.mark.usefixtures("no_graphs_after")
@in_turn("name, padding", ["keys", "heads", "layers", "rerotated"], [0, 6])
def test_no_int_changes_in_a_graph_that_cuda_graphs_replay(package, name, padding, monkeypatch):
    """They would be recorded anew in each step. A CPU stands in for the GPU."""
    monkeypatch.setattr(static, "may_be_replayed", lambda _: torch.compiler.is_compiling())
    model = build("llama", num_layers=2 if name == "layers" else 1)
    ids, mask, _ = left_padded(2, 20, [padding, 0])
    graphs, given = [], {"attention_mask": mask, "max_new_tokens": 8} | GREEDY
    compiles = CompileConfig(mode=None, backend=lambda graph, x: graphs.append(x) or graph)
    compiles._compile_all_devices = True  # as `generate` does on a GPU
    caches = DynamicCache(config=model.config), StaticCache(config=model.config, max_cache_len=48)
    with PRESSES[name](package)(model):
        expected = model.generate(ids, past_key_values=caches[0], **given)
        found = model.generate(ids, past_key_values=caches[1], compile_config=compiles, **given)
    assert torch.equal(found, expected)
    assert len(graphs) == 1
    assert all(isinstance(x, torch.Tensor) for x in graphs[0])
    torch.testing.assert_close(*map(kept_positions, caches), rtol=0, atol=0)


@presses_of("not static")
def test_what_a_buffer_cannot_hold_is_refused(make_press):
    model, press = build("llama"), make_press(hooks_impl)
    cache = StaticCache(config=model.config, max_cache_len=48)
    with press(model), pytest.raises(UnsupportedCacheError, match=r"static cache.*DynamicCache"):
        model(token_ids(1, 20), past_key_values=cache)


@pytest.mark.parametrize("name", ["keys", "heads", "rerotated", "decoding"])
def test_a_full_buffer_is_an_error(name):
    model = build("llama")
    cache, other = (StaticCache(config=model.config, max_cache_len=22) for _ in range(2))
    with PRESSES[name](hooks_impl)(model):
        with pytest.raises(UnsupportedCacheError, match="room for 22 tokens"):
            model(token_ids(1, 23), past_key_values=cache)
        model(token_ids(1, 20), past_key_values=cache)
        with pytest.raises(UnsupportedCacheError, match="room for 2 tokens"):
            model(token_ids(1, 3), past_key_values=cache)
        with pytest.raises(UnsupportedCacheError, match="room for 0 tokens"):
            model.generate(token_ids(1, 20), past_key_values=other, max_new_tokens=4, **GREEDY)


def test_pruning_makes_no_room_in_a_layer_that_is_shorter_than_its_window(package):
    model, press = build("gemma3_text"), package.StreamingLLMDecodingPress(8)
    for room, n_steps in ((model.config.sliding_window - 13, 6), (1, 1)):  # one as long slides
        cache = StaticCache(model.config, max_cache_len=13 + room)
        ran(model, press, [token_ids(1, 13), *[token_ids(1, 1)] * n_steps], cache)
    with pytest.raises(UnsupportedCacheError, match="room for 0 tokens"):
        filled(model, press, token_ids(1, 1), cache)
