"""Expected attention (arXiv 2510.00636) from query statistics that were measured beforehand."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from press_core.call import AttentionCall
from press_core.fields import require
from press_core.learned.calibration import Calibration, LearnedPress, learned, sized
from press_core.learned.running import Batch, query_moments
from press_core.presses.expected_attention import ExpectedAttention
from press_core.select import upcast
from press_core.traits import Needs


@dataclass(frozen=True, eq=False, repr=False)
class ExpectedAttentionStats(Calibration):
    """Statistics of the queries of a model before RoPE.

    Attributes:
        mean: `(L, H, d)`.
        covariance: `(L, H, d, d)`.
    """

    kind = "expected attention statistics"
    file_names = ("expected_attention_stats.safetensors",)

    mean: Tensor = sized("layers heads head_dim")
    covariance: Tensor = sized("layers heads head_dim head_dim")

    @classmethod
    def published(cls, tensors: dict[str, Tensor], folder: Path) -> dict[str, Tensor]:
        return {"mean": tensors["query_mean"], "covariance": tensors["query_cov"]}


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
    learns = "stats", ExpectedAttentionStats, "{press}.collect(model, token_batches)"

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
