"""What is measured: models, conditions, and one answer from an empty cache to the last token."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from experiments import UserError
from experiments.framework.plots import NO_PRESS
from experiments.framework.timing import Stopwatch
from experiments.loading import load_model
from experiments.testbed.compare import Inputs
from experiments.testbed.families import build
from experiments.testbed.recipes import MECHANISMS, suited_pair, told_delimiter
from press_core import attention_sites, cache_nbytes
from press_core.presses.think import ThinK
from press_core.scope import InstalledPress

BARE = "bare"

_DELIMITER = 0
"""In every context, for FinchPress: a token that the bare model knows too."""


@dataclass(frozen=True)
class Subject:
    """A model, small enough to be sent to another process, which makes it there.

    Attributes:
        name: what tables call it.
        source: what `load_model` loads; None: a random Llama.
        shape: of the random Llama, as `build` takes it.
    """

    name: str
    source: str | None = None
    shape: tuple[tuple[str, int], ...] = ()
    dtype: str = "float32"
    device: str = "cpu"

    def load(self) -> PreTrainedModel:
        """The model, in eval mode on its device."""
        if self.source is not None:
            return load_model(self.source, dtype=self.dtype, device=self.device)[0]
        dtype = getattr(torch, self.dtype)
        return build("llama", dtype=dtype, **dict(self.shape)).to(torch.device(self.device))  # type: ignore[arg-type]


class Condition(NamedTuple):
    """Who answers: a press at a ratio, and how it gets at the model."""

    press: str = NO_PRESS
    mechanism: str = BARE
    ratio: float = 0.0


FULL = Condition()

Opens = Callable[[], AbstractContextManager[Any]]
"""Opens the scope of a condition on its model."""


def conditions(
    presses: Iterable[str], ratios: Iterable[float], mechanisms: Iterable[str] = tuple(MECHANISMS)
) -> list[Condition]:
    """The model without a press, and every press at every ratio with every mechanism."""
    ratios, mechanisms = tuple(ratios), tuple(mechanisms)
    named = [Condition(p, m, ratio) for p in presses for ratio in ratios for m in mechanisms]
    return [FULL, *named]


def press_of(condition: Condition, model: PreTrainedModel, context: int) -> InstalledPress | None:
    """The press of a condition at its usual settings; a ThinKPress stores what it keeps only."""
    if condition.press == NO_PRESS:
        return None
    pair = suited_pair(condition.press, condition.ratio, context, model)
    press = told_delimiter(pair[list(MECHANISMS).index(condition.mechanism)], _DELIMITER)
    return replace(press, free_memory=True) if isinstance(press, ThinK) else press


def scope_of(condition: Condition, model: PreTrainedModel, context: int) -> Opens:
    """What a condition opens.

    Raises:
        PressError: if the model does not suit the press.
    """
    press = press_of(condition, model, context)
    if press is None:
        return nullcontext
    with press(model):  # refuses before anything is measured
        pass
    return partial(press, model)


def context_of(model: PreTrainedModel, batch: int, context: int) -> Tensor:
    """`(batch, context)` random token ids."""
    vocabulary = model.get_input_embeddings().num_embeddings
    drawn = Inputs.random(vocabulary, [context] * batch, question=0, steps=0)
    return drawn.with_delimiter(_DELIMITER, question=8).context.to(model.device)


# ---- one answer ----------------------------------------------------------------------------------


class Answer(NamedTuple):
    """What one answer took.

    Attributes:
        first: seconds from the context to the first token.
        step: seconds of each further token.
        n_bytes: of the cache after the first token.
    """

    first: float
    step: float
    n_bytes: int


@torch.inference_mode()
def answer(model: PreTrainedModel, ids: Tensor, opens: Opens, tokens: int) -> Answer:
    """Read a context and decode greedily, the scope open all the while.

    Args:
        ids: `(B, S)`.
        tokens: to decode after the first.
    """
    with opens():
        cache = DynamicCache(config=model.config)
        watch = Stopwatch(model.device)
        token = _next(model, ids, cache, logits_to_keep=1)
        watch.lap()
        n_bytes = cache_nbytes(cache)
        decoding = Stopwatch(model.device)
        _decode(model, token, cache, tokens)
        decoding.lap()
        (first,), (rest,) = watch.seconds(), decoding.seconds()
    return Answer(first, rest / tokens, n_bytes)


SETTLING = 3
"""Steps of a compiled model before the clock runs: an opened scope drops graphs of the model."""


@torch.inference_mode()
def compiled_steps(
    model: PreTrainedModel, ids: Tensor, opens: Opens, tokens: int, rounds: int
) -> list[tuple[float, float]]:
    """Seconds per step of the model and of `torch.compile` of it, which take turns.

    Both decode the same cache in the same scope, in which graphs are made before the clock runs.
    """
    compiled = torch.compile(model, dynamic=True)
    times = []
    # A patch puts a forward of its own on each module, each of which is compiled by itself.
    with opens(), torch._dynamo.config.patch(recompile_limit=256):
        cache = DynamicCache(config=model.config)
        token = _next(model, ids, cache, logits_to_keep=1)
        token = _decode(compiled, token, cache, SETTLING)
        for _ in range(rounds):
            watch = Stopwatch(model.device)
            for runs in (model, compiled):
                token = _decode(runs, token, cache, tokens)
                watch.lap()
            eager, graphs = watch.seconds()
            times.append((eager / tokens, graphs / tokens))
    return times


def _decode(model: Any, token: Tensor, cache: DynamicCache, tokens: int) -> Tensor:
    """The last of so many tokens, the likeliest ones."""
    for _ in range(tokens):
        token = _next(model, token, cache)
    return token


def _next(model: Any, ids: Tensor, cache: DynamicCache, **more: Any) -> Tensor:
    """`(B, 1)`, the likeliest next token."""
    logits = model(input_ids=ids, past_key_values=cache, **more).logits
    return logits[:, -1:].argmax(dim=-1)


# ---- arithmetic ----------------------------------------------------------------------------------


class Shape(NamedTuple):
    """What the size of a model's cache depends on."""

    layers: int
    kv_heads: int
    head_dim: int
    itemsize: int = 2

    def nbytes(self, tokens: float, ratio: float = 0.0) -> float:
        """Bytes of the keys and values of `tokens` tokens, a share `ratio` of which is gone."""
        per_token = 2 * self.layers * self.kv_heads * self.head_dim * self.itemsize
        return per_token * tokens * (1 - ratio)

    @classmethod
    def of(cls, model: PreTrainedModel) -> Shape:
        """That of a model whose layers all attend to all tokens.

        Raises:
            UserError: if some layers keep a sliding window.
        """
        sites = attention_sites(model)
        if len(sites) < model.config.get_text_config().num_hidden_layers:
            raise UserError(
                f"some layers of this {type(model).__name__} keep a sliding window, and the "
                "arithmetic is that of layers which keep all tokens; give a model without them"
            )
        return cls(len(sites), sites[0].num_kv_heads, sites[0].head_dim, model.dtype.itemsize)


def evicted(condition: Condition) -> float:
    """Share of a cache's bytes that a condition frees."""
    if condition.press == "ThinKPress":  # which drops channels of keys only
        return condition.ratio / 2
    return condition.ratio


def predicted_bytes(model: PreTrainedModel, condition: Condition, tokens: int) -> float | None:
    """Bytes of a cache of `tokens` tokens in all rows by arithmetic; None where it does not say."""
    try:
        return Shape.of(model).nbytes(tokens, evicted(condition))
    except UserError:
        return None
