"""The table to quote: press by ratio, with what other experiments have measured of each.

Nothing is run for it. It is read off the tables of a study by their names, whichever there are;
what no table tells is marked as missing.
"""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from experiments.framework.experiment import Tables
from experiments.framework.plots import NO_PRESS, press_label
from experiments.framework.results import Part
from experiments.framework.tables import ResultTable

MISSING = "-"
"""What no table tells."""

ON_FRONTIER = "●"

_PLACE = ["press", "ratio"]
_FORMS = {
    **dict.fromkeys(("facts", "pipeline"), ".0%"),
    **dict.fromkeys(("first token", "tokens/s", "bytes"), ".2f"),
    "logit error": ".3g",
}
"""How numbers are written, by column."""


def joined(tables: Tables) -> pd.DataFrame:
    """Every press at every ratio at which it was asked anything: by ratio, the most right first.

    Returns:
        Indexed by `press`, its class name, and `ratio`, NaN where nothing was measured: `facts`,
        the share of right answers, mean over the questions that the press saw and those it did
        not; `pipeline`, the same over the tasks that were asked through the pipeline; `first
        token`, `tokens/s` and `bytes` over those without a press; `logit error`, the largest
        against the full cache; and `same bits`, whether both mechanisms left them, in all that
        compared them.
    """
    found = pd.DataFrame({**_accuracies(tables), **_times(tables), **_equalities(tables)})
    if found.empty:
        return found
    found = found.reindex(columns=["asked", *_FORMS, *_COMPARED])
    if (compared := tables.get("equivalence")) is not None:
        differ = compared[compared["compared"] > 0].groupby("press")["differ"].sum()
        presses = found.index.get_level_values("press")
        found["bits"] = (differ == 0).astype(float).reindex(presses).to_numpy()
    found["same bits"] = found[_COMPARED].min(axis=1)
    asked = found[found[["asked", "pipeline"]].notna().any(axis=1)]
    right = asked["facts"].fillna(asked["pipeline"]).fillna(0)
    ordered = asked.assign(right=right).sort_values(
        by=["ratio", "right", "press"], ascending=[True, False, True]
    )
    return ordered[[*_FORMS, "same bits"]]


def frontier(rows: pd.DataFrame) -> pd.Series:
    """Whether no other row answers as many facts from as few bytes, and is better in one.

    Both in whole per cent: blocks of heads of different lengths leave a little room.
    """
    measured = rows[["facts", "bytes"]].round(2)

    def best(row: pd.Series) -> bool:
        others = measured[(measured["facts"] >= row["facts"]) & (measured["bytes"] <= row["bytes"])]
        return len(others) > 0 and bool((others == row).all(axis=None))

    return measured.apply(best, axis=1)


def quotable(parts: Sequence[Part]) -> ResultTable | None:
    """The table for people; None if a study tells the accuracy of no press."""
    tables = {name: t for part in parts if not part.error for name, t in part.tables.items()}
    rows = joined(tables)
    if rows.empty:
        return None
    shown = []
    places = zip(rows.index, rows.to_dict("records"), frontier(rows), strict=True)
    for (press, ratio), row, is_best in places:
        values = [
            MISSING if pd.isna(row[name]) else format(row[name], form)
            for name, form in _FORMS.items()
        ]
        same = MISSING if pd.isna(row["same bits"]) else "yes" if row["same bits"] else "no"
        mark = ON_FRONTIER if is_best else ""
        shown.append([mark, press_label(press), f"{ratio:.0%}", *values, same])
    note = (
        "Every press at every ratio, the most right answers first. Right answers to facts (mean of "
        "questions that the press saw and of those it did not) and through the pipeline (mean of "
        f"its tasks). {_on_times(tables)}Largest error of a logit against the full cache. Whether "
        "hooks and patches left the same bits in all that compared them. "
        f"{ON_FRONTIER} on the frontier: no other answers more facts from as few bytes. "
        f"{MISSING} not measured."
    )
    return ResultTable(note, ["", "press", "evicted", *_FORMS, "same bits"], shown, left=2)


def _on_times(tables: Tables) -> str:
    table = tables.get("throughput_first")
    if table is None:
        return ""
    first = table.iloc[0]
    return (
        "Time to the first token, tokens per second and bytes of the cache over those without a "
        f"press ({first['model']}, {first['context']:,} tokens). "
    )


# ---- from the tables of experiments --------------------------------------------------------------


def _accuracies(tables: Tables) -> dict[str, pd.Series]:
    found = {}
    if (quality := _pressed(tables, "quality")) is not None:
        answers = quality.groupby(_PLACE)["accuracy"].agg(["mean", "size"])
        found["asked"] = answers["mean"]  # also presses that have to see the question
        in_both_ways = answers["size"] == quality["question"].nunique()
        found["facts"] = answers["mean"].where(in_both_ways)
    if (asked := _pressed(tables, "evaluate")) is not None:
        # A sweep writes presses as text: AdaKVPress(SnapKVPress()).
        names = asked["press"].str.replace(r"\(.*", "", regex=True)
        found["pipeline"] = asked.assign(press=names).groupby(_PLACE)["score"].mean()
    return found


def _times(tables: Tables) -> dict[str, pd.Series]:
    """What the model that was timed at most ratios says."""
    table = tables.get("throughput_first")
    if table is None:
        return {}
    own = table[table["model"] == table["model"].iloc[0]]
    whole = own.loc[own["press"] == NO_PRESS, "bytes"].iloc[0]
    own = own.set_index(_PLACE)
    return {"first token": own["first"], "tokens/s": own["speed"], "bytes": own["bytes"] / whole}


_COMPARED = ["logits", "answers", "bits"]


def _equalities(tables: Tables) -> dict[str, pd.Series]:
    """1 where both mechanisms did the same, 0 where they did not."""
    found = {}
    if (logits := tables.get("error_logits")) is not None:
        logits = logits.set_index(_PLACE)
        found = {"logit error": logits["logit_error"], "logits": logits["equal"].astype(float)}
    if (agreed := tables.get("quality_agreement")) is not None:
        same = agreed.assign(same=(agreed["same"] == agreed["answers"]).astype(float))
        found["answers"] = same.groupby(_PLACE)["same"].min()
    return found


def _pressed(tables: Tables, name: str) -> pd.DataFrame | None:
    """Rows of one mechanism with a press; None if there are none."""
    table = tables.get(name)
    if table is None:
        return None
    first = "hook" if (table["mechanism"] == "hook").any() else "patch"
    rows = table[(table["press"] != NO_PRESS) & (table["mechanism"] == first)]
    return None if rows.empty else rows
