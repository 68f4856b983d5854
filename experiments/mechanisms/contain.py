"""What puts back from outside what a mechanism leaves behind in the process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel


@contextmanager
def contained(model: PreTrainedModel) -> Iterator[None]:
    """The model's classes and the attention registries, afterwards as before.

    What is left on `model` itself stays: use another one.
    """
    classes = {type(module) for module in model.modules()}
    own = [cls for cls in classes if cls.__module__.startswith("transformers.models.")]
    attributes = {cls: dict(vars(cls)) for cls in own}
    mappings = [cls._global_mapping for cls in (AttentionInterface, AttentionMaskInterface)]
    entries = [dict(mapping) for mapping in mappings]
    try:
        yield
    finally:
        for cls, former in attributes.items():
            _restore(cls, former)
        for mapping, former in zip(mappings, entries, strict=True):
            mapping.clear()
            mapping.update(former)


def _restore(cls: type, former: dict[str, Any]) -> None:
    for name, value in list(vars(cls).items()):
        if name not in former:
            delattr(cls, name)
        elif former[name] is not value:
            setattr(cls, name, former[name])
