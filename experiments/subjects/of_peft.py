"""PEFT: low-rank adapters in the place of projections."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from transformers import PreTrainedModel

from experiments.subjects import Subject


@contextmanager
def adapted(leave: str, model: PreTrainedModel) -> Iterator[None]:
    """LoRA on queries and values, taken off by the method `leave`."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    adapters = get_peft_model(model, config)
    yield
    getattr(adapters, leave)()


SUBJECTS = [
    Subject("LoRA, unload", partial(adapted, "unload")),
    Subject("LoRA, merge_and_unload", partial(adapted, "merge_and_unload")),
]
