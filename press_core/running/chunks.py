"""Chunked prefill: presses treat all chunks as one prefill.

A prefill chunk looks like a follow-up question; only the caller knows which it is. Two callers are
recognized by their stack frames: `prefill` below, and `generate(prefill_chunk_size=n)`.
"""

from dataclasses import replace
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from press_core.cache.given import innermost_frame
from press_core.cache.positions import rotary_positions
from press_core.call import AttentionCall
from press_core.errors import UnsupportedInputError
from press_core.fields import require_whole
from press_core.forward import Forward, with_cache
from press_core.observing import AttentionPass, step_of, with_steps
from press_core.running.images import require_causal
from press_core.scope import ScopeState
from press_core.traits import Phase

_under_way: WeakSet[Any] = WeakSet()
"""Caches in the middle of a chunked prefill."""


def prefill(
    model: nn.Module,
    input_ids: Tensor,
    past_key_values: Any,
    chunk_size: int,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> Any:
    """Run a chunked prefill into an empty cache; open presses treat it as one prefill.

    Most presses prune after the last chunk, as if the context had been prefilled at once; until
    then the cache holds all of it, and hidden states (and queries, for a press that reads them) are
    buffered. `BlockPress` around a press that scores by keys and values only prunes after every
    chunk: its cache never holds more than the budget and a chunk.

    Args:
        model: called once per chunk.
        input_ids: `(B, S)`.
        past_key_values: an empty `DynamicCache`.
        chunk_size: tokens of a chunk; the last one may be shorter.
        attention_mask: `(B, S)`, zero for padding.
        kwargs: passed to every forward; of `position_ids` `(..., S)` the part for its chunk.

    Returns:
        The output of the last forward.

    Raises:
        HyperparameterError: if `chunk_size` is not a whole number, 1 or more.
        UnsupportedInputError: without an empty cache, or if the mask has another shape.
    """
    require_whole(1, chunk_size=chunk_size)
    if not hasattr(past_key_values, "get_seq_length") or int(past_key_values.get_seq_length()):
        raise UnsupportedInputError(
            "prefill puts all chunks of a context into one cache, which has to be empty; pass a "
            "DynamicCache(), and bring later turns in one forward"
        )
    shape = None if attention_mask is None else getattr(attention_mask, "shape", "no tensor")
    if shape not in (None, input_ids.shape):
        raise UnsupportedInputError(
            f"prefill cuts masks into chunks; pass one of shape (B, S), as input_ids; got {shape}"
        )
    output, length, cached = None, input_ids.shape[1], with_cache(model, past_key_values)
    positions = kwargs.pop("position_ids", None)
    if positions is None and attention_mask is not None and not bool(attention_mask.all()):
        positions = (attention_mask.cumsum(dim=-1) - 1).clamp(min=0)
    for start in range(0, length, chunk_size):
        stop = min(start + chunk_size, length)
        given = dict(kwargs)
        if attention_mask is not None:
            given["attention_mask"] = attention_mask[:, :stop]
        if positions is not None:  # else the model takes its own, which need not begin at 0
            given["position_ids"] = positions[..., start:stop]
        output = model(input_ids[:, start:stop], **cached, **given)
    return output


def is_under_way(cache: Any) -> bool:
    """Whether a cache is in the middle of a chunked prefill."""
    return bool(_under_way) and cache in _under_way


def announce(scope: ScopeState, forward: Forward) -> None:
    """Find out whether a forward is a prefill chunk, and how many tokens follow.

    Raises:
        UnsupportedInputError: if the press requires the context in one forward.
    """
    cache = forward.cache
    if cache is None or not (forward.is_context or cache in _under_way):
        return
    forward.n_remaining = _n_remaining(forward)
    is_chunk = cache in _under_way or forward.n_remaining > 0
    forward.is_context = True
    phases = scope.traits.phases
    at_once = phases & Phase.AFTER_DECODER and not phases & Phase.PREFILL
    if is_chunk and (at_once or phases & Phase.BEFORE_DECODER):
        raise UnsupportedInputError(
            f"{type(scope.press).__name__} needs the context in one forward, but this is a chunk "
            "of a prefill; leave out prefill_chunk_size"
        )
    if forward.n_remaining:
        _under_way.add(cache)
    # If more chunks follow, only a failure ends the prefill.
    when = forward.at_failure if forward.n_remaining else forward.at_end
    when.append(partial(_under_way.discard, cache))


def _n_remaining(forward: Forward) -> int:
    frame = innermost_frame(__name__, (prefill.__name__,))
    if frame is not None:
        return int(frame.f_locals["length"] - frame.f_locals["stop"])
    frame = innermost_frame("transformers.generation.utils", ("_prefill",))
    if frame is None or not any(m is forward.decoder for m in frame.f_locals["self"].modules()):
        return 0
    variables = frame.f_locals
    chunks, chunk = variables.get("input_chunks", ()), variables.get("input_chunk")
    index = next((i for i, other in enumerate(chunks) if other is chunk), len(chunks))
    return sum(chunk.shape[-1] for chunk in chunks[index + 1 :])


def wait(passed: AttentionPass, call: AttentionCall) -> AttentionCall | None:
    """The call over the whole context after its last chunk; None before.

    A press that prunes after every chunk gets each of them. For others the states of the chunks are
    buffered, so that they see the context as in one forward.
    """
    scope, layer, n_remaining = passed.scope, passed.layer, passed.forward.n_remaining
    if not n_remaining and layer.n_seen == passed.hidden_states.shape[1]:
        return call
    require_causal(passed)
    if scope.traits.phases & Phase.CHUNKS:
        return _chunk(passed, call)
    memory = replace(layer.memory(scope.key), in_prefill=True).with_step(step_of(passed))
    if not n_remaining:
        layer.remember(scope.key, None)
        whole = memory.n_known == layer.n_seen
        return with_steps(call.replace(attentions=None), memory) if whole else None
    scope.remember(passed.cache, passed.site.layer_idx, layer, memory)
    return None


def _chunk(passed: AttentionPass, call: AttentionCall) -> AttentionCall:
    """The call over a prefill chunk and what is kept of earlier chunks."""
    layer, ids = passed.layer, call.at.ids
    if ids is None:
        n, device = passed.hidden_states.shape[1], call.keys.device
        ids = torch.arange(layer.n_seen - n, layer.n_seen, device=device)[None]
    rotary = rotary_positions(layer, passed.site, passed.occupied, ids[:, -1])
    at = replace(call.at, ids=ids, tokens=None, rotary=rotary)
    return call.replace(at=at, when=replace(call.when, n_remaining=passed.forward.n_remaining))
