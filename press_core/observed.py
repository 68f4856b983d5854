"""The parts of an `AttentionCall`."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class Query:
    """The queries as a mechanism observed them.

    Attributes:
        states: `(B, H, q, d)`.
        is_rotated: whether RoPE has been applied to them.
    """

    states: Tensor
    is_rotated: bool = True


@dataclass(frozen=True, eq=False)
class Positions:
    """The positions of the tokens and keys of a call.

    Attributes:
        embeddings: cosines and sines of the `q` tokens, each `(1 or B, q, rotary channels)`, or
            None.
        ids: position ids of the `q` tokens, `(1 or B, q)` int64, or None if the model did not pass
            them on.
        tokens: `(B, H_kv, S)` int64, which of the `q` tokens each key belongs to; None: the last
            `q` keys belong to them, in order.
        rotary: `(1 or B, 1 or H_kv, S)` int64, the position that each key is rotated to; None: the
            one in `ids`.
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
    """When a call happens, and for which rows.

    Attributes:
        decoding: whether the layer held tokens before this forward.
        n_remaining: tokens of the context in later chunks, in a chunked prefill that is pruned
            chunk by chunk; None: the context is complete.
        n_steps: while decoding, forwards since the press last pruned the layer.
        n_forwards: while decoding, forwards over the layer in this scope.
        seen: tokens that the layer was given, evicted ones included, for each of the `B` rows,
            without padding.
        batch_rows: rows of the batch that the call is restricted to; None: all.
        held: while decoding, tokens that the layer held before this forward, for each row.
        occupied: `(B, S)` bool, which keys are of tokens, not padding; None: all, as in the calls
            that presses get.
    """

    decoding: bool = False
    n_remaining: int | None = None
    n_steps: int = 0
    n_forwards: int = 0
    seen: tuple[int, ...] | None = None
    batch_rows: tuple[int, ...] | None = None
    held: tuple[int, ...] | None = None
    occupied: Tensor | None = None
