"""Streaming: thousands of tokens, one by one, through a cache that is bounded or not.

The caches that are compared:

- *full cache*: nothing is evicted. It grows, and leaves the positions that the model was trained
  on, so it is followed up to `Size.full` tokens only.
- *window*: a StreamingLLMDecodingPress that keeps the last tokens, and no first ones.
- *sinks + window*: one that keeps the first `Size.n_sink` tokens too. They keep their *original*
  positions, or all tokens have those that they hold *in the cache* (`rerotate=True`).
- *window, recomputed*: no stream. All that a query sees is computed afresh, from a window of the
  same length that begins as the model's texts begin: what the loss of a stream is compared with. To
  compute it for every token would take a forward of the whole window each; here one forward serves
  a quarter of it, whose queries see between three quarters of the window and all of it.

A window alone has no first token to rerotate: for it both kinds of positions are the same.

Streams take turns, a stretch of the text each. Each closes its scope after its turn: what was
evicted is known by the cache alone.

What else runs on the machine interrupts some forwards and makes times drift. So every few tokens
one is read *alone* as well, without a cache, and the time per token is given in such forwards, both
by their quickest tenth, which nothing has interrupted.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import numpy as np
import pandas as pd
import torch
import typer
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, StrMethodFormatter
from rich.progress import Progress
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import DynamicCache, PreTrainedModel

from experiments import UserError
from experiments.framework.evidence import Evidence
from experiments.framework.experiment import Claim, Experiment, Finding, Related, Tables
from experiments.framework.intervals import LEAST, METHOD, bracket, mean_interval
from experiments.framework.options import Device, Dtype, Mechanism
from experiments.framework.own_model import OwnModel, Planned
from experiments.framework.plots import (
    INK,
    MUTED,
    label_lines,
    new_figure,
    press_colour,
    style,
)
from experiments.framework.tables import ResultTable
from experiments.framework.timing import threads
from experiments.framework.works import STREAMING_LLM
from experiments.loading import load_model, short_name
from experiments.testbed.recipes import MECHANISMS
from experiments.testbed.sinks import attention_to_first, heads_figure, heads_table
from experiments.testbed.stdlib_text import token_stream
from press_core import cache_nbytes, kept_lengths
from press_core.scope import InstalledPress

FULL, WINDOW, SINKS, RECOMPUTED = "full cache", "window", "sinks + window", "window, recomputed"
ORIGINAL, IN_CACHE = "original", "in-cache"

UNTRAINED = 0.95
"""Share of the loss of a uniform guess from which a model counts as predicting nothing."""

BROKEN = 0.1
"""Nats per token above a recomputed window from which a stream counts as broken: its perplexity is
a tenth higher."""

ALONE_EVERY = 8
"""Tokens of a stream between two forwards of one alone."""

IGNORED = -100
"""Target that costs nothing: an unknown word."""


class Bound(NamedTuple):
    """How a stream bounds its cache, if at all, and which positions its tokens have."""

    cache: str
    positions: str = ORIGINAL

    def __str__(self) -> str:
        return f"{self.cache}, {self.positions} positions" if self.cache == SINKS else self.cache


HELD, AS_THEY_WERE = Bound(SINKS, IN_CACHE), Bound(SINKS)
"""Both sinks + window, by the positions of their tokens."""

STREAMED = (Bound(FULL), Bound(WINDOW), AS_THEY_WERE, HELD)
COMPARED = Bound(RECOMPUTED, IN_CACHE)


@dataclass(frozen=True)
class Options:
    """What is streamed, and through what."""

    model: Annotated[
        str, typer.Option(help="Shipped model, folder or hub id, such as EleutherAI/pythia-160m.")
    ] = "stdlib-neox-sink"
    tokens: Annotated[int, typer.Option(min=2, help="Length of the streams.")] = 12_000
    capacity: Annotated[
        int | None,
        typer.Option(
            min=2,
            help="Tokens that a bounded cache holds; by default one less than the model was "
            "trained with, and 1,023 at most.",
        ),
    ] = None
    n_sink: Annotated[int, typer.Option(min=1, help="First tokens to keep.")] = 4
    full: Annotated[
        int | None,
        typer.Option(
            min=1, help="Length of the stream with a full cache; by default 4 trained lengths."
        ),
    ] = None
    mechanism: Annotated[Mechanism, typer.Option(help="What installs the presses.")] = (
        Mechanism.HOOK
    )
    text: Annotated[
        Path | None,
        typer.Option(help="Text to stream; by default Python's standard library, held out."),
    ] = None
    threads: Annotated[
        int, typer.Option(min=1, help="Threads of torch; small models want one.")
    ] = 1
    dtype: Dtype = "float32"
    device: Device = "cpu"


@dataclass(frozen=True)
class Size:
    """How much is streamed.

    Attributes:
        tokens: length of the streams.
        capacity: tokens that a bounded cache holds when a forward begins; one more sees a query.
        full: length of the stream with a full cache.
        n_sink: first tokens that are kept with sinks.
        stretch: tokens that are measured together.
    """

    tokens: int = Options.tokens
    capacity: int = 255
    full: int = 1024
    n_sink: int = Options.n_sink
    stretch: int = 64

    @property
    def shortest(self) -> int:
        """Tokens of which bounded caches evict some for `LEAST` stretches and more."""
        return self.capacity + (LEAST + 1) * self.stretch

    def press(self, bound: Bound, mechanism: str = "hook") -> InstalledPress | None:
        """What bounds the cache; None for a full one."""
        if bound.cache == FULL:
            return None
        press: InstalledPress = MECHANISMS[mechanism]["StreamingLLMDecodingPress"](
            max_capacity=self.capacity,
            n_sink=self.n_sink if bound.cache == SINKS else 0,
            rerotate=bound.positions == IN_CACHE,
        )
        return press

    def length(self, bound: Bound) -> int:
        """Tokens that are streamed."""
        return min(self.full, self.tokens) if bound.cache == FULL else self.tokens


# ---- the text ------------------------------------------------------------------------------------


class Text(NamedTuple):
    """What is streamed.

    Attributes:
        ids: `(tokens + 1,)` int64; the first is `begin`, if there is one.
        unknown: id of words that the tokenizer does not know, which are read but are no target.
        begin: id of the token that the model's texts begin with; None: they have none.
    """

    ids: Tensor
    unknown: int | None
    begin: int | None = None

    @property
    def targets(self) -> Tensor:
        """`(tokens,)` int64: what comes after each token, `IGNORED` where that is not known."""
        following = self.ids[1:]
        known = following != (IGNORED if self.unknown is None else self.unknown)
        return following.where(known, IGNORED)


def read_text(tokenizer: Any, n_tokens: int, path: Path | None = None) -> Text:
    """The first `n_tokens` of a text and one more: held-out standard library, or a file.

    Raises:
        UserError: if the text is too short.
    """
    if path is None:
        stream = token_stream(tokenizer, "held-out")
    else:
        encoded = tokenizer(path.read_text(encoding="utf-8"), add_special_tokens=False)
        stream = torch.tensor(encoded["input_ids"], dtype=torch.int64)
    begin: int | None = tokenizer.bos_token_id
    if begin is not None:
        stream = torch.cat((torch.tensor([begin]), stream))
    if len(stream) <= n_tokens:
        source = "the held-out standard library" if path is None else str(path)
        raise UserError(
            f"cannot stream {n_tokens:,} tokens: {source} has {len(stream) - 1:,} for this "
            "tokenizer; ask for fewer, or give a longer text"
        )
    return Text(stream[: n_tokens + 1], tokenizer.unk_token_id, begin)


# ---- streams -------------------------------------------------------------------------------------


class Stretch(NamedTuple):
    """What was measured of some tokens of a stream.

    Attributes:
        losses: `(tokens,)` nats, NaN where the target is not known.
        seconds: `(tokens,)`, of each forward.
        alone: `(n,)`, of forwards of some of the tokens without a cache, in between.
    """

    losses: Tensor
    seconds: Tensor
    alone: Tensor


class Stream:
    """A text on its way through one cache, token by token.

    Attributes:
        position: tokens read so far.
        cache: what is held of them.
    """

    def __init__(self, model: PreTrainedModel, text: Text, press: InstalledPress | None) -> None:
        self.model, self.press = model, press
        self.ids, self.targets = text.ids.to(model.device), text.targets.to(model.device)
        self.position, self.cache = 0, DynamicCache()

    @torch.inference_mode()
    def advance(self, n_tokens: int) -> Stretch:
        """Read the next `n_tokens`, with the press open meanwhile."""
        logits, seconds, alone = [], [], []
        start = self.position
        with self._scope():
            for index, token in enumerate(self.ids[start : start + n_tokens].view(-1, 1, 1)):
                output, took = _timed(self.model, token, past_key_values=self.cache)
                logits.append(output.logits[0])
                seconds.append(took)
                if index % ALONE_EVERY == 0:
                    alone.append(_timed(self.model, token, use_cache=False)[1])
        self.position += n_tokens
        losses = _losses(torch.cat(logits), self.targets[start : self.position])
        return Stretch(losses, torch.tensor(seconds), torch.tensor(alone))

    def _scope(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.press is None else self.press(self.model)


def _losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Nats of each of `targets` `(q,)` under `logits` `(q, vocabulary)`, NaN where ignored."""
    losses = cross_entropy(logits.float(), targets, ignore_index=IGNORED, reduction="none")
    return losses.masked_fill(targets == IGNORED, torch.nan).cpu()


def _timed(model: PreTrainedModel, token: Tensor, **kwargs: Any) -> tuple[Any, float]:
    """Output of a forward, and its seconds."""
    began = perf_counter()
    output = model(input_ids=token, **kwargs)
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)
    return output, perf_counter() - began


@torch.inference_mode()
def recomputed_losses(model: PreTrainedModel, text: Text, window: int) -> Tensor:
    """Losses `(tokens,)` where a query sees at most `window` tokens, computed afresh, itself too.

    Each window begins as the text does, if the model's texts begin with a token of their own. NaN
    where the target is not known.
    """
    n_tokens, step = len(text.ids) - 1, max(1, window // 4)
    ids, targets = text.ids.to(model.device), text.targets.to(model.device)
    begin = ids[: 0 if text.begin is None else 1]
    parts, done = [], 0
    while done < n_tokens:
        end = min(n_tokens, done + step if done else window)
        first = end - window
        seen = ids[:end] if first <= 0 else torch.cat((begin, ids[first + len(begin) : end]))
        logits = model(input_ids=seen[None], use_cache=False).logits[0, done - end :]
        parts.append(_losses(logits, targets[done:end]))
        done = end
    return torch.cat(parts)


def windows_of(text: Text, window: int, most: int = 8) -> Tensor:
    """Up to `most` windows `(rows, window)` of a text, each begun as the text begins."""
    begin, body = text.ids[:1], text.ids[1:-1]
    rows = body.unfold(0, window - 1, window - 1)[:most]
    return torch.cat((begin.expand(len(rows), 1), rows), dim=1)


# ---- tables --------------------------------------------------------------------------------------


def stream_text(
    model: PreTrainedModel,
    text: Text,
    size: Size,
    progress: Progress,
    *,
    model_name: str,
    mechanism: str = "hook",
) -> Tables:
    """Stream `text` through all caches; the tables of `Streaming.measure`.

    Args:
        text: of `size.tokens` tokens and one more.
        mechanism: "hook" or "patch".
    """
    streams = {of: Stream(model, text, size.press(of, mechanism)) for of in STREAMED}
    task = progress.add_task("tokens", total=sum(map(size.length, STREAMED)))
    rows = _in_turn(streams, size, partial(progress.advance, task))
    losses = recomputed_losses(model, text, size.capacity + 1)
    rows += [
        _row(COMPARED, first, losses[first : first + size.stretch])
        for first in range(0, size.tokens, size.stretch)
    ]
    setting: dict[str, Any] = {"model": model_name, "mechanism": mechanism}
    setting |= {"capacity": size.capacity, "n_sink": size.n_sink}
    setting["guessing"] = math.log(model.config.get_text_config().vocab_size)
    attention = attention_to_first(model, windows_of(text, size.capacity + 1))
    return {
        "streaming": pd.DataFrame([setting | row for row in rows]),
        "streaming_attention": attention.assign(model=model_name),
    }


def _in_turn(
    streams: dict[Bound, Stream], size: Size, advance: Callable[[int], None]
) -> list[dict[str, Any]]:
    rows = []
    for first in range(0, size.tokens, size.stretch):
        for bound, stream in streams.items():
            n_tokens = min(size.stretch, size.length(bound) - first)
            if n_tokens <= 0:
                continue
            stretch = stream.advance(n_tokens)
            measured = {"ms": 1e3 * float(stretch.seconds.median())}
            measured["quick_ms"] = 1e3 * float(stretch.seconds.quantile(0.1))
            measured["quick_ms_alone"] = 1e3 * float(stretch.alone.quantile(0.1))
            measured["length"] = max(int(kept.max()) for kept in kept_lengths(stream.cache))
            measured["bytes"] = cache_nbytes(stream.cache)
            rows.append(_row(bound, first, stretch.losses) | measured)
            advance(n_tokens)
    return rows


def _row(bound: Bound, first: int, losses: Tensor) -> dict[str, Any]:
    place = {"first": first, "end": first + len(losses)}
    known = int((~losses.isnan()).sum())
    return bound._asdict() | place | {"loss": float(losses.nanmean()), "known": known}


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
    for press in map(size.press, STREAMED):
        with nullcontext() if press is None else press(model):
            pass
    return size


# ---- reading the tables --------------------------------------------------------------------------


class Above(NamedTuple):
    """Nats per token above a recomputed window: a mean over stretches, and its interval."""

    mean: float
    low: float
    high: float

    @property
    def verdict(self) -> Literal["works", "breaks"] | None:
        """Whether the whole interval is on one side of `BROKEN`; None if it is on both."""
        if self.low > BROKEN:
            return "breaks"
        return "works" if self.high < BROKEN else None

    @property
    def told(self) -> str:
        """The verdict as a verb; empty if nothing is known."""
        if np.isnan(self.mean):
            return ""
        verbs = {"works": "holds", "breaks": "breaks", None: "is undecided"}
        return verbs[self.verdict]

    @property
    def bold(self) -> str:
        """The mean in bold, and its interval."""
        return f"**{self.mean:+.3f}**{bracket(self.low, self.high, '+.3f')}"

    def __str__(self) -> str:
        return "" if np.isnan(self.mean) else self.bold.replace("*", "")


def _above(streaming: pd.DataFrame, bound: Bound) -> Above:
    """By how many nats its loss is above that of a recomputed window, once tokens are evicted."""
    compared = bound, COMPARED
    losses = [_evicting(_of(streaming, of)).set_index("first")["loss"] for of in compared]
    difference = (losses[0] - losses[1]).dropna().to_numpy()
    mean = float(difference.mean()) if len(difference) else np.nan
    return Above(mean, *mean_interval(difference))


def _of(streaming: pd.DataFrame, bound: Bound) -> pd.DataFrame:
    cache, positions = bound
    return streaming[(streaming["cache"] == cache) & (streaming["positions"] == positions)]


def _evicting(streaming: pd.DataFrame) -> pd.DataFrame:
    """Stretches all of which are later than the first eviction of a bounded cache."""
    return streaming[streaming["first"] > streaming["capacity"]]


def _in_forwards(rows: pd.DataFrame) -> pd.Series[float]:
    """Time per token over that of a token alone, by stretch, where nothing interrupts them."""
    return rows["quick_ms"] / rows["quick_ms_alone"]


def _quarter(rows: pd.DataFrame, number: int) -> pd.DataFrame:
    """The stretches of one quarter of a stream, 1 to 4."""
    length = rows["end"].max()
    begin, end = (number - 1) * length / 4, number * length / 4
    return rows[(rows["first"] >= begin) & (rows["first"] < end)]


def _slowdown(rows: pd.DataFrame) -> float:
    """Median time per token of the last quarter of a stream over that of the second, in forwards.

    In the second quarter of a long stream a bounded cache is full already.
    """
    last, second = (_in_forwards(_quarter(rows, number)).median() for number in (4, 2))
    return float(last / second)


def _losses_table(streaming: pd.DataFrame) -> ResultTable:
    first = streaming.iloc[0]
    note = (
        f"{first['model']}, {streaming['end'].max():,} tokens one by one (full cache: "
        f"{_of(streaming, STREAMED[0])['end'].max():,}); bounded caches hold {first['capacity']} "
        f"tokens, with sinks the first {first['n_sink']} among them. Nats per token before and "
        "after tokens are evicted, the perplexity after, and by how much it is above a "
        f"recomputed window, with {METHOD} over stretches; an interval above {BROKEN} is broken, "
        "one on both sides undecided:"
    )
    head = ["cache", "before", "after", "perplexity", "above recomputed", "verdict"]
    return ResultTable(note, head, [_loss_line(streaming, of) for of in (*STREAMED, COMPARED)])


def _costs_table(streaming: pd.DataFrame) -> ResultTable:
    note = (
        "Held by each layer at the end, and by the cache; time per token in the last quarter of "
        "the stream, in milliseconds (median) and in forwards of a token alone (quickest tenth of "
        "both), and the latter over those in its second quarter:"
    )
    return ResultTable(note, _COSTS, [_cost_line(streaming, of) for of in STREAMED])


_COSTS = ("cache", "tokens", "KiB", "ms", "forwards", "last / second")


def _loss_line(streaming: pd.DataFrame, bound: Bound) -> list[str]:
    rows = _of(streaming, bound)
    before, loss = rows[rows["end"] <= rows["capacity"] + 1], _mean_loss(_evicting(rows))
    line = [str(bound), _number(_mean_loss(before)), _number(loss)]
    line.append(_number(np.exp(loss), ".1f"))
    if bound == COMPARED:
        return [*line, "", ""]
    above = _above(streaming, bound)
    return [*line, str(above), above.told]


def _cost_line(streaming: pd.DataFrame, bound: Bound) -> list[str]:
    rows = _of(streaming, bound)
    end, last = rows.iloc[-1], _quarter(rows, 4)
    line = [str(bound), f"{end['length']:,.0f}", f"{end['bytes'] / 2**10:,.0f}"]
    times = last["ms"].median(), _in_forwards(last).median(), _slowdown(rows)
    return [*line, *(_number(time, ".2f") for time in times)]


def _number(value: float, form: str = ".3f") -> str:
    return "" if np.isnan(value) else format(value, form)


def _mean_loss(rows: pd.DataFrame) -> float:
    known = rows["known"].sum()
    return float((rows["loss"] * rows["known"]).sum() / known) if known else np.nan


# ---- figures -------------------------------------------------------------------------------------


def _loss_figure(streaming: pd.DataFrame) -> Figure:
    """Loss along the text, above that of a recomputed window."""
    with style():
        figure, (panel,) = new_figure(width=5.4, height=3.2)
        for bound in STREAMED:
            rows = _of(streaming, bound)
            middle = (rows["first"] + rows["end"]) / 2
            panel.plot(middle, _above_recomputed(streaming, rows), **_look(bound))
        _against_tokens(panel, streaming)
        panel.set_ylabel("nats per token above a recomputed window")
        label_lines(panel, gap=0.07)
    figure.set_label(
        f"Loss of {streaming['model'].iloc[0]} along a text of {streaming['end'].max():,} tokens, "
        "above that of a window recomputed for each query. Dotted: bounded caches begin to evict"
    )
    return figure


def _cost_figure(streaming: pd.DataFrame) -> Figure:
    """Time and memory along the text."""
    with style():
        figure, axes = new_figure(2, 1, width=5.4, height=4.2, sharex=True)
        time, memory = axes
        for bound in STREAMED:
            rows, look = _of(streaming, bound), _look(bound)
            time.plot((rows["first"] + rows["end"]) / 2, _in_forwards(rows), **look)
            if bound in (STREAMED[0], HELD):  # what is bounded takes the same
                alike = {"label": "all others"} if bound == HELD else {}
                memory.plot(rows["end"], rows["bytes"] / 2**20, **look | alike)
        for panel in axes:
            _against_tokens(panel, streaming)
            panel.set_ylim(bottom=0)
            label_lines(panel, gap=0.1)
        time.set_title("Time per token")
        time.set_ylabel("forwards of one\ntoken alone")
        memory.set_title("Keys and values held")
        memory.set_ylabel("MiB")
        time.set_xlabel("")
    figure.set_label("Time per token, and bytes of keys and values held, along the text")
    return figure


def _against_tokens(panel: Axes, streaming: pd.DataFrame) -> None:
    panel.axvline(streaming["capacity"].iloc[0] + 1, color=MUTED, linewidth=1, linestyle=":")
    panel.set_xlim(0, streaming["end"].max())
    panel.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    panel.xaxis.set_major_locator(MaxNLocator(5))
    panel.set_xlabel("tokens read")


def _above_recomputed(streaming: pd.DataFrame, rows: pd.DataFrame) -> Any:
    recomputed = _of(streaming, COMPARED).set_index("first")["loss"]
    return rows["loss"] - recomputed.loc[rows["first"]].to_numpy()


def _look(bound: Bound) -> dict[str, Any]:
    looks: dict[Bound, dict[str, Any]] = {
        Bound(FULL): {"color": INK, "linewidth": 1.2, "label": FULL},
        Bound(WINDOW): {"color": press_colour("KnormPress"), "label": "window alone"},
        AS_THEY_WERE: {
            "color": press_colour("ExpectedAttentionPress"),
            "linewidth": 1.2,
            "alpha": 0.5,  # it goes up and down all over the panel
            "label": "sinks + window,\noriginal positions",
        },
        HELD: {
            "color": press_colour("ObservedAttentionPress"),
            "label": "sinks + window,\nin-cache positions",
        },
    }
    return looks[bound]


# ---- findings ------------------------------------------------------------------------------------


def find_sinks(streaming: pd.DataFrame) -> list[Finding]:
    """What a window loses with the first tokens, and whether keeping them mends it.

    Nothing if no word of the text is known.
    """
    window, held, kept = (_above(streaming, of) for of in (Bound(WINDOW), HELD, AS_THEY_WERE))
    if np.isnan(held.mean):
        return []
    if _is_untrained(streaming):
        loss, guess = _mean_loss(_of(streaming, COMPARED)), streaming["guessing"].iloc[0]
        untrained = (
            f"The model predicts the text no better than a uniform guess (**{loss:.2f}** nats per "
            f"token against {guess:.2f}), so a stream has nothing to lose."
        )
        return [Finding("sinks", untrained)]
    n_sink = streaming["n_sink"].iloc[0]
    sinks = (
        f"A window with its first {n_sink} tokens, at in-cache positions, {held.told} over "
        f"{streaming['end'].max():,} tokens: {held.bold} nats per token above a recomputed one."
    )
    alone = (
        f"A window alone {window.told}: {window.bold} nats per "
        f"token above a recomputed one, where more than {BROKEN} is broken."
    )
    positions = (
        f"With the same tokens at their original positions the window {kept.told}: "
        f"{kept.bold} nats per token."
    )
    return [
        Finding("sinks", sinks, "stream past the trained length", held.verdict),
        Finding("window", alone, "stream without the first tokens", window.verdict),
        Finding("positions", positions, "stream with original positions", kept.verdict),
    ]


def _is_untrained(streaming: pd.DataFrame) -> bool:
    """Whether the model predicts next to nothing, so that no cache can make it worse."""
    if "guessing" not in streaming:  # tables of earlier versions
        return False
    loss = _mean_loss(_of(streaming, COMPARED))
    return bool(loss > UNTRAINED * streaming["guessing"].iloc[0])


def find_attention(attention: pd.DataFrame) -> Finding:
    """How much queries look at the first token."""
    most = attention.sort_values("share").iloc[-1]
    return Finding(
        "attention",
        f"Queries in a window's later half pay its first token **{attention['share'].mean():.1%}** "
        f"of their attention, one head {most['share']:.1%}; spread evenly it would be "
        f"{most['even']:.1%}.",
    )


def find_pace(streaming: pd.DataFrame) -> list[Finding]:
    """Whether time and memory stay where they are."""
    streams = [_of(streaming, of) for of in STREAMED]
    full, *bounded = map(_slowdown, streams)
    grown = max(rows["bytes"].max() / rows["bytes"].min() for rows in map(_evicting, streams[1:]))
    pace = (
        f"Tokens of the last quarter take {min(bounded):.2f} to **{max(bounded):.2f}** times as "
        f"long as those of the second in bounded caches, {full:.2f} in a full one."
    )
    growth = f"While they evict, the bytes of bounded caches become **{grown:.2f}** times as many."
    stays: Literal["works", "breaks"] = "works" if grown < 1.05 else "breaks"
    return [
        Finding("pace", pace, evidence=Evidence.TIME),
        Finding("growth", growth, "bound the memory of a stream", stays, Evidence.BYTES),
    ]


class Streaming(Experiment[Options]):
    """Stream thousands of tokens through caches: loss, memory and time, bounded and not."""

    name = "streaming"
    title = "Streaming past the trained length"
    question = (
        "What do a bounded cache, its first tokens and their positions do to loss, memory and time "
        "per token over thousands of tokens?"
    )
    method = (
        "A text is read token by token through caches that are full, keep the last tokens, or "
        "keep the first ones too, with original positions or those in the cache. Losses are "
        "compared, stretch by stretch, with a window that is recomputed for the queries and begins "
        f"as the model's texts begin. A cache breaks if it loses more than {BROKEN} nats per token "
        "(a perplexity about a tenth higher) over the whole interval. What a window loses depends "
        "on what the heads pay the first token: stdlib-neox-sink was taught to pay it, as its card "
        "tells, and a model without a sink loses next to nothing."
    )
    evidence = Evidence.MODEL
    full = Options()
    quick = Options(tokens=1024)
    claims: ClassVar = {
        "growth": Claim(Options(tokens=720), within=0.01),
    }

    def on(self, own: OwnModel) -> Planned[Options]:
        own.opened(("StreamingLLMDecodingPress",))
        own.opened(("KeyRerotationPress",))  # positions in the cache turn keys, too
        size = Size(capacity=min(256, own.trained // 2) - 1)
        full = min(own.trained, size.shortest)
        options = self.quick_on(own, tokens=size.shortest, capacity=size.capacity, full=full)
        steps = size.shortest * len(STREAMED) * (1 + 1 / ALONE_EVERY)
        read = size.shortest * 4 + 8 * size.capacity  # windows, whose attention is looked at too
        return Planned(options, read, steps, seconds=5)

    def measure(self, options: Options, progress: Progress) -> Tables:
        """Stream the text through all caches.

        Returns:
            `streaming`: per cache and stretch of the text the columns `model`, `mechanism`,
            `capacity`, `n_sink`; `guessing`, nats of a uniform guess; `cache`, `positions`; `first`
            and `end`, the positions it covers; `loss`, mean nats per known target; `known`, how
            many there are; `ms`, median milliseconds per token, `quick_ms`, their tenth percentile,
            and `quick_ms_alone`, that of tokens that are read without a cache in between; `length`,
            tokens that the layers hold afterwards, and `bytes`, what that takes (both, and times,
            are missing where the
            window is recomputed).
            `streaming_attention`: see `sinks.attention_to_first`, and the `model`.
        """
        model, tokenizer = load_model(options.model, dtype=options.dtype, device=options.device)
        size = size_for(model, options)
        text = read_text(tokenizer, size.tokens, options.text)
        setting = {"model_name": short_name(options.model), "mechanism": options.mechanism.value}
        with threads(options.threads):
            return stream_text(model, text, size, progress, **setting)

    def findings(self, tables: Tables) -> list[Finding]:
        streaming = tables["streaming"]
        attention = find_attention(tables["streaming_attention"])
        return [*find_sinks(streaming), attention, *find_pace(streaming)]

    def related(self, tables: Tables) -> list[Related]:
        streaming = tables["streaming"]
        losses = [_above(streaming, of) for of in (Bound(WINDOW), HELD, AS_THEY_WERE)]
        if np.isnan(losses[0].mean) or _is_untrained(streaming):
            return []
        window, held, kept = losses
        says = (
            "A window alone fails once the text is longer; the first tokens largely recover it, "
            "with positions counted in the cache, over millions of tokens."
        )
        here = (
            f"Nats above a recomputed window on {streaming['model'].iloc[0]}: window alone "
            f"{window}, first tokens kept {held}, at their original positions {kept}."
        )
        return [Related("window", STREAMING_LLM, says, here)]

    def views(self, tables: Tables) -> list[ResultTable]:
        streaming, attention = tables["streaming"], tables["streaming_attention"]
        return [_losses_table(streaming), heads_table(attention), _costs_table(streaming)]

    def figures(self, tables: Tables) -> dict[str, Figure]:
        streaming, attention = tables["streaming"], tables["streaming_attention"]
        return {
            "streaming": _loss_figure(streaming),
            "streaming_attention": heads_figure(attention),
            "streaming_costs": _cost_figure(streaming),
        }


EXPERIMENT = Streaming()
