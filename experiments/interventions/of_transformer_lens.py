"""TransformerLens: every component of a model behind a hook point of its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers import PreTrainedModel

from experiments.interventions.intervention import Intervention
from experiments.loading import load_model


@contextmanager
def bridged(model: PreTrainedModel) -> Iterator[Any]:
    """A bridge to the model, and none any more."""
    from transformer_lens.model_bridge import TransformerBridge

    _, tokenizer = load_model("facts-llama")
    bridge = TransformerBridge.boot_transformers(
        "local", hf_model=model, tokenizer=tokenizer, device="cpu"
    )
    yield bridge


INTERVENTIONS = (Intervention(bridged, "TransformerBridge"),)
