"""What a press decided about one attention call: a value that it returns and nobody changes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from press_core.call import AttentionCall
from press_core.errors import UnsupportedInputError
from press_core.model.rotary import NoRotation
from press_core.select import gather_each

REPORT_POSITIONS = (
    "let its compress return Eviction.keep(call, positions), or write it as a ScorerPress"
)
"""What is advised to a press that returns keys and values and no more."""


@dataclass(frozen=True, eq=False)
class Eviction:
    """What is left of the keys and values of a call, and what is known of them.

    Made by one of the constructors, one for each kind: `nothing`, `keep` (as many tokens of each
    KV head), `keep_per_head`, `keep_channels`, `late` and `from_states`. `n` counts what is left of
    the `S` keys. Unpacks into keys and values, as kvpress's `compress` returns them.

    Attributes:
        call: what was observed.
        keys, values: `(B, H_kv, n, d)`.
        kept: `(B, H_kv, n)` int64, which of the `S` keys those are; None: the press did not say.
        rotary_positions: `(B, H_kv, n)` int64, to which positions the keys were rerotated; None:
            they are rotated as they were.
        next_position: the position from which later tokens continue, where keys were rerotated.
        head_mask: `(B, H_kv, n)` bool, which of those each KV head keeps, where heads differ.
        channels: `(B, H_kv, d')` int64, which channels of the keys are left, where some are not.
        late_mask: `(B, H_kv, m)` bool, which to evict of the `m` tokens before the last `w`.
        carried: by name `(B, H_kv, ...)`, what the press finds again in `call.carried`; of heads
            that hold different numbers of tokens, something of each of the last `w`.
        is_whole: whether everything is left as it was.
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
    is_whole: bool = False

    def __iter__(self) -> Iterator[Tensor]:
        if not (self.head_mask is None and self.channels is None and self.late_mask is None):
            raise UnsupportedInputError(
                "what is left here differs from head to head, or in the channels of keys, which a "
                "pair of keys and values does not tell: return the Eviction as it is"
            )
        yield self.keys
        yield self.values

    # ---- the kinds -------------------------------------------------------------------------------

    @classmethod
    def nothing(cls, call: AttentionCall) -> Eviction:
        """Everything stays."""
        return replace(cls._all(call), is_whole=True)

    @classmethod
    def keep(cls, call: AttentionCall, positions: Tensor) -> Eviction:
        """The keys and values at `positions` `(B, H_kv, n)`, ascending, stay."""
        keys, values = gather_each(positions, call.keys, call.values)
        return cls(call, keys, values, positions)

    @classmethod
    def keep_per_head(
        cls, call: AttentionCall, mask: Tensor, carried: Mapping[str, Tensor] | None = None
    ) -> Eviction:
        """Each KV head keeps its own number of tokens: `mask` `(B, H_kv, S)` bool."""
        return replace(cls._all(call), head_mask=mask, carried=carried or {})

    @classmethod
    def keep_channels(cls, call: AttentionCall, channels: Tensor) -> Eviction:
        """Of the keys the `channels` `(B, H_kv, d')` int64 stay, ascending; values are whole."""
        index = channels.unsqueeze(2).expand(-1, -1, call.length, -1)
        return replace(cls._all(call), keys=call.keys.gather(-1, index), channels=channels)

    @classmethod
    def late(cls, call: AttentionCall, mask: Tensor, carried: Mapping[str, Tensor]) -> Eviction:
        """Tokens that came earlier go now.

        Args:
            mask: `(B, H_kv, m)` bool, which to evict of the `m` tokens before the last `w`.
            carried: by name `(B, H_kv, w)`, of those last ones.
        """
        return replace(cls._all(call), late_mask=mask, carried=carried)

    @classmethod
    def from_states(cls, call: AttentionCall, keys: Tensor, values: Tensor) -> Eviction:
        """What a press returned that tells keys and values only, as one for kvpress does."""
        whole = keys.shape[2] == call.length
        return cls(call, keys, values, _all_tokens(keys) if whole else None)

    @classmethod
    def _all(cls, call: AttentionCall) -> Eviction:
        return cls(call, call.keys, call.values, _all_tokens(call.keys))

    @classmethod
    def of(cls, call: AttentionCall, returned: Any) -> Eviction:
        """What the `compress` of a press returned about `call`."""
        return returned if isinstance(returned, cls) else cls.from_states(call, *returned)

    # ---- what follows from it --------------------------------------------------------------------

    @property
    def length(self) -> int:
        """`n`: how many keys are left."""
        return int(self.keys.shape[2])

    @property
    def known_kept(self) -> Tensor:
        """Which keys are left, `(B, H_kv, n)` int64.

        Raises:
            UnsupportedInputError: if the press did not say.
        """
        if self.kept is None:
            raise UnsupportedInputError(
                "a press pruned without saying which tokens it kept, and that matters to what "
                f"comes after it; {REPORT_POSITIONS}"
            )
        return self.kept

    def next_call(self) -> AttentionCall:
        """The call as the next press is to see it.

        Raises:
            UnsupportedInputError: if the press did not say which keys are left.
        """
        if self.is_whole:
            return replace(self.call, budget=None)
        call = self.call.narrowed(self.known_kept, self.keys, self.values)
        if self.rotary_positions is None:
            return call
        return replace(call, at=replace(call.at, rotary=self.rotary_positions))

    def then(self, later: Eviction) -> Eviction:
        """Both as one, `later` decided about `next_call()`; its positions count in this call's."""
        rotary = later.rotary_positions
        if rotary is None and self.rotary_positions is not None:
            rotary = self.rotary_positions.gather(-1, later.known_kept)
        kept = self.kept
        if kept is not None:
            kept = None if later.kept is None else kept.gather(-1, later.kept)
        return replace(
            later,
            call=self.call,
            kept=kept,
            rotary_positions=rotary,
            next_position=later.next_position or self.next_position,
            is_whole=self.is_whole and later.is_whole,
        )

    def rerotated(self) -> Eviction:
        """The same with the keys at the positions `0 ... n - 1`, where later tokens continue.

        Raises:
            UnsupportedInputError: if the press did not say which keys are left.
        """
        n, rotary, left, keys = self.length, self.call.site.rotary, self.next_call(), self.keys
        assert rotary is not None
        if isinstance(rotary, NoRotation):  # its keys are at every position alike
            return self
        positions = torch.arange(n, device=keys.device).expand(keys.shape[:3])
        # A whole context may lie elsewhere: pruned before, or given other positions.
        is_there = n == self.call.length and left.lie_at(positions)
        if not is_there:
            keys = rotary.rotate_to(left.keys_before_rope(), positions[:1, :1]).to(keys.dtype)
        return replace(self, keys=keys, rotary_positions=positions, next_position=n, is_whole=False)


def _all_tokens(keys: Tensor) -> Tensor:
    """`(B, H_kv, n)`: every one of `keys` `(B, H_kv, n, d)`."""
    return torch.arange(keys.shape[2], device=keys.device).expand(keys.shape[:3])
