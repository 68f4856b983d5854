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

import hooks_impl
import patch_impl
from press_core import Press, attention_sites, kept_lengths
from press_core.learned.duo_attention import HeadScores
from tests.support import build, left_padded, token_ids

both = pytest.mark.parametrize("package", [hooks_impl, patch_impl], ids=["hooks", "patches"])
LENGTH, LAYERS, HEADS = 60, 2, 2


def make(dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    return build("llama", num_layers=LAYERS, num_kv_heads=HEADS, dtype=dtype)


def prefill(model: PreTrainedModel, press: Press, ids: Tensor, **arguments: Any) -> DynamicCache:
    cache = DynamicCache(config=model.config)
    with press(model), torch.no_grad():
        model(ids, past_key_values=cache, **arguments)
    return cache


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
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids, past_key_values=cache)
    keys = cache.layers[layer].keys[:, :, positions]
    rotary = attention_sites(model)[layer].rotary
    assert rotary is not None
    before = rotary.rotate_from(keys, torch.tensor(positions).view(1, 1, -1))
    return rotary.rotate_to(before, torch.arange(len(positions)).view(1, 1, -1))


# ---- nested --------------------------------------------------------------------------------------


@both
def test_a_nested_composition_keeps_positions_of_the_whole_context(package: Any) -> None:
    model, ids = make(), token_ids(2, LENGTH)
    press = package.ComposedPress(
        [middle(package)(0.3), package.ComposedPress([early(package)(0.7)])]
    )
    for layer in prefill(model, press, ids).layers:
        assert layer.positions.tolist() == [[FIRST_OF_THEM] * HEADS] * 2


@both
def test_a_rerotation_around_a_nested_composition_starts_from_the_right_positions(
    package: Any,
) -> None:
    model, ids = make(), token_ids(2, LENGTH)
    inner = package.KeyRerotationPress(package.ComposedPress([early(package)(0.7)]))
    press = package.ComposedPress([middle(package)(0.3), inner])
    for index, layer in enumerate(prefill(model, press, ids).layers):
        assert layer.positions.tolist() == [[FIRST_OF_THEM] * HEADS] * 2
        torch.testing.assert_close(layer.keys, rerotated(model, ids, index, FIRST_OF_THEM))
        assert layer.get_seq_length() == len(FIRST_OF_THEM)


@both
def test_a_rerotation_of_all_that_another_press_has_left_rotates_its_keys(package: Any) -> None:
    model, ids = make(), token_ids(2, LENGTH)
    last = package.KeyRerotationPress(package.SnapKVPress(0.5, window_size=50))  # 42: too short
    press = package.ComposedPress([middle(package)(0.3), last])
    for index, layer in enumerate(prefill(model, press, ids).layers):
        assert layer.positions.tolist() == [[MIDDLE] * HEADS] * 2
        torch.testing.assert_close(layer.keys, rerotated(model, ids, index, MIDDLE))
        assert layer.get_seq_length() == len(MIDDLE)


NESTED: dict[str, Callable[[Any], tuple[Any, list[Any]]]] = {
    "the last": lambda p: (
        [p.KnormPress(0.3), p.ComposedPress([p.KeyDiffPress(0.5)])],
        [p.KnormPress(0.3), p.KeyDiffPress(0.5)],
    ),
    "the first": lambda p: (
        [p.ComposedPress([p.KnormPress(0.3), p.KeyDiffPress(0.2)]), p.SnapKVPress(0.5, 6)],
        [p.KnormPress(0.3), p.KeyDiffPress(0.2), p.SnapKVPress(0.5, 6)],
    ),
    "snapkv after the last": lambda p: (
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


@both
@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize("name", NESTED)
@torch.no_grad()
def test_a_nested_composition_is_its_presses_one_after_the_other(
    package: Any, name: str, padded: bool
) -> None:
    model, question = make(), token_ids(2, 3, seed=1)
    ids, mask, positions = left_padded(2, LENGTH, [11, 0])
    arguments = {"attention_mask": mask, "position_ids": positions} if padded else {}
    more = torch.cat((mask, torch.ones_like(question)), dim=1)
    after = {"attention_mask": more} if padded else {}
    layers, logits = [], []
    for presses in NESTED[name](package):
        cache = DynamicCache(config=model.config)
        with package.ComposedPress(presses)(model):
            model(ids, past_key_values=cache, **arguments)
            logits.append(model(question, past_key_values=cache, **after).logits)
        layers.append(cache.layers)
    # Rerotating in between rounds differently from rerotating once.
    close = {"atol": 1e-9, "rtol": 1e-9} if name == "rerotation twice" else {"atol": 0, "rtol": 0}
    for nested, flat in zip(*layers, strict=True):
        assert type(nested) is type(flat)
        assert nested.get_seq_length() == flat.get_seq_length()
        torch.testing.assert_close(nested.keys, flat.keys, **close)
        assert torch.equal(nested.values, flat.values)
    torch.testing.assert_close(*logits, **close)


# ---- what they say they evicted ------------------------------------------------------------------


def duo(package: Any) -> Any:
    scores = HeadScores(torch.tensor([[0.9, 0.1], [0.2, 0.8]]))
    return package.DuoAttentionPress(0.5, head_scores=scores, sink_size=2, recent_size=7)


def lazy(package: Any) -> Any:
    return package.SimLayerKVPress(0.0, n_recent=9, n_initial=2)


MEASURED: dict[str, tuple[Callable[[Any], Any], float]] = {
    "rerotation, simlayer": (lambda p: p.KeyRerotationPress(lazy(p)), 0),
    "simlayer": (lambda p: p.ComposedPress([lazy(p)]), 0),
    "knorm, simlayer": (lambda p: p.ComposedPress([p.KnormPress(0.5), lazy(p)]), 0.5),
    "simlayer, nested": (
        lambda p: p.ComposedPress([p.KnormPress(0.5), p.ComposedPress([lazy(p)])]),
        0.5,
    ),
    "dms": (lambda p: p.DMSPress(p.KeyDiffPress(), threshold=-0.2, sliding_window_size=5), 0),
    "knorm, dms": (
        lambda p: p.ComposedPress(
            [p.KnormPress(0.5), p.DMSPress(p.KeyDiffPress(), 0.0, sliding_window_size=5)]
        ),
        0.5,
    ),
    "duo": (lambda p: p.ComposedPress([duo(p)]), 0),
    "knorm, duo": (lambda p: p.ComposedPress([p.KnormPress(0.5), duo(p)]), 0.5),
}


@both
@pytest.mark.parametrize("name", MEASURED)
def test_a_composition_reports_what_was_really_evicted(package: Any, name: str) -> None:
    model, (made, asked) = make(), MEASURED[name]
    press = made(package)
    assert press.compression_ratio == pytest.approx(asked), "before it has run: what is asked"
    cache = prefill(model, press, token_ids(2, LENGTH))
    n_kept = sum(int(kept.sum()) for kept in kept_lengths(cache))
    assert press.compression_ratio == pytest.approx(1 - n_kept / (2 * HEADS * LAYERS * LENGTH))
    assert asked < press.compression_ratio < 1
    assert press.compression_count == 1
    inner = next(press.parts)
    assert inner.last_run is None, "what is measured belongs to the press that was opened"


@both
def test_a_composition_reports_no_padding_as_evicted(package: Any) -> None:
    ids, mask, positions = left_padded(2, LENGTH, [30, 0])
    press = package.ComposedPress([package.KnormPress(0.5), package.ComposedPress([lazy(package)])])
    cache = prefill(make(), press, ids, attention_mask=mask, position_ids=positions)
    n_kept = sum(int(kept.sum()) for kept in kept_lengths(cache))
    assert press.compression_ratio == pytest.approx(1 - n_kept / (HEADS * LAYERS * (30 + LENGTH)))


@both
def test_each_scope_measures_anew(package: Any) -> None:
    model = make()
    press = package.KeyRerotationPress(lazy(package))
    prefill(model, press, token_ids(1, LENGTH))
    assert press.compression_ratio > 0.5
    prefill(model, press, token_ids(1, 8))  # too short for it
    assert press.compression_ratio == 0


# ---- taking off, counting, copying ---------------------------------------------------------------


PRESSES: dict[str, Callable[[Any], Any]] = {
    "a press": lambda p: p.KnormPress(0.5),
    "a composition": lambda p: p.ComposedPress([p.KnormPress(0.5), p.KeyDiffPress(0.2)]),
}


@both
@pytest.mark.parametrize("name", PRESSES)
@torch.no_grad()
def test_remove_takes_off_the_scope_opened_last(package: Any, name: str) -> None:
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


@both
@torch.no_grad()
def test_compressions_are_counted_in_the_scope_opened_last(package: Any) -> None:
    model, ids = make(), token_ids(1, LENGTH)
    press = package.DecodingPress(package.KnormPress(), compression_interval=2, target_size=20)
    assert press.compression_count == 0
    cache = DynamicCache(config=model.config)
    model(ids, past_key_values=cache)
    with press(model):
        for n_steps in range(1, 6):
            model(ids[:, :1], past_key_values=cache)
            assert press.compression_count == n_steps // 2
    assert press.compression_count == 2
    with press(model):
        assert press.compression_count == 0


def pickled(press: Press) -> Any:
    return pickle.loads(pickle.dumps(press))


@both
@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickled])
@pytest.mark.parametrize("name", PRESSES)
def test_a_copy_of_a_press_that_has_run_is_a_fresh_press(
    package: Any, name: str, copied: Any
) -> None:
    model, press, ids = make(), PRESSES[name](package), token_ids(1, LENGTH)
    cache = prefill(model, press, ids)
    with press(model):
        other = copied(press)
    assert other == press
    assert other.last_run is None
    assert other.compression_count == 0
    for one, two in zip(prefill(model, other, ids).layers, cache.layers, strict=True):
        assert torch.equal(one.keys, two.keys)
    assert press.last_run is not other.last_run
