"""Streaming: decode thousands of tokens through bounded caches and a full one.

The compared caches:

- *full cache*: nothing is evicted. The cache grows beyond the positions that the model was trained
  on, so only `Size.full` tokens are streamed through it.
- *window*: a StreamingLLMDecodingPress that keeps the last tokens, and no attention sinks.
- *sinks + window*: a StreamingLLMDecodingPress that also keeps the first `Size.n_sink` tokens.
  Tokens have their *original* positions, or their positions *in the cache* (`rerotate=True`).
- *window, recomputed*: the reference for the losses, without a stream. Everything that a query sees
  is recomputed from a window of the same length that begins with the text's first token. A forward
  over the whole window for every token would be too slow, so one forward serves a quarter of the
  window, and its queries see between three quarters of the window and all of it.

A window without sinks has the same losses with both kinds of positions.

Streams take turns, one stretch of the text at a time. Each closes its scope after its turn, so only
the cache stores what was evicted.

Other processes interrupt some forwards, and clock speeds drift. So one of every `ALONE_EVERY`
tokens is also run *alone*, without a cache, and times per token are divided by the times alone.
Both are 10th percentiles, which exclude interrupted forwards.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import numpy as np
import pandas as pd
import typer
from matplotlib.figure import Figure
from rich.progress import Progress
from transformers import PreTrainedModel

from experiments import UserError
from experiments.framework import shared
from experiments.framework.experiment import Claim, Evidence, Experiment, Finding, Tables
from experiments.framework.intervals import METHOD, bracket, mean_interval, written
from experiments.framework.options import Device, Dtype
from experiments.framework.own_model import OwnModel, Planned
from experiments.framework.plots import GREEN, INK, MUTED, ORANGE, PURPLE, new_figure, style
from experiments.framework.tables import ResultTable
from experiments.framework.timing import threads
from experiments.framework.wording import sentences
from experiments.loading import load_model, short_name
from experiments.testbed import streams
from experiments.testbed.getting_to_know import trained_length
from experiments.testbed.streams import FULL, IN_CACHE, RECOMPUTED, SINKS, STREAMED, WINDOW, Size

BROKEN = 0.1
"""Nats per token above a recomputed window from which a stream counts as broken; its perplexity is
then a tenth higher."""

PARTS = 12
"""Units of an interval: neighbouring stretches are not independent, as they see the same tokens."""

COLOURS = {FULL: INK, WINDOW: ORANGE, SINKS: PURPLE, IN_CACHE: GREEN}
"""Colours of the streams in the figure."""


@dataclass(frozen=True)
class Options:
    """Which model and text to stream, and the sizes of the caches."""

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
    """The sizes of the streams; those not in `options` are chosen by the model.

    By default a query sees as many tokens as the model was trained with, at most 1,024, and a full
    cache is streamed up to four times the trained length. The text is divided into about 80
    stretches of at least 64 tokens.

    Raises:
        UserError: if too few tokens are streamed for bounded caches to evict during a few
            stretches, or a cache is too small for its attention sinks.
        PressError: if no press can be opened on `model`.
    """
    trained = trained_length(model)
    size = Size(
        options.tokens,
        min(trained, 1024) - 1 if options.capacity is None else options.capacity,
        4 * trained if options.full is None else options.full,
        options.n_sink,
        max(64, options.tokens // 80),
    )
    if size.tokens < size.shortest:
        raise UserError(
            f"{size.tokens:,} tokens are too few to see what a cache of {size.capacity:,} evicts; "
            f"give --tokens {size.shortest} or more, or a smaller --capacity"
        )
    if size.capacity <= size.n_sink:
        raise UserError(f"--capacity is {size.capacity}; give more than --n-sink, {size.n_sink}")
    for press in filter(None, map(size.press, STREAMED)):
        press.register(model).remove()
    return size


# ---- reading the table ---------------------------------------------------------------------------


def rows_of(streaming: pd.DataFrame, cache: streams.Bound) -> pd.DataFrame:
    """The stretches of one stream; `above` is their loss minus that of the recomputed window."""
    rows, recomputed = (
        streaming[(streaming["cache"] == of.cache) & (streaming["positions"] == of.positions)]
        for of in (cache, RECOMPUTED)
    )
    window = recomputed.set_index("first")["loss"]
    return rows.assign(above=rows["loss"] - rows["first"].map(window))


def evicting(streaming: pd.DataFrame) -> pd.DataFrame:
    """The stretches that begin after the first eviction of a bounded cache."""
    return streaming[streaming["first"] > streaming["capacity"]]


def lost(streaming: pd.DataFrame, cache: streams.Bound) -> tuple[float, float, float]:
    """The nats per token above a recomputed window, as a mean over the stretches after the first
    eviction, and both ends of its interval over `PARTS` of them."""
    above = evicting(rows_of(streaming, cache))["above"].dropna()
    return above.mean(), *mean_interval(above, np.arange(len(above)) * PARTS // len(above))


def slowdown(rows: pd.DataFrame) -> float:
    """Median time per token of a stream's last quarter over that of its second quarter.

    Times are relative to forwards without a cache. In the second quarter of a long stream a bounded
    cache is already full.
    """
    quarter = 4 * rows["first"] // rows["end"].max()
    pace = (rows["quick_ms"] / rows["quick_ms_alone"]).groupby(quarter).median()
    return float(pace.get(3, np.nan) / pace.get(1, np.nan))


# ---- findings ------------------------------------------------------------------------------------

UNTRAINED = 0.95
"""Share of a uniform guess's loss from which a model counts as untrained on the text."""

_VERBS = {"works": "holds", "breaks": "breaks", None: "is undecided"}

_finding = sentences(__file__)
_SINKS = {IN_CACHE: "sinks", WINDOW: "window", SINKS: "positions"}
"""Name of the finding about each cache."""


def find_sinks(streaming: pd.DataFrame) -> list[Finding]:
    """How much loss a window adds without the first tokens, and whether keeping them avoids it."""
    loss, guess = rows_of(streaming, RECOMPUTED)["loss"].mean(), streaming["guessing"].iloc[0]
    if loss > UNTRAINED * guess:  # no cache can make it worse
        return [_finding("sinks", as_in="untrained", loss=loss, guess=guess)]
    known = {"n_sink": streaming["n_sink"].iloc[0], "tokens": streaming["end"].max()}
    found = []
    for cache, name in _SINKS.items():
        above, low, high = lost(streaming, cache)
        verdict = "breaks" if low > BROKEN else "works" if high < BROKEN else None
        nats = f"**{written(above, '+.3f')}**{bracket(low, high, '+.3f')}"
        found.append(_finding(name, verdict, verb=_VERBS[verdict], nats=nats, **known))
    return found


def find_pace(streaming: pd.DataFrame) -> Finding:
    """Whether time per token stays constant along a stream."""
    full, *bounded = (slowdown(rows_of(streaming, cache)) for cache in STREAMED)
    *least, most = dict.fromkeys(map("{:.2f}".format, sorted(bounded)))  # one, if they print alike
    end = rows_of(streaming, FULL)["end"].max()  # it may be too early
    than_full = "" if np.isnan(full) else f", {full:.2f} in a full one of {end:,} tokens"
    ends = {"least": f"{least[0]} to " if least else "", "most": most, "than_full": than_full}
    return _finding("pace", None, Evidence.TIME, **ends)


def find_growth(streaming: pd.DataFrame) -> Finding:
    """Whether the memory of bounded caches stays constant along a stream."""
    held = [evicting(rows_of(streaming, cache))["bytes"] for cache in STREAMED[1:]]
    grown = max(n_bytes.max() / n_bytes.min() for n_bytes in held)
    return _finding("growth", "works" if grown < 1.05 else "breaks", Evidence.BYTES, grown=grown)


class Streaming(Experiment[Options]):
    """Stream thousands of tokens through bounded and full caches; measure loss, memory and time.

    How do a bounded cache, the first tokens kept in it and their positions change loss, memory
    and time per token over thousands of tokens?

    A text is decoded token by token through four caches: a full one, one that keeps the last
    tokens, and two that also keep the first tokens (attention sinks), at original and at in-cache
    positions. The full one grows, and is streamed only to four times the trained length, so its
    pace rests on a few stretches. Losses are compared, stretch by stretch, with a window that is
    recomputed for its queries and begins with the first token of the text; they see three quarters
    of it or more, and bounded caches all of it, so what is lost may be a little more. A cache
    breaks if the 95% interval of its additional loss is above 0.1 nats per token, which is a
    perplexity about a tenth higher. How much a window without sinks loses depends on the attention
    that heads pay to the first token: stdlib-neox-sink was trained to pay it (see its model card),
    and a model without an attention sink loses next to nothing.
    """

    name = "streaming"
    title = "Streaming past the trained length"
    evidence = Evidence.MODEL
    full = Options()
    quick = Options(tokens=1024)
    claims: ClassVar = {"growth": Claim(Options(tokens=720), within=0.01)}

    def on(self, own: OwnModel) -> Planned[Options]:
        own.opened(("StreamingLLMDecodingPress",))
        own.opened(("KeyRerotationPress",))  # in-cache positions also need keys to be rerotated
        capacity = min(256, own.trained // 2) - 1
        tokens = Size(0, capacity).shortest
        full = min(own.trained, tokens)
        options = self.quick_on(own, tokens=tokens, capacity=capacity, full=full)
        steps = tokens * len(STREAMED) * (1 + 1 / streams.ALONE_EVERY)
        return Planned(options, 4 * tokens, steps, seconds=5)

    def measure(self, options: Options, progress: Progress) -> Tables:
        """Stream the text through all caches.

        Returns:
            `streaming`: per `cache`, `positions` and stretch of the text: `first` and `end`, the
            positions of the stretch; `loss`, the mean nats per known target; `quick_ms`, the 10th
            percentile of milliseconds per token; `quick_ms_alone`, the same for tokens run without
            a cache in between; `bytes`, the size of the cache after the stretch; `guessing`, the
            nats of a uniform guess; `capacity`, `n_sink` and `model`. A recomputed window has no
            times and bytes.
        """
        model, tokenizer = load_model(options.model, dtype=options.dtype, device=options.device)
        size = size_for(model, options)
        text = streams.read_text(tokenizer, size.tokens, options.text)
        with threads(1):  # more threads are slower on small models
            streaming = streams.stream_text(model, text, size, progress)
        return {"streaming": streaming.assign(model=short_name(options.model))}

    def findings(self, tables: Tables) -> list[Finding]:
        streaming = tables["streaming"]
        return [*find_sinks(streaming), find_pace(streaming), find_growth(streaming)]

    def views(self, tables: Tables) -> list[ResultTable]:
        streaming, first = tables["streaming"], tables["streaming"].iloc[0]
        recomputed = evicting(rows_of(streaming, RECOMPUTED))["loss"].mean()
        note = (
            f"{first['model']}, {streaming['end'].max():,} tokens one by one "
            f"({rows_of(streaming, FULL)['end'].max():,} with the full cache); bounded ones hold "
            f"{first['capacity']}. Nats per token above a recomputed window's {recomputed:.3f} "
            f"(more than {BROKEN}: the cache breaks), with {METHOD} over twelfths of the text; KiB "
            "held at the end; time per token in the last quarter over that in the second:"
        )
        rows = []
        for cache in STREAMED:
            own, (above, low, high) = rows_of(streaming, cache), lost(streaming, cache)
            nats = written(above, "+.3f").replace("+nan", "") + bracket(low, high, "+.3f")
            pace = f"{slowdown(own):.2f}".replace("nan", "")
            rows.append([str(cache), nats, f"{own['bytes'].iloc[-1] / 2**10:,.0f}", pace])
        return [ResultTable(note, ["cache", "above recomputed", "KiB", "last / second"], rows)]

    def figures(self, tables: Tables) -> dict[str, Figure]:
        """Loss along the text minus that of a recomputed window."""
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
            "tokens, above that of a recomputed window. The dotted line marks where bounded caches "
            "begin to evict"
        )
        return {self.name: figure}


EXPERIMENT = Streaming()
