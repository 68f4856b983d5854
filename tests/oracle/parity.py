"""What a side holds after a case, and how far two sides agree."""

from functools import cache
from typing import NamedTuple

import torch

from tests.oracle.cases import press_of
from tests.oracle.running import held_after, model_for


class Agreement(NamedTuple):
    """How far what two presses hold agrees.

    Attributes:
        heads: KV heads that were compared, over layers and rows.
        same: those that hold the same tokens, and the same keys of them.
        first: the first head that does not, in words; empty where all do.
    """

    heads: int
    same: int
    first: str = ""

    def __bool__(self):
        return self.heads == self.same


@cache
def held_by(whose, case, ratio=0.5):
    """What the press of `"hooks"`, `"patches"` or `"kvpress"` holds."""
    press = press_of(case.press, whose, ratio)
    return held_after(case.run, press, model_for(whose, case.setting))


@cache
def agreement(case, ratio, mechanism):
    return compare(held_by(mechanism, case, ratio), held_by("kvpress", case, ratio))


def compare(ours, theirs):
    """Head by head, whatever the order in the cache."""
    assert [len(layer) for layer in ours] == [len(layer) for layer in theirs]
    heads = same = 0
    first = ""
    for index, layers in enumerate(zip(ours, theirs, strict=True)):
        for number, pair in enumerate(zip(*layers, strict=True)):
            mine, other = (head.in_time() for head in pair)
            heads += 1
            if mine.kept != other.kept:
                only = [
                    sorted(set(a.kept) - set(b.kept)) for a, b in ((mine, other), (other, mine))
                ]
                found = f"{len(mine.kept)} kept, {len(other.kept)} by kvpress; differing {only}"
            # Cosines and sines are float32 on both sides, so turned keys are no better than that.
            elif not torch.allclose(mine.keys, other.keys, rtol=0, atol=1e-4):
                found = f"keys differ by {(mine.keys - other.keys).abs().max():.1e}"
            # Merged values are float32 in kvpress; all others were found bit for bit.
            elif not torch.allclose(mine.values, other.values, rtol=0, atol=1e-6):
                found = f"values differ by {(mine.values - other.values).abs().max():.1e}"
            else:
                same += 1
                continue
            first = first or f"layer {index}, head {number}: {found}"
    return Agreement(heads, same, first)
