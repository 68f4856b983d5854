"""Training of the model that ships in ``experiments/models/facts-llama``.

    python -m experiments.testbed.training.facts --output DIR

A small Llama learns the task of `experiments.testbed.facts` by a curriculum of growing contexts and
then, while its learning rate decays to zero, from contexts of all lengths mixed.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch.nn.functional import cross_entropy
from tqdm import tqdm  # type: ignore[import-untyped]
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from experiments.framework.tables import markdown_table
from experiments.testbed.asking import answer_unseen
from experiments.testbed.facts import (
    BOS,
    FILLER,
    KEYS,
    PAD,
    VALUES,
    VOCABULARY,
    FactBatch,
    build_tokenizer,
    draw,
)
from experiments.testbed.training.common import (
    Output,
    Seed,
    Threads,
    set_threads,
    update,
    write_card,
)

STAGES: tuple[tuple[int, int], ...] = (
    (8, 4),
    (16, 4),
    (16, 8),
    (32, 8),
    (64, 12),
    (128, 16),
    (256, 16),
    (512, 24),
    (1024, 24),
)
"""The curriculum: words in a context, and facts among them."""

LEARNING_RATE = 1.5e-3
WARM_UP_STEPS = 200
TOKENS_PER_STEP = 6_000
PASS_ACCURACY = 0.97
REVIEW_SHARE = 0.3
"""Share of the batches drawn from stages already passed."""

ANSWERS = 1_000
"""Answers evaluated for each size of the task."""
DEPTH_ANSWERS = 400
"""Answers evaluated for each depth."""
DEPTHS = tuple(ninth / 9 for ninth in range(10))
EVALUATION_TOKENS = 65_536
"""Cached tokens held at once by the evaluation, about 2 KiB each."""


def build_model() -> LlamaForCausalLM:
    """The untrained model: 0.95 M float32 parameters, drawn from torch's global generator."""
    config = LlamaConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=16,
        max_position_embeddings=2048,
        rope_parameters={"rope_type": "default", "rope_theta": 1e5},
        tie_word_embeddings=False,
        pad_token_id=VOCABULARY.index(PAD),
        bos_token_id=VOCABULARY.index(BOS),
        eos_token_id=None,
    )
    return LlamaForCausalLM(config)


@dataclass(frozen=True)
class Run:
    """How a training went."""

    seed: int
    curriculum_steps: int
    decay_steps: int
    stages_passed: int
    minutes: float
    threads: int


class _Curriculum:
    """Which contexts to train on next, and how well the newest stage is answered."""

    def __init__(self, generator: torch.Generator) -> None:
        self.stage = 0
        self.accuracy = 0.0
        self.generator = generator

    @property
    def passed(self) -> bool:
        return self.stage == len(STAGES)

    @property
    def rate(self) -> float:
        """The learning rate that suits the stage, relative to the highest."""
        context = STAGES[min(self.stage, len(STAGES) - 1)][0]
        return 1.0 if context < 256 else 0.5 if context < 512 else 0.25

    def draw(self) -> tuple[FactBatch, bool]:
        """A batch, and whether it is of the newest stage rather than of one passed before."""
        stage = self.stage
        if stage > 0 and torch.rand((), generator=self.generator) < REVIEW_SHARE:
            stage = int(torch.randint(stage, (), generator=self.generator))
        return _draw_step(*STAGES[stage], self.generator), stage == self.stage

    def record(self, accuracy: float) -> bool:
        """Take in the accuracy of a batch of the newest stage; true if the stage is passed."""
        self.accuracy += 0.1 * (accuracy - self.accuracy)
        if self.accuracy < PASS_ACCURACY:
            return False
        self.stage += 1
        self.accuracy = 0.0
        return True


def _draw_step(context: int, facts: int, generator: torch.Generator) -> FactBatch:
    return draw(max(1, TOKENS_PER_STEP // (1 + context + 2 * facts)), context, facts, generator)


def _draw_mixed(generator: torch.Generator) -> FactBatch:
    """A batch for the decay: half of them of the longest context, others of any up to it."""
    (shortest, _), (longest, most) = STAGES[0], STAGES[-1]
    context = longest
    if torch.rand((), generator=generator) < 0.5:
        # Uniform in the logarithm: as many contexts of 16 to 32 words as of 512 to 1,024.
        share = float(torch.rand((), generator=generator))
        context = round(shortest * (longest / shortest) ** share)
    facts = 1 + int(torch.randint(min(most, context // 2), (), generator=generator))
    return _draw_step(context, facts, generator)


def _step(
    model: LlamaForCausalLM, optimizer: torch.optim.Optimizer, batch: FactBatch, rate: float
) -> tuple[float, float]:
    """One update at a learning rate; the batch's loss and share of right answers before it."""
    facts = batch.answer_ids.shape[1]
    pairs = torch.stack([batch.question_ids[:, :, 1], batch.answer_ids], dim=2).flatten(1)
    question = batch.question_ids[:, 0, :1]
    input_ids = torch.cat([batch.context_ids, question, pairs[:, :-1]], dim=1)
    hidden = model.model(input_ids=input_ids, use_cache=False).last_hidden_state
    # An answer is predicted at its key, so at every second of the last places; logits elsewhere
    # would cost time and serve nothing.
    logits = model.lm_head(hidden[:, 1 - 2 * facts :: 2])
    loss = cross_entropy(logits.flatten(0, 1), batch.answer_ids.flatten())
    update(model, optimizer, loss, LEARNING_RATE * rate)
    accuracy = (logits.argmax(-1) == batch.answer_ids).float().mean()
    return loss.item(), accuracy.item()


def train(
    output: Output,
    *,
    seed: Seed = 0,
    max_steps: Annotated[
        int, typer.Option(help="The curriculum ends after so many even if stages are left.")
    ] = 8_000,
    max_minutes: Annotated[
        float, typer.Option(help="The curriculum ends after so many even if stages are left.")
    ] = 55.0,
    decay_steps: Annotated[
        int, typer.Option(help="Steps on mixed contexts after it, learning rate falling to zero.")
    ] = 1_000,
    checkpoints: Annotated[
        Path | None, typer.Option(help="Folder for the model each time that a stage is passed.")
    ] = None,
    threads: Threads = None,
    progress: bool = True,
) -> None:
    """Train the model, evaluate it, and save it with its tokenizer and model card.

    The same seed gives the same model as long as torch, its number of threads and the steps spent
    in the curriculum are the same.
    """
    set_threads(threads)
    start = time.monotonic()
    torch.manual_seed(seed)
    model = build_model().train()
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.05)
    curriculum = _Curriculum(torch.Generator().manual_seed(seed))
    steps = 0
    with tqdm(desc="curriculum", unit="step", disable=not progress) as bar:
        while not curriculum.passed and steps < max_steps:
            if time.monotonic() - start > 60 * max_minutes:
                break
            steps += 1
            batch, newest = curriculum.draw()
            rate = curriculum.rate * min(1.0, steps / WARM_UP_STEPS)
            loss, accuracy = _step(model, optimizer, batch, rate)
            if newest and curriculum.record(accuracy):
                bar.write(f"step {steps}: passed {STAGES[curriculum.stage - 1]}")
                if checkpoints is not None:
                    save(model, checkpoints)
            bar.update()
            bar.set_postfix(
                stage=curriculum.stage, accuracy=curriculum.accuracy, loss=loss, refresh=False
            )
    _decay(model, optimizer, curriculum, decay_steps, progress)
    minutes = (time.monotonic() - start) / 60
    run = Run(seed, steps, decay_steps, curriculum.stage, minutes, torch.get_num_threads())
    save(model, output)
    write_card("facts", output, run, _figures(model, evaluate(model), evaluate_depths(model)))


def _decay(
    model: LlamaForCausalLM,
    optimizer: torch.optim.Optimizer,
    curriculum: _Curriculum,
    steps: int,
    progress: bool,
) -> None:
    smooth: float | None = None
    with tqdm(desc="decay", unit="step", total=steps, disable=not progress) as bar:
        for step in range(steps):
            batch = _draw_mixed(curriculum.generator)
            loss, accuracy = _step(model, optimizer, batch, curriculum.rate * (1 - step / steps))
            smooth = accuracy if smooth is None else smooth + 0.02 * (accuracy - smooth)
            bar.update()
            bar.set_postfix(accuracy=smooth, loss=loss, refresh=False)


def save(model: PreTrainedModel, folder: Path) -> None:
    """Save a model together with the task's tokenizer."""
    model.save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)


def evaluate(
    model: PreTrainedModel,
    *,
    contexts: Sequence[int] = (64, 128, 256, 512, 1024, 1536),
    facts: Sequence[int] = (1, 2, 4, 8, 16, 24),
    answers: int = ANSWERS,
    seed: int = 1_000_000,
) -> dict[tuple[int, int], float]:
    """Share of right answers by ``(context, facts)``, each over at least ``answers`` answers.

    The seed must not be one that the model was trained with, whose first contexts it has seen.
    """
    generator = torch.Generator().manual_seed(seed)
    return {
        (context, count): _accuracy(model, context, count, -(-answers // count), generator)
        for context in contexts
        for count in facts
    }


def evaluate_depths(
    model: PreTrainedModel,
    *,
    context: int = 1024,
    depths: Sequence[float] = DEPTHS,
    answers: int = DEPTH_ANSWERS,
    seed: int = 2_000_000,
) -> dict[float, float]:
    """Share of right answers about the only fact in a context, by its depth (0.0 is the start)."""
    generator = torch.Generator().manual_seed(seed)
    return {
        depth: _accuracy(model, context, 1, answers, generator, depths=(depth,)) for depth in depths
    }


def _accuracy(
    model: PreTrainedModel,
    context: int,
    facts: int,
    samples: int,
    generator: torch.Generator,
    depths: Sequence[float] = (),
) -> float:
    was_training = model.training
    model.eval()
    # Each question has its own copy of the cache, so memory grows with their product.
    at_once = max(1, EVALUATION_TOKENS // (context * facts))
    right = 0
    for first in range(0, samples, at_once):
        size = min(at_once, samples - first)
        batch = draw(size, context, facts, generator, depths=depths)
        right += int((answer_unseen(model, None, batch) == batch.answer_ids).sum())
    model.train(was_training)
    return right / (samples * facts)


def _figures(
    model: LlamaForCausalLM,
    by_size: Mapping[tuple[int, int], float],
    by_depth: Mapping[float, float],
) -> dict[str, Any]:
    """What the model card says of the task, and what `evaluate` and `evaluate_depths` measured."""
    counts = sorted({count for _, count in by_size})
    rows = [
        [f"{context:,}", *(f"{100 * by_size[context, count]:.1f}" for count in counts)]
        for context in sorted({context for context, _ in by_size})
    ]
    depths = [f"{depth:.0%}" for depth in by_depth]
    right = [f"{100 * share:.1f}" for share in by_depth.values()]
    return {
        "config": model.config,
        "parameters": model.num_parameters() / 1e6,
        "keys": len(KEYS),
        "values": len(VALUES),
        "filler": len(FILLER),
        "tokens": TOKENS_PER_STEP,
        "stages": len(STAGES),
        "shortest": STAGES[0][0],
        "longest": STAGES[-1][0],
        "answers": ANSWERS,
        "depth_answers": DEPTH_ANSWERS,
        "sizes": markdown_table(["words", *map(str, counts)], rows, left=0),
        "depths": markdown_table(["depth", *depths], [["right", *right]], left=0),
    }


if __name__ == "__main__":
    typer.run(train)
