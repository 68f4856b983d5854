"""Other seeds: which findings hold is counted by hand, and experiments get the seeds asked for."""

from dataclasses import dataclass

import pandas as pd
import pytest

from experiments.framework.experiment import Evidence, Experiment, Finding
from experiments.framework.results import read_table
from experiments.questions import seeds
from tests.experiments.tiny import CASES, succeeded


@dataclass(frozen=True)
class Options:
    seed: int = 40
    samples: int = 9


class Drawing(Experiment[Options]):
    """Tell what it was asked."""

    name, title, evidence = "drawing", "Drawing", Evidence.MODEL
    full = quick = Options()

    def measure(self, options, progress):
        return {"drawing": pd.DataFrame([{"seed": options.seed, "samples": options.samples}])}

    def findings(self, tables):
        (row,) = tables["drawing"].to_dict("records")
        wide = f"Answers: **{row['seed']}%** [{row['seed'] - 5}, {row['seed'] + 5}]."
        narrow = f"Gain: **-{row['seed']}** points [-40.5, -39.5] of {row['samples']}."
        return [
            Finding("wide", wide),
            Finding("narrow", narrow),
            Finding("bare", f"Alone **{row['seed']}**."),
            Finding("same", "Always **3**."),
            Finding("bits", f"Bits **{row['seed']}** differ.", evidence=Evidence.BITS),
        ]


class Redrawn(Drawing):
    """Tell what it was asked, again."""

    name, redrawn = "redrawn", Options()


def test_experiments_are_run_from_each_seed(monkeypatch, tmp_path):
    monkeypatch.setattr(seeds, "_DRAWING", ("redrawn",))
    monkeypatch.setattr(seeds, "load_experiments", lambda: [Drawing(), Redrawn()])
    result = succeeded("seeds", "--shift", "0,2", "--samples", "7", "--output", tmp_path)
    table = read_table(tmp_path / "seeds.csv")
    assert table["finding"].tolist() == ["wide", "narrow", "bare", "same"] * 2  # and no bits
    assert table["seed"].tolist() == [40] * 4 + [42] * 4
    assert table["number"].tolist() == [40, -40, 40, 3, 42, -42, 42, 3]
    assert table.loc[0, ["low", "high"]].tolist() == [35, 45]
    assert table.loc[1, ["low", "high"]].tolist() == [-40.5, -39.5]
    assert table["text"].str.endswith("of 7.").sum() == 2
    shown = " ".join(result.output.split())
    assert all(said in shown for said in ("1 of 2 findings with an interval stay", "42 [37, 47]"))


@pytest.mark.parametrize(("numbers", "low", "high", "holds"), CASES["holding"])
def test_a_finding_holds_if_it_stays_in_the_first_interval(numbers, low, high, holds):
    wide = [(low, high), (-9, 9), (-9, 9)]
    rows = [
        {"experiment": "e", "finding": "f", "number": n, "low": ends[0], "high": ends[1]}
        for n, ends in zip(numbers, wide, strict=True)
    ]
    assert seeds.holding(pd.DataFrame(rows)).to_dict() == {("e", "f"): holds}
