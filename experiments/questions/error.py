"""Where an eviction hurts: layer by layer, head by head, against the full cache.

A press evicts from a context, and a question is read: once from the pruned cache, once from the
full one. What differs is told per layer and KV head. Beside it stands a reference that shares
nothing with the presses but the list of what they kept: the full cache, read through a mask that
hides the rest. With the mask on all heads it has to give the logits of the pruned cache. With the
mask on a single head it tells what that head's eviction does by itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, NamedTuple

import pandas as pd
import torch
import typer
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter
from rich.progress import Progress
from torch import Tensor, nn
from transformers import Cache, DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

import hooks_impl
from experiments import UserError
from experiments.answers.compressed import without_change
from experiments.framework.evidence import Evidence
from experiments.framework.experiment import Experiment, Finding, Tables
from experiments.framework.options import (
    AutoDevice,
    Dtype,
    checked_positive_share,
    chosen_device,
    several,
)
from experiments.framework.own_model import OwnModel, Planned
from experiments.framework.plots import CELL_INK, new_figure, press_label, style
from experiments.framework.tables import ResultTable
from experiments.loading import load_model, short_name
from experiments.testbed.facts import VOCABULARY, draw
from experiments.testbed.recipes import press_name, suited_pair
from experiments.testbed.variants import Kept, mask_by_hook
from press_core import (
    AttentionSite,
    PressError,
    UnsupportedCacheError,
    attention_sites,
    kept_lengths,
    kept_positions,
)
from press_core.scope import InstalledPress

DRAWN = (
    *("SnapKVPress", "AdaKVPress", "ExpectedAttentionPress", "TOVAPress", "KVzipPress"),
    *("KeyDiffPress", "KnormPress", "StreamingLLMPress", "RandomPress"),
)
"""Presses of the figure."""

EXPLAINED = 1e-3
"""Largest difference of logits up to which what a press kept explains what comes of it."""


@dataclass(frozen=True)
class Options:
    """What is evicted, and from what."""

    press: Annotated[
        tuple[str, ...],
        several(
            str, "Press to measure, such as SnapKV.", show_default="all that evict in the prefill"
        ),
    ] = ()
    ratio: Annotated[
        tuple[float, ...],
        several(float, "Share of the tokens to evict, in (0, 1).", checked_positive_share),
    ] = (0.8,)
    samples: Annotated[int, typer.Option(min=1, help="Contexts, with a question each.")] = 8
    context: Annotated[int, typer.Option(min=32, help="Words in a context.")] = 512
    facts: Annotated[int, typer.Option(min=1, help="Facts in a context.")] = 8
    model: Annotated[str, typer.Option(help="Shipped model, folder or hub id.")] = "facts-llama"
    seed: Annotated[int, typer.Option(help="Seed of the contexts.")] = 0
    dtype: Dtype = "float32"
    device: AutoDevice = "auto"


class Sample(NamedTuple):
    """A context and its question, `(B, S)` and `(B, q)` token ids."""

    context: Tensor
    question: Tensor


@dataclass(frozen=True)
class Read:
    """What came of a question.

    Attributes:
        logits: `(B, vocabulary)`, after its last token.
        outputs: by site, `(B, q, H, d)`: what its attention gave, before the output projection.
        attentions: by site, `(B, H, q, keys)` weights, as eager attention returns them.
    """

    logits: Tensor
    outputs: list[Tensor]
    attentions: list[Tensor]


# ---- samples -------------------------------------------------------------------------------------


def samples_of(tokenizer: PreTrainedTokenizerBase, options: Options) -> list[Sample]:
    """Contexts of the facts task: as its own tokens, or in words for any other tokenizer.

    Raises:
        UserError: if the contexts cannot hold the facts.
    """
    generator = torch.Generator().manual_seed(options.seed)
    try:
        batch = draw(options.samples, options.context, options.facts, generator)
    except ValueError as error:
        raise UserError(f"--context, --facts: {error}") from error
    if tokenizer.get_vocab() == {word: index for index, word in enumerate(VOCABULARY)}:
        return [Sample(batch.context_ids, batch.question_ids[:, 0])]

    def ids(words: str, start: bool) -> Tensor:
        encoded: Any = tokenizer(words, add_special_tokens=start, return_tensors="pt")
        return encoded.input_ids

    texts = [batch.text(row) for row in range(options.samples)]
    return [Sample(ids(t.context, True), ids(f" {t.questions[0]}", False)) for t in texts]


# ---- reading -------------------------------------------------------------------------------------


@torch.inference_mode()
def read(
    model: PreTrainedModel,
    sites: Sequence[AttentionSite],
    cache: Cache,
    question: Tensor,
    kept: Kept | None = None,
) -> Read:
    """Read a question from `cache`, which stays as it is.

    Args:
        kept: what heads may see of the context; None: all of it.
    """
    outputs: list[Any] = [None] * len(sites)
    weights: list[Any] = [None] * len(sites)
    with ExitStack() as hooks:
        for index, site in enumerate(sites):
            keep = partial(_keep, outputs, index, site)
            hooks.callback(_projection(site).register_forward_pre_hook(keep).remove)
            note = partial(_note, weights, index)
            hooks.callback(site.module.register_forward_hook(note).remove)
        hooks.enter_context(mask_by_hook(model, kept or {}))
        logits = model(input_ids=question, past_key_values=cache).logits
    return Read(logits[:, -1], outputs, weights)


def _keep(
    outputs: list[Any], index: int, site: AttentionSite, _: nn.Module, args: tuple[Any, ...]
) -> None:
    outputs[index] = args[0].detach().unflatten(-1, (site.num_heads, -1)).clone()


def _note(weights: list[Any], index: int, _: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    weights[index] = output[1]


def _projection(site: AttentionSite) -> nn.Module:
    for name in ("o_proj", "dense", "out_proj", "c_proj"):
        child = getattr(site.module, name, None)
        if isinstance(child, nn.Module):
            return child
    raise UserError(
        f"{site.name} ({type(site.module).__name__}) has no output projection called o_proj, "
        "dense, out_proj or c_proj, before which its heads could be told apart"
    )


@torch.inference_mode()
def prefilled(model: PreTrainedModel, context: Tensor) -> DynamicCache:
    """The cache of a context."""
    cache = DynamicCache(config=model.config)
    model(input_ids=context, past_key_values=cache, logits_to_keep=1)
    return cache


class NothingEvictedError(Exception):
    """There is nothing that a press did to a context."""


# ---- one press -----------------------------------------------------------------------------------


class Whole(NamedTuple):
    """A sample read from the full cache."""

    sample: Sample
    cache: DynamicCache
    read: Read


class Pruned(NamedTuple):
    """A sample read from a pruned cache, and what its heads kept; None: a press does not say."""

    read: Read
    kept: Kept | None


def pruned(
    model: PreTrainedModel, sites: Sequence[AttentionSite], press: InstalledPress, sample: Sample
) -> Pruned:
    """Prune a context and read its question, inside the scope."""
    with torch.random.fork_rng(devices=[]), press(model):
        torch.default_generator.manual_seed(0)
        cache = prefilled(model, sample.context)
        kept = kept_in(cache, sample.context)
        return Pruned(read(model, sites, cache, sample.question), kept)


def kept_in(cache: Cache, context: Tensor) -> Kept | None:
    """What each head keeps of a context; None: a press did not say."""
    try:
        positions = kept_positions(cache)
    except UnsupportedCacheError:
        return None
    seen, kept = context.shape[1], {}
    for index, (of_layer, lengths) in enumerate(zip(positions, kept_lengths(cache), strict=True)):
        if lengths.numel():
            slots = of_layer.expand(*lengths.shape, -1).remainder(seen + 1)
            room = torch.zeros(*lengths.shape, seen + 1, dtype=torch.bool, device=slots.device)
            kept[index] = room.scatter(-1, slots, True)[..., :-1]  # where empty slots come last
    return kept


def by_head(site: AttentionSite, of_queries: Tensor) -> Tensor:
    """Means over a KV head's queries: from `(B, H, ...)` to `(H_kv,)`."""
    grouped = site.grouped(of_queries).unflatten(1, (site.num_kv_heads, -1))
    return grouped.transpose(0, 1).flatten(1).mean(dim=1)


def relative(site: AttentionSite, outputs: Tensor, whole: Tensor) -> Tensor:
    """How far attention outputs `(B, q, H, d)` are off, over what they should be: `(H_kv,)`."""
    difference = (outputs - whole).norm(dim=-1) / whole.norm(dim=-1).clamp(min=1e-12)
    return by_head(site, difference.transpose(1, 2))


def _equal(one: Pruned, other: Pruned) -> bool:
    pairs = zip(
        (one.read.logits, *one.read.outputs), (other.read.logits, *other.read.outputs), strict=True
    )
    return all(torch.equal(*pair) for pair in pairs)


@torch.inference_mode()
def rows_of_sample(
    model: PreTrainedModel,
    sites: Sequence[AttentionSite],
    whole: Whole,
    pair: Sequence[InstalledPress],
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """What an eviction does to one sample: a row per layer and head, and one for the logits.

    Raises:
        NothingEvictedError: if the press keeps all, or does not say what it keeps.
    """
    hook, patch = (pruned(model, sites, press, whole.sample) for press in pair)
    kept = hook.kept
    if kept is None or all(bool(kept[site.layer_idx].all()) for site in sites):
        raise NothingEvictedError("it evicts no tokens in the prefill, or does not say which")
    rows = [
        row
        for index in range(len(sites))
        for row in _rows_of_layer(model, sites, index, whole, kept, hook.read)
    ]
    masked = read(model, sites, without_change(whole.cache), whole.sample.question, kept)
    return rows, _row_of_logits(whole.read.logits, hook.read.logits, masked.logits) | {
        "equal": _equal(hook, patch)
    }


def _rows_of_layer(
    model: PreTrainedModel,
    sites: Sequence[AttentionSite],
    index: int,
    whole: Whole,
    kept: Kept,
    after: Read,
) -> Iterator[dict[str, Any]]:
    """A row per KV head of the site at `index`."""
    site, full = sites[index], whole.read
    heads = kept[site.layer_idx]
    gone = site.ungrouped((~heads).repeat_interleave(site.num_heads // heads.shape[1], dim=1))
    lost = full.attentions[index][..., : heads.shape[-1]] * gone.unsqueeze(2)
    mass = by_head(site, lost.sum(dim=-1))
    together = relative(site, after.outputs[index], full.outputs[index])
    for head in range(site.num_kv_heads):
        only = torch.ones_like(heads)
        only[:, head] = heads[:, head]
        cache, question = without_change(whole.cache), whole.sample.question
        alone = read(model, sites, cache, question, {site.layer_idx: only})
        own = relative(site, alone.outputs[index], full.outputs[index])
        yield {
            "layer": site.layer_idx,
            "head": head,
            "kept": float(heads[:, head].float().mean()),
            "mass_lost": float(mass[head]),
            "output_error": float(together[head]),
            "alone": float(own[head]),
            "logit_error": float((alone.logits - full.logits).abs().max()),
        }


def _row_of_logits(full: Tensor, logits: Tensor, masked: Tensor) -> dict[str, Any]:
    return {
        "logit_error": float((logits - full).abs().max()),
        "same_token": float((logits.argmax(-1) == full.argmax(-1)).float().mean()),
        "divergence": float(_divergence(full, logits)),
        "unexplained": float((logits - masked).abs().max()),
    }


def _divergence(full: Tensor, logits: Tensor) -> Tensor:
    """Kullback-Leibler divergence of what comes next, in nats, mean over rows."""
    one, other = full.float().log_softmax(-1), logits.float().log_softmax(-1)
    return (one.exp() * (one - other)).sum(-1).mean()


# ---- the tables ----------------------------------------------------------------------------------


_HEADS = ("press", "ratio", "layer", "head")
_WORST = {"logit_error": "max", "unexplained": "max", "equal": "min"}


def tables_of(
    model: PreTrainedModel,
    samples: Sequence[Sample],
    presses: Sequence[str],
    ratios: Sequence[float],
    progress: Progress,
    *,
    model_name: str,
) -> Tables:
    """The tables; see `Error.measure`."""
    sites = attention_sites(model)
    wholes = [_whole(model, sites, sample) for sample in samples]
    length = max(sample.context.shape[1] for sample in samples)
    heads: list[dict[str, Any]] = []
    logits: list[dict[str, Any]] = []
    refused: dict[str, str] = {}
    work = [(name, ratio) for name in presses for ratio in ratios]
    for name, ratio in progress.track(work, description="error"):
        try:
            pair = suited_pair(name, ratio, length, model)
            told = [rows_of_sample(model, sites, whole, pair) for whole in wholes]
        except (PressError, NothingEvictedError) as error:
            refused.setdefault(name, str(error))
            continue
        of = {"press": name, "ratio": ratio}
        heads += [of | row for rows, _ in told for row in rows]
        logits += [of | row for _, row in told]
    for name, reason in refused.items():
        progress.console.print(f"left out: {name}: {reason}", style="yellow", markup=False)
    if not logits:
        raise UserError(f"none of {', '.join(map(press_label, presses))} evicts in the prefill")
    by_head = pd.DataFrame(heads).groupby(list(_HEADS), sort=False)
    merged = by_head.agg(
        {"kept": "mean", "mass_lost": "mean", "output_error": "mean"}
        | {"alone": "mean", "logit_error": "max"}
    )
    of_logits = pd.DataFrame(logits).groupby(["press", "ratio"], sort=False)
    summary = of_logits.agg({"same_token": "mean", "divergence": "mean"} | _WORST)
    n = sum(len(sample.context) for sample in samples)
    return {
        "error": merged.reset_index().assign(model=model_name),
        "error_logits": summary.reset_index().assign(samples=n, model=model_name),
    }


def _whole(model: PreTrainedModel, sites: Sequence[AttentionSite], sample: Sample) -> Whole:
    sample = Sample(*(ids.to(model.device) for ids in sample))
    cache = prefilled(model, sample.context)
    return Whole(sample, cache, read(model, sites, without_change(cache), sample.question))


# ---- reading the tables --------------------------------------------------------------------------


def explained(tables: Tables) -> pd.DataFrame:
    """The table `error` without presses that change what they keep, which no mask can tell."""
    logits = tables["error_logits"]
    worst = logits.groupby("press")["unexplained"].max()
    return tables["error"][tables["error"]["press"].isin(worst.index[worst <= EXPLAINED])]


def strongest(table: pd.DataFrame, wanted: float = 0.8) -> float:
    """The ratio of a table that is nearest to `wanted`."""
    return float(min(table["ratio"].unique(), key=lambda ratio: (abs(ratio - wanted), ratio)))


def _finding_on_place(table: pd.DataFrame) -> Finding:
    """How much of the error comes from the heads where it is worst."""
    ratio = strongest(table)
    rows = table[table["ratio"] == ratio]
    shares = []
    for _, own in rows.groupby("press"):
        ordered = own["logit_error"].sort_values(ascending=False)
        if ordered.sum():
            shares.append(ordered.iloc[: max(1, len(ordered) // 4)].sum() / ordered.sum())
    mean = sum(shares) / len(shares) if shares else 0.0
    n = rows.groupby("press").size().max()
    text = (
        f"With {ratio:.0%} evicted, **{mean:.0%}** of the error of the logits comes from a quarter "
        f"of the {n} heads, on average over {_counted(len(shares), 'press')}."
    )
    return Finding("where", text)


def _counted(n: int, noun: str) -> str:
    return f"{n} {noun}" if n == 1 else f"{n} {noun}es"


def _finding_on_mass(table: pd.DataFrame) -> Finding:
    ranks = table[["mass_lost", "alone"]].rank()
    related = ranks["mass_lost"].corr(ranks["alone"])
    text = (
        f"Attention mass lost ranks heads as the error of their output does: Spearman's "
        f"correlation is **{related:.2f}**, over {len(table):,} heads."
    )
    return Finding("mass", text)


def _finding_on_mechanisms(logits: pd.DataFrame) -> Finding:
    other = int((~logits["equal"].astype(bool)).sum())
    text = (
        f"Hooks and patches differ in a bit of attention output or logits in **{other}** of "
        f"{len(logits)} presses and ratios."
    )
    return Finding("equal", text, verdict="breaks" if other else None, evidence=Evidence.BITS)


class Error(Experiment[Options]):
    """Tell, per layer and head, what an eviction does to attention and logits."""

    name = "error"
    title = "Where an eviction hurts"
    question = (
        "In which layers and heads does an eviction change the attention output and the logits, "
        "and how much attention is lost there?"
    )
    method = (
        "A question is read from a pruned and from the full cache of the same context, with eager "
        "attention, and its attention outputs and logits are compared. What a head's eviction does "
        "by itself is told by the full cache behind a mask on that head; the mask on all heads has "
        "to give the logits of the pruned cache. In a deeper model more errors add up, and "
        "contexts in which all hangs together spread them over more heads."
    )
    evidence = Evidence.MODEL
    full = Options()
    quick = Options(
        press=("SnapKVPress", "AdaKVPress", "KnormPress", "StreamingLLMPress"),
        ratio=(0.8,),
        samples=4,
    )

    def on(self, own: OwnModel) -> Planned[Options]:
        presses, words = own.opened(self.quick.press), 192
        options = self.quick_on(own, press=presses, context=words)
        n_runs = options.samples * len(presses)
        # A word is a few tokens, or one; each head's eviction is read by itself.
        tokens, steps = 3 * words * (options.samples + 2 * n_runs), n_runs * (own.heads + 3)
        return Planned(options, tokens, steps, seconds=2)

    def measure(self, options: Options, progress: Progress) -> Tables:
        """All presses at all ratios.

        Returns:
            `error`: per press, ratio, layer and KV head the share of the tokens `kept`; the
            attention `mass_lost` of the question's queries; `output_error`, how far the head's
            attention output is off over its norm; `alone`, the same where only this head evicts,
            and `logit_error`, the largest of a logit then. `error_logits`: per press and ratio the
            largest `logit_error`; `same_token`, the share of questions with the same likeliest
            answer; the `divergence` in nats; `unexplained`, how far the logits are from those of
            the mask; and whether both mechanisms are `equal`, bit for bit.
        """
        names = [press_name(name) for name in options.press] or sorted(hooks_impl.PRESSES)
        model, tokenizer = load_model(
            options.model,
            dtype=options.dtype,
            attn_implementation="eager",
            device=chosen_device(options.device),
        )
        name = short_name(options.model)
        samples = samples_of(tokenizer, options)
        return tables_of(model, samples, names, options.ratio, progress, model_name=name)

    def findings(self, tables: Tables) -> list[Finding]:
        shown = explained(tables)
        told = [_finding_on_place(shown), _finding_on_mass(shown)] if len(shown) else []
        return [*told, _finding_on_mechanisms(tables["error_logits"])]

    def views(self, tables: Tables) -> list[ResultTable]:
        logits, error = tables["error_logits"], tables["error"]
        head = [
            "press",
            "evicted",
            "attention lost",
            "output off by",
            "worst head",
            "largest logit error",
            "same answer",
            "mask explains",
        ]
        means = error.groupby(["press", "ratio"])[["mass_lost", "output_error"]].mean()
        rows = []
        for row in logits.sort_values(["ratio", "logit_error"]).to_dict("records"):
            at = (row["press"], row["ratio"])
            own = error[(error["press"] == at[0]) & (error["ratio"] == at[1])]
            worst = own.loc[own["logit_error"].idxmax()]
            rows.append(
                [press_label(row["press"]), f"{row['ratio']:.0%}"]
                + [f"{means.loc[at, name]:.1%}" for name in ("mass_lost", "output_error")]
                + [f"{worst['layer']}.{worst['head']}", f"{row['logit_error']:.3g}"]
                + [f"{row['same_token']:.0%}", "yes" if row["unexplained"] <= EXPLAINED else "no"]
            )
        note = (
            f"`{logits['model'].iloc[0]}`, {logits['samples'].iloc[0]} contexts, a question each: "
            "means over layers and heads; the head (layer.head) whose eviction alone changes the "
            "logits most; whether the full cache behind a mask gives the same logits:"
        )
        return [ResultTable(note, head, rows, left=1)]

    def remarks(self, tables: Tables) -> list[str]:
        logits = tables["error_logits"]
        worst = logits.groupby("press")["unexplained"].max()
        others = [press_label(str(name)) for name in worst.index[worst > EXPLAINED]]
        if not others:
            return []
        return [
            f"{', '.join(others)} change what they keep (values, positions or channels), so that a "
            "mask does not explain their logits; they are left out of the findings and the figure."
        ]

    def figures(self, tables: Tables) -> dict[str, Figure]:
        shown = explained(tables)
        return {self.name: _figure(shown)} if len(shown) else {}


EXPERIMENT = Error()


def _figure(error: pd.DataFrame) -> Figure:
    """The error of each head's attention output by itself: layer by head, a panel per press."""
    ratio = strongest(error)
    rows = error[error["ratio"] == ratio]
    names = [name for name in DRAWN if name in set(rows["press"])] or list(rows["press"].unique())[
        :9
    ]
    columns = min(3, len(names))
    n_rows = -(-len(names) // columns)
    n_layers, n_heads = rows["layer"].nunique(), rows["head"].nunique()
    height = 0.9 + n_rows * (0.75 + 0.24 * min(n_layers, 12))
    figure, axes = new_figure(
        n_rows, columns, width=1.6 + 2.3 * columns, height=height, sharex=True, sharey=True
    )
    most = rows[rows["press"].isin(names)]["alone"].max()
    with style():
        for panel, name in zip(axes, names, strict=False):
            cells = rows[rows["press"] == name].pivot_table("alone", "layer", "head")
            image = panel.imshow(cells, cmap="Blues", vmin=0, vmax=most, aspect="auto")
            panel.set_title(press_label(name))
            panel.grid(visible=False)
            if n_layers * n_heads <= 64:
                _write(panel, cells, most)
        for panel in axes[len(names) :]:
            panel.set_visible(False)
        axes[0].set_xticks(range(n_heads))
        axes[0].set_yticks(range(n_layers), sorted(rows["layer"].unique()))
        figure.supxlabel("KV head", fontsize=9)
        figure.supylabel("layer", fontsize=9)
        label = "error of the head's attention output"
        figure.colorbar(image, ax=axes, label=label, format=PercentFormatter(xmax=1, decimals=0))
    figure.set_label(
        f"How far the attention output of each KV head is off when it alone evicts {ratio:.0%}, "
        "over its norm: layer (rows) by head, a panel per press"
    )
    return figure


def _write(panel: Any, cells: pd.DataFrame, most: float) -> None:
    look: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 7.5}
    for layer, of_layer in enumerate(cells.to_numpy()):
        for head, value in enumerate(of_layer):
            ink = "white" if value > 0.6 * most else CELL_INK
            panel.text(head, layer, f"{100 * value:.0f}", color=ink, **look)
