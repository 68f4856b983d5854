"""TransformerLens: every component of a model behind a hook point of its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from transformers import PreTrainedModel

from experiments.loading import load_model
from experiments.subjects import Subject


@contextmanager
def bridged(model: PreTrainedModel) -> Iterator[None]:
    """A bridge to the model, and none any more."""
    from transformer_lens.model_bridge import TransformerBridge

    _, tokenizer = load_model("facts-llama")
    bridge = TransformerBridge.boot_transformers(
        "local", hf_model=model, tokenizer=tokenizer, device="cpu"
    )
    yield
    del bridge


SUBJECTS = [Subject("TransformerBridge", bridged)]
