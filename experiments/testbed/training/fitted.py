"""What learned presses know about a shipped model: measured, and saved beside it.

    python -m experiments train fitted

Writes the query statistics of ExpectedAttentionStatsPress, the directions of QFilterPress, the head
scores of DuoAttentionPress, the budget curves of LUKVPress, the gates of FastKVzipPress, the
regressors of KVzapPress and the adapter of RestoreKVPress, all learned from contexts of the facts
task with questions about them; and says how well gates and regressors predict other contexts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
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
    FastKVzipPress,
    KVzapPress,
    KVzipPress,
    LUKVPress,
    QFilterPress,
    RestoreKVPress,
)
from hooks_impl.mechanism import Collector
from press_core import AttentionCall, Needs
from press_core.learned.calibration import Calibration
from press_core.learned.fast_kvzip import KVzipGates
from press_core.learned.kvzap import SMALLEST_SCORE, KVzapRegressor, kvzap_scores
from press_core.learned.running import Scores, run

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
ASKED = 3 * FACTS
"""Tokens of all questions and answers behind a context: the future, for budget curves."""
RANK = N_BASE = 4
"""Of the gates: the 16 of the paper are for hidden states thirty times as wide."""
STEPS = 2_000
"""Of AdamW, for gates and for a regressor with a hidden layer."""


def fact_batches(count: int = BATCHES, seed: int = SEED) -> Iterator[Tensor]:
    """Contexts of the facts task, each with all questions about it and their answers.

    Yields:
        `(B, S)` int64 token ids, about `TOKENS_PER_BATCH` of them.
    """
    generator = torch.Generator().manual_seed(seed)
    for index in range(count):
        words = CONTEXTS[index % len(CONTEXTS)]
        yield _asked(max(1, TOKENS_PER_BATCH // words), words, generator)


def _asked(rows: int, words: int, generator: torch.Generator) -> Tensor:
    batch = draw(rows, words, FACTS, generator)
    asked = torch.cat((batch.question_ids, batch.answer_ids.unsqueeze(-1)), dim=-1)
    return torch.cat((batch.context_ids, asked.flatten(1)), dim=1)


def fit(
    model: PreTrainedModel,
    token_batches: Callable[[str], Iterable[Tensor]],
    kvzip: Scores,
    kvzip_plus: Scores,
) -> Iterator[Calibration]:
    """All that learned presses want to know about `model`, one after the other.

    Args:
        token_batches: makes the batches for what it is told is to be learned.
        kvzip: scores that the gates of FastKVzipPress learn.
        kvzip_plus: scores that the regressors of KVzapPress learn.
    """
    yield ExpectedAttentionStatsPress.collect(model, token_batches("query statistics"))
    yield QFilterPress.fit(model, token_batches("Q-filters"))
    yield DuoAttentionPress.measure(model, token_batches("head scores"), SINKS, RECENT)
    yield LUKVPress.fit(model, token_batches("budget curves"), horizon=ASKED)
    effort = {"max_tokens": MAX_TOKENS, "steps": STEPS}
    size = {"rank": RANK, "n_base": N_BASE}
    yield FastKVzipPress.fit(model, token_batches("gates"), kvzip, **size, **effort)
    for kind in ("linear", "mlp"):
        batches = token_batches(f"{kind} regressor")
        yield KVzapPress.fit(model, batches, kvzip_plus, model_type=kind, **effort)


def scores_of_kvzip(model: PreTrainedModel, plus: bool = False) -> Scores:
    """The scores of KVzip, which gates learn; or those of KVzip+, which regressors do."""
    teacher: Any = KVzipPress(kvzip_plus_normalization=plus)
    return lambda model, ids: teacher.scores(model, ids)


def correlations(
    model: PreTrainedModel, fitted: KVzapRegressor | KVzipGates, ids: Tensor, scores: Scores
) -> Tensor:
    """How well `fitted` predicts the logarithm of `scores` of the tokens `ids` `(B, S)`.

    Returns:
        `(L, H_kv)`: Pearson's correlation over all tokens.
    """
    predicted: dict[int, Tensor] = {}

    def see(call: AttentionCall) -> None:
        layer = call.site.layer_idx
        if isinstance(fitted, KVzipGates):
            told = fitted.of_layer(layer)(call.hidden_states)
            predicted[layer] = told.clamp(min=SMALLEST_SCORE).log()
        else:
            predicted[layer] = kvzap_scores(call, fitted)

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
    out, err = Console(soft_wrap=True, highlight=False), Console(stderr=True)

    def token_batches(learned: str) -> Iterable[Tensor]:
        return track(fact_batches(batches), learned, total=batches, console=err)

    (held_out,) = fact_batches(1, seed=HELD_OUT_SEED)
    teachers = scores_of_kvzip(model), scores_of_kvzip(model, plus=True)
    folder = output or Path(model.config.name_or_path)
    for fitted in fit(model, token_batches, *teachers):
        out.print(str(fitted.save(folder)))
        if isinstance(fitted, KVzapRegressor | KVzipGates):
            plus = isinstance(fitted, KVzapRegressor)
            found = correlations(model, fitted, held_out, teachers[plus])
            out.print(
                f"  correlation with KVzip{'+' if plus else ''} on other contexts: "
                f"{found.mean():.2f} on average over layers and heads, {found.min():.2f} to "
                f"{found.max():.2f}"
            )
    count, generator = batches * ROWS_PER_BATCH, torch.Generator().manual_seed(SEED)
    rows = (_asked(1, RESTORED[index % len(RESTORED)], generator) for index in range(count))
    adapter = RestoreKVPress.fit(
        model,
        track(rows, "adapter", total=count, console=err),
        compression_ratios=(0.9, 0.95),
        n_following=ASKED,  # the questions and answers: predictions of these are compared
        n_batches=count,
    )
    out.print(str(adapter.save(folder)))
