"""What a press says that it evicted is what is gone from the cache."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

import hooks_impl
from press_core import kept_lengths
from tests.support import both, build, context_for, example_for, filled, left_padded, token_ids

every_press = pytest.mark.parametrize("name", sorted(hooks_impl.PRESSES))

STEPS = {  # until they prune
    **dict.fromkeys(("CAMPress", "CompressionRatioDecodingPress", "DecodingPress"), 2),
    **dict.fromkeys(("DMSPress", "H2OPress", "PrefillDecodingPress"), 2),
}
EARLIER = {"StreamingLLMDecodingPress": 2}  # prunes before a step, which then adds its token


@pytest.fixture(scope="module")
def model():
    return build("llama", num_layers=2)


def run(model: Any, press: Any, context: Tensor, n_steps: int) -> tuple[float, float]:
    """Share of the tokens that is gone after so many steps, and what the press says."""
    cache = DynamicCache(config=model.config)
    with press(model):
        model(context, past_key_values=cache)
        for seed in range(n_steps):
            model(token_ids(1, 1, seed), past_key_values=cache)
    kept = float(torch.stack(kept_lengths(cache)).double().mean())
    return 1 - kept / (context.shape[1] + n_steps), press.evicted_ratio


def evicting(package: Any, name: str, model: Any) -> Any:
    """The press, such that it evicts about half of a few dozen tokens of any text."""
    press = example_for(package, name, 0.5, model)
    return replace(press, lazy_threshold=0.0) if name == "SimLayerKVPress" else press


def told(press: Any) -> bool:
    """Whether its `compression_ratio` is a field, which says what it is told."""
    return any(name == "compression_ratio" for name in vars(press))


@both
@every_press
def test_what_every_press_says_is_what_is_gone(model, package, name):
    press = evicting(package, name, model)
    length = 61
    context = context_for(name, length + (name == "FinchPress"))  # which takes the delimiter out
    n_steps = STEPS.get(name, EARLIER.get(name, 0))
    cache = DynamicCache(config=model.config)
    with press(model):
        model(context, past_key_values=cache)
        for seed in range(n_steps):
            model(token_ids(1, 1, seed), past_key_values=cache)
    since = 1 if name in EARLIER else 0
    seen = length + n_steps - since
    gone = 1 - (float(torch.stack(kept_lengths(cache)).double().mean()) - since) / seen
    assert press.evicted_ratio == pytest.approx(gone, abs=1e-6)
    if name == "ThinKPress":  # loses channels, and no token
        assert gone == 0
    else:
        assert 0.2 < gone < 0.9
    if name != "ThinKPress" and not told(press):
        assert press.compression_ratio == press.evicted_ratio
    if told(press):
        assert press.compression_ratio == 0.5  # what it is told stays
        assert press.evicted_ratio == pytest.approx(0.5, abs=(1 + n_steps) / length)


@every_press
def test_where_nothing_is_evicted_nothing_is_said_to_be(model, package, name):
    """Contexts of two tokens, and presses that were told to evict half."""
    press = example_for(package, name, 0.5, model)
    context = context_for(name, 9)[:, -9:] if name == "FinchPress" else token_ids(1, 2)
    gone, said = run(model, press, context, 0)
    if name == "FinchPress":
        gone = 1 - (1 - gone) * 9 / 8  # without the delimiter
    assert said == pytest.approx(gone, abs=1e-6)
    if not told(press) and name != "ThinKPress":
        assert press.compression_ratio == said


def test_a_window_longer_than_the_context(model, package):
    press = package.AdaKVPress(package.SnapKVPress(0.5))
    assert press.compression_ratio == 0.5
    assert run(model, press, token_ids(1, 40), 0) == (0, 0)
    assert press.compression_ratio == 0
    assert run(model, press, token_ids(1, 80), 0) == (0.5, 0.5)
    assert press.compression_ratio == 0.5


@pytest.mark.parametrize("name", ["KnormPress", "AdaKVPress", "ChunkKVPress", "SimLayerKVPress"])
def test_of_padded_rows_their_own_tokens_count(model, package, name):
    press = evicting(package, name, model)
    context, mask, positions = left_padded(3, 60, [0, 19, 28])
    cache = filled(model, press, context, attention_mask=mask, position_ids=positions)
    kept = torch.stack(kept_lengths(cache)).double().mean(dim=(0, 2))
    seen = mask.sum(dim=1)
    gone = float(1 - kept.sum() / seen.sum())
    assert gone > 0.2
    assert press.evicted_ratio == pytest.approx(gone, abs=1e-6)
