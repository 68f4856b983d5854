"""Head-wise eviction: accuracy against uniform budgets, memory freed, and how to decode the cache.

*Budgets*: presses that keep the same number of tokens in every head, against presses with the same
scores that let heads compete for a shared budget, on the same questions: see `budgets`.

*Decoding*: time of a decode step on the full cache, on a uniformly pruned one, and on a head-wise
pruned one that is decoded in four ways (`experiments.testbed.variants`): see
`four_ways.decode_times`.

*Conditions*: on which models and with which attention implementations each of the four ways gives
the right logits: see `four_ways.trials`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Annotated, Any, ClassVar

import pandas as pd
import typer
from matplotlib.figure import Figure
from rich.progress import Progress

from experiments.framework import shared
from experiments.framework.experiment import Claim, Contrast, Evidence, Experiment, Finding, Tables
from experiments.framework.frames import wide_table
from experiments.framework.intervals import METHOD, bracket, bracketed, written
from experiments.framework.options import Device, Dtype, at_least, one_of, several
from experiments.framework.own_model import SMALL, LeftOutError, OwnModel, Planned
from experiments.framework.plots import ratio_figure
from experiments.framework.tables import ResultTable
from experiments.framework.wording import sentences
from experiments.loading import load_model, short_name
from experiments.questions.headwise import four_ways
from experiments.questions.headwise.budgets import ALL, ALONE, compare
from experiments.questions.headwise.four_ways import FULL, MISSING, SAME, UNIFORM
from experiments.testbed.facts import Task, check_vocabulary
from experiments.testbed.families import FAMILIES, build
from experiments.testbed.timed_models import ModelSpec, random_llama

RATIOS = (0.5, 0.7, 0.8, 0.9)
"""Default shares of the tokens to evict in the part `budgets`."""

TIMED = random_llama(
    "6 layers of 8/4 heads of 64", num_layers=6, num_heads=8, num_kv_heads=4, head_dim=64
)
_BY_HOOK, _RAGGED = "mask by hook", "ragged"

FULL_MARKS = 0.97
"""Share of right answers from which there is little to gain."""

_finding = sentences(__file__)


class Part(str, Enum):
    """A part of the experiment."""

    BUDGETS = "budgets"
    DECODING = "decoding"
    CONDITIONS = "conditions"


@dataclass(frozen=True)
class Options:
    """What to measure, on which contexts and models."""

    part: Annotated[
        tuple[Part, ...],
        typer.Option(help="What to measure.", show_default="all; no budgets if a model is given"),
    ] = ()
    model: shared.ModelOrOwn = None
    ratio: shared.Ratios = ()
    samples: shared.Samples = 48
    context: shared.Words = Task.context
    facts: shared.Facts = Task.facts
    contexts: Annotated[
        tuple[int, ...], several(int, "Tokens in the timed cache.", at_least(64))
    ] = (1024, 4096, 16384)
    rounds: shared.Rounds = 11
    family: Annotated[
        tuple[str, ...], several(str, "Architecture to test the four ways on.", one_of(FAMILIES))
    ] = ("llama", "gemma2", "gpt_oss")  # plain, with softcapped logits, with learned sinks
    seed: shared.Seed = Task.seed
    dtype: Dtype = "float32"
    device: Device = "cpu"

    @property
    def parts(self) -> tuple[Part, ...]:
        """The parts; by default all, but no budgets of a given model: it may know no facts."""
        of_any_model = Part.DECODING, Part.CONDITIONS
        return self.part or (tuple(Part) if self.model is None else of_any_model)


class Headwise(Experiment[Options]):
    """Compare head-wise with uniform budgets: answers, memory, decode time, four ways to decode.

    Do presses answer more questions if heads share a budget than if every head keeps the same
    number of tokens, and does decoding such a cache need a patch?

    Each head-wise press is paired with a uniform one that has the same scores; both answer the same
    questions about the same contexts, and are compared context by context. SnapKV's window is 16
    tokens here. The mean over presses weighs all alike, so it depends on which are compared.
    DuoAttention is not in it: its heads share no budget, each keeps all tokens or a window; it is
    paired with StreamingLLM, which keeps in all heads what its streaming heads keep. Decode steps
    are timed in turn on the full cache, on a uniformly pruned one, and on a head-wise pruned one
    that is decoded in four ways, whose logits are checked against the full cache with one mask per
    head. Ratios of times are of storage as well as of tokens: a plain cache is copied at every
    step, ragged storage is not, and each has its own kernel. Copies of megabytes take up to twice
    as long in some processes as in others, so each round has a new one. In it a condition decodes
    5 tokens at a turn, of whose times the median counts, after a turn that warms up.
    The answers are those of one small model: a larger model, whose heads differ more, may gain more
    from head-wise budgets, and times on a GPU differ.
    """

    name = "headwise"
    title = "What head-wise eviction gains, and what decoding it takes"
    evidence = Evidence.MODEL
    full = Options()
    quick = Options(ratio=(0.8,), samples=16, contexts=(1024, 4096), rounds=6, family=("llama",))
    redrawn = Options(part=(Part.BUDGETS,))
    claims: ClassVar = {
        "patching": Claim(Options(part=(Part.CONDITIONS,))),
        "freeing": Claim(Options(part=(Part.DECODING,), contexts=(4096,), rounds=1), within=0.01),
    }

    def on(self, own: OwnModel) -> Planned[Options]:
        """Decoding and conditions only, as the questions need the vocabulary of facts-llama."""
        opens = {"KnormPress", "AdaKVPress"} <= {*own.presses}
        fits = {Part.DECODING: own.keeps_all and opens, Part.CONDITIONS: own.model_type in FAMILIES}
        parts = tuple(filter(fits.get, fits))
        if not parts:
            raise LeftOutError(
                "it needs a known family, or KnormPress, AdaKVPress and no sliding windows"
            )
        family, contexts = (own.model_type,), own.at_most(1024)
        options = self.quick_on(own, part=parts, contexts=contexts, family=family)
        rounds = options.rounds * fits[Part.DECODING]  # of 11 conditions, 2 turns of 5 tokens
        note = f"The four ways: {SMALL}" if Part.CONDITIONS in parts else ""
        return Planned(options, steps=110 * rounds, seconds=5 + 3 * rounds, note=note)

    def measure(self, options: Options, progress: Progress) -> Tables:
        """Measure the chosen parts.

        Returns:
            `headwise_accuracy`, with the `model`, and `headwise_difference`: see `budgets.compare`;
            `headwise_decoding`: `four_ways.decode_times` at every context length, with the `model`;
            `headwise_conditions`: `four_ways.trials` on each family, the `model`.
        """
        made = (_MEASURES[part](options, progress) for part in options.parts)
        return {name: table for tables in made for name, table in tables.items()}

    def findings(self, tables: Tables) -> list[Finding]:
        return [one for name, find in _FINDINGS.items() if name in tables for one in find(tables)]

    def views(self, tables: Tables) -> list[ResultTable]:
        return [show(tables[name]) for name, show in _VIEWS.items() if name in tables]

    def figures(self, tables: Tables) -> dict[str, Figure]:
        return {name: draw(tables) for name, draw in _FIGURES.items() if name in tables}

    def contrasts(self, tables: Tables) -> list[Contrast]:
        if "headwise_decoding" not in tables:
            return []
        rows = _most_evicted(tables).to_dict("index")
        bars = {name: rows[name]["share"] for name in (_BY_HOOK, _RAGGED)}
        ratio = rows[_RAGGED]["ratio"]
        return [Contrast(f"Share of bytes held, {ratio:.0%} evicted by head", bars)]


EXPERIMENT = Headwise()


# ---- measuring ---------------------------------------------------------------------------------


def measure_budgets(options: Options, progress: Progress) -> Tables:
    """Accuracy with both kinds of budget.

    Raises:
        UserError: if the contexts are too short for the facts, or the model has a different
            vocabulary.
    """
    name = options.model or "facts-llama"
    task = Task(options.context, options.facts, options.samples, options.seed)
    model, tokenizer = load_model(name, dtype=options.dtype, device=options.device)
    check_vocabulary(tokenizer, name)
    tables = compare(model, task, options.ratio or RATIOS, progress)
    accuracy = tables["headwise_accuracy"].assign(model=short_name(name))
    return tables | {"headwise_accuracy": accuracy}


def measure_decoding(options: Options, progress: Progress) -> Tables:
    """Times of decode steps, at every context length.

    Raises:
        UserError: if some layers of the model have a sliding window.
    """
    spec = ModelSpec.given(options.model, TIMED, options.dtype, options.device)
    advance = partial(progress.advance, progress.add_task("decode steps", total=options.rounds))
    sizes = options.contexts, options.ratio or (0.5, 0.8), options.rounds
    times = four_ways.decode_times(spec, *sizes, advance)
    return {"headwise_decoding": times.assign(model=spec.name)}


def measure_conditions(options: Options, progress: Progress) -> Tables:
    """The four ways to decode, on a small random model of each family."""
    families = progress.track(options.family, description="conditions")
    parts = [four_ways.trials(build(family)).assign(model=family) for family in families]
    return {"headwise_conditions": pd.concat(parts, ignore_index=True)}


_MEASURES = {
    Part.BUDGETS: measure_budgets,
    Part.DECODING: measure_decoding,
    Part.CONDITIONS: measure_conditions,
}


# ---- findings ----------------------------------------------------------------------------------


def points(row: Any, form: str = "**{}** points") -> str:
    """A difference and its interval in percentage points."""
    difference, low, high = (100 * row[name] for name in ("difference", "low", "high"))
    return form.format(written(difference, "+.1f")) + bracket(low, high, "+.1f")


_CITED = {"adakv": "AdaKV(SnapKV)", "duoattention": ALONE}
"""Presses beside related work, by the name of their finding."""


def find_worth(tables: Tables) -> Iterator[Finding]:
    """How much head-wise budgets gain in accuracy, over all presses and by press."""
    table, accuracy = tables["headwise_difference"], tables["headwise_accuracy"]
    means = table[table["ratio"].isna()].set_index("pair")
    overall = means.loc[ALL]
    works: Any = "works" if overall["low"] > 0 else "costs" if overall["high"] < 0 else None
    of = 100 * means["difference"].drop([ALL, ALONE])
    ends = {"low": of.min(), "least": of.idxmin(), "high": of.max(), "most": of.idxmax()}
    model, uniform = accuracy["model"].iloc[0], accuracy[accuracy["budgets"] == UNIFORM]
    yield _finding("worth", works, gain=points(overall), model=model, **ends)
    shared = uniform.loc[uniform["pair"] != ALONE, "accuracy"]
    yield _finding("room", full=(shared >= FULL_MARKS).sum(), n=len(shared), marks=FULL_MARKS)
    highest = table[table["ratio"] == table["ratio"].max()].set_index("pair")
    for name, pair in _CITED.items():
        base = uniform.loc[uniform["pair"] == pair, "press"].iloc[0]
        said = {"gain": points(means.loc[pair]), "most": points(highest.loc[pair], "{}")}
        said |= {"pair": pair, "base": base, "ratio": highest["ratio"].iloc[0]}
        yield _finding(name, as_in="cited", **said)


def find_patching(tables: Tables) -> Iterator[Finding]:
    """Whether decoding a head-wise pruned cache correctly needs a patch."""
    conditions = tables["headwise_conditions"]
    tried = conditions[(conditions["condition"] == _BY_HOOK) & (conditions["outcome"] != MISSING)]
    right = int((tried["outcome"] == SAME).sum())
    verdict, needs = ("works", "no") if right == len(tried) else ("breaks", "a")
    yield _finding("patching", verdict, Evidence.REFERENCE, needs=needs, right=right, n=len(tried))


def _most_evicted(tables: Tables) -> pd.DataFrame:
    """Rows with the highest ratio at the context length nearest to 4,096 tokens, by condition, with
    the `share` of the full cache's bytes that is held."""
    decoding = tables["headwise_decoding"]
    pressed = decoding[decoding["condition"] != FULL]
    context = min(pressed["context"].unique(), key=lambda context: abs(context - 4096))
    rows = pressed[(pressed["context"] == context) & (pressed["ratio"] == pressed["ratio"].max())]
    return rows.assign(share=rows["bytes"] / rows["full_bytes"]).set_index("condition")


def find_freeing(tables: Tables) -> Iterator[Finding]:
    """Bytes held with a mask set by a hook and with ragged storage; decode time on ragged heads."""
    rows = _most_evicted(tables).to_dict("index")
    ragged = rows[_RAGGED]
    shares = {"ragged": ragged["share"], "masked": rows[_BY_HOOK]["share"]}
    frees = "works" if ragged["share"] < 1 else "breaks"
    yield _finding("freeing", frees, Evidence.BYTES, ratio=ragged["ratio"], **shares)
    timed = {name: ragged[name] for name in ("context", "ratio", "time")}
    interval, uniform = bracket(ragged["low"], ragged["high"]), rows[UNIFORM]["time"]
    yield _finding("ragged", None, Evidence.TIME, interval=interval, uniform=uniform, **timed)


_FINDINGS = {
    "headwise_difference": find_worth,
    "headwise_conditions": find_patching,
    "headwise_decoding": find_freeing,
}


# ---- tables and the figure -----------------------------------------------------------------------


def show_difference(table: pd.DataFrame) -> ResultTable:
    """A row per pair of presses, a column per share evicted."""
    evicted = table["ratio"].map("{:.0%} evicted".format).where(table["ratio"].notna(), "mean")
    n = table["contexts"].iloc[0]
    note = (
        f"Accuracy, head-wise minus uniform, in points, with {METHOD} over {n} contexts; all: the "
        "pairs whose heads share a budget."
    )
    cells = [points(row, "{}") for row in table.to_dict("records")]
    return wide_table(note, table.assign(evicted=evicted), ["pair"], "evicted", cells)


def show_decoding(table: pd.DataFrame) -> ResultTable:
    """A row per condition, a column per context length."""
    rows = table[table["condition"] != FULL]
    rows = rows.assign(
        tokens=rows["context"].map("{:,} tokens".format),
        evicted=rows["ratio"].map("{:.0%}".format),
        held=rows["bytes"] / rows["full_bytes"],
    )
    held = rows.groupby(["condition", "evicted"])["held"].transform("max")
    first, keys = rows.iloc[0], ["condition", "evicted", "bytes"]
    note = (
        f"Time of a decode step of {first['model']} over that on the full cache: medians, with "
        f"{METHOD} over {first['rounds']} rounds; bytes over those of the full cache:"
    )
    cells = [bracketed(row, "time") for row in rows.to_dict("records")]
    return wide_table(note, rows.assign(bytes=held.map("{:.3f}".format)), keys, "tokens", cells)


def show_conditions(table: pd.DataFrame) -> ResultTable:
    """A row per model, attention implementation and question, a column per way to decode."""
    offered = table[table["outcome"] != MISSING]
    note = "Logits of a short and a long question after a padded batch, against the reference."
    keys = ["model", "implementation", "question"]
    return wide_table(note, offered, keys, "condition", list(offered["outcome"]))


_VIEWS = {
    "headwise_difference": show_difference,
    "headwise_decoding": show_decoding,
    "headwise_conditions": show_conditions,
}


def draw_difference(tables: Tables) -> Figure:
    """Head-wise minus uniform accuracy in percentage points, a panel per share evicted."""
    table = tables["headwise_difference"]
    scaled = 100 * table[["difference", "low", "high"]].rename(columns={"difference": "ratio"})
    names = table["pair"].replace(ALL, "mean, budget shared")
    scaled = scaled.assign(label=names, mechanism="hook")
    panels = {f"{share:.0%} evicted": rows for share, rows in scaled.groupby(table["ratio"])}
    label = (
        "Accuracy with head-wise minus uniform budgets, in percentage points, by press and share "
        f"evicted, with {METHOD} over contexts"
    )
    return ratio_figure(panels, label, "accuracy, head-wise minus uniform (points)", mark=0)


def draw_decoding(tables: Tables) -> Figure:
    """Bytes held and the time of a decode step by condition, a panel each."""
    rows = _most_evicted(tables).rename_axis("label").reset_index()
    rows["mechanism"] = rows["label"].map({UNIFORM: "bare", _BY_HOOK: "hook"}).fillna("patch")
    context, ratio, held = rows["context"].iloc[0], rows["ratio"].iloc[0], rows["share"]
    panels = {
        "bytes held": rows.assign(ratio=held, low=held, high=held),
        "time of a decode step": rows.assign(ratio=rows["time"]),
    }
    label = (
        f"Bytes held, and time of a decode step with {METHOD} over rounds, by how a cache of "
        f"{context:,} tokens with {ratio:.0%} evicted is stored and decoded"
    )
    return ratio_figure(panels, label, "over those of the full cache")


_FIGURES = {"headwise_difference": draw_difference, "headwise_decoding": draw_decoding}
