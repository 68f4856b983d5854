"""Q-Filters (Godey et al., arXiv 2503.02812): one direction tells which keys are looked at."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
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
from press_core.press import Press, RatioScorer
from press_core.select import upcast


@dataclass(frozen=True, eq=False, repr=False)
class QFilters(Calibration):
    """The directions along which keys are looked at least.

    Attributes:
        directions: `(L, H_kv, d)`; they point away from the mean query.
    """

    kind: ClassVar[str] = "Q-filters"
    file_names: ClassVar[tuple[str, ...]] = ("qfilters.safetensors",)

    directions: Tensor

    def check(self) -> None:
        if self.directions.dim() != 3:
            shape = tuple(self.directions.shape)
            raise CalibrationError(f"directions of shape {shape}: they must be (L, H_kv, d)")

    @property
    def sizes(self) -> dict[str, int]:
        return dict(zip(("layers", "kv_heads", "head_dim"), self.directions.shape, strict=True))

    @classmethod
    def published(cls, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"directions": tensors["q_filters"]}


@dataclass
class QFilter(RatioScorer):
    """Keeps the keys on the side of the mean query (Godey et al., arXiv 2503.02812).

    Attributes:
        filters: the directions of the model (see `fit`), or a file, a folder or a hub id. None: the
            file `qfilters.safetensors` beside the model, or what is published for it on the hub.
    """

    filters: QFilters | str | Path | None = None

    independent = True

    def score_tokens(self, call: AttentionCall) -> Tensor:
        return qfilter_scores(call.keys, self.filters, call.site.layer_idx)

    def validate(self) -> None:
        super().validate()
        require_given(self, "filters", QFilters)

    def bind(self, model: Any) -> Press:
        filters = find(
            QFilters,
            self.filters,
            model,
            fit=f"{type(self).__name__}.fit(model, token_batches)",
            hub_id=lambda model_name: f"nthngdy/{model_name.split('/')[-1]}_qfilt",
        )
        return replace(self, filters=filters)

    def check_site(self, site: AttentionSite) -> None:
        super().check_site(site)
        assert isinstance(self.filters, QFilters)
        check_fits(self.filters, site)

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
        moments, groups = QueryMoments(), 1

        def see(call: AttentionCall) -> None:
            nonlocal groups
            groups = call.site.num_heads // call.site.num_kv_heads
            moments.add(call, call.queries())

        run(model, token_batches, cls.collector(see))
        mean, second = (x.unflatten(1, (-1, groups)).mean(dim=2) for x in moments.stacked())
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


def qfilter_scores(keys: Tensor, filters: QFilters | str | Path | None, layer_idx: int) -> Tensor:
    """How far each key lies on the side of the mean query: the logit it expects, up to a factor.

    Args:
        keys: `(B, H_kv, S, d)`, as they lie in the cache.
        filters: those of the model.

    Returns:
        `-<k, f>`, `(B, H_kv, S)`, float32.
    """
    assert isinstance(filters, QFilters)
    keys = upcast(keys)
    # Rows times a transposed matrix: several times as fast as the keys times columns.
    return -(filters.directions[layer_idx].to(keys).unsqueeze(-2) @ keys.mT).squeeze(-2)
