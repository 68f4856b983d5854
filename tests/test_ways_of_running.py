"""A model is run in many ways: compiled, in chunks, with draft tokens, over several turns."""

import copy
from contextlib import nullcontext

import pytest
import torch
import transformers
from transformers import DynamicCache

import patch_impl
from experiments.testbed.recipes import PROMPTS
from press_core import UnsupportedCacheError, UnsupportedInputError, kept_lengths, prefill
from press_core.forward import with_cache
from tests.presses import PIPELINE_PRESSES, presses_of
from tests.support import (
    GREEDY,
    IS_5_2,
    both,
    build,
    context_for,
    example_for,
    filled,
    held,
    left_padded,
    make,
    nested,
    token_ids,
    watched,
)

LENGTH = 60


# ---- compiled ------------------------------------------------------------------------------------


@both
@pytest.mark.usefixtures("no_graphs_after")
def test_a_function_compiled_or_traced_is_pruned_by_one_press_after_the_other(package):
    """It was called before, and the first press needs nothing from inside the attention.

    The second reads queries, and leaves heads of different lengths to attend over.
    """
    model, ids = build("llama", num_layers=1).requires_grad_(False), token_ids(1, LENGTH)

    def run(ids, cache):
        return model(ids, past_key_values=cache).logits

    run_compiled = torch.compile(run, backend="eager")
    for name in (None, "KnormPress", "AdaKVPress", None):  # around SnapKVPress
        press = None if name is None else example_for(package, name, 0.5, model)
        logits = []
        for function in (run, run_compiled):
            cache = DynamicCache(config=model.config)
            with nullcontext() if press is None else press(model):
                function(ids, cache)
                seen = copy.deepcopy(cache)
                step = torch.jit.trace(lambda x, c=seen: run(x, c), ids[:, :1], check_trace=False)
                logits.append(function(ids[:, :1], cache))
                torch.testing.assert_close(step(ids[:, :1]), logits[-1])
            (kept,) = kept_lengths(cache)
            assert kept.float().mean() == (LENGTH if press is None else LENGTH // 2) + 1
            assert (kept.unique().numel() > 1) == (name == "AdaKVPress")
        torch.testing.assert_close(*logits)


@both
@pytest.mark.usefixtures("no_graphs_after")
@pytest.mark.parametrize("closed", [True, False])
def test_code_behind_an_interrupt_is_not_compiled(package, closed):
    """Once the press is closed, or a forward finds that the one before has ended."""
    model, graphs, ids = build("llama", num_layers=1), [], token_ids(1, LENGTH)
    compiled = torch.compile(model, backend=lambda graph, _: graphs.append(graph) or graph)

    def interrupt(*_):
        raise KeyboardInterrupt

    press = package.KnormPress(0.5)
    with press(model):
        theirs = model.model.layers[0].mlp.register_forward_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            compiled(ids, past_key_values=DynamicCache())
        theirs.remove()
        n_graphs = len(graphs)
        press.remove() if closed else model(ids, past_key_values=DynamicCache())
        (lambda: torch.ones(2) + 1)()
        assert len(graphs) == n_graphs


@both
@pytest.mark.usefixtures("no_graphs_after")
@pytest.mark.parametrize("name", ["buffers", "evicts in every step"])
def test_steps_in_which_a_press_acts_leave_no_graphs(package, name):
    model, graphs, logits = build("llama", num_layers=1), [], []
    compiled = torch.compile(model.forward, backend=lambda graph, _: graphs.append(graph) or graph)
    press = package.DecodingPress(package.SnapKVPress(window_size=4), 8, target_size=16)
    press = press if name == "buffers" else package.StreamingLLMDecodingPress(18)
    with torch.no_grad(), press(model):
        for step in (model, compiled):
            cache, new = filled(model, None, token_ids(1, 20)), token_ids(12, 1).split(1)
            logits.append(torch.cat([step(ids, past_key_values=cache).logits for ids in new]))
    assert torch.equal(*logits)
    assert len(graphs) <= 3


# ---- in chunks -----------------------------------------------------------------------------------


@pytest.mark.parametrize("padding", [0, 12])
@pytest.mark.parametrize("name", ["KnormPress", "SnapKVPress", "KVzapPress", "FastKVzipPress"])
@pytest.mark.parametrize("chunk_size", [7, 25])
def test_a_prefill_in_chunks_is_pruned_as_one(package, name, chunk_size, padding):
    """And one of embeddings as one of tokens."""
    model, press = make(), example_for(package, name, 0.5, make())
    ids, mask, positions = left_padded(2, LENGTH, [0, padding])
    cache, given = DynamicCache(config=model.config), {"attention_mask": mask} if padding else {}
    at_once = filled(model, press, ids, position_ids=positions, **given)
    embedded, embeddings = DynamicCache(), model.get_input_embeddings()(ids)
    more = {"position_ids": positions} if chunk_size == 7 else {}
    with press(model):
        logits = prefill(model, ids, cache, chunk_size, **given, **more).logits[:, -1]
        model(inputs_embeds=embeddings, past_key_values=embedded, position_ids=positions, **given)
    expected = model(ids, position_ids=positions, **given).logits[:, -1]
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-9)
    assert held(cache) == held(at_once) == held(embedded)


@pytest.mark.parametrize("chunk_size", [16, 25])
def test_generate_in_chunks_is_generate(package, chunk_size):
    model, ids, press = make(), token_ids(1, LENGTH), package.SnapKVPress(0.5, window_size=8)
    options, cache = {"max_new_tokens": 8, **GREEDY}, DynamicCache(config=model.config)
    chunks = {"prefill_chunk_size": chunk_size}
    with press(model):
        at_once = model.generate(ids, **options)
        in_chunks = model.generate(ids, past_key_values=cache, **chunks, **options)
    alone = model.generate(ids, past_key_values=DynamicCache(), **chunks, **options)
    # transformers 5.2 gives later chunks the positions of the first, with or without a press.
    if torch.equal(alone, model.generate(ids, **options)):
        assert torch.equal(in_chunks, at_once)
    assert [int(kept[0, 0]) for kept in kept_lengths(cache)] == [LENGTH // 2 + 7] * 2


@pytest.mark.parametrize("name", ["FinchPress", "KVzipPress"])
def test_who_takes_a_context_in_one_forward_and_that_chunks_share_a_cache(package, name):
    model, cache = make(), DynamicCache()
    press, ids = example_for(package, name, 0.5, model), context_for(name, LENGTH)
    told = {"in one forward": (cache, 25), "one cache": (None, 25), "all chunks": ((), 25)}
    told["to be empty"] = filled(model, None, token_ids(1, 2)), 25
    told |= {r"\(B, S\)": (cache, 25, ids[None, None]), "cuts masks": (cache, 25, ids[:, 1:])}
    for why, given in told.items():
        with press(model), pytest.raises(UnsupportedInputError, match=why):
            prefill(model, ids, *given)
    assert cache.get_seq_length() == 0


def test_block_by_block_holds_the_budget_and_a_chunk(package):
    model, ids, longest = make(), token_ids(1, LENGTH), []
    cache = DynamicCache(config=model.config)
    press = package.BlockPress(package.KeyDiffPress(0.75), block_size=5)
    with press(model):
        handle = model.model.layers[0].mlp.register_forward_hook(
            lambda *_: longest.append(int(kept_lengths(cache)[0].max()))
        )
        prefill(model, ids, cache, 10)
        handle.remove()
        assert max(longest) == LENGTH // 4
        model(token_ids(1, 3, seed=1), past_key_values=cache)  # a question is no chunk
    assert [int(kept[0, 0]) for kept in kept_lengths(cache)] == [LENGTH // 4 + 3] * 2
    whole = filled(model, press, ids)
    assert torch.equal(cache.layers[0].positions, whole.layers[0].positions)
    beside = nested(package.SnapKVPress(0.5, 4), press)  # after a layer, keys have seen others
    for around, n in ((package.KeyRerotationPress(press), 2), (beside, 1)):
        chunked = DynamicCache(config=model.config)
        with around(model):
            prefill(model, ids, chunked, 10)
        assert held(chunked)[:n] == held(filled(model, around, ids))[:n]


def test_a_budget_counts_tokens_wherever_they_are(package):
    """Not positions, and though a row has no token in the last chunk."""
    model, ids, mask = make(), token_ids(2, LENGTH), torch.ones(2, LENGTH, dtype=torch.long)
    mask[0, 48:] = 0

    def far(_, args, given):
        return args, given | {"position_ids": given["position_ids"] + 1000}

    cache = DynamicCache(config=model.config)
    with package.BlockPress(package.KeyDiffPress(0.5), block_size=5)(model):
        model.model.register_forward_pre_hook(far, with_kwargs=True)
        prefill(model, ids, cache, 10, mask)
    assert kept_lengths(cache)[0].tolist() == [[24, 24], [30, 30]]


@pytest.mark.filterwarnings("error:.*nothing was pruned")
def test_chunks_are_no_decoding_steps(package):
    model, cache = make(), DynamicCache(config=make().config)
    press = package.DecodingPress(package.KnormPress(), compression_interval=2, target_size=20)
    with press(model):
        prefill(model, token_ids(1, LENGTH), cache, 10)
        assert press.compression_count == 0
        for _ in range(2):
            model(token_ids(1, 1), past_key_values=cache)
        assert press.compression_count == 1
    assert [int(kept[0, 0]) for kept in kept_lengths(cache)] == [20, 20]


# ---- draft tokens --------------------------------------------------------------------------------

GENERATE = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": 1}


@both
@pytest.mark.parametrize(("implementation", "by"), [("sdpa", "lookup"), ("eager", "assistant")])
@pytest.mark.parametrize("name", ["SnapKVPress", "AdaKVPress", "FastKVzipPress", "PyramidKVPress"])
def test_draft_tokens_come_behind_a_context_that_was_brought_first(
    package, implementation, name, by
):
    """In one forward with it they are refused, with the advice that is followed here."""
    dtype = torch.float32 if implementation == "eager" else torch.float64
    model, cache = make(attn_implementation=implementation, dtype=dtype), DynamicCache()
    ids = token_ids(1, LENGTH // 2).repeat(1, 2)  # so that there is something to look up
    rest = ids if IS_5_2 else ids[:, -1:]
    plain = {**GENERATE, "attention_mask": torch.ones_like(ids)}
    helper = {"assistant_model": build("llama", num_layers=1, dtype=dtype)}
    assisted = plain | (helper if by == "assistant" else {"prompt_lookup_num_tokens": 3})
    with example_for(package, name, 0.5, model)(model):
        with pytest.raises(UnsupportedInputError, match=r"input_ids\[:, :-1\]"):
            model.generate(ids, **assisted)
        model(ids[:, :-1], past_key_values=cache)
        caches = [cache, copy.deepcopy(cache)]
        for given, mask, error in ((ids, ids >= 0, "cuts none"), (rest, ids > 9, "cut the")):
            with nullcontext() if IS_5_2 else pytest.raises(UnsupportedInputError, match=error):
                told = {**assisted, "attention_mask": mask.long()}
                model.generate(given, past_key_values=copy.deepcopy(cache), **told)
        expected = model.generate(ids, past_key_values=caches[0], **plain)[:, LENGTH:]
        found = model.generate(rest, past_key_values=caches[1], **assisted)[:, rest.shape[1] :]
    assert torch.equal(found, expected)
    torch.testing.assert_close(*map(kept_lengths, caches), rtol=0, atol=0)


@both
@pytest.mark.parametrize("name", ["decoding", "streaming"])
def test_draft_tokens_are_refused_by_presses_that_act_while_decoding(package, name):
    model, ids = make(), token_ids(1, LENGTH // 2).repeat(1, 2)
    outer, press = package.KnormPress(0.0), PIPELINE_PRESSES[name](package)
    refused = pytest.raises(UnsupportedInputError, match=r"DecodingPress.*assistance")
    with outer(model), press(model), refused:
        model.generate(ids, prompt_lookup_num_tokens=3, **GENERATE)


@pytest.mark.skipif(IS_5_2, reason="assistant_early_exit of transformers 5.2 raises by itself")
@both
@pytest.mark.parametrize("name", ["KVzipPress", "AdaKVPress"])
def test_drafts_of_the_first_layers_are_left_alone(package, name):
    model, ids, found = make(), token_ids(1, LENGTH), []
    with example_for(package, name, 0.5, model)(model):
        for more in ({}, {"assistant_early_exit": 1}):
            cache = filled(model, None, ids[:, :-1])
            given = {"attention_mask": torch.ones_like(ids), "past_key_values": cache, **GENERATE}
            found.append(model.generate(ids[:, -1:], **given, **more).tolist())
    assert found[0] == found[1]


def test_what_is_cropped_was_never_there(package):
    """Neither in the cache nor in what the press has observed for its next step."""
    model, context, rest = make(), token_ids(1, LENGTH), token_ids(1, 12, seed=1)
    press = package.DecodingPress(package.ExpectedAttentionPress(), 6, target_size=20)
    logits = []
    for n_rejected in (0, 1):
        cache = DynamicCache(config=model.config)
        with press(model):
            model(context, past_key_values=cache)
            for i in range(12):
                logits.append(model(rest[:, i : i + 1], past_key_values=cache).logits)
                if n_rejected and i % 6 < 4:  # what came with the next pruning cannot be cropped
                    model(token_ids(1, 1, seed=i + 2), past_key_values=cache)
                    cache.crop(-1)
            assert press.compression_count == 2
    torch.testing.assert_close(logits[:12], logits[12:], rtol=0, atol=1e-9)
    with package.H2OPress(0.5)(model):
        cache = filled(model, None, context)
        with pytest.raises(UnsupportedCacheError, match="adds attention up"):
            cache.crop(-1)


@both
def test_continuous_batching_is_refused(package):
    """It hands its own cache down as `cache`; what is raised stays in its thread."""
    model, kind = make(), transformers.generation.continuous_batching.PagedAttentionCache
    handle = package.KnormPress(0.5).register(model)
    with pytest.raises(UnsupportedCacheError, match="paged cache"):
        model(token_ids(1, LENGTH), use_cache=False, cache=kind.__new__(kind))
    with pytest.warns(RuntimeWarning, match=r"KnormPress .*paged cache"):
        handle.remove()


@both
@presses_of("acting")
def test_a_scope_that_came_after_the_context_says_so(package, make_press):
    """If it would have evicted any of it; it then refuses draft tokens beside a context, too."""
    model, ids = make(), token_ids(1, LENGTH)
    press, idle = (make_press(package, ratio=ratio, prompts=PROMPTS) for ratio in (0.5, 0.0))
    cache, handle = filled(model, None, ids), press.register(model)
    model(token_ids(1, 3), past_key_values=cache)
    with pytest.warns(RuntimeWarning, match=rf"{type(press).__name__}.*before"):
        handle.remove()
    with press(model), pytest.raises(UnsupportedInputError, match="draft"):
        model.generate(ids, prompt_lookup_num_tokens=3, **GENERATE)
    assert not idle.acts_on(LENGTH)


@both
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("run", ["nothing", "short", "no ratio", "no cache", "read again"])
def test_a_scope_with_nothing_to_do_says_nothing(package, run):
    model, cache = make(), DynamicCache(config=make().config)
    press = package.SnapKVPress(0.0 if run == "no ratio" else 0.5, window_size=8)
    n = 8 if run == "short" else LENGTH
    if run == "read again":
        filled(model, press, token_ids(1, n), cache)
    with press(model):
        if run == "no cache":
            model(token_ids(1, n), use_cache=False)
        elif run != "nothing":
            filled(model, None, token_ids(1, n), cache)
    with press(model):
        if run == "no ratio":
            filled(model, None, token_ids(1, 1), cache)


@both
@pytest.mark.parametrize("way", ["layers", "forward of the decoder"])
def test_a_scope_that_saw_layers_only_says_so(package, way):
    """A patch is the decoder's `forward`, so that it sees such a call; a hook does not."""
    model, ids = make(), token_ids(1, LENGTH)
    cache, decoder = DynamicCache(config=model.config), model.model
    handle = package.KnormPress(0.5).register(model)
    if way == "layers":
        states = decoder.embed_tokens(ids)
        rotary = decoder.rotary_emb(states, torch.arange(LENGTH)[None])
        for layer in decoder.layers:
            given = with_cache(layer, cache)
            states = layer(states, attention_mask=None, position_embeddings=rotary, **given)
    else:
        decoder.forward(ids, **with_cache(decoder, cache))
    is_seen = package is patch_impl and way != "layers"
    assert kept_lengths(cache)[0].tolist() == [[LENGTH // (1 + is_seen)] * 2]
    with nullcontext() if is_seen else pytest.warns(RuntimeWarning, match="evicted nothing.*began"):
        handle.remove()


# ---- turns ---------------------------------------------------------------------------------------


def test_a_turn_keeps_the_best_of_all_that_is_there(package):
    model, cache = make(), DynamicCache(config=make().config)
    with package.EveryTurnPress(package.KnormPress(), target_size=20)(model):
        model(token_ids(1, LENGTH), past_key_values=cache)
        before = cache.layers[0].positions[0, 0].tolist()
        with watched() as seen:
            model(token_ids(1, 12, seed=1), past_key_values=cache)
    new = seen[0][0][1][:, :, -12:]
    old = filled(model, None, token_ids(1, LENGTH)).layers[0].keys[:, :, before]
    norms = torch.cat((old, new), dim=2)[0, 0].norm(dim=-1).tolist()  # RoPE leaves them as they are
    held = before + list(range(LENGTH, LENGTH + 12))
    best = sorted(sorted(range(len(held)), key=norms.__getitem__)[:20])
    assert cache.layers[0].positions[0, 0].tolist() == [held[i] for i in best]
