"""Findings, tables and the figure of `experiments.questions.throughput`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
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

AS_MUCH = 1.1
"""Largest ratio of times to first token, or of bytes to those expected, that counts as no more."""


def _pressed(table: pd.DataFrame) -> pd.DataFrame:
    return table[table["press"] != NO_PRESS]


def _bold(row: Any, name: str) -> str:
    return f"**{row[name]:.2f}**{bracket(row[f'{name}_low'], row[f'{name}_high'])}"


# ---- findings ------------------------------------------------------------------------------------


def on_speed(table: pd.DataFrame) -> Iterator[Finding]:
    """How much faster decoding is with a press, here and in kvpress, and the size of its cache."""
    hooked = table[table["mechanism"] == "hook"].sort_values(["context", "batch", "speed"])
    best = hooked.iloc[-1]
    text = (
        f"{press_label(best['press'])} with {best['ratio']:.0%} evicted decodes "
        f"{_bold(best, 'speed')} times as many tokens per second as the full cache ({_at(best)})."
    )
    works: Any = "works" if best["speed_low"] > 1 else "costs" if best["speed_high"] < 1 else None
    yield Finding("speed", text, "decode faster", works)
    theirs = table[table["mechanism"] == "kvpress"]
    if len(theirs):
        worst = theirs.sort_values("speed_over_hook").iloc[0]
        text = (
            f"In its slowest case kvpress decodes {_bold(worst, 'speed_over_hook')} times as many "
            f"tokens per second as hooks ({press_label(worst['press'])}, {_at(worst)})."
        )
        yield Finding("kvpress", text)
    over = (table["bytes"] / table.get("predicted", float("nan"))).dropna()  # not for kvpress
    if len(over):
        text = (
            f"A cache takes at most **{over.max():.3f}** times the bytes that its ratio leaves of "
            f"the full cache, over {len(over)} prefills with and without presses."
        )
        freed: Any = "works" if over.max() <= AS_MUCH else None
        yield Finding("bytes", text, "free the memory of what is evicted", freed, Evidence.BYTES)


def _at(row: Any) -> str:
    return f"{row['context']:,} tokens, batch {row['batch']}"


def on_first(table: pd.DataFrame) -> Iterator[Finding]:
    """How many presses do not delay the first token."""
    ends = ["first_low", "first_high", "first"]  # without an interval, the time is both its ends
    slowest = _pressed(table).groupby("press")[ends].max().bfill(axis=1)
    most, least, soon = (slowest <= AS_MUCH).sum()
    text = (
        f"With **{soon}** of {len(slowest)} presses ({least} to {most} by intervals) time to first "
        f"token is at most {AS_MUCH:.2f} times that without one, after "
        f"{table['context'].iloc[0]:,} tokens."
    )
    need = "compress without raising time to first token"
    yield Finding("first", text, need, "works" if soon > len(slowest) / 2 else "costs")


def on_fits(table: pd.DataFrame) -> Iterator[Finding]:
    """How much longer a context fits with a press."""
    best = table.sort_values("measured").iloc[-1]
    whole = table.loc[table["press"] == NO_PRESS, "measured"].max()
    if best["press"] != NO_PRESS and whole:
        text = (
            f"Within {size_of(best['limit'])}, {press_label(best['press'])} with "
            f"{best['ratio']:.0%} evicted fits a context **{best['measured'] / whole:.2f}** times "
            "as long as without a press."
        )
        yield Finding("fits", text, "fit a longer context", "works", Evidence.BYTES)


def on_kvpress(table: pd.DataFrame) -> Iterator[Finding]:
    """How many presses spend less time in a prefill than kvpress's; decode steps are excluded."""
    ratios = table.loc[table["decoded"] == 0, "ratio"]
    text = (
        f"In a prefill **{int((ratios < 1).sum())}** of {len(ratios)} presses take less time than "
        f"kvpress's (ratios {ratios.min():.2f} to {ratios.max():.2f}, geometric mean "
        f"{np.exp(np.log(ratios).mean()):.2f})."
    )
    yield Finding("inside", text)


# ---- tables and the figure -----------------------------------------------------------------------


def _named(table: pd.DataFrame) -> pd.Series[str]:
    """Press names with their ratios, such as `SnapKV 80%`."""
    shares = table["ratio"].map(" {:.0%}".format).where(table["press"] != NO_PRESS, "")
    return table["press"].map(press_label) + shares


def _column(table: pd.DataFrame, name: str) -> list[str]:
    low, high = f"{name}_low", f"{name}_high"
    return [bracketed(row, name, low=low, high=high) for row in table.to_dict("records")]


def show_speeds(table: pd.DataFrame) -> ResultTable:
    """A row per condition and size."""
    bare = table[table["press"] == NO_PRESS]
    whole = "; ".join(map("{:,.0f} ms, {:,.0f}/s".format, bare["first_ms"], bare["tokens_per_s"]))
    note = (
        f"{table['model'].iloc[0]}: time to first token and tokens per second over those without a "
        f"press ({whole}), with {METHOD} over rounds; MiB of the cache, and peak MiB beyond the "
        "loaded model:"
    )
    mib = table.reindex(columns=["bytes", "peak"]) / 2**20
    shown = {
        "tokens": table["context"].map("{:,}".format),
        "batch": table["batch"],
        "press": _named(table),
        "by": table["mechanism"],
        "first token": _column(table, "first"),
        "tokens/s": _column(table, "speed"),
        "cache": mib["bytes"].map("{:,.1f}".format),
        "peak": mib["peak"].map("{:,.1f}".format, na_action="ignore").fillna(""),
    }
    return frame_table(note, pd.DataFrame(shown), left=4)


def show_fits(table: pd.DataFrame) -> ResultTable:
    """A row per press."""
    first = table.iloc[0]
    limit = size_of(first["limit"])
    note = f"{first['model']}: longest context with batch {first['batch']} that fits in {limit}:"
    shown = {"press": _named(table), "tokens": table["measured"].map("{:,}".format)}
    return frame_table(note, pd.DataFrame(shown))


def show_kvpress(table: pd.DataFrame) -> ResultTable:
    """A row per press, the lowest ratio first."""
    rows = table[table["decoded"] == 0].sort_values("ratio")
    note = f"Time inside a press in a prefill over that in kvpress's, with {METHOD} over rounds:"
    shown = {
        "press": rows["press"].map(press_label),
        "tokens": rows["tokens"].map("{:,}".format),
        "ours / kvpress": [bracketed(row, "ratio") for row in rows.to_dict("records")],
    }
    return frame_table(note, pd.DataFrame(shown))


def draw_speeds(table: pd.DataFrame) -> Figure:
    """Tokens per second over those without a press, a panel per context length and batch size."""
    rows = _pressed(table)
    speeds = {"speed": "ratio", "speed_low": "low", "speed_high": "high"}
    rows = rows.assign(label=_named(rows) + ", " + rows["mechanism"]).drop(columns="ratio")
    sizes: Any = rows.rename(columns=speeds).groupby(["context", "batch"], sort=False)
    panels = {f"{n:,} tokens, batch {batch}": of_size for (n, batch), of_size in sizes}
    label = (
        f"Tokens per second of {table['model'].iloc[0]} over those without a press: medians with "
        f"{METHOD} over rounds"
    )
    return ratio_figure(panels, label, "tokens per second / those without a press")


FINDINGS: dict[str, Callable[[pd.DataFrame], Iterator[Finding]]] = {
    "throughput": on_speed,
    "throughput_first": on_first,
    "throughput_fits": on_fits,
    "throughput_kvpress": on_kvpress,
}
VIEWS = {
    "throughput": show_speeds,
    "throughput_fits": show_fits,
    "throughput_kvpress": show_kvpress,
}
