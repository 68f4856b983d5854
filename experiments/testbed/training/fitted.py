"""What learned presses know about a shipped model: measured, and saved beside it.

    python -m experiments train fitted

Writes the query statistics of ExpectedAttentionStatsPress, the directions of QFilterPress, the head
scores of DuoAttentionPress, the regressors of KVzapPress and the adapter of RestoreKVPress, all
learned from contexts of the facts task with questions about them; and says how well the regressors
predict other contexts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor
from transformers import PreTrainedModel

from experiments.loading import load_model
from experiments.testbed.asking import check_vocabulary
from experiments.testbed.facts import draw
from hooks_impl import (
    DuoAttentionPress,
    ExpectedAttentionStatsPress,
    KVzapPress,
    KVzipPress,
    QFilterPress,
    RestoreKVPress,
)
from hooks_impl.mechanism import Collector
from press_core import AttentionCall, Needs
from press_core.adapter import RestoreAdapter
from press_core.calibration import Calibration, run
from press_core.presses.kvzap import SMALLEST_SCORE, KVzapRegressor, Scores, kvzap_scores

CONTEXTS = (64, 128, 256, 512, 1024)
"""Words of a context, in turn."""
FACTS = 8
TOKENS_PER_BATCH = 4096
BATCHES = 10
MAX_TOKENS = 65_536
"""Of which regressors hold the hidden states: more than there are in all batches."""
RESTORED = (256, 512)
"""Words of a context that an adapter of RestoreKVPress learns from, in turn."""
ROWS_PER_BATCH = 200
"""Of those, for each of the batches that all others learn from."""
SEED, HELD_OUT_SEED = 2_000_000, 3_000_000
"""Of the contexts to learn from, and of others; neither is that of training or evaluation."""
SINKS, RECENT = 4, 28
"""What streaming heads keep while head scores are measured: the last queries are the questions."""


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


def restored_rows(count: int, seed: int = SEED) -> Iterator[Tensor]:
    """Contexts one by one, each with all questions about it and their answers.

    Yields:
        `(1, S)` int64 token ids.
    """
    generator = torch.Generator().manual_seed(seed)
    for index in range(count):
        batch = draw(1, RESTORED[index % len(RESTORED)], FACTS, generator)
        asked = torch.cat((batch.question_ids, batch.answer_ids.unsqueeze(-1)), dim=-1)
        yield torch.cat((batch.context_ids, asked.flatten(1)), dim=1)


def fit_adapter(model: PreTrainedModel, rows: Iterable[Tensor], count: int) -> RestoreAdapter:
    """The adapter of RestoreKVPress: predictions of questions and answers are what is compared."""
    return RestoreKVPress.fit(
        model, rows, compression_ratios=(0.9, 0.95), n_following=3 * FACTS, n_batches=count
    )


def fit(
    model: PreTrainedModel,
    token_batches: Callable[[str], Iterable[Tensor]],
    scores: Scores | None = None,
) -> Iterator[Calibration]:
    """All that learned presses want to know about `model`, one after the other.

    Args:
        token_batches: makes the batches for what it is told is to be learned.
        scores: what the regressors of KVzapPress learn; None: the scores of KVzip+.
    """
    yield ExpectedAttentionStatsPress.collect(model, token_batches("query statistics"))
    yield QFilterPress.fit(model, token_batches("Q-filters"))
    yield DuoAttentionPress.measure(model, token_batches("head scores"), SINKS, RECENT)
    once = _Once(scores or kvzip_plus(model))
    for kind in ("linear", "mlp"):
        batches = token_batches(f"{kind} regressor")
        yield KVzapPress.fit(model, batches, once, model_type=kind, max_tokens=MAX_TOKENS)


def kvzip_plus(model: PreTrainedModel) -> Scores:
    """The scores of KVzip+, which regressors learn."""
    teacher: Any = KVzipPress(kvzip_plus_normalization=True).bind(model)
    return teacher.scores


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


def correlations(
    model: PreTrainedModel, regressor: KVzapRegressor, ids: Tensor, scores: Scores
) -> Tensor:
    """How well `regressor` predicts the logarithm of `scores` of the tokens `ids` `(B, S)`.

    Returns:
        `(L, H_kv)`: Pearson's correlation over all tokens.
    """
    predicted: dict[int, Tensor] = {}

    def see(call: AttentionCall) -> None:
        predicted[call.site.layer_idx] = kvzap_scores(call, regressor)

    run(model, [ids], Collector(see, reads=Needs.NOTHING))
    wanted = [layer.clamp(min=SMALLEST_SCORE).log() for layer in scores(model, ids)]
    pairs = torch.stack((torch.stack(list(predicted.values())), torch.stack(wanted)))
    pairs = pairs.transpose(2, 3).flatten(3)  # (2, L, H_kv, B * S)
    centred = pairs - pairs.mean(dim=-1, keepdim=True)
    one, other = centred / centred.norm(dim=-1, keepdim=True)
    return (one * other).sum(dim=-1)


def train(name: str = "facts-llama", output: Path | None = None, batches: int = BATCHES) -> None:
    """Learn everything about a model of the facts task and save it.

    Args:
        name: of the model, as `load_model` takes it.
        output: folder to write to; None: that of the model, where presses look.
        batches: of about `TOKENS_PER_BATCH` tokens to learn from.

    Raises:
        UserError: if the model has another vocabulary than the facts task.
    """
    model, tokenizer = load_model(name)
    check_vocabulary(tokenizer, name)
    out, err = Console(soft_wrap=True), Console(stderr=True)

    def token_batches(learned: str) -> Iterable[Tensor]:
        return track(fact_batches(batches), learned, total=batches, console=err)

    (held_out,) = fact_batches(1, seed=HELD_OUT_SEED)
    teacher = _Once(kvzip_plus(model))
    folder = output or Path(model.config.name_or_path)
    for fitted in fit(model, token_batches, teacher):
        out.print(str(fitted.save(folder)), highlight=False)
        if isinstance(fitted, KVzapRegressor):
            found = correlations(model, fitted, held_out, teacher)
            out.print(
                f"  correlation with KVzip+ on other contexts: {found.mean():.2f} on average over "
                f"layers and heads, {found.min():.2f} to {found.max():.2f}",
                highlight=False,
            )
    n_rows = batches * ROWS_PER_BATCH
    rows = track(restored_rows(n_rows), "adapter", total=n_rows, console=err)
    out.print(str(fit_adapter(model, rows, n_rows).save(folder)), highlight=False)
