"""What a model answered, to be held against what it should have answered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import Cache

from experiments.testbed.compare import Inputs
from experiments.testbed.families import VOCABULARY
from press_core import RaggedLayer


@dataclass(frozen=True)
class Response:
    """Logits of some forwards, and what a cache then held.

    Attributes:
        logits: `(1, q, vocabulary)` of each forward; or whatever a model without a cache answers.
        states: keys and values of each layer of the cache, `(1, H_kv, n, d)`.
        seen: tokens that each layer has seen; empty if that does not matter.
    """

    logits: Sequence[Tensor]
    states: Sequence[Tensor] = ()
    seen: Sequence[int] = ()

    def difference(self, other: Response, tolerance: float = 0.0) -> str:
        """In what `other` differs, in a few words; empty if in nothing.

        Args:
            tolerance: by how much numbers may differ, as a share of the largest; 0: in no bit.
        """
        mine, theirs = ([states.shape for states in each.states] for each in (self, other))
        if mine != theirs:
            slots = ([shape[2] for shape in shapes[::2]] for shapes in (theirs, mine))
            return "layers hold {} slots, not {}".format(*slots)
        if self.seen != other.seen:
            return f"has seen {max(other.seen)} tokens, not {max(self.seen)}"
        for what in ("logits", "states"):
            for own, its in zip(getattr(self, what), getattr(other, what), strict=True):
                off = float((own - its).abs().max() / own.abs().max())
                if not (torch.equal(own, its) or off <= tolerance):
                    return f"{what} off by {off:.2g} of the largest"
        return ""


def states_of(cache: Cache) -> list[Tensor]:
    """Copies of the keys and values of each layer; of head-wise ones, filled up to the longest."""
    states: list[Tensor] = []
    for layer in cache.layers:
        ragged = isinstance(layer, RaggedLayer)
        pair = layer.dense()[:2] if ragged else (layer.keys, layer.values)
        states += [tensor.clone() for tensor in pair]
    return states


def random_tokens(length: int) -> Tensor:
    """`(1, length)` random token ids, always the same."""
    return Inputs.random(VOCABULARY, [length]).context
