"""Let a press choose, and store what it keeps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from press_core.cache.ragged import RaggedLayer
from press_core.caches import mask_columns, mask_layer
from press_core.call import AttentionCall
from press_core.errors import UnsupportedCacheError, UnsupportedInputError
from press_core.forward import Forward
from press_core.layers import ChannelLayer, ExactLayer, Journal, Pruned, pruned_like
from press_core.masks import padding

Compress = Callable[[AttentionCall], tuple[Tensor, Tensor]]
"""From a call to the keys and values that stay, each `(B, H_kv, n, d)`."""

SAY_WHAT_IS_KEPT = (
    "let its compress return what AttentionCall.keep(positions) gives, or write it as a ScorerPress"
)


def prune(forward: Forward, call: AttentionCall, compress: Compress) -> None:
    """Let `compress` choose, for the rows of each padding apart, and store what it keeps."""
    former = forward.layer
    if isinstance(former, RaggedLayer):
        compress(call)
        _evict_late(forward, former, call)
        return
    padded = _padding(forward, former, call)
    parts = call.parts(padded, forward.press.decides_per_row)
    left = _Left(call, [_Part(rows, start, part, *compress(part)) for rows, start, part in parts])
    if left.headwise:
        _store_ragged(forward, former, left)
    # Also a layer left whole has to know its padding, once the mask is built for a pruned one.
    elif not left.whole or (
        not is_pruned(former) and isinstance(mask_layer(forward.cache), Pruned)
    ):
        uneven_rows = bool(padded) or any(part.length != left.length for part in left.parts)
        _store(forward, former, left, uneven_rows or (is_pruned(former) and former.padded))
    elif isinstance(former, ExactLayer):
        forward.cache.layers[forward.site.layer_idx] = former.quantized
        former.quantized.update(former.keys, former.values)
    elif isinstance(former, Pruned):
        former.journals.pop(forward.run.key, None)


def is_pruned(layer: Any) -> bool:
    """Whether `layer` was pruned, or its padding dropped, since it was last reset."""
    return isinstance(layer, Pruned) and layer.n_pruned > 0


def _padding(forward: Forward, layer: Any, call: AttentionCall) -> list[int]:
    """Slots on the left of each row that hold padding, or nothing since it was pruned."""
    if not is_pruned(layer):
        prefill = call.hidden_states.shape[1] == call.length
        return padding(forward.argument("attention_mask"), call.length, prefill)
    if not layer.padded:
        return []
    empty: list[int] = (layer.positions[:, 0] < 0).sum(dim=-1).tolist()
    return empty


# ---- what a press has left -----------------------------------------------------------------------


@dataclass
class _Part:
    """What is left of the rows of one padding.

    Attributes:
        rows: of the batch.
        start: slots on their left that the press did not see.
        call: what it saw, and has noted in it.
        keys, values: what it returned.
    """

    rows: list[int]
    start: int
    call: AttentionCall
    keys: Tensor
    values: Tensor

    @property
    def length(self) -> int:
        return int(self.keys.shape[2])

    @property
    def kept(self) -> Tensor | None:
        """Which of the keys it saw, `(b, H_kv, n)`; None if the press did not say."""
        if self.call.kept is not None:
            return self.call.kept
        if self.length != self.call.length:
            return None
        return torch.arange(self.length, device=self.keys.device).expand(self.keys.shape[:3])


class _Left:
    """The parts put together again, the shorter ones with empty slots on their left."""

    def __init__(self, call: AttentionCall, parts: list[_Part]) -> None:
        self.call, self.parts = call, parts
        self.length = max(part.length for part in parts)
        self.headwise = any(part.call.kept_heads is not None for part in parts)
        self.turned = any(part.call.turned_to is not None for part in parts)
        self.whole = not self.turned and all(
            p.keys is p.call.keys and p.values is p.call.values for p in parts
        )
        rows = [row for part in parts for row in part.rows]
        self.order = torch.tensor(rows, device=call.keys.device).argsort()

    def joined(self, of_part: Callable[[_Part], Tensor], empty: float) -> Tensor:
        """What `of_part` says of the slots `(b, H_kv, n, ...)` of each part, for the batch."""
        if len(self.parts) == 1:
            return of_part(self.parts[0])
        return self.per_row(lambda part: _pad_left(of_part(part), self.length, empty))

    def per_row(self, of_part: Callable[[_Part], Tensor]) -> Tensor:
        """What `of_part` says of the rows `(b, ...)` of each part, for the batch."""
        return torch.cat([of_part(part) for part in self.parts])[self.order]

    def of_slots(self, known: Tensor | None) -> Tensor | None:
        """Of something known of every slot, `(1 or B, 1 or H_kv, S)`, what is left."""
        if known is None or any(part.kept is None for part in self.parts):
            return None
        known = known.to(self.call.keys.device).expand(self.call.keys.shape[:3])

        def of_part(part: _Part) -> Tensor:
            assert part.kept is not None
            return known[part.rows, :, part.start :].gather(-1, part.kept)

        return self.joined(of_part, -1)

    @property
    def mean_padding(self) -> float:
        """Slots on the left of a row that no press saw, on average."""
        return sum(part.start * len(part.rows) for part in self.parts) / len(self.order)


def _pad_left(states: Tensor, n: int, value: float) -> Tensor:
    """`states` `(B, H, m, ...)` with slots holding `value` on the left, `n` in all."""
    missing = n - states.shape[2]
    if not missing:
        return states
    shape = (*states.shape[:2], missing, *states.shape[3:])
    return torch.cat((states.new_full(shape, value), states), dim=2)


# ---- storing it ----------------------------------------------------------------------------------


def positions_in(layer: Any) -> Tensor | None:
    """Position in the sequence of what each slot holds, `(1 or B, 1 or H_kv, S)`, or None."""
    if isinstance(layer, Pruned):
        return layer.all_positions()
    return torch.arange(layer.get_seq_length(), device=layer.device).view(1, 1, -1)


def _store(forward: Forward, former: Any, left: _Left, padded: bool) -> None:
    """Put a pruned layer in the place of `former`."""
    cache, index = forward.cache, forward.site.layer_idx
    layer = _empty_layer(forward, former, left)
    positions = left.of_slots(positions_in(former))
    if padded and positions is None:
        raise UnsupportedInputError(
            "a padded batch was pruned by a press that does not say which tokens it kept, so that "
            f"its rows cannot be told from their padding; {SAY_WHAT_IS_KEPT}"
        )
    seen = former.get_seq_length()
    keys, values = left.joined(lambda part: part.keys, 0), left.joined(lambda part: part.values, 0)
    layer.hold(keys, values, positions, seen, padded)
    if isinstance(layer, ChannelLayer):
        channels = left.per_row(lambda part: part.call.channels)  # type: ignore[arg-type, return-value]
        layer.cut(channels, left.call.keys.shape[-1])
    _turn(layer, former, left, seen)
    if isinstance(former, Pruned):
        layer.journals = {
            key: Journal(journal.n_steps)
            for key, journal in former.journals.items()
            if key != forward.run.key
        }
    cache.layers[index] = layer
    layer.uneven = layer.n_slots != mask_columns(mask_layer(cache))
    first = cache.layers[0].get_seq_length()  # what the model counts positions from
    turned = layer.rotary_positions is not None
    layer.misplaced = turned and (padded or first != layer.get_seq_length())
    # Of those that transformers has, these alone can do without a mask for a single token.
    layer.steps_masked = not forward.site.attn_implementation.startswith(("sdpa", "flash"))
    kept = sum(part.length * len(part.rows) for part in left.parts) / len(left.order)
    _record(forward, former, layer, left, kept)
    if former.keys.device != layer.keys.device:
        layer.offload()


def _empty_layer(forward: Forward, former: Any, left: _Left) -> Any:
    """A layer that can hold what is left of `former`.

    Raises:
        UnsupportedCacheError: if there is none.
    """
    if left.parts[0].call.channels is None:
        return pruned_like(former.quantized if isinstance(former, ExactLayer) else former)
    _refuse_quantized(forward, former, "some channels of the keys")
    return ChannelLayer()


def _refuse_quantized(forward: Forward, former: Any, kept: str) -> None:
    if isinstance(former, ExactLayer):
        raise UnsupportedCacheError(
            f"{type(forward.press).__name__} keeps {kept}, which a "
            f"{type(former.quantized).__name__} cannot store; use a DynamicCache"
        )


def _turn(layer: Pruned, former: Any, left: _Left, seen: int) -> None:
    """Note to which positions the keys in `layer` are rotated, if not to those they came with."""
    if left.turned:
        longest = max(part.call.n_turned or part.length for part in left.parts)

        def lag(part: _Part) -> Tensor:
            n = longest - (part.call.n_turned or part.length)
            return torch.full((len(part.rows),), n, device=part.keys.device)

        def turned_to(part: _Part) -> Tensor:
            return part.kept if part.call.turned_to is None else part.call.turned_to  # type: ignore[return-value]

        layer.rotary_positions = left.joined(turned_to, -1).to(torch.int32)
        layer.rotary_padding = left.per_row(lag)
        if layer.padded:  # the model's mask of a padded batch has columns for all tokens
            layer.rotary_padding += seen - longest
        else:
            layer.evicted = longest - layer.n_pruned
            layer.forgotten = getattr(former, "forgotten", 0) + seen - longest
    elif isinstance(former, Pruned) and former.rotary_positions is not None:
        layer.rotary_positions = left.of_slots(former.all_rotary_positions())
        layer.rotary_padding, layer.forgotten = former.rotary_padding, former.forgotten


def _store_ragged(forward: Forward, former: Any, left: _Left) -> None:
    """Put a layer whose heads differ in length in the place of `former`.

    Raises:
        UnsupportedCacheError: if the cache stores states in a way that heads share.
    """
    _refuse_quantized(forward, former, "other tokens for each head")

    def kept(part: _Part) -> Tensor:
        heads = part.call.kept_heads
        return torch.ones_like(part.keys[..., 0], dtype=torch.bool) if heads is None else heads

    positions = left.of_slots(positions_in(former))
    assert positions is not None
    layer = RaggedLayer.of(
        left.joined(lambda part: part.keys, 0),
        left.joined(lambda part: part.values, 0),
        left.joined(kept, 0),
        positions,
        former.get_seq_length(),
    )
    forward.cache.layers[forward.site.layer_idx] = layer
    remembered = [part.call.remembered for part in left.parts]
    if any(scores is not None for scores in remembered):
        longest = max(0 if scores is None else scores.shape[-1] for scores in remembered)

        def scores(part: _Part) -> Tensor:
            known = part.call.remembered
            known = part.keys.new_zeros(*part.keys.shape[:2], 0) if known is None else known
            return _pad_left(known, longest, float("inf"))  # padding is never evicted

        layer.remember(left.per_row(scores))
    _record(forward, former, layer, left, sum(layer.counts) / len(layer.counts))


def _evict_late(forward: Forward, layer: RaggedLayer, call: AttentionCall) -> None:
    """Evict tokens from heads of different lengths some time after they came."""
    if call.evicted is None:
        return
    assert call.remembered is not None
    width = call.evicted.shape[-1] + call.remembered.shape[-1]
    layer.remember(call.remembered)
    if call.evicted.any():
        ends = torch.tensor(layer.counts, device=layer.device).cumsum(0)
        index = ends[:, None] - width + torch.arange(call.evicted.shape[-1], device=layer.device)
        kept = torch.ones(sum(layer.counts), dtype=torch.bool, device=layer.device)
        kept[index[call.evicted.flatten(0, 1)]] = False
        layer.keep(kept)
    kept_per_head = sum(layer.counts) / len(layer.counts)
    seen = layer.seen - layer.mean_padding
    forward.run.record(forward.site.layer_idx, seen, kept_per_head)


def _record(forward: Forward, former: Any, layer: Any, left: _Left, kept: float) -> None:
    seen = former.get_seq_length() + getattr(former, "forgotten", 0)
    layer.mean_padding = former.mean_padding if is_pruned(former) else left.mean_padding
    forward.run.record(forward.site.layer_idx, seen - layer.mean_padding, kept)
