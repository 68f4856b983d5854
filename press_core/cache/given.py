"""Checks of what a user gives to pruned layers: masks, tokens and states.

The model queries a cache layer for the number of mask columns without passing the mask. Where a
caller's mask would be applied to the wrong keys, these checks find it on the call stack and raise
instead of letting the model compute wrong outputs. Nothing on the stack is changed.
"""

import sys
from collections.abc import Sequence
from itertools import islice
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from press_core.errors import UnsupportedCacheError, UnsupportedInputError
from press_core.forward import frames_from


def innermost_frame(module: str, functions: Sequence[str] = ()) -> FrameType | None:
    """The innermost stack frame of `module`, or of one of its `functions` if given; else None."""
    for frame in frames_from(sys._getframe(1)):
        named = not functions or frame.f_code.co_name in functions
        if named and frame.f_globals.get("__name__") == module:
            return frame
    return None


def check_sizes(layer: Any, n_new: int, alone: bool) -> None:
    """Raise if the mask or the tokens of a caller do not fit the sizes that the model asks for.

    Args:
        n_new: tokens of this forward.
        alone: whether nothing helps to read the layer.

    Raises:
        UnsupportedInputError: if so.
    """
    n_seen, count = layer.n_seen, layer.get_seq_length()
    frame = innermost_frame("transformers.masking_utils")  # builds its mask from the caller's
    mask = None if frame is None else frame.f_locals.get("attention_mask")
    mask = mask if isinstance(mask, Tensor) and mask.dim() == 2 else None
    if alone and mask is not None:
        _check_mask(mask, layer, count, n_new)
    if n_new > 1 or count != n_seen:  # decode steps do not search the whole stack
        _check_tokens(n_seen, count, n_new)
    if mask is not None and mask.shape[1] < count + n_new:  # the model would hide the latest tokens
        raise UnsupportedInputError(
            f"an attention_mask of {mask.shape[1]} columns is too short for {n_new} tokens after "
            f"the {n_seen} that the cache has seen; pass one over all tokens, evicted ones "
            "included. If generate with draft tokens cut the one that you passed, leave the "
            "assistance out, or use transformers 5.18 or newer, and no padding"
        )


def _check_mask(mask: Tensor, layer: Any, count: int, n_new: int) -> None:
    """Raise if a 2-d mask hides tokens seen before pruning, or if the model takes wrong columns.

    Args:
        count: tokens that the layer has seen, as the model counts them; less after rerotation.
    """
    kept, n_before = layer.kept, mask.shape[1] - n_new
    if count != layer.n_seen:
        _check_columns(mask, count + n_new)
    elif n_before >= count and not kept.is_padded and not bool(mask[:, : kept.n_seen].all()):
        raise UnsupportedInputError(
            f"the attention_mask hides some of the {kept.n_seen} tokens before the pruning, and "
            "the model does not know which keys they became; keep the scope of the press open, or "
            "read the cache inside `with attention_patch.headwise(model): ...`"
        )


def _check_columns(mask: Tensor, n_columns: int) -> None:
    """Raise if a mask hides padding, and the model takes its first columns for all it counts."""
    if mask.shape[1] > n_columns and not bool(mask.all()):
        raise UnsupportedInputError(
            f"an attention_mask of {mask.shape[1]} columns hides padding from a cache whose keys "
            f"were rotated to other positions, so that the model counts {n_columns} tokens; pass "
            f"the last columns, mask = attention_mask[:, -{n_columns}:], and the positions that "
            "they give for q new tokens, (mask.cumsum(-1) - 1)[:, -q:]"
        )


def _check_tokens(n_seen: int, count: int, n_new: int) -> None:
    """Raise if `generate` would take tokens for new that the layer may have seen."""
    frame = innermost_frame("transformers.generation.utils", ("_prefill", "_assisted_decoding"))
    if frame is not None and frame.f_code.co_name == "_assisted_decoding":
        _check_cut(frame, n_seen, count, n_new)
        return
    if count == n_seen or frame is None:
        return
    known = frame.f_locals
    embeds = known.get("inputs_embeds", known["model_kwargs"].get("inputs_embeds"))  # before a cut
    given = max(int(x.shape[1]) for x in (known["input_ids"], embeds) if x is not None)
    of_all = known.get("attention_mask")
    if known["generation_config"].prefill_chunk_size and isinstance(of_all, Tensor):
        _check_columns(of_all, count + given)  # chunks get the first columns of it
    # transformers 5.2 always cuts the input; later releases cut embeddings, and all token ids.
    if known.get("next_sequence_length", True) or known.get("use_inputs_embeds"):
        _check_all(given, n_seen, count)


def _check_all(given: int, n_seen: int, count: int) -> None:
    """Raise where `generate` may have been given all tokens, of which it skips too few."""
    if given > n_seen:
        raise UnsupportedInputError(
            f"generate was given {given} tokens and skips as many as the cache counts: {count}; "
            f"the cache has seen {n_seen}, but its keys were rotated to other positions. First run "
            "the new tokens except the last, model(new[:, :-1], past_key_values=cache), then give "
            f"generate all tokens but the first {n_seen - count}, and as many columns of the "
            "attention_mask"
        )


def _check_cut(frame: FrameType, n_seen: int, count: int, n_new: int) -> None:
    """Raise where `generate` with draft tokens lets the model miscount the cached tokens.

    It cuts a mask to the tokens that it was given: transformers 5.2 wants all of them, and runs the
    new ones. Later releases run all that they are given, and since 5.18 drop a mask of ones.
    """
    known = frame.f_locals
    given = int(known["input_ids"].shape[1])
    n_columns = getattr(known["generation_config"], "_mask_length", 0)
    if not known.get("is_first_iteration"):
        return
    if count < given == n_columns <= n_new:
        n_other = given - (n_seen if given > n_seen else count)
        raise UnsupportedInputError(
            f"generate with draft tokens was given {given} tokens and cuts none off, but the cache "
            f"has seen {n_seen}; pass the other {n_other}, with the attention_mask of all"
        )
    if count != n_seen:
        _check_all(given, n_seen, count)


def is_unmasked() -> bool:
    """Whether the attention that appends a single token to a layer has no mask."""
    compiled = torch.compiler.is_compiling()  # by a release that makes no mask then
    return compiled or _of_caller("attention_mask", sys._getframe(1)) is None


def check_arguments(layer: Any, n_new: int) -> None:
    """Raise if positions or a 4-d mask count tokens that a layer does not have.

    `generate` takes positions from the mask, which counts evicted tokens; after rerotation, the
    layer does not.

    Raises:
        UnsupportedInputError: if so.
    """
    caller, ids, n_counted = sys._getframe(1), None, 0
    if layer.is_rerotated:
        ids = _of_caller("position_ids", caller)
        n_counted = int(layer.get_seq_length()) + n_new
    if isinstance(ids, Tensor) and int(ids.max()) >= n_counted:
        raise UnsupportedInputError(
            f"position_ids up to {int(ids.max())} count evicted tokens, but the keys of this cache "
            f"were rotated to other positions, and new tokens continue at {n_counted - n_new}; "
            "keep the scope of the press open, pass position_ids that begin there, or give "
            f"generate the last {n_counted} tokens and columns of attention_mask"
        )
    mask = None if layer.has_sized_mask else _of_caller("attention_mask", caller)
    if not isinstance(mask, Tensor) or mask.dim() != 4:
        return
    n_columns, n_keys = layer.n_seen + n_new, layer.n_slots + n_new
    if layer.has_column_for_each_token(mask, n_new) and n_columns != n_keys:
        raise UnsupportedInputError(
            f"an attention_mask of shape {tuple(mask.shape)} has a column for each of the "
            f"{n_columns} tokens, and {n_keys} keys are stored; keep the scope of the press open, "
            "read the cache inside `with attention_patch.headwise(model): ...`, or pass a mask of "
            "two dimensions"
        )


def check_states(layer: Any, name: str, states: Tensor) -> None:
    """Raise if other `keys` or `values` are assigned to a pruned layer than tokens taken back.

    Raises:
        UnsupportedCacheError: if so.
    """
    n, n_given, n_kept = layer.n_slots, states.shape[-2], layer.kept.n_slots
    if layer.is_pruned and not n_kept <= n_given <= n:
        raise UnsupportedCacheError(
            f"a pruned layer of {n} {name}, {n_kept} of which a press has kept, was assigned "
            f"{n_given}; let the press's compress return Eviction.keep(call, positions)"
        )


def is_cropped_before(layer: Any) -> bool:
    """Whether the `crop` of a cache, which goes layer by layer, has cropped others than `layer`."""
    frame = innermost_frame("transformers.cache_utils", ("crop",))
    layers = [] if frame is None else getattr(frame.f_locals["self"], "layers", [])
    # After rerotation layers may count unlike numbers of tokens.
    found = [x for x in layers if hasattr(x, "get_seq_length")]
    seen = [int(getattr(x, "n_seen", None) or x.get_seq_length()) for x in found]
    return any(n != layer.n_seen for n in seen)


def _of_caller(name: str, frame: FrameType | None) -> Any:
    near = islice(frames_from(frame), 9)
    return next((caller.f_locals[name] for caller in near if name in caller.f_locals), None)
