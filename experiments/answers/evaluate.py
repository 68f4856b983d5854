"""Sweeps: answers from compressed contexts, by model, press, ratio, mechanism and dataset.

A sweep is a grid of cells. Each is written down when it is finished, with what it takes to repeat
it; the same command continues where an earlier one was interrupted. See `experiments.answers`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import Enum
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import pandas as pd
import torch
import typer
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from experiments.answers.cells import NO_PRESS, Cell, plan, press_text, run_cell
from experiments.answers.datasets import SOURCES
from experiments.answers.engines import Failure, on_ray, serial
from experiments.answers.settings import Settings, settings_from
from experiments.answers.setup import setup_of
from experiments.answers.store import Store
from experiments.framework.experiment import Experiment, Tables
from experiments.framework.plots import INK, MUTED, new_figure, style
from experiments.framework.tables import markdown_table
from experiments.questions.quality import wilson

Outcome = tuple[list[dict[str, Any]], float] | Failure
"""Rows and seconds of a cell, or why there are none."""


def timed_cell(settings: Settings, cell: Cell) -> tuple[list[dict[str, Any]], float]:
    """The rows of a cell, and the seconds that they took, loading included."""
    start = perf_counter()
    rows = run_cell(settings, cell)
    return rows, perf_counter() - start


# ---- a sweep -------------------------------------------------------------------------------------


def sweep(
    settings: Settings, store: Store, console: Console, **ray: Any
) -> tuple[pd.DataFrame, dict[Cell, str]]:
    """Run the cells of `settings` that `store` does not hold yet, and write each down.

    Args:
        console: for progress.
        ray: arguments of `on_ray`; none: cells run one after the other in this process.

    Returns:
        The results of all cells in the store, and why cells of this sweep have none.
    """
    cells = plan(settings)
    waiting = [cell for cell in cells if not store.finished(cell)]
    if store.damaged:
        console.print(f"{len(store.damaged)} cells were damaged and are run again")
    if len(waiting) < len(cells):
        console.print(f"{len(cells) - len(waiting)} of {len(cells)} cells are finished already")
    run = partial(timed_cell, settings)
    outcomes = on_ray(waiting, run, **ray) if ray else serial(waiting, run)
    failures = {}
    for cell, outcome in _shown(outcomes, cells, len(waiting), console):
        if isinstance(outcome, Failure):
            failures[cell] = outcome.reason
            continue
        rows, seconds = outcome
        about = {"press_text": press_text(settings, cell), "seconds": round(seconds, 2)}
        store.save(cell, rows, about)
    return store.write_tables(cells), failures


def _shown(
    outcomes: Iterator[tuple[Cell, Outcome]], cells: Sequence[Cell], n_left: int, console: Console
) -> Iterator[tuple[Cell, Outcome]]:
    """The outcomes, with a bar, and a line for each."""
    columns = TextColumn("cells"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("cells", total=len(cells), completed=len(cells) - n_left)
        for cell, outcome in outcomes:
            yield cell, outcome
            progress.advance(task)
            progress.console.print(_line(cell, outcome), markup=False, highlight=False)


def _line(cell: Cell, outcome: Outcome) -> str:
    name = f"{cell.dataset}  {cell.press}  {_ratio(cell.ratio)}  {cell.mechanism}"
    if isinstance(outcome, Failure):
        return f"{name}: {outcome.reason}"
    rows, seconds = outcome
    score = sum(row["score"] for row in rows) / len(rows)
    return f"{name}: {score:.1%} of {len(rows)} in {seconds:.1f} s"


def _ratio(ratio: float | None) -> str:
    return "" if ratio is None or pd.isna(ratio) else f"{ratio:.0%}"


# ---- the study -----------------------------------------------------------------------------------

STUDY = Settings(
    dataset=("facts/single@512", "facts/multikey@512", "facts/multiquery@512"),
    press=(
        "SnapKVPress",
        "AdaKVPress(SnapKVPress())",
        "ExpectedAttentionPress",
        "TOVAPress",
        "KeyDiffPress",
        "StreamingLLMPress",
        "RandomPress",
    ),
    ratio=(0.0, 0.5, 0.8),
    samples=48,
)
"""What the study runs: the tasks that the shipped model can answer, questions unseen."""


def run() -> Tables:
    """The study's sweep, kept in memory."""
    cells = plan(STUDY)
    console = Console(stderr=True)
    rows = []
    outcomes = serial(cells, partial(timed_cell, STUDY))
    for cell, outcome in _shown(outcomes, cells, len(cells), console):
        if isinstance(outcome, Failure):
            raise RuntimeError(f"{cell}: {outcome.reason}")
        scores = [row["score"] for row in outcome[0]]
        answers = " ".join(row["prediction"] for row in outcome[0])
        low, high = wilson(round(sum(scores)), len(scores))
        found = {"score": sum(scores) / len(scores), "low": low, "high": high}
        rows.append(cell._asdict() | found | {"questions": len(scores), "answers": answers})
    return {"evaluate": pd.DataFrame(rows)}


_TASKS = {"single": "one fact", "multikey": "1 of 16 facts", "multiquery": "4 of 16 facts"}
"""What figures and tables call the study's tasks."""


def _accuracy(table: pd.DataFrame, ratio: float) -> pd.DataFrame:
    """Scores by press (the best on average first) and task, of one mechanism."""
    first = "hook" if (table["mechanism"] == "hook").any() else "patch"
    at = table[(table["ratio"] == ratio) & (table["mechanism"] == first)]
    tasks = at["dataset"].str.extract(r"/(\w+)", expand=False).map(_TASKS)
    wide = at.assign(task=tasks).pivot_table(
        index="press", columns="task", values="score", sort=False
    )
    order = table[table["press"] != NO_PRESS].groupby("press")["score"].mean()
    return wide.loc[order.sort_values(ascending=False, kind="stable").index]


def figures(tables: Tables) -> dict[str, Figure]:
    """Right answers by press and task, a panel per ratio: `evaluate`."""
    table = tables["evaluate"]
    ratios = sorted(ratio for ratio in table["ratio"].unique() if ratio > 0)
    with style():
        height = 1.4 + 0.3 * table["press"].nunique()
        figure, axes = new_figure(columns=len(ratios), width=8.6, height=height, sharey=True)
        for panel, ratio in zip(axes, ratios, strict=True):
            _draw_scores(panel, _accuracy(table, ratio))
            panel.set_title(f"{ratio:.0%} of the context evicted")
        figure.set_label("Share of right answers by press (rows) and task (columns)")
    return {"evaluate": figure}


def _draw_scores(panel: Axes, scores: pd.DataFrame) -> None:
    panel.grid(visible=False)
    panel.imshow(scores.to_numpy(), cmap="Blues", vmin=0, vmax=1.15, aspect="auto")
    for row, values in enumerate(scores.to_numpy()):
        for column, value in enumerate(values):
            colour = "white" if value > 0.7 else INK
            panel.text(column, row, f"{value:.0%}", ha="center", va="center", color=colour)
    panel.set_xticks(range(scores.shape[1]), scores.columns)
    panel.set_yticks(range(len(scores)), [_short(name) for name in scores.index])
    panel.tick_params(length=0, labelcolor=INK)
    for spine in panel.spines.values():
        spine.set_color(MUTED)
        spine.set_visible(False)


def _short(press: str) -> str:
    """`AdaKVPress(SnapKVPress())` as `AdaKV(SnapKV)`."""
    return press.replace("Press()", "").replace("Press", "")


def summary(tables: Tables) -> str:
    """What was measured, as Markdown."""
    table = tables["evaluate"]
    ratios = sorted(ratio for ratio in table["ratio"].unique() if ratio > 0)
    by_ratio = {ratio: _accuracy(table, ratio) for ratio in ratios}
    columns = [(ratio, task) for ratio, scores in by_ratio.items() for task in scores.columns]
    best = [
        f"{_short(str(means.idxmax()))} ({means.max():.0%}) at {ratio:.0%} evicted"
        for ratio, scores in by_ratio.items()
        if len(means := scores.mean(axis=1))
    ]
    lines = [
        f"{_agreement(table)} Averaged over the tasks most answers are right with "
        f"{' and '.join(best)}.",
        "",
        f"Share of right answers of `{STUDY.model}` through the pipeline, contexts of 512 words "
        f"compressed before any question is known, {table['questions'].iloc[0]} questions in each "
        f"cell (95% interval ±{(table['high'] - table['low']).max() / 2:.0%} or better). "
        f"{_bare(table)}",
        "",
        markdown_table(
            ["press", *(f"{task}, {ratio:.0%} evicted" for ratio, task in columns)],
            [
                [_short(press), *(f"{by_ratio[r].loc[press, task]:.1%}" for r, task in columns)]
                for press in by_ratio[ratios[0]].index
            ],
        ),
    ]
    return "\n".join(lines)


def _agreement(table: pd.DataFrame) -> str:
    pressed = table[table["press"] != NO_PRESS]
    pairs = pressed.groupby(["dataset", "press", "ratio"])["answers"]
    both = [list(answers) for _, answers in pairs if len(answers) == 2]
    same = sum(one == other for one, other in both)
    if same == len(both):
        return f"Hook and patch gave the same answers in all of {same} cells."
    return f"Hook and patch gave other answers in {len(both) - same} of {len(both)} cells."


def _bare(table: pd.DataFrame) -> str:
    bare = table[table["press"] == NO_PRESS]
    tasks = bare["dataset"].str.extract(r"/(\w+)", expand=False).map(_TASKS)
    said = [f"{score:.1%} ({task})" for task, score in zip(tasks, bare["score"], strict=True)]
    return f"With nothing evicted it is {', '.join(said)}." if said else ""


EXPERIMENT = Experiment(
    name="evaluate",
    title="From context to answer",
    question="How many answers are still right, by task and press, when a long context is "
    "compressed first and asked about later?",
    run=run,
    figures=figures,
    summary=summary,
    repeat="python -m experiments evaluate --config experiments/evaluation/examples/study.yaml",
)


# ---- command -------------------------------------------------------------------------------------


class Engine(str, Enum):
    """What runs the cells."""

    SERIAL = "serial"
    RAY = "ray"


class FileFormat(str, Enum):
    """How tables are written."""

    CSV = "csv"
    PARQUET = "parquet"


_D = Settings()


def command(
    config: Annotated[
        Path | None, typer.Option(help="YAML file with the settings below; flags override it.")
    ] = None,
    output: Annotated[
        Path, typer.Option(help="Folder for the results; the same one continues a sweep.")
    ] = Path("evaluation"),
    model: Annotated[
        str | None, typer.Option(help=f"Shipped model, folder or hub id; {_D.model}.")
    ] = None,
    press: Annotated[
        list[str] | None,
        typer.Option(
            help="Press as text, such as AdaKVPress(SnapKVPress(window_size=32)); repeat it for "
            f"several. `ratio` in it stands for the ratio. By default {', '.join(_D.press)}."
        ),
    ] = None,
    ratio: Annotated[
        list[float] | None,
        typer.Option(
            help="Share of the tokens to evict; 0: no press. Repeat it for several. "
            f"By default {', '.join(map(str, _D.ratio))}."
        ),
    ] = None,
    mechanism: Annotated[
        list[str] | None, typer.Option(help="hook or patch; by default both.")
    ] = None,
    dataset: Annotated[
        list[str] | None,
        typer.Option(
            help="NAME, NAME/TASK, NAME@LENGTH or NAME/TASK@LENGTH; repeat it for several. NAME is "
            f"one of {', '.join(SOURCES)}. By default {', '.join(_D.dataset)}."
        ),
    ] = None,
    samples: Annotated[int | None, typer.Option(help=f"Questions per task; {_D.samples}.")] = None,
    seed: Annotated[int | None, typer.Option(help=f"Of all that is drawn; {_D.seed}.")] = None,
    batch_size: Annotated[
        int | None, typer.Option(help=f"Contexts per forward; {_D.batch_size}.")
    ] = None,
    compress_questions: Annotated[
        bool | None,
        typer.Option("--compress-questions", help="Compress context and question together."),
    ] = None,
    max_context_length: Annotated[
        int | None, typer.Option(help="Cut the middle out of contexts of more tokens.")
    ] = None,
    dtype: Annotated[str | None, typer.Option(help=f"Of the model; {_D.dtype}.")] = None,
    attn_implementation: Annotated[
        str | None, typer.Option(help=f"eager, sdpa and so on; {_D.attn_implementation}.")
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(help=f"cpu, cuda, or auto to spread the model over devices; {_D.device}."),
    ] = None,
    threads: Annotated[
        int | None, typer.Option(help="CPU threads of torch, and CPUs of a Ray worker.")
    ] = None,
    data: Annotated[
        str | None, typer.Option(help="Folder with local copies of published datasets.")
    ] = None,
    file_format: Annotated[
        FileFormat, typer.Option("--format", help="Of the tables.")
    ] = FileFormat.CSV,
    on: Annotated[Engine, typer.Option(help="What runs the cells.")] = Engine.SERIAL,
    ray_address: Annotated[
        str | None, typer.Option(help="Ray cluster to join; one on this machine if not given.")
    ] = None,
    ray_gpus: Annotated[
        float | None,
        typer.Option(help="GPUs of a Ray worker; 1 unless the device is cpu, or there are none."),
    ] = None,
    retries: Annotated[
        int, typer.Option(min=0, help="How often a cell is run again when its Ray worker dies.")
    ] = 3,
) -> None:
    """Accuracy by press, ratio, mechanism and dataset, in a sweep that can be interrupted.

    Give the same command again to continue. The folder then holds results.csv (a row per cell),
    predictions.csv (a row per question) and setup.json (what it takes to repeat it). The exit
    status is 1 if a cell has no result.
    """
    names = ("model", "press", "ratio", "mechanism", "dataset", "samples", "seed", "batch_size")
    more = ("compress_questions", "max_context_length", "dtype", "attn_implementation", "device")
    given = locals()
    settings = settings_from(config, {n: given[n] for n in (*names, *more, "threads", "data")})
    plan(settings)  # mistakes show before a folder is made
    console = Console(stderr=True)
    store = Store(output, setup_of(settings), file_format.value)
    ray: dict[str, Any] = {}
    if on is Engine.RAY:
        threads = settings.threads or torch.get_num_threads()
        on_gpu = settings.device != "cpu" and torch.cuda.is_available()
        gpus = float(on_gpu) if ray_gpus is None else ray_gpus
        ray = {"address": ray_address, "cpus": threads, "gpus": gpus, "retries": retries}
    try:
        results, failures = sweep(settings, store, console, **ray)
    except KeyboardInterrupt:
        console.print(f"interrupted; the same command continues with what is in {output}")
        raise typer.Exit(130) from None
    Console().print(_outcome(results))
    for cell, reason in failures.items():
        console.print(f"no result: {' '.join(map(str, cell))}: {reason}", markup=False)
    typer.echo(f"results: {output}")
    if failures:
        raise typer.Exit(1)


def _outcome(results: pd.DataFrame) -> Table:
    table = Table(box=SIMPLE_HEAD)
    for name in ("dataset", "press", "evicted", "mechanism", "right in %"):
        justify = "right" if name in ("evicted", "right in %") else "left"
        table.add_column(name, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    for row in results.to_dict("records"):
        score = f"{100 * row['score']:.1f} ±{50 * (row['high'] - row['low']):.1f}"
        cells = row["dataset"], _short(row["press"]), _ratio(row["ratio"]), row["mechanism"]
        table.add_row(*cells, score)
    return table
