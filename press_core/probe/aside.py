"""Running a model for our own sake: as if it had not happened, and without any press."""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from press_core.forward import here
from press_core.model.decoder import device_of

N_TOKENS = 7
one_at_a_time = threading.RLock()


@contextmanager
def as_if_nothing_happened(model: nn.Module) -> Iterator[None]:
    """Put back what a forward changes: random generators, and what modules note of it.

    Some rotary modules adapt to what they see, and models with images write down how far positions
    lag behind tokens. Open scopes take no part in forwards of this thread.
    """
    noted = [(m, dict(vars(m)), dict(m._buffers)) for m in model.modules()]
    devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
    rng = torch.random.fork_rng(list(devices))
    with one_at_a_time, here.apart(), rng, torch.no_grad(), _eagerly():
        for module, attributes, _ in noted:
            if "rope_deltas" in attributes:  # of the image before, by which 5.2 counts on
                module.rope_deltas = None  # type: ignore[assignment]
        try:
            yield
        finally:
            for module, attributes, buffers in noted:
                vars(module).update(attributes)
                module._buffers.update(buffers)


def _eagerly() -> Any:
    """Compiled models run as they were written."""
    compiles = "torch._dynamo" in sys.modules
    return torch.compiler.set_stance("force_eager") if compiles else nullcontext()


def run(model: Any, module: Any, cache: Any = None) -> Any:
    """Run `module` of `model` over its first tokens, or over one more behind those of `cache`."""
    config = getattr(module, "config", None) or model.config
    ids = _ordinary_tokens(config).to(device_of(module))
    new = ids if cache is None else ids[:, :1]
    parameters = inspect.signature(type(module).forward).parameters
    given: dict[str, Any] = {"input_ids": new}
    if "decoder_input_ids" in parameters:
        given = {"input_ids": ids[:, 2:], "decoder_input_ids": new}
    more = {"use_cache": True, "logits_to_keep": 1}
    given |= {name: value for name, value in more.items() if name in parameters}
    return module(**given) if cache is None else module(**given, past_key_values=cache)


def _ordinary_tokens(config: Any) -> Tensor:
    """`(1, N_TOKENS)` token ids that stand for nothing special."""
    text = config.get_text_config()
    special: set[int] = set()
    for part in (config, text):
        for name, value in part.to_dict().items():
            if name.endswith(("_token_id", "_token_index", "_id")):
                special.update([value] if isinstance(value, int) else value or ())
    size = getattr(text, "vocab_size", None) or 1000
    ordinary = [token for token in range(min(size, 1000)) if token not in special]
    return torch.tensor([ordinary[-N_TOKENS:]])
