"""What a press decided about one attention call: an immutable value that it returns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any

import torch
from torch import Tensor

from press_core.call import AttentionCall
from press_core.errors import PressError, UnsupportedInputError
from press_core.model.rotary import NoRotation
from press_core.select import gather_each, is_dense, is_readable
from press_core.traits import Evicts, Needs

REPORT_POSITIONS = "let its compress return Eviction.keep(call, positions), or write a ScorerPress"
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

    def __getitem__(self, index: int | slice) -> Any:
        return tuple(self)[index]

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
        _require_indices("keep", call, positions, call.length)
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
        _require("Eviction.keep_per_head was given", mask, call, call.length, dtype=torch.bool)
        _require_named("the carried of Eviction.keep_per_head is", call, carried or {})
        return replace(cls.nothing(call), head_mask=mask, carried=carried or {})

    @classmethod
    def keep_channels(cls, call: AttentionCall, channels: Tensor) -> Eviction:
        """Keep `channels` `(B, H_kv, d')` int64, ascending, of the keys, and all of the values.

        Raises:
            PressError: see `keep`.
        """
        _require_indices("keep_channels", call, channels, call.keys.shape[3])
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
        _require_named("the carried of Eviction.late is", call, carried)
        width = max((x.shape[2] for x in carried.values()), default=0)
        for known in call.carried.values():
            n = known.shape[2] + call.length - width
            _require("Eviction.late was given", mask, call, n, dtype=torch.bool)
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
            _require_states(call, given)
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
        _require_states(call, (keys, returned.values))
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
        following = second.next_position or self.next_position
        return replace(
            second, call=self.call, kept=kept, rotary_positions=rotary, next_position=following
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


# ---- checks of what a press returns --------------------------------------------------------------


def memory_of(presses: Iterable[Any], call: AttentionCall) -> dict[str, Tensor]:
    """What the `remember` of those `presses` that remember returned for `call`, by name.

    Raises:
        PressError: with what one returned, if that is not `(B, H_kv, S)` by name, or if two return
            different values under one name.
    """
    found: dict[str, Tensor] = {}
    for press in (press for press in presses if press.all_needs & Needs.MEMORY):
        given, name = press.remember(call), type(press).__name__
        _require_named(f"{name}.remember returned", call, given, call.length)
        for key, values in given.items():
            if key in found and not torch.equal(found[key], values):
                raise PressError(
                    f"{name} remembers {key!r}, and so does another press of the same composition, "
                    "with other values; let each use a name of its own"
                )
            found[key] = values
    return found


Size = int | tuple[int, float]
"""The size of a dimension, or the smallest and the largest size."""


def _require(
    given_by: str, given: Any, call: AttentionCall, *sizes: Size, dtype: torch.dtype | None = None
) -> None:
    """Raise unless `given` is a tensor `(B, H_kv, *sizes)` to use with the keys of `call`.

    Args:
        given_by: the beginning of the message: who gave it, and how.
        dtype: None: any.

    Raises:
        PressError: with what was given, and what it has to be.
    """
    shape = [n if isinstance(n, tuple) else (n, n) for n in (*call.keys.shape[:2], *sizes)]
    fits = is_dense(given, call.keys) and given.ndim == len(shape) and dtype in (None, given.dtype)
    if fits and all(low <= n <= high for n, (low, high) in zip(given.shape, shape, strict=True)):
        return
    allowed = [f"{low}" if low == high else f"{low} to {high}" for low, high in shape]
    kind = "tensor" if dtype is None else f"{dtype} tensor"
    hint = "; `.expand(*call.keys.shape[:2], -1)` gives all KV heads the same"
    raise PressError(
        f"{given_by} {described(given)}; it has to be a {kind} ({', '.join(allowed)}) on "
        f"{call.keys.device}{hint if len(sizes) == 1 else ''}"
    )


def _require_states(call: AttentionCall, given: tuple[Any, ...]) -> None:
    """Raise unless `given` are keys and values `(B, H_kv, n, d)` that may be kept of `call`."""
    if len(given) != 2:
        found = ", ".join(map(described, given[:3])) or "nothing"
        raise PressError(f"compress returned {found}; return an Eviction, or keys and values")
    n: Size = (1, call.length)
    for states, like in zip(given, (call.keys, call.values), strict=True):
        _require("compress returned", states, call, n, like.shape[3], dtype=like.dtype)
        n = states.shape[2]


def _require_named(given_by: str, call: AttentionCall, given: Any, width: Size = (0, inf)) -> None:
    """Raise unless `given` are tensors `(B, H_kv, w)` by name, with one `w` of the size `width`."""
    if not isinstance(given, Mapping):
        raise PressError(f"{given_by} {described(given)}; it has to be a dict of tensors by name")
    for values in given.values():
        _require(given_by, values, call, width)
        width = values.shape[2]


def _require_indices(kind: str, call: AttentionCall, given: Any, size: int) -> None:
    """Raise unless `given` are ascending indices `(B, H_kv, n)` below `size`."""
    given_by = f"Eviction.{kind} was given"
    _require(given_by, given, call, (1, size), dtype=torch.int64)
    if not is_readable(given) or torch.compiler.is_compiling():
        return  # reading values would wait for a GPU
    low, high = map(int, given.aminmax())
    if low < 0 or high >= size or not bool((given.diff(dim=-1) > 0).all()):
        raise PressError(
            f"{given_by} indices from {low} to {high}; they have to ascend, from 0 to {size - 1}"
        )


def described(given: Any) -> str:
    """What a press gave, for an error message: shape and dtype of a tensor, or the type."""
    if not isinstance(given, Tensor) or given.is_nested:  # which has no shape
        return "a nested tensor" if isinstance(given, Tensor) else type(given).__name__
    kind = "tensor" if given.layout is torch.strided else "sparse tensor"
    return f"a {kind} {tuple(given.shape)} {given.dtype} on {given.device}"
