"""Streaming: thousands of tokens, one by one, through a cache that is bounded or not.

The caches that are compared:

- *full cache*: nothing is evicted. It grows, and leaves the positions that the model was trained
  on, so it is followed up to `Size.full` tokens only.
- *window*: a StreamingLLMDecodingPress that keeps the last tokens, and no first ones.
- *sinks + window*: one that keeps the first `Size.n_sink` tokens too.
- *window, recomputed*: no stream. All that a query sees is computed afresh, from a window of the
  same length: what the loss of a stream is compared with. To compute it for every token would take
  a forward of the whole window each; here one forward serves a quarter of it, whose queries see
  between three quarters of the window and all of it.

Tokens keep their *original* positions, or have those that they hold *in the cache*
(`rerotate=True`). A window alone has no first token to turn: for it the two are the same, bit for
bit, and both are run.

Streams take turns, a stretch of the text each. Each closes its scope after its turn: what was
evicted is known by the cache alone.

What else runs on the machine interrupts some forwards and makes times drift. So every few tokens
one is read *alone* as well, without a cache, and the time per token is told in such forwards, both
by their quickest tenth, which nothing has interrupted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any, NamedTuple

import numpy as np
import pandas as pd
import torch
import typer
from matplotlib.figure import Figure
from matplotlib.ticker import StrMethodFormatter
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import DynamicCache, PreTrainedModel

from experiments import UserError
from experiments.framework.experiment import Experiment, Tables
from experiments.framework.plots import INK, MUTED, legend_outside, new_figure, press_colour, style
from experiments.framework.report import write_results
from experiments.framework.tables import Shown
from experiments.loading import load_model, short_name
from experiments.testbed.recipes import MECHANISMS
from experiments.testbed.stdlib_text import token_stream
from press_core import Press, attention_sites, cache_nbytes, kept_lengths

FULL, WINDOW, SINKS, RECOMPUTED = "full cache", "window", "sinks + window", "window, recomputed"
ORIGINAL, IN_CACHE = "original", "in the cache"

ALONE_EVERY = 8
"""Tokens of a stream between two forwards of one alone."""

IGNORED = -100
"""Target that costs nothing: an unknown word."""


class Condition(NamedTuple):
    """How a stream bounds its cache, and which positions its tokens have."""

    cache: str
    positions: str = ORIGINAL

    def __str__(self) -> str:
        turned = self.positions == IN_CACHE and self.cache != RECOMPUTED
        return f"{self.cache}, in cache" if turned else self.cache


STREAMED = (
    Condition(FULL),
    Condition(WINDOW),
    Condition(WINDOW, IN_CACHE),
    Condition(SINKS),
    Condition(SINKS, IN_CACHE),
)


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

    tokens: int = 3072
    capacity: int = 255
    full: int = 1024
    n_sink: int = 4
    stretch: int = 128

    @property
    def shortest(self) -> int:
        """Tokens of which bounded caches evict some for two stretches and more."""
        return self.capacity + 3 * self.stretch

    def press(self, condition: Condition, mechanism: str = "hook") -> Press | None:
        """What bounds the cache; None for a full one."""
        if condition.cache == FULL:
            return None
        press: Press = MECHANISMS[mechanism]["StreamingLLMDecodingPress"](
            max_capacity=self.capacity,
            n_sink=self.n_sink if condition.cache == SINKS else 0,
            rerotate=condition.positions == IN_CACHE,
        )
        return press

    def length(self, condition: Condition) -> int:
        """Tokens that are streamed."""
        return min(self.full, self.tokens) if condition.cache == FULL else self.tokens


# ---- the text ------------------------------------------------------------------------------------


class Text(NamedTuple):
    """What is streamed.

    Attributes:
        ids: `(tokens + 1,)` int64; the first is the model's own beginning of a text, if it has one.
        unknown: id of words that the tokenizer does not know, which are read but are no target.
    """

    ids: Tensor
    unknown: int | None

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
    if tokenizer.bos_token_id is not None:
        stream = torch.cat((torch.tensor([tokenizer.bos_token_id]), stream))
    if len(stream) <= n_tokens:
        source = "the held-out standard library" if path is None else str(path)
        raise UserError(
            f"cannot stream {n_tokens:,} tokens: {source} has {len(stream) - 1:,} for this "
            "tokenizer; ask for fewer, or give a longer text"
        )
    return Text(stream[: n_tokens + 1], tokenizer.unk_token_id)


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

    def __init__(self, model: PreTrainedModel, text: Text, press: Press | None) -> None:
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

    NaN where the target is not known.
    """
    n_tokens, step = len(text.ids) - 1, max(1, window // 4)
    ids, targets = text.ids.to(model.device), text.targets.to(model.device)
    parts, done = [], 0
    while done < n_tokens:
        end = min(n_tokens, done + step if done else window)
        seen = ids[max(0, end - window) : end]
        logits = model(input_ids=seen[None], use_cache=False).logits[0, done - end :]
        parts.append(_losses(logits, targets[done:end]))
        done = end
    return torch.cat(parts)


@torch.inference_mode()
def attention_to_first(
    model: PreTrainedModel, text: Text, n_first: int, window: int
) -> pd.DataFrame:
    """What the later half of a window pays to its first tokens.

    Up to 8 windows of the text, each begun as the text begins where it has a beginning of its own.

    Returns:
        Columns `layer`; `n_first`; `share`, mean attention to the first `n_first` tokens together;
        `most`, that of the head that pays most; `even`, what they would get if all tokens got the
        same.
    """
    body = text.ids[1:-1]
    count = max(1, min(8, len(body) // (window - 1)))
    rows = [body[i * (window - 1) : (i + 1) * (window - 1)] for i in range(count)]
    batch = torch.stack([torch.cat((text.ids[:1], row)) for row in rows]).to(model.device)
    later = torch.arange(batch.shape[1] // 2, batch.shape[1])
    even = float((n_first / (later + 1)).mean())
    table = []

    def note(layer: int, output: Any) -> None:
        paid = output[1][:, :, later, :n_first].float().sum(-1).mean((0, 2))  # (H,)
        shares = {"share": float(paid.mean()), "most": float(paid.max()), "even": even}
        table.append({"layer": layer, "n_first": n_first} | shares)

    with _eager(model), ExitStack() as hooks:  # output_attentions=True would leave hooks behind
        for site in attention_sites(model):
            handle = site.module.register_forward_hook(
                lambda _, __, output, layer=site.layer_idx: note(layer, output)
            )
            hooks.callback(handle.remove)
        model(input_ids=batch, use_cache=False)
    return pd.DataFrame(table)


@contextmanager
def _eager(model: PreTrainedModel) -> Iterator[None]:
    """The one attention implementation that returns weights."""
    former = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(former)


# ---- tables --------------------------------------------------------------------------------------


def measure(
    model: PreTrainedModel,
    text: Text,
    size: Size,
    *,
    model_name: str,
    mechanism: str = "hook",
    progress: bool = True,
) -> Tables:
    """Stream `text` through all caches.

    Args:
        text: of `size.tokens` tokens and one more.
        mechanism: "hook" or "patch".
        progress: show a bar on stderr.

    Returns:
        `streaming`: per cache and stretch of the text the columns `model`, `mechanism`, `capacity`,
        `n_sink`; `cache`, `positions`; `first` and `end`, the positions it covers; `loss`, mean
        nats per known target; `known`, how many there are; `ms`, median milliseconds per token,
        `quick_ms`, their tenth percentile, and `quick_ms_alone`, that of tokens that are read
        without a cache in between; `length`, tokens that
        the layers hold afterwards, and `bytes`, what that takes (both, and times, are missing where
        the window is recomputed).
        `streaming_attention`: see `attention_to_first`, and the `model`.
    """
    streams = {of: Stream(model, text, size.press(of, mechanism)) for of in STREAMED}
    with _bar(sum(map(size.length, STREAMED)), progress) as advance:
        rows = _in_turn(streams, size, advance)
    losses = recomputed_losses(model, text, size.capacity + 1)
    rows += [
        _row(Condition(RECOMPUTED, IN_CACHE), first, losses[first : first + size.stretch])
        for first in range(0, size.tokens, size.stretch)
    ]
    table = pd.DataFrame(rows)
    setting: dict[str, Any] = {"model": model_name, "mechanism": mechanism}
    setting |= {"capacity": size.capacity, "n_sink": size.n_sink}
    for place, (name, value) in enumerate(setting.items()):
        table.insert(place, name, value)
    attention = attention_to_first(model, text, size.n_sink, size.capacity + 1)
    return {"streaming": table, "streaming_attention": attention.assign(model=model_name)}


def _in_turn(
    streams: dict[Condition, Stream], size: Size, advance: Callable[[int], None]
) -> list[dict[str, Any]]:
    rows = []
    for first in range(0, size.tokens, size.stretch):
        for condition, stream in streams.items():
            n_tokens = min(size.stretch, size.length(condition) - first)
            if n_tokens <= 0:
                continue
            stretch = stream.advance(n_tokens)
            measured = {"ms": 1e3 * float(stretch.seconds.median())}
            measured["quick_ms"] = 1e3 * float(stretch.seconds.quantile(0.1))
            measured["quick_ms_alone"] = 1e3 * float(stretch.alone.quantile(0.1))
            measured["length"] = max(int(kept.max()) for kept in kept_lengths(stream.cache))
            measured["bytes"] = cache_nbytes(stream.cache)
            rows.append(_row(condition, first, stretch.losses) | measured)
            advance(n_tokens)
    return rows


def _row(condition: Condition, first: int, losses: Tensor) -> dict[str, Any]:
    place = {"first": first, "end": first + len(losses)}
    known = int((~losses.isnan()).sum())
    return condition._asdict() | place | {"loss": float(losses.nanmean()), "known": known}


@contextmanager
def _bar(total: int, progress: bool) -> Iterator[Callable[[int], None]]:
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    left = TimeRemainingColumn()
    with Progress(*columns, left, console=Console(stderr=True), disable=not progress) as bar:
        task = bar.add_task("tokens", total=total)
        yield lambda n: bar.advance(task, n)


@contextmanager
def threads(count: int) -> Iterator[None]:
    """That many threads of torch, for as long as the block lasts."""
    former = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(former)


def run() -> Tables:
    """The study: the shipped model, on text that it has not seen."""
    model, tokenizer = load_model("stdlib-neox")
    size = Size()
    with threads(1):  # more only get in the way of a model this small
        return measure(model, read_text(tokenizer, size.tokens), size, model_name="stdlib-neox")


# ---- reading the tables --------------------------------------------------------------------------


def summary(tables: Tables) -> str:
    """What was measured, as Markdown."""
    return "\n\n".join([*sentences(tables), *(s.markdown() for s in shown(tables["streaming"]))])


def sentences(tables: Tables) -> list[str]:
    """What was measured in short."""
    streaming = tables["streaming"]
    return [
        sentence_on_sinks(streaming),
        sentence_on_attention(tables["streaming_attention"]),
        sentence_on_pace(streaming),
    ]


def sentence_on_sinks(streaming: pd.DataFrame) -> str:
    """What a window loses with the first tokens, and whether keeping them mends it."""
    window = _more(streaming, Condition(WINDOW))
    turned, kept = (_more(streaming, Condition(SINKS, p)) for p in (IN_CACHE, ORIGINAL))
    told = (
        "Once the first tokens have to go, a window alone costs "
        f"{window} nats per token more than one that is recomputed, sinks + window {turned} with "
        f"positions as in the cache and {kept} with original ones."
    )
    mended = _more(streaming, Condition(WINDOW), Condition(SINKS, IN_CACHE))
    if mended.is_more_than(0.1):
        return f"{told} That is the StreamingLLM paper's picture: sinks mend {mended} nats of it."
    return (
        f"{told} That is not the StreamingLLM paper's picture, in which the window alone breaks: "
        f"here the first tokens mend {mended} nats."
    )


def sentence_on_attention(attention: pd.DataFrame) -> str:
    """How much queries look at the first tokens."""
    first = attention.iloc[0]
    shares = ", ".join(f"{share:.2%}" for share in attention["share"])
    return (
        f"The later half of a window pays its first {first['n_first']} tokens together {shares} of "
        f"its attention, layer by layer (the head that pays most, {attention['most'].max():.2%}); "
        f"spread evenly it would be {first['even']:.2%}."
    )


def sentence_on_pace(streaming: pd.DataFrame) -> str:
    """Whether time and memory stay where they are."""
    streams = [_of(streaming, of) for of in STREAMED]
    full, *bounded = map(_slowdown, streams)
    later = [_evicting(rows) for rows in streams[1:]]
    grown = max(rows["bytes"].max() / rows["bytes"].min() for rows in later)
    return (
        f"Of {streaming['end'].max():,} tokens those of the last quarter take "
        f"{min(bounded):.2f} to {max(bounded):.2f} times as long as those of the second quarter "
        f"with bounded caches, whose bytes become {grown:.2f} times as many; with a full cache "
        f"{full:.2f} times as long within {streams[0]['end'].max():,} tokens."
    )


class Mean(NamedTuple):
    """A mean over stretches, and its standard error."""

    value: float
    error: float

    def is_more_than(self, threshold: float) -> bool:
        """Whether it is above `threshold` by three standard errors."""
        return self.value - 3 * self.error > threshold

    def __str__(self) -> str:
        return f"{self.value:+.3f} ± {self.error:.3f}"


def _more(streaming: pd.DataFrame, one: Condition, other: Condition | None = None) -> Mean:
    """By how many nats the loss with `one` is above that with `other`, once tokens are evicted.

    Args:
        other: None: a window that is recomputed.
    """
    less = other or Condition(RECOMPUTED, IN_CACHE)
    losses = [_evicting(_of(streaming, of)).set_index("first")["loss"] for of in (one, less)]
    difference = (losses[0] - losses[1]).dropna().to_numpy()
    if len(difference) < 2:
        return Mean(float(difference.mean()) if len(difference) else np.nan, np.nan)
    return Mean(float(difference.mean()), float(difference.std(ddof=1) / len(difference) ** 0.5))


def _of(streaming: pd.DataFrame, condition: Condition) -> pd.DataFrame:
    cache, positions = condition
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


def shown(streaming: pd.DataFrame) -> list[Shown]:
    """Losses, and what the streams cost: one line per cache."""
    first = streaming.iloc[0]
    losses = (
        f"{first['model']}, {streaming['end'].max():,} tokens one by one (full cache: "
        f"{_of(streaming, STREAMED[0])['end'].max():,}); bounded caches hold {first['capacity']} "
        f"tokens, with sinks the first {first['n_sink']} among them. Nats per token before and "
        "after tokens are evicted, the perplexity after, and by how much each stretch is above a "
        "recomputed window, with its standard error:"
    )
    costs = (
        "Held by each layer at the end, and by the cache; time per token in the last quarter of "
        "the stream, in milliseconds (median) and in forwards of a token alone (quickest tenth of "
        "both), and the latter over those in its second quarter:"
    )
    compared = [*STREAMED, Condition(RECOMPUTED, IN_CACHE)]
    head = ["cache", "before", "after", "perplexity", "above recomputed"]
    return [
        Shown(losses, head, [_loss_line(streaming, of) for of in compared]),
        Shown(costs, _COSTS, [_cost_line(streaming, of) for of in STREAMED]),
    ]


_COSTS = ("cache", "tokens", "KiB", "ms", "forwards", "last / second")


def _loss_line(streaming: pd.DataFrame, condition: Condition) -> list[str]:
    rows = _of(streaming, condition)
    after = _evicting(rows)
    loss = _mean_loss(after)
    line = [str(condition), _number(_mean_loss(rows.drop(after.index))), _number(loss)]
    line.append(_number(np.exp(loss), ".1f"))
    return [*line, "" if condition.cache == RECOMPUTED else str(_more(streaming, condition))]


def _cost_line(streaming: pd.DataFrame, condition: Condition) -> list[str]:
    rows = _of(streaming, condition)
    end, last = rows.iloc[-1], _quarter(rows, 4)
    line = [str(condition), f"{end['length']:,.0f}", f"{end['bytes'] / 2**10:,.0f}"]
    times = last["ms"].median(), _in_forwards(last).median(), _slowdown(rows)
    return [*line, *(_number(time, ".2f") for time in times)]


def _number(value: float, form: str = ".3f") -> str:
    return "" if np.isnan(value) else format(value, form)


def _mean_loss(rows: pd.DataFrame) -> float:
    known = rows["known"].sum()
    return float((rows["loss"] * rows["known"]).sum() / known) if known else np.nan


# ---- figure --------------------------------------------------------------------------------------


def figures(tables: Tables) -> dict[str, Figure]:
    """Loss, time and memory along the text: `streaming`."""
    streaming = tables["streaming"]
    with style():
        figure, axes = new_figure(3, 1, width=8.6, height=7.0, sharex=True, height_ratios=(2, 1, 1))
        loss, time, memory = axes
        for condition in STREAMED:
            rows, look = _of(streaming, condition), _look(condition)
            middle = (rows["first"] + rows["end"]) / 2
            loss.plot(middle, _above_recomputed(streaming, rows), **look)
            time.plot(middle, _in_forwards(rows), **look)
            memory.plot(rows["end"], rows["bytes"] / 2**20, **look)
        for panel in axes:
            panel.axvline(
                streaming["capacity"].iloc[0] + 1, color=MUTED, linewidth=1, linestyle=":"
            )
            panel.set_xlim(0, streaming["end"].max())
            panel.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
        for panel in (time, memory):
            panel.set_ylim(bottom=0)
        loss.set_title(f"{streaming['model'].iloc[0]}: loss above that of a recomputed window")
        loss.set_ylabel("nats per token")
        time.set_title("Time per token")
        time.set_ylabel("forwards of one\ntoken alone")
        memory.set_title("Keys and values held")
        memory.set_ylabel("MiB")
        memory.set_xlabel("tokens read (dotted: the bounded caches begin to evict)")
        legend_outside(figure, loss)
    return {"streaming": figure}


def _above_recomputed(streaming: pd.DataFrame, rows: pd.DataFrame) -> Any:
    recomputed = _of(streaming, Condition(RECOMPUTED, IN_CACHE)).set_index("first")["loss"]
    return rows["loss"] - recomputed.loc[rows["first"]].to_numpy()


def _look(condition: Condition) -> dict[str, Any]:
    if condition.cache == FULL:
        return {"color": INK, "label": FULL, "linewidth": 1.2}
    colour = press_colour("KnormPress" if condition.cache == WINDOW else "SnapKVPress")
    look: dict[str, Any] = {"color": colour, "label": f"{condition.cache},\noriginal positions"}
    if condition.positions == IN_CACHE:  # dashed, above solid: where both coincide both are seen
        label = f"{condition.cache},\npositions in the cache"
        look |= {"label": label, "dashes": (3, 1.5), "zorder": 2.5}
    return look


EXPERIMENT = Experiment(
    name="streaming",
    title="Streaming past the trained length",
    question="What do a bounded cache, its first tokens and their positions do to loss, memory and "
    "time per token over thousands of tokens?",
    run=run,
    figures=figures,
    summary=summary,
    repeat="python -m experiments streaming",
)


# ---- command -------------------------------------------------------------------------------------


class Mechanism(str, Enum):
    """What installs the presses."""

    HOOK = "hook"
    PATCH = "patch"


def size_for(
    model: PreTrainedModel,
    tokens: int = Size.tokens,
    capacity: int | None = None,
    n_sink: int = Size.n_sink,
    full: int | None = None,
) -> Size:
    """Sizes that fit a model, where they are not given.

    A query then sees as many tokens as the model was trained with, or 1,024 if those are fewer, and
    a full cache is followed up to four times the trained length.
    """
    trained = int(getattr(model.config, "max_position_embeddings", 1024))
    capacity = min(trained, 1024) - 1 if capacity is None else capacity
    return Size(tokens, capacity, 4 * trained if full is None else full, n_sink)


def command(
    model: Annotated[
        str, typer.Option(help="Shipped model, folder or hub id, such as EleutherAI/pythia-160m.")
    ] = "stdlib-neox",
    tokens: Annotated[int, typer.Option(min=2, help="Length of the streams.")] = Size.tokens,
    capacity: Annotated[
        int | None,
        typer.Option(
            min=2,
            help="Tokens that a bounded cache holds; by default one less than the model was "
            "trained with, and 1,023 at most.",
        ),
    ] = None,
    n_sink: Annotated[int, typer.Option(min=1, help="First tokens to keep.")] = Size.n_sink,
    full: Annotated[
        int | None,
        typer.Option(
            min=1, help="Length of the stream with a full cache; by default 4 trained lengths."
        ),
    ] = None,
    mechanism: Annotated[Mechanism, typer.Option(help="What installs the presses.")] = (
        Mechanism.HOOK
    ),
    text: Annotated[
        Path | None,
        typer.Option(help="Text to stream; by default Python's standard library, held out."),
    ] = None,
    threads_: Annotated[
        int, typer.Option("--threads", min=1, help="Threads of torch; small models want one.")
    ] = 1,
    device: Annotated[str, typer.Option(help="Where to run: cpu, cuda.")] = "cpu",
    output: Annotated[
        Path | None, typer.Option(help="Folder to write the tables and the figure to.")
    ] = None,
) -> None:
    """Loss, memory and time per token over thousands of tokens, with bounded caches and without."""
    loaded, tokenizer = load_model(model, device=device)
    size = size_for(loaded, tokens, capacity, n_sink, full)
    if tokens < size.shortest:
        raise UserError(
            f"{tokens:,} tokens are too few to see what a cache of {size.capacity:,} evicts: give "
            f"--tokens {size.shortest} or more, or a smaller --capacity"
        )
    for condition in STREAMED:
        press = size.press(condition)
        if press is not None:
            with press(loaded):  # refuses what does not fit before anything is run
                pass
    with threads(threads_):
        tables = measure(
            loaded,
            read_text(tokenizer, tokens, text),
            size,
            model_name=short_name(model),
            mechanism=mechanism.value,
        )
    console = Console()
    for table in shown(tables["streaming"]):
        console.print(table.note)
        console.print(table.rich())
    console.print("\n\n".join(sentences(tables)))
    if output is not None:
        write_results(tables, figures(tables), output)
