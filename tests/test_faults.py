"""What once went wrong without a word: each is right now, or refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

import hooks_impl
import patch_impl
from experiments.testbed.families import VOCABULARY, build
from experiments.testbed.recipes import PROMPTS
from press_core import UnsupportedInputError
from press_core.cache.ragged import RaggedLayer
from tests.support import example_for, left_padded, token_ids

both = pytest.mark.parametrize("package", [hooks_impl, patch_impl], ids=["hooks", "patches"])

# ---- conversations of uneven questions -----------------------------------------------------------

DECODING: dict[str, Callable[[Any], Any]] = {
    "snapkv": lambda p: p.DecodingPress(p.SnapKVPress(window_size=3), 2, 16),
    "expected": lambda p: p.DecodingPress(
        p.ExpectedAttentionPress(n_future_positions=8, n_sink=1), 2, 16
    ),
    "leverage": lambda p: p.DecodingPress(p.LeverageScorePress(sketch_dimension=8), 2, 16),
    "both phases": lambda p: p.PrefillDecodingPress(
        p.KnormPress(0.4), p.DecodingPress(p.TOVAPress(), 2, 16)
    ),
    "streaming": lambda p: p.StreamingLLMDecodingPress(max_capacity=20, n_sink=3),
    "streaming, rerotated": lambda p: p.StreamingLLMDecodingPress(20, 3, rerotate=True),
    "streaming, rerotated, no sinks": lambda p: p.StreamingLLMDecodingPress(20, 0, rerotate=True),
    "both phases, rerotated": lambda p: p.PrefillDecodingPress(
        p.KeyRerotationPress(p.KnormPress(0.4)),
        p.DecodingPress(p.ExpectedAttentionPress(n_future_positions=8, n_sink=1), 2, 16),
    ),
    "dms": lambda p: p.DMSPress(p.KnormPress(), -4.0, sliding_window_size=8, decoding=True),
    "dms, all": lambda p: p.DMSPress(p.KnormPress(), 0.0, sliding_window_size=6, decoding=True),
}

TURNS = [[30, 17, 25], [5, 1, 8], [1, 1, 1], [1, 1, 1], [2, 7, 4], [1, 1, 1], [1, 1, 1], [1, 1, 1]]
"""By forward, how many tokens each row has; the others are padding on the left."""


def padded_turns(turns: list[list[int]]) -> list[tuple[Tensor, Tensor]]:
    """Input ids and mask `(B, q)` of each forward; a row has no token twice, so that none tie."""
    made, unused = [], 3 + torch.stack([torch.randperm(VOCABULARY - 3) for _ in turns[0]])
    for lengths in turns:
        longest = max(lengths)
        mask = (torch.arange(longest) >= longest - torch.tensor(lengths)[:, None]).long()
        made.append((unused[:, :longest] * mask, mask))
        unused = unused[:, longest:]
    return made


def logits_together(model: PreTrainedModel, turns: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """Of a conversation of the whole batch: `(B, q, vocabulary)` of each forward."""
    cache, found = DynamicCache(config=model.config), []
    seen = torch.zeros(len(turns[0][0]), 0, dtype=torch.long)
    for ids, mask in turns:
        seen = torch.cat((seen, mask), dim=1)
        positions = (seen.cumsum(dim=-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        output = model(ids, attention_mask=seen, position_ids=positions, past_key_values=cache)
        found.append(output.logits)
    return found


@both
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("name", DECODING)
@torch.no_grad()
def test_questions_of_uneven_length_while_decoding(package, name, implementation):
    """Padding between turns is neither kept nor attended to."""
    dtype, atol = (torch.float64, 1e-9) if implementation == "sdpa" else (torch.float32, 1e-5)
    model = build("llama", dtype=dtype, attn_implementation=implementation)
    torch.manual_seed(0)
    press, turns = DECODING[name](package), padded_turns(TURNS)
    with press(model):
        together = logits_together(model, turns)
    for row in range(len(TURNS[0])):
        cache = DynamicCache(config=model.config)
        with press(model):
            for (ids, mask), logits in zip(turns, together, strict=True):
                n = int(mask[row].sum())
                alone = model(ids[row : row + 1, -n:], past_key_values=cache).logits[0]
                torch.testing.assert_close(logits[row, -n:], alone, rtol=0, atol=atol)


# ---- KVzip: padding and positions ----------------------------------------------------------------


def kvzip(package: Any) -> Any:
    return package.KVzipPress(0.5, chunk_size=16, prompts=PROMPTS)


@both
@pytest.mark.parametrize("offset", [100, 3])
@torch.no_grad()
def test_a_replay_goes_on_from_the_positions_of_the_context(package, offset):
    """Rotary embeddings know distances alone: an offset of all positions changes no choice."""
    model, ids, kept = build("llama", dtype=torch.float64), token_ids(2, 40), []
    for start in (0, offset):
        cache, positions = DynamicCache(config=model.config), start + torch.arange(40)[None]
        with kvzip(package)(model):
            model(ids, position_ids=positions, past_key_values=cache)
        kept.append([layer.slots.tolist() for layer in cache.layers])
    assert kept[0] == kept[1]


@both
@pytest.mark.parametrize("counted", [True, False])
@torch.no_grad()
def test_a_padded_row_is_replayed_as_alone(package, counted):
    model = build("llama", dtype=torch.float64)
    ids, mask, positions = left_padded(2, 40, [0, 11])
    together, alone = (DynamicCache(config=model.config) for _ in range(2))
    given = {} if counted else {"position_ids": positions}
    with kvzip(package)(model):
        model(ids, attention_mask=mask, past_key_values=together, **given)
        model(ids[1:, 11:], past_key_values=alone)
    for padded, single in zip(together.layers, alone.layers, strict=True):
        found, expected = padded.dense()[2][1], single.dense()[2][0]
        for head, other in zip(found.tolist(), expected.tolist(), strict=True):
            assert [p for p in head if p >= 0] == [p + 11 for p in other if p >= 0]


@both
@pytest.mark.parametrize("wrong", ["right", "all", "hole"])
@torch.no_grad()
def test_kvzip_is_refused_other_padding(package, wrong):
    model, mask = build("llama"), torch.ones(2, 40, dtype=torch.long)
    mask[1, {"right": slice(30, 40), "all": slice(0, 40), "hole": slice(9, 12)}[wrong]] = 0
    cache = DynamicCache(config=model.config)
    with (
        kvzip(package)(model),
        pytest.raises(UnsupportedInputError, match="row 1 of the batch masks other tokens"),
    ):
        model(token_ids(2, 40), attention_mask=mask, past_key_values=cache)
    assert cache.get_seq_length() == 0


# ---- gradients -----------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("name", ["AdaKVPress", "DMSPress", "KVzipPress"])
def test_gradients_flow_through_heads_of_different_lengths(package, name):
    """They are the slope of the loss along them."""
    model, ids = build("llama", dtype=torch.float64), token_ids(1, 40)
    press, question = example_for(package, name, 0.5, model), token_ids(1, 6, seed=1)
    weight = model.model.layers[0].self_attn.v_proj.weight

    def loss() -> Tensor:
        cache = DynamicCache(config=model.config)
        with press(model):
            model(ids, past_key_values=cache)
            logits = model(question, past_key_values=cache).logits
        assert isinstance(cache.layers[0], RaggedLayer)
        return logits[0].logsumexp(dim=-1).sum()

    (gradient,) = torch.autograd.grad(loss(), weight)
    step, found = 1e-3 * gradient / gradient.norm(), []
    with torch.no_grad():
        for sign in (1, -1):
            weight += sign * step
            found.append(float(loss()))
            weight -= sign * step
    slope = (found[0] - found[1]) / 2e-3
    assert slope == pytest.approx(float(gradient.norm()), rel=1e-2)
