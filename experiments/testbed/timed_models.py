"""Models and conditions for timing: presses of both mechanisms and of kvpress.

A `ModelSpec` describes a model so that another process can build the same one. A `Condition` is the
press that is open on it, and a `Way` how the model runs.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from rich.progress import Progress
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel, StaticCache

from experiments.framework.options import chosen_device
from experiments.framework.own_model import OptionsT
from experiments.framework.plots import NO_PRESS
from experiments.framework.shared import print_left_out
from experiments.loading import load_model, short_name
from experiments.testbed.compare import Inputs
from experiments.testbed.families import build
from experiments.testbed.recipes import MECHANISMS, recipe, suited_pair
from press_core.errors import first_line

DELIMITER = 0
"""Delimiter token id for FinchPress. Every context contains it, and it is in every vocabulary, so
the model without a press can read it."""


class ModelSpec(NamedTuple):
    """A description of a model that can be sent to another process and loaded there.

    Attributes:
        name: name of the model in tables.
        source: argument of `load_model`; None for a random Llama.
        shape: keyword arguments of `build` for the random Llama.
        dtype: name of the dtype, such as `"float32"`.
        device: where the model runs.
    """

    name: str
    source: str | None = None
    shape: tuple[tuple[str, int], ...] = ()
    dtype: str = "float32"
    device: str = "cpu"

    @classmethod
    def given(cls, source: str | None, random: ModelSpec, dtype: str, device: str) -> ModelSpec:
        """The model `source`, or the `random` one if it is None."""
        if source is None:
            return random._replace(dtype=dtype, device=device)
        return cls(short_name(source), source, (), dtype, device)

    def load(self) -> PreTrainedModel:
        """The model, in eval mode on its device."""
        if self.source is not None:
            return load_model(self.source, dtype=self.dtype, device=self.device)[0]
        shape: dict[str, Any] = dict(self.shape)
        model: Any = build("llama", dtype=getattr(torch, self.dtype), **shape)
        return model.to(self.device)


RANDOM = "random Llama, "
"""How names of the random Llamas begin."""


def random_llama(name: str, **shape: int) -> ModelSpec:
    """A Llama with random weights; `shape` are keyword arguments of `build`."""
    return ModelSpec(f"{RANDOM}{name}", shape=tuple(shape.items()))


def random_context(model: PreTrainedModel, batch: int, context: int) -> Tensor:
    """Random token ids `(batch, context)`, with `DELIMITER` before the last tokens."""
    vocabulary = model.get_input_embeddings().num_embeddings
    drawn = Inputs.random(vocabulary, [context] * batch, question=0, steps=0)
    return drawn.with_delimiter(DELIMITER, question=8).context.to(model.device)


# ---- how it runs, and what is open ---------------------------------------------------------------


class Way(NamedTuple):
    """A way to run a model: which kind of cache it fills, and whether it is compiled.

    `run` is "installed" for an eager model with what a press installs left on every layer.
    """

    cache: str = "dynamic"
    run: str = "eager"

    def empty_cache(self, model: PreTrainedModel, tokens: int) -> Cache:
        """A cache with room for `tokens` tokens."""
        if self.cache == "static":
            return StaticCache(config=model.config, max_cache_len=tokens)
        return DynamicCache(config=model.config)

    @contextmanager
    def running(self, model: PreTrainedModel) -> Iterator[Any]:
        """What to call instead of the model; compiled anew, in the scopes that are open."""
        if self.run in ("eager", "installed"):
            yield model
            return
        how: dict[str, Any] = {"mode": "reduce-overhead"} if self == GRAPHS else {"dynamic": True}
        try:
            yield torch.compile(model, **how)
        finally:
            torch._dynamo.reset()
            gc.collect()  # graphs refer to themselves


EAGER = Way()
WAYS = (EAGER, Way("static"), Way(run="compiled"), Way("static", "compiled"))
GRAPHS = Way("static", "CUDA graphs")
INSTALLED = Way(run="installed")


def ways(options: Any, graphs: bool = False) -> tuple[Way, ...]:
    """The ways to run that options with fields `compiled`, `model` and `device` ask for.

    Args:
        graphs: whether to add `GRAPHS` on a GPU; they need a cache that stays in place.
    """
    all_ways = not options.model if options.compiled is None else options.compiled
    of_gpu = (GRAPHS,) * (graphs and chosen_device(options.device).startswith("cuda"))
    return WAYS + of_gpu if all_ways else (EAGER,)


def that_compile(options: OptionsT, progress: Progress) -> OptionsT:
    """The options without other ways than `EAGER` where `torch.compile` fails, which is printed."""
    given: Any = options
    try:
        if len(ways(given)) > 1:
            torch.compile(lambda x: x.sin() + 1, dynamic=True)(torch.ones(7))
    except Exception as error:
        print_left_out(progress, "torch.compile", first_line(error))
        return replace(given, compiled=False)
    return options


class Condition(NamedTuple):
    """A press at a ratio, and the mechanism that installs it."""

    press: str = NO_PRESS
    mechanism: str = "bare"
    ratio: float = 0.0


FULL = Condition()
"""The model without a press."""

Opens = Callable[[], AbstractContextManager[Any]]
"""Opens the scope of a condition on its model."""


def conditions(
    presses: Collection[str], ratios: Collection[float], mechanisms: Collection[str] = MECHANISMS
) -> list[Condition]:
    """`FULL`, and every press at every ratio with every mechanism."""
    named = [Condition(p, m, ratio) for p in presses for ratio in ratios for m in mechanisms]
    return [FULL, *named]


def scope_of(
    condition: Condition,
    model: PreTrainedModel,
    context: int,
    of_kvpress: Mapping[str, type[Any]] | None = None,
) -> Opens:
    """Opens a condition's press on the model, with usual settings; a ThinKPress frees memory.

    Args:
        of_kvpress: the presses of kvpress, if it is imported.

    Raises:
        PressError: if the model does not support the press.
    """
    name, mechanism, ratio = condition
    if name == NO_PRESS:
        return nullcontext
    press: Any
    if mechanism in MECHANISMS:
        press = suited_pair(name, ratio, context, model)._asdict()[mechanism]
        if name == "FinchPress":
            press = replace(press, delimiter_token_id=DELIMITER)
        if name == "ThinKPress":
            press = replace(press, free_memory=True)
    else:
        press = recipe(of_kvpress or {}, name, ratio, context)
    with press(model):  # raises here, before anything is measured
        pass
    return partial(press, model)
