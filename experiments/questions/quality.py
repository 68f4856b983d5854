"""What eviction costs in answers: the facts task on pruned caches, for every press.

The press sees the question or not (`experiments.testbed.asking`); both ways, both mechanisms answer
about the same contexts. Presses are at their usual settings (`experiments.testbed.recipes`); what
was learned about the model lies beside it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, NamedTuple

import pandas as pd
import torch
import typer
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from rich.progress import Progress
from torch import Tensor
from transformers import PreTrainedModel

import hooks_impl
from experiments import UserError
from experiments.framework.evidence import Evidence
from experiments.framework.experiment import Claim, Experiment, Finding, Related, Tables
from experiments.framework.intervals import METHOD, bracket, mean_interval
from experiments.framework.options import Device, Dtype, Mechanism
from experiments.framework.own_model import LeftOutError, OwnModel, Planned
from experiments.framework.plots import (
    CELL_INK,
    NO_PRESS,
    mechanism_colour,
    new_figure,
    press_label,
    style,
)
from experiments.framework.tables import ResultTable
from experiments.framework.works import KNORM, KVZIP, SNAPKV
from experiments.loading import load_model, short_name
from experiments.testbed.asking import (
    SEEN,
    UNSEEN,
    Task,
    answer_seen,
    answer_unseen,
    check_vocabulary,
)
from experiments.testbed.facts import draw
from experiments.testbed.recipes import MECHANISMS, WRAPPED, press_name, recipe
from press_core import PressError
from press_core.budget import n_kept
from press_core.scope import InstalledPress

NOT_COMPARED: dict[str, str] = {
    "ComposedPress": "a combination of presses that are compared by themselves",
    "EveryTurnPress": "of a single turn it is the press that it wraps",
    "PerLayerCompressionPress": "with one ratio for all layers it is the press that it wraps",
    "DMSPress": "told a threshold: how much it evicts depends on the context",
    "SimLayerKVPress": "told a threshold: how much it evicts depends on the context",
    "ThinKPress": "evicts channels of the keys, at most half of the cache",
    "CAMPress": "evicts while decoding, and an answer is one token",
    "CompressionRatioDecodingPress": "evicts while decoding, and an answer is one token",
    "DecodingPress": "evicts while decoding, and an answer is one token",
    "PrefillDecodingPress": "evicts while decoding, and an answer is one token",
    "StreamingLLMDecodingPress": "evicts while decoding, and an answer is one token",
}
"""Presses of which the experiment could not say what evicting a share of the tokens costs."""

NEEDS_QUESTION = ("FinchPress",)
"""Presses that choose by the question, and have nothing to do where it is not seen."""

_PROTOCOLS = {UNSEEN: answer_unseen, SEEN: answer_seen}


@dataclass(frozen=True)
class Options:
    """Who answers which questions."""

    press: Annotated[
        tuple[str, ...],
        typer.Option(
            help="Press to measure, such as SnapKVPress; repeat it for several.",
            show_default="all that evict a given share",
        ),
    ] = ()
    ratio: Annotated[
        tuple[float, ...],
        typer.Option(help="Share of the tokens to evict, in [0, 1); repeat it for several."),
    ] = (0.0, 0.8, 0.9)
    samples: Annotated[int, typer.Option(min=1, help="Contexts compressed without a question.")] = (
        Task.samples
    )
    seen_samples: Annotated[
        int, typer.Option(min=1, help="Contexts compressed together with a question.")
    ] = Task.seen_samples
    context: Annotated[int, typer.Option(min=2, help="Words in a context.")] = Task.context
    facts: Annotated[int, typer.Option(min=1, help="Facts in a context.")] = Task.facts
    model: Annotated[
        str, typer.Option(help="Shipped model, folder or hub id, trained on the facts task.")
    ] = "facts-llama"
    mechanism: Annotated[
        tuple[Mechanism, ...], typer.Option(help="Mechanism; repeat it for both.")
    ] = tuple(Mechanism)
    seed: Annotated[int, typer.Option(help="Seed of the contexts.")] = Task.seed
    dtype: Dtype = "float32"
    device: Device = "cpu"

    @property
    def task(self) -> Task:
        """How the questions are drawn."""
        return Task(self.context, self.facts, self.samples, self.seen_samples, self.seed)


class Condition(NamedTuple):
    """One curve point: what compresses, by which mechanism, and how much."""

    press: str
    mechanism: str
    ratio: float

    def make(self, length: int) -> InstalledPress | None:
        """The press for contexts of `length` tokens, None where there is none.

        Raises:
            HyperparameterError: if the ratio is out of range.
        """
        if self.press == NO_PRESS:
            return None
        return recipe(MECHANISMS[self.mechanism], self.press, self.ratio, length)

    @property
    def questions(self) -> tuple[str, ...]:
        """The kinds of question that it can be asked."""
        return (SEEN,) if self.press in NEEDS_QUESTION else (UNSEEN, SEEN)


def press_names() -> list[str]:
    """Presses that evict a given share of a context."""
    return sorted(set(hooks_impl.PRESSES) - set(NOT_COMPARED))


# ---- measuring ---------------------------------------------------------------------------------


def conditions(pairs: Sequence[tuple[str, str]], ratios: Sequence[float]) -> list[Condition]:
    """Every (press, mechanism) at every ratio; ratio 0 once, without a press."""
    bare = [Condition(NO_PRESS, "bare", 0.0)] if 0 in ratios else []
    return bare + [Condition(*pair, ratio) for pair in pairs for ratio in ratios if ratio]


def fitting(
    model: PreTrainedModel, names: Sequence[str], mechanisms: Sequence[str]
) -> tuple[list[tuple[str, str]], list[str]]:
    """Which presses can be opened on `model`.

    Returns:
        Pairs of press and mechanism, and for each pair that the model does not suit a sentence
        saying why.
    """
    pairs, refusals = [], []
    for name in names:
        for mechanism in mechanisms:
            try:
                press = Condition(name, mechanism, 0.5).make(Task.context)
                assert press is not None
                press.register(model).remove()
            except PressError as error:
                refusals.append(f"{name} ({mechanism}): {error}")
            else:
                pairs.append((name, mechanism))
    return pairs, refusals


def measure(
    model: PreTrainedModel,
    conditions: Sequence[Condition],
    task: Task,
    progress: Progress,
    *,
    model_name: str,
) -> Tables:
    """Answer the questions of `task` under every condition.

    Args:
        model_name: what the table calls the model.

    Returns:
        `quality`: a row per condition and kind of question; shares in [0, 1], `low` and `high` the
        interval over contexts. `quality_agreement`: per press, ratio and kind of question that both
        mechanisms answered, how many answers (tokens) are the same.
    """
    batches = {question: task.batches(question) for question in _PROTOCOLS}
    work = [(question, c) for question in _PROTOCOLS for c in conditions if question in c.questions]
    rows: list[dict[str, Any]] = []
    answered: dict[tuple[str, float, str], dict[str, Tensor]] = {}
    for question, condition in progress.track(work, description="quality"):
        press, answer = condition.make(task.context), _PROTOCOLS[question]
        answers = torch.cat([answer(model, press, batch) for batch in batches[question]])
        truth = torch.cat([b.answer_ids[:, : answers.shape[1]] for b in batches[question]])
        right = (answers == truth).double().mean(dim=1)  # of each context
        low, high = mean_interval(right)
        rows.append(
            condition._asdict()
            | {"question": question, "accuracy": float(right.mean()), "low": low, "high": high}
            | {"samples": len(truth), "answers": truth.numel()}
            | {"context": task.context, "facts": task.facts, "model": model_name}
        )
        key = condition.press, condition.ratio, question
        answered.setdefault(key, {})[condition.mechanism] = answers
    return {"quality": pd.DataFrame(rows), "quality_agreement": _agreement(answered)}


def _agreement(answered: dict[tuple[str, float, str], dict[str, Tensor]]) -> pd.DataFrame:
    rows = [
        (*key, answers["hook"].numel(), int((answers["hook"] == answers["patch"]).sum()))
        for key, answers in answered.items()
        if {"hook", "patch"} <= set(answers)
    ]
    return pd.DataFrame(rows, columns=["press", "ratio", "question", "answers", "same"])


def _chosen(model: PreTrainedModel, options: Options, progress: Progress) -> list[tuple[str, str]]:
    """The presses asked for, all of which have to fit the model; or all that fit it."""
    names = [press_name(name) for name in options.press] or press_names()
    for name in set(names) & set(NOT_COMPARED):
        raise UserError(
            f"{name} is not compared here ({NOT_COMPARED[name]}); choose from "
            f"{', '.join(map(press_label, press_names()))}"
        )
    pairs, refusals = fitting(model, names, [mechanism.value for mechanism in options.mechanism])
    if options.press and refusals:
        raise UserError("; ".join(refusals))
    for refusal in refusals:
        progress.console.print(f"left out: {refusal}", style="yellow", markup=False)
    return pairs


# ---- reading the tables ------------------------------------------------------------------------


def _figure(quality: pd.DataFrame, agreement: pd.DataFrame) -> Figure:
    """Accuracy by press and compression ratio, a panel per kind of question."""
    names = _by_accuracy(quality)
    ratios = [ratio for ratio in sorted(quality["ratio"].unique()) if ratio > 0]
    width, height = 1.9 + 0.55 * 2 * len(ratios), 1.2 + 0.2 * len(names)
    figure, axes = new_figure(columns=2, width=width, height=height, sharey=True)
    with style():
        for panel, question in zip(axes, (UNSEEN, SEEN), strict=True):
            of_question = quality[quality["question"] == question]
            unlike = agreement[
                (agreement["question"] == question) & (agreement["same"] < agreement["answers"])
            ]
            _draw_panel(panel, of_question, names, ratios)
            for name, ratio in zip(unlike["press"], unlike["ratio"], strict=True):
                corner = ratios.index(ratio), names.index(name)
                panel.add_patch(Rectangle(corner, 1, 1, fill=False, edgecolor=_UNLIKE, linewidth=2))
            panel.set_title(f"Question {question}")
            panel.set_xlabel("tokens evicted")
            panel.set_xticks([i + 0.5 for i in range(len(ratios))], [f"{r:.0%}" for r in ratios])
            panel.grid(False)
            panel.spines[:].set_visible(False)
        axes[0].set_yticks([i + 0.5 for i in range(len(names))], map(press_label, names))
        axes[0].set_ylim(len(names), 0)
    figure.set_label(
        "Right answers in %, by press and share of the tokens evicted, the question unseen (left) "
        "and seen (right) by the press"
        + (": framed where hook and patch differ" if _differ(agreement) else "")
    )
    return figure


_SHADES = LinearSegmentedColormap.from_list("accuracy", ["#ffffff", mechanism_colour("hook")])
_UNLIKE = mechanism_colour("patch")


def _draw_panel(panel: Axes, quality: pd.DataFrame, names: list[str], ratios: list[float]) -> None:
    """A cell for each press and ratio, shaded by accuracy; empty where nothing was measured."""
    cells = quality[quality["ratio"] > 0].drop_duplicates(["press", "ratio"])
    table = cells.pivot(index="press", columns="ratio", values="accuracy")
    shares = table.reindex(index=names, columns=ratios)
    panel.pcolormesh(shares, cmap=_SHADES, vmin=0, vmax=1, edgecolors="white", linewidth=1.5)
    records: list[dict[Any, Any]] = cells.to_dict("records")
    for row in records:
        place = ratios.index(row["ratio"]) + 0.5, names.index(row["press"]) + 0.5
        colour = "white" if row["accuracy"] > 0.6 else CELL_INK
        text = f"{row['accuracy']:.0%}"
        panel.text(*place, text, ha="center", va="center", fontsize=7.5, color=colour)


def _differ(agreement: pd.DataFrame) -> bool:
    return bool((agreement["same"] < agreement["answers"]).any())


def _by_accuracy(quality: pd.DataFrame) -> list[str]:
    """Presses, the best on average first; last those that were asked seen questions only."""
    pressed = quality[quality["press"] != NO_PRESS]
    means = pressed.pivot_table(index="press", columns="question", values="accuracy")
    order = [question for question in (UNSEEN, SEEN) if question in means]
    return [str(name) for name in means.sort_values(order, ascending=False).index]


def _text(accuracy: float, low: float, high: float) -> str:
    return f"{100 * accuracy:.0f}{bracket(100 * low, 100 * high, '.0f')}"


def _table(quality: pd.DataFrame) -> ResultTable:
    """Accuracy by press, kind of question and ratio; mechanisms apart only where they differ."""
    ratios = [ratio for ratio in sorted(quality["ratio"].unique()) if ratio > 0]
    columns = [(question, ratio) for question in (UNSEEN, SEEN) for ratio in ratios]
    rows = []
    for name in _by_accuracy(quality):
        lines = {
            str(mechanism): tuple(_cell(own, *column) for column in columns)
            for mechanism, own in quality[quality["press"] == name].groupby("mechanism")
        }
        agree = len(lines) == 2 and len(set(lines.values())) == 1
        for mechanism, cells in list(lines.items())[: 1 if agree else None]:
            label = press_label(name) if agree else f"{press_label(name)} ({mechanism})"
            rows.append([label, *cells])
    head = ["press", *(f"{question}, {ratio:.0%} evicted" for question, ratio in columns)]
    return ResultTable(_note(quality), head, rows)


def _cell(quality: pd.DataFrame, question: str, ratio: float) -> str:
    row = quality[(quality["question"] == question) & (quality["ratio"] == ratio)]
    if row.empty:
        return ""
    return _text(*(row[name].iloc[0] for name in ("accuracy", "low", "high")))


def _note(quality: pd.DataFrame) -> str:
    first = quality.iloc[0]
    text = (
        f"Right answers in % of `{first['model']}` about contexts of {first['context']} words with "
        f"{first['facts']} facts, by whether the press saw the question, with {METHOD} over "
        "contexts (none where all contexts agree)."
    )
    bare = quality[quality["press"] == NO_PRESS].set_index("question")["accuracy"]
    if bare.empty:
        return text
    whole = " and ".join(f"{bare[question]:.1%} ({question})" for question in (UNSEEN, SEEN))
    return f"{text} With nothing evicted it is {whole}."


def _finding_on_best(quality: pd.DataFrame) -> Finding:
    """Which press answers best where most is evicted that some press still answers well."""
    pressed = quality[quality["press"] != NO_PRESS]
    question = UNSEEN if UNSEEN in set(pressed["question"]) else SEEN
    asked = pressed[pressed["question"] == question]
    highest = asked.groupby("ratio")["accuracy"].max()
    good = highest[highest >= _GOOD]
    ratio = good.index.max() if len(good) else highest.index.min()
    rows = asked[asked["ratio"] == ratio]
    best = rows.loc[rows["accuracy"] == rows["accuracy"].max(), "press"].drop_duplicates()
    named = press_label(best.iloc[0]) if len(best) == 1 else f"{len(best)} presses"
    text = (
        f"With {ratio:.0%} of the context evicted, the question {question}, {named} still "
        f"{'answers' if len(best) == 1 else 'answer'} **{rows['accuracy'].max():.0%}** of the "
        "questions."
    )
    return Finding("best", text, "evict most of a context", "works" if len(good) else "costs")


_GOOD = 0.8
"""Share of right answers with which a press is said to work."""


def _finding_on_agreement(agreement: pd.DataFrame) -> Finding:
    total = int(agreement["answers"].sum())
    differ = total - int(agreement["same"].sum())
    if not total:
        return Finding("agreement", "**1** mechanism was measured: there is nothing to compare.")
    text = f"Hook and patch gave different answers to **{differ:,}** of {total:,} questions."
    need = "get the same answers from either mechanism"
    return Finding("agreement", text, need, "breaks" if differ else "works", Evidence.BITS)


def _sentence_on_best(quality: pd.DataFrame) -> Iterator[str]:
    """Which presses answer best at each ratio, where they have not seen the question."""
    unseen = quality[(quality["question"] == UNSEEN) & (quality["press"] != NO_PRESS)]
    best = []
    for ratio, rows in unseen.groupby("ratio"):
        highest = rows["accuracy"].max()
        names = rows.loc[rows["accuracy"] == highest, "press"].drop_duplicates().map(press_label)
        best.append(f"{_listed(names)} ({highest:.0%}) at {ratio:.0%} evicted")
    if best:
        yield f"Most answers are right, the question unseen, with {'; '.join(best)}."


def _listed(names: Iterable[str]) -> str:
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last


def _notes(quality: pd.DataFrame) -> list[str]:
    """What a reader of the numbers would stumble over, where it shows in them."""
    notes, strongest, context = [], quality["ratio"].max(), int(quality["context"].iloc[0])
    at = quality[(quality["ratio"] == strongest) & (quality["question"] == UNSEEN)]
    accuracy = at.groupby("press")["accuracy"].first()
    recent = accuracy.get("StreamingLLMPress", 0.0)
    if recent > 2 * (1 - strongest):
        notes.append(
            f"A fact can outlive the eviction of its own two tokens, as later tokens carry it on: "
            f"StreamingLLM keeps the latest {1 - strongest:.0%} of the context, and "
            f"{recent:.0%} of the answers are right."
        )
    window = hooks_impl.SnapKVPress().window_size
    if "SnapKVPress" in accuracy and n_kept(context + 1, strongest) <= window:
        notes.append(
            f"With {strongest:.0%} evicted SnapKV, and what wraps it, can keep no more than its "
            f"window of {window} tokens, the most recent ones."
        )
    return [*notes, *_notes_on_presses(set(quality["press"]))]


def _notes_on_presses(shown: set[str]) -> Iterator[str]:
    for inner in sorted(set(WRAPPED.values())):
        outer = [
            press_label(name) for name in sorted(shown & set(WRAPPED)) if WRAPPED[name] == inner
        ]
        if outer:
            verb = "wraps" if len(outer) == 1 else "wrap"
            yield f"{_listed(outer)} {verb} {press_label(inner)}."
    if asked := sorted(shown & set(NEEDS_QUESTION)):
        yield f"{_listed(map(press_label, asked))} chooses by the question, so it has to see it."
    reasons: dict[str, list[str]] = {}
    for name, reason in NOT_COMPARED.items():
        reasons.setdefault(reason, []).append(press_label(name))
    left_out = "; ".join(f"{_listed(names)} ({reason})" for reason, names in reasons.items())
    yield f"Not compared: {left_out}."


class Quality(Experiment[Options]):
    """Accuracy on the facts task against compression ratio, press by press."""

    name = "quality"
    title = "What eviction costs in answers"
    question = (
        "How many facts can still be retrieved from a pruned cache, by press, compression ratio, "
        "mechanism, and whether the question was seen?"
    )
    method = (
        "A small Llama that was trained to retrieve facts reads a context, the press evicts, and "
        "the model is asked. Either the press has seen the question, or all questions are asked "
        "of copies of one pruned cache. Both mechanisms answer about the same contexts, and their "
        "answers are compared one by one. The ranking of presses is that of one small model and "
        "one task, in which a fact is two tokens; larger models spread what they know over more "
        "of them."
    )
    evidence = Evidence.MODEL
    full = Options()
    quick = Options(ratio=(0.0, 0.8), samples=6, seen_samples=6)
    claims: ClassVar = {
        "agreement": Claim(replace(quick, press=("SnapKVPress", "AdaKVPress", "KnormPress"))),
    }

    def on(self, own: OwnModel) -> Planned[Options]:
        raise LeftOutError("its questions are in the words of facts-llama; evaluate asks in plain")

    def measure(self, options: Options, progress: Progress) -> Tables:
        try:
            draw(1, options.context, options.facts, torch.Generator())
        except ValueError as error:
            raise UserError(f"--context, --facts: {error}") from error
        model, tokenizer = load_model(options.model, dtype=options.dtype, device=options.device)
        check_vocabulary(tokenizer, options.model)
        measured = conditions(_chosen(model, options, progress), options.ratio)
        for condition in measured:
            condition.make(options.context)  # refuses a ratio out of range before anything is run
        name = short_name(options.model)
        return measure(model, measured, options.task, progress, model_name=name)

    def findings(self, tables: Tables) -> list[Finding]:
        agreement = _finding_on_agreement(tables["quality_agreement"])
        if (tables["quality"]["press"] == NO_PRESS).all():
            return [agreement]
        return [_finding_on_best(tables["quality"]), agreement]

    def views(self, tables: Tables) -> list[ResultTable]:
        return [_table(tables["quality"])]

    def remarks(self, tables: Tables) -> list[str]:
        quality = tables["quality"]
        notes = [*_sentence_on_best(quality), *_notes(quality)]
        return ["\n".join(f"- {note}" for note in notes)]

    def related(self, tables: Tables) -> list[Related]:
        return list(related(tables["quality"]))

    def figures(self, tables: Tables) -> dict[str, Figure]:
        return {"quality": _figure(tables["quality"], tables["quality_agreement"])}


EXPERIMENT = Quality()


_PAPERS = (
    (
        "KVzipPress",
        (UNSEEN,),
        KVZIP,
        "Caches become three to four times smaller with negligible loss, the question unseen.",
    ),
    (
        "SnapKVPress",
        (SEEN, UNSEEN),
        SNAPKV,
        "Chooses tokens by what the end of the prompt, the question among it, attends to.",
    ),
    (
        "KnormPress",
        (UNSEEN,),
        KNORM,
        "Evicts half of the cache in needle-in-a-haystack tests, and 90% in passkey retrieval, "
        "without losing accuracy.",
    ),
)
"""Press, whether it saw the question, whose work, and what it says."""


def related(quality: pd.DataFrame) -> Iterator[Related]:
    """What papers say of their presses, and how these answer here."""
    model = quality["model"].iloc[0]
    for press, questions, work, says in _PAPERS:
        told = [_answered(quality, press, question) for question in questions]
        if all(told):
            yield Related("best", work, says, f"On {model}, right answers: {'; '.join(told)}.")


def _answered(quality: pd.DataFrame, press: str, question: str) -> str:
    """`"98% with 80% evicted (question unseen)"`, for all ratios; empty if not asked."""
    asked = quality[(quality["press"] == press) & (quality["question"] == question)]
    means = asked.groupby("ratio")["accuracy"].mean()
    listed = ", ".join(f"{mean:.0%} with {ratio:.0%} evicted" for ratio, mean in means.items())
    return listed and f"{listed} (question {question})"
