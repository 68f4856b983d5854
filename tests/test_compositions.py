"""Presses made of presses made of presses: what they keep, and what they say they evicted."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

import patch_impl
from press_core import attention_sites, kept_lengths
from press_core.learned.duo_attention import HeadScores
from tests.support import both, build, filled, held, left_padded, token_ids

LENGTH, LAYERS, HEADS = 60, 2, 2


def make() -> PreTrainedModel:
    return build("llama", num_layers=LAYERS, num_kv_heads=HEADS, dtype=torch.float64)


def preferring(package: Any, preference: Callable[[int], list[float]]) -> Any:
    """A press that scores the tokens of a context of a given length so, as its package has it."""

    class Preferring(package.ScorerPress):
        def score(self, *given: Any) -> Tensor:
            keys = given[0].keys if package is patch_impl else given[2]
            return torch.tensor(preference(keys.shape[2]), dtype=keys.dtype).expand(keys.shape[:3])

    return Preferring


def middle(package: Any) -> Any:
    return preferring(package, lambda n: [-abs(i - (n - 1) / 2) for i in range(n)])


def early(package: Any) -> Any:
    return preferring(package, lambda n: [float(-i) for i in range(n)])


MIDDLE, FIRST_OF_THEM = list(range(9, 51)), list(range(9, 21))
"""What Middle(0.3) keeps of 60 tokens, and what Early(0.7) keeps of those."""


def rerotated(model: PreTrainedModel, ids: Tensor, layer: int, positions: list[int]) -> Tensor:
    """Keys `(B, H_kv, n, d)` of the uncompressed cache, rotated to `0 ... n - 1`."""
    keys = filled(model, None, ids).layers[layer].keys[:, :, positions]
    rotary = attention_sites(model)[layer].rotary
    assert rotary is not None
    before = rotary.rotate_from(keys, torch.tensor(positions).view(1, 1, -1))
    return rotary.rotate_to(before, torch.arange(len(positions)).view(1, 1, -1))


# ---- nested --------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("last", ["composition", "all that is left"])
def test_a_rerotation_of_what_another_press_has_left(package, last):
    """It starts from the positions of the whole context, also of all that was left."""
    model, ids = make(), token_ids(2, LENGTH)
    inner = package.ComposedPress([early(package)(0.7)])
    if last != "composition":
        inner = package.SnapKVPress(0.5, window_size=50)  # 42 tokens: too short for it
    press = package.ComposedPress([middle(package)(0.3), package.KeyRerotationPress(inner)])
    expected = FIRST_OF_THEM if last == "composition" else MIDDLE
    cache = filled(model, press, ids)
    assert held(cache) == [[[expected] * HEADS] * 2] * 2
    for index, layer in enumerate(cache.layers):
        torch.testing.assert_close(layer.keys, rerotated(model, ids, index, expected))
        assert layer.get_seq_length() == len(expected)


NESTED: dict[str, Callable[[Any], tuple[Any, list[Any]]]] = {
    "the first": lambda p: (
        [p.ComposedPress([p.KnormPress(0.3), p.KeyDiffPress(0.2)]), p.SnapKVPress(0.5, 6)],
        [p.KnormPress(0.3), p.KeyDiffPress(0.2), p.SnapKVPress(0.5, 6)],
    ),
    "the last": lambda p: (
        [p.KnormPress(0.3), p.ComposedPress([p.KeyDiffPress(0.2), p.SnapKVPress(0.5, 6)])],
        [p.KnormPress(0.3), p.KeyDiffPress(0.2), p.SnapKVPress(0.5, 6)],
    ),
    "three deep": lambda p: (
        [p.ComposedPress([p.KnormPress(0.3), p.ComposedPress([p.KeyDiffPress(0.5)])])],
        [p.KnormPress(0.3), p.KeyDiffPress(0.5)],
    ),
    "rerotation inside": lambda p: (
        [p.ComposedPress([p.KeyRerotationPress(p.KnormPress(0.3))]), p.SnapKVPress(0.5, 6)],
        [p.KeyRerotationPress(p.KnormPress(0.3)), p.SnapKVPress(0.5, 6)],
    ),
    "rerotation twice": lambda p: (
        [
            p.KeyRerotationPress(p.KnormPress(0.3)),
            p.KeyRerotationPress(p.ComposedPress([p.StreamingLLMPress(0.5)])),
        ],
        [p.KnormPress(0.3), p.KeyRerotationPress(p.StreamingLLMPress(0.5))],
    ),
    "by head": lambda p: (
        [p.ComposedPress([p.KnormPress(0.3), p.AdaKVPress(p.KeyDiffPress(0.5))])],
        [p.KnormPress(0.3), p.AdaKVPress(p.KeyDiffPress(0.5))],
    ),
    "channels": lambda p: (
        [p.KnormPress(0.3), p.ComposedPress([p.ThinKPress(0.5, window_size=6)])],
        [p.KnormPress(0.3), p.ThinKPress(0.5, window_size=6)],
    ),
}


@pytest.mark.parametrize("name", NESTED)
def test_a_nested_composition_is_its_presses_one_after_the_other(package, name):
    model, question = make(), token_ids(2, 3, seed=1)
    ids, mask, positions = left_padded(2, LENGTH, [11, 0])
    more, layers, logits = torch.cat((mask, torch.ones_like(question)), dim=1), [], []
    for presses in NESTED[name](package):
        cache = DynamicCache(config=model.config)
        with package.ComposedPress(presses)(model):
            model(ids, past_key_values=cache, attention_mask=mask, position_ids=positions)
            logits.append(model(question, past_key_values=cache, attention_mask=more).logits)
        layers.append(cache.layers)
    # Rerotating in between rounds differently from rerotating once.
    close = {"atol": 1e-9, "rtol": 1e-9} if name == "rerotation twice" else {"atol": 0, "rtol": 0}
    for nested, flat in zip(*layers, strict=True):
        assert type(nested) is type(flat)
        assert nested.get_seq_length() == flat.get_seq_length()
        torch.testing.assert_close(nested.keys, flat.keys, **close)
        assert torch.equal(nested.values, flat.values)
    torch.testing.assert_close(*logits, **close)


# ---- what they say they evicted, and are asked to ------------------------------------------------


def duo(package: Any) -> Any:
    scores = HeadScores(torch.tensor([[0.9, 0.1], [0.2, 0.8]]))
    return package.DuoAttentionPress(0.5, head_scores=scores, sink_size=2, recent_size=7)


def lazy(package: Any) -> Any:
    return package.SimLayerKVPress(0.0, n_recent=9, n_initial=2)


MEASURED: dict[str, tuple[Callable[[Any], Any], float]] = {
    "rerotation, simlayer": (lambda p: p.KeyRerotationPress(lazy(p)), 0),
    "simlayer, nested": (
        lambda p: p.ComposedPress([p.KnormPress(0.5), p.ComposedPress([lazy(p)])]),
        0.5,
    ),
    "knorm, dms": (
        lambda p: p.ComposedPress(
            [p.KnormPress(0.5), p.DMSPress(p.KeyDiffPress(), 0.0, sliding_window_size=5)]
        ),
        0.5,
    ),
    "duo": (lambda p: p.ComposedPress([duo(p)]), 0),
}


@pytest.mark.parametrize("name", MEASURED)
def test_a_composition_reports_what_was_really_evicted(package, name):
    """Of padded rows no padding, and in each scope anew."""
    model, (made, asked) = make(), MEASURED[name]
    press, (ids, mask, positions) = made(package), left_padded(2, LENGTH, [30, 0])
    assert press.compression_ratio == pytest.approx(asked), "before it has run: what is asked"
    given = {"attention_mask": mask, "position_ids": positions}
    for inputs, length in ((given, 45), ({}, LENGTH)):
        cache = filled(model, press, ids, **inputs)
        n_kept = sum(int(kept.sum()) for kept in kept_lengths(cache))
        assert press.compression_ratio == pytest.approx(1 - n_kept / (2 * HEADS * LAYERS * length))
        assert asked < press.compression_ratio < 1
        assert press.compression_count == 1
        assert next(press.parts).last_run is None, "measured of the press that was opened"


def test_ratios_of_composed_presses_multiply(package):
    inner = [package.KnormPress(0.5), package.KnormPress(0.2), package.KnormPress(0.75)]
    press = package.ComposedPress(inner)
    assert press.compression_ratio == pytest.approx(1 - 0.5 * 0.8 * 0.25)
    assert package.ComposedPress([package.ThinKPress(0.5)]).compression_ratio == 0.25
    cache = filled(make(), press, token_ids(1, LENGTH))
    assert {int(n) for kept in kept_lengths(cache) for n in kept.flatten()} == {6}


RATIOS: dict[str, tuple[Callable[..., Any], Callable[[Any], Any]]] = {
    name: (
        lambda p, inner, name=name: p.PRESSES[name](inner),
        lambda p, name=name: p.PRESSES[name](p.KnormPress(0.36)),
    )
    for name in ("AdaKVPress", "CriticalKVPress", "PrefillDecodingPress")
}
RATIOS["ComposedPress"] = (
    lambda p, inner: p.ComposedPress([inner, p.KeyDiffPress(0.5)]),
    lambda p: p.ComposedPress([p.KnormPress(0.2), p.KeyDiffPress(0.2)]),
)
RATIOS["two deep"] = (
    lambda p, inner: p.ChunkPress(p.CriticalKVPress(inner), chunk_length=25),
    lambda p: p.ChunkPress(p.CriticalKVPress(p.KnormPress(0.36)), chunk_length=25),
)


@both
@pytest.mark.parametrize("name", RATIOS)
def test_the_ratio_of_a_composition_can_be_set(package, name):
    """The press itself becomes what is expected, and none that it was made of changes."""
    inner, ids, (make_press, expected) = package.KnormPress(0.5), token_ids(1, 50), RATIOS[name]
    press, model = make_press(package, inner), build("llama", num_layers=1)
    filled(model, press, ids)
    press.compression_ratio = 0.36
    assert press.compression_ratio == pytest.approx(0.36)
    assert inner.compression_ratio == 0.5
    assert float(kept_lengths(filled(model, press, ids))[0].float().mean()) == 32
    assert press.asked_ratio == pytest.approx(expected(package).asked_ratio)
    assert press.with_ratio(0.1).compression_ratio == pytest.approx(0.1)
    assert press.compression_ratio == pytest.approx(0.36)


# ---- taking off, counting, copying ---------------------------------------------------------------


PRESSES: dict[str, Callable[[Any], Any]] = {
    "a press": lambda p: p.KnormPress(0.5),
    "a composition": lambda p: p.ComposedPress([p.KnormPress(0.5), p.KeyDiffPress(0.2)]),
}


@both
@pytest.mark.parametrize("name", PRESSES)
def test_remove_takes_off_the_scope_opened_last(package, name):
    models, press, ids = [make(), make()], PRESSES[name](package), token_ids(1, LENGTH)
    press.remove()  # there is none yet
    handles = [press.register(model) for model in models]
    press.remove()
    press.remove()
    lengths = []
    for model in models:
        cache = DynamicCache(config=model.config)
        model(ids, past_key_values=cache)
        lengths.append(int(kept_lengths(cache)[0].max()))
    assert lengths[0] < LENGTH
    assert lengths[1] == LENGTH
    handles[0].remove()
    press.register(models[0]).remove()


def pickled(press: Any) -> Any:
    return pickle.loads(pickle.dumps(press))


@both
@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickled])
@pytest.mark.parametrize("name", PRESSES)
def test_a_copy_of_a_press_that_has_run_is_a_fresh_press(package, name, copied):
    model, press, ids = make(), PRESSES[name](package), token_ids(1, LENGTH)
    cache = filled(model, press, ids)
    with press(model):
        other = copied(press)
    assert other == press
    assert other.last_run is None
    assert other.compression_count == 0
    for one, two in zip(filled(model, other, ids).layers, cache.layers, strict=True):
        assert torch.equal(one.keys, two.keys)
    assert press.last_run is not other.last_run
