"""CriticalKV (Feng et al., arXiv 2502.03805): what changes the layer's output most."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from press_core.blocks import rows_at_once
from press_core.call import AttentionCall
from press_core.composite import Wrapper
from press_core.errors import UnsupportedModelError
from press_core.model.ranks import whole_columns
from press_core.model.sites import AttentionSite
from press_core.press import TokenScorer, require
from press_core.select import best_first, upcast


@dataclass
class CriticalKV(Wrapper, TokenScorer):
    """Weights the scores of a press by what the values become in the layer's output (2502.03805).

    Attributes:
        press: scores tokens.
        epsilon: added to the scores before they are weighted.
        first_stage_ratio: share of the budget that goes to the best unweighted scores.
    """

    epsilon: float = 1e-4
    first_stage_ratio: float = 0.5

    def validate(self) -> None:
        super().validate()
        check_stages(self)

    def check_site(self, site: AttentionSite) -> None:
        super().check_site(site)
        output_weight(site)

    @property
    def independent(self) -> bool:  # type: ignore[override]
        return self.scorer.independent

    def score_tokens(self, call: AttentionCall) -> Tensor:
        scores = self.scorer.token_scores(call)
        weighted = (scores + self.epsilon) * projected_norms(call)
        first = best_first(scores, int(self.budget(call) * self.first_stage_ratio))
        return weighted.masked_fill(first, float("inf"))


def check_stages(press: Any) -> None:
    """Validate the fields of the two stages."""
    require(press, "epsilon", press.epsilon >= 0, "0 or more")
    require(press, "first_stage_ratio", 0 <= press.first_stage_ratio <= 1, "a number in [0, 1]")


def output_weight(site: AttentionSite) -> Tensor:
    """Weight of the output projection, `(D, H * d)`.

    Raises:
        UnsupportedModelError: if the module has none that is known.
    """
    for name in ("o_proj", "dense", "out_proj", "c_proj"):
        projection = getattr(site.module, name, None)
        weight = getattr(projection, "weight", None)
        if isinstance(weight, Tensor) and weight.is_meta:
            raise UnsupportedModelError(
                f"the weights of {site.name}.{name} are offloaded between forwards (device_map), "
                "and values are weighed by them; keep the attention modules on a device"
            )
        if isinstance(weight, Tensor) and weight.is_floating_point():
            weight = weight.T if type(projection).__name__ == "Conv1D" else weight
            return whole_columns(site.heads, weight, site.num_heads * site.head_dim)
    raise UnsupportedModelError(
        f"{type(site.module).__name__} ({site.name}) has no output projection (o_proj, dense, "
        "out_proj or c_proj) with floating-point weights, by which values are weighed"
    )


@torch.no_grad()
def projected_norms(call: AttentionCall) -> Tensor:
    """L1 norm of each value after the output projection, mean over the group.

    Some tokens at a time: what is projected is `G * D / d` times as large as the values.

    Returns:
        `(B, H_kv, S)`, float32.
    """
    values = call.values
    n_kv, d = values.shape[1], values.shape[-1]
    weight = output_weight(call.site).to(values.dtype)
    per_head = weight.T.reshape(n_kv, -1, d, len(weight)).transpose(1, 2).flatten(2)
    n_groups = per_head.shape[-1] // len(weight)  # per_head: (H_kv, d, G * D)
    n_rows = rows_at_once(values, len(values) * per_head.shape[-1])
    norms = upcast(values.new_empty(values.shape[:3]))
    for head in range(n_kv):
        for start in range(0, values.shape[2], n_rows):
            rows = slice(start, start + n_rows)
            projected = values[:, head, rows] @ per_head[head]
            norms[:, head, rows] = projected.abs_().sum(dim=-1, dtype=norms.dtype)
    return norms.div_(n_groups)
