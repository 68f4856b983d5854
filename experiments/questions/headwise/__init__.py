"""Head-wise eviction: what it is worth, what it frees, and what it takes to decode it.

*Budgets*: presses that keep as many tokens in every head, against presses with the same scores that
let heads compete, on the same questions: see `experiments.questions.headwise.budgets`.

*Decoding*: a step on the full cache, on a uniformly pruned one, and on one whose heads hold
different numbers of tokens, read in four ways, all timed in turn: see
`experiments.testbed.variants` and `decoding`.

*Conditions*: on which models and with which attention implementations each of the four ways gives
the right logits: see `trials`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Annotated, Any, ClassVar

import pandas as pd
import torch
import typer
from matplotlib.figure import Figure
from rich.progress import Progress

from experiments import UserError
from experiments.framework.evidence import Evidence
from experiments.framework.experiment import Claim, Contrast, Experiment, Finding, Related, Tables
from experiments.framework.intervals import bracket
from experiments.framework.options import Device, Dtype, checked_positive_share
from experiments.framework.own_model import LeftOutError, OwnModel, Planned
from experiments.framework.tables import ResultTable
from experiments.framework.works import ADAKV, DUO_ATTENTION, KVPRESS
from experiments.loading import load_model, short_name
from experiments.questions.headwise import reading
from experiments.questions.headwise.budgets import ALL, COMPARED, N_PAIRS, UNIFORM, compare
from experiments.questions.headwise.trials import MISSING, SAME, trials
from experiments.testbed.asking import Task
from experiments.testbed.decoding import FULL, Size, decode_times
from experiments.testbed.facts import draw
from experiments.testbed.families import FAMILIES as FAMILIES_BUILT
from experiments.testbed.families import build, supported_implementations
from experiments.testbed.timed_models import ModelSpec, random_llama
from press_core import attention_sites

RATIOS = (0.5, 0.7, 0.8, 0.9)
"""Evicted where questions are asked, if nothing else is given."""

FAMILIES = ("llama", "gemma2", "gpt_oss")
"""What the variants are tried on: a plain model, one with capped logits, one with sinks."""

TIMED = random_llama(
    "6 layers of 8/4 heads of 64", num_layers=6, num_heads=8, num_kv_heads=4, head_dim=64
)
_BY_HOOK, _RAGGED = "mask by hook", "ragged"


class Part(str, Enum):
    """What there is to measure."""

    BUDGETS = "budgets"
    DECODING = "decoding"
    CONDITIONS = "conditions"


@dataclass(frozen=True)
class Options:
    """What is measured, and how much of it."""

    part: Annotated[
        tuple[Part, ...], typer.Option(help="What to measure. Repeatable.", show_default="all")
    ] = ()
    model: Annotated[
        str | None,
        typer.Option(
            help="Shipped model, folder or hub id, asked and timed. By default facts-llama is "
            "asked, and a random Llama of 6 layers, 8/4 heads of 64, is timed."
        ),
    ] = None
    ratio: Annotated[
        tuple[float, ...],
        typer.Option(
            help="Share of the tokens to evict, in (0, 1). Repeatable.",
            show_default=f"{', '.join(map(str, RATIOS))}; timed: "
            f"{', '.join(map(str, Size.ratios))}",
            callback=checked_positive_share,
        ),
    ] = ()
    samples: Annotated[int, typer.Option(min=2, help="Contexts to ask about.")] = 64
    context: Annotated[int, typer.Option(min=32, help="Words in a context.")] = Task.context
    facts: Annotated[int, typer.Option(min=1, help="Facts in a context.")] = Task.facts
    contexts: Annotated[
        tuple[int, ...],
        typer.Option(min=64, help="Tokens in the cache that is timed. Repeatable."),
    ] = (1024, 4096, 16384)
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of the timing.")] = 11
    family: Annotated[
        tuple[str, ...],
        typer.Option(help="Architecture that the four ways are tried on. Repeatable."),
    ] = FAMILIES
    seed: Annotated[int, typer.Option(help="Seed of the contexts.")] = Task.seed
    dtype: Dtype = "float32"
    device: Device = "cpu"


class Headwise(Experiment[Options]):
    """Compare head-wise with uniform budgets: answers, memory, decode time, four ways to decode."""

    name = "headwise"
    title = "What head-wise eviction is worth, and what it takes"
    question = (
        "Do heads that share a budget answer more than heads with equal ones, and does decoding "
        "such a cache need a patch?"
    )
    method = (
        "Each press is paired with one that has the same scores and the other kind of budget; "
        "both answer the same questions about the same contexts, and are compared context by "
        "context. A decode step is timed in turn on the full cache, on a uniform one, and on a "
        "head-wise one read in four ways, whose logits are checked against the full cache behind a "
        "mask for each head. Two more pairs (CriticalAdaKV with CriticalKV, KVzip with as many "
        "tokens in each head) were measured once in the same way: they differed by 0.2 points at "
        "most, and with them the mean of all pairs was -0.9 [-1.4, -0.5]. A larger model, whose "
        "heads differ more, may gain more, and times on a GPU differ."
    )
    evidence = Evidence.MODEL
    full = Options()
    quick = Options(ratio=(0.8,), samples=16, contexts=(1024, 4096), rounds=6, family=("llama",))
    claims: ClassVar = {
        "patching": Claim(Options(part=(Part.CONDITIONS,))),
        "freeing": Claim(Options(part=(Part.DECODING,), contexts=(4096,), rounds=1), within=0.01),
    }

    def on(self, own: OwnModel) -> Planned[Options]:
        missing = [name for name in COMPARED if name not in own.presses]
        if missing:
            raise LeftOutError(f"{', '.join(missing)}, which it compares, cannot be opened on it")
        parts = (
            Part.BUDGETS,
            *([Part.DECODING] if own.keeps_all else []),
            *([Part.CONDITIONS] if own.model_type in FAMILIES_BUILT else []),
        )
        words, facts, samples = 192, 8, 6
        asked = {"samples": samples, "context": words, "facts": facts, "part": parts}
        contexts = own.at_most(1024)
        options = self.quick_on(own, **asked, contexts=contexts, family=(own.model_type,))
        n_caches = (1 + 2 * N_PAIRS * len(options.ratio)) * samples
        tokens = n_caches * (3 * words + 6 * facts)  # a word is a few tokens, or one
        timed = options.rounds * 6 * 2 if own.keeps_all else 0
        return Planned(options, tokens=tokens, steps=n_caches * facts + timed, seconds=5)

    def measure(self, options: Options, progress: Progress) -> Tables:
        """Whichever parts are asked for.

        Returns:
            `headwise_accuracy` and `headwise_difference`: see `budgets.compare`, and the `model`;
            `headwise_decoding`: `decoding.decode_times` at every context length, and the `model`;
            `headwise_conditions`: `trials.trials` on each family, its `model`.
        """
        tables: Tables = {}
        for part in options.part or Part:
            tables |= _MEASURES[part](options, progress)
        return tables

    def findings(self, tables: Tables) -> list[Finding]:
        return [one for name, find in _FINDINGS.items() if name in tables for one in find(tables)]

    def views(self, tables: Tables) -> list[ResultTable]:
        return [show(tables[name]) for name, show in reading.VIEWS.items() if name in tables]

    def figures(self, tables: Tables) -> dict[str, Figure]:
        name = "headwise_difference"
        return {name: reading.draw_difference(tables[name])} if name in tables else {}

    def related(self, tables: Tables) -> list[Related]:
        return related(tables)

    def contrasts(self, tables: Tables) -> list[Contrast]:
        if "headwise_decoding" not in tables:
            return []
        rows = _most_evicted(tables)
        bars = {"hooks": rows[_BY_HOOK]["share"], "patches": rows[_RAGGED]["share"]}
        ratio = rows[_RAGGED]["ratio"]
        return [Contrast(f"Bytes held with {ratio:.0%} evicted, of the full cache", bars)]


EXPERIMENT = Headwise()


# ---- measuring ---------------------------------------------------------------------------------


def measure_budgets(options: Options, progress: Progress) -> Tables:
    """Answers from caches with both kinds of budget.

    Raises:
        UserError: if the contexts cannot hold the facts.
    """
    try:
        draw(1, options.context, options.facts, torch.Generator())
    except ValueError as error:
        raise UserError(f"cannot draw these contexts and facts: {error}") from error
    name = options.model or "facts-llama"
    model, tokenizer = load_model(name, dtype=options.dtype, device=options.device)
    task = Task(options.context, options.facts, options.samples, seed=options.seed)
    found = compare(model, tokenizer, task, options.ratio or RATIOS, progress)
    found["headwise_accuracy"]["model"] = short_name(name)
    return found


def measure_decoding(options: Options, progress: Progress) -> Tables:
    """Times of decode steps, at every context length."""
    spec = ModelSpec.asked(options.model, TIMED, options.dtype, options.device)
    name, model = spec.name, spec.load()
    if len(attention_sites(model)) < model.config.num_hidden_layers:
        raise UserError(
            f"some layers of {name} keep a sliding window, so that its decode steps say little "
            "about head-wise caches; time a model without them, or leave out --part decoding"
        )
    size = Size(options.contexts, options.ratio or Size.ratios, options.rounds)
    bar = progress.add_task("decode steps", total=size.rounds * len(size.contexts))
    advance = partial(progress.advance, bar)
    parts = [decode_times(model, context, size, advance) for context in size.contexts]
    return {"headwise_decoding": pd.concat(parts, ignore_index=True).assign(model=name)}


def measure_conditions(options: Options, progress: Progress) -> Tables:
    """The four ways tried on a random model of each family."""
    parts = []
    for family in progress.track(options.family, description="conditions"):
        model = build(family, attn_implementation=supported_implementations(family)[0])
        parts.append(trials(model).assign(model=family))
    return {"headwise_conditions": pd.concat(parts, ignore_index=True)}


_MEASURES = {
    Part.BUDGETS: measure_budgets,
    Part.DECODING: measure_decoding,
    Part.CONDITIONS: measure_conditions,
}


# ---- findings ----------------------------------------------------------------------------------


def find_worth(tables: Tables) -> Iterator[Finding]:
    """Whether head-wise budgets helped, and by how much."""
    difference, accuracy = tables["headwise_difference"], tables["headwise_accuracy"]
    overall = difference[difference["ratio"].isna() & (difference["pair"] == ALL)].iloc[0]
    mean, *interval = reading.points(overall).split(" ", 1)
    works: Any = "works" if overall["low"] > 0 else "costs" if overall["high"] < 0 else None
    undecided = "made no difference that could be shown"
    said = {"works": "helped", "costs": "cost answers"}.get(works, undecided)
    text = f"Head-wise budgets {said} on {accuracy['model'].iloc[0]}: **{mean}** points"
    n = difference["pair"].nunique() - 1
    against = f"of right answers against uniform ones (mean of {n} pairs)."
    text = " ".join([text, *interval, against])
    yield Finding("worth", text, "let heads share a budget", works)


def find_patching(tables: Tables) -> Iterator[Finding]:
    """Whether head-wise eviction needs a patch to be right."""
    conditions = tables["headwise_conditions"]
    tried = conditions[(conditions["condition"] == _BY_HOOK) & (conditions["outcome"] != MISSING)]
    n_right = int((tried["outcome"] == SAME).sum())
    needless = n_right == len(tried)
    text = (
        f"Head-wise eviction {'needs no patch' if needless else 'needs a patch'} to be right: a "
        f"mask per head, set by a hook, gives the right logits in **{n_right}** of "
        f"{len(tried)} trials."
    )
    need = "decode with different tokens in each head, without a patch"
    works: Any = "works" if needless else "breaks"
    yield Finding("patching", text, need, works, Evidence.REFERENCE)


def _most_evicted(tables: Tables) -> dict[str, Any]:
    """The rows in which most was evicted, of some 4,096 tokens, by cache, and the `share` held."""
    decoding = tables["headwise_decoding"]
    pressed = decoding[decoding["condition"] != FULL]
    context = min(pressed["context"].unique(), key=lambda context: abs(context - 4096))
    rows = pressed[(pressed["context"] == context) & (pressed["ratio"] == pressed["ratio"].max())]
    share = rows["bytes"] / rows["full_bytes"]
    return rows.assign(share=share).set_index("condition").to_dict("index")


def find_freeing(tables: Tables) -> Iterator[Finding]:
    """What the mask by a hook and ragged storage hold, and how quickly the latter is read."""
    rows = _most_evicted(tables)
    ragged = rows[_RAGGED]
    text = (
        f"With {ragged['ratio']:.0%} evicted head by head, ragged storage (patched attention) "
        f"holds **{ragged['share']:.2f}** of the full cache's bytes; a mask set by a hook, "
        f"{rows[_BY_HOOK]['share']:.2f}."
    )
    frees: Any = "works" if ragged["share"] < 1 else "breaks"
    yield Finding("freeing", text, "free memory head by head", frees, Evidence.BYTES)
    text = (
        f"At {ragged['context']:,} tokens, {ragged['ratio']:.0%} evicted, ragged heads decode in "
        f"**{ragged['time']:.2f}**{bracket(ragged['low'], ragged['high'])} of the time on the full "
        f"cache, even heads in {rows[UNIFORM]['time']:.2f}."
    )
    yield Finding("ragged", text, evidence=Evidence.TIME)


_FINDINGS = {
    "headwise_difference": find_worth,
    "headwise_conditions": find_patching,
    "headwise_decoding": find_freeing,
}


def related(tables: Tables) -> list[Related]:
    """What papers say of budgets by head, and kvpress of their storage."""
    lines = []
    if "headwise_difference" in tables:
        difference, accuracy = tables["headwise_difference"], tables["headwise_accuracy"]
        means = difference[difference["ratio"].isna()].set_index("pair")
        for pair, work, says in _PAPERS:
            here = (
                f"On {accuracy['model'].iloc[0]}, against uniform budgets: "
                f"{reading.points(means.loc[pair])} points of right answers, averaged over the "
                "ratios."
            )
            lines.append(Related("worth", work, says, here))
    if "headwise_decoding" in tables:
        rows = _most_evicted(tables)
        here = (
            f"With {rows[_RAGGED]['ratio']:.0%} evicted, keys that are only masked hold "
            f"{rows['fake keys']['share']:.2f} of the full cache's bytes, ragged storage "
            f"{rows[_RAGGED]['share']:.2f}."
        )
        says = "Heads that share a budget keep all their keys, and those evicted are masked."
        lines.append(Related("freeing", KVPRESS, says, here))
    return lines


_PAPERS = (
    (
        "AdaKV(SnapKV)",
        ADAKV,
        "Budgets that heads share improve quality substantially, on 13 data sets of RULER and 16 "
        "of LongBench.",
    ),
    (
        "DuoAttention",
        DUO_ATTENTION,
        "Only retrieval heads need a full cache; the others keep sinks and recent tokens, with "
        "little loss in accuracy.",
    ),
)
"""Pairs of presses, whose work, and what it says."""
