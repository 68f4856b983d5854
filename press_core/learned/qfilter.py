"""Q-Filters (Godey et al., arXiv 2503.02812): one direction tells which keys are looked at."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from press_core.call import AttentionCall
from press_core.learned.calibration import Calibration, LearnedPress, learned, sized
from press_core.learned.running import Batch, query_moments
from press_core.probe import attention_sites
from press_core.scoring import RatioScorer
from press_core.select import upcast
from press_core.traits import Needs


@dataclass(frozen=True, eq=False, repr=False)
class QFilters(Calibration):
    """The directions along which keys are looked at least.

    Attributes:
        directions: `(L, H_kv, d)`; they point away from the mean query.
    """

    kind = "Q-filters"
    file_names = ("qfilters.safetensors",)

    directions: Tensor = sized("layers kv_heads head_dim")

    @classmethod
    def published(cls, tensors: dict[str, Tensor], folder: Path) -> dict[str, Tensor]:
        return {"directions": tensors["q_filters"]}


@dataclass
class QFilter(LearnedPress, RatioScorer):
    """Keeps the keys on the side of the mean query (Godey et al., arXiv 2503.02812).

    Attributes:
        filters: the directions of the model (see `fit`), or a file, a folder or a hub id. None: the
            file `qfilters.safetensors` beside the model, or what is published for it on the hub.
    """

    filters: QFilters | str | Path | None = learned(QFilters)

    independent = True
    learns = "filters", QFilters, "{press}.fit(model, token_batches)"

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
