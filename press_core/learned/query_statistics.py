"""Presses that know the queries which a model usually makes.

Expected attention (arXiv 2510.00636) from statistics of the queries, and Q-Filters (Godey et al.,
2503.02812) from their main directions: measured beforehand, instead of on each context.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from press_core.call import AttentionCall
from press_core.fields import require
from press_core.learned.calibration import Calibration, LearnedPress, learned, sized
from press_core.learned.running import Batch, LayerMeans, run
from press_core.presses.expected_attention import ExpectedAttention
from press_core.probe import attention_sites
from press_core.scoring import RatioScorer
from press_core.select import upcast
from press_core.traits import Needs


def query_moments(
    collector: Callable[..., Any],
    model: Any,
    token_batches: Iterable[Batch],
    queries_of: Callable[[AttentionCall], Tensor],
    reads: Needs,
) -> list[Tensor]:
    """First and second moment of queries, `(L, H, d)` and `(L, H, d, d)` float64 on the CPU.

    Args:
        queries_of: the queries `(B, H, n, d)` of a call.
        reads: what that needs.

    Raises:
        CalibrationError: if there was no query at all.
    """
    means = LayerMeans()

    def see(call: AttentionCall) -> None:
        of_head = queries_of(call).double().transpose(0, 1).flatten(1, 2)  # (H, B * n, d)
        means.add(call.site, of_head.shape[1], of_head.sum(dim=1), of_head.mT @ of_head)

    run(model, token_batches, collector(see, reads=reads))
    return means.stacked()


@dataclass(frozen=True, eq=False, repr=False)
class ExpectedAttentionStats(Calibration):
    """Statistics of the queries of a model before RoPE.

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
class ExpectedAttentionWithStats(LearnedPress, ExpectedAttention):
    """Keeps what the queries that a model usually makes would attend to (arXiv 2510.00636).

    Expected attention with statistics measured beforehand instead of on the context itself. Reads
    no queries, so that it works wherever keys and values can be seen. Contexts of at most `n_sink`
    tokens are left whole.

    Attributes:
        sample_seq_len, num_samples, dataset_name: which of the statistics published for the model
            to take: measured on so many tokens of so many samples of this data set.
        stats_folder: `stats` where it is a folder, as kvpress calls it.
        stats: the statistics of the model (see `collect`), or a file, a folder or a hub id. None:
            the file `expected_attention_stats.safetensors` beside the model, or what is published
            for it on the hub.
    """

    sample_seq_len: int = 1000
    num_samples: int = 100
    dataset_name: str = "kmfoda/booksum"
    stats_folder: str | None = None
    stats: ExpectedAttentionStats | str | Path | None = learned(ExpectedAttentionStats)

    needs = Needs.ROPE

    def validate(self) -> None:
        super().validate()
        once = self.stats is None or self.stats_folder is None
        require(self, "stats_folder", once, "None where stats are given")

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
        """Measure the statistics of the queries that `model` makes of some texts.

        Args:
            model: left as it was.
            token_batches: token ids `(B, S)`, or dicts with `input_ids` and `attention_mask` where
                rows are padded on the left.
            n_sink: first tokens of each row, which are left out.

        Returns:
            The statistics, float32: to hand over as `stats`, or to save beside the model.

        Raises:
            CalibrationError: if there is no token to learn from.
        """

        def queries_of(call: AttentionCall) -> Tensor:
            return call.queries_before_rope()[:, :, n_sink:]

        reads = Needs.QUERIES | Needs.ROPE
        mean, second = query_moments(cls.collector, model, token_batches, queries_of, reads)
        covariance = second - mean.unsqueeze(-1) * mean.unsqueeze(-2)
        return ExpectedAttentionStats(mean.float(), covariance.float())


@dataclass(frozen=True, eq=False, repr=False)
class QFilters(Calibration):
    """The directions along which keys are looked at least.

    Attributes:
        directions: `(L, H_kv, d)`; they point away from the mean query.
    """

    kind = "Q-filters"
    file_names = ("qfilters.safetensors",)

    directions: Tensor = sized("layers kv_heads head_dim", "q_filters")


@dataclass
class QFilter(LearnedPress, RatioScorer):
    """Keeps the keys on the side of the mean query (Godey et al., arXiv 2503.02812).

    Attributes:
        filters: the directions of the model (see `fit`), or a file, a folder or a hub id. None: the
            file `qfilters.safetensors` beside the model, or what is published for it on the hub.
    """

    filters: QFilters | str | Path | None = learned(QFilters)

    independent = True

    def hub_id(self, model_name: str) -> str:
        return f"nthngdy/{model_name.split('/')[-1]}_qfilt"

    def score(self, call: AttentionCall) -> Tensor:
        return qfilter_scores(call.keys, call.prepared(self), call.site.layer_idx)

    @classmethod
    def fit(cls, model: Any, token_batches: Iterable[Batch]) -> QFilters:
        """Find the directions from the queries that `model` makes of some texts.

        Queries are taken after RoPE, as they meet the keys in the cache.

        Args:
            model: left as it was.
            token_batches: token ids `(B, S)`, or dicts with `input_ids` and `attention_mask` where
                rows are padded on the left.

        Returns:
            The directions, float32: to hand over as `filters`, or to save beside the model.

        Raises:
            CalibrationError: if there is no token to learn from.
        """
        moments = query_moments(
            cls.collector, model, token_batches, AttentionCall.queries, Needs.QUERIES
        )
        n_kv = attention_sites(model)[0].num_kv_heads
        mean, second = (x.unflatten(1, (n_kv, -1)).mean(dim=2) for x in moments)
        return QFilters(filter_directions(mean, second).float())


def filter_directions(mean: Tensor, second: Tensor) -> Tensor:
    """First right singular vectors of queries, turned away from their mean.

    Args:
        mean: `(..., d)`, first moment of the queries.
        second: `(..., d, d)`, second moment, not centred.

    Returns:
        `(..., d)`, of unit norm.
    """
    # The right singular vectors of a matrix are the eigenvectors of its second moment.
    direction = torch.linalg.eigh(second).eigenvectors[..., -1]
    along = (direction * mean).sum(dim=-1, keepdim=True)
    return torch.where(along > 0, -direction, direction)


def qfilter_scores(keys: Tensor, filters: QFilters, layer_idx: int) -> Tensor:
    """How far each key lies on the side of the mean query: the logit it expects, up to a factor.

    Args:
        keys: `(B, H_kv, S, d)`, as they lie in the cache.
        filters: those of the model.

    Returns:
        `-<k, f>`, `(B, H_kv, S)`, float32.
    """
    keys = upcast(keys)
    # Rows times a transposed matrix: several times as fast as the keys times columns.
    return -(filters.directions[layer_idx].to(keys).unsqueeze(-2) @ keys.mT).squeeze(-2)
