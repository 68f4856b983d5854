"""Expected attention (Devoto et al., arXiv 2510.00636): what future queries will look at."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.nn.functional import pad

from press_core.call import AttentionCall
from press_core.scope import Compression, require
from press_core.select import leading, protect, upcast


@dataclass
class ExpectedAttention(Compression):
    """Keeps what Gaussian future queries would attend to (Devoto et al., arXiv 2510.00636).

    Contexts of at most `n_sink` tokens are left whole.

    Attributes:
        n_future_positions: how many coming positions the rotation is averaged over.
        n_sink: first tokens, left out of the statistics and always kept.
        use_covariance: whether the covariance of the queries counts, or their mean alone.
        use_vnorm: whether scores are weighted by the norm of the values.
        epsilon: added before that weighting.
    """

    n_future_positions: int = 512
    n_sink: int = 4
    use_covariance: bool = True
    use_vnorm: bool = True
    epsilon: float = 0.0

    uses_queries = True
    uses_rope = True

    def validate(self) -> None:
        super().validate()
        require(self, "n_future_positions", self.n_future_positions >= 1, "1 or more")
        require(self, "n_sink", self.n_sink >= 0, "a number of tokens, 0 or more")
        require(self, "epsilon", self.epsilon >= 0, "0 or more")

    def acts_on(self, length: int) -> bool:
        return length > self.n_sink


def query_statistics(call: AttentionCall, n_sink: int) -> tuple[Tensor, Tensor]:
    """Mean `(B, H, d)` and covariance `(B, H, d, d)` of the queries before RoPE, sinks left out."""
    queries = call.queries_before_rope()
    queries = queries[:, :, max(0, n_sink - call.length + queries.shape[2]) :]
    mean = queries.mean(dim=2, keepdim=True)
    centred = queries - mean
    return mean.squeeze(2), centred.mT @ centred / queries.shape[2]


def expected_attention_scores(
    call: AttentionCall, mean: Tensor, covariance: Tensor, press: ExpectedAttention
) -> Tensor:
    """Attention expected from queries of the given statistics at the coming positions.

    Args:
        mean: `(B or 1, H, d)`, of the queries before RoPE.
        covariance: `(B or 1, H, d, d)`.

    Returns:
        `(B, H_kv, S)`, float32; the sinks are protected.
    """
    assert call.site.rotary is not None
    rotation = call.site.rotary.average(mean, call.next_position, press.n_future_positions)
    mean = (mean.unsqueeze(-2) @ rotation.mT).squeeze(-2)  # (B, H, d)
    keys = upcast(call.keys[:, :, press.n_sink :])
    n_kv, d = keys.shape[1], keys.shape[-1]
    logits = mean.unflatten(1, (n_kv, -1)) @ keys.mT / d**0.5  # (B, H_kv, G, S)
    if press.use_covariance:
        covariance = (rotation @ covariance @ rotation.mT).unflatten(1, (n_kv, -1))
        spread = (keys.unsqueeze(2) @ covariance).mul_(keys.unsqueeze(2)).sum(dim=-1)
        logits = logits + spread / (2 * d)
    scores = logits.softmax(dim=-1).mean(dim=2)
    if press.use_vnorm:
        scores = (scores + press.epsilon) * upcast(call.values[:, :, press.n_sink :]).norm(dim=-1)
    return protect(pad(scores, (press.n_sink, 0)), leading(call.keys, press.n_sink))
