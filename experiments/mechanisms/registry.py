"""On the attention registry: whatever function it hands out is wrapped."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from transformers import PreTrainedModel

from attention_patch import wrap
from experiments.mechanisms.press import Score, as_press, evicting
from press_core import attention_sites


@as_press
@contextmanager
def registry_patch(
    model: PreTrainedModel, compression_ratio: float, score: Score
) -> Iterator[None]:
    """A reversible wrapper of `get_interface` of the registry that the model uses."""

    def get_evicting(get_interface: Any, *names: Any, **named: Any) -> Any:
        attend = get_interface(*names, **named)
        return evicting(attend, compression_ratio, score)

    registries = [site.signature.interface for site in attention_sites(model)]
    with ExitStack() as patches:
        for registry in {id(registry): registry for registry in registries}.values():
            patches.callback(wrap(registry, "get_interface", get_evicting).remove)
        yield
