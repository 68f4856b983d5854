"""Presses that use measurements of the model made beforehand, instead of on each context.

Expected attention (arXiv 2510.00636) uses statistics of the queries, Q-Filters (Godey et al.,
2503.02812) their principal directions, and DuoAttention (Xiao et al., 2410.10819) scores of how
much each head retrieves.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from press_core.attention import window_attention
from press_core.call import AttentionCall
from press_core.eviction import Eviction
from press_core.fields import count, require, require_whole, share
from press_core.learned.calibration import Calibration, LearnedPress, learned, sized
from press_core.learned.running import Batch, LayerMeans, run
from press_core.model.decoder import device_of
from press_core.press import MeasuredPress
from press_core.presses.positions import layer_generator
from press_core.presses.queries import ExpectedAttention
from press_core.probe import attention_sites
from press_core.scoring import RatioScorer
from press_core.select import best_first, leading, trailing, upcast
from press_core.traits import Evicts, Needs


def query_moments(
    collector: Callable[..., Any],
    model: Any,
    token_batches: Iterable[Batch],
    queries_of: Callable[[AttentionCall], Tensor],
) -> list[Tensor]:
    """First and second moment of queries, `(L, H, d)` and `(L, H, d, d)`, float64 on the CPU.

    Args:
        collector: of calls with what `queries_of` needs.
        queries_of: returns the queries `(B, H, n, d)` of a call to measure.

    Raises:
        CalibrationError: if there were no queries.
    """
    means = LayerMeans()

    def add(call: AttentionCall) -> None:
        of_head = queries_of(call).double().transpose(0, 1).flatten(1, 2)  # (H, B * n, d)
        means.add(call.site, of_head.shape[1], of_head.sum(dim=1), of_head.mT @ of_head)

    run(model, token_batches, collector(add))
    return means.stacked()


@dataclass(frozen=True, eq=False, repr=False)
class ExpectedAttentionStats(Calibration):
    """Statistics of a model's queries before RoPE.

    Attributes:
        mean: `(L, H, d)`.
        covariance: `(L, H, d, d)`.
    """

    kind = "expected attention statistics"
    made_by = "collect(model, token_batches)"
    file_names = ("expected_attention_stats.safetensors",)

    mean: Tensor = sized("layers heads head_dim", "query_mean")
    covariance: Tensor = sized("layers heads head_dim head_dim", "query_cov")


@dataclass
class ExpectedAttentionWithStats(ExpectedAttention, LearnedPress):
    """Keeps the keys that the model's typical queries are expected to attend to (2510.00636).

    This is ExpectedAttentionPress with the mean and covariance of the queries measured beforehand,
    instead of on each context. It reads no queries, so it works wherever keys and values can be
    read. Contexts of at most `n_sink` tokens are not pruned. Its other fields are those of
    ExpectedAttentionPress.

    Attributes:
        sample_seq_len, num_samples, dataset_name: choose among the statistics published for the
            model on the hub: tokens per sample, number of samples, and data set.
        stats_folder: kvpress's name for `stats` if it is a folder.
        stats: the statistics of the model (see `collect`), their file, folder or hub id. None: the
            file `expected_attention_stats.safetensors` beside the model, or the statistics
            published for it on the hub.
    """

    sample_seq_len: int = 1000
    num_samples: int = 100
    dataset_name: str = "kmfoda/booksum"
    stats_folder: str | None = None
    stats: ExpectedAttentionStats | str | Path | None = learned(ExpectedAttentionStats)

    needs = Needs.ROPE | Needs.LATER_QUERIES

    def validate(self) -> None:
        super().validate()
        fits = self.stats is None or self.stats_folder is None
        require(self, "stats_folder", fits, "None if stats is given")

    def find(self, model: Any) -> Calibration:
        if self.stats_folder is None:
            return super().find(model)
        return ExpectedAttentionStats.load(Path(self.stats_folder))

    def hub_id(self, model_name: str) -> str:
        parts = model_name, self.dataset_name, self.num_samples, self.sample_seq_len, self.n_sink
        return "alessiodevoto/exp_att_stats_" + "_".join(map(str, parts)).replace("/", "_")

    def statistics(self, call: AttentionCall) -> tuple[Tensor, Tensor]:
        stats, layer, like = call.prepared(self), call.site.layer_idx, upcast(call.keys[:, :, :0])
        return stats.mean[layer].to(like)[None], stats.covariance[layer].to(like)[None]

    @classmethod
    def collect(
        cls, model: Any, token_batches: Iterable[Batch], n_sink: int = 4
    ) -> ExpectedAttentionStats:
        """Measure the statistics of the model's queries on sample texts.

        Args:
            model: the model to calibrate; it is not changed.
            token_batches: token ids `(B, S)`, or dicts with `input_ids` and `attention_mask` for
                left-padded batches.
            n_sink: number of first tokens of each row that are left out.

        Returns:
            The statistics, float32: pass them as `stats`, or save them beside the model.

        Raises:
            CalibrationError: if there are no tokens.
            HyperparameterError: if `n_sink` is no number of tokens.
        """
        require_whole(0, n_sink=n_sink)
        collector = partial(cls.collector, reads=ExpectedAttention.needs)
        mean, second = query_moments(
            collector, model, token_batches, lambda call: call.queries_before_rope()[:, :, n_sink:]
        )
        covariance = second - mean.unsqueeze(-1) * mean.unsqueeze(-2)
        return ExpectedAttentionStats(mean.float(), covariance.float())


@dataclass(frozen=True, eq=False, repr=False)
class QFilters(Calibration):
    """One direction per layer and KV head: keys along it receive the least attention.

    Attributes:
        directions: `(L, H_kv, d)`; they point away from the mean query.
    """

    kind = "Q-filters"
    file_names = ("qfilters.safetensors",)

    directions: Tensor = sized("layers kv_heads head_dim", "q_filters")


@dataclass
class QFilter(RatioScorer, LearnedPress):
    """Keeps the keys that are best aligned with the main query direction (Q-Filters, 2503.02812).

    The score is `-⟨k, f⟩`, with a fixed direction `f` per layer and KV head: the first right
    singular vector of its group's queries, oriented away from their mean. It estimates the mean
    attention logit of a key, up to a factor, without reading queries. Paper: Godey et al.

    Attributes:
        compression_ratio: share of the tokens that each KV head evicts, in [0, 1), or the `Tokens`
            that it keeps.
        filters: the directions of the model (see `fit`), their file, folder or hub id. None: the
            file `qfilters.safetensors` beside the model, or the one published for it on the hub.
    """

    filters: QFilters | str | Path | None = learned(QFilters)

    independent = True

    def hub_id(self, model_name: str) -> str:
        name = model_name.split("/")[-1]  # only one is published with the older name
        name = name if "405B" in name else name.replace("Meta-Llama", "Llama")
        return f"nthngdy/{name}_qfilt"

    def score(self, call: AttentionCall) -> Tensor:
        """`-⟨k, f⟩`: the expected logit of each key up to a factor, `(B, H_kv, S)` float32."""
        keys = upcast(call.keys)
        direction = call.prepared(self).directions[call.site.layer_idx].to(keys)
        # A row times the transposed keys is several times as fast as the keys times a column.
        return -(direction.unsqueeze(-2) @ keys.mT).squeeze(-2)

    @classmethod
    def fit(cls, model: Any, token_batches: Iterable[Batch]) -> QFilters:
        """Compute the directions from the model's queries on sample texts.

        Queries are taken after RoPE, like the keys in the cache.

        Args:
            model: the model to calibrate; it is not changed.
            token_batches: token ids `(B, S)`, or dicts with `input_ids` and `attention_mask` for
                left-padded batches.

        Returns:
            The directions, float32: pass them as `filters`, or save them beside the model.

        Raises:
            CalibrationError: if there are no tokens.
        """
        moments = query_moments(cls.collector, model, token_batches, AttentionCall.queries)
        n_kv = attention_sites(model)[0].num_kv_heads
        mean, second = (x.unflatten(1, (n_kv, -1)).mean(dim=2) for x in moments)
        return QFilters(filter_directions(mean, second).float())


def filter_directions(mean: Tensor, second: Tensor) -> Tensor:
    """First right singular vectors of queries, oriented away from their mean.

    Args:
        mean: `(..., d)`, first moment of the queries.
        second: `(..., d, d)`, second moment, not centred.

    Returns:
        `(..., d)`, of unit norm.
    """
    # The right singular vectors of the queries are the eigenvectors of their second moment.
    direction = torch.linalg.eigh(second).eigenvectors[..., -1]
    along = (direction * mean).sum(dim=-1, keepdim=True)
    return torch.where(along > 0, -direction, direction)


# ---- DuoAttention --------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False, repr=False)
class HeadScores(Calibration):
    """How much each KV head attends to the middle of a context, between sinks and recent tokens.

    Attributes:
        scores: `(L, H_kv)`; infinite for layers that presses do not work on.
    """

    kind = "DuoAttention head scores"
    made_by = "measure(model, token_batches)"
    file_names = ("duo_head_scores.safetensors",)
    within = (-inf, inf)

    scores: Tensor = sized("layers kv_heads")


@dataclass
class DuoAttention(MeasuredPress, LearnedPress):
    """Keeps all tokens in retrieval heads, sinks and recent tokens in streaming heads (2410.10819).

    The KV heads of the model with the lowest head scores are streaming heads. Contexts of at most
    `sink_size + recent_size` tokens are not pruned. Paper: DuoAttention, Xiao et al.

    Attributes:
        head_compression_ratio: share of all KV heads of the model that are streaming, in [0, 1].
        on_the_fly_scoring: if no `head_scores` are given, measure them when a scope opens, on
            repeated random tokens.
        head_scores: the scores of the model (see `measure`), their file (safetensors, or the table
            that the paper's authors publish), folder or hub id. None: the file
            `duo_head_scores.safetensors` beside the model.
        sink_size, recent_size: number of first and of last tokens that streaming heads keep.
    """

    head_compression_ratio: float = share(0.0)
    on_the_fly_scoring: bool = False
    head_scores: HeadScores | str | Path | None = learned(HeadScores)
    sink_size: int = count(128)
    recent_size: int = count(256, 1)

    evicts = Evicts.PER_HEAD
    whole_up_to = "sink_size", "recent_size"

    def acts_on(self, length: int) -> bool:
        return self.is_long_enough(length) and self.head_compression_ratio > 0

    def find(self, model: Any) -> Calibration:
        if not self.on_the_fly_scoring or self.head_scores is not None:
            return super().find(model)
        length = 2 * (self.sink_size + self.recent_size)
        batches = [repeated_random(model, length, seed) for seed in range(4)]
        return type(self).measure(model, batches, self.sink_size, self.recent_size)

    def compress(self, call: AttentionCall) -> Eviction:
        streaming = streaming_heads(call.prepared(self).scores, self.head_compression_ratio)
        streaming = streaming[call.site.layer_idx].to(call.keys.device)
        if not self.is_long_enough(call.length) or not bool(streaming.any()):
            return Eviction.nothing(call)
        kept = leading(call.keys, self.sink_size) | trailing(call.keys, self.recent_size)
        of_heads = kept | ~streaming.unsqueeze(-1)  # (H_kv, S)
        return Eviction.keep_per_head(call, of_heads.expand(len(call.keys), -1, -1))

    @classmethod
    def measure(
        cls,
        model: Any,
        token_batches: Iterable[Batch],
        sink_size: int = 128,
        recent_size: int = 256,
        window_size: int = 64,
    ) -> HeadScores:
        """Measure how much attention each head puts on the tokens that streaming would evict.

        A KV head's score is the attention of the last queries to the middle of the context,
        averaged over queries, texts and the GQA group.

        Args:
            model: the model to calibrate; it is not changed.
            token_batches: token ids `(B, S)`, or dicts with `input_ids` and `attention_mask` for
                left-padded batches.
            sink_size, recent_size: number of first and of last tokens that streaming heads keep.
            window_size: number of last queries to measure, at most `recent_size`.

        Returns:
            The scores, float32: pass them as `head_scores`, or save them beside the model.

        Raises:
            CalibrationError: if no text is longer than `sink_size + recent_size`.
            HyperparameterError: if one of the three is no number of tokens.
        """
        require_whole(0, sink_size=sink_size)
        require_whole(1, recent_size=recent_size, window_size=window_size)
        means = LayerMeans()

        def add(call: AttentionCall) -> None:
            if call.length > sink_size + recent_size:
                weights = window_attention(call, min(window_size, recent_size))
                middle = weights[..., sink_size : call.length - recent_size].sum(dim=-1)
                per_head = middle.mean(dim=(2, 3)).sum(dim=0).double()
                means.add(call.site, len(weights), per_head)

        run(model, token_batches, cls.collector(add))
        kept = f"the {sink_size} + {recent_size} tokens that streaming heads keep"
        (scores,) = means.stacked(float("inf"), f": no text is longer than {kept}")
        return HeadScores(scores.float())


def repeated_random(model: Any, length: int, seed: int) -> Tensor:
    """Random token ids `(1, length)` or slightly longer; the second half repeats the first.

    Retrieval heads attend from the second half back to the first.
    """
    vocabulary = model.get_input_embeddings().num_embeddings
    generator = layer_generator(seed, 0)
    shape = 1, -(-length // 2) + 1
    half = torch.randint(vocabulary, shape, generator=generator, device="cpu")
    return torch.cat((half, half), dim=1).to(device_of(model))


def streaming_heads(scores: Tensor, head_compression_ratio: float) -> Tensor:
    """Streaming heads, `(L, H_kv)` bool: the share with the lowest finite `scores` `(L, H_kv)`."""
    n = round(int(scores.isfinite().sum()) * head_compression_ratio)
    return best_first(-scores.reshape(1, 1, -1), n).view(scores.shape)
