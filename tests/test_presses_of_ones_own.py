"""Presses as users write them, wrap them and get them wrong: right, or refused with what to do."""

from dataclasses import dataclass, field, replace
from functools import partialmethod
from itertools import product

import pytest
import torch
from torch import nn
from transformers import DynamicCache

import hooks_impl
import patch_impl
from attention_patch import headwise
from press_core import (
    Eviction,
    Evicts,
    HyperparameterError,
    Needs,
    Phase,
    PressError,
    ScopeError,
    Tokens,
    UnsupportedInputError,
    kept_lengths,
    prefill,
)
from press_core.scoring import Wrapper
from press_core.select import top_positions
from tests.presses import PIPELINE_PRESSES, TABLES
from tests.support import both, build, example_for, filled, held, left_padded, ran, token_ids


def lengths(press, model=None):
    """How many of 40 tokens each head keeps, by layer."""
    cache = filled(model or build("llama"), press, token_ids(2, 40))
    return [layer[0].tolist() for layer in kept_lengths(cache)]


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
            return call.keys.norm(dim=-1) + call.queries_before_rope().sum()

    with pytest.raises(UnsupportedInputError, match=r"Needs\.QUERIES"):
        lengths(Own(0.5))


def test_a_forward_hook_that_hands_on_to_other_presses():
    """As presses are composed in kvpress."""

    class OneAfterTheOther(hooks_impl.BasePress):
        def __init__(self, *presses):
            self.presses = list(presses)

        def forward_hook(self, module, input, kwargs, output):
            assert hooks_impl.is_prefilling(kwargs["cache_position"], 40)
            for press in self.presses:
                output = press.forward_hook(module, input, kwargs, output)
            return output

    parts = hooks_impl.KnormPress(0.5), hooks_impl.StreamingLLMPress(0.5)
    composed = hooks_impl.ComposedPress([*parts])
    assert lengths(OneAfterTheOther(*parts)) == lengths(composed) == [[10, 10]] * 2
    with pytest.raises(HyperparameterError, match="forward_hook"):
        hooks_impl.PrefillDecodingPress(OneAfterTheOther(*parts))


@pytest.mark.filterwarnings("error")
def test_a_forward_hook_that_writes_keys_itself():
    """Right as in kvpress, where nothing counts what was evicted; a pruned layer does."""

    class Latest(hooks_impl.KnormPress):
        def forward_hook(self, module, input, kwargs, output):
            layer = kwargs["past_key_values"].layers[module.layer_idx]
            layer.keys, layer.values = layer.keys[:, :, -9:], layer.values[:, :, -9:]
            return output

    model = build("llama")
    assert lengths(Latest(), model) == [[9, 9]] * 2
    cache = filled(model, hooks_impl.KnormPress(0.5), token_ids(1, 40))
    with Latest()(model), pytest.raises(PressError, match=r"of 21 keys, 20 .* assigned 9;"):
        filled(model, None, token_ids(1, 1), cache)


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


# ---- ways to evict -------------------------------------------------------------------------------


class Masking(hooks_impl.BasePress):
    """Masks keys of each head, as kvpress's notebook on a press of one's own does."""

    def compress(self, module, hidden_states, keys, values, attentions, kwargs):
        gone = keys.norm(dim=-1).topk(10, dim=-1).indices
        batch, heads, _ = gone.shape
        rows = torch.arange(batch).view(-1, 1, 1).expand_as(gone)
        of_heads = torch.arange(heads).view(1, -1, 1).expand_as(gone)
        module.masked_key_indices = rows.flatten(), of_heads.flatten(), gone.flatten()
        return keys, values


def test_keys_that_are_masked_are_evicted_or_it_is_refused():
    model = build("llama")
    with pytest.raises(PressError, match=r"Evicts\.PER_HEAD"):
        lengths(Masking(), model)

    declared = type("Declared", (Masking,), {"evicts": Evicts.PER_HEAD})
    assert lengths(declared(), model) == [[30, 30]] * 2

    def cut(self, *given):
        return tuple(states[:, :, :35] for states in Masking.compress(self, *given))

    with pytest.raises(PressError, match="which tokens it kept"):
        lengths(type("Cut", (declared,), {"compress": cut})(), model)
    assert not any("masked_key_indices" in vars(module) for module in model.modules())


@both
def test_what_is_evicted_is_declared_and_of_the_call(package):
    class Undeclared(patch_impl.BasePress):
        def compress(self, call):
            return Eviction.keep_per_head(call, call.keys[..., 0] > 0)

    class OfTheFirst(patch_impl.BasePress):
        def compress(self, call):
            self.first = vars(self).get("first", call)
            return Eviction.keep(self.first, torch.zeros(1, 2, 1, dtype=torch.int64))

    model, composed = build("llama"), [Undeclared(), patch_impl.KnormPress(0.25)]
    with pytest.raises(PressError, match=r"Evicts\.PER_HEAD"):
        lengths(patch_impl.ComposedPress(composed), model)
    with pytest.raises(PressError, match=r"20 keys of .*layers\.0.* 20 of .*layers\.1"):
        filled(model, OfTheFirst(), token_ids(1, 20))
    some = type("Some", (package.KnormPress,), {"evicts": Evicts.NOTHING})
    with pytest.raises(PressError, match=r"Evicts\.TOKENS"):
        lengths(some(0.5), model)
    for method, given in product(("budget", "remember"), (0, 9.7, None, {"a": None})):
        own = type("Own", (package.H2OPress,), {method: lambda self, call, x=given: x})
        with pytest.raises(PressError, match=f"Own .*budget of {given};|Own.{method} returned"):
            lengths(own(0.5))
    for trait in ("needs", "evicts", "phases", "buffered_tokens"):
        with pytest.raises(HyperparameterError, match=trait):
            type("Own", (package.KnormPress,), {trait: "heads"})(0.5)


NEVER_CALLED = TABLES["never_called"]


@pytest.mark.parametrize(("name", "method"), NEVER_CALLED.items())
def test_methods_of_kvpress_that_would_never_be_called(name, method):
    with pytest.raises(PressError, match=rf"Own\.{method} .*never"):
        type("Own", (hooks_impl.PRESSES[name],), {method: lambda self, *args: None})


def six(self, module, hidden_states, keys, values, attentions, kwargs): ...


OTHERS = (patch_impl, six), (patch_impl, lambda self: 0), (hooks_impl, lambda self, module, keys: 0)


@pytest.mark.parametrize(("package", "score"), OTHERS)
def test_a_formula_with_other_arguments_is_refused_as_its_class_is_made(package, score):
    with pytest.raises(PressError, match=r"Own\.score has the wrong .*score\(self, call\)"):
        type("Own", (package.ScorerPress,), {"score": score})


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


def test_vmap(package):
    model = build("llama")

    def last_key(ids):
        cache = DynamicCache(config=model.config)
        model(ids[None], past_key_values=cache)
        return cache.layers[0].keys

    with package.KnormPress(0.5)(model):
        with pytest.raises(UnsupportedInputError, match="batch"):
            torch.vmap(last_key)(token_ids(2, 12))
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


# ---- rows, amounts, memory -----------------------------------------------------------------------


@pytest.mark.parametrize("text", TABLES["around"])
def test_the_budget_that_a_press_around_another_sets(package, text):
    inner = eval(text, {**package.PRESSES, "Tokens": Tokens, "knorm": package.KnormPress(0.1)})

    class Around(package.BasePress):
        def compress(self, call):
            return inner.evict(call.with_budget(10))

    assert lengths(Around()) == [[10, 10]] * 2


def test_a_ratio_that_a_class_computes_cannot_be_set(package):
    half = property(lambda self: 0.5, lambda self, given: None)
    press = type("Own", (package.KnormPress,), {"compression_ratio": half})()
    assert lengths(press) == [[20, 20]] * 2
    own = {"share": 0.5, "ratio_field": "share", "__annotations__": {"share": float}}
    assert lengths(dataclass(type("Own", (package.KnormPress,), own))()) == [[20, 20]] * 2
    quarter = property(lambda self: 0.25, lambda self, given: None)
    other = type("Own", (package.KnormPress,), {"compression_ratio": quarter})()
    composed = package.ComposedPress([other, package.KnormPress(0.5)])
    for change in (
        lambda: press.with_ratio(0.25),
        lambda: press.with_budget(4),
        lambda: composed.with_ratio(0.6),
    ):
        with pytest.raises(HyperparameterError, match=r"compression_ratio=0\.(5|25)"):
            change()
    channels = package.ComposedPress([package.KnormPress(0.5), package.ThinKPress(0.4)])
    assert channels.with_budget(8).presses[0].compression_ratio == Tokens(8)


def remembering(package, weight):
    """A press that adds `weight` to what it remembers of each token in each forward."""

    def remember(self, call):
        before = call.memory.get("seen", torch.zeros(call.keys.shape[:3]))
        return {"seen": before + weight}

    def spend(self, call, n):
        return Eviction.keep(call, top_positions(call.memory["seen"], n))

    own = {"remember": remember, "spend": spend, "needs": Needs.MEMORY}
    return type("Own", (package.KnormPress,), own)(0.5)


def test_what_presses_remember(package):
    first, second = remembering(package, 1.0), remembering(package, 2.0)
    assert lengths(package.ComposedPress([first, remembering(package, 1.0)])) == [[10, 10]] * 2
    with pytest.raises(PressError, match="Own remembers 'seen'"):
        lengths(package.ComposedPress([first, second]))
    model, press = build("llama"), package.DecodingPress(first, 2, target_size=8)
    cache, _ = ran(model, press, [token_ids(1, n) for n in (20, 1, 1)])
    assert kept_lengths(cache)[0].tolist() == [[8, 8]]
    with pytest.raises(HyperparameterError, match="independently"):
        package.DMSPress(first, 0.0, decoding=True)


def test_evictions_that_do_not_fit_what_came_before():
    def late(self, call):
        return Eviction.late(call, call.keys[..., :4, 0] > 0, {"x": call.keys[..., 0]})

    def carries(self, call):
        return Eviction.keep_per_head(call, call.keys[..., 0] > 0, {"x": call.keys})

    def fewer_in_short_rows(self, call):
        channels = torch.arange(4 if call.length > 10 else 2)
        return Eviction.keep_channels(call, channels.expand(*call.keys.shape[:2], -1))

    model, (ids, mask, positions) = build("llama"), left_padded(2, 16, (0, 8))
    for compress, message in (
        (late, "keep_per_head.* earlier forward"),
        (carries, r"carried .*\(1, 2, 16, \d+\)"),
        (fewer_in_short_rows, r"\[2, 4\] channels"),
    ):
        traits = {"compress": compress, "evicts": max(Evicts), "row_by_row": True}
        press = type("Own", (patch_impl.BasePress,), traits)()
        with pytest.raises(PressError, match=message):
            filled(model, press, ids, attention_mask=mask, position_ids=positions)


@pytest.mark.parametrize("padding", [[0, 5], [5, 0]])
def test_a_window_of_the_first_head_that_slides_evicts_no_token_of_another(package, padding):
    """Also where it is longer than the context of a row."""

    class Sliding(package.BasePress):
        evicts, phases = Evicts.PER_HEAD, Phase.PREFILL | Phase.DECODING

        def compress(self, call):
            new = torch.zeros_like(call.keys[..., 0])
            known = torch.cat((call.carried.get("any", new[..., :0]), new), dim=-1)
            late = torch.zeros_like(known[..., :-4], dtype=torch.bool)
            late[:, 0], carried = True, {"any": known[..., late.shape[-1] :]}
            if call.when.decoding:
                return Eviction.late(call, late, carried)
            stays = torch.ones_like(known, dtype=torch.bool)
            stays[..., : late.shape[-1]] = ~late
            return Eviction.keep_per_head(call, stays, carried)

    ids, mask, positions = left_padded(2, 12, padding)
    model, cache = build("llama"), None
    for end in range(6, 13):
        part = slice(0 if cache is None else end - 1, end)
        more = {"attention_mask": mask[:, :end], "position_ids": positions[:, part]}
        cache, _ = ran(model, Sliding(), [ids[:, part]], cache, **more)
    for layer in held(cache):
        for row, first in zip(layer, padding, strict=True):
            assert row == [[8, 9, 10, 11], list(range(first, 12))]


def test_a_press_that_says_nothing_of_a_ratio_may_evict_anything():
    class Half(patch_impl.BasePress):
        def compress(self, call):
            n = call.length // 2
            return call.keys[:, :, :n], call.values[:, :, :n]

    model, ids = build("llama"), token_ids(1, 20)
    with pytest.raises(UnsupportedInputError, match="draft tokens"), Half()(model):
        model.generate(ids, prompt_lookup_num_tokens=2, max_new_tokens=4)
    cache = filled(model, None, ids)
    with pytest.warns(RuntimeWarning, match="evicted nothing"), Half()(model):
        model(ids[:, :1], past_key_values=cache)
