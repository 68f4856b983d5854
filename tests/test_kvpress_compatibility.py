"""A press written for kvpress runs unchanged on `hooks_impl`: one import is all that differs."""

from dataclasses import dataclass, make_dataclass

import pytest
import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

import hooks_impl
from hooks_impl import (
    BasePress,
    BlockPress,
    ComposedPress,
    DecodingPress,
    DMSPress,
    ExpectedAttentionPress,
    KnormPress,
    LeverageScorePress,
    PrefillDecodingPress,
    ScorerPress,
    is_prefilling,
    queries,
)
from press_core import HyperparameterError, Needs, UnsupportedInputError, kept_lengths
from tests.presses import TABLES, presses_of, read_press
from tests.support import Latest, both, build, filled, held, in_parts, left_padded, ran, token_ids


@dataclass
class Halving(BasePress):
    """Returns plain tensors, as a press of kvpress does, and tells nobody which tokens it kept."""

    spares_the_last: bool = False

    def post_init_from_model(self, model):
        self.n_layers = model.config.num_hidden_layers

    def compress(self, module, hidden_states, keys, values, attentions, kwargs):
        if self.spares_the_last and module.layer_idx == self.n_layers - 1:
            return keys, values
        return keys[:, :, ::2], values[:, :, ::2]


class SparingTheLast:
    def forward_hook(self, module, input, kwargs, output):
        return output if module.layer_idx else super().forward_hook(module, input, kwargs, output)


def prefill(press, length=30):
    model = build("llama", num_layers=2)
    cache, logits = ran(model, press, [token_ids(2, length), token_ids(2, 3)])
    return [int(kept[0, 0]) - 3 for kept in kept_lengths(cache)], logits[-1]


def test_compress_with_layers_of_different_length():
    kept, logits = prefill(Halving(spares_the_last=True))
    assert kept == [15, 30]
    assert torch.isfinite(logits).all()
    assert torch.equal(prefill(type("Sparing", (SparingTheLast, Halving), {})())[1], logits)
    padded, sparing = left_padded(2, 33, (0, 8)), type("", (SparingTheLast, KnormPress), {})(0.5)
    presses = sparing, hooks_impl.PerLayerCompressionPress(KnormPress(), [0.5, 0.0])
    last = [in_parts(build("llama"), press, padded, [0, 30, 33])[1][-1] for press in presses]
    torch.testing.assert_close(*last)


def test_a_press_that_does_not_say_what_it_kept_is_refused_where_that_matters():
    """Its keys could be told neither from padding nor which queries they belong to."""
    model = build("llama", num_layers=2)
    ids, mask, _ = left_padded(2, 30, [0, 7])
    with pytest.raises(UnsupportedInputError, match="padded batch"):
        filled(model, Halving(), ids, attention_mask=mask)
    with KnormPress(0.5)(model), pytest.raises(UnsupportedInputError, match="inner scope"):
        filled(model, Halving(), ids)
    with Halving(spares_the_last=True)(model):
        cache, seen = filled(model, KnormPress(0.5), ids), torch.cat((mask, mask[:, -1:]), dim=1)
        with pytest.raises(UnsupportedInputError, match="hides tokens of a context"):
            model(ids[:, :1], past_key_values=cache, attention_mask=seen)
    assert [int(kept[0, 0]) for kept in kept_lengths(cache)] == [8, 15]


def test_exact_queries_for_presses_of_ones_own():
    seen = []

    class Peeking(ScorerPress):
        needs = Needs.QUERIES

        def score(self, module, hidden_states, keys, values, attentions, kwargs):
            seen.append(queries(kwargs, last=4))
            return keys.norm(dim=-1)

    prefill(Peeking(0.5))
    assert [tuple(query.shape) for query in seen] == [(2, 4, 4, 16)] * 2


class Twice(KnormPress):
    """Prunes what it has left once more, in keys and values."""

    def compress(self, module, hidden_states, keys, values, attentions, kwargs):
        kept = super().compress(module, hidden_states, keys, values, attentions, kwargs)
        keys, _ = kept
        return super().compress(module, hidden_states, keys, kept[1], attentions, kwargs)


def test_a_press_may_return_what_another_keeps_of_some_of_the_keys():
    assert prefill(Twice(0.5), 40)[0] == [10, 10]


def test_what_a_score_protects_stays_protected_if_less_than_one_is_added():
    """The sinks of ExpectedAttention, as in kvpress; its other scores are near 1 / 200."""

    class Later(ExpectedAttentionPress):
        def score(self, module, hidden_states, keys, values, attentions, kwargs):
            scores = super().score(module, hidden_states, keys, values, attentions, kwargs)
            return scores + torch.linspace(0, 0.5, scores.shape[-1])

    window = DMSPress(ExpectedAttentionPress(), threshold=0.5, sliding_window_size=8)
    for press in (Later(0.9), window):
        (found,) = held(filled(build("llama", num_layers=1), press, token_ids(1, 200)))
        assert [head[:4] for head in found[0]] == [[0, 1, 2, 3]] * 2


@pytest.mark.parametrize("name", ["budget", "keeps", "amount"])
def test_a_field_named_as_a_method_of_presses_is_refused_in_words(name):
    with pytest.raises(HyperparameterError, match=rf"Mine\({name}=0.3\): {name} must be renamed"):
        make_dataclass("Mine", [(name, float, 0.3)], bases=(NegativeNormPress,))(0.5)


# ---- presses in presses --------------------------------------------------------------------------


class HiddenNormPress(ScorerPress):
    """Reads hidden states, keys and values of the same tokens."""

    def score(self, module, hidden_states, keys, values, attentions, kwargs):
        assert hidden_states.shape[1] == keys.shape[2]
        assert {module: module.layer_idx}[module] >= 0
        assert attentions is None
        assert "position_embeddings" in kwargs
        self.scored = hidden_states.norm(dim=-1)[:, None] * keys.norm(dim=-1)
        return self.scored


def test_blocks_hand_a_scorer_the_hidden_states_of_its_keys():
    """Heads keep different tokens, so each has its own, as a loop over heads and blocks shows."""
    model, ids, n = build("llama", num_layers=1), token_ids(2, 45), 20
    at_once = HiddenNormPress(0.5)
    filled(model, at_once, ids)
    scores = at_once.scored.tolist()
    press = BlockPress(HiddenNormPress(1 - 20 / 45), block_size=8)
    (found,) = held(filled(model, press, ids))
    for row in range(2):
        for head in range(2):
            kept = list(range(n))
            for start in range(n, 45, 8):
                candidates = [*kept, *range(start, min(start + 8, 45))]
                kept = sorted(sorted(candidates, key=lambda t: -scores[row][head][t])[:n])
            assert found[row][head] == kept
    assert found[0][0] != found[0][1]
    filled(build("gpt2"), BlockPress(NegativeNormPress(0.5), block_size=8), ids)  # without RoPE


@pytest.mark.parametrize(("text", "kept"), TABLES["plain_tensors"])
def test_plain_tensors_are_taken_where_nobody_asks_whose_they_are(text, kept):
    press = read_press(text, hooks_impl, halving=Halving())
    given = [token_ids(2, 40), token_ids(2, 1), token_ids(2, 1)]
    cache, logits = ran(build("llama", num_layers=2), press, given)
    decodes = isinstance(press, PrefillDecodingPress) and press.decoding_press is not None
    assert [int(n[0, 0]) for n in kept_lengths(cache)] == [kept if decodes else kept + 2] * 2
    assert torch.isfinite(logits[-1]).all()


def test_plain_tensors_are_refused_in_words_where_somebody_does():
    with pytest.raises(UnsupportedInputError, match="which tokens") as refused:
        prefill(ComposedPress([Halving(), KnormPress(0.5)]))
    assert "scope" not in str(refused.value)
    press = PrefillDecodingPress(Halving(), DecodingPress(LeverageScorePress(), 1, 10))
    with pytest.raises(UnsupportedInputError, match="which tokens"):
        ran(build("llama", num_layers=1), press, [token_ids(1, 40), token_ids(1, 1)])


# ---- names and small things ----------------------------------------------------------------------


def test_names_that_scripts_import():
    assert isinstance(build("llama", num_layers=1), hooks_impl.SUPPORTED_MODELS)
    assert is_prefilling(torch.arange(20), 20)
    assert not is_prefilling(torch.arange(20, 21), 1)
    assert not is_prefilling(torch.arange(20, 25), 5)


@both
def test_presses_are_what_they_are_in_kvpress(package):
    for press, kind in TABLES["subclasses"].items():
        assert issubclass(getattr(package, press), getattr(package, kind)), press
    press = package.CriticalKVPress(package.KnormPress(0.5))
    assert press.compression_ratio == 0.5
    assert press.with_ratio(0.25).press == package.KnormPress(0.25)
    package.DecodingPress(package.KnormPress()).reset()  # of what there is nothing


@both
def test_a_ratio_cannot_be_set_where_none_can_be_told(package):
    press = package.DMSPress(package.KnormPress(), 0.0)
    with pytest.raises(HyperparameterError, match="compression ratio"):
        press.compression_ratio = 0.5


@dataclass
class NegativeNormPress(ScorerPress):
    """What KnormPress scores, in a user's words."""

    def score(self, module, hidden_states, keys, values, attentions, kwargs):
        return -keys.norm(dim=-1)


@presses_of("by hand")
def test_compress_outside_of_any_scope(make_press):
    """What it gives by hand is what it leaves in a cache."""
    press = make_press(hooks_impl, NegativeNormPress=NegativeNormPress)
    model, ids = build("llama", num_layers=1), token_ids(2, 40)
    cache, whole = filled(model, press, ids), filled(model, None, ids)
    attention = model.model.layers[0].self_attn
    given = {name: getattr(whole.layers[0], name) for name in ("keys", "values")}
    # There may be no kwargs.
    given |= {"hidden_states": torch.zeros(2, 40, 64), "attentions": None, "kwargs": None}
    left = press.compress(attention, **given)
    if left.head_mask is None:
        (layer,) = cache.layers
        assert all(map(torch.equal, left, (layer.keys, layer.values)))
    else:
        with pytest.raises(UnsupportedInputError, match="Eviction"):
            _ = [*left]
        assert torch.equal(left.head_mask.sum(dim=-1), kept_lengths(cache)[0])
    if isinstance(press, ScorerPress):
        assert press.score(attention, **given).shape == given["keys"].shape[:3]


@presses_of("in a scope alone")
@pytest.mark.parametrize("kwargs", [{}, None])
def test_compress_outside_of_any_scope_needs_no_more_than_it_is_given(make_press, kwargs):
    attention = build("llama", num_layers=1).model.layers[0].self_attn
    press, keys = make_press(hooks_impl), torch.randn(1, 2, 100, 16)
    with pytest.raises(UnsupportedInputError, match=r"press\(model\)"):
        press.compress(attention, torch.zeros(1, 100, 64), keys, keys, None, kwargs)


@presses_of("ten of forty tokens")
def test_compress_while_decoding_outside_of_any_scope(make_press):
    attention = build("llama", num_layers=1).model.layers[0].self_attn
    press, keys = make_press(hooks_impl), torch.randn(1, 2, 40, 16)
    left, _ = press.compress(attention, torch.zeros(1, 1, 64), keys, keys, None, {})
    assert left.shape[2] == 10


@dataclass
class Windowed(ScorerPress):
    """Makes its queries of hidden states and `position_embeddings`, as presses of kvpress do."""

    needs = Needs.QUERIES | Needs.FORWARD
    independent = False

    def score(self, module, hidden_states, keys, values, attentions, kwargs):
        made = module.q_proj(hidden_states).unflatten(-1, (-1, module.head_dim)).transpose(1, 2)
        made, _ = apply_rotary_pos_emb(made, made, *kwargs["position_embeddings"])
        self.seen.append(torch.allclose(made, queries(kwargs), atol=1e-5))
        assert kwargs["position_ids"].shape[-1] == keys.shape[2]
        assert kwargs["past_key_values"].layers
        return keys.norm(dim=-1)


@presses_of("alone and in others")
def test_positions_are_those_of_the_hidden_states(make_press):
    press, model = Windowed(0.5), build("llama")
    press.seen = []
    ids, mask, positions = left_padded(2, 24, [0, 5])
    around = make_press(hooks_impl, press=press)
    filled(model, around, ids, attention_mask=mask, position_ids=positions)
    assert set(press.seen) == {True}


def test_a_ratio_may_be_a_property():
    ratio = property(lambda self: 0.75, lambda self, given: None)
    press = type("OfABudget", (NegativeNormPress,), {"compression_ratio": ratio})()
    assert prefill(press, length=24)[0] == [6, 6]


@presses_of("twelve tokens")
def test_methods_read_the_ratio_that_is_asked_of_them(make_press):
    class Own(NegativeNormPress):
        def prepare(self, model):
            prepared.append(self)

        def compress(self, module, hidden_states, keys, values, attentions, kwargs):
            kwargs["attention_call"].prepared(self)
            n = int(keys.shape[2] * (1 - self.compression_ratio))
            return keys[:, :, -n:], values[:, :, -n:]

    prepared, model, press = [], build("llama"), Own()
    opened = make_press(hooks_impl, own=press)
    cache = ran(model, opened, [token_ids(1, 20), *token_ids(4, 1).split(1)])[0]
    held = {n for lengths in kept_lengths(cache) for n in lengths.flatten().tolist()}
    assert held in ({12}, {16})  # at the last step, or at once
    assert (press.compression_ratio, len(prepared)) == (0.0, 1)


def test_whatever_a_check_raises_nothing_stays_on_the_model():
    class Failing(Latest):
        def acts_on(self, length):
            raise ZeroDivisionError

    model, ids = build("llama"), token_ids(1, 20)
    cache = filled(model, None, ids)
    with pytest.raises(ZeroDivisionError), Failing()(model):
        model(ids[:, :1], past_key_values=cache)
    assert not model.model._forward_pre_hooks
