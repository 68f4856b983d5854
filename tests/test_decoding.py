"""Presses that act while decoding, against references that hold everything and forget nothing."""

import pickle

import numpy
import pytest
import torch
from transformers import DynamicCache

from experiments.testbed.recipes import DELIMITER
from press_core import Needs, Phase, UnsupportedInputError, kept_lengths
from tests.decoders import tiny_decoder
from tests.presses import TABLES, listed, read_press
from tests.slow import Whole
from tests.support import (
    both,
    example_for,
    filled,
    forwards,
    held,
    in_parts,
    left_padded,
    make,
    nested,
    ran,
    table_beside,
)

# ---- at intervals --------------------------------------------------------------------------------

LENGTHS = table_beside(__file__, "decoding")


@both
@pytest.mark.parametrize("name", LENGTHS)
def test_lengths_over_steps(package, name):
    row, model = LENGTHS[name], make()
    cache, press = DynamicCache(config=model.config), read_press(row["press"], package)
    with press(model):
        for ids, n in zip(forwards(row["given"]), row["kept"], strict=True):
            model(ids, past_key_values=cache)
            assert [int(kept[0, 0]) for kept in kept_lengths(cache)] == [n, n]
    assert cache.get_seq_length() == sum(row["given"])


@both
def test_a_scope_that_opens_counts_from_there(package):
    model, cache = make(), DynamicCache(config=make().config)
    press, lengths = package.DecodingPress(package.KnormPress(), 4, 20), []
    for steps in (3, 3, 5):
        with press(model):
            for ids in forwards([30] * (not lengths) + [1] * steps):
                model(ids, past_key_values=cache)
                lengths.append(cache.layers[0].keys.shape[2])
            assert press.compression_count == steps // 4
    assert lengths == [30, 31, 32, 33, 34, 35, 36, 37, 38, 39, 20, 21]


@both
def test_caches_in_turn_count_for_themselves(package):
    model, press = make(), package.DecodingPress(package.SnapKVPress(window_size=4), 4, 20)
    texts = [forwards([n] + [1] * 9, batch) for n, batch in ((30, 1), (25, 2))]
    caches, alone = [DynamicCache() for _ in texts], [ran(model, press, text)[0] for text in texts]
    with press(model):
        for step in zip(*texts, strict=True):
            for cache, ids in zip(caches, step, strict=True):
                model(ids, past_key_values=cache)
        assert [*map(held, pickle.loads(pickle.dumps(caches)))] == [*map(held, alone)]


# ---- by the exact queries ------------------------------------------------------------------------

BASES = listed("bases")
STEPS = TABLES["steps"]


@pytest.mark.parametrize(
    ("base", "steps", "pruned_before", "family"),
    [
        *((base, steps, False, "llama") for base in BASES for steps in STEPS),
        *((base, "questions", False, "gpt_neox") for base in ("tova", "snapkv")),
        ("snapkv", "questions", True, "llama"),
    ],
)
def test_heads_keep_what_a_prefill_of_what_they_hold_keeps(
    package, base, steps, pruned_before, family
):
    """In layers in which keys and queries depend on tokens and positions alone.

    Those are the first, and the others as long as nothing was evicted.
    """
    if steps == "each step" and base in ("snapkv", "pyramid"):
        return  # which ask for three queries
    fields, lengths = ((2, 12), STEPS[steps][1]) if pruned_before else STEPS[steps]
    decoding = package.DecodingPress(BASES[base](package), *fields)
    prefilling = package.SnapKVPress(0.5, window_size=4) if pruned_before else None
    n, reference = decoding.target_size, BASES["snapkv" if base == "pyramid" else base](package)
    model, alone, given = make(family), make(family), forwards(lengths, batch=2)
    cache, everything, seen, n_pruned = DynamicCache(config=model.config), torch.cat(given, 1), 0, 0
    with package.PrefillDecodingPress(prefilling, decoding)(model):
        for step, ids in enumerate(given):
            before = held(cache) if step else []
            model(ids, past_key_values=cache)
            new, seen = list(range(seen, seen + ids.shape[1])), seen + ids.shape[1]
            for layer, row, head in numpy.ndindex(len(before), 2, cache.layers[0].keys.shape[1]):
                tokens = before[layer][row][head] + new
                found = held(cache)[layer][row][head]
                if step % decoding.compression_interval or len(tokens) <= n:
                    assert found == tokens
                elif layer == 0 or len(tokens) == seen:
                    text, places = everything[row : row + 1, tokens], torch.tensor([tokens])
                    kept = filled(alone, reference.with_budget(n), text, position_ids=places)
                    assert found == [tokens[i] for i in held(kept)[layer][0][head]]
                    n_pruned += layer + 1
    assert n_pruned > 0


def test_presses_that_know_too_few_queries(package):
    """A window or sinks longer than what is remembered: a number for every token all the same."""
    model = make()
    for base in (package.ExpectedAttentionPress(n_sink=4), package.SnapKVPress(window_size=12)):
        press = package.DecodingPress(base, compression_interval=2, target_size=16)
        cache, _ = ran(model, press, forwards([30, 1, 1]))
        assert [len(head) for head in held(cache)[0][0]] == [16, 16]
        wanted = list(range(4)) if Needs.ROPE in base.needs else list(range(20, 32))
        assert all(set(wanted) <= set(head) for head in held(cache)[0][0])


def test_queries_of_selected_keys_are_those_that_are_known(package):
    """In a decode step, those of its own tokens."""
    lengths = []

    def see(call):
        every = torch.arange(call.length).expand(*call.keys.shape[:2], -1)
        torch.testing.assert_close(call.select(every).queries(), call.queries())
        known = call.select(every[..., 5:-1]).queries(9)
        torch.testing.assert_close(known, call.queries()[:, :, :-1])
        older = call.select(every[..., :9])
        for read in (older.queries, older.queries_before_rope):
            with pytest.raises(UnsupportedInputError, match="latest 3 tokens only"):
                read()
        with pytest.raises(UnsupportedInputError, match="only those of 3 tokens"):
            call.select(every).align_to_keys(call.keys[..., -3:, 0])
        lengths.append(call.length)

    press = package.KnormPress.collector(see, phases=Phase.DECODING)
    ran(make(), press, forwards([20, 3]))
    assert lengths == [23, 23]


def _without_positions(_, args, given):
    return args, {**given, "position_ids": None}


@pytest.mark.parametrize("rerotate", [False, True, None])
def test_padding_that_positions_count(package, rerotate):
    """Without `position_ids` models count padding too; rotary embeddings see distances only."""
    model, press = make(), package.StreamingLLMDecodingPress(16, 3, bool(rerotate))
    if rerotate is None:  # and attention modules do not get them
        press = package.DecodingPress(package.ExpectedAttentionPress(n_sink=2), 4, 16)
        for layer in model.model.layers:
            layer.self_attn.register_forward_pre_hook(_without_positions, with_kwargs=True)
    ids, mask, positions = left_padded(3, 40, [0, 13, 33])
    runs = [[], []]
    for counted, run in zip((True, False), runs, strict=True):
        cache, seen, where = DynamicCache(config=model.config), mask, positions
        with press(model):
            for new in (ids, *forwards([1, 4, *[1] * 9], batch=3)):
                if new is not ids:
                    seen = torch.cat((seen, torch.ones_like(new)), dim=1)
                    where = where[:, -1:] + 1 + torch.arange(new.shape[1])
                given = {"attention_mask": seen, **({"position_ids": where} if counted else {})}
                logits = model(new, past_key_values=cache, **given).logits
                run.append((logits[seen[:, -new.shape[1] :].bool()], held(cache)))
    for (logits, kept), (counted_logits, counted_kept) in zip(*runs, strict=True):
        assert kept == counted_kept
        torch.testing.assert_close(counted_logits, logits, rtol=0, atol=1e-5)


@both
def test_a_row_that_begins_with_fewer_tokens_than_sinks(package):
    """What is not known of its sinks yet is found when it is cut."""
    model, press = make(), package.StreamingLLMDecodingPress(12, 4, rerotate=True)
    padded = left_padded(2, 40, [18, 0])
    _, (*_, together) = in_parts(model, press, padded, [0, *range(20, 41)])
    _, (*_, alone) = in_parts(model, press, padded, [18, *range(20, 41)], [0])
    assert (together[:1] - alone).abs().max() < 1e-6


def test_sinks_are_rotated_by_the_frequencies_of_the_window(package):
    """LongRoPE has others beyond the trained length; those of the model are left alone."""
    scaled = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 32}
    scaled |= {"factor": 4.0, "short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    model, (ids,) = make(num_layers=1), forwards([41])
    model.config.rope_parameters = scaled
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    press = package.StreamingLLMDecodingPress(12, 2, rerotate=True)
    found = ran(model, press, ids.split([40, 1], dim=1))[0].layers[0].keys[:, :, :2]
    frequencies = model.model.rotary_emb.inv_freq.clone()
    filled(model, package.KeyRerotationPress(package.KnormPress(0.5)), ids)
    assert torch.equal(model.model.rotary_emb.inv_freq, frequencies)
    moved = torch.cat((ids[:, :28], ids[:, :2], ids[:, 30:]), dim=1)
    torch.testing.assert_close(found, filled(model, None, moved).layers[0].keys[:, :, 28:30])


READ_QUERIES = ["CapPress", "CompactorPress", "DropKVPress", "ExpectedAttentionPress", "RKVPress"]


@pytest.mark.parametrize("name", [*READ_QUERIES, "NonCausalAttnPress", "SnapKVPress"])
def test_a_row_without_new_tokens_is_not_pruned_by_queries(package, name):
    """Alone it would not even run."""
    model, (ids, mask, positions) = make(), left_padded(2, 30, [10, 0])
    press = package.DecodingPress(example_for(package, name, 0.0, model), 1, target_size=12)
    cache, step = DynamicCache(config=model.config), torch.tensor([[1], [0]])
    with torch.no_grad(), press(model):
        model(ids, past_key_values=cache, attention_mask=mask, position_ids=positions)
        more = {
            "attention_mask": torch.cat((mask, step), dim=1),
            "position_ids": 20 + 9 * (1 - step),
        }
        model(ids[:, :1], past_key_values=cache, **more)
    alone, _ = ran(model, press, [ids[:1, 10:], ids[:1, :1]])
    for both_rows, row in zip(held(cache), held(alone), strict=True):
        assert both_rows == [[[10 + p for p in head] for head in row[0]], [[*range(30)]] * 2]


@pytest.mark.parametrize("n_padding", [1, 3])  # positions go on over one that is not counted
@pytest.mark.parametrize(
    "name", ["rerotated", "streaming", "beside one that reads positions", "around Finch"]
)
def test_padding_in_a_later_turn(package, name, n_padding):
    """Each row decodes as it does alone, though a question of the batch was padded."""
    model, press = make(), package.StreamingLLMDecodingPress(16, 3, name == "rerotated")
    if name.startswith("beside"):
        press = nested(package.DecodingPress(package.LeverageScorePress(), 4, 12), press)
    context, question, *steps = forwards([20, 8, 1, 1, 1, 1, 1, 1], batch=2)
    if name == "around Finch":
        context[:, 12] = DELIMITER
        finch = package.FinchPress(0.5, delimiter_token_id=DELIMITER)
        press = nested(package.KnormPress(0.2), finch)
    cache, alone = DynamicCache(config=model.config), DynamicCache(config=model.config)
    mask = torch.ones(2, 0, dtype=torch.long)
    with press(model):
        for n, ids in enumerate((context, question, *steps)):
            new = torch.ones_like(ids)
            new[0, :n_padding] = n != 1
            mask = torch.cat((mask, new), dim=1)
            where = (mask.cumsum(dim=-1) - 1)[:, -ids.shape[1] :]
            given = {"attention_mask": mask, "position_ids": where.clamp(min=0)}
            found = model(ids, past_key_values=cache, **given).logits
            expected = model(ids[:1, n_padding if n == 1 else 0 :], past_key_values=alone).logits
            assert (found[0, -1] - expected[0, -1]).abs().max() < 1e-5


@pytest.mark.parametrize("steps", [[1] * 5, [1, 3, 1, 2, 1]])
def test_heavy_hitters_of_a_short_row_that_another_scope_leaves_whole(package, steps):
    """The longer row is pruned beside it, down to as many tokens or to more."""
    model, (ids, mask, positions) = make(), left_padded(2, 30 + sum(steps), [16, 0])
    press = nested(package.H2OPress(0.5), package.DecodingPress(package.KnormPress(), 2, 8))
    ends, found = numpy.cumsum([0, 30, *steps]), []
    for rows, start in (([0, 1], 0), ([0], 16)):
        cache = DynamicCache(config=model.config)
        with press(model):
            for begin, end in zip([start, *ends[1:]], ends[1:], strict=False):
                given = {"position_ids": positions[rows, begin:end], "past_key_values": cache}
                given["attention_mask"] = mask[rows, start:end]
                logits = model(ids[rows, begin:end], **given).logits[0, -1]
                found.append((logits, kept_lengths(cache)[0][0].tolist()))
    n = len(found) // 2
    for (logits, kept), (expected, alone) in zip(found[:n], found[n:], strict=True):
        torch.testing.assert_close(logits, expected)
        assert kept == alone == [7, 7]


# ---- endless -------------------------------------------------------------------------------------


def streamed(seen, capacity, n_sink):
    """What is left before a forward of what was held after the last."""
    if len(seen) <= capacity:
        return seen
    return seen[:n_sink] + seen[len(seen) - (capacity - n_sink) :]


@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
@pytest.mark.parametrize("rerotate", [False, True])
@pytest.mark.parametrize(("capacity", "n_sink"), [(16, 4), (16, 0), (5, 4), (40, 3)])
def test_sinks_and_window_at_each_step(package, family, rerotate, capacity, n_sink):
    """And logits of a full cache of which as little is seen, where keys stay where they were."""
    model, whole = make(family), Whole(make(family))
    press = package.StreamingLLMDecodingPress(capacity, n_sink, rerotate)
    cache = DynamicCache(config=model.config)
    left, seen, n_cuts = [], 0, 0
    with press(model):
        for ids in forwards([12, 1, 9, 1, 1, 3, *[1] * 18], batch=2):
            n_cuts += len(left) > capacity
            left = streamed(left, capacity, n_sink)
            logits = model(ids, past_key_values=cache).logits
            if not rerotate:
                torch.testing.assert_close(logits, whole(ids), rtol=0, atol=1e-10)
            left, seen = left + list(range(seen, seen + ids.shape[1])), seen + ids.shape[1]
            shown = streamed(left, capacity, n_sink)
            whole.shown = [[[shown] * layer.keys.shape[1]] * 2 for layer in cache.layers]
            for layer, positions in zip(cache.layers, held(cache), strict=True):
                assert positions == [[left] * layer.keys.shape[1]] * 2
                assert layer.get_seq_length() == seen
            assert press.compression_count == n_cuts
    assert press.compression_count == n_cuts > 0


@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
@pytest.mark.parametrize(
    ("dtype", "atol"), [(torch.float32, 2e-4), (torch.bfloat16, None)], ids=["float32", "bfloat16"]
)
def test_positions_in_the_cache(package, family, dtype, atol):
    """Of one layer, keys depend on a token and its position alone: run what is held as a text.

    Distances between any two keys are those in the cache. The error must not grow either, over
    hundreds of steps.
    """
    model = make(family, num_layers=1, dtype=dtype)
    cache, given = DynamicCache(config=model.config), forwards([30, 3, *[1] * 150])
    everything, left, seen, sizes = torch.cat(given, dim=1), [], 0, []
    with package.StreamingLLMDecodingPress(16, 4, rerotate=True)(model):
        for step, ids in enumerate(given):
            left = streamed(left, 16, 4) + list(range(seen, seen + ids.shape[1]))
            logits = model(ids, past_key_values=cache).logits
            seen += ids.shape[1]
            sizes.append(cache.layers[0].keys[:, :, :4].float().norm(dim=-1))
            assert logits.isfinite().all()
            if atol is not None and (step < 8 or step % 50 == 0):
                text = DynamicCache(config=model.config)
                expected = model(everything[:, left], past_key_values=text).logits
                expected = expected[:, -ids.shape[1] :]
                torch.testing.assert_close(logits, expected, rtol=0, atol=atol)
                products = [of.layers[0].keys @ of.layers[0].keys.mT for of in (cache, text)]
                torch.testing.assert_close(*products, rtol=0, atol=1e-4)
    torch.testing.assert_close(sizes[-1], sizes[0], rtol=0.02, atol=0)


# ---- what a press reads --------------------------------------------------------------------------


@both
@pytest.mark.parametrize("wrapped", [False, True])
def test_only_what_a_press_reads_is_kept_for_it(package, wrapped):
    class InOwnWords(package.KnormPress):
        def score(self, *arguments):
            return super().score(*arguments)

    model, kept = make(), {}
    for base in (package.KnormPress(), package.SnapKVPress(window_size=4), InOwnWords()):
        press = package.CriticalKVPress(base) if wrapped else base
        with package.DecodingPress(press, 8, 20)(model):
            cache, _ = ran(model, None, forwards([24, 1, 1, 1]))
            (memory,) = cache.layers[0].memories.values()
            kept[type(base).__name__] = set(memory.last())
    where = {"cos", "sin", "position_ids"}
    assert kept["KnormPress"] == set()
    assert kept["SnapKVPress"] == {*where, "query"}
    assert kept["InOwnWords"] == {*where, "hidden_states"}


@pytest.mark.parametrize("name", ["gemma3n_text", "gemma4_text"])
def test_layers_that_read_the_keys_of_a_layer_that_is_pruned(package, name):
    """They get the mask of that layer, which may have been pruned when they read it."""
    model, logits = tiny_decoder(name), []
    press, padded = package.H2OPress(0.5), left_padded(2, 31, [0, 3])
    for rows, first in (([0, 1], 0), ([1], 3)):  # a padded batch, and its second row alone
        _, of_rows = in_parts(model, press, padded, [first, 30, 31], rows)
        logits += [each[-1, -1] for each in of_rows]
    torch.testing.assert_close(logits[:2], logits[2:], rtol=0, atol=1e-4)
