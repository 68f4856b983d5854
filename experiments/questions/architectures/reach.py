"""What the sweep's table says about the reach of hooks and patches, and why it ends."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from experiments.framework.frames import heat_maps
from experiments.framework.tables import ResultTable
from experiments.questions.architectures.cells import SUBJECTS
from experiments.questions.architectures.decoders import TOLD

BOTH, PATCH, HOOK, NEITHER, WRONG = "both", "patch alone", "hook alone", "refused", "wrong"
"""By which mechanism a press is right; or refused when its scope opens; or wrong, or a crash."""

_REASONS: dict[str, str] = TOLD["reasons"]
"""Parts of what a refusal says, and what that means in short."""


def why(reason: str) -> str:
    """A refusal in short."""
    return next((short for part, short in _REASONS.items() if part in reason), reason)


def reach(table: pd.DataFrame) -> pd.DataFrame:
    """By type and press which mechanism is right, columns `type`, `press`, `reach` and `reason`.

    Types that do not run on text alone are left out.
    """
    runs = table[table["cells"] > 0]
    reached = [_reach(hook, patch) for hook, patch in zip(runs["hook"], runs["patch"], strict=True)]
    return runs[["type", "press"]].assign(reach=reached, reason=runs["reason"].fillna(""))


def _reach(hook: str, patch: str) -> str:
    if {hook, patch} - {"right", "refused at open"}:
        return WRONG
    if hook == patch:
        return BOTH if hook == "right" else NEITHER
    return HOOK if hook == "right" else PATCH


def limits(table: pd.DataFrame) -> ResultTable:
    """Decoders that do not take every press by both mechanisms, with what they refuse and why."""
    reached = reach(table)
    alike: dict[tuple[str, str], list[str]] = {}
    for kind, group in reached[reached["reach"] != BOTH].groupby("type"):
        reasons = "; ".join(dict.fromkeys(why(reason) for reason in group["reason"] if reason))
        one_side = group["reach"].map({PATCH: "hooks", HOOK: "patches"})
        sides = ", ".join(dict.fromkeys(one_side.dropna()))
        refused = _presses(group["press"][one_side.isna()])
        by_one = f"by {sides}: {_presses(group['press'][one_side.notna()])}" if sides else ""
        key = reasons, "; ".join(filter(None, [refused, by_one]))
        alike.setdefault(key, []).append(f"`{kind}`")
    ordered = sorted(alike.items(), key=lambda pair: -len(pair[1]))
    rows = [[*key, ", ".join(kinds)] for key, kinds in ordered]
    note = "What is refused when a scope opens, before anything is installed, and why."
    return ResultTable(note, ["why", "refused", "decoders"], rows, left=None)


def _presses(refused: pd.Series) -> str:
    if len(refused) == len(SUBJECTS):
        return "every press"
    return ", ".join(press for press in refused if press != "nothing evicted")


def figure(table: pd.DataFrame) -> Figure:
    """How many decoders each mechanism is right on, by press."""
    reached = reach(table)
    counts = pd.crosstab(reached["press"], reached["reach"]).reindex(reached["press"].unique())
    title = f"{reached['type'].nunique()} decoders of the installed transformers"
    label = "Decoders by press (rows) and the mechanisms that are right on them"
    return heat_maps({title: counts}, label, "{:.0f}")
