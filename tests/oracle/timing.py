"""Time that presses take, against kvpress: `python -m tests.oracle.timing`.

What is measured is what a press adds to a model: all hooks that its scope registers, whatever they
are for, and the end of the scope (where KVzip of kvpress does its work), on a `StandIn` of 2
layers, 16 query and 4 KV heads of 64, float32. Both sides run in turn, round by round; times are
the medians per layer, the ratio is the median of the ratios of the rounds, `low` and `high` its 95%
bootstrap interval. Each press has a process of its own: how long a large temporary takes depends on
what was allocated before.

kvpress evicts from single heads by a mask that it works in at every later step. So of the presses
that do, there are two rows: one as of all others, and one with 16 tokens decoded, in which cache
and attention count on both sides. (Not of KVzip, which in kvpress evicts only after decoding.)
"""

import os
import sys
from dataclasses import dataclass
from multiprocessing import get_context
from time import perf_counter

import numpy as np
import pandas as pd
import torch

import hooks_impl
from experiments.framework.intervals import LEAST, median_of
from experiments.framework.timing import no_garbage_collection
from tests.oracle import handed
from tests.oracle.cases import press_of
from tests.oracle.differences import NOT_IN_KVPRESS
from tests.oracle.stand_in import N_HEADS, N_KV, N_LAYERS, WIDTH, D, StandIn
from tests.support import table_beside

LENGTH = 8192
"""Tokens of the context."""

ROUNDS, SECONDS = 9, 1.5
"""Rounds per press, and after how much time a press gets no more (but `LEAST`)."""

DECODED = 16
"""Tokens decoded with `HEADWISE` presses."""

OTHERWISE = table_beside(__file__, "timing")
TIMED = {
    name: f"{name}(0.5)"
    for name in hooks_impl.PRESSES
    if name not in OTHERWISE["of a model"] and name not in NOT_IN_KVPRESS
}
ARGUMENTS = table_beside(__file__, "timed")
TIMED |= {press.partition("(")[0]: press for press in ARGUMENTS}
"""By name: what is timed."""

HEADWISE = OTHERWISE["by head"]
"""Presses of which kvpress leaves the evicting to the steps that follow."""

GIVEN = handed.GIVEN | {
    name: fit.of({part: tensor.float() for part, tensor in fit.tensors.items()})
    for name, fit in handed.learned(N_LAYERS, N_HEADS, N_KV, D, WIDTH).items()
}


@dataclass
class Row:
    """What one press takes per layer, for a context of so many `tokens`, `decoded` ones after it.

    Attributes:
        low, high: the interval of the ratio.
        units: the ratio of each round.
    """

    press: str
    tokens: int
    decoded: int
    rounds: int
    ours_ms: float
    kvpress_ms: float
    ratio: float
    low: float
    high: float
    units: str


class Comparison:
    """One press, here and in kvpress."""

    def __init__(self, name):
        self.name, self.then = name, 4 if "Decoding" in name or name == "CAMPress" else 0
        self.stand_in = StandIn(LENGTH)
        self.ids = self.stand_in.ids[:, :LENGTH].clone()
        if name == "FinchPress":
            self.ids[0, -65] = handed.DELIMITER

    def milliseconds(self, whose, decoded):
        press = press_of(TIMED[self.name], whose, 0.5, GIVEN)
        then, attending = decoded or self.then, decoded > 0
        with no_garbage_collection():
            return 1000 * self.stand_in.measure(press, self.ids, then, attending) / N_LAYERS

    def row(self, decoded=0):
        sides = "hooks", "kvpress"
        rounds = []
        began = perf_counter()
        for number in range(-1, ROUNDS):
            if number >= LEAST and perf_counter() - began > SECONDS:
                break
            turns = sides[:: -1 if number % 2 else 1]
            times = {whose: self.milliseconds(whose, decoded) for whose in turns}
            if number >= 0:  # the first warms up
                rounds.append([times[whose] for whose in sides])
        ratios = median_of("ratio", [ours / theirs for ours, theirs in rounds])
        times_of_sides = np.median(rounds, axis=0).tolist()
        n_decoded = decoded or self.then
        return Row(self.name, LENGTH, n_decoded, len(rounds), *times_of_sides, **ratios)


def _compare(name):
    """The rows of a press."""
    with handed.knowing_prompts():
        comparison = Comparison(name)
        return [comparison.row(n) for n in ((0, DECODED) if name in HEADWISE else (0,))]


def main(names):
    threads = torch.get_num_threads()
    print(f"torch {torch.__version__}, {threads} threads, {os.cpu_count()} cores", file=sys.stderr)
    context, found = get_context("forkserver"), list[Row]()
    context.set_forkserver_preload(["kvpress", "hooks_impl"])
    with context.Pool(1, maxtasksperchild=1) as processes:
        for rows in processes.imap(_compare, names or list(TIMED)):
            found += rows
            print(*rows, sep="\n", file=sys.stderr, flush=True)
    table = pd.DataFrame(found)
    for decoded, ratios in table.groupby("decoded")["ratio"]:
        mean = np.exp(np.log(ratios).mean())
        print(f"{decoded} tokens decoded: geometric mean {mean:.2f}", file=sys.stderr)
    table.to_csv(sys.stdout, index=False, float_format="%.4g")


if __name__ == "__main__":
    main(sys.argv[1:])
