"""nnsight: a model wrapped so that code can be run inside of its forward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers import PreTrainedModel

from experiments.interventions.intervention import Intervention


@contextmanager
def wrapped(model: PreTrainedModel) -> Iterator[Any]:
    """A wrapper of the model, and none any more."""
    from nnsight import NNsight

    wrapper = NNsight(model)  # which has to live as long as the block
    yield wrapper


INTERVENTIONS = (Intervention(wrapped, "NNsight"),)
