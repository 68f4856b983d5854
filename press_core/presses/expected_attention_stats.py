"""Expected attention (arXiv 2510.00636) from query statistics that were measured beforehand."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from press_core.calibration import (
    Batch,
    Calibration,
    CalibrationError,
    QueryMoments,
    check_fits,
    find,
    require_given,
    run,
)
from press_core.call import AttentionCall
from press_core.model.sites import AttentionSite
from press_core.press import Needs, Press, require
from press_core.presses.expected_attention import ExpectedAttention, expected_attention_scores
from press_core.select import upcast


@dataclass(frozen=True, eq=False, repr=False)
class ExpectedAttentionStats(Calibration):
    """Statistics of the queries of a model before RoPE.

    Attributes:
        mean: `(L, H, d)`.
        covariance: `(L, H, d, d)`.
    """

    kind: ClassVar[str] = "expected attention statistics"
    file_names: ClassVar[tuple[str, ...]] = ("expected_attention_stats.safetensors",)

    mean: Tensor
    covariance: Tensor

    def check(self) -> None:
        if self.mean.dim() != 3 or self.covariance.shape != (*self.mean.shape, self.mean.shape[-1]):
            raise CalibrationError(
                f"a mean of shape {tuple(self.mean.shape)} and a covariance of shape "
                f"{tuple(self.covariance.shape)}: they must be (L, H, d) and (L, H, d, d)"
            )

    @property
    def sizes(self) -> dict[str, int]:
        return dict(zip(("layers", "heads", "head_dim"), self.mean.shape, strict=True))

    @classmethod
    def published(cls, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"mean": tensors["query_mean"], "covariance": tensors["query_cov"]}


@dataclass
class ExpectedAttentionWithStats(ExpectedAttention):
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
    stats: ExpectedAttentionStats | str | Path | None = None

    needs = Needs.ROPE

    def score_tokens(self, call: AttentionCall) -> Tensor:
        return expected_attention_stats_scores(call, self)

    def validate(self) -> None:
        super().validate()
        require_given(self, "stats", ExpectedAttentionStats)
        once = self.stats is None or self.stats_folder is None
        require(self, "stats_folder", once, "None where stats are given")

    def bind(self, model: Any) -> Press:
        stats = find(
            ExpectedAttentionStats,
            self.stats if self.stats_folder is None else Path(self.stats_folder),
            model,
            fit=f"{type(self).__name__}.collect(model, token_batches)",
            hub_id=self._hub_id,
        )
        return replace(self, stats=stats, stats_folder=None)

    def _hub_id(self, model_name: str) -> str:
        parts = model_name, self.dataset_name, self.num_samples, self.sample_seq_len, self.n_sink
        return "alessiodevoto/exp_att_stats_" + "_".join(map(str, parts)).replace("/", "_")

    def check_site(self, site: AttentionSite) -> None:
        super().check_site(site)
        assert isinstance(self.stats, ExpectedAttentionStats)
        check_fits(self.stats, site)

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
        moments = QueryMoments()

        def see(call: AttentionCall) -> None:
            moments.add(call, call.queries_before_rope()[:, :, n_sink:])

        run(model, token_batches, cls.collector(see, reads=Needs.QUERIES | Needs.ROPE))
        mean, second = moments.stacked()
        covariance = second - mean.unsqueeze(-1) * mean.unsqueeze(-2)
        return ExpectedAttentionStats(mean.float(), covariance.float())


def expected_attention_stats_scores(
    call: AttentionCall, press: ExpectedAttentionWithStats
) -> Tensor:
    """`expected_attention_scores` with the statistics of the layer that `press` holds.

    Returns:
        `(B, H_kv, S)`, float32; the sinks are protected.
    """
    assert isinstance(press.stats, ExpectedAttentionStats)
    layer, like = call.site.layer_idx, upcast(call.keys[:, :, :0])
    mean = press.stats.mean[layer].to(like)[None]
    covariance = press.stats.covariance[layer].to(like)[None]
    return expected_attention_scores(call, mean, covariance, press)
