"""What the sweep's table says about the reach of hooks and patches, and why it ends."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from experiments.framework.plots import new_figure, style
from experiments.framework.tables import ResultTable, markdown_table
from experiments.questions.architectures.cells import OUTCOMES, SUBJECTS
from experiments.questions.architectures.sweep import CONDITIONS

BOTH, PATCH, HOOK, NEITHER, WRONG = "both", "patch", "hook", "neither", "wrong"
COLOURS = {
    BOTH: ("right by hook and patch", "#0072B2"),
    PATCH: ("right by patch, hook refused", "#56B4E9"),
    HOOK: ("right by hook, patch refused", "#009E73"),
    NEITHER: ("refused when the scope opens", "#e4e4e4"),
    WRONG: ("wrong, late or a crash", "#D55E00"),
}

REASONS = {
    "latents of width": "latents are cached, of which keys and values are made",
    "has no rotary": "the model has no rotary position embeddings",
    "nobody can see": "rotation happens where nobody can see it",
    "not undone": "something follows the rotation that rotating back does not undo",
    "something else than cosines": "rotation is by something else than cosines and sines",
    "that no rotary module": "cosines and sines come from no rotary module",
    "a hook cannot tell": "no submodule puts out the query, so that no hook can collect it",
    "one by one": "heads are mixed before attention",
    "the same norm": "all keys have the same norm",
    "that were evicted before": "attention goes by a key's place in the cache",
    "use a sliding window": "all layers see a window only",
    "linear state": "the layer holds a linear state too, which head-wise layers cannot",
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
    runs = table[table["worst"] != "not applicable"]
    worst = runs.pivot_table(
        index=["type", "press"], columns="mechanism", values="worst", aggfunc="first", sort=False
    )
    refused = runs[runs["worst"] == "refused at open"].groupby(["type", "press"])["reason"].first()
    rows = [
        (*place, _reach(hook, patch), refused.get(place, ""))
        for place, hook, patch in zip(worst.index, worst["hook"], worst["patch"], strict=True)
    ]
    return pd.DataFrame(rows, columns=["type", "press", "reach", "reason"])


def _reach(hook: str, patch: str) -> str:
    if {hook, patch} - {"right", "refused at open"}:
        return WRONG
    if hook == patch:
        return BOTH if hook == "right" else NEITHER
    return HOOK if hook == "right" else PATCH


def reasons(table: pd.DataFrame) -> ResultTable:
    """Why presses are refused, and on how many decoders."""
    reached = reach(table)
    refused = reached[reached["reason"] != ""].assign(why=lambda t: t["reason"].map(why))
    groups = sorted(refused.groupby("why"), key=lambda pair: -pair[1]["type"].nunique())
    rows = [
        [short, group["type"].nunique(), ", ".join(_in_order(group)), _examples(group)]
        for short, group in groups
    ]
    note = "Why a press is refused when its scope opens, before anything is installed."
    return ResultTable(note, ["reason", "decoders", "presses", "such as"], rows, left=None)


def _in_order(group: pd.DataFrame) -> list[str]:
    refused = set(group["press"])
    return ["all"] if len(refused) == len(SUBJECTS) else [p for p in SUBJECTS if p in refused]


def _examples(group: pd.DataFrame) -> str:
    return ", ".join(f"`{name}`" for name in list(dict.fromkeys(group["type"]))[:3])


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
    """`docs/architectures.md`: every decoder, and the reason of every refusal.

    Args:
        table: of the newest release of transformers that is supported.
        oldest: of the oldest.
    """
    reached = reach(table)
    left_out = table[table["worst"] == "not applicable"].groupby("type")["reason"].first()
    left_out = left_out[~left_out.index.isin(reached["type"])]
    rows = _rows(reached)
    parts = [
        _introduction(table, reached, len(left_out)),
        "## Why presses are refused",
        reasons(table).markdown(),
        "## Every decoder",
        "*yes*: right by hook and by patch; *patch*: by patch alone, the hook being refused when "
        "its scope opens; *no*: refused by both.",
        markdown_table(["type", *SUBJECTS, "why not"], list(rows.values()), left=None),
        *_of_oldest(rows, oldest),
        "## Left out",
        "They do not run on text alone, or cannot be built small.",
        markdown_table(
            ["type", "what they say"],
            [[f"`{kind}`", reason[:160]] for kind, reason in left_out.items()],
            left=None,
        ),
    ]
    return "\n\n".join(parts) + "\n"


def _introduction(table: pd.DataFrame, reached: pd.DataFrame, n_left_out: int) -> str:
    pruned = reached[reached["press"] != "nothing evicted"]
    by_type = pruned.groupby("type")["reach"].agg(set)
    of_cells = [str(cell) for condition in CONDITIONS for cell in table[condition]]
    of_cells = [cell for cell in of_cells if cell not in ("", "not applicable")]
    return _INTRODUCTION.format(
        n=reached["type"].nunique(),
        left_out=n_left_out,
        some=sum(bool(found - {NEITHER, WRONG}) for found in by_type),
        all=sum(found == {BOTH} for found in by_type),
        patch=sum(PATCH in found for found in by_type),
        hook=sum(HOOK in found for found in by_type),
        wrong=sum(cell in OUTCOMES[2:6] for cell in of_cells),
        cells=len(of_cells),
        audit=_AUDIT,
    )


def _rows(reached: pd.DataFrame) -> dict[str, list[str]]:
    """By type, a row of the table of all decoders."""
    words = {BOTH: "yes", PATCH: "patch", HOOK: "hook", NEITHER: "no", WRONG: "**wrong**"}
    rows: dict[str, list[str]] = {}
    for kind, group in reached.groupby("type"):
        by_press = dict(zip(group["press"], group["reach"], strict=True))
        short = dict.fromkeys(why(reason) for reason in group["reason"] if reason)
        cells = [words[by_press[press]] if press in by_press else "" for press in SUBJECTS]
        rows[str(kind)] = [f"`{kind}`", *cells, "; ".join(short)]
    return rows


def _of_oldest(newest: dict[str, list[str]], oldest: pd.DataFrame) -> list[str]:
    """What differs on the oldest release of transformers that is supported."""
    rows = _rows(reach(oldest))
    others = [row for kind, row in rows.items() if kind in newest and row[:-1] != newest[kind][:-1]]
    n_same = sum(kind in newest for kind in rows) - len(others)
    alone = ", ".join(row[0] for kind, row in rows.items() if kind not in newest)
    text = (
        f"{len(rows)} decoders of transformers 5.2 are swept likewise. {n_same} do as above, "
        f"{len(others)} otherwise:"
    )
    parts = ["## On transformers 5.2", text]
    parts.append(markdown_table(["type", *SUBJECTS, "why not"], others, left=None))
    if alone:
        parts.append(f"Swept there alone: {alone}.")
    return parts


_AUDIT = """## Where hooks and patches end

Keys and values lie in the cache when attention has run, and hidden states are what its module was
given. Both mechanisms read these everywhere, so presses that need no more are right by both or by
neither: of what a model *does* (rotations, windows, caches, the pairing of heads) neither knows
more than the other.

The query parts them. It exists between two lines of a forward. A hook sees it if some submodule
puts it out, in whatever layout, before the rotation or after: the probe compares the outputs of all
of them with what attention receives. Where a function of tensors comes last (a norm without a
module, a temperature by position, two projections put together as in MLA) there is nothing to hang
a hook on. A patch does not look for it: it receives the query of the very call, as an argument of
the attention function. But it depends on that function being asked for in transformers' registry:
where a module attends by lines of its own, patches see no query, and neither hooks nor patches can
attend over heads of different lengths.

Neither reaches what is no longer there. Latent caches (MLA) hold one row for all heads, of which
the module makes keys and values anew in each forward. A row can be evicted for all heads at once,
by presses that go by places (StreamingLLM, Random). Scores by head would have to be put together,
after being computed from keys that are made with the module's own projection, rotated and not: a
second computation of what the module does inside, by names that differ from family to family, and
the query would be patches' alone. So those presses are refused by name. Where a release or a model
caches whole keys instead (DeepSeek-V3 on transformers 5.2), those that read keys and values work.

Neither mechanism makes a wrong assumption right: what the probe finds (positions by place in the
cache, keys of one norm, heads mixed before attention, rotations by complex numbers as in Llama 4)
is refused for both.

Images change two things. Their positions lie in three dimensions, and no position ids that a module
is given say so: presses that turn keys back use the cosines and sines of the call, and presses that
look ahead find the last token by its own. A re-rotated key has the same new position in all
dimensions, as text has, and an image *behind* re-rotated keys is refused. And in some models the
tokens of an image see each other, later ones too: weights that are computed again take that from
the mask."""

_INTRODUCTION = """# Decoders

Written by `python -m experiments.questions.architectures.document` from the results of
`python -m experiments architectures`.

Before a scope installs anything, the model at hand is run once over seven tokens, and what its
attention functions receive is compared with what a press would read: whether the layer rotates its
queries and keys, where the query is final, which heads belong together, what is cached, and whether
attention stays the same when a token is taken out of the cache. What does not hold is refused by
the presses that need it. That takes place once per class and configuration of a model;
`with press_core.unverified(): ...` opens a scope without.

{n} decoders of transformers 5.23 are swept with tiny random weights: one press for each kind of
input that a press can read, by hook and by patch, with eager and sdpa attention, the model's own
cache and a bare `DynamicCache()`, and in a padded batch. What is kept, and the logits that follow,
are compared with a run over the full cache in which all that is evicted is masked. They run on
text; *(image)* marks those that run with an image in the context and text behind it, too.
{left_out} more are left out.

Of the {n}, some press is right on {some}: {all} take every press by both mechanisms, on {patch} a
patch reaches what no hook does, and on {hook} a hook what no patch does. {wrong} cells of {cells}
are wrong, raise something else than a refusal, or refuse once the model is running.

![Decoders by press, and which mechanism is right](../results/architectures.png)

{audit}"""
