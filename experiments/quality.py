"""What eviction costs in answers: the facts task on pruned caches, for every press.

*Question unseen*: the press compresses the context, then every question about it is asked from a
copy of the same pruned cache. A question is two tokens, read in one forward.

*Question seen*: the press compresses the context together with one question. The logits of that
prefill have not felt the eviction, which happens as each layer finishes; so the last token of the
question is run once more, at its own position, on the pruned cache, and the answer read from there.
(Asking the whole question again would not do: a model trained to be asked once finds the first
asking, not the fact.)

Both are done inside one open scope, and for both mechanisms on the same contexts.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import MISSING, dataclass, fields
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import pandas as pd
import torch
import typer
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor
from transformers import Cache, PreTrainedModel, PreTrainedTokenizerBase

import hooks_impl
import patch_impl
from experiments import UserError
from experiments.experiment import Experiment, Tables
from experiments.facts import VOCABULARY, FactBatch, draw
from experiments.loading import load_model, short_name
from experiments.plots import (
    INK,
    MUTED,
    legend_outside,
    new_figure,
    percent_axis,
    press_label,
    press_line,
    save,
    style,
)
from press_core import Press, PressError
from press_core.select import n_kept

MECHANISMS: dict[str, dict[str, Any]] = {
    "hook": hooks_impl.PRESSES,
    "patch": patch_impl.PRESSES,
}
"""Every press class by mechanism and name."""

RATIOS = (0.0, 0.25, 0.5, 0.8, 0.9)
NO_PRESS = "no press"
"""What the table calls the model without a press, measured once: ratio 0 evicts nothing."""

UNSEEN, SEEN = "unseen", "seen"
_BATCH = 8
"""Contexts per forward; on a CPU more only fall out of its caches."""


@dataclass(frozen=True)
class Task:
    """How the facts task is drawn.

    Attributes:
        context: words per context, `<bos>` not counted.
        facts: facts per context.
        samples: contexts compressed without a question; all of their facts are asked for.
        seen_samples: contexts compressed together with a question, the first of each.
        seed: of the contexts.
    """

    context: int = 512
    facts: int = 8
    samples: int = 64
    seen_samples: int = 64
    seed: int = 512

    def batches(self, question: str) -> list[FactBatch]:
        """The contexts for one kind of question, `_BATCH` or fewer at a time."""
        generator = torch.Generator().manual_seed(self.seed)
        samples = self.samples if question == UNSEEN else self.seen_samples
        sizes = [min(_BATCH, samples - first) for first in range(0, samples, _BATCH)]
        return [draw(size, self.context, self.facts, generator) for size in sizes]


class Condition(NamedTuple):
    """One curve point: what compresses, by which mechanism, and how much."""

    press: str
    mechanism: str
    ratio: float

    def make(self) -> Press | None:
        """The press, all fields but the ratio at their defaults, seeded where it is random."""
        if self.press == NO_PRESS:
            return None
        press: type[Press] = MECHANISMS[self.mechanism][self.press]
        seeded = {"seed": 0} if "seed" in _field_names(press) else {}
        return press(compression_ratio=self.ratio, **seeded)  # type: ignore[call-arg]


def press_names() -> list[str]:
    """Presses that can be made from a compression ratio alone."""
    return sorted(
        name
        for name, press in hooks_impl.PRESSES.items()
        if "compression_ratio" in _field_names(press)
        and all(f.default is not MISSING or f.default_factory is not MISSING for f in fields(press))
    )


def _field_names(press: type[Press]) -> set[str]:
    return {field.name for field in fields(press)}


# ---- the two protocols -------------------------------------------------------------------------


@torch.inference_mode()
def answer_unseen(model: PreTrainedModel, press: Press | None, batch: FactBatch) -> Tensor:
    """Answers to all questions about contexts that were compressed before any was known.

    Each question has its own copy of the pruned cache, so that none sees another or its answer.

    Args:
        press: opened on `model` meanwhile; None: nothing is compressed.

    Returns:
        `(B, facts)` int64, the likeliest of all tokens after each question.
    """
    rows, n_facts = batch.answer_ids.shape
    with _scope(press, model):
        cache = _prefill(model, batch.context_ids)
        cache.batch_repeat_interleave(n_facts)
        questions = batch.question_ids.flatten(0, 1).to(model.device)
        logits = model(input_ids=questions, past_key_values=cache, logits_to_keep=1).logits
    return logits[:, -1].argmax(dim=-1).view(rows, n_facts).cpu()


@torch.inference_mode()
def answer_seen(model: PreTrainedModel, press: Press | None, batch: FactBatch) -> Tensor:
    """Answers to the first question about each context, compressed together with it.

    Args:
        press: opened on `model` meanwhile; None: nothing is compressed.

    Returns:
        `(B, 1)` int64, the likeliest of all tokens after the question.
    """
    text = torch.cat((batch.context_ids, batch.question_ids[:, 0]), dim=1).to(model.device)
    position = torch.full_like(text[:, -1:], text.shape[1] - 1)
    with _scope(press, model):
        cache = _prefill(model, text)
        logits = model(input_ids=text[:, -1:], position_ids=position, past_key_values=cache).logits
    return logits[:, -1].argmax(dim=-1, keepdim=True).cpu()


_PROTOCOLS = {UNSEEN: answer_unseen, SEEN: answer_seen}


def _scope(press: Press | None, model: PreTrainedModel) -> AbstractContextManager[Any]:
    return nullcontext() if press is None else press(model)


def _prefill(model: PreTrainedModel, input_ids: Tensor) -> Cache:
    # Without the language-modelling head: nobody reads logits over the context.
    return model.base_model(input_ids=input_ids.to(model.device), use_cache=True).past_key_values


# ---- measuring ---------------------------------------------------------------------------------


def wilson(right: int, total: int, z: float = 1.959964) -> tuple[float, float]:
    """Wilson's score interval of a share: 95% for the default `z`.

    Args:
        right: successes, `0 <= right <= total`.
        total: trials, at least 1.

    Returns:
        Lower and upper end, in [0, 1].
    """
    share = right / total
    centre = share + z * z / (2 * total)
    spread = z * (share * (1 - share) / total + z * z / (4 * total * total)) ** 0.5
    scale = 1 + z * z / total
    return max(0.0, (centre - spread) / scale), min(1.0, (centre + spread) / scale)


def conditions(
    pairs: Sequence[tuple[str, str]], ratios: Sequence[float] = RATIOS
) -> list[Condition]:
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
                press = Condition(name, mechanism, 0.5).make()
                assert press is not None
                press.register(model).remove()
            except PressError as error:
                refusals.append(f"{name} ({mechanism}): {error}")
            else:
                pairs.append((name, mechanism))
    return pairs, refusals


def check_vocabulary(tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    """Refuse a model that does not speak the language of the facts task.

    Raises:
        UserError: if its tokens are not those of `experiments.facts`.
    """
    if tokenizer.get_vocab() != {word: index for index, word in enumerate(VOCABULARY)}:
        raise UserError(
            f"{name!r} has another vocabulary than the facts task; give facts-llama, or a model "
            "trained by `python -m experiments.training.facts`"
        )


def measure(
    model: PreTrainedModel,
    conditions: Sequence[Condition],
    task: Task,
    *,
    model_name: str,
    progress: bool = True,
) -> Tables:
    """Answer the questions of `task` under every condition.

    Args:
        model_name: what the table calls the model.
        progress: show a bar on stderr.

    Returns:
        `quality`: a row per condition and kind of question; shares in [0, 1], `low` and `high` the
        95% Wilson interval. `quality_agreement`: per press, ratio and kind of question that both
        mechanisms answered, how many answers (tokens) are the same.
    """
    batches = {question: task.batches(question) for question in _PROTOCOLS}
    work = [(question, condition) for question in _PROTOCOLS for condition in conditions]
    rows: list[dict[str, Any]] = []
    answered: dict[tuple[str, float, str], dict[str, Tensor]] = {}
    shown = track(work, "quality", console=Console(stderr=True), disable=not progress)
    for question, condition in shown:
        press, answer = condition.make(), _PROTOCOLS[question]
        answers = torch.cat([answer(model, press, batch) for batch in batches[question]])
        truth = torch.cat([b.answer_ids[:, : answers.shape[1]] for b in batches[question]])
        right, total = int((answers == truth).sum()), truth.numel()
        low, high = wilson(right, total)
        rows.append(
            condition._asdict()
            | {"question": question, "accuracy": right / total, "low": low, "high": high}
            | {"samples": len(truth), "answers": total}
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


def run() -> Tables:
    """The study: all presses, both mechanisms, on the shipped model."""
    model, _ = load_model("facts-llama")
    pairs, refusals = fitting(model, press_names(), list(MECHANISMS))
    _tell_refusals(refusals)
    return measure(model, conditions(pairs), Task(), model_name="facts-llama")


def _tell_refusals(refusals: Sequence[str]) -> None:
    for refusal in refusals:
        Console(stderr=True).print(f"left out: {refusal}", style="yellow", markup=False)


# ---- reading the tables ------------------------------------------------------------------------


def figures(tables: Tables) -> dict[str, Figure]:
    """Accuracy against compression ratio: `quality`, a panel per kind of question."""
    quality = tables["quality"]
    with style():
        figure, axes = new_figure(columns=2, width=9.0, height=3.9, sharey=True)
        for panel, question in zip(axes, (UNSEEN, SEEN), strict=True):
            _draw_panel(panel, quality[quality["question"] == question])
            panel.set_title(f"Question {question} by the press")
            panel.set_xlabel("share of the tokens evicted")
            percent_axis(panel.xaxis)
        axes[0].set_ylabel("right answers")
        axes[0].set_ylim(-0.02, 1.02)
        percent_axis(axes[0].yaxis)
        legend_outside(figure, axes[0], handles=_legend(quality))
    return {"quality": figure}


def _draw_panel(panel: Axes, quality: pd.DataFrame) -> None:
    bare = quality[quality["press"] == NO_PRESS]
    if not bare.empty:
        panel.axhline(bare["accuracy"].iloc[0], **_BARE)
    for name in _by_accuracy(quality):
        rows = quality[quality["press"] == name]
        first = "hook" if (rows["mechanism"] == "hook").any() else "patch"
        line = pd.concat((bare, rows[rows["mechanism"] == first])).sort_values("ratio")
        look = press_line(name)
        panel.plot(line["ratio"], line["accuracy"], **look)
        panel.fill_between(
            line["ratio"], line["low"], line["high"], color=look["color"], alpha=0.09, linewidth=0
        )
        patch = rows[rows["mechanism"] == "patch"]
        panel.plot(patch["ratio"], patch["accuracy"], color=look["color"], zorder=3, **_PATCH)
    panel.set_xticks(sorted(quality["ratio"].unique()))


_BARE: dict[str, Any] = {"color": MUTED, "linewidth": 0.9, "linestyle": (0, (5, 3))}
_PATCH: dict[str, Any] = {
    "linestyle": "none",
    "marker": "s",
    "markerfacecolor": "white",
    "markeredgewidth": 1.2,
    "markersize": 4.5,
}


def _by_accuracy(quality: pd.DataFrame) -> list[str]:
    """Presses, the best on average (over the questions not seen, if there are any) first."""
    pressed = quality[quality["press"] != NO_PRESS]
    unseen = pressed[pressed["question"] == UNSEEN]
    mean = (pressed if unseen.empty else unseen).groupby("press")["accuracy"].mean()
    return [str(name) for name in mean.sort_values(ascending=False).index]


def _legend(quality: pd.DataFrame) -> list[Line2D]:
    presses = [Line2D([], [], **press_line(name)) for name in _by_accuracy(quality)]
    mechanisms = set(quality["mechanism"])
    notes = [Line2D([], [], linestyle="none", label="")]
    if "hook" in mechanisms:
        notes.append(Line2D([], [], color=INK, label="line: hook"))
    if "patch" in mechanisms:
        notes.append(Line2D([], [], color=INK, label="squares: patch", **_PATCH))
    if NO_PRESS in set(quality["press"]):
        notes.append(Line2D([], [], label="nothing evicted", **_BARE))
    return presses + notes


def summary(tables: Tables) -> str:
    """What was measured, as Markdown."""
    quality = tables["quality"]
    shown = [ratio for ratio in (0.5, 0.8, 0.9) if ratio in set(quality["ratio"])]
    columns = [(question, ratio) for question in (UNSEEN, SEEN) for ratio in shown]
    lines = [
        f"{sentence_on_agreement(tables['quality_agreement'])} {_sentence_on_best(quality)}",
        "",
        _sentence_on_task(quality),
        "",
        "| press | " + " | ".join(f"{q}, {r:.0%} evicted" for q, r in columns) + " |",
        "|---|" + "--:|" * len(columns),
    ]
    for name in _by_accuracy(quality):
        rows = quality[quality["press"] == name].groupby(["question", "ratio"])["accuracy"].first()
        cells = [f"{rows[c]:.1%}" if c in rows.index else "" for c in columns]
        lines.append(f"| {press_label(name)} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", *_notes(quality)])


def _sentence_on_best(quality: pd.DataFrame) -> str:
    """Which press answers best, where it has not seen the question."""
    unseen = quality[(quality["question"] == UNSEEN) & (quality["press"] != NO_PRESS)]
    best = []
    for ratio, rows in unseen.groupby("ratio"):
        row = rows.sort_values("accuracy", kind="stable").iloc[-1]
        best.append(f"{press_label(row['press'])} ({row['accuracy']:.0%}) at {ratio:.0%} evicted")
    if not best:
        return ""
    return f"Most answers are right, the question unseen, with {', '.join(best)}."


def _sentence_on_task(quality: pd.DataFrame) -> str:
    first = quality.iloc[0]
    widest = (quality["high"] - quality["low"]).groupby(quality["question"]).max() / 2
    text = (
        f"Share of right answers of `{first['model']}` about contexts of {first['context']} words "
        f"with {first['facts']} facts, by whether the press saw the question, at 95% confidence "
        + " and ".join(f"±{widest[q]:.1%} or better ({q})" for q in (UNSEEN, SEEN))
        + "."
    )
    bare = quality[quality["press"] == NO_PRESS].set_index("question")["accuracy"]
    if not bare.empty:
        text += " With nothing evicted it is " + " and ".join(
            f"{bare[q]:.1%} ({q})" for q in (UNSEEN, SEEN)
        )
        text += "."
    return text


def sentence_on_agreement(agreement: pd.DataFrame) -> str:
    """One sentence on whether both mechanisms gave the same answers."""
    total, same = int(agreement["answers"].sum()), int(agreement["same"].sum())
    if not total:
        return "One mechanism was measured, so there is nothing to compare."
    if same == total:
        return f"Hook and patch gave the same answer to every one of {total:,} questions."
    return f"Hook and patch gave different answers to {total - same:,} of {total:,} questions."


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
            f"With {strongest:.0%} evicted SnapKV can keep no more than its window of {window} "
            "tokens, the most recent ones."
        )
    return notes


EXPERIMENT = Experiment(
    name="quality",
    title="What eviction costs in answers",
    question="How many facts can still be retrieved from a pruned cache, by press, compression "
    "ratio, mechanism, and whether the question was seen?",
    run=run,
    figures=figures,
    summary=summary,
    repeat="python -m experiments quality",
)


# ---- command -----------------------------------------------------------------------------------


class Mechanism(str, Enum):
    """How a press gets at the model."""

    HOOK = "hook"
    PATCH = "patch"


def command(
    press: Annotated[
        list[str] | None,
        typer.Option(help="Press to measure, such as SnapKVPress; repeat it for several. All."),
    ] = None,
    ratio: Annotated[
        list[float] | None,
        typer.Option(help="Share of the tokens to evict, in [0, 1); repeat it for several."),
    ] = None,
    samples: Annotated[
        int, typer.Option(min=1, help="Contexts compressed without a question.")
    ] = Task.samples,
    seen_samples: Annotated[
        int, typer.Option(min=1, help="Contexts compressed together with a question.")
    ] = Task.seen_samples,
    context: Annotated[int, typer.Option(min=2, help="Words in a context.")] = Task.context,
    facts: Annotated[int, typer.Option(min=1, help="Facts in a context.")] = Task.facts,
    model: Annotated[
        str, typer.Option(help="Shipped model, folder or hub id, trained on the facts task.")
    ] = "facts-llama",
    mechanism: Annotated[
        list[Mechanism] | None, typer.Option(help="Mechanism; repeat it for both, the default.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the contexts.")] = Task.seed,
    device: Annotated[str, typer.Option(help="Where to run: cpu, cuda.")] = "cpu",
    output: Annotated[
        Path | None, typer.Option(help="Folder to write the tables and the figure to.")
    ] = None,
) -> None:
    """Accuracy on the facts task against compression ratio, press by press."""
    task = Task(context, facts, samples, seen_samples, seed)
    try:
        draw(1, context, facts, torch.Generator())
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--context, --facts") from error
    loaded, tokenizer = load_model(model, device=device)
    check_vocabulary(tokenizer, model)
    pairs = _chosen(loaded, press, [m.value for m in mechanism or Mechanism])
    measured = conditions(pairs, ratio or RATIOS)
    for condition in measured:
        condition.make()  # refuses a ratio out of range before anything is run
    tables = measure(loaded, measured, task, model_name=short_name(model))
    _show(tables)
    if output is not None:
        _write(tables, output)


def _chosen(
    model: PreTrainedModel, names: list[str] | None, mechanisms: list[str]
) -> list[tuple[str, str]]:
    """The presses asked for, all of which have to fit the model; or all that fit it."""
    unknown = sorted(set(names or ()) - set(press_names()))
    if unknown:
        raise typer.BadParameter(
            f"cannot make {', '.join(unknown)} from a compression ratio alone; what can be made is "
            f"{', '.join(press_names())}",
            param_hint="--press",
        )
    pairs, refusals = fitting(model, names or press_names(), mechanisms)
    if names and refusals:
        raise UserError("; ".join(refusals))
    _tell_refusals(refusals)
    return pairs


def _show(tables: Tables) -> None:
    console = Console()
    quality = tables["quality"]
    for question in (UNSEEN, SEEN):
        rows = quality[quality["question"] == question]
        first = rows.iloc[0]
        # Beside the table, not as its title, which a narrow table would break into many lines.
        console.print(f"Right answers in % by share of the tokens evicted, question {question}")
        console.print(_rich_table(rows))
        console.print(
            f"{first['model']}, {first['context']} words, {first['facts']} facts; "
            f"{first['answers']} answers each, with half the width of the 95% interval\n"
        )
    console.print(sentence_on_agreement(tables["quality_agreement"]))


def _rich_table(quality: pd.DataFrame) -> Table:
    table = Table(box=SIMPLE_HEAD)
    table.add_column("press", no_wrap=True)
    table.add_column("mechanism", no_wrap=True)
    ratios = sorted(quality["ratio"].unique())
    for ratio in ratios:
        table.add_column(f"{ratio:.0%}", justify="right", no_wrap=True)
    for name in [NO_PRESS, *_by_accuracy(quality)]:
        rows = quality[quality["press"] == name]
        cells = {
            str(mechanism): tuple(_cell(own, ratio) for ratio in ratios)
            for mechanism, own in rows.groupby("mechanism")
        }
        if len(cells) == 2 and len(set(cells.values())) == 1:
            cells = {"both": next(iter(cells.values()))}
        for mechanism, texts in cells.items():
            table.add_row(press_label(name), mechanism, *texts)
    return table


def _cell(quality: pd.DataFrame, ratio: float) -> str:
    row = quality[quality["ratio"] == ratio]
    if row.empty:
        return ""
    accuracy, low, high = (100 * row[name].iloc[0] for name in ("accuracy", "low", "high"))
    return f"{accuracy:.0f} ±{(high - low) / 2:.0f}"


def _write(tables: Tables, output: Path) -> None:
    output.mkdir(parents=True, exist_ok=True)
    for name, table in tables.items():
        table.to_csv(output / f"{name}.csv", index=False)
    for name, figure in figures(tables).items():
        save(figure, output / f"{name}.png")
