"""H2O and budgets in tokens, on whole models."""

import copy

import pytest
import torch
from transformers import DynamicCache

import hooks_impl
from experiments.testbed.recipes import recipe_pair
from press_core import HyperparameterError, Tokens, kept_lengths
from tests.presses import TABLES
from tests.slow import votes
from tests.support import build, context_for, example_for, forwards, held, make, ran, watched

# ---- H2O -----------------------------------------------------------------------------------------


class SlowH2O:
    """What one head holds, from the queries and keys that the model attended with."""

    def __init__(self, recent_ratio):
        self.recent_ratio = recent_ratio
        self.positions = []
        self.received = []
        self.seen = 0

    def attend(self, queries, keys):
        """Take in new tokens: `(G, q, d)` attended over `(n, d)`."""
        n_new = queries.shape[1]
        self.positions += range(self.seen, self.seen + n_new)
        self.received += [0.0] * n_new
        self.seen += n_new
        assert len(keys) == len(self.positions)
        for place, mean in enumerate(votes(queries, keys)):
            self.received[place] += mean * n_new

    def evict(self, n):
        n_recent = n - int(n * (1 - self.recent_ratio))
        older = range(len(self.positions) - n_recent)
        heavy = sorted(older, key=lambda j: -self.received[j])[: n - n_recent]
        kept = sorted([*heavy, *range(len(self.positions) - n_recent, len(self.positions))])
        self.positions = [self.positions[j] for j in kept]
        self.received = [self.received[j] for j in kept]


@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
@pytest.mark.parametrize(("budget", "recent_ratio", "lengths"), TABLES["heavy_hitters"])
def test_h2o_holds_heavy_hitters_and_recent_tokens(package, family, budget, recent_ratio, lengths):
    """Under sdpa; what short contexts received counts later, though they are left whole."""
    model, cache = make(family), DynamicCache(config=make(family).config)
    slow: dict[tuple[int, int], SlowH2O] = {}
    with watched() as seen, package.H2OPress(Tokens(budget), recent_ratio)(model):
        for ids in forwards(lengths):
            seen.clear()
            model(ids, past_key_values=cache)
            for index, [(queries, keys)] in seen.items():
                n_heads = cache.layers[index].keys.shape[1]
                keys = keys[:, :: keys.shape[1] // n_heads]
                for head, of_group in enumerate(queries[0].unflatten(0, (n_heads, -1))):
                    reference = slow.setdefault((index, head), SlowH2O(recent_ratio))
                    reference.attend(of_group, keys[0, head])
                    reference.evict(budget)
                    assert held(cache)[index][0][head] == reference.positions
    assert len(slow) == 2 * cache.layers[0].keys.shape[1]


def test_two_scopes_remember_apart(package):
    """Inside and outside; the outer one sees what the inner one has left."""
    model, cache = make(), DynamicCache(config=make().config)
    with package.H2OPress(Tokens(14))(model), package.H2OPress(Tokens(20))(model):
        for ids in forwards([30, 1, 1]):
            model(ids, past_key_values=cache)
            assert len(cache.layers[0].memories) == 2
            memories = cache.layers[0].memories.values()
            assert {x.shape[-1] for m in memories for x in m.slots.values()} == {14}
        copied = copy.deepcopy(cache)
    assert not any(layer.memories for layer in (*cache.layers, *copied.layers))
    assert [int(kept[0, 0]) for kept in kept_lengths(cache)] == [14, 14]


# ---- budgets -------------------------------------------------------------------------------------

UNTOLD = {"DMSPress", "DuoAttentionPress", "SimLayerKVPress", "ThinKPress"}
AT_INTERVALS = {"CAMPress", "CompressionRatioDecodingPress", "DecodingPress"}
BEFORE_STEPS = {"StreamingLLMDecodingPress"}


def test_who_cannot_be_told_a_ratio_says_so():
    for name in UNTOLD | {"EveryTurnPress"}:
        with pytest.raises(HyperparameterError, match=r"no compression ratio.*fields"):
            recipe_pair(name, 0.5).hook.with_ratio(Tokens(20))


@pytest.mark.parametrize(("tokens", "length"), [(20, 64), (33, 64), (20, 20), (20, 1)])
@pytest.mark.parametrize("name", sorted(set(hooks_impl.PRESSES) - UNTOLD))
def test_a_budget_is_kept(package, name, tokens, length):
    """Contexts of no more tokens are left whole."""
    finch = name == "FinchPress"  # which takes out its delimiter, and needs room for one
    if length < 64 and (name in AT_INTERVALS or (finch and length == 1)):
        return
    model = build("llama")
    press = example_for(package, name, 0.5, model).with_budget(tokens)
    assert press.keeps(length) == (length if name in AT_INTERVALS else min(tokens, length))
    context = context_for(name, length + (finch and length < 64))
    n_steps = 2 if length == 64 and name in AT_INTERVALS | BEFORE_STEPS else 0
    cache, _ = ran(model, press, [context, *[context[:, -1:]] * n_steps])
    kept = torch.stack(kept_lengths(cache)).float()
    if length < 64:
        assert kept.unique().tolist() == [length]
    elif name == "ChunkKVPress":
        assert tokens - 5 <= float(kept.mean()) <= tokens  # whole chunks of five
    else:
        assert float(kept.mean()) == pytest.approx(tokens + (name in BEFORE_STEPS), abs=1e-6)


@pytest.mark.parametrize(("length", "budget", "chunk"), [(30, 10, 5), (500, 100, 20)])
def test_whole_chunks_fill_a_budget(package, length, budget, chunk):
    press = package.ChunkKVPress(package.KnormPress(Tokens(budget)), chunk)
    cache, _ = ran(build("llama"), press, [context_for("ChunkKVPress", length)])
    assert torch.stack(kept_lengths(cache)).unique().tolist() == [budget]


def test_compositions_share_a_budget_as_they_share_a_ratio(package):
    composed = package.ComposedPress([package.KnormPress(0.75), package.KeyDiffPress(0.5)])
    ratios = [press.compression_ratio for press in composed.with_ratio(1 - 1 / 64).presses]
    assert ratios == pytest.approx([1 - 1 / 16, 1 - 1 / 4])
    first, last = (press.compression_ratio for press in composed.with_budget(8).presses)
    # From 512 to 8 are six halves: four for the first, and then all that is left.
    assert (first.of(512), last.of(32), last.of(9), last.of(8)) == (32, 8, 8, 8)
    nested = package.ComposedPress([composed, package.KnormPress(0.5)]).with_budget(4)
    lengths = [512]
    for press in (*nested.presses[0].presses, nested.presses[1]):
        lengths.append(press.compression_ratio.of(lengths[-1]))
    assert lengths[-1] == 4
    assert lengths == sorted(lengths, reverse=True)
    idle = package.ComposedPress([*composed.presses, package.KeyDiffPress(0.0)]).with_budget(8)
    first, last, nothing = (press.compression_ratio for press in idle.presses)
    assert (first.of(512), last.of(32), nothing.of(512)) == (32, 8, 512)


def test_layers_share_a_budget_as_they_share_ratios(package):
    press = package.PerLayerCompressionPress(package.KnormPress(), [0.2, 0.6])
    assert press.with_budget(30).compression_ratios == [Tokens(40), Tokens(20)]
    assert press.with_budget(30).with_budget(15).compression_ratios == [Tokens(20), Tokens(10)]
    mixed = package.PerLayerCompressionPress(package.KnormPress(), [Tokens(10), 0.5])
    with pytest.raises(HyperparameterError, match="with_budget"):
        mixed.with_budget(20)


def test_a_budget_is_a_copy_and_in_range(package):
    press = package.AdaKVPress(package.SnapKVPress(0.5))
    assert press.with_budget(7).press == package.SnapKVPress(Tokens(7))
    assert press.press.compression_ratio == 0.5
    for tokens in (0, -1, 1.5):
        with pytest.raises(HyperparameterError, match="1 or more"):
            package.KnormPress().with_budget(tokens)
