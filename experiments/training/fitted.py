"""What learned presses know about a shipped model: measured, and saved beside it.

    python -m experiments.training.fitted --model facts-llama

Writes the query statistics of ExpectedAttentionStatsPress, the directions of QFilterPress and the
regressors of KVzapPress, all learned from contexts of the facts task with questions about them.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm  # type: ignore[import-untyped]
from transformers import PreTrainedModel

from experiments.facts import draw
from experiments.loading import load_model
from hooks_impl.expected_attention_stats import ExpectedAttentionStatsPress
from hooks_impl.kvzap import KVzapPress
from hooks_impl.kvzip import KVzipPress
from hooks_impl.qfilter import QFilterPress
from press_core import attention_sites
from press_core.fitted import Fitted, model_sizes
from press_core.methods.expected_attention_stats import ExpectedAttentionStats
from press_core.methods.kvzap import KVzapRegressor, Scores
from press_core.methods.qfilter import QFilters

CONTEXTS = (64, 128, 256, 512, 1024)
"""Words of a context, in turn."""
FACTS = 8
TOKENS_PER_BATCH = 4096
BATCHES = 10
SEED = 2_000_000
"""Of the contexts; another than those of training and evaluation."""


def fact_batches(count: int = BATCHES, seed: int = SEED) -> Iterator[Tensor]:
    """Contexts of the facts task, each with all questions about it and their answers.

    Yields:
        `(B, S)` int64 token ids, about `TOKENS_PER_BATCH` of them.
    """
    generator = torch.Generator().manual_seed(seed)
    for index in range(count):
        context = CONTEXTS[index % len(CONTEXTS)]
        batch = draw(max(1, TOKENS_PER_BATCH // context), context, FACTS, generator)
        asked = torch.cat((batch.question_ids, batch.answer_ids.unsqueeze(-1)), dim=-1)
        yield torch.cat((batch.context_ids, asked.flatten(1)), dim=1)


def fit(
    model: PreTrainedModel,
    token_batches: Callable[[str], Iterable[Tensor]],
    scores: Scores | None = None,
) -> Iterator[Fitted]:
    """All that learned presses want to know about `model`, one after the other.

    Args:
        token_batches: makes the batches for what it is told is to be learned.
        scores: what the regressors of KVzapPress learn; None: the scores of KVzip+.
    """
    yield ExpectedAttentionStatsPress.collect(model, token_batches("query statistics"))
    yield QFilterPress.fit(model, token_batches("Q-filters"))
    if scores is None:
        teacher: Any = KVzipPress(kvzip_plus_normalization=True).resolve(model)
        scores = teacher.scores
    assert scores is not None
    once = _Once(scores)
    yield KVzapPress.fit(model, token_batches("linear regressor"), once, model_type="linear")
    yield KVzapPress.fit(model, token_batches("mlp regressor"), once, model_type="mlp")


class _Once:
    """Scores that are computed once for the same tokens."""

    def __init__(self, scores: Scores) -> None:
        self.scores = scores
        self.known: dict[bytes, Sequence[Tensor]] = {}

    def __call__(self, model: Any, ids: Tensor) -> Sequence[Tensor]:
        key = ids.cpu().numpy().tobytes()
        if key not in self.known:
            self.known[key] = self.scores(model, ids)
        return self.known[key]


def random_fields(press: str, model: PreTrainedModel, seed: int = 0) -> dict[str, Any]:
    """Fields that make the learned press of a name work on a model that nobody has measured.

    What it then knows about the model is drawn at random: enough to compare mechanisms.

    Args:
        press: name of any press.

    Returns:
        No field for a press that learns nothing.
    """
    generator = torch.Generator().manual_seed(seed)
    sizes = model_sizes(attention_sites(model)[0])
    n, kv_heads, d = sizes["layers"], sizes["kv_heads"], sizes["head_dim"]

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    if press == "ExpectedAttentionStatsPress":
        spread = drawn(n, sizes["heads"], d, d)
        covariance = spread @ spread.mT / d
        return {"stats": ExpectedAttentionStats(drawn(n, sizes["heads"], d), covariance)}
    if press == "QFilterPress":
        return {"filters": QFilters(drawn(n, kv_heads, d))}
    if press == "KVzapPress":
        width, hidden = sizes["hidden_size"], 8
        output = drawn(n, kv_heads, hidden), drawn(n, kv_heads)
        return {"regressor": KVzapRegressor(*output, drawn(n, hidden, width), drawn(n, hidden))}
    return {}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="facts-llama", help="a model that knows the facts task")
    parser.add_argument("--output", type=Path, help="folder to write to (default: the model's)")
    parser.add_argument("--batches", type=int, default=BATCHES, help="batches to learn from")
    arguments = parser.parse_args()
    model, _ = load_model(arguments.model)

    def token_batches(learned: str) -> Iterable[Tensor]:
        batches = fact_batches(arguments.batches)
        return tqdm(batches, desc=learned, unit="batch", total=arguments.batches)

    for fitted in fit(model, token_batches):
        print(fitted.save(arguments.output or Path(model.config.name_or_path)))


if __name__ == "__main__":
    main()
