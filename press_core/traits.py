"""The traits that presses declare: what they read, what they evict, and when they act."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Flag, IntEnum, auto
from functools import reduce
from inspect import getattr_static
from operator import and_, or_
from typing import Any


class Needs(Flag):
    """What the formula of a press reads of a model, beyond the keys and values of each head."""

    NOTHING = 0
    QUERIES = auto()
    """The exact queries."""
    ROPE = auto()
    """Rotary position embeddings."""
    UNROTATED_KEYS = auto()
    """Keys before their rotation, if the model rotates them."""
    FORWARD = auto()
    """Hidden states of all tokens that it scores: it cannot score them again in later forwards."""
    HIDDEN_STATES = auto()
    """Hidden states of whichever tokens the call covers; while decoding, the buffered ones."""
    KEY_NORMS = auto()
    """Keys of different norms."""
    MEMORY = auto()
    """Values per token, stored from forward to forward; see `Press.remember`."""
    NEW_POSITIONS = auto()
    """Kept keys rotated to other positions."""
    LATER_QUERIES = auto()
    """Queries of tokens to come, expected to be those of the context, rotated on."""
    POSITIONS_ALONE = auto()
    """Positions only: it reads neither keys nor values."""
    SAME_FOR_ALL_HEADS = auto()
    """Nothing per head: all heads keep the same tokens."""
    ONLY = POSITIONS_ALONE | SAME_FOR_ALL_HEADS
    """Those that say what a press does not need: compositions have them if all their parts do."""

    @classmethod
    def of_parts(cls, parts: Iterable[Needs]) -> Needs:
        """The needs of a composition: the union of its parts', but of `ONLY` what all share."""
        known = list(parts)
        of_all = reduce(and_, known) if known else cls.NOTHING
        return (reduce(or_, known, cls.NOTHING) & ~cls.ONLY) | (of_all & cls.ONLY)


class Evicts(IntEnum):
    """What a press removes from a cache layer; of a composition, the maximum of its parts."""

    NOTHING = 0
    TOKENS = 1
    """The same number of tokens of each KV head."""
    PER_HEAD = 2
    """Tokens whose number may differ between KV heads."""
    CHANNELS = 3
    """Channels of the keys."""

    @property
    def needs_attention(self) -> bool:
        """Whether the pruned layer requires a special attention function."""
        return self >= Evicts.PER_HEAD


class Phase(Flag):
    """When a press acts."""

    NEVER = 0
    PREFILL = auto()
    """After each attention forward of a prefill into an empty layer."""
    DECODING = auto()
    """After each attention forward over a filled layer."""
    BEFORE_DECODING = auto()
    """Before a forward of the decoder over a filled cache."""
    BEFORE_DECODER = auto()
    """Before each forward of the decoder, whose arguments it may change."""
    AFTER_DECODER = auto()
    """After each forward of the decoder that completed a prefill."""
    CHUNKS = auto()
    """After every chunk of a chunked prefill, not only after the last one."""
    DECODER = BEFORE_DECODER | AFTER_DECODER
    IN_PREFILL = PREFILL | CHUNKS
    ON_CONTEXTS = IN_PREFILL | AFTER_DECODER
    BEHIND_CONTEXTS = DECODING | BEFORE_DECODING

    @property
    def in_prefill_only(self) -> bool:
        """Whether a press acts after attention forwards of a prefill, and after no others."""
        return self & ~(Phase.DECODER | Phase.CHUNKS) == Phase.PREFILL


def also_needs(cls: Any, more: Needs) -> None:
    """Add needs to those that a class of presses declares."""
    declared: Any = getattr_static(cls, "needs")
    if isinstance(declared, property):
        cls.needs = property(lambda self: declared.__get__(self) | more)
    elif isinstance(declared, Needs):  # else the press is refused, as it is constructed
        cls.needs = declared | more
