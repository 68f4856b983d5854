"""What a model was given for the cache that it asks, where no scope is open that would know.

A cache layer is asked how many columns a mask needs, and not told which mask they are taken from.
Where that would go wrong, it is read off the call stack, so that there is an error in place of a
wrong answer. Nothing of it is changed.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import FrameType
from typing import Any

from torch import Tensor

from press_core.cache.tokens import Kept
from press_core.errors import UnsupportedInputError


def innermost_frame(module: str, functions: Sequence[str] = ()) -> FrameType | None:
    """The innermost frame on the call stack of a module, or of one of these functions of it."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        named = not functions or frame.f_code.co_name in functions
        if named and frame.f_globals.get("__name__") == module:
            return frame
        frame = frame.f_back
    return None


def check_given_mask(kept: Kept, n_seen: int, count: int, n_new: int) -> None:
    """Refuse a mask that hides tokens before a pruning, or whose columns are not those taken.

    Args:
        n_seen: tokens that the layer has seen; `count` of them as the model counts.
    """
    frame = innermost_frame("transformers.masking_utils")
    mask = None if frame is None else frame.f_locals.get("attention_mask")
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        return
    n_columns = count + n_new
    if count != n_seen and mask.shape[1] > n_columns and not bool(mask.all()):
        raise UnsupportedInputError(
            f"an attention_mask of {mask.shape[1]} columns hides padding from a cache whose keys "
            f"were rotated to other positions, so that the model counts {n_columns} tokens; open "
            "the scope of the press that rotated them, or pass the last columns, mask = "
            f"attention_mask[:, -{n_columns}:], and the positions that count in them, "
            "(mask.cumsum(-1) - 1)[:, -q:] of q tokens"
        )
    hides = count == n_seen == mask.shape[1] - n_new and not bool(mask[:, : kept.n_seen].all())
    if hides and not kept.is_padded:
        raise UnsupportedInputError(
            f"the attention_mask hides some of the {kept.n_seen} tokens before the pruning, and "
            "the model does not know which keys they became; keep the scope of the press open, or "
            "read the cache inside `with attention_patch.headwise(model): ...`"
        )


def check_given_tokens(n_seen: int, count: int) -> None:
    """Refuse tokens of which `generate` takes some for new that may have been seen."""
    if count == n_seen:
        return
    frame = innermost_frame("transformers.generation.utils", ("_prefill",))
    # transformers 5.2 always cuts; later releases only where they are told all tokens.
    if frame is None or not frame.f_locals.get("next_sequence_length", True):
        return
    given = int(frame.f_locals["input_ids"].shape[1])
    if given <= n_seen:
        return
    raise UnsupportedInputError(
        f"generate was given {given} tokens and cuts off as many as the cache counts: {count}, "
        f"where it has seen {n_seen}, as its keys were rotated to other positions; run the new "
        "tokens but the last first, model(new[:, :-1], past_key_values=cache), and give generate "
        f"all tokens but the first {n_seen - count}"
    )


def check_mask_in_use(n_seen: int, n_slots: int, n_new: int) -> None:
    """Refuse a mask over all tokens that the model was given ready-made, for fewer slots."""
    mask = _mask_of_caller(sys._getframe(1))
    if (
        isinstance(mask, Tensor)
        and mask.dim() == 4
        and mask.shape[-1] == n_seen + n_new != (n_slots + n_new)
    ):
        raise UnsupportedInputError(
            f"an attention_mask of shape {tuple(mask.shape)} has a column for each of the "
            f"{n_seen + n_new} tokens, and {n_slots + n_new} keys are left; keep the scope of the "
            "press open, read the cache inside `with attention_patch.headwise(model): ...`, or "
            "pass a mask of two dimensions"
        )


def _mask_of_caller(frame: FrameType | None) -> Any:
    for _ in range(8):
        if frame is None or "attention_mask" in frame.f_locals:
            break
        frame = frame.f_back
    return None if frame is None else frame.f_locals.get("attention_mask")
