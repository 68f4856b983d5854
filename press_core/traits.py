"""What presses declare of themselves."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Flag, IntEnum, auto
from functools import reduce
from operator import and_, or_


class Needs(Flag):
    """What the formula of a press reads of a model, beyond the keys and values of each head."""

    NOTHING = 0
    QUERIES = auto()
    """The exact queries."""
    ROPE = auto()
    """Rotary position embeddings."""
    FORWARD = auto()
    """The hidden states of all tokens that it scores: it cannot score them again later."""
    HIDDEN_STATES = auto()
    """Those of its calls, whether these are about all tokens or the latest alone."""
    KEY_NORMS = auto()
    """Keys of different norms."""
    MEMORY = auto()
    """Something of each token, kept from forward to forward; see `Press.remember`."""
    NEW_POSITIONS = auto()
    """Kept keys rotated to other positions."""
    POSITIONS_ALONE = auto()
    """Not even keys and values: it goes by where tokens stand."""
    SAME_FOR_ALL_HEADS = auto()
    """No head by itself: all keep the same tokens."""

    @classmethod
    def of_parts(cls, parts: Iterable[Needs]) -> Needs:
        """What a composition needs: all that its parts do; the last two if all of them do."""
        known = list(parts)
        only = cls.POSITIONS_ALONE | cls.SAME_FOR_ALL_HEADS
        of_all = reduce(and_, known) if known else cls.NOTHING
        return (reduce(or_, known, cls.NOTHING) & ~only) | (of_all & only)


class Evicts(IntEnum):
    """What a press takes out of a cache layer; a composition takes the most of its parts."""

    NOTHING = 0
    TOKENS = 1
    """As many of each KV head."""
    PER_HEAD = 2
    """Other tokens, and another number, of each KV head."""
    CHANNELS = 3
    """Channels of the keys."""

    @property
    def needs_attention(self) -> bool:
        """Whether what is left can be read only by an attention function of its own."""
        return self >= Evicts.PER_HEAD


class Phase(Flag):
    """When a press acts."""

    NEVER = 0
    PREFILL = auto()
    """After each attention forward that brings a context into an empty layer."""
    DECODING = auto()
    """After all other attention forwards."""
    BEFORE_DECODING = auto()
    """Before a forward of the decoder over a filled cache."""
    BEFORE_DECODER = auto()
    """Before each forward of the decoder, whose arguments it may change."""
    AFTER_DECODER = auto()
    """After each of them that brought a context."""
    CHUNKS = auto()
    """After every chunk of a prefill in chunks, rather than once all of it is there."""
    DECODER = BEFORE_DECODER | AFTER_DECODER
    IN_PREFILL = PREFILL | CHUNKS
    ON_CONTEXTS = IN_PREFILL | AFTER_DECODER
