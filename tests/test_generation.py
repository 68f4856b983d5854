"""A pruned cache continues as any other: positions, questions, generate, batches with padding."""

import copy
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from transformers import DynamicCache

import hooks_impl
from attention_patch import headwise
from press_core import cache_nbytes, kept_lengths
from press_core.errors import ScopeError, UnsupportedCacheError, UnsupportedInputError
from tests.decoders import tiny_decoder
from tests.presses import TABLES, listed
from tests.support import (
    GREEDY,
    both,
    build,
    context_for,
    example_for,
    filled,
    forwards,
    held,
    left_padded,
    make,
    token_ids,
)

implementations = pytest.mark.parametrize("implementation", ["sdpa", "eager"])
LENGTH = 48
PADDING = [0, 13, 30]

# ---- every press, and some of presses ------------------------------------------------------------

EXTRA, OPTIONS, WAYS = listed("kinds"), TABLES["options"], TABLES["ways"]
KINDS = [*sorted(hooks_impl.PRESSES), *EXTRA, *OPTIONS]
DECODES = ("Decoding", "H2O", "CAM", "DMSPress", "EveryTurn", "decoding", "phases", "streaming,")
"""In names of those that act on later tokens."""
every_kind = pytest.mark.parametrize("name", KINDS)
prefilling_ways = pytest.mark.parametrize(
    "name", [name for name in WAYS if not any(word in name for word in DECODES)]
)


def press_of(package, name, model):
    if name in EXTRA:
        return EXTRA[name](package)
    made_of, fields = TABLES["options"].get(name, (name, {}))
    return replace(example_for(package, made_of, 0.5, model), **fields)


TURNS = [[48, 35, 18], [5, 2, 8], *[[1] * 3] * 2, [2, 7, 4], [1] * 3]
"""By forward, how many tokens each row has; the others are padding."""


@pytest.mark.parametrize(
    ("name", "side"),
    [
        *((name, "left") for name in KINDS if name != "FinchPress"),
        *((name, "right") for name in WAYS),
    ],
)
def test_rows_of_a_padded_batch_are_those_of_the_row_alone(package, name, side):
    """In what they hold and answer; padding of later turns may be on either side."""
    model = make(("llama", "gpt_neox")[KINDS.index(name) % 2])
    torch.manual_seed(0)
    press, cache, together = press_of(package, name, model), DynamicCache(), []
    longest = [max(lengths) for lengths in TURNS]
    distinct = torch.stack([torch.randperm(125)[: sum(longest)] + 3 for _ in range(3)])  # no ties
    given = distinct.split(longest, dim=1)
    masks = [
        (torch.arange(ids.shape[1]) < torch.tensor(lengths)[:, None]).long()
        for ids, lengths in zip(given, TURNS, strict=True)
    ]
    masks = [mask if side == "right" and turn else mask.flip(1) for turn, mask in enumerate(masks)]
    seen = torch.cat(masks, dim=1)
    positions = (seen.cumsum(dim=-1) - 1).clamp(min=0)
    with press(model):
        end = 0
        for ids in given:
            start, end = end, end + ids.shape[1]
            more = {"attention_mask": seen[:, :end], "position_ids": positions[:, start:end]}
            together.append((model(ids, past_key_values=cache, **more).logits, held(cache)))
        for row, where in enumerate(seen.bool().tolist()):
            alone = DynamicCache()
            for ids, mask, (logits, of_all) in zip(given, masks, together, strict=True):
                own = mask[row].bool()
                expected = model(ids[row : row + 1, own], past_key_values=alone).logits[0]
                torch.testing.assert_close(logits[row, own], expected, rtol=0, atol=1e-9)
                for layer, single in zip(of_all, held(alone), strict=True):
                    found = [[int(positions[row, p]) for p in h if where[p]] for h in layer[row]]
                    assert found == single[0]


@every_kind
def test_generate_in_a_padded_batch_is_what_forwards_of_each_row_are(package, name):
    model = make("gpt_neox")
    press, (ids, mask, _) = press_of(package, name, model), left_padded(3, LENGTH, PADDING)
    ids[:, -8], before = context_for(name, LENGTH)[:, -8], repr(press)
    with press(model):
        batch = model.generate(ids, attention_mask=mask, max_new_tokens=5, **GREEDY)
        for row, n in enumerate(PADDING):
            cache, by_hand, new = DynamicCache(config=model.config), [], ids[row : row + 1, n:]
            for _ in range(5):
                logits = model(new, past_key_values=cache).logits
                new = logits[:, -1:].argmax(dim=-1)
                by_hand.append(int(new))
            assert batch[row, -5:].tolist() == by_hand
    assert repr(press) == before


def test_generate_skips_what_a_padded_batch_with_turned_keys_has_seen(package):
    """Of the most recent tokens alone all distances stay, so that nothing else changes."""
    model, (ids, mask, positions), found = make(), left_padded(2, LENGTH, [7, 0]), []
    given = {"attention_mask": mask[:, :20], "position_ids": positions[:, :20]}
    more = {"attention_mask": mask, "max_new_tokens": 4, **GREEDY}
    recent = package.StreamingLLMPress(0.5, n_sink=0)
    for press in (recent, package.KeyRerotationPress(recent)):
        cache = filled(model, press, ids[:, :20], **given)
        with press(model):
            found.append(model.generate(ids, past_key_values=cache, **more))
    assert torch.equal(*found)


@pytest.mark.parametrize("rerotate_keys", [True, False])
def test_generate_counts_no_delimiter(package, rerotate_keys):
    model, new, cache = make(), context_for("FinchPress", LENGTH), DynamicCache()
    press = replace(press_of(package, "FinchPress", model), rerotate_keys=rerotate_keys)
    told = {"return_dict_in_generate": True, "output_logits": True}
    with press(model):
        for logits in model.generate(new, max_new_tokens=5, **told, **GREEDY).logits:
            expected = model(new, past_key_values=cache).logits[:, -1]
            torch.testing.assert_close(logits, expected.float(), rtol=0, atol=1e-5)
            new = expected.argmax(dim=-1, keepdim=True)


@every_kind
def test_rows_may_be_selected_repeated_and_reordered(package, name):
    """Between forwards, and the scope goes on as if they had been run so from the start."""
    model, rows = make(), [2, 0, 0, 2]
    press = press_of(package, name, model)
    ids, following = context_for(name, LENGTH).repeat(3, 1), forwards([1] * 7, batch=3)
    ids[1:, :-8] = token_ids(2, LENGTH - 8, seed=5)
    cache, reference = DynamicCache(config=model.config), DynamicCache(config=model.config)
    with press(model):
        model(ids, past_key_values=cache)
        model(ids[rows], past_key_values=reference)
        for step, new in enumerate(following):
            if step == 2:
                cache.batch_select_indices(torch.tensor([2, 0]))
                cache.batch_repeat_interleave(2)
                cache.reorder_cache(torch.tensor([0, 2, 3, 1]))
            logits = model(new if step < 2 else new[rows], past_key_values=cache).logits
            expected = model(new[rows], past_key_values=reference).logits
            logits = logits if step >= 2 else logits[rows]
            torch.testing.assert_close(logits, expected, rtol=0, atol=1e-10)
    assert held(cache) == held(reference)


@prefilling_ways
def test_many_questions_on_one_compressed_cache(package, name):
    """After the scope as in it; each is cropped off again, or asked of a copy."""
    model, cache = make(), DynamicCache(config=make().config)
    questions = forwards([6, 1, 9])
    with press_of(package, name, model)(model):
        model(context_for(name, LENGTH), past_key_values=cache)
        seen = cache.get_seq_length()
        expected = [model(ids, past_key_values=copy.deepcopy(cache)).logits for ids in questions]
    with headwise(model):
        for ids, logits in zip(questions, expected, strict=True):
            assert torch.equal(model(ids, past_key_values=cache).logits, logits)
            cache.crop(-ids.shape[1])
            assert cache.get_seq_length() == seen


@pytest.mark.parametrize("name", WAYS)
def test_a_cache_that_was_reset_is_as_new_or_refused(package, name):
    model, cache, found = make(), DynamicCache(config=make().config), []
    with press_of(package, name, model)(model):
        for _ in range(2):
            try:
                for ids in (context_for(name, LENGTH), *forwards([1] * 4)):
                    model(ids, past_key_values=cache)
            except (ScopeError, UnsupportedCacheError):
                assert found
                return
            found.append(held(cache))
            cache.reset()
            assert cache.get_seq_length() == 0
    assert found[0] == found[1]


@prefilling_ways
def test_bytes_are_those_of_what_is_kept(package, name):
    """And of a few per cent of room."""
    model, ids = build("llama"), context_for(name, 400)
    whole, cache = (filled(model, p, ids) for p in (None, press_of(package, name, model)))
    share = float(torch.stack(kept_lengths(cache)).float().mean()) / 400
    channels = 0.75 if name == "channels freed" else 1
    assert cache_nbytes(cache) <= share * channels * 1.03 * cache_nbytes(whole)


@pytest.mark.parametrize(
    "name", ["AdaKVPress", "DMSPress", "H2OPress", "channels freed", *list(EXTRA)[-5:-1]]
)
def test_beams_score_as_their_sequences_do_alone(package, name):
    """Whatever beams are reordered: what is remembered of a row follows the row."""
    model, ids = make(), token_ids(2, 30)
    press = press_of(package, name, model)
    asked = {"num_beams": 3, "num_return_sequences": 2, "length_penalty": 0.0, **GREEDY}
    asked |= {"return_dict_in_generate": True, "output_scores": True}
    with press(model):
        found = model.generate(ids, max_new_tokens=8, **asked)
    assert found.sequences.shape == (4, 38)
    for sequence, score in zip(found.sequences, found.sequences_scores, strict=True):
        cache, total = DynamicCache(config=model.config), 0.0
        with press(model):
            logits = model(sequence[None, :30], past_key_values=cache).logits
            for token in sequence[30:]:
                total += float(logits[0, -1].log_softmax(dim=-1)[token])
                logits = model(token.view(1, 1), past_key_values=cache).logits
        assert total == pytest.approx(float(score), abs=1e-4)


# ---- one press, all ways of going on -------------------------------------------------------------


def snapkv(package):
    return package.SnapKVPress(0.5, window_size=8)


@both
@implementations
def test_positions_continue(package, implementation):
    """A question after a pruned context is rotated and masked as with explicit position ids."""
    model = make(attn_implementation=implementation, dtype=torch.float32)
    question = token_ids(1, 7, seed=1)
    logits = []
    for position_ids in (None, torch.arange(LENGTH, LENGTH + 7)[None]):
        cache = filled(model, snapkv(package), token_ids(1, LENGTH))
        assert cache.get_seq_length() == LENGTH
        assert cache.layers[0].keys.shape[2] == LENGTH // 2
        logits.append(model(question, past_key_values=cache, position_ids=position_ids).logits)
    assert torch.equal(*logits)


@implementations
def test_generate_inside_the_scope_is_generate_after_it(package, implementation):
    model, ids = make(attn_implementation=implementation), token_ids(1, LENGTH)
    with snapkv(package)(model):
        inside = model.generate(ids, max_new_tokens=8, **GREEDY)
    cache = filled(model, snapkv(package), ids)
    after = model.generate(inside[:, :-7], past_key_values=cache, max_new_tokens=7, **GREEDY)
    assert torch.equal(inside, after)


@both
def test_only_a_prefill_into_a_cache_is_pruned(package):
    model, ids = make(dtype=torch.float32), token_ids(1, LENGTH)
    reference, cache = model(ids, use_cache=False).logits, DynamicCache(config=model.config)
    with snapkv(package)(model):
        assert torch.equal(model(ids, use_cache=False).logits, reference)
        model(ids, past_key_values=cache)
        model(token_ids(1, 20), past_key_values=cache)
    assert [int(kept[0, 0]) for kept in kept_lengths(cache)] == [LENGTH // 2 + 20] * 2
    plain, whole = (filled(model, p, ids) for p in (None, package.SnapKVPress(0.0)))
    for one, other in zip(plain.layers, whole.layers, strict=True):
        assert type(one) is type(other)
        assert torch.equal(one.keys, other.keys)


@both
@pytest.mark.parametrize("padding", [[0, 20], [0, 0]], ids=["rows", "layers"])
def test_uneven_rows_or_layers_need_a_scope_to_be_masked(package, padding):
    model = make(dtype=torch.float32)
    ids, mask, _ = left_padded(2, LENGTH, padding)
    press = snapkv(package) if any(padding) else package.PyramidKVPress(0.5, 4)
    cache = filled(model, press, ids, attention_mask=mask)
    longer = torch.cat((mask, torch.tensor([[0], [1]])), dim=1)
    with pytest.raises(ScopeError, match="keep the scope"):
        model(ids[:, :1], attention_mask=longer, past_key_values=copy.deepcopy(cache))
    with package.KnormPress(0.5)(model):  # any scope gives the mask that such a cache needs
        model(ids[:, :1], attention_mask=longer, past_key_values=cache)


# ---- uneven questions of a second turn, with a mask of all tokens --------------------------------

QUESTION, UNEVEN = 8, [3, 0]  # and the padding in it
HALF = LENGTH // 2


def before_questions(package):
    """A model, a press that rerotates keys, and the cache that it leaves of contexts `(2, LENGTH)`.

    Beside them, these contexts, the questions, and the mask of all.
    """
    model = tiny_decoder("smollm3").double()  # its last layer does not rotate keys
    press = package.KeyRerotationPress(package.KnormPress(0.5))
    context, mask = token_ids(2, LENGTH), torch.ones(2, LENGTH + QUESTION, dtype=torch.long)
    mask[0, LENGTH : LENGTH + UNEVEN[0]] = 0
    texts = context, token_ids(2, QUESTION, seed=1), mask
    return (model, press, filled(model, press, context)), texts


def test_a_mask_of_all_tokens_behind_rerotated_keys_outside_of_the_scope(package):
    (model, press, cache), (_, question, mask) = before_questions(package)

    def asked(**arguments):
        return model(question, past_key_values=copy.deepcopy(cache), **arguments).logits[:, -1]

    columns = rf"attention_mask\[:, -{HALF + QUESTION}:\]"
    with pytest.raises(UnsupportedInputError, match=columns):
        asked(attention_mask=mask)
    with pytest.raises(UnsupportedInputError, match=f"continue at {HALF}"):
        asked(position_ids=torch.arange(LENGTH, LENGTH + QUESTION)[None])
    chunks = {"past_key_values": copy.deepcopy(cache), "prefill_chunk_size": 3, **GREEDY}
    with press(model), pytest.raises(UnsupportedInputError, match=columns):
        model.generate(question, attention_mask=mask, **chunks)
    assert torch.equal(asked(attention_mask=torch.ones_like(mask)), asked())
    last = mask[:, -HALF - QUESTION :]
    positions = (last.cumsum(dim=-1) - 1)[:, -QUESTION:]
    found = asked(attention_mask=last, position_ids=positions)
    counted = {"cache_position": torch.arange(LENGTH, LENGTH + QUESTION)}  # in transformers 5.2
    for scope in (press(model), headwise(model), package.KnormPress(0.5)(model)):
        for given in ({}, counted):
            with scope:  # each helps with reading
                answer = asked(attention_mask=mask, **given)
                torch.testing.assert_close(answer, found, rtol=0, atol=1e-10)


@both
def test_a_mask_that_hides_rerotated_tokens_is_refused(package):
    (model, press, cache), (_, question, mask) = before_questions(package)
    mask[0, 5] = 0
    with pytest.raises(UnsupportedInputError, match=rf"hides .*{LENGTH} tokens"):
        filled(model, press, question, cache, attention_mask=mask)
    for scope in (None, press):  # as if the cache held no tokens
        with pytest.raises(UnsupportedInputError, match=rf"too short .*{LENGTH} that"):
            filled(model, scope, question, cache, attention_mask=torch.ones_like(question))


@pytest.mark.parametrize("inside", [True, False])
def test_generate_goes_on_from_rerotated_keys(package, inside):
    """Of all tokens it would take the last of the context for new ones."""
    (model, press, cache), (context, question, mask) = before_questions(package)
    ids = torch.cat((context, question), dim=1)
    options = {"max_new_tokens": 4, **GREEDY}
    with press(model) if inside else nullcontext():
        for given in ({"input_ids": ids}, {"inputs_embeds": model.get_input_embeddings()(ids)}):
            given |= {"attention_mask": mask, "past_key_values": copy.deepcopy(cache)}
            with pytest.raises(UnsupportedInputError, match=f"first {HALF}"):
                model.generate(**given, **options)
        given = {"attention_mask": mask[:, HALF:], "past_key_values": copy.deepcopy(cache)}
        found = model.generate(ids[:, HALF:], **given, **options)
    for row, n in enumerate(UNEVEN):
        alone = copy.deepcopy(cache)
        alone.batch_select_indices(torch.tensor([row]))
        token, answer = question[row : row + 1, n:], []
        for _ in range(4):
            token = model(token, past_key_values=alone).logits[:, -1:].argmax(dim=-1)
            answer.append(int(token))
        assert found[row, -4:].tolist() == answer
