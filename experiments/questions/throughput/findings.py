"""What the tables of `experiments.questions.throughput` say, a sentence each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd

from experiments.framework.evidence import Evidence
from experiments.framework.experiment import Finding, Related, Tables
from experiments.framework.intervals import bracket
from experiments.framework.options import size_of
from experiments.framework.plots import NO_PRESS, press_label
from experiments.framework.works import KVPRESS
from experiments.questions.throughput.fits import CONTEXT

SLOW = 1.1
"""Times as long as without a press, up to which a first token is said to come as soon."""


def findings(tables: Tables) -> list[Finding]:
    """Of whichever tables there are."""
    found: list[Finding] = []
    if "throughput" in tables:
        found += _on_speed(tables["throughput"])
    if "throughput_first" in tables:
        found.append(on_first(tables["throughput_first"]))
    if "throughput" in tables:
        found += [*_on_space(tables["throughput"])]
    if "throughput_fits" in tables:
        found += _on_fits(tables["throughput_fits"])
    if "throughput_kvpress" in tables:
        found.append(_on_kvpress(tables["throughput_kvpress"]))
    return found


def _on_kvpress(table: pd.DataFrame) -> Finding:
    """Of presses at work in a prefill; what is decoded after it counts apart."""
    ratios = table.loc[table["decoded"] == 0, "ratio"]
    text = (
        f"Inside **{int((ratios < 1).sum())}** of {len(ratios)} presses a prefill spends less time "
        f"than inside kvpress's (geometric mean of the ratios {np.exp(np.log(ratios).mean()):.2f})."
    )
    return Finding("inside", text)


def pressed(table: pd.DataFrame, *mechanisms: str) -> pd.DataFrame:
    """Rows with a press, of some mechanisms or all."""
    rows = table[table["press"] != NO_PRESS]
    return rows[rows["mechanism"].isin(mechanisms)] if mechanisms else rows


def _on_speed(table: pd.DataFrame) -> Iterator[Finding]:
    hooked = pressed(table, "hook")
    if hooked.empty:
        rate = table["tokens_per_s"].max()
        yield Finding("speed", f"Without a press **{rate:.0f}** tokens are decoded each second.")
        return
    largest = hooked[hooked["context"] == hooked["context"].max()]
    largest = largest[largest["batch"] == largest["batch"].max()]
    best = largest.loc[largest["speed"].idxmax()]
    text = (
        f"{press_label(best['press'])} with {best['ratio']:.0%} evicted decodes "
        f"**{best['speed']:.2f}**{bracket(best['speed_low'], best['speed_high'])} times as many "
        f"tokens per second as the full cache ({_at(best)})."
    )
    works: Any = "works" if best["speed_low"] > 1 else "costs" if best["speed_high"] < 1 else None
    yield Finding("speed", text, "decode faster", works)
    yield from _on_others(table)


def _at(row: Any) -> str:
    return f"{row['context']:,} tokens, batch {row['batch']}"


def _on_others(table: pd.DataFrame) -> Iterator[Finding]:
    for name, mechanism, subject in (
        ("mechanisms", "patch", "Patches decode"),
        ("kvpress", "kvpress", "kvpress decodes"),
    ):
        rows = pressed(table, mechanism)
        if len(rows):
            worst = rows.sort_values("speed_over_hook").iloc[0]
            ends = worst["speed_over_hook_low"], worst["speed_over_hook_high"]
            text = (
                f"{subject} at least **{worst['speed_over_hook']:.2f}**{bracket(*ends)} times as "
                f"many tokens per second as hooks ({press_label(worst['press'])}, {_at(worst)})."
            )
            yield Finding(name, text)


def on_first(table: pd.DataFrame) -> Finding:
    """How many presses delay the first token, on the model measured last, the most realistic."""
    rows = pressed(table[table["model"] == table["model"].iloc[-1]])
    slowest = rows.groupby("press")["first"].max()
    soon = int((slowest <= SLOW).sum())
    text = (
        f"With **{soon}** of {len(slowest)} presses the first token comes within {SLOW:.2f} times "
        f"the time without one, after {rows['context'].iloc[0]:,} tokens."
    )
    works: Any = "works" if soon > len(slowest) / 2 else "costs"
    return Finding("first", text, "compress without raising time to first token", works)


def _on_space(table: pd.DataFrame) -> Iterator[Finding]:
    over = (table["bytes"] / table["predicted"])[table["mechanism"] != "kvpress"].dropna()
    if len(over):
        text = (
            f"A cache holds at most **{over.max():.3f}** times the bytes that arithmetic gives, "
            f"over {len(over)} prefills with and without presses."
        )
        yield Finding("bytes", text, "free the memory of what is evicted", "works", Evidence.BYTES)
    peaks = peaks_over_bare(table)
    if len(peaks):
        text = (
            f"The peak of an answer with a press is {peaks.min():.2f} to **{peaks.max():.2f}** "
            "times that without one."
        )
        works: Any = "works" if peaks.max() < 1 else "costs"
        yield Finding("peak", text, "lower the peak of a prefill", works, Evidence.BYTES)


def peaks_over_bare(table: pd.DataFrame) -> pd.Series[float]:
    """The most memory of each answer with a press over that without, where both were measured."""
    if "peak" not in table:
        return pd.Series(dtype=float)
    keys = ["model", "context", "batch"]
    bare = table[table["press"] == NO_PRESS].set_index(keys)["peak"]
    rows = pressed(table).dropna(subset=["peak"])
    if rows.empty:
        return pd.Series(dtype=float)
    whole = bare.reindex(pd.MultiIndex.from_frame(rows[keys])).to_numpy()
    return (rows["peak"] / whole).dropna()


def _on_fits(table: pd.DataFrame) -> Iterator[Finding]:
    rows = table[(table["what"] == CONTEXT) & (table["limit"] == table["limit"].max())]
    whole = rows[rows["press"] == NO_PRESS]["measured"].max()
    best = rows.sort_values("measured").iloc[-1]
    if best["press"] == NO_PRESS or not whole:
        return
    text = (
        f"Within {size_of(best['limit'])} {press_label(best['press'])} with "
        f"{best['ratio']:.0%} evicted lets **{best['measured'] / whole:.2f}** times as long a "
        "context through as no press."
    )
    yield Finding("fits", text, "fit a longer context", "works", Evidence.BYTES)


def related(tables: Tables) -> list[Related]:
    """What is said of memory elsewhere, and what was measured here."""
    table = tables.get("throughput")
    if table is None or pressed(table).empty:
        return []
    over = (table["bytes"] / table["predicted"])[table["mechanism"] != "kvpress"].dropna()
    here = f"The cache holds {over.min():.3f} to {over.max():.3f} times the bytes that this leaves."
    peaks = peaks_over_bare(table)
    if len(peaks):
        here += (
            f" The peak of an answer is {peaks.min():.2f} to {peaks.max():.2f} times the bare one."
        )
    says = "Memory falls by about the compression ratio times the size of the cache."
    return [Related("bytes", KVPRESS, says, here)]
