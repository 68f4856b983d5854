"""What is looked at on one side: functions of a case, and of whose side it is."""

from collections.abc import Callable
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from typing import NamedTuple
from unittest.mock import patch

import kvpress
import torch
from kvpress.presses import duo_attention_press
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import DynamicCache, PreTrainedTokenizerFast

import hooks_impl
from press_core import AttentionCall
from press_core.presses.keys import LagKV
from tests.oracle import handed, running
from tests.oracle.cases import LLAMA, press_of
from tests.oracle.parity import compare, held_by
from tests.oracle.running import VOCABULARY, Context, held_after, model_for, token_ids

SCORER_PRESSES = {"kvpress": kvpress.ScorerPress, "hooks": hooks_impl.ScorerPress}
"""Those that get six arguments."""


# ---- what a model is given -----------------------------------------------------------------------


class Given(NamedTuple):
    """Forwards over each of `ids` `(B, S)` in one scope; `options` are for the model."""

    ids: tuple[Tensor, ...]
    options: Callable[[Tensor], dict[str, Tensor]] = lambda _: {}

    def __call__(self, model, press, past):
        with torch.no_grad(), press(model):
            for ids in self.ids:
                model(ids, past_key_values=past, **self.options(ids))


def _padding(ids):
    mask = torch.ones_like(ids)
    mask[:, :20] = 0
    return {"attention_mask": mask, "position_ids": (mask.cumsum(dim=-1) - 1).clamp(min=0)}


def _no_positions(ids):
    return {"position_ids": torch.zeros_like(ids)}


def _two_questions():
    """Two rows with a delimiter in different places."""
    ids = token_ids(100, batch=2)
    ids[0, 60], ids[1, 80] = handed.DELIMITER, handed.DELIMITER
    return Given((ids,))


class Seeded(Context):
    """A context, under another state of torch's generator and with kvpress's own numbers."""

    def __call__(self, model, press, past):
        torch.manual_seed(1)
        vars(press).pop("score", None)
        super().__call__(model, press, past)


# `kept.yaml` and `works.yaml` name these, and build others.
PADDED = Given((token_ids(60),), _padding)
WITHOUT_POSITIONS = Given(token_ids(30).split([20, *[1] * 10], dim=1), _no_positions)
TWO_QUESTIONS = _two_questions()
CONTEXT_AND_QUESTION = Given(token_ids(65).split([40, 25], dim=1))


# ---- what is held --------------------------------------------------------------------------------


def of_held(see):
    """What `see` makes of all that is held after a case."""
    return lambda case, whose: see(held_by(whose, case))


everything = of_held(lambda held: held)
kept = of_held(lambda held: held[0][0].kept)
n_kept = of_held(lambda held: len(held[0][0].kept))
first_four = of_held(lambda held: held[0][0].kept[:4])
last_four = of_held(lambda held: held[0][0].kept[-4:])
keeps_no_padding = of_held(lambda held: min(held[0][0].kept) >= 20)
keeps_the_last = of_held(lambda held: all(48 in head.kept for layer in held for head in layer))
is_in_order = of_held(lambda held: held[0][0].positions.tolist() == held[0][0].kept)
n_of_layers = of_held(lambda held: [sum(len(head.kept) for head in layer) for layer in held])
n_of_first_layer = of_held(lambda held: [len(head.kept) for head in held[0]])
rows_and_heads = of_held(lambda held: [len(layer) for layer in held])
n_all = of_held(lambda held: sum(len(head.kept) for layer in held for head in layer))
fewest = of_held(lambda held: min(len(head.kept) for layer in held for head in layer))


@of_held
def alike(held):
    """Whether the first two layers are, and the two rows of the first."""
    first, second = ([head.kept for head in layer] for layer in held[:2])
    return [first == second, first[:2] == first[2:]]


@of_held
def ranks(held):
    """By layer and head, LagKV's scores of what is kept."""
    past = DynamicCache()
    with torch.no_grad():
        model_for("hooks", LLAMA)(token_ids(390), past_key_values=past)
    found = []
    for layer, heads in zip(past.layers, held, strict=True):
        call = AttentionCall(None, layer.keys, layer.keys, layer.values)
        scores = LagKV(lag_size=16).score(call)[0]
        found += [
            s[head.kept].sort().values.tolist() for s, head in zip(scores, heads, strict=True)
        ]
    return found


def stored(case, whose):
    """How many tokens and channels of keys the first layer stores."""
    past = running.RecordingCache()
    case.run(model_for(whose, case.setting), press_of(case.press, whose, 0.5), past)
    return list(past.layers[0].keys.shape[2:])


# ---- comparisons on one side ---------------------------------------------------------------------


def as_others(*others):
    """Whether a case holds the same as one with another press, run or setting does."""

    def look(case, whose):
        mine = held_by(whose, case)
        return all(bool(compare(mine, held_by(whose, replace(case, **o)))) for o in others)

    return look


def rows_as_alone(case, whose):
    alone = []
    for row in token_ids(390, batch=2).split(1):
        alone.append(held_by(whose, replace(case, run=Given((row,)))))
    together = [[*first, *second] for first, second in zip(*alone, strict=True)]
    return bool(compare(held_by(whose, replace(case, run=Context(390, batch=2))), together))


def chunk_as_alone(case, whose):
    chunked = replace(case, press=f"ChunkPress({case.press}, chunk_length=130)")
    alone = replace(case, run=Given((token_ids(390)[:, :130],)))
    return kept(chunked, whose)[:65] == kept(alone, whose)


def steps_as_at_once(case, whose):
    steps = f"DecodingPress({case.press}, compression_interval=7, target_size=33)"
    at_once = case.press.replace("(", "(1 - 33.5 / 67, ")
    by_steps = kept(replace(case, press=steps, run=Context(60, then=7)), whose)
    return by_steps == kept(replace(case, press=at_once, run=Context(67)), whose)


def as_sinks_and_recent(case, whose):
    """Whether StreamingLLM keeps the ends of what a press has left."""
    left = kept(case, whose)
    n = len(left) // 2
    both = replace(case, press=f"ComposedPress([{case.press}, StreamingLLMPress(0.5)])")
    return kept(both, whose) == [*left[:4], *left[4 - n :]]


# ---- looks of one difference each ----------------------------------------------------------------


def buffered_states(case, whose):
    found = []

    class Seeing(SCORER_PRESSES[whose]):
        def score(self, module, hidden_states, keys, values, attentions, kwargs):
            found.append(hidden_states.shape[1])
            return keys[..., 0]

    press = press_of(case.press, whose, 0.5, {"SeeingPress": Seeing})
    held_after(case.run, press, model_for(whose, LLAMA))
    return found


def ratio_after_an_error(case, whose):
    class Failing(SCORER_PRESSES[whose]):
        def score(self, module, hidden_states, keys, values, attentions, kwargs):
            raise ZeroDivisionError

    base = Failing(0.1)
    press = press_of(case.press, whose, 0.5, {"FAILING": base})
    try:
        held_after(case.run, press, model_for(whose, LLAMA))
    except ZeroDivisionError:
        return base.compression_ratio
    raise AssertionError("the press did not run")


def answers_a_question(case, whose):
    model, past = model_for(whose, LLAMA), DynamicCache()
    ids, positions = token_ids(105), torch.arange(100, 105)[None]
    with torch.no_grad(), press_of(case.press, whose, 0.5)(model):
        model(ids[:, :100], past_key_values=past)
        logits = model(ids[:, 100:], past_key_values=past, position_ids=positions).logits
    return bool(torch.isfinite(logits).all())


def change_of_another_cache(case, whose):
    """What a press does to the logits over a cache that it did not prune."""
    model, ids, logits = model_for(whose, LLAMA), token_ids(101), []
    for prunes in (False, True):
        for layer in model.model.layers:
            layer.self_attn.__dict__.pop("masked_key_indices", None)
        other = DynamicCache()
        with torch.no_grad():
            model(ids[:, :100], past_key_values=other)
            if prunes:
                with press_of(case.press, whose, 0.5)(model):
                    model(ids[:, :100], past_key_values=DynamicCache())
            logits.append(model(ids[:, 100:], past_key_values=other).logits)
    if torch.equal(*logits):
        return "none"
    return "little" if torch.allclose(*logits) else "much"


def n_kept_after_a_question(case, whose):
    """Of a prompt without a delimiter, after one with it."""
    press, model = press_of(case.press, whose, 0.5), model_for(whose, LLAMA)
    held_after(handed.Question(100, 30), press, model)
    return len(held_after(Context(100), press, model)[0][0].kept)


def grows_the_vocabulary(case, whose):
    words = WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w0")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words))
    model, press = deepcopy(model_for(whose, LLAMA)), press_of(case.press, whose, 0.5)
    assert len(press.update_model_and_tokenizer(model, tokenizer)) == VOCABULARY + 1
    return model.get_input_embeddings().num_embeddings > VOCABULARY


def n_without_network(case, whose):
    def no_network(*_, **__):
        raise ConnectionError("no network")

    with patch.object(duo_attention_press, "load_dataset", no_network):
        return sorted(len(head.kept) for layer in held_by(whose, case) for head in layer)


def n_inside_and_after(case, whose):
    """How many tokens there are before a scope closes, and afterwards."""
    inside = []

    class Watched(handed.Repeated):
        def __call__(self, model, press, past):
            @contextmanager
            def watched(model):
                with press(model):
                    yield
                    inside.append(sum(len(h.kept) for x in running.held(past, model) for h in x))

            super().__call__(model, watched, past)

    after = n_all(replace(case, run=Watched(100)), whose)
    return [inside[0], after]


def reports_the_truth(case, whose):
    press = press_of(case.press, whose, 0.5)
    layers = held_after(Context(100), press, model_for(whose, LLAMA))
    n = sum(len(head.kept) for layer in layers for head in layer)
    return abs(press.compression_ratio - (1 - n / 600)) < 1e-6


def scores_tokens_alike(case, whose):
    """Whether kvpress gives any token that is alone the same score; ours is built around it."""
    if whose != "kvpress":
        press_of(f"DMSPress({case.press}, 0.0, decoding=True)", whose, 0.5)
    model, press, scores = model_for("kvpress", LLAMA), press_of(case.press, "kvpress", 0.5), []
    attention = model.model.layers[0].self_attn
    attention.rotary_emb = model.model.rotary_emb
    vars(press).pop("score", None)
    for seed in range(3):
        torch.manual_seed(seed)
        keys = torch.randn(1, 2, 1, attention.head_dim).double()
        hidden = torch.randn(1, 1, model.config.hidden_size).double()
        cos_sin = model.model.rotary_emb(hidden, torch.tensor([[50 + seed]]))
        kwargs = {"position_embeddings": cos_sin}
        scores.append(press.score(attention, hidden, keys, keys, None, kwargs).abs().flatten())
    return all(torch.allclose(scores[0], other, atol=1e-4) for other in scores[1:])
