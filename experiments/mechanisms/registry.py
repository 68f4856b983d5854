"""On the attention registry: whatever function it hands out is wrapped."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from attention_patch import wrap
from experiments.mechanisms.press import Score, as_press, evict_in_place
from press_core import attention_sites


@as_press
@contextmanager
def registry_patch(
    model: PreTrainedModel, compression_ratio: float, score: Score
) -> Iterator[None]:
    """A reversible wrapper of `get_interface` of the registry that the model uses."""

    def get_evicting(get_interface: Any, *names: Any, **named: Any) -> Any:
        attend = get_interface(*names, **named)

        def attend_and_evict(
            module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any
        ) -> Any:
            output = attend(module, query, key, value, mask, **kwargs)
            evict_in_place(compression_ratio, score, query, key, value)
            return output

        return attend_and_evict

    registries = {id(site.interface): site.interface for site in attention_sites(model)}
    with ExitStack() as patches:
        for registry in registries.values():
            patches.callback(wrap(registry, "get_interface", get_evicting).remove)
        yield
