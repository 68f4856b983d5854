"""Stream a text token by token through a bounded cache, with a recomputed window as reference."""

import math
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import torch
from rich.progress import Progress
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import DynamicCache, PreTrainedModel

from experiments import UserError, refusing
from experiments.framework.intervals import LEAST
from experiments.framework.timing import Stopwatch
from experiments.testbed.stdlib_text import IGNORED, token_stream
from hooks_impl import StreamingLLMDecodingPress
from press_core import cache_nbytes
from press_core.scope import InstalledPress

ALONE_EVERY = 8
"""One of this many tokens of a stream is also run alone, without a cache."""


class Bound(NamedTuple):
    """How a stream bounds its cache, and which positions its tokens have."""

    cache: str
    positions: str = "original"

    def __str__(self) -> str:
        has_sinks = self.cache == SINKS.cache
        return f"{self.cache}, {self.positions} positions" if has_sinks else self.cache


FULL, WINDOW, SINKS = Bound("full cache"), Bound("window"), Bound("sinks + window")
IN_CACHE, RECOMPUTED = Bound(SINKS.cache, "in-cache"), Bound("window, recomputed", "in-cache")
STREAMED = (FULL, WINDOW, SINKS, IN_CACHE)


class Size(NamedTuple):
    """The sizes of the streams and their caches.

    Attributes:
        tokens: length of the streams.
        capacity: tokens in a bounded cache before a forward; a query attends to one more.
        full: length of the stream with a full cache.
        n_sink: number of first tokens to keep as attention sinks.
        stretch: number of tokens that are measured together.
    """

    tokens: int
    capacity: int = 255
    full: int = 1024
    n_sink: int = 4
    stretch: int = 64

    @property
    def shortest(self) -> int:
        """The shortest stream in which bounded caches evict for at least `LEAST` stretches."""
        return self.capacity + (LEAST + 1) * self.stretch

    def press(self, cache: Bound) -> InstalledPress | None:
        """The press that bounds a cache; None for a full one."""
        if cache == FULL:
            return None
        return StreamingLLMDecodingPress(
            max_capacity=self.capacity,
            n_sink=0 if cache == WINDOW else self.n_sink,
            rerotate=cache == IN_CACHE,
        )


class Text(NamedTuple):
    """The text of a stream.

    Attributes:
        ids: `(tokens,)` int64, beginning with the `<bos>` token if the tokenizer has one.
        targets: `(tokens,)` int64, the next token of each; `IGNORED` if it is an unknown word.
    """

    ids: Tensor
    targets: Tensor


def read_text(tokenizer: Any, n_tokens: int, path: Path | None = None) -> Text:
    """The first `n_tokens` of the held-out standard library, or of a file.

    Raises:
        UserError: if the text is too short, or the tokenizer knows none of its words.
    """
    if path is None:
        stream = token_stream(tokenizer, "held-out")
    else:
        with refusing(f"{path} is no text in UTF-8", UnicodeDecodeError):
            text = path.read_text(encoding="utf-8")
        encoded = tokenizer(text, add_special_tokens=False)
        stream = torch.tensor(encoded["input_ids"], dtype=torch.int64)
    if tokenizer.bos_token_id is not None:
        stream = torch.cat((torch.tensor([tokenizer.bos_token_id]), stream))
    source = "the held-out standard library" if path is None else str(path)
    if len(stream) <= n_tokens:
        raise UserError(
            f"cannot stream {n_tokens:,} tokens: {source} has {len(stream) - 1:,} for this "
            "tokenizer; stream fewer tokens, or give a longer text"
        )
    targets = stream[1 : n_tokens + 1].clone()
    if tokenizer.unk_token_id is not None:
        targets[targets == tokenizer.unk_token_id] = IGNORED
    if (targets == IGNORED).all():
        raise UserError(f"this model's tokenizer knows no word of {source}; give another text")
    return Text(stream[:n_tokens], targets)


class Stream:
    """Streams a text token by token through one cache.

    Attributes:
        position: number of tokens read so far.
        cache: the cache that is filled.
    """

    def __init__(self, model: PreTrainedModel, text: Text, press: InstalledPress | None) -> None:
        self.model, self.text, self.press = model, text, press
        self.position, self.cache = 0, DynamicCache(config=model.config)

    @torch.inference_mode()
    def advance(self, n_tokens: int) -> tuple[Tensor, dict[str, float]]:
        """Run the next `n_tokens` one by one, with the press open.

        Returns:
            The losses, see `losses_of`; and the 10th percentiles of milliseconds per token,
            `quick_ms`, and per token run without a cache in between, `quick_ms_alone`.
        """
        read = slice(self.position, self.position + n_tokens)
        ids, logits = self.text.ids[read].to(self.model.device), []
        with nullcontext() if self.press is None else self.press(self.model):
            watch = Stopwatch(self.model.device)
            for index, token in enumerate(ids.view(-1, 1, 1)):
                logits.append(self.model(input_ids=token, past_key_values=self.cache).logits[0])
                watch.lap()
                if index % ALONE_EVERY == 0:
                    self.model(input_ids=token, use_cache=False)
                watch.lap()
        self.position += n_tokens
        seconds = torch.tensor(watch.seconds(), dtype=torch.float64)
        laps = {"quick_ms": seconds[::2], "quick_ms_alone": seconds[1 :: 2 * ALONE_EVERY]}
        quickest = {name: 1e3 * float(lap.quantile(0.1)) for name, lap in laps.items()}
        return losses_of(torch.cat(logits), self.text.targets[read]), quickest


def losses_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Loss in nats of `targets` `(q,)` under `logits` `(q, vocabulary)`; NaN if ignored."""
    losses = cross_entropy(logits.float().cpu(), targets, ignore_index=IGNORED, reduction="none")
    return losses.masked_fill(targets == IGNORED, torch.nan)


@torch.inference_mode()
def recomputed_losses(model: PreTrainedModel, text: Text, window: int) -> Tensor:
    """Losses `(tokens,)` with at most `window` tokens per query, recomputed without a cache.

    Each window begins with the text's first token. The loss is NaN if the target is unknown.
    """
    n_tokens, ids = len(text.ids), text.ids.to(model.device)
    parts, done = [], 0
    while done < n_tokens:
        end = min(n_tokens, done + max(1, window // 4) if done else window)
        first = max(1, end - window + 1)
        seen = torch.cat((ids[:1], ids[first:end]))
        logits = model(input_ids=seen[None], use_cache=False).logits[0, done - end :]
        parts.append(losses_of(logits, text.targets[done:end]))
        done = end
    return torch.cat(parts)


def stream_text(model: PreTrainedModel, text: Text, size: Size, progress: Progress) -> pd.DataFrame:
    """Stream `text` of `size.tokens` tokens through all caches: see `Streaming.measure`."""
    streams = {cache: Stream(model, text, size.press(cache)) for cache in STREAMED}
    recomputed = recomputed_losses(model, text, size.capacity + 1)
    rows: list[dict[str, Any]] = []

    def row(cache: Bound, first: int, losses: Tensor) -> dict[str, Any]:
        ends = {"first": first, "end": first + len(losses), "loss": float(losses.nanmean())}
        return cache._asdict() | ends

    for first in progress.track(range(0, size.tokens, size.stretch), description="streaming"):
        for cache, stream in streams.items():
            most = min(size.full, size.tokens) if cache == FULL else size.tokens
            end = min(first + size.stretch, most)
            if first < end:
                losses, quickest = stream.advance(end - first)
                held = {"bytes": cache_nbytes(stream.cache)}
                rows.append(row(cache, first, losses) | held | quickest)
        rows.append(row(RECOMPUTED, first, recomputed[first : first + size.stretch]))
    guessing = math.log(model.config.get_text_config().vocab_size)
    return pd.DataFrame(rows).assign(guessing=guessing, capacity=size.capacity, n_sink=size.n_sink)
