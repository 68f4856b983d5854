"""Fit the parameters of learned presses to a shipped model, and save them with it.

    python -m experiments train fitted

Writes the query statistics of ExpectedAttentionStatsPress, the directions of QFilterPress, the head
scores of DuoAttentionPress, the budget curves of LUKVPress, the gates of FastKVzipPress, the
regressors of KVzapPress and the adapter of RestoreKVPress, all fitted on contexts of the facts
task with questions and answers.
"""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor

import hooks_impl
from experiments.loading import load_model
from experiments.testbed.facts import check_vocabulary, draw
from press_core.learned.calibration import Calibration

CONTEXTS = (64, 128, 256, 512, 1024)
"""Words per context, cycled from batch to batch."""
FACTS = 8
TOKENS_PER_BATCH = 4096
BATCHES = 10
MAX_TOKENS = 65_536
"""Limit on the tokens whose hidden states regressors store; all batches together have fewer."""
RESTORED = (256, 512)
"""Words per context for the adapter of RestoreKVPress, cycled from row to row."""
ROWS_PER_BATCH = 200
"""Rows for the adapter, per batch that the other presses are fitted on."""
SEED = 2_000_000
"""Seed of the contexts, different from those of training and evaluation."""
SINKS, RECENT = 4, 28
"""Tokens that streaming heads keep while head scores are measured; the last are the questions."""
ASKED = 3 * FACTS
"""Tokens of all questions and answers after a context, which budget curves take as the future."""
RANK = N_BASE = 4
"""Sizes of the gates; the paper has 16, for hidden states thirty times as wide."""
STEPS = 2_000
"""AdamW steps, for gates and for a regressor with a hidden layer."""


def fact_batches(count: int = BATCHES, seed: int = SEED) -> Iterator[Tensor]:
    """Contexts of the facts task, each followed by all its questions and answers.

    Yields:
        `(B, S)` int64 token ids, about `TOKENS_PER_BATCH` of them.
    """
    generator = torch.Generator().manual_seed(seed)
    for index in range(count):
        words = CONTEXTS[index % len(CONTEXTS)]
        yield _drawn(max(1, TOKENS_PER_BATCH // words), words, generator)


def _drawn(rows: int, words: int, generator: torch.Generator) -> Tensor:
    batch = draw(rows, words, FACTS, generator)
    pairs = torch.cat((batch.question_ids, batch.answer_ids.unsqueeze(-1)), dim=-1)
    return torch.cat((batch.context_ids, pairs.flatten(1)), dim=1)


def train(name: str = "facts-llama", output: Path | None = None, batches: int = BATCHES) -> None:
    """Fit all learned presses to a model of the facts task and save their parameters.

    Args:
        name: name of the model, for `load_model`.
        output: folder to write to; None for that of the model, where presses look for them.
        batches: number of batches to fit on, each of about `TOKENS_PER_BATCH` tokens.

    Raises:
        UserError: if the model has another vocabulary than the facts task.
    """
    model, tokenizer = load_model(name)
    check_vocabulary(tokenizer, name)
    out, err = Console(soft_wrap=True, highlight=False), Console(stderr=True)
    folder = output or Path(model.config.name_or_path)
    kvzip: Any = hooks_impl.KVzipPress()
    plus: Any = hooks_impl.KVzipPress(kvzip_plus_normalization=True)
    effort = {"max_tokens": MAX_TOKENS, "steps": STEPS}
    gates = {"rank": RANK, "n_base": N_BASE, **effort}
    learned: dict[str, Callable[[Iterable[Tensor]], Calibration]] = {
        "query statistics": lambda ids: hooks_impl.ExpectedAttentionStatsPress.collect(model, ids),
        "Q-filters": lambda ids: hooks_impl.QFilterPress.fit(model, ids),
        "head scores": lambda ids: hooks_impl.DuoAttentionPress.measure(model, ids, SINKS, RECENT),
        "budget curves": lambda ids: hooks_impl.LUKVPress.fit(model, ids, horizon=ASKED),
        "gates": lambda ids: hooks_impl.FastKVzipPress.fit(model, ids, kvzip.scores, **gates),
        "linear regressor": lambda ids: hooks_impl.KVzapPress.fit(
            model, ids, plus.scores, model_type="linear", **effort
        ),
        "mlp regressor": lambda ids: hooks_impl.KVzapPress.fit(model, ids, plus.scores, **effort),
    }
    for what, learn in learned.items():
        fitted = learn(track(fact_batches(batches), what, total=batches, console=err))
        out.print(str(fitted.save(folder)))
    count, generator = batches * ROWS_PER_BATCH, torch.Generator().manual_seed(SEED)
    rows = (_drawn(1, RESTORED[index % len(RESTORED)], generator) for index in range(count))
    adapter = hooks_impl.RestoreKVPress.fit(
        model,
        track(rows, "adapter", total=count, console=err),
        compression_ratios=(0.9, 0.95),
        n_following=ASKED,  # the questions and answers: predictions of these are compared
        n_batches=count,
    )
    out.print(str(adapter.save(folder)))
