"""What presses of one's own evict, ask for and remember: taken as they say it, or refused."""

from dataclasses import dataclass
from itertools import product

import pytest
import torch

import hooks_impl
import patch_impl
from press_core import Eviction, Evicts, Needs, Phase, Tokens, kept_lengths
from press_core.errors import HyperparameterError, PressError, UnsupportedInputError
from press_core.select import top_positions
from tests.presses import TABLES, read_press
from tests.support import both, build, filled, held, left_padded, lengths, ran, token_ids

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


# ---- rows, amounts, memory -----------------------------------------------------------------------


@pytest.mark.parametrize("text", TABLES["around"])
def test_the_budget_that_a_press_around_another_sets(package, text):
    inner = read_press(text, package, Tokens=Tokens, knorm=package.KnormPress(0.1))

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
    with patch_impl.BasePress.collector(lambda call: None)(model):
        model.generate(ids, prompt_lookup_num_tokens=2, max_new_tokens=4)  # which evicts nothing
    cache = filled(model, None, ids)
    with pytest.warns(RuntimeWarning, match="evicted nothing"), Half()(model):
        model(ids[:, :1], past_key_values=cache)
