"""What eviction costs in answers: the facts task on pruned caches, for every press.

Questions are asked with and without the press having seen them (`experiments.testbed.facts`). Both
mechanisms answer about the same contexts. Presses have their usual settings
(`experiments.testbed.recipes`); what they learned about the model is shipped with it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, ClassVar

import pandas as pd
import torch
from matplotlib.figure import Figure
from rich.progress import Progress
from transformers import PreTrainedModel

import hooks_impl
from experiments import UserError, data_of
from experiments.framework import shared
from experiments.framework.experiment import Claim, Evidence, Experiment, Finding, Tables
from experiments.framework.frames import heat_maps, wide_table
from experiments.framework.intervals import METHOD, bracketed, mean_of
from experiments.framework.options import Device, Dtype
from experiments.framework.own_model import LeftOutError, OwnModel, Planned
from experiments.framework.plots import NO_PRESS, press_label
from experiments.framework.tables import ResultTable
from experiments.framework.wording import sentences
from experiments.loading import load_model, short_name
from experiments.testbed import facts
from experiments.testbed.facts import SEEN, UNSEEN, Task
from experiments.testbed.recipes import press_name, recipe_pair
from press_core import PressError

_finding = sentences(__file__)
LEFT_OUT: dict[str, list[str]] = data_of(__file__)["left_out"]
"""Presses that the experiment does not compare, by the reason."""

NOT_COMPARED = {name: reason for reason, names in LEFT_OUT.items() for name in names}

_PROTOCOLS = {UNSEEN: facts.answer_unseen, SEEN: facts.answer_seen}


@dataclass(frozen=True)
class Options:
    """Which presses to compare, at which ratios, on which contexts and model."""

    press: shared.Presses = ()
    ratio: shared.Ratios = (0.8, 0.9)
    samples: shared.Samples = Task.samples
    context: shared.Words = Task.context
    facts: shared.Facts = Task.facts
    model: shared.Model = "facts-llama"
    seed: shared.Seed = Task.seed
    dtype: Dtype = "float32"
    device: Device = "cpu"


def press_names() -> list[str]:
    """Names of the presses that evict a given share of a context in the prefill."""
    return sorted(set(hooks_impl.PRESSES) - set(NOT_COMPARED))


def suited(model: PreTrainedModel, options: Options, progress: Progress) -> Iterator[str]:
    """Names of the presses to measure; default presses that the model does not support are
    skipped with a message.

    Raises:
        UserError: if a press in `options.press` is in `NOT_COMPARED`.
        PressError: if a press in `options.press` does not support the model.
    """
    for name in [press_name(given) for given in options.press] or press_names():
        if name in NOT_COMPARED:
            known = ", ".join(map(press_label, press_names()))
            reason = NOT_COMPARED[name]
            raise UserError(f"{name} is not compared here ({reason}); choose from {known}")
        try:
            for ratio in options.ratio:
                for press in recipe_pair(name, ratio, options.context):
                    press.register(model).remove()
        except PressError as error:
            if options.press:
                raise
            shared.print_left_out(progress, name, error)
        else:
            yield name


def measure(
    model: PreTrainedModel,
    presses: Sequence[str],
    ratios: Sequence[float],
    task: Task,
    progress: Progress,
) -> Tables:
    """Answer the questions of `task` without a press, and with each press at each ratio.

    Returns:
        `quality`: a row per `press`, `ratio`, `mechanism` and kind of `question`, with the
        `accuracy` as a share in [0, 1] and its interval over contexts, `low` and `high`.
        `quality_agreement`: per press, ratio and kind of question, how many `answers` (tokens)
        were compared and how many are the `same` with both mechanisms.
    """
    rows: list[dict[str, Any]] = []
    agreement: list[dict[str, Any]] = []
    work = list(product([(NO_PRESS, 0.0), *product(presses, ratios)], _PROTOCOLS))
    for (press, ratio), question in progress.track(work, description="quality"):
        if question == UNSEEN and press == "FinchPress":  # it scores tokens by the question
            continue
        made: dict[str, Any] = {"bare": None}
        if press != NO_PRESS:
            made = recipe_pair(press, ratio, task.context)._asdict()
        cell = {"press": press, "ratio": ratio, "question": question}
        answer, batches, given = _PROTOCOLS[question], task.batches(), []
        truth = torch.cat([batch.answer_ids for batch in batches])
        for mechanism, opens in made.items():
            answers = torch.cat([answer(model, opens, batch) for batch in batches])
            right = (answers == truth[:, : answers.shape[1]]).double().mean(dim=1).numpy()
            size = {"samples": len(answers), "answers": answers.numel()}
            rows.append(cell | {"mechanism": mechanism} | mean_of("accuracy", right) | size)
            given.append(answers)
        if press != NO_PRESS:
            same = int(given[0].eq(given[1]).sum())
            agreement.append(cell | {"answers": given[0].numel(), "same": same})
    quality = pd.DataFrame(rows).assign(context=task.context, facts=task.facts)
    return {"quality": quality, "quality_agreement": pd.DataFrame(agreement)}


# ---- reading the tables --------------------------------------------------------------------------


def compared(quality: pd.DataFrame) -> pd.DataFrame:
    """One mechanism's row per kind of question, press and ratio, the best press first.

    Presses are ranked by their accuracy on unseen questions, averaged over ratios; presses with
    seen questions only are last.
    """
    pressed = quality[quality["press"] != NO_PRESS]
    rows = pressed.drop_duplicates(["press", "ratio", "question"])
    means = rows.pivot_table(index="press", columns="question", values="accuracy")
    best = means.sort_values(list(means.columns[::-1]), ascending=False).index  # unseen first
    rank = rows["press"].map(list(best).index)
    order = ["question", "rank", "ratio"]
    rows = rows.assign(rank=rank, press=rows["press"].map(press_label))
    return rows.sort_values(order, ascending=[False, True, True])


class Quality(Experiment[Options]):
    """Measure the accuracy on the facts task by press, compression ratio and mechanism.

    How many facts can a model still retrieve from a pruned cache, by press, compression ratio,
    mechanism, and whether the press saw the question?

    A small Llama trained to retrieve facts reads a context of filler words with key-value pairs
    in it, a press prunes the cache, and the model answers questions about the pairs. Either the
    press compresses the context together with one question (seen), or it compresses the context
    alone and every question is answered from a copy of the pruned cache (unseen). Both mechanisms
    answer about the same contexts, and their answers are compared one by one. The finding is at the
    highest share evicted at which the best press still gives 90% right answers. Presses have the
    defaults of their fields where these suit hundreds of tokens; a window of recent tokens that is
    always kept (64 of SnapKV, and so of presses around it) is at most half of what is kept. What
    presses learn about the model, they learned from other contexts of this very
    task, which favours them. The ranking of presses is that of one small model on one task in which
    a fact is two tokens; it need not carry over to larger models, which spread information over
    more tokens.
    """

    name = "quality"
    title = "What eviction costs in answers"
    evidence = Evidence.MODEL
    full = Options()
    quick = Options(ratio=(0.8,), samples=6)
    redrawn = Options(ratio=(0.9,))
    claims: ClassVar = {
        "agreement": Claim(replace(quick, press=("SnapKVPress", "AdaKVPress", "KnormPress"))),
    }

    def on(self, own: OwnModel) -> Planned[Options]:
        raise LeftOutError("its questions are in the words of facts-llama; use evaluate instead")

    def measure(self, options: Options, progress: Progress) -> Tables:
        task = Task(options.context, options.facts, options.samples, options.seed)
        model, tokenizer = load_model(options.model, dtype=options.dtype, device=options.device)
        facts.check_vocabulary(tokenizer, options.model)
        presses = list(suited(model, options, progress))
        tables = measure(model, presses, options.ratio, task, progress)
        return tables | {"quality": tables["quality"].assign(model=short_name(options.model))}

    def findings(self, tables: Tables) -> list[Finding]:
        """The best press at the highest ratio at which any press still works, and agreement."""
        rows, agreement = compared(tables["quality"]), tables["quality_agreement"]
        question = UNSEEN if UNSEEN in set(rows["question"]) else SEEN
        chosen = rows[rows["question"] == question]
        highest = chosen.groupby("ratio")["accuracy"].max()
        good = highest[highest >= shared.GOOD]
        ratio = good.index.max() if len(good) else highest.index.min()
        most, at_ratio = f"{highest[ratio]:.0%}", chosen[chosen["ratio"] == ratio]
        best = at_ratio[at_ratio["accuracy"].map("{:.0%}".format) == most]["press"]
        of_one, of_several = (best.iloc[0], "answers"), (f"{len(best)} presses", "answer")
        named, verb = of_one if len(best) == 1 else of_several
        said = {"ratio": ratio, "question": question, "named": named, "verb": verb, "most": most}
        total, same = agreement[["answers", "same"]].sum()
        bits = {"differ": total - same, "total": total}
        return [
            _finding("best", "works" if len(good) else "costs", **said),
            _finding("agreement", "works" if total == same else "breaks", Evidence.BITS, **bits),
        ]

    def views(self, tables: Tables) -> list[ResultTable]:
        """Accuracy by press, kind of question and ratio."""
        quality, first = tables["quality"], tables["quality"].iloc[0]
        bare = quality[quality["press"] == NO_PRESS]
        whole = " and ".join(map("{:.1%} ({})".format, bare["accuracy"], bare["question"]))
        note = (
            f"Right answers of `{first['model']}` about {first['facts']} facts in "
            f"{first['context']} words, with {METHOD} over {first['samples']} contexts. "
            f"Without a press: {whole}."
        )
        rows = compared(quality)
        cells = [bracketed(row, "accuracy", ".0%") for row in rows.to_dict("records")]
        rows["column"] = rows["question"] + rows["ratio"].map(", {:.0%} evicted".format)
        reasons = (f"{', '.join(map(press_label, n))} ({reason})" for reason, n in LEFT_OUT.items())
        missing = f"Finch needs to see the question. Not compared: {'; '.join(reasons)}."
        return [wide_table(note, rows, ["press"], "column", cells), ResultTable(missing)]

    def figures(self, tables: Tables) -> dict[str, Figure]:
        """Accuracy by press and compression ratio, a panel per kind of question."""
        rows = compared(tables["quality"])
        rows["ratio"] = rows["ratio"].map("{:.0%}".format)
        wide = rows.pivot_table("accuracy", "press", ["question", "ratio"], sort=False)
        panels = {str(question): wide[question] for question in rows["question"].unique()}
        label = "Right answers in % by press and share evicted, the question unseen or seen by it"
        return {self.name: heat_maps(panels, label, columns=len(panels))}


EXPERIMENT = Quality()
