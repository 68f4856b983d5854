"""Tables of `experiments.questions.throughput` for people."""

from __future__ import annotations

from typing import Any

import pandas as pd

from experiments.framework.experiment import Tables
from experiments.framework.intervals import METHOD, bracketed
from experiments.framework.options import size_of
from experiments.framework.plots import NO_PRESS, press_label
from experiments.framework.tables import ResultTable
from experiments.questions.throughput.fits import CONTEXT

MISSING = "not measured"


def views(tables: Tables) -> list[ResultTable]:
    """Of whichever tables there are."""
    shown: list[ResultTable] = []
    for name, show in (
        ("throughput", _speeds),
        ("throughput_first", _firsts),
        ("throughput_fits", _fits),
    ):
        if name in tables:
            shown += [show(rows) for _, rows in tables[name].groupby("model", sort=False)]
    if "throughput_kvpress" in tables:
        shown.append(_inside(tables["throughput_kvpress"]))
    return shown


def _inside(table: pd.DataFrame) -> ResultTable:
    note = (
        "Time inside each press per layer, and memory that it allocates at most, with 2 layers, 16 "
        "query and 4 KV heads of 64: medians over rounds, taken in turn with kvpress:"
    )
    head = ["press", "tokens", "decoded", "ms", "kvpress, ms", "ratio", "MiB", "kvpress, MiB"]
    rows = [
        [
            press_label(row["press"]),
            f"{row['tokens']:,}",
            row["decoded"],
            *(f"{row[name]:.3g}" for name in ("ours_ms", "kvpress_ms", "ratio")),
            *(f"{row[name]:.3g}" for name in ("ours_mib", "kvpress_mib")),
        ]
        for row in table.sort_values("ratio").to_dict("records")
    ]
    return ResultTable(note, head, rows)


def remarks(tables: Tables) -> list[str]:
    """What explains the numbers."""
    said = []
    if "throughput_fits" in tables:
        rows = tables["throughput_fits"]
        reached = rows["measured"] / rows["predicted"]
        said.append(
            f"What fits is {reached.min():.2f} to {reached.max():.2f} of what arithmetic predicts, "
            "which counts weights, keys and values, and what one layer computes with; it leaves "
            "out what presses score with."
        )
    table = tables.get("throughput", pd.DataFrame())
    if "transformers" in table:
        releases = ", ".join(sorted(table["transformers"].dropna().astype(str).unique()))
        said.append(
            f"kvpress ran in a process of its own, on transformers {releases}; its times are over "
            "those of the model without a press and of hooks there."
        )
    return said


def _speeds(table: pd.DataFrame) -> ResultTable:
    note = (
        f"{table['model'].iloc[0]}: time to the first token and tokens per second over those "
        f"without a press, with {METHOD} over rounds; tokens per second of the compiled model over "
        "the eager one's; MiB of the cache, and at most beyond the model:"
    )
    head = ["tokens", "batch", "press", "by", "first token", "tokens/s", "compiled"]
    rows: list[dict[Any, Any]] = table.to_dict("records")
    return ResultTable(note, [*head, "cache", "peak"], [_speed_line(row) for row in rows], left=4)


def _speed_line(row: dict[Any, Any]) -> list[str]:
    if row["press"] == NO_PRESS:
        first, speed = f"{row['first_ms']:,.0f} ms", f"{row['tokens_per_s']:,.0f} /s"
    else:
        first, speed = _interval(row, "first"), _interval(row, "speed")
    return [
        f"{row['context']:,}",
        str(row["batch"]),
        _named(row),
        "" if row["press"] == NO_PRESS else row["mechanism"],
        first,
        speed,
        _number(row.get("compiled"), ".2f"),
        _mib(row["bytes"]),
        _mib(row.get("peak")),
    ]


def _named(row: dict[Any, Any]) -> str:
    if row["press"] == NO_PRESS:
        return NO_PRESS
    return f"{press_label(row['press'])} {row['ratio']:.0%}"


def _interval(row: dict[Any, Any], name: str) -> str:
    return bracketed(row, name, low=f"{name}_low", high=f"{name}_high")


def _number(value: Any, form: str) -> str:
    return "" if value is None or pd.isna(value) else format(value, form)


def _mib(n_bytes: Any) -> str:
    return _number(None if n_bytes is None else n_bytes / 2**20, ",.1f")


def _firsts(table: pd.DataFrame) -> ResultTable:
    bare = table[table["press"] == NO_PRESS].iloc[0]
    ratios = sorted(table.loc[table["press"] != NO_PRESS, "ratio"].unique())
    note = (
        f"{table['model'].iloc[0]}, {bare['context']:,} tokens, hooks: time to the first token and "
        f"tokens per second over those without a press ({bare['first_ms']:,.0f} ms, "
        f"{bare['tokens_per_s']:,.0f} per second), with {METHOD} over rounds; soonest "
        "first:"
    )
    head = ["press"]
    for ratio in ratios:
        head += [f"first token, {ratio:.0%} evicted", f"tokens/s, {ratio:.0%} evicted"]
    cells = table[table["press"] != NO_PRESS].set_index(["press", "ratio"])
    order = cells["first"].groupby("press").mean().sort_values().index
    rows = []
    for press in order:
        line = [press_label(str(press))]
        for ratio in ratios:
            at = (press, ratio)
            row = cells.loc[at].to_dict() if at in cells.index else None
            line += [_interval(row, name) if row else MISSING for name in ("first", "speed")]
        rows.append(line)
    return ResultTable(note, head, rows)


def _fits(table: pd.DataFrame) -> ResultTable:
    note = (
        f"{table['model'].iloc[0]}: what fits in {size_of(table['limit'].iloc[0])}, weights "
        "included, found by "
        "bisection, and what arithmetic predicts; hooks:"
    )
    rows: list[dict[Any, Any]] = table.to_dict("records")
    whole = table[table["press"] == NO_PRESS].set_index("what")["measured"]
    lines = [
        [
            fits_of(row["what"], row["other"]).lower(),
            _named(row),
            f"{row['measured']:,}",
            f"{row['predicted']:,}",
            f"{row['measured'] / whole[row['what']]:.2f}" if whole[row["what"]] else "",
        ]
        for row in rows
    ]
    return ResultTable(note, ["", "press", "measured", "predicted", "/ no press"], lines, left=2)


def fits_of(what: str, other: int) -> str:
    """What is sought: the longest context of a batch, or the largest batch of a context."""
    if what == CONTEXT:
        return "Longest context" if other == 1 else f"Longest context, batch {other:,}"
    return f"Largest batch of {other:,} tokens"
