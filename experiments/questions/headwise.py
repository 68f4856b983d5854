"""Head-wise eviction: what it is worth, what it frees, and what it takes to decode it.

*Budgets*: presses that keep as many tokens in every head, against presses with the same scores that
let heads compete, on the same questions: see `experiments.conditions.budgets`.

*Decoding*: a step on the full cache, on a uniformly pruned one, and on one whose heads hold
different numbers of tokens, read in four ways, all timed in turn: see `experiments.conditions` and
`experiments.conditions.timing`.

*Conditions*: what each of the four ways touches, and on which models and with which attention
implementations it gives the right logits: see `experiments.conditions.trial`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import torch
import typer
from rich.console import Console
from rich.progress import Progress
from transformers import PreTrainedModel

from experiments import UserError
from experiments.conditions import CONDITIONS
from experiments.conditions.budgets import (
    ALL,
    N_PAIRS,
    UNIFORM,
    Asked,
    asked,
    compare,
)
from experiments.conditions.figures import figures
from experiments.conditions.timing import FULL, Size, decode_times, random_llama
from experiments.conditions.trial import MISSING, N_TRIALS, SAME, trials
from experiments.framework.experiment import Experiment, Tables
from experiments.framework.report import write_results
from experiments.framework.tables import Shown
from experiments.loading import load_model, short_name
from experiments.questions.quality import NO_PRESS, Task
from experiments.testbed.facts import draw
from experiments.testbed.families import build, supported_implementations
from press_core import attention_sites

RATIOS = (0.5, 0.7, 0.8, 0.9)
FAMILIES = ("llama", "gemma2", "gpt_oss")
"""What the conditions are tried on: a plain model, one with capped logits, one with sinks."""

SAMPLES = 64
"""Contexts that are asked about."""

SIZE = Size(contexts=(1024, 4096, 16384), rounds=11)
"""Of the study's timing."""

_TIMED = "random Llama, 6 layers of 8/4 heads of 64"
_BY_HOOK, _RAGGED = "mask by hook", "ragged"


# ---- measuring ---------------------------------------------------------------------------------


@contextmanager
def _bar(name: str, total: int, progress: bool) -> Iterator[Callable[[], None]]:
    """A progress bar on stderr, and what moves it on."""
    with Progress(console=Console(stderr=True), disable=not progress) as bar:
        task = bar.add_task(name, total=total)
        yield lambda: bar.advance(task)


def measure_budgets(
    model: PreTrainedModel,
    task: Asked,
    ratios: Sequence[float] = RATIOS,
    *,
    model_name: str,
    progress: bool = True,
) -> Tables:
    """`headwise_accuracy`, `headwise_difference` and `headwise_budgets`: see `budgets.compare`."""
    with _bar("head budgets", 1 + 2 * N_PAIRS * len(ratios), progress) as advance:
        return compare(model, task, ratios, model_name=model_name, advance=advance)


def measure_decoding(
    model: PreTrainedModel, size: Size = SIZE, *, model_name: str, progress: bool = True
) -> Tables:
    """`headwise_decoding`: `timing.decode_times` at every context length, and the `model`.

    Raises:
        UserError: if some layers of the model keep a sliding window.
    """
    if len(attention_sites(model)) < model.config.num_hidden_layers:
        raise UserError(
            f"some layers of {model_name} keep a sliding window, so that its decode steps say "
            "little about head-wise caches; time a model without them, or leave out --part decoding"
        )
    with _bar("decode steps", size.rounds * len(size.contexts), progress) as advance:
        parts = [decode_times(model, context, size, advance) for context in size.contexts]
    return {"headwise_decoding": pd.concat(parts, ignore_index=True).assign(model=model_name)}


def measure_conditions(families: Sequence[str] = FAMILIES, *, progress: bool = True) -> Tables:
    """`headwise_conditions`: `trial.trials` on a random model of each family, its `model`."""
    parts = []
    with _bar("conditions", N_TRIALS * len(families), progress) as advance:
        for family in families:
            model = build(family, attn_implementation=supported_implementations(family)[0])
            parts.append(trials(model, advance=advance).assign(model=family))
    return {"headwise_conditions": pd.concat(parts, ignore_index=True)}


def run() -> Tables:
    """The study: budgets on the shipped model, times on one of a larger model's shape."""
    model, tokenizer = load_model("facts-llama")
    tables = measure_budgets(
        model, asked(tokenizer, Task(samples=SAMPLES)), model_name="facts-llama"
    )
    tables |= measure_decoding(random_llama(), model_name=_TIMED)
    return tables | measure_conditions()


# ---- reading the tables ------------------------------------------------------------------------


def summary(tables: Tables) -> str:
    """What was measured, as Markdown."""
    return "\n\n".join([sentences(tables), *(table.markdown() for table in shown(tables))])


def sentences(tables: Tables) -> str:
    """What was measured in short, of the parts that were."""
    told = [sentence(tables) for sentence, needed in _SENTENCES if needed in tables]
    return " ".join(told)


def sentence_on_budgets(tables: Tables) -> str:
    """Whether head-wise budgets helped, by how much, and with which presses."""
    difference, accuracy = tables["headwise_difference"], tables["headwise_accuracy"]
    means: list[dict[Any, Any]] = difference[difference["ratio"].isna()].to_dict("records")
    *of_pairs, overall = means
    verdicts: dict[str, list[str]] = {"helped": [], "cost answers": [], UNDECIDED: []}
    for row in of_pairs:
        verdicts[_verdict(row)].append(f"{row['pair']} {_points(row)}")
    by_press = "; ".join(f"{said} with {', '.join(v)}" for said, v in verdicts.items() if v)
    single = difference[(difference["pair"] != ALL) & difference["ratio"].notna()]
    better, worse = int((single["low"] > 0).sum()), int((single["high"] < 0).sum())
    return (
        f"Head-wise budgets {_verdict(overall)} on {accuracy['model'].iloc[0]}: over "
        f"{len(of_pairs)} presses and {single['ratio'].nunique()} ratios they change the share of "
        f"right answers by {_points(overall)} points (95% interval, {overall['contexts']} "
        f"contexts, each press against the uniform one of its pair). They {by_press}. Of "
        f"{len(single)} single comparisons {better} are better and {worse} worse, with intervals "
        "that leave out 0."
    )


UNDECIDED = "made no difference that could be shown"


def _verdict(row: Any) -> str:
    if row["low"] > 0:
        return "helped"
    return "cost answers" if row["high"] < 0 else UNDECIDED


def _points(row: Any) -> str:
    difference, low, high = (100 * row[name] for name in ("difference", "low", "high"))
    return f"{difference:+.1f} [{low:+.1f}, {high:+.1f}]"


def sentence_on_patching(tables: Tables) -> str:
    """Whether head-wise eviction needs a patch: to be right, and to free anything."""
    conditions = tables["headwise_conditions"]
    tried = conditions[(conditions["condition"] == _BY_HOOK) & (conditions["outcome"] != MISSING)]
    right = tried[tried["outcome"] == SAME]
    patched = bool((tried["forwards"] > 0).any() or tried["registry"].any())
    needs = "needs no patch" if len(right) == len(tried) and not patched else "needs a patch"
    return (
        f"To be computed rightly head-wise eviction {needs}: a mask per head that a forward "
        f"pre-hook hands over gives the right logits in {len(right)} of {len(tried)} trials "
        f"({_where(right)})."
    )


def _where(rows: pd.DataFrame) -> str:
    of_models = rows.groupby("model", sort=False)["implementation"].unique()
    return "; ".join(f"{model}: {', '.join(names)}" for model, names in of_models.items())


def sentence_on_freeing(tables: Tables) -> str:
    """What the mask by a hook and ragged storage take and hold."""
    decoding = tables["headwise_decoding"]
    pressed = decoding[decoding["condition"] != FULL]
    context = min(pressed["context"].unique(), key=lambda context: abs(context - 4096))
    ratio = pressed["ratio"].max()
    rows = pressed[(pressed["context"] == context) & (pressed["ratio"] == ratio)]
    by = _rows_by(rows, "condition")

    def told(name: str) -> str:
        row = by[name]
        share = row["bytes"] / row["full_bytes"]
        return f"{share:.2f} of the bytes and {_time(row)} of the time"

    frees = by[_BY_HOOK]["bytes"] < by[_BY_HOOK]["full_bytes"]
    return (
        f"That mask {'frees memory' if frees else 'frees nothing'}: with {ratio:.0%} of "
        f"{context:,} tokens evicted a decode step holds {told(_BY_HOOK)} of the full cache's. "
        f"Ragged storage, for which the attention function has to be patched, holds "
        f"{told(_RAGGED)}; uniform budgets, {told(UNIFORM)}."
    )


def _time(row: Any) -> str:
    return f"{row['time']:.2f} [{row['low']:.2f}, {row['high']:.2f}]"


_SENTENCES: tuple[tuple[Callable[[Tables], str], str], ...] = (
    (sentence_on_budgets, "headwise_difference"),
    (sentence_on_patching, "headwise_conditions"),
    (sentence_on_freeing, "headwise_decoding"),
)


# ---- tables of the summary ---------------------------------------------------------------------


def shown(tables: Tables) -> list[Shown]:
    """What there is to read of the tables."""
    return [show(tables[name]) for name, show in _SHOWN if name in tables]


def _show_difference(difference: pd.DataFrame) -> Shown:
    ratios = sorted(difference["ratio"].dropna().unique())
    rows = []
    for pair, of_pair in difference.groupby("pair", sort=False):
        by, mean = _rows_by(of_pair, "ratio"), of_pair[of_pair["ratio"].isna()].iloc[0]
        name = "mean of all" if pair == ALL else str(pair)
        rows.append([name, *(_points(by[ratio]) for ratio in ratios), _points(mean)])
    note = (
        "Right answers, head-wise minus uniform budgets, in percentage points, with the 95% "
        "interval of the mean over contexts (differences are taken context by context):"
    )
    return Shown(note, ["head-wise press", *_evicted(ratios), "mean"], rows)


def _show_accuracy(accuracy: pd.DataFrame) -> Shown:
    first, bare = accuracy.iloc[0], accuracy[accuracy["press"] == NO_PRESS].iloc[0]
    pressed = accuracy[accuracy["press"] != NO_PRESS]
    ratios = sorted(pressed["ratio"].unique())
    rows = []
    for _, of_press in pressed.groupby(["pair", "budgets"], sort=False):
        by, press = _rows_by(of_press, "ratio"), of_press.iloc[0]
        cells = [f"{by[ratio]['accuracy']:.1%}, {by[ratio]['bytes']:.3f}" for ratio in ratios]
        rows.append([press["press"], press["budgets"], *cells])
    widest = (accuracy["high"] - accuracy["low"]).max() / 2
    most = (pressed["bytes"] / (1 - pressed["ratio"])).max()
    note = (
        f"Right answers (±{widest:.1%} or better), and bytes of the cache over those of the full "
        f"one: {first['contexts']} contexts of {first['context']} words, {first['answers']} "
        f"questions unseen by the press; with nothing evicted {bare['accuracy']:.1%} are right. No "
        f"cache holds more than {most:.3f} times the share that it was told to keep."
    )
    return Shown(note, ["press", "budgets", *_evicted(ratios)], rows, left=2)


def _show_decoding(decoding: pd.DataFrame) -> Shown:
    pressed = decoding[decoding["condition"] != FULL]
    contexts = sorted(pressed["context"].unique())
    rows = []
    for (ratio, name), of_condition in pressed.groupby(["ratio", "condition"], sort=False):
        by = _rows_by(of_condition, "context")
        held = (of_condition["bytes"] / of_condition["full_bytes"]).max()
        rows.append([f"{name}, {ratio:.0%} evicted", f"{held:.3f}"])
        rows[-1] += [_time(by[context]) for context in contexts]
    first = pressed.iloc[0]
    note = (
        f"A decode step of {first['model']}, in times of one on the full cache: median of "
        f"{first['rounds']} rounds in which all took turns, with its 95% interval; and bytes of "
        "the cache over those of the full one:"
    )
    head = ["cache", "bytes", *(f"{context:,} tokens" for context in contexts)]
    return Shown(note, head, rows)


def _show_conditions(conditions: pd.DataFrame) -> Shown:
    offered = conditions[conditions["outcome"] != MISSING]
    rows = []
    for (model, implementation), tried in offered.groupby(["model", "implementation"], sort=False):
        outcomes = [_outcome(tried[tried["condition"] == name]) for name in CONDITIONS]
        rows.append([f"{model}, {implementation}", *outcomes])
    of = {name: conditions[conditions["condition"] == name] for name in CONDITIONS}
    rows.append(["touches", *(_touched(of[name]) for name in CONDITIONS)])
    frees = ["yes" if condition.frees else "no" for condition in CONDITIONS.values()]
    rows.append(["frees memory", *frees])
    short, long = sorted(offered["question"].unique())
    note = (
        f"Padded batches, decoded after questions of {short} and of {long} tokens: are the logits "
        "those of a reference that masks the full cache, within rounding?"
    )
    return Shown(note, ["", *CONDITIONS], rows, left=1 + len(CONDITIONS))


def _touched(rows: pd.DataFrame) -> str:
    """What a condition changes while its scope is open, over all its trials."""
    kinds = {
        "hooks": rows["hooks"].max() > 0,
        "forwards": rows["forwards"].max() > 0,
        "attention registry": rows["registry"].any(),
    }
    return ", ".join(kind for kind, is_touched in kinds.items() if is_touched)


def _outcome(rows: pd.DataFrame) -> str:
    """What came of one condition with one implementation, over the questions asked."""
    outcomes = dict(zip(rows["question"], rows["outcome"], strict=True))
    if len(set(outcomes.values())) == 1:
        return str(rows["outcome"].iloc[0])
    return ", ".join(f"{n} tokens: {outcome}" for n, outcome in outcomes.items())


def _rows_by(table: pd.DataFrame, column: str) -> dict[Any, Any]:
    """Rows by what stands in a column, where it differs in all of them."""
    records: list[dict[Any, Any]] = table.to_dict("records")
    return {row[column]: row for row in records}


def _evicted(ratios: Sequence[float]) -> list[str]:
    return [f"{ratio:.0%} evicted" for ratio in ratios]


_SHOWN: tuple[tuple[str, Callable[[pd.DataFrame], Shown]], ...] = (
    ("headwise_difference", _show_difference),
    ("headwise_accuracy", _show_accuracy),
    ("headwise_decoding", _show_decoding),
    ("headwise_conditions", _show_conditions),
)


EXPERIMENT = Experiment(
    name="headwise",
    title="What head-wise eviction is worth, and what it takes",
    question="Do heads that share a budget answer more than heads with equal ones, and does "
    "decoding such a cache need a patch?",
    run=run,
    figures=figures,
    summary=summary,
    repeat="python -m experiments headwise",
)


# ---- command -----------------------------------------------------------------------------------


class Part(str, Enum):
    """What there is to measure."""

    BUDGETS = "budgets"
    DECODING = "decoding"
    CONDITIONS = "conditions"


def command(
    part: Annotated[
        list[Part] | None, typer.Option(help="What to measure; repeat it for several. All.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="Shipped model, folder or hub id, asked and timed. By default facts-llama is "
            "asked, and a random Llama of 6 layers, 8/4 heads of 64, is timed."
        ),
    ] = None,
    ratio: Annotated[
        list[float] | None,
        typer.Option(help="Share of the tokens to evict, in (0, 1); repeat it for several."),
    ] = None,
    samples: Annotated[int, typer.Option(min=2, help="Contexts to ask about.")] = SAMPLES,
    context: Annotated[int, typer.Option(min=32, help="Words in a context.")] = Task.context,
    facts: Annotated[int, typer.Option(min=1, help="Facts in a context.")] = Task.facts,
    contexts: Annotated[
        list[int] | None,
        typer.Option(
            min=64, help="Tokens in the cache that is timed, such as 32768; repeat it for several."
        ),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of the timing.")] = SIZE.rounds,
    seed: Annotated[int, typer.Option(help="Seed of the contexts.")] = Task.seed,
    device: Annotated[str, typer.Option(help="Where to run: cpu, cuda.")] = "cpu",
    output: Annotated[
        Path | None, typer.Option(help="Folder to write the tables and the figures to.")
    ] = None,
) -> None:
    """Head-wise against uniform budgets: answers, memory, decode time, and four ways to decode."""
    parts = part or list(Part)
    tables: Tables = {}
    ratios = _checked(ratio)
    task = Task(context, facts, samples, seed=seed)
    try:
        draw(1, context, facts, torch.Generator())
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--context, --facts") from error
    if Part.BUDGETS in parts:
        name = model or "facts-llama"
        loaded, tokenizer = load_model(name, device=device)
        questions = asked(tokenizer, task)
        tables |= measure_budgets(loaded, questions, ratios or RATIOS, model_name=short_name(name))
    if Part.DECODING in parts:
        name = short_name(model) if model else _TIMED
        timed = load_model(model, device=device)[0] if model else random_llama().to(device)
        size = Size(tuple(contexts or SIZE.contexts), ratios or SIZE.ratios, rounds)
        tables |= measure_decoding(timed, size, model_name=name)
    if Part.CONDITIONS in parts:
        tables |= measure_conditions()
    console = Console()
    console.print(sentences(tables), "")
    for table in shown(tables):
        console.print(table.note)
        console.print(table.rich())
    if output is not None:
        write_results(tables, figures(tables), output)


def _checked(ratios: list[float] | None) -> tuple[float, ...]:
    for ratio in ratios or ():
        if not 0 < ratio < 1:
            raise typer.BadParameter(f"{ratio} is not above 0 and below 1", param_hint="--ratio")
    return tuple(ratios or ())
