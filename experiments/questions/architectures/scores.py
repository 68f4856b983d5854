"""By which scores each press of the sweep should keep tokens, from what a full run has shown."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import avg_pool1d, pad

from experiments.questions.architectures.reference import FullRun, Layer, asked_at


def sinks_and_recent(run: FullRun, layer: Layer) -> Tensor:
    """StreamingLLM: the first four tokens, and then the later the better."""
    later = torch.arange(layer.length, dtype=torch.float32)
    later[:4] = float("inf")
    return later.expand(layer.keys.shape[:3])


def key_norms(run: FullRun, layer: Layer) -> Tensor:
    """Knorm: the smaller the norm of a key, the better."""
    return -layer.keys.norm(dim=-1)


def lag_variation(run: FullRun, layer: Layer, sink: int = 2, lag: int = 4) -> Tensor:
    """LagKV: how the keys and values of a block vary, measured by the next block."""
    scores = torch.full(layer.keys.shape[:3], float("inf"))
    n_blocks = (layer.length - sink) // lag
    for head in range(layer.keys.shape[1]):
        for block in range(n_blocks - 1):
            here, after = sink + block * lag, sink + (block + 1) * lag
            total = torch.zeros(lag)
            for states in (layer.keys[0, head], layer.values[0, head]):
                next_block = states[after : after + lag]
                low, high = next_block.amin(dim=0), next_block.amax(dim=0)
                scaled = (states[here:after] - low) / (high - low)
                total += scaled.std(dim=-1).softmax(dim=0) / 2
            scores[0, head, here:after] = total.argsort().argsort() / lag
    return scores


def window_votes(run: FullRun, layer: Layer, window: int = 4) -> Tensor:
    """SnapKV: what the last queries attend to, pooled over neighbouring keys."""
    assert layer.call.weights is not None
    before = layer.length - window
    votes = layer.call.weights[:, :, -window:, :before].float().mean(dim=2)
    pooled = avg_pool1d(layer.grouped(votes), 5, stride=1, padding=2)
    return pad(pooled, (0, window), value=float("inf"))


def expected_attention(run: FullRun, layer: Layer, sink: int = 2, future: int = 4) -> Tensor:
    """ExpectedAttention: what Gaussian queries at the coming positions would attend to.

    The rotation of a query is averaged by asking the model for it at every coming position.
    """
    given = layer.call.arguments.get("position_ids")
    start = layer.length if given is None else int(given.max()) + 1
    if run.rope_delta is not None:
        start = layer.length + run.rope_delta
    positions = range(start, start + future)
    queries = torch.stack([asked_at(run, layer, p).query for p in positions]).mean(dim=0)
    queries = queries[:, :, sink:].double()
    mean = queries.mean(dim=2)
    centred = queries - mean.unsqueeze(2)
    covariance = centred.mT @ centred / queries.shape[2]
    keys = layer.keys[:, layer.heads, sink:].double()
    d = keys.shape[-1]
    logits = (keys @ mean.unsqueeze(-1)).squeeze(-1) / d**0.5
    logits = logits + ((keys @ covariance) * keys).sum(dim=-1) / (2 * d)
    scores = layer.grouped(logits.softmax(dim=-1)) * layer.values[:, :, sink:].norm(dim=-1)
    return pad(scores, (sink, 0), value=float("inf"))
