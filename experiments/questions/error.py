"""Where an eviction hurts: error per layer and head against the full cache.

A press prunes the cache of a context, and a question is run three times: on the pruned cache, on
the full cache, and on the full cache with the evicted tokens masked (`experiments.testbed.masked`).
"""

from dataclasses import dataclass
from typing import Any

import pandas as pd
from matplotlib.figure import Figure
from rich.progress import Progress
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import hooks_impl
from experiments import UserError
from experiments.framework import shared
from experiments.framework.experiment import Evidence, Experiment, Finding, Tables
from experiments.framework.frames import frame_table, heat_maps
from experiments.framework.options import Device, Dtype, chosen_device
from experiments.framework.own_model import OwnModel, Planned
from experiments.framework.plots import press_label
from experiments.framework.tables import ResultTable
from experiments.framework.wording import sentences
from experiments.loading import load_model, short_name
from experiments.testbed.facts import VOCABULARY, Task
from experiments.testbed.masked import Reader, Sample, harm
from experiments.testbed.recipes import press_name, suited_pair

_finding = sentences(__file__)

DRAWN = (
    *("SnapKVPress", "AdaKVPress", "ExpectedAttentionPress", "TOVAPress", "KVzipPress"),
    *("KeyDiffPress", "KnormPress", "StreamingLLMPress", "RandomPress"),
)
"""Presses shown in the figure; others fill it up if some of these were not measured."""

ASKED = 0.05
"""How far the share that a press evicts may be from the one asked for."""

EXPLAINED = 1e-3
"""Largest logit difference between the pruned cache and the masked full cache up to which a mask
over the evicted tokens explains a press's effect."""


@dataclass(frozen=True)
class Options:
    """Which presses to measure, at which ratio, on which contexts and model."""

    press: shared.Presses = ()
    ratio: shared.Ratio = 0.8
    samples: shared.Samples = 8
    context: shared.Words = 512
    facts: shared.Facts = 8
    model: shared.Model = "facts-llama"
    seed: shared.Seed = 0
    dtype: Dtype = "float32"
    device: Device = "auto"


# ---- samples -------------------------------------------------------------------------------------


def samples_of(tokenizer: PreTrainedTokenizerBase, options: Options) -> list[Sample]:
    """Contexts of the facts task, as token ids of `VOCABULARY` or tokenized from text.

    Raises:
        UserError: if the contexts are too short for the facts.
    """
    task = Task(options.context, options.facts, options.samples, options.seed)
    batches = task.batches()
    if tokenizer.get_vocab() == {word: index for index, word in enumerate(VOCABULARY)}:
        return [Sample(batch.context_ids, batch.question_ids[:, 0]) for batch in batches]

    def ids(words: str, start: bool) -> Tensor:
        encoded: Any = tokenizer(words, add_special_tokens=start, return_tensors="pt")
        return encoded.input_ids

    texts = [batch.text(row) for batch in batches for row in range(len(batch.context_ids))]
    return [Sample(ids(t.context, True), ids(f" {t.questions[0]}", False)) for t in texts]


def tables_of(
    model: PreTrainedModel,
    samples: list[Sample],
    names: list[str],
    ratio: float,
    progress: Progress,
) -> Tables:
    """The tables of `Error.measure`, without the column `model`."""
    readers = [Reader(model, sample) for sample in samples]
    length = max(sample.context.shape[1] for sample in samples)
    heads, logits = [], []

    def of_press(name: str) -> Any:
        pair = suited_pair(name, ratio, length, model)
        return [harm(reader, pair) for reader in readers]

    for press in progress.track(names, description="error"):
        harms = shared.or_left_out(progress, press, of_press, press) or []
        of = {"press": press, "ratio": ratio}
        heads += [of | row for rows, _ in harms for row in rows]
        logits += [of | row for _, row in harms]
    if not logits:
        raise UserError(f"none of {', '.join(map(press_label, names))} evicts in the prefill")
    place = ["press", "ratio", "layer", "head"]
    how: Any = {"sort": False, "as_index": False}
    of_heads = {"kept": "mean", "mass_lost": "mean", "alone": "mean", "logit_error": "max"}
    worst = {"logit_error": "max", "unexplained": "max", "equal": "min"}
    by_press = pd.DataFrame(logits).groupby(place[:2], **how).agg({"same_token": "mean"} | worst)
    return {
        "error": pd.DataFrame(heads).groupby(place, **how).agg(of_heads),
        "error_logits": by_press.assign(samples=sum(len(sample.context) for sample in samples)),
    }


# ---- reading the tables --------------------------------------------------------------------------


def explained(tables: Tables) -> pd.DataFrame:
    """The table `error` without presses that modify the tokens they keep, which a mask cannot
    reproduce; that evict another share than was asked for; or whose errors are those of another."""
    error, logits = tables["error"], tables["error_logits"]
    explains = logits["press"][logits["unexplained"] <= EXPLAINED]
    evicted = 1 - error.groupby("press")["kept"].mean()
    asked = evicted[(evicted - error["ratio"].iloc[0]).abs() < ASKED].index
    of_heads = error.pivot(index="press", columns=["layer", "head"], values="alone")
    plain = sorted(of_heads.index, key=len)  # a press around others has the longer name
    distinct = of_heads.loc[plain].round(6).drop_duplicates().index
    return error[error["press"].isin({*explains} & {*asked} & {*distinct})]


class Error(Experiment[Options]):
    """Measure the error that an eviction causes in each layer, each head and the logits.

    In which layers and heads does an eviction change the attention output and the logits, and
    how much attention mass do the evicted tokens have there?

    A question is run on the pruned and on the full cache of the same context, with eager
    attention, and attention outputs and logits are compared. The effect of a single head's
    eviction is measured on the full cache with that head's evicted tokens masked; masking them
    in all heads has to reproduce the logits of the pruned cache, and presses for which it does
    not are left out of the findings and the figure; so are those that evict another share than was
    asked for, and those of which another press has the same errors. Presses that evict nothing in
    a prefill, or need a question, are not measured. The worst quarter of the heads is chosen for
    each press by the errors that are then summed, so its share is above a quarter even if heads
    differ by chance alone. The model is small and its contexts are
    facts among filler words: in deeper models more errors add up, and coherent text may spread
    them over more heads.
    """

    name = "error"
    title = "Where an eviction hurts"
    evidence = Evidence.MODEL
    full = Options()
    quick = Options(
        press=("SnapKVPress", "AdaKVPress", "KnormPress", "StreamingLLMPress"), samples=4
    )
    redrawn = full

    def on(self, own: OwnModel) -> Planned[Options]:
        presses, words = own.opened(self.quick.press), 192
        options = self.quick_on(own, press=presses, context=words)
        n_runs = options.samples * len(presses)
        # Up to 3 tokens per word; one step per KV head, as each is also masked alone.
        tokens, steps = 3 * words * (options.samples + 2 * n_runs), n_runs * (own.heads + 3)
        return Planned(options, tokens, steps, seconds=2)

    def measure(self, options: Options, progress: Progress) -> Tables:
        """Measure every press at the ratio.

        Returns:
            `error`: per press, ratio, layer and KV head the share of the tokens `kept`; the
            attention `mass_lost`, which the question's queries put on evicted tokens; and, with
            only this head evicting, `alone`, the error of its attention output relative to the
            output's norm, and `logit_error`, the largest error of a logit. `error_logits`: per
            press and ratio the largest `logit_error`; `same_token`, the share of questions with the
            same likeliest answer; `unexplained`, the largest logit difference between the pruned
            and the masked cache; and whether both mechanisms are `equal`, bit for bit.
        """
        names = [press_name(name) for name in options.press] or sorted(hooks_impl.PRESSES)
        how: Any = {"dtype": options.dtype, "device": chosen_device(options.device)}
        model, tokenizer = load_model(options.model, attn_implementation="eager", **how)
        tables = tables_of(model, samples_of(tokenizer, options), names, options.ratio, progress)
        name = short_name(options.model)
        return {stem: table.assign(model=name) for stem, table in tables.items()}

    def findings(self, tables: Tables) -> list[Finding]:
        error, logits = explained(tables), tables["error_logits"]
        other = int((~logits["equal"].astype(bool)).sum())
        verdict = "breaks" if other else None
        bits = _finding("equal", verdict, Evidence.BITS, other=other, n=len(logits))
        if error.empty:
            return [bits]
        by_press = error.groupby("press")["logit_error"]
        shares = by_press.agg(lambda e: e.nlargest(max(1, len(e) // 4)).sum() / e.sum())
        ends = {"mean": shares.mean(), "low": shares.min(), "high": shares.max()}
        heads, ratio = by_press.size().max(), error["ratio"].iloc[0]
        where = _finding("where", ratio=ratio, heads=heads, n=len(shares), **ends)
        related = error["mass_lost"].corr(error["alone"], method="spearman")
        ranks = error.groupby("press")[["mass_lost", "alone"]].corr(method="spearman")
        within = ranks.xs("alone", level=1)["mass_lost"]
        ends = {"low": within.min(), "high": within.max(), "median": within.median()}
        return [where, _finding("mass", related=related, n=len(shares), **ends), bits]

    def views(self, tables: Tables) -> list[ResultTable]:
        """A row per press, the smallest logit error first."""
        error, logits = tables["error"], tables["error_logits"]
        note = (
            f"`{logits['model'].iloc[0]}`, {logits['samples'].iloc[0]} contexts, "
            f"{logits['ratio'].iloc[0]:.0%} evicted; heads are named layer.head. Presses that the "
            "mask does not explain modify the tokens they keep. Findings and figure omit them, and "
            "presses that evict another share or err as another does."
        )
        by_press = error.sort_values("logit_error").groupby("press")
        heads = by_press.agg({"mass_lost": "mean", "layer": "last", "head": "last"})
        found = logits.join(heads, on="press").sort_values("logit_error")
        shown = {
            "press": found["press"].map(press_label),
            "attention lost": found["mass_lost"].map("{:.1%}".format),
            "worst head": found["layer"].map(str) + "." + found["head"].map(str),
            "largest logit error": found["logit_error"].map("{:.3g}".format),
            "same answer": found["same_token"].map("{:.0%}".format),
            "mask explains": (found["unexplained"] <= EXPLAINED).map({True: "yes", False: "no"}),
        }
        return [frame_table(note, pd.DataFrame(shown))]

    def figures(self, tables: Tables) -> dict[str, Figure]:
        """Error of each head's attention output if it evicts alone, a panel per press."""
        error = explained(tables).astype({"layer": str, "head": str})
        if error.empty:
            return {}
        by_press = {str(name): rows for name, rows in error.groupby("press", sort=False)}
        panels = {
            press_label(name): by_press[name].pivot_table("alone", "layer", "head", sort=False)
            for name in sorted(by_press, key=lambda name: name not in DRAWN)[: len(DRAWN)]
        }
        label = (
            "Error (in % of its norm) of the attention output of each KV head if only this head "
            f"evicts what a press takes from it, with {error['ratio'].iloc[0]:.0%} evicted from "
            "all: layer (rows) by head, a panel per press"
        )
        return {self.name: heat_maps(panels, label, columns=3)}


EXPERIMENT = Error()
