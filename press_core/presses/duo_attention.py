"""DuoAttention (Xiao et al., arXiv 2410.10819): heads that retrieve, and heads that stream."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from press_core.attention import window_attention
from press_core.calibration import (
    Batch,
    Calibration,
    CalibrationError,
    check_fits,
    find,
    model_sizes,
    require_given,
    run,
)
from press_core.call import AttentionCall
from press_core.errors import first_line
from press_core.eviction import Eviction
from press_core.model.decoder import device_of
from press_core.model.sites import AttentionSite
from press_core.press import Evicts, MeasuredPress, Press, require
from press_core.presses.random import layer_generator


@dataclass(frozen=True, eq=False, repr=False)
class HeadScores(Calibration):
    """How much each KV head retrieves from the middle of a context.

    Attributes:
        scores: `(L, H_kv)`; infinite for layers that no press works on.
    """

    kind: ClassVar[str] = "DuoAttention head scores"
    file_names: ClassVar[tuple[str, ...]] = ("duo_head_scores.safetensors",)

    scores: Tensor

    def check(self) -> None:
        if self.scores.dim() != 2:
            shape = tuple(self.scores.shape)
            raise CalibrationError(f"head scores of shape {shape}: they must be (L, H_kv)")
        if bool(self.scores.isnan().any()):
            raise CalibrationError("head scores that are no numbers (NaN) rank no head")

    def check_numbers(self) -> None:
        """Scores may be infinite; `check` refuses what is no number."""

    @property
    def sizes(self) -> dict[str, int]:
        return dict(zip(("layers", "kv_heads"), self.scores.shape, strict=True))

    @classmethod
    def load(cls, source: str | Path, file_names: tuple[str, ...] = ()) -> HeadScores:
        """As `Calibration.load`; also `full_attention_heads.tsv`, of the paper's authors.

        That is a row of tab-separated numbers per layer, one per KV head.
        """
        path = Path(source).expanduser()
        if path.suffix != ".tsv" or not path.is_file():
            return super().load(source, file_names)
        try:
            rows = [[float(x) for x in line.split()] for line in path.read_text().splitlines()]
            table = torch.tensor([row for row in rows if row])
        except (OSError, ValueError, TypeError) as error:
            reason = first_line(error)
            raise CalibrationError(f"{str(path)!r} is no table of numbers: {reason}") from error
        return cls(table)


@dataclass
class DuoAttention(MeasuredPress):
    """Keeps all tokens in heads that retrieve, sinks and recent ones in the rest (2410.10819).

    Attributes:
        head_compression_ratio: share of all KV heads of the model that stream, in [0, 1].
        on_the_fly_scoring: measure the head scores when a scope opens, on repeated random tokens.
        head_scores: those of the model (see `measure`), a file (safetensors, or the table that the
            paper's authors publish), a folder or a hub id. None: `duo_head_scores.safetensors`
            beside the model.
        sink_size, recent_size: tokens that streaming heads keep.
    """

    head_compression_ratio: float = 0.0
    on_the_fly_scoring: bool = False
    head_scores: HeadScores | str | Path | None = None
    sink_size: int = 128
    recent_size: int = 256

    evicts = Evicts.PER_HEAD

    def validate(self) -> None:
        super().validate()
        ratio = self.head_compression_ratio
        require(self, "head_compression_ratio", 0 <= ratio <= 1, "a number in [0, 1]")
        require_given(self, "head_scores", HeadScores)
        require(self, "sink_size", self.sink_size >= 0, "a number of tokens, 0 or more")
        require(self, "recent_size", self.recent_size >= 1, "a number of tokens, 1 or more")

    def bind(self, model: Any) -> Press:
        if self.on_the_fly_scoring and self.head_scores is None:
            length = 2 * (self.sink_size + self.recent_size)
            batches = [repeated_random(model, length, seed) for seed in range(4)]
            sizes = self.sink_size, self.recent_size
            return replace(self, head_scores=type(self).measure(model, batches, *sizes))
        make = f"{type(self).__name__}.measure(model, token_batches)"
        scores = find(HeadScores, self.head_scores, model, fit=make)
        return replace(self, head_scores=scores)

    def check_site(self, site: AttentionSite) -> None:
        super().check_site(site)
        assert isinstance(self.head_scores, HeadScores)
        check_fits(self.head_scores, site)

    def is_long_enough(self, length: int) -> bool:
        return length > self.sink_size + self.recent_size

    def decide(self, call: AttentionCall) -> Eviction:
        assert isinstance(self.head_scores, HeadScores)
        streaming = streaming_heads(self.head_scores.scores, self.head_compression_ratio)
        streaming = streaming[call.site.layer_idx].to(call.keys.device)
        if not self.is_long_enough(call.length) or not bool(streaming.any()):
            return Eviction.nothing(call)
        kept = torch.ones_like(call.keys[..., 0], dtype=torch.bool)
        middle = slice(self.sink_size, call.length - self.recent_size)
        kept[:, streaming, middle] = False
        return Eviction.keep_per_head(call, kept)

    @classmethod
    def measure(
        cls,
        model: Any,
        token_batches: Iterable[Batch],
        sink_size: int = 128,
        recent_size: int = 256,
        window_size: int = 64,
    ) -> HeadScores:
        """Measure how much of their attention heads put on what streaming would evict.

        A KV head's score is the attention of the last queries on the middle of the context, mean
        over queries, texts and the query heads of its group.

        Args:
            model: left as it was.
            token_batches: token ids `(B, S)`, or dicts with `input_ids` and `attention_mask`.
            sink_size, recent_size: what streaming heads would keep.
            window_size: how many of the last queries are asked.

        Raises:
            CalibrationError: if no text is longer than `sink_size + recent_size`.
        """
        sums: dict[int, Tensor] = {}
        n_layers = n_texts = 0

        def see(call: AttentionCall) -> None:
            nonlocal n_layers, n_texts
            n_layers = model_sizes(call.site)["layers"]
            if call.length <= sink_size + recent_size:
                return
            weights = window_attention(call, min(window_size, recent_size))
            middle = weights[..., sink_size : call.length - recent_size].sum(dim=-1)
            layer, per_head = call.site.layer_idx, middle.mean(dim=(2, 3)).sum(dim=0).double()
            sums[layer] = sums.get(layer, torch.zeros_like(per_head)) + per_head
            n_texts += len(weights) * (layer == min(sums))

        run(model, token_batches, cls.collector(see))
        if not sums:
            raise CalibrationError(
                f"no text of token_batches is longer than the {sink_size} + {recent_size} tokens "
                "that streaming heads keep"
            )
        some = next(iter(sums.values()))
        scores = torch.full((n_layers, len(some)), float("inf"), dtype=some.dtype)
        for layer, total in sums.items():
            scores[layer] = total.cpu() / n_texts
        return HeadScores(scores.float())


def repeated_random(model: Any, length: int, seed: int) -> Tensor:
    """`(1, length)` random token ids, the second half as the first: heads that retrieve show."""
    vocabulary = model.get_input_embeddings().num_embeddings
    generator = layer_generator(seed, 0)
    half = torch.randint(vocabulary, (1, -(-length // 2) + 1), generator=generator)
    return torch.cat((half, half), dim=1).to(device_of(model))


def streaming_heads(scores: Tensor, head_compression_ratio: float) -> Tensor:
    """`(L, H_kv)` bool: the share of heads with the lowest of the finite `scores` `(L, H_kv)`."""
    flat = scores.flatten()
    n = round(int(flat.isfinite().sum()) * head_compression_ratio)
    streaming = torch.zeros_like(flat, dtype=torch.bool)
    streaming[flat.argsort(stable=True)[:n]] = True
    return streaming.view(scores.shape)
