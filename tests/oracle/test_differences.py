"""What is kept differently on purpose: what kvpress does, what is done here, and that they differ.

Each of these tests fails as soon as either side changes.
"""

from __future__ import annotations

from contextlib import contextmanager
from copy import deepcopy
from unittest.mock import patch

import kvpress
import pytest
import torch
from kvpress.presses import duo_attention_press
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import DynamicCache, PreTrainedTokenizerFast

from press_core import AttentionCall, HyperparameterError, PressError, UnsupportedInputError
from press_core.presses.lagkv import LagKV
from tests.oracle import handed
from tests.oracle.cases import EAGER, FLOAT32, LLAMA, ONE_ROW, TWO_ROWS, Case
from tests.oracle.differences import difference
from tests.oracle.parity import MECHANISMS, compare, ours, theirs
from tests.oracle.running import (
    VOCABULARY,
    Context,
    RecordingCache,
    held,
    held_after,
    model_for,
    token_ids,
)

both_mechanisms = pytest.mark.parametrize("mechanism", MECHANISMS)


def kept(held, layer=0, head=0):
    return held[layer][head].kept


# ---- which tokens, where scores tie --------------------------------------------------------------


@difference(
    presses="all",
    kvpress="order of the scores",
    here="temporal order, which windows and later presses count on",
)
@both_mechanisms
def test_order_in_the_cache(mechanism):
    case = Case(lambda p, r: p.KnormPress(r), run=ONE_ROW)
    mine, other = ours(case, 0.5, mechanism), theirs(case, 0.5)
    assert compare(mine, other)
    assert mine[0][0].positions.tolist() == kept(mine)
    assert other[0][0].positions.tolist() != kept(other)


@difference(
    presses="presses that protect more tokens than the budget",
    kvpress="keep some of the protected",
    here="keep the latest of them",
)
@pytest.mark.parametrize(
    ("build", "ratio", "latest"),
    [
        (lambda p, r: p.SnapKVPress(r), 0.95, range(371, 390)),
        (lambda p, r: p.PyramidKVPress(r), 0.95, range(370, 390)),
        (lambda p, r: p.AdaKVPress(p.SnapKVPress(r)), 0.95, range(371, 390)),
        (lambda p, r: p.ExpectedAttentionPress(r), 0.9925, range(2, 4)),
        (lambda p, r: p.CURPress(r), 0.9925, range(2, 4)),
    ],
)
@both_mechanisms
def test_budgets_below_what_is_protected(build, ratio, latest, mechanism):
    case = Case(build, run=ONE_ROW)
    mine, other = ours(case, ratio, mechanism), theirs(case, ratio)
    assert kept(mine) == list(latest)
    assert kept(other) != list(latest)
    assert sum(len(head.kept) for head in mine[0]) == sum(len(head.kept) for head in other[0])


@difference(
    presses="`LagKVPress`, ranks that tie",
    kvpress="depends on the sorting",
    here="others of the same rank",
)
@both_mechanisms
def test_equal_ranks(mechanism):
    case = Case(lambda p, r: p.LagKVPress(r, lag_size=16), run=ONE_ROW)
    model, past = model_for("hooks", LLAMA), DynamicCache()
    with torch.no_grad():
        model(token_ids(390), past_key_values=past)
    mine, other = ours(case, 0.5, mechanism), theirs(case, 0.5)
    assert not compare(mine, other)
    for index, layer in enumerate(past.layers):
        scores = LagKV(lag_size=16).score(
            AttentionCall(None, layer.keys, layer.keys, layer.values)
        )[0]
        for head in range(len(scores)):
            found = [scores[head][kept(held, index, head)].sort().values for held in (mine, other)]
            assert torch.equal(*found)


@difference(
    presses="`AdaKVPress(alpha_safeguard=0)`, `FastKVzipPress`, `KVzipPress`, "
    "`DMSPress(sliding_window_size=0)`",
    kvpress="may leave a head empty",
    here="at least one token in every head; a window of no tokens is refused",
)
@both_mechanisms
def test_no_head_is_ever_empty(mechanism):
    ada = Case(lambda p, r: p.AdaKVPress(p.KnormPress(r), alpha_safeguard=0.0), run=ONE_ROW)
    zip_ = Case(
        lambda p, r: p.KVzipPress(r, n_sink=0, prompts=handed.PROMPTS),
        theirs=lambda p, r: p.KVzipPress(r, n_sink=0),
        run=handed.Repeated(200),
        setting=LLAMA._replace(dtype=torch.float32),
    )
    fast = Case(
        lambda p, r: p.FastKVzipPress(r, n_sink=0, window_ratio=0.0, gates=handed.GATES),
        theirs=lambda p, r: handed.gates(
            p.FastKVzipPress(r, n_sink=0, window_ratio=0.0), handed.GATES
        ),
        run=ONE_ROW,
        setting=FLOAT32,
    )
    for case, ratio in ((ada, 0.99), (zip_, 0.99), (fast, 0.999)):
        fewest = [
            min(len(head.kept) for layer in held for head in layer)
            for held in (ours(case, ratio, mechanism), theirs(case, ratio))
        ]
        assert fewest == [1, 0]
    packages = {"kvpress": kvpress, **MECHANISMS}

    def all_evicted(whose):
        package = packages[whose]
        press = package.DMSPress(package.KnormPress(), threshold=9.0, sliding_window_size=0)
        return held_after(Context(50), press, model_for(whose, LLAMA))

    assert kept(all_evicted("kvpress")) == []
    with pytest.raises(HyperparameterError, match="sliding_window_size"):
        all_evicted(mechanism)


# ---- rows of a batch -----------------------------------------------------------------------------


@difference(
    presses="`ChunkKVPress`, `EntropyGatedChunkKVPress`, `CompactorPress`, `SimLayerKVPress`, "
    "`CriticalAdaKVPress`, in batches",
    kvpress="rows change what others keep, or it fails",
    here="each row keeps what it would keep alone",
)
@pytest.mark.parametrize(
    ("build", "ratio"),
    [
        (lambda p, r: p.ChunkKVPress(p.KnormPress(r)), 0.5),
        (lambda p, r: p.EntropyGatedChunkKVPress(p.KnormPress(r)), 0.5),
        (lambda p, r: p.CompactorPress(r, chunk_size=126), 0.5),
        (lambda p, r: p.SimLayerKVPress(lazy_threshold=r, n_recent=100), 0.27),
        (lambda p, r: p.CriticalAdaKVPress(p.KnormPress(r)), 0.5),
    ],
)
@both_mechanisms
def test_rows_are_independent(build, ratio, mechanism):
    case = Case(build, run=TWO_ROWS)

    def alone(whose, package, row):
        def run(model, press, past):
            with torch.no_grad(), press(model):
                model(token_ids(390, batch=2)[row : row + 1], past_key_values=past)

        return held_after(run, build(package, ratio), model_for(whose, LLAMA))

    def rows_agree(held, whose, package):
        expected = [alone(whose, package, row) for row in range(2)]
        together = [[*first, *second] for first, second in zip(*expected, strict=True)]
        return bool(compare(held, together))

    assert rows_agree(ours(case, ratio, mechanism), mechanism, MECHANISMS[mechanism])
    try:
        other = theirs(case, ratio)
    except RuntimeError as error:  # CriticalAdaKV
        assert "out of range" in str(error)  # noqa: PT017
    else:
        assert not rows_agree(other, "kvpress", kvpress)


@difference(
    presses="all, in left-padded batches",
    kvpress="padding counts as tokens",
    here="padding is evicted first",
)
@both_mechanisms
def test_padding(mechanism):
    length, padding = 60, 20

    def run(model, press, past):
        ids, mask = token_ids(length).clone(), torch.ones(1, length, dtype=torch.long)
        mask[:, :padding] = 0
        positions = (mask.cumsum(dim=-1) - 1).clamp(min=0)
        with torch.no_grad(), press(model):
            model(ids, attention_mask=mask, position_ids=positions, past_key_values=past)

    case = Case(lambda p, r: p.KnormPress(r), run=run)
    assert len(kept(theirs(case, 0.5))) == length // 2
    mine = kept(ours(case, 0.5, mechanism))
    assert len(mine) == (length - padding) // 2
    assert min(mine) >= padding


@difference(
    presses="`RandomPress(seed=...)`",
    kvpress="the same numbers in every layer",
    here="numbers from seed and layer, for every row, device and dtype",
)
@both_mechanisms
def test_random_numbers(mechanism):
    case = Case(lambda p, r: p.RandomPress(r, seed=3), run=TWO_ROWS)
    mine, other = ours(case, 0.5, mechanism), theirs(case, 0.5)
    first_row, second_row = slice(0, 2), slice(2, 4)

    def layers_alike(held):
        return [h.kept for h in held[0]] == [h.kept for h in held[1]]

    def rows_alike(held):
        return [h.kept for h in held[0][first_row]] == [h.kept for h in held[0][second_row]]

    assert (layers_alike(mine), rows_alike(mine)) == (False, True)
    assert (layers_alike(other), rows_alike(other)) == (True, False)


@difference(
    presses="`LeverageScorePress`, `CompactorPress`, `CURPress(use_random_leverage=True)`",
    kvpress="other tokens in every run",
    here="the same tokens in every run",
)
@pytest.mark.parametrize(
    "build",
    [
        lambda p, r: p.LeverageScorePress(r, sketch_dimension=8),
        lambda p, r: p.CompactorPress(r, sketch_dimension=8),
        lambda p, r: p.CURPress(r, use_random_leverage=True),
    ],
)
@both_mechanisms
def test_sketches(build, mechanism):
    def seeded(seed):
        def run(model, press, past):
            torch.manual_seed(seed)
            ONE_ROW(model, press, past)

        return Case(build, run=run)

    first, second = seeded(1), seeded(2)
    assert compare(ours(first, 0.5, mechanism), ours(second, 0.5, mechanism))
    assert not compare(theirs(first, 0.5), theirs(second, 0.5))


# ---- parts of a context --------------------------------------------------------------------------


@difference(
    presses="`NonCausalAttnPress`, `CompactorPress`, last chunk",
    kvpress="its padding takes part in the softmax",
    here="padding is masked",
)
@both_mechanisms
def test_tail_of_non_causal_attention(mechanism):
    # A chunk longer than the context holds the same tokens as one of just its length.
    longer = Case(lambda p, r: p.NonCausalAttnPress(r, chunk_size=500), run=ONE_ROW)
    exact = Case(lambda p, r: p.NonCausalAttnPress(r, chunk_size=390), run=ONE_ROW)
    assert compare(ours(exact, 0.5, mechanism), theirs(exact, 0.5))
    assert compare(ours(longer, 0.5, mechanism), ours(exact, 0.5, mechanism))
    assert not compare(theirs(longer, 0.5), theirs(exact, 0.5))


@difference(
    presses="`ChunkPress` of presses that use positions",
    kvpress="queries of each chunk at the end of the context",
    here="each chunk as if it were alone",
)
@pytest.mark.parametrize(
    "build", [lambda p, r: p.SnapKVPress(r, window_size=16), lambda p, r: p.TOVAPress(r)]
)
@both_mechanisms
def test_positions_in_chunks(build, mechanism):
    case = Case(lambda p, r: p.ChunkPress(build(p, r), chunk_length=130), run=ONE_ROW)

    def first_chunk(model, press, past):
        with torch.no_grad(), press(model):
            model(token_ids(390)[:, :130], past_key_values=past)

    alone = ours(Case(build, run=first_chunk), 0.5, mechanism)
    found = [
        held[0][0].in_time().kept[:65] for held in (ours(case, 0.5, mechanism), theirs(case, 0.5))
    ]
    assert found[0] == kept(alone)
    assert found[1] != kept(alone)


@difference(
    presses="`SnapKVPress`, `ExpectedAttentionPress`, `StreamingLLMPress`, on short contexts",
    kvpress="fail",
    here="leave them whole",
)
@pytest.mark.parametrize(
    ("build", "length"),
    [
        (lambda p, r: p.SnapKVPress(r), 50),
        (lambda p, r: p.ExpectedAttentionPress(r), 4),
        (lambda p, r: p.StreamingLLMPress(r), 4),
        (lambda p, r: p.ChunkPress(p.SnapKVPress(r, window_size=16), chunk_length=25), 60),
    ],
)
@both_mechanisms
def test_short_contexts(build, length, mechanism):
    case = Case(build, run=Context(length))
    with pytest.raises(AssertionError):
        theirs(case, 0.5)
    last = ours(case, 0.5, mechanism)[0][0].kept[-4:]
    assert last == list(range(length - 4, length))


@difference(
    presses="`BlockPress` of presses that read queries or order",
    kvpress="hidden states of one head, keys by score",
    here="each head's queries, in temporal order",
)
@both_mechanisms
def test_blocks_and_queries(mechanism):
    def case(block_size):
        return Case(
            lambda p, r: p.BlockPress(p.StreamingLLMPress(r), block_size=block_size), run=ONE_ROW
        )

    assert compare(ours(case(300), 0.5, mechanism), theirs(case(300), 0.5))
    assert not compare(ours(case(64), 0.5, mechanism), theirs(case(64), 0.5))
    # In whatever blocks: the first tokens and the latest.
    assert kept(ours(case(64), 0.5, mechanism)) == kept(ours(case(300), 0.5, mechanism))


# ---- one press after another ---------------------------------------------------------------------


@difference(
    presses="`ComposedPress`",
    kvpress="hands on keys by score",
    here="hands them on in temporal order",
)
@both_mechanisms
def test_order_between_presses(mechanism):
    case = Case(
        lambda p, r: p.ComposedPress([p.KnormPress(r), p.StreamingLLMPress(r)]), run=ONE_ROW
    )
    left = kept(ours(Case(lambda p, r: p.KnormPress(r), run=ONE_ROW), 0.5, mechanism))
    n = len(left) // 2
    expected = [*left[:4], *left[4 - n :]]
    assert kept(ours(case, 0.5, mechanism)) == expected
    assert kept(theirs(case, 0.5)) != expected


@difference(
    presses="`ComposedPress`, later presses that read queries",
    kvpress="ask the last tokens of the context",
    here="ask the last tokens that are left",
)
@both_mechanisms
def test_queries_follow_what_is_kept(mechanism):
    def case(first):
        return Case(
            lambda p, r: p.ComposedPress([getattr(p, first)(0.5), p.ThinKPress(r)]), run=ONE_ROW
        )

    # StreamingLLM leaves the last tokens, Knorm does not.
    recent, others = case("StreamingLLMPress"), case("KnormPress")
    assert compare(ours(recent, 0.5, mechanism), theirs(recent, 0.5))
    assert not compare(ours(others, 0.5, mechanism), theirs(others, 0.5))


@difference(
    presses="`ComposedPress` with `AdaKVPress` last",
    kvpress="refused",
    here="works",
)
@both_mechanisms
def test_composed_adaptive_budgets(mechanism):
    case = Case(
        lambda p, r: p.ComposedPress([p.KnormPress(r), p.AdaKVPress(p.KeyDiffPress(r))]),
        run=ONE_ROW,
    )
    with pytest.raises(AssertionError, match="AdaKV"):
        theirs(case, 0.5)
    assert [sum(len(h.kept) for h in layer) for layer in ours(case, 0.5, mechanism)] == [194] * 3


# ---- while decoding ------------------------------------------------------------------------------


@difference(
    presses="`DecodingPress` of presses that use positions",
    kvpress="all queries of the window at the last position",
    here="each query at its own, as in a prefill",
)
@both_mechanisms
def test_positions_while_decoding(mechanism):
    steps = Case(
        lambda p, r: p.DecodingPress(
            p.SnapKVPress(window_size=5), compression_interval=7, target_size=33
        ),
        run=Context(60, then=7),
    )
    at_once = Case(lambda p, r: p.SnapKVPress(r, window_size=5), run=Context(67))
    n = 1 - 33.5 / 67
    assert kept(ours(steps, 0.0, mechanism)) == kept(ours(at_once, n, mechanism))
    assert kept(theirs(steps, 0.0)) != kept(theirs(at_once, n))
    assert kept(theirs(at_once, n)) == kept(ours(at_once, n, mechanism))


@difference(
    presses="`DecodingPress(ExpectedAttentionPress)`",
    kvpress="leaves out the first `n_sink` queries that it remembers",
    here="leaves out the queries of sinks",
)
@both_mechanisms
def test_sinks_while_decoding(mechanism):
    case = Case(
        lambda p, r: p.DecodingPress(
            p.ExpectedAttentionPress(n_sink=4), compression_interval=4, target_size=30
        ),
        run=Context(60, then=4),
    )
    assert kept(ours(case, 0.0, mechanism))[:4] == [0, 1, 2, 3]
    assert kept(theirs(case, 0.0))[:4] != [0, 1, 2, 3]


@difference(
    presses="`CAMPress`, due while the cache is within its target",
    kvpress="prunes with the first token too many",
    here="waits for another interval, as `DecodingPress` does",
)
@both_mechanisms
def test_due_with_nothing_to_evict(mechanism):
    case = Case(
        lambda p, r: p.CAMPress(
            p.KnormPress(), compression_interval=7, target_size=70, merge_budget=4
        ),
        run=Context(60, then=30),
    )
    assert len(kept(ours(case, 0.0, mechanism))) == 70 + 30 % 7
    assert len(kept(theirs(case, 0.0))) == 70 + (30 - 11) % 7


@difference(
    presses="`CompressionRatioDecodingPress`",
    kvpress="takes `position_ids` for the number of tokens",
    here="the cache counts them",
)
@both_mechanisms
def test_tokens_seen_while_decoding(mechanism):
    def without_positions(model, press, past):
        with torch.no_grad(), press(model):
            for ids in token_ids(30).split([20, *[1] * 10], dim=1):
                model(ids, past_key_values=past, position_ids=torch.zeros_like(ids))

    case = Case(
        lambda p, r: p.CompressionRatioDecodingPress(p.KnormPress(), compression_interval=5),
        run=without_positions,
    )
    assert len(kept(ours(case, 0.0, mechanism))) == 15
    assert len(kept(theirs(case, 0.0))) == 1


@difference(
    presses="`DecodingPress(hidden_states_buffer_size=b)`",
    kvpress="`b + 1` hidden states",
    here="`b`",
)
@pytest.mark.parametrize(("whose", "expected"), [("kvpress", 5), ("hooks", 4)])
def test_hidden_states_while_decoding(whose, expected):
    package = {"kvpress": kvpress, **MECHANISMS}[whose]
    seen = []

    class Seeing(package.ScorerPress):
        def score(self, module, hidden_states, keys, values, attentions, kwargs):
            seen.append(hidden_states.shape[1])
            return keys[..., 0]

    press = package.DecodingPress(
        Seeing(), compression_interval=7, target_size=20, hidden_states_buffer_size=4
    )
    held_after(Context(30, then=7), press, model_for(whose, LLAMA))
    assert seen == [expected] * 3


@difference(
    presses="`DecodingPress(PyramidKVPress)`",
    kvpress="a pyramid around the target",
    here="the target in every layer",
)
@both_mechanisms
def test_target_size(mechanism):
    case = Case(
        lambda p, r: p.DecodingPress(
            p.PyramidKVPress(window_size=4), compression_interval=7, target_size=30
        ),
        run=Context(60, then=7),
    )
    assert [len(layer[0].kept) for layer in ours(case, 0.0, mechanism)] == [30, 30, 30]
    assert [len(layer[0].kept) for layer in theirs(case, 0.0)] != [30, 30, 30]


@difference(
    presses="`DecodingPress(AdaKVPress)`",
    kvpress="masks tokens and frees none",
    here="refused",
)
@both_mechanisms
def test_adaptive_budgets_while_decoding(mechanism):
    def build(package):
        base = package.AdaKVPress(package.KnormPress())
        return package.DecodingPress(base, compression_interval=5, target_size=20)

    past = RecordingCache()
    Context(40, then=15)(model_for("kvpress", LLAMA), build(kvpress), past)
    assert past.layers[0].keys.shape[2] == 55
    with pytest.raises(HyperparameterError, match="base_press"):
        build(MECHANISMS[mechanism])


# ---- what works at all ---------------------------------------------------------------------------


@difference(
    presses="`ObservedAttentionPress`; `AdaKVPress`, `ChunkPress`, `ChunkKVPress` around it",
    kvpress="needs eager attention; the others refuse it",
    here="any attention implementation",
)
@pytest.mark.parametrize(
    ("build", "refused"),
    [
        (lambda p, r: p.ObservedAttentionPress(r), LLAMA),
        (lambda p, r: p.AdaKVPress(p.KnormPress(r)), EAGER),
        (lambda p, r: p.ChunkPress(p.KnormPress(r), chunk_length=100), EAGER),
        (lambda p, r: p.ChunkKVPress(p.KnormPress(r)), EAGER),
    ],
)
@both_mechanisms
def test_any_attention_implementation(build, refused, mechanism):
    taken = EAGER if refused == LLAMA else LLAMA
    with pytest.raises(AssertionError):
        theirs(Case(build, run=ONE_ROW, setting=refused), 0.5)
    there = theirs(Case(build, run=ONE_ROW, setting=taken), 0.5)
    assert compare(ours(Case(build, run=ONE_ROW, setting=refused), 0.5, mechanism), there)
    assert compare(ours(Case(build, run=ONE_ROW, setting=taken), 0.5, mechanism), there)


@difference(
    presses="`LeverageScorePress`, `NonCausalAttnPress`, `CompactorPress` in `DecodingPress`",
    kvpress="refused",
    here="work",
)
@pytest.mark.parametrize("name", ["LeverageScorePress", "NonCausalAttnPress", "CompactorPress"])
@both_mechanisms
def test_key_presses_while_decoding(name, mechanism):
    case = Case(
        lambda p, r: p.DecodingPress(getattr(p, name)(), compression_interval=7, target_size=30),
        run=Context(60, then=7),
    )
    with pytest.raises(AssertionError, match="prefill"):
        theirs(case, 0.0)
    assert len(kept(ours(case, 0.0, mechanism))) == 30


@difference(
    presses="`PerLayerCompressionPress`, `PyramidKVPress`: a question of several tokens",
    kvpress="fails under sdpa and eager",
    here="works in the scope",
)
@pytest.mark.parametrize(
    "build",
    [
        lambda p: p.PerLayerCompressionPress(p.KnormPress(), [0.2, 0.5, 0.8]),
        lambda p: p.PyramidKVPress(0.5, window_size=8),
    ],
)
@both_mechanisms
def test_questions_after_uneven_layers(build, mechanism):
    def ask(whose, package):
        model, past = model_for(whose, LLAMA), DynamicCache()
        ids, positions = token_ids(105), torch.arange(100, 105)[None]
        with torch.no_grad(), build(package)(model):
            model(ids[:, :100], past_key_values=past)
            return model(ids[:, 100:], past_key_values=past, position_ids=positions).logits

    with pytest.raises(RuntimeError, match="size of tensor"):
        ask("kvpress", kvpress)
    assert torch.isfinite(ask(mechanism, MECHANISMS[mechanism])).all()


@difference(
    presses="`PerLayerCompressionPress`, another number of ratios than layers",
    kvpress="fails in a forward, or ignores the rest",
    here="refused before anything is installed",
)
@both_mechanisms
def test_one_ratio_per_layer(mechanism):
    def case(n):
        return Case(lambda p, r: p.PerLayerCompressionPress(p.KnormPress(), [r] * n), run=ONE_ROW)

    with pytest.raises(IndexError):
        theirs(case(2), 0.5)
    assert len(kept(theirs(case(4), 0.5))) == 195
    for n in (2, 4):
        with pytest.raises(HyperparameterError, match="one per layer"):
            ours(case(n), 0.5, mechanism)


@difference(
    presses="head-wise presses",
    kvpress="the module remembers evictions: other caches are masked too",
    here="the cache remembers them",
)
@both_mechanisms
def test_what_was_evicted_belongs_to_the_cache(mechanism):
    def logits(whose, package, press_first):
        model = model_for(whose, LLAMA)
        for layer in model.model.layers:
            layer.self_attn.__dict__.pop("masked_key_indices", None)
        ids, other = token_ids(101), DynamicCache()
        with torch.no_grad():
            model(ids[:, :100], past_key_values=other)
            if press_first:
                with package.AdaKVPress(package.KnormPress(0.5))(model):
                    model(ids[:, :100], past_key_values=DynamicCache())
            return model(ids[:, 100:], past_key_values=other).logits

    package = MECHANISMS[mechanism]
    assert torch.equal(logits(mechanism, package, True), logits(mechanism, package, False))
    assert not torch.allclose(logits("kvpress", kvpress, True), logits("kvpress", kvpress, False))


@difference(
    presses="`FinchPress` without a delimiter in the prompt",
    kvpress="takes the window of the last prompt",
    here="refused",
)
@both_mechanisms
def test_a_prompt_without_delimiter(mechanism):
    def build(package):
        if package is kvpress:
            return handed.delimiter(kvpress.FinchPress(0.5))
        return package.FinchPress(0.5, delimiter_token_id=handed.DELIMITER)

    press, model = build(kvpress), model_for("kvpress", LLAMA)
    held_after(handed.Question(100, 30), press, model)
    assert len(kept(held_after(Context(100), press, model))) == 50
    with pytest.raises(UnsupportedInputError, match="delimiter"):
        held_after(Context(100), build(MECHANISMS[mechanism]), model_for(mechanism, LLAMA))


@difference(
    presses="`FinchPress(chunk_length=...)`, and in batches",
    kvpress="chunks must keep more than the question; one row",
    here="works",
)
@both_mechanisms
def test_finch_chunks_and_batches(mechanism):
    case = Case(
        lambda p, r: p.FinchPress(r, chunk_length=40, delimiter_token_id=handed.DELIMITER),
        theirs=lambda p, r: handed.delimiter(p.FinchPress(r, chunk_length=40)),
        run=handed.Question(100, 30),
    )
    with pytest.raises(AssertionError):
        theirs(case, 0.5)
    assert len(kept(ours(case, 0.5, mechanism))) == 50

    def two_rows(model, press, past):
        ids = token_ids(100, batch=2)
        ids[0, 60], ids[1, 80] = handed.DELIMITER, handed.DELIMITER
        with torch.no_grad(), press(model):
            model(ids, past_key_values=past)

    batch = Case(
        lambda p, r: p.FinchPress(r, delimiter_token_id=handed.DELIMITER),
        theirs=lambda p, r: handed.delimiter(p.FinchPress(r)),
        run=two_rows,
    )
    with pytest.raises(AssertionError, match="batch"):
        theirs(batch, 0.5)
    assert [len(head.kept) for head in ours(batch, 0.5, mechanism)[0]] == [49] * 4


@difference(
    presses="`FinchPress.update_model_and_tokenizer`",
    kvpress="enlarges the model's vocabulary for good",
    here="leaves the model as it is",
)
@pytest.mark.parametrize(("whose", "grows"), [("kvpress", True), ("hooks", False)])
def test_the_vocabulary_for_a_delimiter(whose, grows):
    words = WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w0")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words))
    model = deepcopy(model_for(whose, LLAMA))
    press = {"kvpress": kvpress, **MECHANISMS}[whose].FinchPress(0.5)
    assert len(press.update_model_and_tokenizer(model, tokenizer)) == VOCABULARY + 1
    assert (model.get_input_embeddings().num_embeddings > VOCABULARY) == grows


@difference(
    presses="`DuoAttentionPress(on_the_fly_scoring=True)`",
    kvpress="downloads a data set",
    here="repeated random tokens, or texts given to `measure`",
)
@both_mechanisms
def test_measuring_heads(mechanism):
    def no_network(*_, **__):
        raise ConnectionError("no network")

    case = Case(
        lambda p, r: p.DuoAttentionPress(r, on_the_fly_scoring=True), run=handed.Repeated(450)
    )
    with (
        patch.object(duo_attention_press, "load_dataset", no_network),
        pytest.raises(ConnectionError),
    ):
        theirs(case, 0.5)
    counts = [len(head.kept) for layer in ours(case, 0.5, mechanism) for head in layer]
    assert sorted(counts) == [384] * 3 + [450] * 3


@difference(
    presses="`FastKVzipPress`, in batches and other precisions",
    kvpress="fails",
    here="works, row by row",
)
@both_mechanisms
def test_gates_judge_batches_in_any_precision(mechanism):
    def build(p, r):
        return p.FastKVzipPress(r, gates=handed.GATES)

    def theirs_of(p, r):
        return handed.gates(p.FastKVzipPress(r), handed.GATES)

    for case in (
        Case(build, theirs_of, run=TWO_ROWS, setting=FLOAT32),
        Case(build, theirs_of, run=ONE_ROW),
    ):
        with pytest.raises(RuntimeError):
            theirs(case, 0.5)
        size = 3 * len(ours(case, 0.5, mechanism)[0]) * 390
        assert sum(len(h.kept) for layer in ours(case, 0.5, mechanism) for h in layer) == size // 2


@difference(
    presses="`FastKVzipPress`, `KVzipPress`",
    kvpress="evict when the scope closes",
    here="evict when the prefill has run",
)
@both_mechanisms
def test_when_kvzip_evicts(mechanism):
    inside = []

    class Watched(handed.Repeated):
        def __call__(self, model, press, past):
            @contextmanager
            def watched(model):
                with press(model):
                    yield
                    inside.append(sum(len(h.kept) for layer in held(past, model) for h in layer))

            super().__call__(model, watched, past)

    replaying = Case(
        lambda p, r: p.KVzipPress(r, prompts=handed.PROMPTS),
        theirs=lambda p, r: p.KVzipPress(r),
        run=Watched(100),
        setting=FLOAT32,
    )
    gated = Case(
        lambda p, r: p.FastKVzipPress(r, gates=handed.GATES),
        theirs=lambda p, r: handed.gates(p.FastKVzipPress(r), handed.GATES),
        run=Watched(100),
        setting=FLOAT32,
    )
    for case in (replaying, gated):
        for found in (theirs(case, 0.5), ours(case, 0.5, mechanism)):
            assert sum(len(head.kept) for layer in found for head in layer) == 300
    assert inside == [600, 300] * 2


@difference(
    presses="`ThinKPress`",
    kvpress="sets channels to zero",
    here="the same; `free_memory=True` drops them",
)
@both_mechanisms
def test_channels_that_are_freed(mechanism):
    def stored(whose, press):
        past = RecordingCache()
        ONE_ROW(model_for(whose, LLAMA), press, past)
        return past.layers[0].keys.shape[-1]

    package = MECHANISMS[mechanism]
    assert stored("kvpress", kvpress.ThinKPress(0.5)) == 16
    assert stored(mechanism, package.ThinKPress(0.5)) == 16
    assert stored(mechanism, package.ThinKPress(0.5, free_memory=True)) == 8


@difference(
    presses="wrappers",
    kvpress="change the wrapped press, after an error for good",
    here="never change it",
)
@pytest.mark.parametrize(("whose", "left"), [("kvpress", 0.7), ("hooks", 0.1)])
def test_the_wrapped_press(whose, left):
    package = {"kvpress": kvpress, **MECHANISMS}[whose]

    class Failing(package.ScorerPress):
        def score(self, module, hidden_states, keys, values, attentions, kwargs):
            raise ZeroDivisionError

    base = Failing(0.1)
    press = package.PerLayerCompressionPress(base, [0.7, 0.7, 0.7])
    with pytest.raises(ZeroDivisionError):
        held_after(ONE_ROW, press, model_for(whose, LLAMA))
    assert base.compression_ratio == left


@difference(
    presses="`KVzipPress` in float64",
    kvpress="fails",
    here="works",
)
@both_mechanisms
def test_kvzip_in_float64(mechanism):
    case = Case(
        lambda p, r: p.KVzipPress(r, prompts=handed.PROMPTS),
        theirs=lambda p, r: p.KVzipPress(r),
        run=handed.Repeated(100),
    )
    with pytest.raises(RuntimeError, match="overflow"):
        theirs(case, 0.5)
    assert sum(len(head.kept) for layer in ours(case, 0.5, mechanism) for head in layer) == 300


@difference(
    presses="`SimLayerKVPress.compression_ratio` with `n_last > 1`",
    kvpress="reports another number of tokens",
    here="reports what was evicted",
)
@both_mechanisms
def test_reported_ratio(mechanism):
    def reported_and_true(whose, package):
        press = package.SimLayerKVPress(lazy_threshold=0.0, n_last=8, n_recent=20)
        held = held_after(Context(100), press, model_for(whose, LLAMA))
        n = sum(len(head.kept) for layer in held for head in layer) / 6
        return press.compression_ratio, pytest.approx(1 - n / 100)

    mine, other = (
        reported_and_true(mechanism, MECHANISMS[mechanism]),
        reported_and_true("kvpress", kvpress),
    )
    assert mine[0] == mine[1]
    assert other[0] != other[1]


@difference(
    presses="`DMSPress(press)` without a threshold",
    kvpress="fails in a forward",
    here="refused: there is no sensible default",
)
@both_mechanisms
def test_a_threshold_is_needed(mechanism):
    with pytest.raises(TypeError):
        held_after(
            Context(200), kvpress.DMSPress(kvpress.KnormPress()), model_for("kvpress", LLAMA)
        )
    package = MECHANISMS[mechanism]
    with pytest.raises((TypeError, PressError), match="threshold"):
        package.DMSPress(package.KnormPress())


# ---- contexts that are run again -----------------------------------------------------------------


@difference(
    presses="`KVComposePress(structured=False)`",
    kvpress="leaves the second reading of the context in the cache",
    here="leaves only what is kept of the context",
)
@both_mechanisms
def test_what_a_second_reading_leaves(mechanism):
    case = Case(
        lambda p, r: p.KVComposePress(compression_ratio=r, structured=False), run=Context(60)
    )
    for found, n in ((theirs(case, 0.5), 180 + 6 * 60), (ours(case, 0.5, mechanism), 180)):
        assert sum(len(head.kept) for layer in found for head in layer) == n


@difference(
    presses="`KVComposePress`, in batches",
    kvpress="keeps the first row and loses the others",
    here="works, row by row",
)
@both_mechanisms
def test_a_batch_that_is_read_again(mechanism):
    case = Case(lambda p, r: p.KVComposePress(compression_ratio=r), run=Context(60, batch=2))
    assert [len(layer) for layer in theirs(case, 0.5)] == [2, 2, 2]
    assert [len(layer) for layer in ours(case, 0.5, mechanism)] == [4, 4, 4]


@difference(
    presses="`KVComposePress(add_v_norm=True)`",
    kvpress="fails",
    here="works",
)
@both_mechanisms
def test_value_norms_of_a_second_reading(mechanism):
    case = Case(
        lambda p, r: p.KVComposePress(compression_ratio=r, add_v_norm=True), run=Context(60)
    )
    with pytest.raises(RuntimeError, match="must match the size"):
        theirs(case, 0.5)
    assert sum(len(head.kept) for layer in ours(case, 0.5, mechanism) for head in layer) == 180


@difference(
    presses="`KVComposePress(structured=False)`, a bound above the budget",
    kvpress="keeps to the budget",
    here="keeps to the bound",
)
@both_mechanisms
def test_a_bound_above_the_budget(mechanism):
    case = Case(
        lambda p, r: p.KVComposePress(
            compression_ratio=r, structured=False, keep_token_lower_bound=33
        ),
        run=handed.ReadAgain(60),
    )
    for found, least in ((theirs(case, 0.8), 0), (ours(case, 0.8, mechanism), 33)):
        assert min(len(head.kept) for layer in found for head in layer) == least


@difference(
    presses="`KVgradPress`, in batches and float64",
    kvpress="fails",
    here="works, row by row",
)
@both_mechanisms
@pytest.mark.parametrize(
    ("run", "setting", "failure"),
    [
        (handed.Repeated(60, batch=2), FLOAT32, "Sizes of tensors must match"),
        (handed.Repeated(60), LLAMA, "overflow"),
    ],
)
def test_gradients_of_batches_and_float64(mechanism, run, setting, failure):
    case = Case(
        lambda p, r: p.KVgradPress(r, prompts=handed.PROMPTS),
        theirs=lambda p, r: p.KVgradPress(r),
        run=run,
        setting=setting,
    )
    with pytest.raises(RuntimeError, match=failure):
        theirs(case, 0.5)
    found = ours(case, 0.5, mechanism)
    assert sum(len(head.kept) for layer in found for head in layer) == 180 * run.batch


@difference(
    presses="`DMSPress(press, decoding=True)` around a press that compares tokens",
    kvpress="one score for every new token, or fails",
    here="refused: the threshold would keep all or none",
)
@both_mechanisms
@pytest.mark.parametrize(
    "name", ["KeyDiffPress", "CURPress", "LagKVPress", "LeverageScorePress", "NonCausalAttnPress"]
)
def test_one_token_is_no_comparison(mechanism, name):
    model = model_for("kvpress", LLAMA)
    attention = model.model.layers[0].self_attn
    attention.rotary_emb = model.model.rotary_emb
    press, scores = getattr(kvpress, name)(), []
    for seed in range(3):
        torch.manual_seed(seed)
        keys = torch.randn(1, attention.config.num_key_value_heads, 1, attention.head_dim).double()
        hidden = torch.randn(1, 1, model.config.hidden_size).double()
        cos_sin = model.model.rotary_emb(hidden, torch.tensor([[50 + seed]]))
        kwargs = {"position_embeddings": cos_sin}
        scores.append(press.score(attention, hidden, keys, keys, None, kwargs).abs().flatten())
    assert torch.allclose(scores[0], scores[1], atol=1e-4)
    assert torch.allclose(scores[0], scores[2], atol=1e-4)
    package = MECHANISMS[mechanism]
    with pytest.raises(HyperparameterError, match="scores each token by itself"):
        package.DMSPress(getattr(package, name)(), 0.0, decoding=True)


@difference(
    presses="`SimLayerKVPress`, `n_recent` not above `n_last`",
    kvpress="keeps all tokens of a lazy layer",
    here="refused",
)
@both_mechanisms
def test_no_recent_tokens(mechanism):
    press = kvpress.SimLayerKVPress(lazy_threshold=0.0, n_last=1, n_recent=1, n_initial=4)
    model, cache = model_for("kvpress", LLAMA), DynamicCache()
    with torch.no_grad(), press(model):
        model(token_ids(30), past_key_values=cache)
    assert [layer.keys.shape[2] for layer in cache.layers] == [34] * len(cache.layers)
    assert press.compression_ratio > 0.8
    with pytest.raises(HyperparameterError, match=r"n_recent must be .* n_last=1"):
        MECHANISMS[mechanism].SimLayerKVPress(n_last=1, n_recent=1)


@difference(
    presses="`CriticalKVPress` with a budget of one token",
    kvpress="the first stage chooses it",
    here="the second stage does: half of one token, rounded down, is none",
)
@both_mechanisms
def test_a_budget_of_one_token_in_two_stages(mechanism):
    weighted = Case(lambda p, r: p.CriticalKVPress(p.KnormPress(r)), run=ONE_ROW)
    first_stage = Case(lambda p, r: p.KnormPress(r), run=ONE_ROW)
    ratio = 1 - 1 / 400
    assert compare(theirs(weighted, ratio), theirs(first_stage, ratio))
    assert not compare(ours(weighted, ratio, mechanism), ours(first_stage, ratio, mechanism))


@difference(
    presses="`FastKVzipPress`, on contexts of fewer than 50 tokens",
    kvpress="always keeps the last token",
    here="does not: 2% of them, rounded down, is none",
)
@both_mechanisms
def test_the_window_of_a_short_context(mechanism):
    case = Case(
        lambda p, r: p.FastKVzipPress(r, n_sink=0, gates=handed.GATES),
        theirs=lambda p, r: handed.gates(p.FastKVzipPress(r, n_sink=0), handed.GATES),
        run=Context(49),
        setting=FLOAT32,
    )

    def keep_the_last(held):
        return [48 in head.kept for layer in held for head in layer]

    assert all(keep_the_last(theirs(case, 0.8)))
    assert not all(keep_the_last(ours(case, 0.8, mechanism)))


@difference(
    presses="`DecodingPress`, after a question as long as `target_size`",
    kvpress="prunes at once",
    here="waits for `compression_interval`: the answer sees the whole question",
)
@both_mechanisms
def test_a_question_as_long_as_the_target(mechanism):
    def context_and_question(model, press, past):
        with torch.no_grad(), press(model):
            for ids in token_ids(65).split([40, 25], dim=1):
                model(ids, past_key_values=past)

    case = Case(
        lambda p, r: p.DecodingPress(p.KnormPress(), compression_interval=9, target_size=20),
        run=context_and_question,
    )
    assert len(kept(ours(case, 0.0, mechanism))) == 65
    assert len(kept(theirs(case, 0.0))) == 20


@difference(
    presses="`MergingPress` with a threshold and a fraction",
    kvpress="merges nothing where more tokens miss the threshold than the fraction leaves out "
    "(a NaN)",
    here="merges those that meet it",
)
@both_mechanisms
def test_a_fraction_of_few_similar_tokens(mechanism):
    case = Case(
        lambda p, r: p.MergingPress(p.KnormPress(r), similarity_threshold=0.6, merge_fraction=0.9),
        run=ONE_ROW,
    )
    plain = Case(lambda p, r: p.KnormPress(r), run=ONE_ROW)
    assert compare(theirs(case, 0.5), theirs(plain, 0.5))
    assert not compare(ours(case, 0.5, mechanism), ours(plain, 0.5, mechanism))
