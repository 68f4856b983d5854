"""DuoAttention (Xiao et al., arXiv 2410.10819): heads that retrieve, and heads that stream."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from press_core.attention import window_attention
from press_core.call import AttentionCall
from press_core.eviction import Eviction
from press_core.fields import count, share
from press_core.learned.calibration import Calibration, LearnedPress, learned, sized
from press_core.learned.running import Batch, LayerMeans, run
from press_core.model.decoder import device_of
from press_core.press import MeasuredPress
from press_core.presses.positions import layer_generator
from press_core.traits import Evicts


@dataclass(frozen=True, eq=False, repr=False)
class HeadScores(Calibration):
    """How much each KV head retrieves from the middle of a context.

    Attributes:
        scores: `(L, H_kv)`; infinite for layers that no press works on.
    """

    kind = "DuoAttention head scores"
    made_by = "measure(model, token_batches)"
    file_names = ("duo_head_scores.safetensors",)
    within = (-inf, inf)

    scores: Tensor = sized("layers kv_heads")


@dataclass
class DuoAttention(LearnedPress, MeasuredPress):
    """Keeps all tokens in heads that retrieve, sinks and recent ones in the rest (2410.10819).

    Attributes:
        head_compression_ratio: share of all KV heads of the model that stream, in [0, 1].
        on_the_fly_scoring: measure the head scores when a scope opens, on repeated random tokens.
        head_scores: those of the model (see `measure`), a file (safetensors, or the table that the
            paper's authors publish), a folder or a hub id. None: `duo_head_scores.safetensors`
            beside the model.
        sink_size, recent_size: tokens that streaming heads keep.
    """

    head_compression_ratio: float = share(0.0)
    on_the_fly_scoring: bool = False
    head_scores: HeadScores | str | Path | None = learned(HeadScores)
    sink_size: int = count(128)
    recent_size: int = count(256, 1)

    evicts = Evicts.PER_HEAD
    whole_up_to = "sink_size", "recent_size"

    def find(self, model: Any) -> Calibration:
        if not self.on_the_fly_scoring or self.head_scores is not None:
            return super().find(model)
        length = 2 * (self.sink_size + self.recent_size)
        batches = [repeated_random(model, length, seed) for seed in range(4)]
        return type(self).measure(model, batches, self.sink_size, self.recent_size)

    def compress(self, call: AttentionCall) -> Eviction:
        scores = call.prepared(self).scores
        streaming = streaming_heads(scores, self.head_compression_ratio)
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
        means = LayerMeans()

        def see(call: AttentionCall) -> None:
            if call.length > sink_size + recent_size:
                weights = window_attention(call, min(window_size, recent_size))
                middle = weights[..., sink_size : call.length - recent_size].sum(dim=-1)
                per_head = middle.mean(dim=(2, 3)).sum(dim=0).double()
                means.add(call.site, len(weights), per_head)

        run(model, token_batches, cls.collector(see))
        kept = f"the {sink_size} + {recent_size} tokens that streaming heads keep"
        (scores,) = means.stacked(float("inf"), f": no text is longer than {kept}")
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
