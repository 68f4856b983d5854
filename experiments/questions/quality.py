"""What eviction costs in answers: the facts task on pruned caches, for every press.

*Question unseen*: the press compresses the context, then every question about it is asked from a
copy of the same pruned cache. A question is two tokens, read in one forward.

*Question seen*: the press compresses the context together with one question. The logits of that
prefill have not felt the eviction, which happens as each layer finishes; so the last token of the
question is run once more, at its own position, on the pruned cache, and the answer read from there.
(Asking the whole question again would not do: a model trained to be asked once finds the first
asking, not the fact.)

Both are done inside one open scope, and for both mechanisms on the same contexts. Presses are at
their usual settings (`experiments.testbed.recipes`); what was learned about the model lies beside it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import pandas as pd
import torch
import typer
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor
from transformers import Cache, PreTrainedModel, PreTrainedTokenizerBase

import hooks_impl
from experiments import UserError
from experiments.framework.experiment import Experiment, Tables
from experiments.framework.plots import INK, mechanism_colour, new_figure, press_label, style
from experiments.framework.report import write_results
from experiments.framework.tables import markdown_table
from experiments.loading import load_model, short_name
from experiments.testbed.facts import VOCABULARY, FactBatch, draw
from experiments.testbed.recipes import MECHANISMS, WRAPPED, press_name, recipe
from press_core import Press, PressError
from press_core.methods.finch import Finch
from press_core.select import n_kept

RATIOS = (0.0, 0.5, 0.8, 0.9)
NO_PRESS = "no press"
"""What the table calls the model without a press, measured once: ratio 0 evicts nothing."""

UNSEEN, SEEN = "unseen", "seen"

NOT_COMPARED: dict[str, str] = {
    "ComposedPress": "a combination of presses that are compared by themselves",
    "PerLayerCompressionPress": "with one ratio for all layers it is the press that it wraps",
    "DMSPress": "told a threshold: how much it evicts depends on the context",
    "SimLayerKVPress": "told a threshold: how much it evicts depends on the context",
    "ThinKPress": "evicts channels of the keys, at most half of the cache",
    "DecodingPress": "evicts while decoding, and an answer is one token",
    "PrefillDecodingPress": "evicts while decoding, and an answer is one token",
    "StreamingLLMDecodingPress": "evicts while decoding, and an answer is one token",
}
"""Presses of which the experiment could not say what evicting a share of the tokens costs."""

NEEDS_QUESTION = ("FinchPress",)
"""Presses that choose by the question, and have nothing to do where it is not seen."""

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
    samples: int = 16
    seen_samples: int = 24
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

    def make(self, length: int) -> Press | None:
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
    context, question = batch.context_ids, batch.question_ids[:, 0]
    last = question[:, -1:].to(model.device)
    position = torch.full_like(last, context.shape[1] + question.shape[1] - 1)
    parts = [context, question]
    if isinstance(press, Finch):
        assert press.delimiter_token_id is not None
        parts.insert(1, torch.full_like(context[:, :1], press.delimiter_token_id))
    with _scope(press, model):
        cache = _prefill(model, torch.cat(parts, dim=1))
        logits = model(input_ids=last, position_ids=position, past_key_values=cache).logits
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
                press = Condition(name, mechanism, 0.5).make(Task.context)
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
        UserError: if its tokens are not those of `experiments.testbed.facts`.
    """
    if tokenizer.get_vocab() != {word: index for index, word in enumerate(VOCABULARY)}:
        raise UserError(
            f"{name!r} has another vocabulary than the facts task; give facts-llama, or a model "
            "trained by `python -m experiments.testbed.training.facts`"
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
    work = [(question, c) for question in _PROTOCOLS for c in conditions if question in c.questions]
    rows: list[dict[str, Any]] = []
    answered: dict[tuple[str, float, str], dict[str, Tensor]] = {}
    shown = track(work, "quality", console=Console(stderr=True), disable=not progress)
    for question, condition in shown:
        press, answer = condition.make(task.context), _PROTOCOLS[question]
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
    """Accuracy by press and compression ratio: `quality`, a panel per kind of question."""
    quality, agreement = tables["quality"], tables["quality_agreement"]
    names = _by_accuracy(quality)
    ratios = [ratio for ratio in sorted(quality["ratio"].unique()) if ratio > 0]
    width, height = 3.0 + 1.1 * 2 * len(ratios), 1.2 + 0.23 * len(names)
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
            panel.set_title(f"Question {question}: right answers in %")
            panel.set_xlabel("share of the tokens evicted")
            panel.set_xticks([i + 0.5 for i in range(len(ratios))], [f"{r:.0%}" for r in ratios])
            panel.grid(False)
            panel.spines[:].set_visible(False)
        axes[0].set_yticks([i + 0.5 for i in range(len(names))], map(press_label, names))
        axes[0].set_ylim(len(names), 0)
    figure.set_label(
        "Right answers in % with half the width of their 95% interval, by press and share of the "
        "tokens evicted, the question unseen (left) and seen (right) by the press"
        + (": framed where hook and patch differ" if _differ(agreement) else "")
    )
    return {"quality": figure}


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
        colour = "white" if row["accuracy"] > 0.6 else INK
        text = _text(row["accuracy"], row["low"], row["high"])
        panel.text(*place, text, ha="center", va="center", fontsize=7.5, color=colour)


def _differ(agreement: pd.DataFrame) -> bool:
    return bool((agreement["same"] < agreement["answers"]).any())


def _by_accuracy(quality: pd.DataFrame) -> list[str]:
    """Presses, the best on average first; last those that were asked seen questions only."""
    pressed = quality[quality["press"] != NO_PRESS]
    means = pressed.pivot_table(index="press", columns="question", values="accuracy")
    order = [question for question in (UNSEEN, SEEN) if question in means]
    return [str(name) for name in means.sort_values(order, ascending=False).index]


def summary(tables: Tables) -> str:
    """What was measured, as Markdown."""
    quality = tables["quality"]
    shown = [ratio for ratio in (0.5, 0.8, 0.9) if ratio in set(quality["ratio"])]
    columns = [(question, ratio) for question in (UNSEEN, SEEN) for ratio in shown]
    rows = []
    for name in _by_accuracy(quality):
        found = quality[quality["press"] == name].groupby(["question", "ratio"])["accuracy"].first()
        cells = [f"{found[c]:.1%}" if c in found.index else "" for c in columns]
        rows.append([press_label(name), *cells])
    lines = [
        f"{sentence_on_agreement(tables['quality_agreement'])} {_sentence_on_best(quality)}",
        "",
        _sentence_on_task(quality),
        "",
        markdown_table(["press", *(f"{q}, {r:.0%} evicted" for q, r in columns)], rows),
    ]
    return "\n".join([*lines, ""] + [f"- {note}" for note in _notes(quality)])


def _sentence_on_best(quality: pd.DataFrame) -> str:
    """Which press answers best, where it has not seen the question."""
    unseen = quality[(quality["question"] == UNSEEN) & (quality["press"] != NO_PRESS)]
    best = []
    for ratio, rows in unseen.groupby("ratio"):
        highest = rows["accuracy"].max()
        names = rows.loc[rows["accuracy"] == highest, "press"].drop_duplicates().map(press_label)
        best.append(f"{_listed(names)} ({highest:.0%}) at {ratio:.0%} evicted")
    if not best:
        return ""
    return f"Most answers are right, the question unseen, with {'; '.join(best)}."


def _listed(names: Iterable[str]) -> str:
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last


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
        condition.make(context)  # refuses a ratio out of range before anything is run
    tables = measure(loaded, measured, task, model_name=short_name(model))
    _show(tables)
    if output is not None:
        write_results(tables, figures(tables), output)


def _chosen(
    model: PreTrainedModel, chosen: list[str] | None, mechanisms: list[str]
) -> list[tuple[str, str]]:
    """The presses asked for, all of which have to fit the model; or all that fit it."""
    names = [press_name(name) for name in chosen or press_names()]
    for name in set(names) & set(NOT_COMPARED):
        raise UserError(
            f"{name} is not compared here ({NOT_COMPARED[name]}); choose from "
            f"{', '.join(map(press_label, press_names()))}"
        )
    pairs, refusals = fitting(model, names, mechanisms)
    if chosen and refusals:
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
    return _text(*(row[name].iloc[0] for name in ("accuracy", "low", "high")))


def _text(accuracy: float, low: float, high: float) -> str:
    return f"{100 * accuracy:.0f} ±{50 * (high - low):.0f}"
