"""CriticalKV (Feng et al., arXiv 2502.03805): what changes the layer's output most."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from press_core.blocks import Space, rows_at_once
from press_core.call import AttentionCall
from press_core.composite import Wrapper
from press_core.model.sites import AttentionSite, output_weight
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
        first = best_first(scores, int(self.budget(call) * self.first_stage_ratio))
        weighted = (scores + self.epsilon) * projected_norms(call, leaving_out=first)
        return weighted.masked_fill(first, float("inf"))


def check_stages(press: Any) -> None:
    """Validate the fields of the two stages."""
    require(press, "epsilon", press.epsilon >= 0, "0 or more")
    require(press, "first_stage_ratio", 0 <= press.first_stage_ratio <= 1, "a number in [0, 1]")


@torch.no_grad()
def projected_norms(call: AttentionCall, leaving_out: Tensor) -> Tensor:
    """L1 norm of each value after the output projection, mean over the group.

    Some tokens at a time: what is projected is `D / d` times as large as the values.

    Args:
        leaving_out: `(B, H_kv, S)` bool, tokens whose norms nobody asks for.

    Returns:
        `(B, H_kv, S)`, float32; 0 for those.
    """
    values = call.values
    weight = output_weight(call.site).to(values.dtype)
    of_heads = weight.unflatten(1, (values.shape[1], -1, values.shape[-1]))  # (D, H_kv, G, d)
    n_rows = rows_at_once(values, len(weight))
    norms, space = upcast(values.new_zeros(values.shape[:3])), Space(values)
    for head in range(values.shape[1]):
        for part in (~leaving_out[:, head]).nonzero().split(n_rows):
            rows, tokens = part.unbind(1)
            asked, projected = values[rows, head, tokens], space.of(len(part), len(weight))
            for columns in of_heads[:, head].unbind(1):
                torch.mm(asked, columns.T, out=projected)
                norms[rows, head, tokens] += projected.abs_().sum(dim=-1, dtype=norms.dtype)
    return norms.div_(of_heads.shape[2])
