"""Findings, tables and the figure of `experiments.questions.throughput`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from experiments.framework.experiment import Evidence, Finding
from experiments.framework.frames import frame_table
from experiments.framework.intervals import METHOD, bracket, bracketed
from experiments.framework.options import size_of
from experiments.framework.plots import NO_PRESS, press_label, ratio_figure
from experiments.framework.tables import ResultTable
from experiments.framework.wording import sentences
from experiments.questions.throughput.measuring import KEPT, PRECISION
from experiments.testbed.timed_models import EAGER, WAYS, Way

AS_MUCH = 1.1
"""Largest ratio of times to first token, or of bytes to those expected, that counts as no more."""


def _in(way: Way, table: pd.DataFrame) -> pd.DataFrame:
    return table[(table["run"] == way.run) & (table["cache"] == way.cache)]


# ---- findings ------------------------------------------------------------------------------------

_finding = sentences(__file__)
_DECODING = {"speed": EAGER, "compiled": WAYS[-1]}
"""The way to run that a finding is about, by its name."""


def _quoted(row: Any, *names: str) -> dict[str, Any]:
    """What a sentence says of a condition, with intervals of the columns `names`."""
    bold = {n: f"**{row[n]:.2f}**{bracket(row[f'{n}_low'], row[f'{n}_high'])}" for n in names}
    return {"press": press_label(row["press"]), "ratio": row["ratio"], **bold}


def _at(row: Any) -> str:
    return f"{row['context']:,} tokens, batch {row['batch']}"


def on_speed(table: pd.DataFrame) -> Iterator[Finding]:
    """How much faster decoding is with a press, here and in kvpress, and the size of its cache.

    Presses that evict nothing before the first token, as where a context is too short for them, are
    in the table only.
    """
    size = ["context", "batch", "run", "cache"]
    evicts = table["bytes"] < table.groupby(size)["bytes"].transform("max")
    for name, way in _DECODING.items():
        hooked = _in(way, table[evicts & (table["mechanism"] == "hook")])
        for best in hooked.sort_values(["context", "batch", "speed"]).to_dict("records")[-1:]:
            low, high = best["speed_low"], best["speed_high"]
            verdict = "works" if low > 1 else "costs" if high < 1 else None
            yield _finding(name, verdict, at=_at(best), **_quoted(best, "speed"))
    theirs = _in(EAGER, table[table["mechanism"] == "kvpress"]).sort_values("speed_over_hook")
    for worst in theirs.to_dict("records")[:1]:
        yield _finding("kvpress", at=_at(worst), **_quoted(worst, "speed_over_hook"))
    pruned = table[evicts & (table["press"] != NO_PRESS)]
    over = (pruned["bytes"] / pruned.get("predicted", float("nan"))).dropna()  # not for kvpress
    if len(over):
        freed = "works" if over.max() <= AS_MUCH else None
        by = " and ".join(pruned.loc[over.index, "press"].map(press_label).unique())
        yield _finding("bytes", freed, Evidence.BYTES, by=by, most=over.max(), n=len(over))


def on_first(table: pd.DataFrame) -> Iterator[Finding]:
    """How many presses do not delay the first token, of those that evict before it."""
    ends = ["first_low", "first_high", "first"]  # without an interval, the time is both its ends
    whole = table.loc[table["press"] == NO_PRESS, "bytes"].max()
    slowest = table[table["bytes"] < whole].groupby("press")[ends].max().bfill(axis=1)
    counts = dict(zip(("most", "least", "soon"), (slowest <= AS_MUCH).sum(), strict=True))
    verdict = "works" if counts["least"] > len(slowest) / 2 else "costs"
    tokens = table["context"].iloc[0]
    yield _finding("first", verdict, n=len(slowest), times=AS_MUCH, tokens=tokens, **counts)


def on_fits(table: pd.DataFrame) -> Iterator[Finding]:
    """How much longer a context fits with a press."""
    best = table.sort_values("measured").iloc[-1]
    whole = table.loc[table["press"] == NO_PRESS, "measured"].max()
    if best["press"] != NO_PRESS and whole:
        said = _quoted(best) | {"limit": size_of(best["limit"])}
        longer = best["measured"] / whole
        fits = "works" if longer > 1 + 2 * PRECISION else None  # both are known to so much
        yield _finding("fits", fits, Evidence.BYTES, longer=longer, **said)


def on_kvpress(table: pd.DataFrame) -> Iterator[Finding]:
    """How many presses spend less time in a prefill than kvpress's; decode steps are excluded."""
    ratios = table.loc[table["decoded"] == 0, "ratio"]
    spread = {"low": ratios.min(), "high": ratios.max(), "mean": np.exp(np.log(ratios).mean())}
    yield _finding("inside", faster=int((ratios < 1).sum()), n=len(ratios), **spread)


# ---- tables and the figure -----------------------------------------------------------------------


def _named(table: pd.DataFrame) -> pd.Series[str]:
    """Press names with their ratios, such as `SnapKV 80%`."""
    shares = table["ratio"].map(" {:.0%}".format).where(table["ratio"] > 0, "")
    return table["press"].map(press_label) + shares


def _column(table: pd.DataFrame, name: str) -> list[str]:
    low, high = f"{name}_low", f"{name}_high"
    rows = table.to_dict("records")
    return [bracketed(row, name, low=low, high=high).replace("nan", "") for row in rows]


def show_speeds(table: pd.DataFrame) -> ResultTable:
    """A row per condition, size and way to run."""
    bare = _in(EAGER, table[(table["press"] == NO_PRESS) & (table["ratio"] == 0)])
    whole = "; ".join(map("{:,.0f} ms, {:,.0f}/s".format, bare["first_ms"], bare["tokens_per_s"]))
    note = (
        f"{table['model'].iloc[0]}: time to first token and tokens per second over those without a "
        f"press ({whole}), and over those of a context of only as many tokens as are kept (the "
        f"press is then called no press, with a share) and of hooks in the same interpreter, with "
        f"{METHOD} over rounds; MiB of the cache, and peak MiB beyond the loaded model:"
    )
    mib = table.reindex(columns=["bytes", "peak"]) / 2**20
    shown = {
        "tokens": table["context"].map("{:,}".format),
        "batch": table["batch"],
        "runs": table["run"] + ", " + table["cache"],
        "press": _named(table),
        "by": table["mechanism"],
        "first token": _column(table, "first"),
        "tokens/s": _column(table, "speed"),
        "over kept": _column(table, KEPT),
        "over hooks": _column(table, "speed_over_hook"),
        "cache": mib["bytes"].map("{:,.1f}".format),
        "peak": mib["peak"].map("{:,.1f}".format, na_action="ignore").fillna(""),
    }
    return frame_table(note, pd.DataFrame(shown), left=5)


def show_fits(table: pd.DataFrame) -> ResultTable:
    """A row per press."""
    first = table.iloc[0]
    limit = size_of(first["limit"])
    note = f"{first['model']}: longest context with batch {first['batch']} that fits in {limit}:"
    shown = {"press": _named(table), "tokens": table["measured"].map("{:,}".format)}
    return frame_table(note, pd.DataFrame(shown))


def show_kvpress(table: pd.DataFrame) -> ResultTable:
    """A row per press, the lowest ratio first; then those with tokens decoded, too."""
    rows = table.sort_values(["decoded", "ratio"])
    note = f"Time inside a press over kvpress's, decoding included, with {METHOD} over rounds:"
    shown = {
        "press": rows["press"].map(press_label),
        "tokens": rows["tokens"].map("{:,}".format),
        "decoded": rows["decoded"],
        "ours / kvpress": [bracketed(row, "ratio") for row in rows.to_dict("records")],
    }
    return frame_table(note, pd.DataFrame(shown))


def draw_speeds(table: pd.DataFrame) -> Figure:
    """Tokens per second over those without a press, a panel per size and way to run."""
    rows = table[table["press"] != NO_PRESS]
    rows = rows.assign(label=_named(rows) + ", " + rows["mechanism"], ratio=rows["speed"])
    rows = rows.rename(columns={"speed_low": "low", "speed_high": "high"})
    ways: Any = rows.groupby(["context", "batch", "run", "cache"], sort=False)
    panels = {
        f"{n:,} tokens, batch {batch}: {run}, {cache} cache": of_way
        for (n, batch, run, cache), of_way in ways
    }
    label = (
        f"Tokens per second of {table['model'].iloc[0]} over those without a press: medians with "
        f"{METHOD} over rounds"
    )
    return ratio_figure(panels, label, "tokens per second / those without a press")
