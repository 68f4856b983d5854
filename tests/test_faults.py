"""What once went wrong without a word: each is right now, or refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

import hooks_impl
from experiments.testbed.families import VOCABULARY
from experiments.testbed.recipes import PROMPTS
from press_core import (
    PressError,
    ScopeError,
    UnsupportedInputError,
)
from press_core.cache.ragged import RaggedLayer
from tests.support import both, build, example_for, left_padded, token_ids

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


@pytest.mark.parametrize(
    ("name", "implementation"),
    [*((name, "sdpa") for name in DECODING), ("snapkv", "eager"), ("dms", "eager")],
)
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


LATER_PADDED = sorted(set(hooks_impl.PRESSES) - {"FinchPress"})  # whose question is in the prefill


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", LATER_PADDED)
def test_later_questions_that_are_padded(package, name, side):
    """As the row alone, in that forward and in those after it, also where they prune."""
    model = build("llama", dtype=torch.float64)
    context, question, following = (token_ids(2, n, seed=n) for n in (40, 6, 4))

    def logits(rows: list[int], lengths: list[int]) -> list[Tensor]:
        cache, press = DynamicCache(config=model.config), example_for(package, name, 0.5, model)
        asked = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
        asked = asked.flip(1) if side == "left" else asked
        masks = [asked, *(torch.ones(len(rows), 4, 1, dtype=torch.long).unbind(dim=1))]
        turns = [own[rows], *following[rows].split(1, dim=1)]
        with press(model):
            model(context[rows], past_key_values=cache)
            # The model's mask begins where its count of tokens does.
            seen, found = torch.ones(len(rows), cache.get_seq_length(), dtype=torch.long), []
            for ids, mask in zip(turns, masks, strict=True):
                seen = torch.cat((seen, mask), dim=1)
                more = {"position_ids": (seen.cumsum(dim=-1) - 1)[:, -ids.shape[1] :]}
                output = model(ids, attention_mask=seen, past_key_values=cache, **more)
                found.append(output.logits)
        return found

    own = question
    together = logits([0, 1], [6, 3])
    for row, length in enumerate((6, 3)):
        own = question[:, :length] if side == "right" else question[:, -length:]
        for one, other in zip(logits([row], [length]), together, strict=True):
            found = other[row, : one.shape[1]] if side == "right" else other[row, -one.shape[1] :]
            torch.testing.assert_close(found, one[0], rtol=0, atol=1e-9)


# ---- KVzip: padding and positions ----------------------------------------------------------------


def kvzip(package: Any) -> Any:
    return package.KVzipPress(0.5, chunk_size=16, prompts=PROMPTS)


@pytest.mark.parametrize("offset", [100, 3])
def test_a_replay_goes_on_from_the_positions_of_the_context(package, offset):
    """Rotary embeddings know distances alone: an offset of all positions changes no choice."""
    model, ids, kept = build("llama", dtype=torch.float64), token_ids(2, 40), []
    for start in (0, offset):
        cache, positions = DynamicCache(config=model.config), start + torch.arange(40)[None]
        with kvzip(package)(model):
            model(ids, position_ids=positions, past_key_values=cache)
        kept.append([layer.slots.tolist() for layer in cache.layers])
    assert kept[0] == kept[1]


@pytest.mark.parametrize("counted", [True, False])
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


@pytest.mark.parametrize("wrong", ["right", "all", "hole"])
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


@torch.enable_grad()
@pytest.mark.parametrize("name", ["AdaKVPress", "DMSPress", "KVzipPress"])
def test_gradients_flow_through_heads_of_different_lengths(package, name):
    """They are the slope of the loss along them."""
    model, ids = build("llama", dtype=torch.float64), token_ids(1, 40)
    press, question = example_for(package, name, 0.5, model), token_ids(1, 6, seed=1)
    weight = model.model.layers[-1].self_attn.v_proj.weight  # which no choice depends on

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


# ---- caches and scopes that end early ------------------------------------------------------------


@both
@pytest.mark.parametrize("name", ["AdaKVPress", "DMSPress", "PyramidKVPress"])
def test_an_exception_inside_the_forward_does_not_leave_a_layer_open(package, name):
    """What a scope promised a layer ends with the scope, also if the forward never came to it."""
    model = build("llama", num_layers=3)
    press, cache = example_for(package, name, 0.5, model), DynamicCache(config=model.config)

    def fail(*_: Any) -> None:
        raise KeyError("interrupted")

    with press(model):
        model(token_ids(1, 40), past_key_values=cache)
        handle = model.model.layers[1].self_attn.k_proj.register_forward_hook(fail)
        with pytest.raises(KeyError, match="interrupted"):
            model(token_ids(1, 3), past_key_values=cache)
    handle.remove()
    states = torch.zeros(1, 2, 3, 16)
    with pytest.raises(ScopeError, match=r"inside the scope|the scope of the press open"):
        cache.layers[1].update(states, states)


def four_dimensional(wrong: str) -> Tensor:
    mask = torch.ones(20, 20, dtype=torch.bool).tril().expand(1, 4, 20, 20).clone()
    if wrong == "per head":
        mask[:, 1, :, 5] = False
    elif wrong == "hole":
        mask[:, :, :, 7] = False
    elif wrong == "window":
        mask &= ~torch.ones(20, 20, dtype=torch.bool).tril(-8)
    return mask if wrong == "per head" else mask[:, :1]


@both
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("wrong", ["per head", "hole", "window"])
def test_masks_that_hide_more_than_padding_are_refused(package, wrong, implementation):
    model = build("llama", attn_implementation=implementation)
    mask = four_dimensional(wrong)
    if implementation == "eager":
        mask = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    with package.KnormPress(0.5)(model), pytest.raises(UnsupportedInputError):
        model(token_ids(1, 20), attention_mask=mask)


# ---- what a press returns ------------------------------------------------------------------------

SCORES: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "nan": (lambda s: s.masked_fill(s == s.amin(), float("nan")), "NaN for some tokens of model"),
    "short": (lambda s: s[..., 1:], r"shape \(1, 2, 19\).* here \(1, 2, 20\)"),
    "of query heads": (lambda s: s.repeat_interleave(2, dim=1), r"shape \(1, 4, 20\)"),
    "without heads": (lambda s: s[:, 0], r"shape \(1, 20\)"),
    "bool": (lambda s: s > 0, "returned torch.bool; scores are a floating-point tensor"),
    "nothing": (lambda s: None, "returned NoneType; scores are a floating-point tensor"),
}


def scoring(package: Any, change: Callable[[Tensor], Any]) -> Any:
    """A press of a user, whose scores are wrong."""

    class MyPress(package.ScorerPress):
        def score(self, *args: Any) -> Any:
            keys = args[2] if package is hooks_impl else args[0].keys
            return change(keys.norm(dim=-1))

    return MyPress(0.5)


@both
@pytest.mark.parametrize("around", ["alone", "in AdaKV"])
@pytest.mark.parametrize("wrong", SCORES)
def test_scores_that_rank_no_tokens_are_refused(package, wrong, around):
    model, (change, said) = build("llama"), SCORES[wrong]
    press = scoring(package, change)
    press = press if around == "alone" else package.AdaKVPress(press)
    with press(model), pytest.raises(PressError, match=rf"MyPress\.score .*{said}"):
        model(token_ids(1, 20))


# ---- fields --------------------------------------------------------------------------------------


# ---- weights and states that lie elsewhere -------------------------------------------------------
