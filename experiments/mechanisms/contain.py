"""What puts back from outside what a mechanism leaves behind in the process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel


@contextmanager
def contained(model: PreTrainedModel) -> Iterator[None]:
    """The model's classes and the attention registries, afterwards as before.

    What is left on `model` itself stays: use another one.
    """
    classes = {type(module) for module in model.modules()}
    own = [cls for cls in classes if cls.__module__.startswith("transformers.models.")]
    attributes = {cls: dict(vars(cls)) for cls in own}
    functions, masks = AttentionInterface._global_mapping, AttentionMaskInterface._global_mapping
    with patch.dict(functions), patch.dict(masks):
        try:
            yield
        finally:
            for cls, former in attributes.items():
                _restore(cls, former)


def _restore(cls: type, former: dict[str, Any]) -> None:
    for name, value in list(vars(cls).items()):
        if name not in former:
            delattr(cls, name)
        elif former[name] is not value:
            setattr(cls, name, former[name])
