"""Presses as users write them, wrap them and get them wrong: right, or refused with what to do."""

from dataclasses import dataclass, field, replace
from functools import partialmethod

import pytest
import torch
from torch import nn
from transformers import DynamicCache

import hooks_impl
from attention_patch import headwise
from press_core import Eviction, Evicts, Needs, Phase, kept_lengths, prefill
from press_core.errors import HyperparameterError, ScopeError, UnsupportedInputError
from press_core.scoring import Wrapper
from tests.presses import PIPELINE_PRESSES
from tests.support import both, build, example_for, filled, held, lengths, ran, token_ids

# ---- wrappers ------------------------------------------------------------------------------------

READ_QUERIES = ("ExpectedAttentionPress", "SnapKVPress")
READ_NONE = "RandomPress", "StreamingLLMPress", "KVzapPress", "ExpectedAttentionStatsPress"


@both
@pytest.mark.parametrize("in_field", [True, False])
@pytest.mark.parametrize("name", [*READ_QUERIES, *READ_NONE])
def test_a_wrapper_that_asks_another_press_for_scores(package, name, in_field):
    """It holds the other in a field, or out of anybody's sight."""

    class Around(package.ScorerPress):
        def score(self, *given):
            return inner.score(*given).add_(1)  # what it gets is its own

    press, inner = Around(0.5), example_for(package, name, 0.5, build("llama"))
    if in_field:
        press.inner = inner
    if name in READ_QUERIES and not in_field:
        with pytest.raises(UnsupportedInputError, match=r"Needs\.QUERIES"):
            lengths(press)
    else:
        assert lengths(press) == [[20, 20]] * 2


@both
def test_what_a_wrapper_has_prepared_is_used_by_its_copies_with_other_ratios(package):
    """As PerLayerCompressionPress makes them, one for each layer and context."""

    class Own(Wrapper, package.BasePress):
        def prepare(self, model):
            prepared.append(object())
            return prepared[-1]

        def compress(self, call):
            seen.add(call.prepared(self))
            return self.press.evict(call)

    own = Own(package.KnormPress(0.5))
    composed = package.ComposedPress([package.KnormPress(0.2), own])
    for press in (own, composed, package.PrefillDecodingPress(own)):
        prepared, seen = [], set()
        lengths(package.PerLayerCompressionPress(press, [0.2, 0.6]))
        assert seen == {*prepared}
        assert len(prepared) == 1


@both
def test_what_parts_read_counts_where_a_wrapper_says_what_it_adds(package):
    """Its own class says that it needs nothing more."""
    own = type("Own", (package.CriticalKVPress,), {"needs": Needs.NOTHING})
    model, found = build("llama"), []
    for around in (own, package.CriticalKVPress):
        press, cache = package.BlockPress(around(package.SnapKVPress(0.5, 4)), 8), DynamicCache()
        with press(model):
            prefill(model, token_ids(1, 40), cache, chunk_size=10)
        found.append(held(cache))
    assert found[0] == found[1]
    with pytest.raises(HyperparameterError, match="1 or more for a base_press that reads queries"):
        package.DecodingPress(own(package.SnapKVPress()), hidden_states_buffer_size=0)
    with pytest.raises(HyperparameterError, match="score them again later"):
        package.DecodingPress(own(example_for(package, "KVzapPress", 0.5, model)))
    moves = type("Moves", (package.ComposedPress,), {"needs": Needs.NOTHING})
    moved = moves([package.KeyRerotationPress(package.KnormPress(0.5))])
    with pytest.raises(HyperparameterError, match="without a press that rerotates keys"):
        package.ComposedPress([moved, package.AdaKVPress(package.KnormPress(0.5))])


@both
def test_queries_that_nobody_declared(package):
    class Own(package.ScorerPress):
        def score(self, call):
            return call.queries_before_rope().norm(dim=-1) + float(call.hidden_states.sum())

    with pytest.raises(UnsupportedInputError, match=r"Needs\.QUERIES"):
        lengths(Own(0.5))
    undeclared, model = type("Own", (Own,), {"needs": Needs.QUERIES}), build("llama")
    with undeclared(0.5)(model), pytest.raises(UnsupportedInputError, match="HIDDEN_STATES"):
        prefill(model, token_ids(1, 20), DynamicCache(), 10)


@both
@pytest.mark.parametrize("kind", [staticmethod, classmethod, partialmethod])
def test_scores_that_are_methods_of_other_kinds(package, kind):
    def score(*given):
        return package.KnormPress().score(*given)

    method = kind(score if kind is staticmethod else lambda _, *given: score(*given))
    press = type("Own", (package.ScorerPress,), {"score": method})
    assert lengths(press(0.5)) == [[20, 20]] * 2


@both
def test_a_press_acts_as_often_as_its_parts(package):
    class Around(package.BasePress):
        def __init__(self, inner):
            self.by_name = {"inner": inner}

        def compress(self, *given):
            return self.by_name["inner"].compress(*given)

    inner, found = package.DecodingPress(package.KnormPress(), 3, target_size=12), []
    for press in (inner, Around(inner)):
        cache, _ = ran(build("llama"), press, [token_ids(1, 20), *token_ids(4, 1).split(1)])
        found.append(held(cache))
    assert found[0] == found[1]
    assert len(found[0][0][0][0]) == 13
    assert Around(package.PrefillDecodingPress(package.KnormPress())).is_due(1, 1)
    nine = {"phases": Phase.BEFORE_DECODING, "budget": lambda _, call: min(9, call.length)}
    own = type("Nine", (package.KnormPress,), nine)()
    cache, _ = ran(build("llama"), own, token_ids(1, 21).split([20, 1], dim=1))
    assert kept_lengths(cache)[0].tolist() == [[10, 10]]


def test_values_may_change_where_nothing_is_evicted(package):
    class Rounded(package.BasePress):
        evicts = Evicts.NOTHING

        def compress(self, call):
            return replace(Eviction.nothing(call), values=call.values.round())

    for layer in filled(build("llama"), Rounded(), token_ids(1, 20)).layers:
        assert torch.equal(layer.values, layer.values.round())


def test_attention_that_a_subclass_gives_to_score_is_scored():
    class Least(hooks_impl.ObservedAttentionPress):
        def score(self, module, hidden_states, keys, values, attentions, kwargs):
            return super().score(module, hidden_states, keys, values, -attentions, kwargs)

    model = build("llama", attn_implementation="eager")
    most, least = (
        held(filled(model, press(0.5), token_ids(1, 20), output_attentions=True))[0][0][0]
        for press in (hooks_impl.ObservedAttentionPress, Least)
    )
    assert sorted(most + least) == list(range(20))


# ---- classes with a state and a constructor of their own -----------------------------------------


@both
@pytest.mark.parametrize("base", ["ComposedPress", "KVzapPress", "AdaKVPress"])
def test_what_a_class_has_put_into_a_press_stays_there(package, base):
    inner = example_for(package, base, 0.5, build("llama"))

    class Own(package.PRESSES[base]):
        def __init__(self, label):
            vars(self).update(vars(inner))
            self.label, self.seen, self.hidden_size = label, [], 0

        def post_init_from_model(self, model):
            super().post_init_from_model(model)
            self.hidden_size = model.config.hidden_size

        def evict(self, call):
            self.seen.append((call.site.layer_idx, self.label, self.hidden_size))
            return super().evict(call)

    press, model = Own("mine"), build("llama")
    expected = lengths(inner, model)
    assert lengths(press, model) == expected
    assert press.seen == [(0, "mine", 64), (1, "mine", 64)]


def test_fields_may_be_set_later_or_hold_a_network(package):
    """As those of presses that learn something, where they open on a model."""

    @dataclass
    class Own(package.ScorerPress):
        network: nn.Module | None = None
        n_layers: int = field(init=False)

        def post_init_from_model(self, model):
            self.network, self.n_layers = nn.Linear(1, 1), model.config.num_hidden_layers

        def score(self, *given):
            return self.network(scorer.score(*given).unsqueeze(-1)).squeeze(-1)

    press, scorer = Own(0.5), package.KnormPress()
    assert lengths(press) == lengths(press) == [[20, 20]] * press.n_layers
    assert Own(0.5, nn.Linear(1, 1)).with_ratio(0.25).compression_ratio == 0.25
    type("Own", (Own,), {"__annotations__": {"n_layers": "KnownToTypeCheckersAlone"}})(0.5)
    press.n_layers = "two"
    with pytest.raises(HyperparameterError, match=r"n_layers.*whole number"):
        lengths(press)


def test_attributes_of_a_class_mean_nothing_here(package):
    press = package.KnormPress(0.5)
    press.thread, press._last_scores = "main", [1]
    assert lengths(press) == [[20, 20]] * 2
    copied = press.with_ratio(0.25)
    assert (copied.thread, copied._last_scores) == ("main", [1])


def test_keys_are_not_rotated_where_the_model_rotates_none(package):
    class Turning(package.BasePress):
        def compress(self, call):
            return Eviction.nothing(call).rerotated()

    with pytest.raises(UnsupportedInputError, match=r"rotary.*Needs\.ROPE"):
        filled(build("gpt2"), Turning(), token_ids(1, 20))


# ---- fields --------------------------------------------------------------------------------------


def test_fields_are_checked_again_before_each_context(package):
    model, press = build("llama"), package.KnormPress(0.5)
    with press(model):
        press.compression_ratio = 0.25
        cache = model(token_ids(1, 40)).past_key_values
        assert kept_lengths(cache)[0].tolist() == [[30, 30]]
        press.compression_ratio = 2.0
        with pytest.raises(HyperparameterError, match=r"ratio=2\.0.*\[0, 1\)"):
            model(token_ids(1, 40), past_key_values=DynamicCache(config=model.config))
        press.compression_ratio, press.helper = 0.5, package.SnapKVPress(0.5)
        with pytest.raises(ScopeError, match=r"KnormPress reads.* open it again"):
            model(token_ids(1, 40))


def test_a_composition_that_holds_itself(package):
    press = package.ComposedPress([package.KnormPress(0.5)])
    press.presses.append(press)
    with pytest.raises(HyperparameterError, match="holds"):
        press.register(build("llama"))


# ---- ways of running -----------------------------------------------------------------------------


def test_transforms_that_read_no_values(package):
    model = build("llama")

    def last_key(ids):
        cache = DynamicCache(config=model.config)
        model(ids[None], past_key_values=cache)
        return cache.layers[0].keys

    with package.KnormPress(0.5)(model):
        with pytest.raises(UnsupportedInputError, match="batch"):
            torch.vmap(last_key)(token_ids(2, 12))
        exported = torch.nn.Module()
        exported.forward = last_key
        for record, run in ((torch.jit.trace, last_key), (torch.export.export, exported)):
            with pytest.raises(UnsupportedInputError, match="decode steps"):
                record(run, (token_ids(1, 12)[0],))
        whole = torch.vmap(lambda ids: model(ids[None], use_cache=False).logits)
        assert whole(token_ids(2, 12)).shape[:2] == (2, 1)


def test_gradients_by_a_function_transform(package):
    model = build("llama")
    embedded = model.get_input_embeddings()(token_ids(1, 12))

    def loss(states):
        return model(inputs_embeds=states, past_key_values=DynamicCache()).logits.sum()

    with package.KnormPress(0.5)(model):
        gradient = torch.func.grad(loss)(embedded)
    torch.testing.assert_close(gradient, torch.func.grad(loss)(embedded))


@pytest.mark.parametrize("name", [*READ_QUERIES, "LUKVPress", "FastKVzipPress"])
def test_scores_are_exact_under_autocast(package, name):
    model, ids, dtypes = build("llama"), token_ids(1, 40), set()
    press, by = example_for(package, name, 0.5, model), "remember" if "Fast" in name else "compress"
    choose = getattr(press, by)

    def compress(call):
        dtypes.add((call.keys.float() @ call.keys.float().mT).dtype)
        return choose(call)

    setattr(press, by, compress)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        filled(model, press, ids)
    assert dtypes == {torch.float32}
    assert press.evicted_ratio == pytest.approx(0.5, abs=0.05)


@pytest.mark.parametrize("name", ["adakv", "channels"])
def test_a_layer_made_in_other_modes_is_read_with_gradients(package, name):
    model, press = build("gpt2", num_heads=8), PIPELINE_PRESSES[name](package)
    with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
        cache = filled(model, press, token_ids(1, 300))
    with headwise(model), torch.enable_grad():
        model(token_ids(1, 3), past_key_values=cache).logits.sum().backward()
    assert model.transformer.h[0].attn.c_attn.weight.grad is not None
