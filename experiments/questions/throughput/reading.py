"""What the tables of `experiments.questions.throughput` say: findings, tables, figures."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from experiments.framework.evidence import Evidence
from experiments.framework.experiment import Finding
from experiments.framework.intervals import METHOD, bracket, bracketed
from experiments.framework.options import size_of
from experiments.framework.plots import NO_PRESS, press_label
from experiments.framework.ratios import ratio_figure
from experiments.framework.tables import ResultTable

SLOW = 1.1
"""Times as long as without a press, up to which a first token is said to come as soon."""


def _pressed(table: pd.DataFrame) -> pd.DataFrame:
    return table[table["press"] != NO_PRESS]


def _interval(row: Any, name: str, form: str = ".2f") -> str:
    return bracketed(row, name, form, low=f"{name}_low", high=f"{name}_high")


def _bold(row: Any, name: str) -> str:
    return f"**{row[name]:.2f}**{bracket(row[f'{name}_low'], row[f'{name}_high'])}"


# ---- findings ------------------------------------------------------------------------------------


def on_speed(table: pd.DataFrame) -> Iterator[Finding]:
    """How much faster a press decodes, here and in kvpress, and what its cache holds."""
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
            f"kvpress decodes at least {_bold(worst, 'speed_over_hook')} times as many tokens per "
            f"second as hooks ({press_label(worst['press'])}, {_at(worst)})."
        )
        yield Finding("kvpress", text)
    ours = table[table["mechanism"] != "kvpress"]
    over = (ours["bytes"] / ours.get("predicted", float("nan"))).dropna()
    if len(over):
        text = (
            f"A cache holds at most **{over.max():.3f}** times the bytes that arithmetic gives, "
            f"over {len(over)} prefills with and without presses."
        )
        yield Finding("bytes", text, "free the memory of what is evicted", "works", Evidence.BYTES)


def _at(row: Any) -> str:
    return f"{row['context']:,} tokens, batch {row['batch']}"


def on_first(table: pd.DataFrame) -> Iterator[Finding]:
    """How many presses delay the first token."""
    slowest = _pressed(table).groupby("press")["first"].max()
    soon = int((slowest <= SLOW).sum())
    text = (
        f"With **{soon}** of {len(slowest)} presses the first token comes within {SLOW:.2f} times "
        f"the time without one, after {table['context'].iloc[0]:,} tokens."
    )
    works: Any = "works" if soon > len(slowest) / 2 else "costs"
    yield Finding("first", text, "compress without raising time to first token", works)


def on_fits(table: pd.DataFrame) -> Iterator[Finding]:
    """How much longer a context fits."""
    best = table.sort_values("measured").iloc[-1]
    whole = table.loc[table["press"] == NO_PRESS, "measured"].max()
    if best["press"] != NO_PRESS and whole:
        text = (
            f"Within {size_of(best['limit'])} {press_label(best['press'])} with "
            f"{best['ratio']:.0%} evicted lets **{best['measured'] / whole:.2f}** times as long a "
            "context through as no press."
        )
        yield Finding("fits", text, "fit a longer context", "works", Evidence.BYTES)


def on_kvpress(table: pd.DataFrame) -> Iterator[Finding]:
    """Of presses at work in a prefill; what is decoded after it counts apart."""
    ratios = table.loc[table["decoded"] == 0, "ratio"]
    text = (
        f"Inside **{int((ratios < 1).sum())}** of {len(ratios)} presses a prefill spends less time "
        f"than inside kvpress's (geometric mean of the ratios {np.exp(np.log(ratios).mean()):.2f})."
    )
    yield Finding("inside", text)


# ---- tables --------------------------------------------------------------------------------------


def show_speeds(table: pd.DataFrame) -> ResultTable:
    """A line per condition and size."""
    note = (
        f"{table['model'].iloc[0]}: time to the first token and tokens per second over those "
        f"without a press, with {METHOD} over rounds; MiB of the cache, and at most beyond the "
        "model:"
    )
    lines = []
    rows: list[dict[Any, Any]] = table.to_dict("records")
    for row in rows:
        first, speed = _interval(row, "first"), _interval(row, "speed")
        if row["press"] == NO_PRESS:
            first, speed = f"{row['first_ms']:,.0f} ms", f"{row['tokens_per_s']:,.0f} /s"
        held = [row.get(name) for name in ("bytes", "peak")]
        mib = ["" if n is None or pd.isna(n) else f"{n / 2**20:,.1f}" for n in held]
        size = [f"{row['context']:,}", str(row["batch"])]
        lines.append([*size, _named(row), row["mechanism"], first, speed, *mib])
    head = ["tokens", "batch", "press", "by", "first token", "tokens/s", "cache", "peak"]
    return ResultTable(note, head, lines, left=4)


def _named(row: Any) -> str:
    named = f"{press_label(row['press'])} {row['ratio']:.0%}"
    return NO_PRESS if row["press"] == NO_PRESS else named


def show_fits(table: pd.DataFrame) -> ResultTable:
    """A line per press."""
    first = table.iloc[0]
    note = (
        f"{first['model']}: the longest context, batch {first['batch']}, that fits in "
        f"{size_of(first['limit'])}, weights included, found by bisection; hooks:"
    )
    lines = [[_named(row), f"{row['measured']:,}"] for row in table.to_dict("records")]
    return ResultTable(note, ["press", "tokens"], lines)


# ---- figures -------------------------------------------------------------------------------------


def draw_speeds(table: pd.DataFrame) -> Figure:
    """Tokens per second over those without a press, a panel per context and batch."""
    sizes: Any = _pressed(table).groupby(["context", "batch"], sort=False)
    panels = {
        f"{n:,} tokens, batch {batch}": rows.assign(
            label=[f"{_named(row)}, {row['mechanism']}" for row in rows.to_dict("records")],
            ratio=rows["speed"],
            low=rows["speed_low"],
            high=rows["speed_high"],
        )
        for (n, batch), rows in sizes
    }
    figure = ratio_figure(panels, "tokens per second / those without a press")
    figure.set_label(
        f"Tokens per second of {table['model'].iloc[0]} over those without a press, by press, "
        f"share evicted and mechanism: medians with {METHOD} over rounds"
    )
    return figure


FINDINGS: dict[str, Callable[[pd.DataFrame], Iterator[Finding]]] = {
    "throughput": on_speed,
    "throughput_first": on_first,
    "throughput_fits": on_fits,
    "throughput_kvpress": on_kvpress,
}
VIEWS = {"throughput": show_speeds, "throughput_fits": show_fits}
