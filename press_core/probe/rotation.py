"""What an attention module does to its queries and keys at their positions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from press_core.model.rotary import NoRotation, Rotary
from press_core.probe.watching import Seen, Watch


def rotation_of(seen: Seen, watch: Watch) -> tuple[Rotary | None, str]:
    """What is known of the rotation of a module, and why nothing can be rotated by it, if so."""
    given = seen.embeddings
    if given is None:
        takes = any(made.dim() == 3 for _, made, _ in watch.makers)
        if "position_embeddings" in seen.parameters and takes:
            return NoRotation(), ""  # other layers of the model rotate
        why = "rotates where nobody can see it" if takes else "has no rotary position embeddings"
        return None, why
    pair = isinstance(given, tuple) and len(given) == 2 and isinstance(given[0], Tensor)
    if not pair or given[0].dim() != 3:
        return None, "rotates by something else than cosines and sines `(B, S, channels)`"
    cos, sin = given
    bare = watch.again(seen, position_embeddings=(torch.ones_like(cos), torch.zeros_like(sin)))
    call = seen.attended[0]
    if torch.equal(bare.query, call.query):
        return NoRotation(), ""
    for rotary in seen.rotations:
        try:
            same = close(rotary.rotate(bare.query, cos, sin), call.query)
            same = same and close(rotary.rotate(bare.key, cos, sin), call.key)
        except (RuntimeError, TypeError, ValueError):
            continue
        if same:
            made = _with_maker(rotary, cos, sin, watch)
            why = "gets cosines and sines of positions that no module of the model gives"
            return made or rotary, "" if made else why
    return (
        None,
        "does something after rotating its queries and keys that is not undone by rotating back",
    )


def _with_maker(rotary: Rotary, cos: Tensor, sin: Tensor, watch: Watch) -> Rotary | None:
    """`rotary` with the module that makes these `cos` and `sin`, and from which position on."""
    steps = torch.arange(cos.shape[1], device=cos.device)[None]
    like = torch.zeros(1, dtype=cos.dtype, device=cos.device)
    for candidate in _makers(rotary, cos, watch):
        for start in (0, 1, 2):
            try:
                made = candidate.embeddings(like, steps + start)
            except Exception:  # not how this one is called
                break
            if close(made[0], cos) and close(made[1], sin):
                return replace(candidate, first_position=start)
    return None


def _makers(rotary: Rotary, cos: Tensor, watch: Watch) -> Iterator[Rotary]:
    """`rotary` with each module that may make `cos`, first those that returned it."""
    modules = set(watch.model.modules())
    for module, _, given in sorted(watch.makers, key=lambda maker: maker[1] is not cos):
        for in_3d in (True, False):  # those that take three dimensions take one too
            if module in modules:
                layer_type = given.get("layer_type")
                yield replace(rotary, embedding=module, layer_type=layer_type, in_3d=in_3d)


def close(a: Tensor, b: Tensor, tolerance: float | None = None) -> bool:
    """Whether two tensors are the same but for rounding, or within a share of the largest."""
    if a.shape != b.shape:
        return False
    tolerance = 8 * torch.finfo(b.dtype).eps if tolerance is None else tolerance
    return bool(((a - b).abs() <= tolerance * b.abs().amax()).all())
