"""Which decoders a press is right on, by which mechanism, and why it is refused on the others."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Annotated

import typer
from matplotlib.figure import Figure
from rich.progress import Progress

from experiments.framework.experiment import Experiment, Finding, Tables
from experiments.framework.own_model import SMALL, LeftOutError, OwnModel, Planned
from experiments.framework.tables import ResultTable
from experiments.questions.architectures.cells import MECHANISMS, OUTCOMES, SUBJECTS
from experiments.questions.architectures.decoders import decoders
from experiments.questions.architectures.reach import BOTH, NEITHER, figure, reach, reasons
from experiments.questions.architectures.sweep import condensed, measure

REPRESENTATIVES = (
    *("llama", "phi3", "gpt2", "gpt_oss", "gemma2", "mistral", "bloom"),
    *("cohere2", "smollm3", "nanochat", "hunyuan_v1_dense", "opt", "jetmoe", "diffllama", "doge"),
    *("deepseek_v3", "jamba", "falcon_h1", "gemma3n_text", "llama4_text", "qwen2 (sliding)", "cwm"),
    *("paligemma", "qwen2_vl", "ernie4_5_vl_moe", "bart", "bart (seq2seq)", "t5 (seq2seq)"),
    *("inkling_text", "axk2", "beam", "hrm_text"),
    *("qwen2_vl (image)", "qwen3_vl (image)", "llava (image)", "idefics3 (image)"),
    *("gemma3 (image)", "paligemma (image)"),
)
"""One type of every structural kind: what it stands for is said in `docs/architectures.md`."""


@dataclass(frozen=True)
class Options:
    """What to sweep."""

    type: Annotated[
        tuple[str, ...],
        typer.Option(help="Model type or variant; repeatable.", show_default="all"),
    ] = ()
    store: Annotated[
        Path | None,
        typer.Option(help="CSV file for every row as it comes; a run resumes from it."),
    ] = None


class Architectures(Experiment[Options]):
    """Sweep every decoder of the installed transformers with tiny random weights."""

    name = "architectures"
    title = "Which decoders it works on"
    question = (
        "On which decoders is a press right, by hook and by patch, and why not on the others?"
    )
    method = (
        "Every causal and image-text decoder of the installed transformers is built small, with "
        "random weights, and run on text, ten of them with an image in it too. What a press leaves "
        "and the logits that follow are compared with a run over the full cache in which all that "
        "is evicted is masked, by code that shares nothing with the presses. Long contexts and "
        "trained weights are not tried."
    )
    full = Options()
    quick = Options(type=tuple(name for name in REPRESENTATIVES if name in decoders()))

    def on(self, own: OwnModel) -> Planned[Options]:
        if own.model_type not in decoders():
            raise LeftOutError(f"it builds no small model of the type {own.model_type}")
        return Planned(Options(type=(own.model_type,)), seconds=5, note=SMALL)

    def measure(self, options: Options, progress: Progress) -> Tables:
        """Every press, by both mechanisms, on every decoder, under all conditions.

        Returns:
            `architectures`: columns `type`, `press`, `mechanism`, an outcome for each condition,
            the `worst` of them and its `reason`.
        """
        names = options.type or tuple(decoders())
        task = progress.add_task(self.name, total=len(names))
        rows = measure(names, options.store, progress=lambda name: progress.advance(task))
        return {"architectures": condensed(rows)}

    def findings(self, tables: Tables) -> list[Finding]:
        table = tables["architectures"]
        reached = reach(table)
        some = reached[(reached["reach"] != NEITHER) & (reached["press"] != "nothing evicted")]
        both = some[some["reach"] == BOTH]
        wrong = int(table["worst"].isin(OUTCOMES[2:6]).sum())
        text = (
            f"Some press is right on **{some['type'].nunique()}** of "
            f"{reached['type'].nunique()} decoders, by hook and patch alike on "
            f"{both['type'].nunique()}; {wrong} cases are wrong."
        )
        need = "prune the model that you run"
        return [Finding("reach", text, need, "breaks" if wrong else "works")]

    def views(self, tables: Tables) -> list[ResultTable]:
        table = tables["architectures"]
        head = ["press", "mechanism", *(o for o in OUTCOMES if (table["worst"] == o).any())]
        rows = []
        for press, mechanism in product(SUBJECTS, MECHANISMS):
            of_both = (table["press"] == press) & (table["mechanism"] == mechanism)
            worst = table["worst"][of_both]
            rows.append([press, mechanism, *(int((worst == o).sum()) for o in head[2:])])
        note = "Decoders by the worst outcome of each press, over all conditions."
        return [ResultTable(note, head, rows, left=2), reasons(table)]

    def figures(self, tables: Tables) -> dict[str, Figure]:
        return {"architectures": figure(tables["architectures"])}

    def passed(self, tables: Tables) -> bool:
        return not tables["architectures"]["worst"].isin(OUTCOMES[2:6]).any()


EXPERIMENT = Architectures()
