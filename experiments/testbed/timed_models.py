"""Models to be timed, with presses of both mechanisms and of kvpress open.

A model is described by a `ModelSpec`, from which another process makes the same one; a `Condition`
says what is open on it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from experiments.framework.plots import NO_PRESS
from experiments.loading import load_model, short_name
from experiments.testbed.compare import Inputs
from experiments.testbed.families import build
from experiments.testbed.recipes import MECHANISMS, recipe, suited_pair

DELIMITER = 0
"""In every context, for FinchPress: a token that the bare model knows too."""


class ModelSpec(NamedTuple):
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

    @classmethod
    def asked(cls, source: str | None, random: ModelSpec, dtype: str, device: str) -> ModelSpec:
        """The model that a user asks for, or a `random` one."""
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


def random_llama(name: str, **shape: int) -> ModelSpec:
    """A Llama with random weights, of a shape as `build` takes it."""
    return ModelSpec(f"random Llama, {name}", shape=tuple(shape.items()))


def random_context(model: PreTrainedModel, batch: int, context: int) -> Tensor:
    """`(batch, context)` random token ids, with `DELIMITER` before the last ones."""
    vocabulary = model.get_input_embeddings().num_embeddings
    drawn = Inputs.random(vocabulary, [context] * batch, question=0, steps=0)
    return drawn.with_delimiter(DELIMITER, question=8).context.to(model.device)


# ---- what is open --------------------------------------------------------------------------------


class Condition(NamedTuple):
    """A press at a ratio, and how it gets at the model."""

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
    """The model without a press, and every press at every ratio with every mechanism."""
    named = [Condition(p, m, ratio) for p in presses for ratio in ratios for m in mechanisms]
    return [FULL, *named]


def scope_of(
    condition: Condition,
    model: PreTrainedModel,
    context: int,
    of_kvpress: Mapping[str, type[Any]] | None = None,
) -> Opens:
    """What a condition opens: a press at its usual settings, a ThinKPress one that frees memory.

    Args:
        of_kvpress: the presses of kvpress, where it is imported.

    Raises:
        PressError: if the model does not suit the press.
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
    with press(model):  # refuses before anything is measured
        pass
    return partial(press, model)
