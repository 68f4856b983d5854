"""What the sweep's table says about the reach of hooks and patches, and why it ends."""

from __future__ import annotations

from dataclasses import replace

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from experiments.framework.plots import new_figure, style
from experiments.framework.tables import ResultTable
from experiments.questions.architectures.cells import SUBJECTS

BOTH, PATCH, HOOK, NEITHER, WRONG = "both", "patch", "hook", "neither", "wrong"
COLOURS = {
    BOTH: ("right by hook and patch", "#0072B2"),
    PATCH: ("right by patch, hook refused", "#56B4E9"),
    HOOK: ("right by hook, patch refused", "#009E73"),
    NEITHER: ("refused when the scope opens", "#e4e4e4"),
    WRONG: ("wrong, late or a crash", "#D55E00"),
}

REASONS = {
    "latents of width": "latents are cached, from which keys and values are made",
    "has no rotary": "the model has no rotary position embeddings",
    "nobody can see": "the rotation cannot be observed",
    "not undone": "something after the rotation cannot be undone",
    "something else than cosines": "rotation is not by cosines and sines",
    "that no rotary module": "cosines and sines come from no rotary module",
    "a hook cannot tell": "no submodule returns the query, so no hook can collect it",
    "one by one": "heads are mixed before attention",
    "the same norm": "all keys have the same norm",
    "that were evicted before": "attention depends on a key's index in the cache",
    "use a sliding window": "all layers see a window only",
    "linear state": "the layer holds a linear state too, which head-wise layers cannot",
    "reads the cache of another": "every layer reads another layer's cache",
    "other layers read": "other layers read the same cache, which must have one length",
    "serves several layers": "one attention module serves several layers",
    "no attention module": "attention does not go through transformers' interface with a cache",
    "is given ": "the model gives attention no cache of transformers' kind",
    "caches in a": "the layer keeps more than keys and values (an index, compressed blocks)",
    "could not be verified": "the model could not be verified",
}
"""Parts of what a refusal says, and what that means in short."""


def why(reason: str) -> str:
    """A refusal in short."""
    return next((short for part, short in REASONS.items() if part in reason), reason)


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
    """Decoders (columns, the best reached first) by presses (rows)."""
    reached = reach(table)
    by_type: dict[str, dict[str, str]] = {}
    for row in reached.itertuples():
        by_type.setdefault(str(row.type), {})[str(row.press)] = str(row.reach)
    presses = [press for press in SUBJECTS if press in set(reached["press"])]
    ranks = {name: rank for rank, name in enumerate(COLOURS)}
    order = sorted(by_type, key=lambda kind: [ranks[by_type[kind][press]] for press in presses])
    with style():
        drawn, (axes,) = new_figure(height=2.6)
        for y, press in enumerate(presses):
            colours = [COLOURS[by_type[kind][press]][1] for kind in order]
            axes.bar(range(len(order)), 0.9, bottom=y, width=1, align="edge", color=colours)
        axes.set_yticks([y + 0.45 for y in range(len(presses))], presses)
        axes.invert_yaxis()
        axes.set_xlim(0, len(order))
        axes.set_xlabel(f"{len(order)} decoders of the installed transformers")
        axes.grid(False)
        seen = [name for name in COLOURS if name in set(reached["reach"])]
        handles = [Patch(color=COLOURS[name][1], label=COLOURS[name][0]) for name in seen]
        drawn.legend(handles=handles, loc="outside lower center", ncols=len(handles))
    return drawn


def document(table: pd.DataFrame, oldest: pd.DataFrame) -> str:
    """`docs/architectures.md`: the decoders that refuse a press, and why.

    Args:
        table: of the newest release of transformers that is supported.
        oldest: of the oldest.
    """
    reached, before = reach(table), reach(oldest)
    left_out = sorted(set(table["type"]) - set(reached["type"]))
    pruned = reached[reached["press"] != "nothing evicted"]
    by_type = pruned.groupby("type")["reach"].agg(set)
    n_some = sum(bool(found - {NEITHER, WRONG}) for found in by_type)
    changed = _changed(before, reached)
    return _DOCUMENT.format(
        n=len(by_type),
        none=len(by_type) - n_some,
        all=sum(found == {BOTH} for found in by_type),
        patch=sum(PATCH in found for found in by_type),
        hook=sum(HOOK in found for found in by_type),
        wrong=table["bad"].sum(),
        cells=table["cells"].sum(),
        limits=limits(table).markdown(),
        n_oldest=before["type"].nunique(),
        changed=len(changed),
        oldest=replace(limits(oldest[oldest["type"].isin(changed)]), note="").markdown(),
        n_left_out=len(left_out),
        left_out=", ".join(f"`{kind}`" for kind in left_out),
    )


def _changed(oldest: pd.DataFrame, newest: pd.DataFrame) -> list[str]:
    """Types of which presses reach something else than they do on the newest release."""
    both = oldest.merge(newest, on=["type", "press"], suffixes=("", "_newest"))
    return sorted(set(both.loc[both["reach"] != both["reach_newest"], "type"]))


_DOCUMENT = """\
# Which decoders are supported

{all} of {n} decoders of transformers 5.23 take every press by hooks and by patches, {none} take
none. On {patch}, some presses work by patches alone, on {hook} by hooks alone. **A type that is
in none of the tables below takes every press.** Every decoder and press is a row of
[architectures.csv](../results/architectures.csv); {wrong} cells of {cells} are wrong, raise
something else than a refusal, or refuse once the model is running.

![Decoders by press, and which mechanism is right](../results/architectures.svg)

{limits}

## How this is known

Before a scope installs anything, the model at hand is run once over seven tokens, and what its
attention functions receive is compared with what a press would read: whether the layer rotates
its queries and keys, where the query is final, which heads belong together, what is cached, and
whether attention stays the same when a token is taken out of the cache. What does not hold is
refused by the presses that need it. This happens once per class and configuration of a model. A
model that does not run over a few tokens alone is refused.

The sweep (`python -m experiments architectures`) builds each decoder small, with random weights,
and runs one press for each kind of input that presses read, by both mechanisms, with eager and
sdpa attention, with the model's own cache and a bare `DynamicCache()`, and in a padded batch. The
tokens that are kept and the logits that follow are compared with a run over the full cache in
which all evicted tokens are masked. *(image)* marks types that were run with an image in the
context. This page is written by `python -m experiments.questions.architectures.document`.

## Where hooks and patches differ

Both mechanisms read keys, values and hidden states everywhere, so presses that need no more are
right by both or by neither.

The query exists between two lines of a forward. A hook sees it only if a submodule returns it,
before the rotation or after. Where a function of tensors comes last (a norm without a module, a
temperature by position, two projections joined as in MLA) no hook can collect it. A patch
receives the query as an argument of the attention function, provided that the module looks this
function up in transformers' registry. Where a module computes attention by itself, patches see no
query, and neither mechanism can attend over heads of different lengths.

Latent caches (MLA) hold one row for all heads, from which the module makes keys and values in
each forward. Rows can be evicted for all heads at once, by presses that go by position
(StreamingLLM, Random); presses that score keys by head are refused. Images give tokens positions
in three dimensions; an image *behind* re-rotated keys is refused.

## On transformers 5.2

{n_oldest} decoders of transformers 5.2 were swept likewise, under sdpa. These {changed} differ
from the table above:

{oldest}

## Left out

{n_left_out} types do not run on text alone, or cannot be built small: {left_out}. The CSV says
why.
"""
