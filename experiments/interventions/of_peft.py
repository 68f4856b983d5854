"""PEFT: low-rank adapters in the place of projections."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel

from experiments.interventions.intervention import Intervention

_PROJECTIONS = {"q_proj", "v_proj", "qkv_proj", "query_key_value", "c_attn"}
"""What makes them, by family."""


@contextmanager
def adapted(leave: str, model: PreTrainedModel) -> Iterator[Any]:
    """LoRA on what makes queries and values, taken off by the method `leave`."""
    from peft import LoraConfig, get_peft_model

    projections = {name.rpartition(".")[2] for name, _ in model.named_modules()} & _PROJECTIONS
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = LoraConfig(r=4, target_modules=sorted(projections), init_lora_weights=False)
        adapters = get_peft_model(model, config).eval()
    try:
        yield adapters
    finally:
        getattr(adapters, leave)()


@contextmanager
def merged(model: PreTrainedModel) -> Iterator[Any]:
    """The same, merged into the weights and taken out of them again."""
    with adapted("unload", model) as adapters:
        adapters.merge_adapter()
        yield adapters
        adapters.unmerge_adapter()


INTERVENTIONS = (
    Intervention(partial(adapted, "unload"), "LoRA, unload", "PEFT LoRA"),
    Intervention(merged, companion="PEFT LoRA, merged"),
    Intervention(partial(adapted, "merge_and_unload"), "LoRA, merge_and_unload"),
)
