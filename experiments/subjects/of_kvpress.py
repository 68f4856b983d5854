"""kvpress: presses installed by hooks, head-wise ones with the help of the attention registry."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from experiments.subjects import Subject
from experiments.subjects.interrupted import interrupted


def knorm(model: PreTrainedModel) -> Any:
    from kvpress import KnormPress

    return KnormPress(0.5)(model)


def adakv(model: PreTrainedModel) -> Any:
    from kvpress import AdaKVPress, KnormPress

    return AdaKVPress(KnormPress(0.5))(model)


SUBJECTS = [
    Subject("KnormPress", knorm),
    Subject("KnormPress, interrupted", lambda model: interrupted(knorm(model))),
    Subject("AdaKVPress", adakv),
]
