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

import hooks_impl
from press_core import HyperparameterError, PressError, UnsupportedInputError
from press_core.presses.lagkv import lagkv_scores
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
    kvpress="keeps the order of the scores in the cache",
    here="temporal order",
    why="windows, streaming and later presses count on it; attention does not care",
)
@both_mechanisms
def test_order_in_the_cache(mechanism):
    case = Case(lambda p, r: p.KnormPress(r), run=ONE_ROW)
    mine, other = ours(case, 0.5, mechanism), theirs(case, 0.5)
    assert compare(mine, other)
    assert mine[0][0].positions.tolist() == kept(mine)
    assert other[0][0].positions.tolist() != kept(other)


@difference(
    presses="presses that protect tokens (windows, sinks), with budgets below their number",
    kvpress="keeps whichever of the protected the sorting left first",
    here="keeps the latest of the protected",
    why="all of them have the one highest score in kvpress; recency is the better tie-break",
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
    presses="`LagKVPress` without `cross_scoring`, where the budget ends among equal ranks",
    kvpress="keeps whichever block's token the sorting left first",
    here="keeps others of the same rank",
    why="a rank occurs once in every block; nothing tells its tokens apart",
)
@both_mechanisms
def test_equal_ranks(mechanism):
    press = hooks_impl.LagKVPress(lag_size=16)
    case = Case(lambda p, r: p.LagKVPress(r, lag_size=16), run=ONE_ROW)
    model, past = model_for("hooks", LLAMA), DynamicCache()
    with torch.no_grad():
        model(token_ids(390), past_key_values=past)
    mine, other = ours(case, 0.5, mechanism), theirs(case, 0.5)
    assert not compare(mine, other)
    for index, layer in enumerate(past.layers):
        scores = lagkv_scores(layer.keys, layer.values, press)[0]
        for head in range(len(scores)):
            found = [scores[head][kept(held, index, head)].sort().values for held in (mine, other)]
            assert torch.equal(*found)


@difference(
    presses="`AdaKVPress(alpha_safeguard=0)`, `FastKVzipPress`, `KVzipPress`, "
    "`DMSPress(sliding_window_size=0)`",
    kvpress="may leave a head without tokens",
    here="keeps at least one in every head; a window of no tokens is refused",
    why="attention over nothing is not defined",
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
    kvpress="lets the rows decide for each other (chunks of the first row for all, scores "
    "standardised and laziness averaged over the batch), or fails",
    here="keeps in each row what that row alone would keep",
    why="what a prompt keeps must not depend on whom it is batched with",
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
    kvpress="takes padding for tokens",
    here="evicts the padding first: a row keeps what it would keep alone",
    why="the budget of a short prompt would be spent on padding",
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
    kvpress="draws the same numbers for every layer, other ones for every row and dtype",
    here="numbers come from seed and layer, the same for every row, device and dtype",
    why="a baseline that evicts the same tokens in all layers is no random one",
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
    kvpress="sketches with numbers from torch's global generator: other tokens in every run",
    here="with numbers from the layer alone: the same tokens in every run",
    why="a cache that cannot be made again cannot be examined",
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
    presses="`NonCausalAttnPress`, `CompactorPress`, where chunks do not divide the context",
    kvpress="lets the padding of the last chunk take part in its softmax",
    here="masks it",
    why="zeros after the end of the context are no keys",
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
    presses="`ChunkPress` of presses that use positions (`SnapKVPress`, `TOVAPress`)",
    kvpress="rotates each chunk's queries to the positions at the end of the context",
    here="keeps of each chunk what the press would keep of it alone",
    why="a query belongs where it stands",
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
    presses="`SnapKVPress`, `ExpectedAttentionPress`, `StreamingLLMPress` and what wraps them",
    kvpress="fails on contexts (and last chunks) that are too short",
    here="leaves them whole",
    why="there is nothing to evict, which is no error",
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
    kvpress="hands on the hidden states that one head has kept, and keys in the order of scores",
    here="each head's queries, in temporal order",
    why="heads keep different tokens, and a window is the last tokens in time",
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
    presses="`ComposedPress`, from the second press on",
    kvpress="hands on keys in the order of the scores of the press before",
    here="in temporal order",
    why="sinks are the first tokens, not those with the best scores",
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
    presses="`ComposedPress`, presses that read queries, from the second on",
    kvpress="asks the last tokens of the context, whether they are still there or not",
    here="asks the last of the tokens that are left",
    why="queries, positions and hidden states follow what is kept, in whatever order presses come",
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
    kvpress="refuses it",
    here="works",
    why="heads may differ once nothing is pruned after them",
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
    presses="`DecodingPress` of presses that use positions (`SnapKVPress`, "
    "`ExpectedAttentionPress`)",
    kvpress="rotates all queries of the window to the last position, and counts future positions "
    "from the length of its buffer",
    here="each query at its own position: keeps what a prefill of all tokens would keep",
    why="a query belongs where it stands",
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
    kvpress="leaves the first `n_sink` of the remembered queries out of its statistics, as if they "
    "were those of the sinks; of few enough nothing is left, and sinks are evicted",
    here="leaves out the queries of sinks only",
    why="what is decoded late is no sink",
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
    kvpress="prunes as soon as there is one token too many, and counts from there",
    here="waits for another interval, as `DecodingPress` does",
    why="an interval is how often a cache is touched, and one token at a time is not worth it",
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
    kvpress="has to be told `position_ids`, and takes them for the number of tokens seen",
    here="the cache counts what it has seen",
    why="`generate` passes no positions; keys may have others than their place",
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
    kvpress="hands on the hidden states of `b + 1` tokens",
    here="of `b`",
    why="as it says",
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
    kvpress="keeps a pyramid around the target",
    here="the target in every layer",
    why="`target_size` is a promise about memory",
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
    kvpress="masks tokens and frees none: the cache grows for ever",
    here="refused",
    why="the size of the cache is what the press is for",
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
    presses="`ObservedAttentionPress`; `AdaKVPress`, `ChunkPress`, `ChunkKVPress`",
    kvpress="the first needs eager attention, the others refuse it",
    here="any attention implementation, the same tokens",
    why="exact queries are at hand, so that weights can be computed where there are none",
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
    kvpress="refuses them",
    here="works",
    why="they read keys and values, which are there",
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
    presses="`PerLayerCompressionPress`, `PyramidKVPress`: a question of several tokens afterwards",
    kvpress="fails under sdpa and eager: one mask for layers of different lengths",
    here="works while the scope is open",
    why="the scope fits the mask to each layer",
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
    presses="`PerLayerCompressionPress` with too few or too many ratios",
    kvpress="fails in the middle of a forward, or ignores the rest",
    here="refused before anything is installed",
    why="a list that does not fit the model is a mistake",
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
    presses="head-wise presses (`AdaKVPress`, `DMSPress`, `DuoAttentionPress`, ...)",
    kvpress="remembers what was evicted on the module: another cache decoded there is masked too",
    here="the cache knows",
    why="two caches used in turn on one model must not see each other",
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
    kvpress="silently takes the window of the last prompt",
    here="refused",
    why="the question is what decides; a prompt without one is a mistake",
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
    presses="`FinchPress(chunk_length=...)`, `FinchPress` in batches",
    kvpress="needs chunks that keep more than the question, and batches of one",
    here="works",
    why="nothing in the method asks for that",
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
    kvpress="gives the model a larger vocabulary, for good",
    here="leaves the model as it is",
    why="the delimiter never reaches the model",
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
    kvpress="downloads a data set to measure heads on",
    here="measures them on repeated random tokens, or on texts given to `measure`",
    why="works without a network, and says what it has measured",
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
    presses="`FastKVzipPress`, in batches and in other precisions than the gates'",
    kvpress="fails",
    here="keeps in each row what that row alone would keep; gates work in any precision",
    why="a batch of prompts is the usual case",
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
    kvpress="evicts when its scope closes: what is generated inside sees the whole context",
    here="evicts as soon as the prefill has run",
    why="an answer inside the scope is to be that of the compressed cache",
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
    kvpress="sets channels to zero, which frees nothing",
    here="so too by default; `free_memory=True` stores the kept channels only",
    why="the channels are dropped to save memory",
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
    presses="wrappers (`PerLayerCompressionPress`, `DecodingPress`, ...)",
    kvpress="change the wrapped press while they run, and leave it changed after an error",
    here="never change it",
    why="one press may be in use in several places",
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
    why="the smallest float64 does not fit into what kvpress fills its mask with",
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
    kvpress="reports as if `n_initial + n_recent - 1` tokens were kept",
    here="reports what was evicted",
    why="the number is read to know how much was saved",
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
    kvpress="fails in the middle of a forward",
    here="`threshold` has to be given",
    why="there is no sensible default",
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
    kvpress="leaves the second reading of the context in the cache, where all of it is seen",
    here="only what is kept of the context is left",
    why="the cache is to be smaller afterwards, and to hold the context once",
)
@both_mechanisms
def test_what_a_second_reading_leaves(mechanism):
    case = Case(
        lambda p, r: p.KVComposePress(compression_ratio=r, structured=False), run=Context(60)
    )
    for found, n in ((theirs(case, 0.5), 180 + 6 * 60), (ours(case, 0.5, mechanism), 180)):
        assert sum(len(head.kept) for layer in found for head in layer) == n


@difference(
    presses="`KVComposePress`",
    kvpress="keeps the first row of a batch and loses the others",
    here="rows are judged one by one",
    why="a row of a batch is to be what it is alone",
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
    why="it takes the values of both readings for those of the context",
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
    presses="`KVComposePress(structured=False)` with a bound above the budget",
    kvpress="keeps to the budget, and leaves some heads less than the bound or nothing",
    here="every head keeps as many tokens as the bound says",
    why="a lower bound that does not hold is none",
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
    presses="`KVgradPress`",
    kvpress="fails on more than one row, and in float64",
    here="works",
    why="batches are judged row by row; see also `KVzipPress` in float64",
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
    kvpress="judges a token that comes alone by a score that is the same for all, or fails",
    here="refused",
    why="a comparison of one token says nothing of it: the threshold would keep all or none",
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
    presses="`SimLayerKVPress` with `n_recent` of no more than `n_last`",
    kvpress="keeps all tokens of a lazy layer, the first twice, and reports that most are gone",
    here="refused",
    why="it asks for no recent tokens at all",
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
