"""nnsight: a model wrapped so that code can be run inside of its forward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from transformers import PreTrainedModel

from experiments.subjects import Subject


@contextmanager
def wrapped(model: PreTrainedModel) -> Iterator[None]:
    """A wrapper of the model, and none any more."""
    from nnsight import NNsight

    wrapper = NNsight(model)
    yield
    del wrapper


SUBJECTS = [Subject("NNsight", wrapped)]
