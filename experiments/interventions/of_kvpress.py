"""kvpress: presses installed by hooks, head-wise ones with the help of the attention registry."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

from transformers import PreTrainedModel

from experiments.interventions.intervention import Intervention


def knorm(model: PreTrainedModel) -> Any:
    from kvpress import KnormPress

    return KnormPress(0.5)(model)


def adakv(model: PreTrainedModel) -> Any:
    from kvpress import AdaKVPress, KnormPress

    return AdaKVPress(KnormPress(0.5))(model)


@contextmanager
def interrupted(scope: AbstractContextManager[Any]) -> Iterator[None]:
    """`scope`, left by a `KeyboardInterrupt`."""
    with suppress(KeyboardInterrupt), scope:
        yield
        raise KeyboardInterrupt


INTERVENTIONS = (
    Intervention(knorm, "KnormPress"),
    Intervention(lambda model: interrupted(knorm(model)), "KnormPress, interrupted"),
    Intervention(adakv, "AdaKVPress"),
)
