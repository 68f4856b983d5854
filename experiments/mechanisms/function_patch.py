"""On a function of the modeling file: `apply_rotary_pos_emb`, which every layer calls."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from attention_patch import wrap
from experiments.mechanisms.press import Pruner, Score, as_press
from press_core import attention_sites


@as_press
@contextmanager
def function_patch(
    model: PreTrainedModel, compression_ratio: float, score: Score
) -> Iterator[None]:
    """A reversible wrapper of `apply_rotary_pos_emb` in the file of the model's attention.

    It is given queries and keys of new tokens, before the cache is: neither values nor older keys.
    What it needs it has to take from the frame of its caller, and what the prefill stored it can
    evict only when the layer is called again. The mask of that call is made already: it fits one
    new token, and not more.
    """
    pruner = Pruner(model, compression_ratio, score)

    def rotate(apply_rotary_pos_emb: Any, *args: Any, **kwargs: Any) -> Any:
        pruner.late(*_caller(inspect.currentframe()))
        return apply_rotary_pos_emb(*args, **kwargs)

    files = {sys.modules[type(site.module).__module__] for site in attention_sites(model)}
    with ExitStack() as patches:
        for file in files:
            patches.callback(wrap(file, "apply_rotary_pos_emb", rotate).remove)
        yield


def _caller(frame: FrameType | None) -> tuple[nn.Module, dict[str, Any]]:
    """The attention module whose forward is calling, and its local variables."""
    while frame is not None:
        module = frame.f_locals.get("self")
        if isinstance(module, nn.Module):
            return module, frame.f_locals
        frame = frame.f_back
    raise LookupError("apply_rotary_pos_emb was not called by a module")
