"""CriticalAdaKV: the head budgets of AdaKV, the two stages of CriticalKV in each head."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from press_core.call import AttentionCall
from press_core.model.sites import AttentionSite, output_weight
from press_core.presses.adakv import AdaKV, safeguarded, shared_budget
from press_core.presses.criticalkv import check_stages, projected_norms
from press_core.select import best_first


@dataclass
class CriticalAdaKV(AdaKV):
    """AdaKV's head budgets, spent as CriticalKV does (arXiv 2407.11550, 2502.03805).

    Attributes:
        press: scores tokens.
        alpha_safeguard: share of its even budget that every head keeps, at least one token.
        epsilon: added to the scores before they are weighted.
        first_stage_ratio: share of a head's budget that goes to the best unweighted scores.
    """

    epsilon: float = 1e-4
    first_stage_ratio: float = 0.5

    def validate(self) -> None:
        super().validate()
        check_stages(self)

    def check_site(self, site: AttentionSite) -> None:
        super().check_site(site)
        output_weight(site)

    def choose(self, call: AttentionCall, scores: Tensor) -> Tensor:
        n = self.budget(call)
        budgets = shared_budget(scores, n, self.alpha_safeguard).sum(dim=-1, keepdim=True)
        raised = scores.masked_fill(safeguarded(scores, n, self.alpha_safeguard), float("inf"))
        first = best_first(raised, (budgets * self.first_stage_ratio).int())
        weighted = (raised + self.epsilon) * projected_norms(call, leaving_out=first)
        return best_first(weighted.masked_fill(first, float("inf")), budgets)
