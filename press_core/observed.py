"""What an `AttentionCall` is made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from press_core.model.sites import AttentionSite


class OpenScope(Protocol):
    """What a formula may ask of the scope that it runs in."""

    @property
    def sites(self) -> Sequence[AttentionSite]:
        """The attention modules that the press works on."""
        ...

    def prepared(self, press: Any) -> Any:
        """What `press.prepare(model)` gave when the scope was opened."""
        ...


@dataclass(frozen=True, eq=False)
class Query:
    """The query `(B, H, q, d)` as a mechanism found it.

    Attributes:
        is_rotated: whether RoPE has been applied to it.
    """

    states: Tensor
    is_rotated: bool = True


@dataclass(frozen=True, eq=False)
class Positions:
    """Where the tokens and the keys of a call stand.

    Attributes:
        embeddings: cosines and sines, each `(1 or B, q, rotary channels)`, or None.
        ids: `(1 or B, q)` int64, or None where the model did not pass them on.
        tokens: `(B, H_kv, S)` int64, which of the `q` tokens each key belongs to; None: the last
            `q` keys belong to them, in order.
        rotary: `(1 or B, 1 or H_kv, S)` int64, to which position each key is rotated; None: as
            `ids` says.
        bidirectional: `(1 or B, q, q)` bool, which later tokens each of the `q` tokens sees
            (within an image, in some models); None: none.
    """

    embeddings: tuple[Tensor, Tensor] | None = None
    ids: Tensor | None = None
    tokens: Tensor | None = None
    rotary: Tensor | None = None
    bidirectional: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Moment:
    """When a call happens, and to which rows.

    Attributes:
        decoding: whether the layer held tokens before this forward.
        n_remaining: tokens of the context that are still to come, in a chunked prefill that is
            pruned chunk by chunk; None: the context is complete.
        n_steps: forwards since the press pruned the layer last, while decoding.
        n_forwards: forwards that the scope has seen the layer through, while decoding.
        seen: tokens that the layer has seen of each of the `B` rows, padding left out.
        batch_rows: rows of the batch that this call is about; None: all.
    """

    decoding: bool = False
    n_remaining: int | None = None
    n_steps: int = 0
    n_forwards: int = 0
    seen: tuple[int, ...] | None = None
    batch_rows: tuple[int, ...] | None = None
