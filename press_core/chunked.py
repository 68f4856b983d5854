"""A prefill in chunks, of any press that is open on the model."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from press_core.errors import HyperparameterError
from press_core.model.generation import Part, as_part


def prefill(
    model: nn.Module,
    input_ids: Tensor,
    past_key_values: Any,
    chunk_size: int,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> Any:
    """Bring a context into an empty cache chunk by chunk: one prefill to the presses that are open.

    Most presses prune when the last chunk has come, as if the context had come at once; until then
    the cache holds all of it, and beside it hidden states (and queries, for a press that reads
    them) wait. `BlockPress` around a press that scores by keys and values alone prunes after every
    chunk: its cache never holds more than the budget and a chunk.

    Args:
        model: called once per chunk.
        input_ids: `(B, S)`.
        past_key_values: an empty `DynamicCache`.
        chunk_size: tokens of a chunk; the last one may be shorter.
        attention_mask: `(B, S)`, zero where there is padding.
        kwargs: for every forward.

    Returns:
        The output of the last forward.

    Raises:
        HyperparameterError: if `chunk_size` is no number of tokens.
    """
    if chunk_size < 1:
        raise HyperparameterError(f"chunk_size={chunk_size!r}: chunk_size must be 1 or more")
    output, length = None, input_ids.shape[1]
    for start in range(0, length, chunk_size):
        stop = min(start + chunk_size, length)
        given = dict(kwargs)
        if attention_mask is not None:
            given["attention_mask"] = attention_mask[:, :stop]
            positions = (attention_mask.cumsum(dim=-1) - 1).clamp(min=0)
            given.setdefault("position_ids", positions[:, start:stop])
        with as_part(Part(n_to_come=length - stop)):
            output = model(input_ids[:, start:stop], past_key_values=past_key_values, **given)
    return output
