"""Streaming: thousands of tokens, one by one, through a cache that is bounded or not.

The caches that are compared:

- *full cache*: nothing is evicted. It grows, and leaves the positions that the model was trained
  on, so it is followed up to `Size.full` tokens only.
- *window*: a StreamingLLMDecodingPress that keeps the last tokens, and no first ones.
- *sinks + window*: one that keeps the first `Size.n_sink` tokens too. They keep their *original*
  positions, or all tokens have those that they hold *in the cache* (`rerotate=True`).
- *window, recomputed*: no stream. All that a query sees is computed afresh, from a window of the
  same length that begins with the text's first token: what the loss of a stream is compared with.
  To compute it for every token would take a forward of the whole window each; here one forward
  serves a quarter of it, whose queries see between three quarters of the window and all of it.

A window alone has no first token to rerotate: for it both kinds of positions are the same.

Streams take turns, a stretch of the text each. Each closes its scope after its turn: what was
evicted is known by the cache alone.

What else runs on the machine interrupts some forwards and makes times drift. So every few tokens
one is read *alone* as well, without a cache, and the time per token is given in such forwards, both
by their quickest tenth, which nothing has interrupted.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import numpy as np
import pandas as pd
import typer
from matplotlib.figure import Figure
from rich.progress import Progress
from transformers import PreTrainedModel

from experiments import UserError
from experiments.framework import shared
from experiments.framework.experiment import Claim, Evidence, Experiment, Finding, Tables
from experiments.framework.intervals import METHOD, bracket, bracketed
from experiments.framework.options import Device, Dtype
from experiments.framework.own_model import OwnModel, Planned
from experiments.framework.plots import GREEN, INK, MUTED, ORANGE, PURPLE, new_figure, style
from experiments.framework.tables import ResultTable
from experiments.framework.timing import threads
from experiments.loading import load_model, short_name
from experiments.testbed import streams
from experiments.testbed.streams import FULL, IN_CACHE, RECOMPUTED, SINKS, STREAMED, WINDOW, Size

BROKEN = 0.1
"""Nats per token above a recomputed window from which a stream counts as broken: its perplexity is
a tenth higher."""


COLOURS = {FULL: INK, WINDOW: ORANGE, SINKS: PURPLE, IN_CACHE: GREEN}
"""How streams are drawn."""


@dataclass(frozen=True)
class Options:
    """What is streamed, and through what."""

    model: shared.Model = "stdlib-neox-sink"
    tokens: Annotated[int, typer.Option(min=2, help="Length of the streams.")] = 12_000
    capacity: Annotated[
        int | None,
        typer.Option(min=2, help="Tokens in a bounded cache.", show_default="trained, or 1,023"),
    ] = None
    n_sink: Annotated[int, typer.Option(min=1, help="First tokens to keep.")] = 4
    full: Annotated[
        int | None,
        typer.Option(min=1, help="Length with a full cache.", show_default="4 times trained"),
    ] = None
    text: Annotated[
        Path | None,
        typer.Option(help="Text to stream; by default Python's standard library, held out."),
    ] = None
    dtype: Dtype = "float32"
    device: Device = "cpu"


def size_for(model: PreTrainedModel, options: Options) -> Size:
    """Sizes that fit a model, where they are not given.

    A query then sees as many tokens as the model was trained with, or 1,024 if those are fewer, and
    a full cache is followed up to four times the trained length. Of 80 stretches each is measured.

    Raises:
        UserError: if too few tokens are streamed to see anything evicted.
        PressError: if no press can be opened on `model`.
    """
    trained = int(getattr(model.config, "max_position_embeddings", 1024))
    size = Size(
        options.tokens,
        min(trained, 1024) - 1 if options.capacity is None else options.capacity,
        4 * trained if options.full is None else options.full,
        options.n_sink,
        max(64, options.tokens // 80),
    )
    if size.tokens < size.shortest:
        raise UserError(
            f"{size.tokens:,} tokens are too few to see what a cache of {size.capacity:,} evicts: "
            f"give --tokens {size.shortest} or more, or a smaller --capacity"
        )
    for press in filter(None, map(size.press, STREAMED)):
        press.register(model).remove()
    return size


# ---- reading the table ---------------------------------------------------------------------------


def rows_of(streaming: pd.DataFrame, cache: streams.Bound) -> pd.DataFrame:
    """The stretches of one stream; `above` is what they lose against a recomputed window."""
    rows, recomputed = (
        streaming[(streaming["cache"] == of.cache) & (streaming["positions"] == of.positions)]
        for of in (cache, RECOMPUTED)
    )
    window = recomputed.set_index("first")["loss"]
    return rows.assign(above=rows["loss"] - rows["first"].map(window))


def evicting(streaming: pd.DataFrame) -> pd.DataFrame:
    """Stretches all of which are later than the first eviction of a bounded cache."""
    return streaming[streaming["first"] > streaming["capacity"]]


def lost(streaming: pd.DataFrame, cache: streams.Bound) -> dict[str, float]:
    """`above`, the nats per token above a recomputed window once tokens are evicted: a mean over
    stretches, and its interval."""
    return shared.mean_of("above", evicting(rows_of(streaming, cache))["above"].dropna())


def slowdown(rows: pd.DataFrame) -> float:
    """Median time per token of the last quarter of a stream over that of the second, in forwards.

    In the second quarter of a long stream a bounded cache is full already.
    """
    quarter = 4 * rows["first"] // rows["end"].max()
    pace = (rows["quick_ms"] / rows["quick_ms_alone"]).groupby(quarter).median()
    return float(pace.get(3, np.nan) / pace.get(1, np.nan))


# ---- findings ------------------------------------------------------------------------------------

UNTRAINED = 0.95
"""Share of the loss of a uniform guess from which a model counts as predicting nothing."""

Verdict = Literal["works", "breaks"] | None
_VERBS = {"works": "holds", "breaks": "breaks", None: "is undecided"}

_SINKS = {
    IN_CACHE: (
        "sinks",
        "stream past the trained length",
        "A window with its first {n_sink} tokens, at in-cache positions, {verb} over {tokens:,} "
        "tokens: {nats} nats per token above a recomputed one.",
    ),
    WINDOW: (
        "window",
        "stream without the first tokens",
        "A window alone {verb}: {nats} nats per token above a recomputed one, where more than "
        f"{BROKEN} is broken.",
    ),
    SINKS: (
        "positions",
        "stream with original positions",
        "With the same tokens at their original positions the window {verb}: {nats} nats per "
        "token.",
    ),
}
"""Of each stream the finding's name, the need that it answers, and what it says."""


def find_sinks(streaming: pd.DataFrame) -> list[Finding]:
    """What a window loses with the first tokens, and whether keeping them mends it."""
    loss, guess = rows_of(streaming, RECOMPUTED)["loss"].mean(), streaming["guessing"].iloc[0]
    if loss > UNTRAINED * guess:  # no cache can make it worse
        untrained = (
            f"The model predicts the text no better than a uniform guess (**{loss:.2f}** nats per "
            f"token against {guess:.2f}), so a stream has nothing to lose."
        )
        return [Finding("sinks", untrained)]
    told = {"n_sink": streaming["n_sink"].iloc[0], "tokens": streaming["end"].max()}
    found = []
    for cache, (name, need, says) in _SINKS.items():
        above, low, high = lost(streaming, cache).values()
        verdict: Verdict = "breaks" if low > BROKEN else "works" if high < BROKEN else None
        nats = f"**{above:+.3f}**{bracket(low, high, '+.3f')}"
        text = says.format(verb=_VERBS[verdict], nats=nats, **told)
        found.append(Finding(name, text, need, verdict))
    return found


def find_pace(streaming: pd.DataFrame) -> list[Finding]:
    """Whether time and memory stay where they are."""
    streams = [rows_of(streaming, cache) for cache in STREAMED]
    full, *bounded = map(slowdown, streams)
    held = [evicting(rows)["bytes"] for rows in streams[1:]]
    grown = max(n_bytes.max() / n_bytes.min() for n_bytes in held)
    pace = (
        f"Tokens of the last quarter take {min(bounded):.2f} to **{max(bounded):.2f}** times as "
        f"long as those of the second in bounded caches, {full:.2f} in a full one."
    )
    growth = f"While they evict, the bytes of bounded caches become **{grown:.2f}** times as many."
    stays: Verdict = "works" if grown < 1.05 else "breaks"
    return [
        Finding("pace", pace, evidence=Evidence.TIME),
        Finding("growth", growth, "bound the memory of a stream", stays, Evidence.BYTES),
    ]


class Streaming(Experiment[Options]):
    """Stream thousands of tokens through caches: loss, memory and time, bounded and not.

    What do a bounded cache, its first tokens and their positions do to loss, memory and time
    per token over thousands of tokens?

    A text is read token by token through caches that are full, keep the last tokens, or keep
    the first ones too, with original positions or those in the cache. Losses are compared,
    stretch by stretch, with a window that is recomputed for the queries and begins as the text
    begins. A cache breaks if it loses more than 0.1 nats per token (a perplexity about a tenth
    higher) over the whole interval. What a window loses depends on what the heads pay the first
    token: stdlib-neox-sink was taught to pay it, as its card tells, and a model without a sink
    loses next to nothing.
    """

    name = "streaming"
    title = "Streaming past the trained length"
    evidence = Evidence.MODEL
    full = Options()
    quick = Options(tokens=1024)
    claims: ClassVar = {
        "growth": Claim(Options(tokens=720), within=0.01),
    }

    def on(self, own: OwnModel) -> Planned[Options]:
        own.opened(("StreamingLLMDecodingPress",))
        own.opened(("KeyRerotationPress",))  # positions in the cache turn keys, too
        capacity = min(256, own.trained // 2) - 1
        tokens = Size(0, capacity).shortest
        full = min(own.trained, tokens)
        options = self.quick_on(own, tokens=tokens, capacity=capacity, full=full)
        steps = tokens * len(STREAMED) * (1 + 1 / streams.ALONE_EVERY)
        return Planned(options, 4 * tokens, steps, seconds=5)

    def measure(self, options: Options, progress: Progress) -> Tables:
        """Stream the text through all caches.

        Returns:
            `streaming`: per `cache`, `positions` and stretch of the text `first` and `end`, the
            positions that it covers; `loss`, mean nats per known target; `quick_ms`, the tenth
            percentile of milliseconds per token, `quick_ms_alone`, that of tokens that are read
            without a cache in between, and `bytes` that the cache holds afterwards (not of a
            recomputed window); `guessing`, nats of a uniform guess; `capacity`, `n_sink`, `model`.
        """
        model, tokenizer = load_model(options.model, dtype=options.dtype, device=options.device)
        size = size_for(model, options)
        text = streams.read_text(tokenizer, size.tokens, options.text)
        with threads(1):  # more only get in the way of small models
            streaming = streams.stream_text(model, text, size, progress)
        return {"streaming": streaming.assign(model=short_name(options.model))}

    def findings(self, tables: Tables) -> list[Finding]:
        return [*find_sinks(tables["streaming"]), *find_pace(tables["streaming"])]

    def views(self, tables: Tables) -> list[ResultTable]:
        streaming, first = tables["streaming"], tables["streaming"].iloc[0]
        recomputed = evicting(rows_of(streaming, RECOMPUTED))["loss"].mean()
        note = (
            f"{first['model']}, {streaming['end'].max():,} tokens one by one. Nats per token above "
            f"the {recomputed:.3f} of a recomputed window, with {METHOD} over stretches, and KiB "
            f"held, of caches that hold {first['capacity']} tokens; time per token in the last "
            "quarter of the stream over that in its second:"
        )
        rows = []
        for cache in STREAMED:
            own, above = rows_of(streaming, cache), lost(streaming, cache)
            nats = "" if np.isnan(above["above"]) else bracketed(above, "above", "+.3f")
            pace = f"{slowdown(own):.2f}".replace("nan", "")
            rows.append([str(cache), nats, f"{own['bytes'].iloc[-1] / 2**10:,.0f}", pace])
        return [ResultTable(note, ["cache", "above recomputed", "KiB", "last / second"], rows)]

    def figures(self, tables: Tables) -> dict[str, Figure]:
        """Loss along the text, above that of a recomputed window."""
        streaming = tables["streaming"]
        with style():
            figure, (panel,) = new_figure(width=5.4, height=3.7)
            for cache, colour in COLOURS.items():
                rows = rows_of(streaming, cache)
                panel.plot(rows["first"], rows["above"], color=colour, lw=1.2, label=str(cache))
            panel.axvline(streaming["capacity"].iloc[0] + 1, color=MUTED, lw=1, ls=":")
            panel.set(xlim=(0, streaming["end"].max()), xlabel="tokens read")
            panel.set_ylabel("nats per token above a recomputed window")
            panel.xaxis.set_major_formatter("{x:,.0f}")
            figure.legend(loc="outside lower left", ncols=2)
        figure.set_label(
            f"Loss of {streaming['model'].iloc[0]} along a text of {streaming['end'].max():,} "
            "tokens, above that of a window recomputed for each query. Dotted: bounded caches "
            "begin to evict"
        )
        return {self.name: figure}


EXPERIMENT = Streaming()
