"""What once went wrong without a word: each is right now, or refused."""

from contextlib import nullcontext

import pytest
import torch
from transformers import DynamicCache

import hooks_impl
from attention_patch import headwise
from experiments.testbed.recipes import PROMPTS
from press_core import Phase, PressError, ScopeError, UnsupportedInputError, kept_lengths
from press_core.cache.pruned import CROP_TAKES_LENGTH
from tests.presses import TABLES, read_press
from tests.support import both, build, example_for, filled, held, left_padded, ran, token_ids

# ---- KVzip: padding and positions ----------------------------------------------------------------


def kvzip(package):
    return package.KVzipPress(0.5, chunk_size=16, prompts=PROMPTS)


@pytest.mark.parametrize("offset", [100, 3])
def test_a_replay_goes_on_from_the_positions_of_the_context(package, offset):
    """Rotary embeddings know distances alone: an offset of all positions changes no choice."""
    model, ids, kept = build("llama", dtype=torch.float64), token_ids(2, 40), []
    for start in (0, offset):
        positions = start + torch.arange(40)[None]
        kept.append(held(filled(model, kvzip(package), ids, position_ids=positions)))
    assert kept[0] == kept[1]


def test_a_padded_row_is_replayed_as_alone(package):
    """Also where nobody says at which positions its tokens stand."""
    model = build("llama", dtype=torch.float64)
    ids, mask, _ = left_padded(2, 40, [0, 11])
    together = held(filled(model, kvzip(package), ids, attention_mask=mask))
    alone = held(filled(model, kvzip(package), ids[1:, 11:]))
    for padded, single in zip(together, alone, strict=True):
        assert padded[1] == [[p + 11 for p in head] for head in single[0]]


# ---- caches and scopes that end early ------------------------------------------------------------


@both
@pytest.mark.parametrize("name", ["AdaKVPress", "DMSPress", "PyramidKVPress"])
def test_an_exception_inside_the_forward_does_not_leave_a_layer_open(package, name):
    """What a scope promised a layer ends with the scope, also if the forward never came to it."""
    model = build("llama", num_layers=3)
    press, cache = example_for(package, name, 0.5, model), DynamicCache(config=model.config)
    with press(model):
        model(token_ids(1, 40), past_key_values=cache)
        k_proj = model.model.layers[1].self_attn.k_proj
        fails = k_proj.register_forward_hook(lambda *_: {}["interrupted"])
        with fails, pytest.raises(KeyError, match="interrupted"):
            model(token_ids(1, 3), past_key_values=cache)
    states = torch.zeros(1, 2, 3, 16)
    with pytest.raises(ScopeError, match=r"(inside|keep) the scope"):
        cache.layers[1].update(states, states)


@both
@pytest.mark.parametrize("where", ["after the layers", "between the layers of a replay"])
def test_an_exception_behind_the_layers_leaves_no_cache_to_read(package, where):
    phases, cache, layers = Phase.PREFILL | Phase.AFTER_DECODER, DynamicCache(), [0]
    fails = {"phases": phases, "after_decoder": lambda *_: [].pop()}
    is_after = where == "after the layers"
    own = type("Own", (package.KnormPress,), fails) if is_after else package.KVComposePress
    with own(0.5)(build("llama")) as scope:
        if not is_after:
            scope.state.tally.record = lambda *_: layers.pop()  # fails for the second layer
        for error in (IndexError, ScopeError):
            with pytest.raises(error, match=r"pop|exception ended"):
                scope.model(token_ids(1, 20), past_key_values=cache)


# ---- what a press returns ------------------------------------------------------------------------

SCORES = {
    "nan": (lambda s: s.masked_fill(s == s.amin(), float("nan")), "NaN .*model"),
    "short": (lambda s: s[..., :9], r"tensor \(1, 2, 9\).* here \(1, 2, {n}\)"),
    "of query heads": (lambda s: s.repeat_interleave(2, dim=1), r"tensor \(1, 4, {n}\)"),
    "8 bits": (lambda s: s.to(torch.float8_e5m2), "float8.*16 bits"),
    "sparse": (lambda s: s.to_sparse(), r"sparse tensor \(1, 2, {n}\)"),
    "nested": (lambda s: torch.nested.nested_tensor([*s]), "a nested tensor"),
    "elsewhere": (lambda s: s.to("meta"), "on meta.* on cpu"),
    "bool": (lambda s: s > 0, "torch.bool.*floating-point"),
    "nothing": (lambda s: None, "NoneType.*floating-point"),
}


def scoring(package, change, ratio=0.5):
    """A press of a user, whose scores are wrong."""

    class MyPress(package.ScorerPress):
        def score(self, *args):
            keys = args[2] if package is hooks_impl else args[0].keys
            return change(keys.norm(dim=-1))

    return MyPress(ratio)


@both
@pytest.mark.parametrize("around", TABLES["ranked"])
@pytest.mark.parametrize("wrong", SCORES)
def test_scores_that_rank_no_tokens_are_refused(package, wrong, around):
    model, (change, said), (n, text) = build("llama"), SCORES[wrong], TABLES["ranked"][around]
    press = read_press(text, package, press=scoring(package, change))
    with press(model), pytest.raises(PressError, match=rf"MyPress\.score .*{said.format(n=n)}"):
        model(token_ids(1, 20))


# ---- what a refusal leaves, and what infinite scores leave ---------------------------------------


def test_a_crop_that_some_layers_refuse_leaves_no_cache_to_read(package):
    model, cache = build("llama", num_layers=2), DynamicCache()
    with package.PerLayerCompressionPress(package.KnormPress(0.5), [0.0, 0.5])(model):
        model(token_ids(1, 20), past_key_values=cache)
        with pytest.raises(PressError, match="crop"):
            cache.crop(17 if CROP_TAKES_LENGTH else -3)
        with pytest.raises(ScopeError, match="crop"):
            model(token_ids(1, 1), past_key_values=cache)


@both
@pytest.mark.parametrize("seen", [0, 20])
def test_what_is_refused_brings_no_layer_tokens(package, seen):
    """A context that is padded on the right, or a step over heads that differ in length."""
    model, cache = build("llama"), DynamicCache()
    press, mask = package.H2OPress(0.5), torch.ones(1, 10, dtype=torch.long)
    if seen:
        filled(model, package.AdaKVPress(package.KnormPress(0.5)), token_ids(1, seen), cache)
    else:
        mask[:, -3:] = 0
    told = pytest.raises(UnsupportedInputError, match=r"left-padded|outermost")
    with headwise(model), press(model), told:
        model(token_ids(1, 10), past_key_values=cache, attention_mask=None if seen else mask)
    assert [layer.get_seq_length() for layer in cache.layers] == [seen] * (2 if seen else 0)


def test_every_head_keeps_its_share_beside_infinite_scores(package):
    def change(scores):
        return scores.masked_fill(torch.arange(20) < 18, float("inf"))

    press = package.AdaKVPress(scoring(package, change, 0.7), alpha_safeguard=0.5)
    cache = filled(build("llama"), press, token_ids(1, 20))
    assert all(int(n.min()) >= 3 for n in kept_lengths(cache))


@pytest.mark.parametrize("name", ["CriticalKVPress", "CriticalAdaKVPress"])
def test_values_of_zeros_do_not_keep_what_is_to_be_evicted_first(package, name):
    model = build("llama")
    for layer in model.model.layers:
        layer.self_attn.v_proj.weight.data.zero_()

    def change(scores):
        return scores.masked_fill(torch.arange(20) % 2 == 0, -float("inf"))

    cache = filled(model, getattr(package, name)(scoring(package, change, 0.5)), token_ids(1, 20))
    assert held(cache) == [[[list(range(1, 20, 2))] * 2]] * len(cache.layers)


# ---- in each other and beside each other ---------------------------------------------------------


@pytest.mark.parametrize("name", ["KVComposePress", "KVzipPress"])
def test_a_press_that_decodes_takes_no_part_in_a_replay(package, name):
    model, ids, found = build("llama"), token_ids(1, 100), []
    beside = package.StreamingLLMDecodingPress(60)
    for opens in (nullcontext(), beside(model)):
        with opens:
            found.append(held(filled(model, example_for(package, name, 0.5, model), ids)))
    assert found[0] == found[1]
    assert beside.compression_count == 0


def test_what_another_press_has_evicted_is_not_evicted_once_more(package):
    model, given = build("llama"), [token_ids(1, n) for n in (40, *[1] * 12)]
    with package.H2OPress(0.5)(model):
        cache, _ = ran(model, package.H2OPress(0.5), given)
    assert kept_lengths(cache)[0].tolist() == [[10, 10]]
    snapkv = package.SnapKVPress(window_size=4)
    few, many = (package.DecodingPress(snapkv, 2, n) for n in (10, 100))
    with few(model):  # what it has buffered stays when another one evicts nothing
        found = [held(ran(model, press, given)[0]) for press in (None, many)]
    assert found[0] == found[1]
    assert (few.compression_count, many.compression_count) == (12, 0)


def test_chunks_are_alone_whatever_attention_returns(package):
    press, found = package.ChunkPress(package.ObservedAttentionPress(0.5), 16), []
    for attention in ("sdpa", "eager"):
        model = build("llama", num_layers=1, attn_implementation=attention)
        found.append(held(filled(model, press, token_ids(1, 60))))
    assert found[0] == found[1]


def test_a_ratio_that_is_set_in_a_scope_is_told_until_it_was_used(package):
    model, press = build("llama"), package.AdaKVPress(package.KnormPress(0.5))
    with press(model):
        for ratio in (0.5, 0.75):
            press.compression_ratio = ratio
            assert press.compression_ratio == ratio
            model(token_ids(1, 40))
            assert press.compression_ratio == press.evicted_ratio == pytest.approx(ratio)
        with pytest.raises(ValueError, match="compression_ratio"):
            press.compression_ratio = 7
    assert press.compression_count == 2


@pytest.mark.parametrize("name", ["KVzipPress", "DMSPress"])
def test_a_context_that_loses_nothing_is_decoded_outside_of_scopes(package, name):
    model = build("llama")
    press = package.DMSPress(package.KnormPress(), -4.0)  # with a window of 128 tokens
    if name == "KVzipPress":
        press = example_for(package, name, 0.5, model).with_budget(1000)
    cache = filled(model, press, token_ids(1, 16))
    assert kept_lengths(cache)[0].tolist() == [[16, 16]]
    model(token_ids(1, 1), past_key_values=cache)
