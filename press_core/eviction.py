"""What a press decided about one attention call: an immutable value that it returns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from press_core.call import AttentionCall
from press_core.errors import PressError, UnsupportedInputError
from press_core.model.rotary import NoRotation
from press_core.select import gather_each, is_dense, is_readable
from press_core.traits import Evicts, Needs

REPORT_POSITIONS = (
    "let its compress return Eviction.keep(call, positions), or write it as a ScorerPress"
)
"""Advice for a press that returns keys and values without their positions."""


@dataclass(frozen=True, eq=False)
class Eviction:
    """The keys and values that a press keeps of a call, and which ones these are.

    Made by a constructor for each kind: `nothing`, `keep` (the same number of tokens in each KV
    head), `keep_per_head`, `keep_channels`, `late` and `from_states`. `n` is the number of kept
    keys, of `S`. Unpacks into keys and values, as kvpress's `compress` returns them.

    Attributes:
        call: the call that was decided about.
        keys, values: `(B, H_kv, n, d)`.
        kept: `(B, H_kv, n)` int64, indices of the kept keys among the `S`; None: not reported.
        rotary_positions: `(B, H_kv, n)` int64, the positions that the keys were rerotated to; None:
            keys were not rerotated.
        next_position: the position of the next new token, if keys were rerotated.
        head_mask: `(B, H_kv, n)` bool, which of the `n` each KV head keeps, if heads differ.
        channels: `(B, H_kv, d')` int64, the kept channels of the keys, if some are evicted.
        late_mask: `(B, H_kv, m)` bool, which to evict of the `m` tokens before the last `w`.
        carried: by name `(B, H_kv, ...)`, what the press gets back in `call.carried`; if heads hold
            different numbers of tokens, a value for each of the last `w` tokens.
    """

    call: AttentionCall
    keys: Tensor
    values: Tensor
    kept: Tensor | None
    rotary_positions: Tensor | None = None
    next_position: int | None = None
    head_mask: Tensor | None = None
    channels: Tensor | None = None
    late_mask: Tensor | None = None
    carried: Mapping[str, Tensor] = field(default_factory=dict)

    def __iter__(self) -> Iterator[Tensor]:
        if not (self.head_mask is None and self.channels is None and self.late_mask is None):
            raise UnsupportedInputError(
                "this Eviction keeps different tokens per head or only some channels of keys; keys "
                "and values alone cannot express that: return the Eviction as it is"
            )
        yield self.keys
        yield self.values

    # ---- the kinds -------------------------------------------------------------------------------

    @classmethod
    def nothing(cls, call: AttentionCall) -> Eviction:
        """Evict nothing."""
        return cls(call, call.keys, call.values, _all_tokens(call.keys))

    @classmethod
    def keep(cls, call: AttentionCall, positions: Tensor) -> Eviction:
        """Keep the keys and values at `positions` `(B, H_kv, n)` int64, ascending; `n >= 1`.

        Raises:
            PressError: if `positions` have another shape or dtype, or (on a CPU) are out of range
                or not ascending.
        """
        _check_indices("keep", call, positions, torch.int64, call.length)
        keys, values = gather_each(positions, call.keys, call.values)
        return cls(call, keys, values, positions)

    @classmethod
    def keep_per_head(
        cls, call: AttentionCall, mask: Tensor, carried: Mapping[str, Tensor] | None = None
    ) -> Eviction:
        """Keep the tokens in `mask` `(B, H_kv, S)` bool: their number may differ between heads.

        Args:
            carried: by name `(B, H_kv, w)`, values of the last `w` tokens; see `late`.

        Raises:
            PressError: if `mask` or `carried` have another shape or dtype.
        """
        _check_indices("keep_per_head", call, mask, torch.bool, call.length)
        _check_named("the carried of Eviction.keep_per_head is", call, carried or {})
        return replace(cls.nothing(call), head_mask=mask, carried=carried or {})

    @classmethod
    def keep_channels(cls, call: AttentionCall, channels: Tensor) -> Eviction:
        """Keep `channels` `(B, H_kv, d')` int64, ascending, of the keys, and all of the values.

        Raises:
            PressError: see `keep`.
        """
        _check_indices("keep_channels", call, channels, torch.int64, call.keys.shape[3])
        index = channels.unsqueeze(2).expand(-1, -1, call.length, -1)
        return replace(cls.nothing(call), keys=call.keys.gather(-1, index), channels=channels)

    @classmethod
    def late(cls, call: AttentionCall, mask: Tensor, carried: Mapping[str, Tensor]) -> Eviction:
        """Evict tokens of earlier forwards.

        Args:
            mask: `(B, H_kv, m)` bool, which to evict of the `m` tokens before the last `w`; all
                `m + w` tokens with a value in `call.carried`, and those of this call.
            carried: by name `(B, H_kv, w)`, values of the last `w` tokens.

        Raises:
            PressError: see `keep_per_head`.
        """
        width = _check_named("the carried of Eviction.late is", call, carried)
        for known in call.carried.values():
            n_scored = known.shape[2] + call.length
            _check_indices("late", call, mask, torch.bool, n_scored - width)
        return replace(cls.nothing(call), late_mask=mask, carried=carried)

    @classmethod
    def from_states(cls, call: AttentionCall, keys: Tensor, values: Tensor) -> Eviction:
        """Keep `keys` and `values`, from a press that reports no positions, as kvpress's do.

        Raises:
            PressError: if they are not shaped as states of some of the `S` tokens are.
        """
        return cls.of(call, (keys, values))

    @classmethod
    def of(cls, call: AttentionCall, returned: Any) -> Eviction:
        """What the `compress` of a press returned for `call`, an Eviction or keys and values.

        Raises:
            PressError: if it is neither, or does not fit `call`.
        """
        if not isinstance(returned, cls):
            is_several = isinstance(returned, (tuple, list, Iterator))
            given = tuple(returned) if is_several else (returned,)
            _check_states(call, given)
            keys, values = given
            whole = keys.shape[2] == call.length
            return cls(call, keys, values, _all_tokens(keys) if whole else None)
        made_for = returned.call
        if made_for.site is not call.site or made_for.keys.shape != call.keys.shape:
            raise PressError(
                f"compress returned an Eviction of {made_for.length} keys of {made_for.site.name} "
                f"for {call.length} of {call.site.name}; make one for each call"
            )
        keys = returned.keys if returned.channels is None else call.keys[:, :, : returned.length]
        _check_states(call, (keys, returned.values))
        return returned

    # ---- derived values --------------------------------------------------------------------------

    @property
    def length(self) -> int:
        """`n`: number of kept keys."""
        return int(self.keys.shape[2])

    @property
    def is_whole(self) -> bool:
        """Whether nothing is evicted, and no key or value changes."""
        same = self.keys is self.call.keys and self.values is self.call.values
        masks = self.head_mask, self.late_mask, self.rotary_positions
        return same and all(mask is None for mask in masks)

    @property
    def evicts(self) -> Evicts:
        """What a press has to declare to return it."""
        if self.channels is not None:
            return Evicts.CHANNELS
        if self.head_mask is not None or self.late_mask is not None:
            return Evicts.PER_HEAD
        return Evicts.TOKENS if self.length < self.call.length else Evicts.NOTHING

    @property
    def known_kept(self) -> Tensor:
        """Indices of the kept keys, `(B, H_kv, n)` int64.

        Raises:
            UnsupportedInputError: if the press did not report them.
        """
        if self.kept is None:
            raise UnsupportedInputError(
                "a press pruned without saying which tokens it kept, which a padded batch and any "
                f"press around it require; {REPORT_POSITIONS}"
            )
        return self.kept

    def next_call(self) -> AttentionCall:
        """The call over the kept tokens, for the next press.

        Raises:
            UnsupportedInputError: if the press did not report which keys it kept.
        """
        if self.is_whole:
            return replace(self.call, budget=None)
        call = self.call.narrowed(self.known_kept, self.keys, self.values)
        if self.rotary_positions is None:
            return call
        return replace(call, at=replace(call.at, rotary=self.rotary_positions))

    def then(self, second: Eviction) -> Eviction:
        """This and a `second` eviction, made for `next_call()`, as a single one for this call."""
        rotary = second.rotary_positions
        if rotary is None and self.rotary_positions is not None:
            rotary = self.rotary_positions.gather(-1, second.known_kept)
        kept = None if second.kept is None else self.known_kept.gather(-1, second.kept)
        return replace(
            second,
            call=self.call,
            kept=kept,
            rotary_positions=rotary,
            next_position=second.next_position or self.next_position,
        )

    def rerotated(self) -> Eviction:
        """The same with the keys rerotated to the positions `0 ... n - 1`; new tokens start at `n`.

        Raises:
            UnsupportedInputError: if the press did not report which keys it kept, or without RoPE.
        """
        n, rotary, left, keys = self.length, self.call.site.rotation, self.next_call(), self.keys
        if isinstance(rotary, NoRotation):  # this layer's keys do not depend on positions
            return self
        positions = torch.arange(n, device=keys.device).expand(keys.shape[:3])
        # A whole context may be at other positions: pruned before, or with position ids given.
        if n != self.call.length or not left.keys_are_at(positions):
            keys = rotary.rotate_to(left.keys_before_rope(), positions[:1, :1]).to(keys.dtype)
        return replace(self, keys=keys, rotary_positions=positions, next_position=n)


def _all_tokens(keys: Tensor) -> Tensor:
    """`(B, H_kv, n)` int64: indices of all `keys` `(B, H_kv, n, d)`."""
    return torch.arange(keys.shape[2], device=keys.device).expand(keys.shape[:3])


# ---- checks: of values only on a CPU, as reading them would wait for a GPU -----------------------


def _check_states(call: AttentionCall, given: tuple[Any, ...]) -> None:
    """Raise unless `given` are keys and values `(B, H_kv, n, d)` that may be kept of `call`.

    Raises:
        PressError: with what was given and what may be.
    """
    keys, values = call.keys, call.values
    are_states = len(given) == 2 and all(is_dense(x, keys) and x.ndim == 4 for x in given)
    n = given[0].shape[2] if are_states else 0
    allowed = [(x[:, :, :n].shape, x.dtype) for x in (keys, values)]
    if n and [(x.shape, x.dtype) for x in given] == allowed:
        return
    (batch, heads, length, d), d_values = keys.shape, values.shape[-1]
    shapes = f"({batch}, {heads}, n, {d}) and ({batch}, {heads}, n, {d_values})"
    raise PressError(
        f"compress returned {', '.join(map(described, given[:3])) or 'nothing'}; return an "
        f"Eviction, or keys and values {shapes} {keys.dtype} on {keys.device} with 1 <= n <= "
        f"{length}, taken from those that it was given"
    )


def memory_of(presses: Iterable[Any], call: AttentionCall) -> dict[str, Tensor]:
    """What the `remember` of those `presses` that remember returned for `call`, by name.

    Raises:
        PressError: with what one returned, if that is not `(B, H_kv, S)` by name, or if two return
            different values under one name.
    """
    found: dict[str, Tensor] = {}
    for press in (press for press in presses if press.all_needs & Needs.MEMORY):
        given, name = press.remember(call), type(press).__name__
        _check_named(f"{name}.remember returned", call, given, call.length)
        for key, values in given.items():
            if key in found and not torch.equal(found[key], values):
                raise PressError(
                    f"{name} remembers {key!r}, and so does another press of the same composition, "
                    "with other values; let each use a name of its own"
                )
            found[key] = values
    return found


def _check_named(given_by: str, call: AttentionCall, given: Any, width: int | None = None) -> int:
    """Raise unless `given` are tensors `(B, H_kv, w)` by name; with `width`, `w` is that.

    Returns:
        `w`; 0 if `given` is empty.

    Raises:
        PressError: with what was given, by which `given_by` says how.
    """
    is_named = isinstance(given, Mapping)
    values = list(given.values()) if is_named else [given]
    dense = is_named and all(is_dense(x, call.keys) and x.ndim == 3 for x in values)
    w = values[0].shape[2] if dense and values and width is None else width or 0
    shape = (*call.keys.shape[:2], w)
    if not dense or any(x.shape != shape for x in values):
        last = "w" if width is None else width
        raise PressError(
            f"{given_by} {', '.join(map(described, values))}; it has to be a dict of a tensor "
            f"({shape[0]}, {shape[1]}, {last}) on {call.keys.device} for each name"
        )
    return w


def _check_indices(
    kind: str, call: AttentionCall, given: Any, dtype: torch.dtype, size: int
) -> None:
    """Raise unless `given` is `(B, H_kv, size)` bool, or `(B, H_kv, n)` integers below `size`.

    Raises:
        PressError: with what was given and what `Eviction.<kind>` takes.
    """
    batch, heads, is_mask, found = *call.keys.shape[:2], dtype is torch.bool, described(given)
    if is_dense(given, call.keys) and given.ndim == 3 and given.dtype is dtype:
        n = given.shape[2]
        if given.shape[:2] == (batch, heads) and (n == size if is_mask else 1 <= n <= size):
            if is_mask or not is_readable(given) or torch.compiler.is_compiling():
                return
            low, high = map(int, given.aminmax())
            ascends = bool((given.diff(dim=-1) > 0).all())
            if low >= 0 and high < size and ascends:
                return
            found = f"indices from {low} to {high}{'' if ascends else ' that do not ascend'}"
    last = size if is_mask else f"1 <= n <= {size}"
    kinds = "" if is_mask else f", ascending indices from 0 to {size - 1}"
    raise PressError(
        f"Eviction.{kind} was given {found}; it takes a tensor ({batch}, {heads}, {last}) {dtype}"
        f"{kinds}; `.expand(*call.keys.shape[:2], -1)` gives all KV heads the same"
    )


def described(given: Any) -> str:
    """What a press gave, for an error message: shape and dtype of a tensor, or the type."""
    if not isinstance(given, Tensor) or given.is_nested:  # which has no shape
        return "a nested tensor" if isinstance(given, Tensor) else type(given).__name__
    kind = "tensor" if given.layout is torch.strided else "sparse tensor"
    return f"a {kind} {tuple(given.shape)} {given.dtype} on {given.device}"
