"""Training of the model that ships in ``experiments/models/facts-llama``.

    python -m experiments train facts --output DIR

A small Llama is trained on the task of `experiments.testbed.facts`, first with a curriculum of
growing contexts, then with contexts of mixed lengths while the learning rate decays to zero.
"""

from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from experiments.testbed.facts import FactBatch, Task, answer_unseen, build_tokenizer, draw
from experiments.testbed.training.loop import descend, untrained

STAGES: tuple[tuple[int, int], ...] = (
    *((8, 4), (16, 4), (16, 8), (32, 8), (64, 12)),
    *((128, 16), (256, 16), (512, 24), (1024, 24)),
)
"""The curriculum: words in a context, and facts among them."""
CURRICULUM_STEPS, DECAY_STEPS = 5_713, 1_000
"""Numbers of steps of the shipped model, which passed all stages except the last."""
LEARNING_RATE = 1.5e-3
WARM_UP_STEPS = 200
TOKENS_PER_STEP = 6_000
PASS_ACCURACY = 0.97
REVIEW_SHARE = 0.3
"""Share of the batches drawn from stages already passed."""


class Curriculum:
    """Batches of the current stage, and some of passed stages, until all stages are passed."""

    def __init__(self, model: Any, seed: int) -> None:
        self.model, self.generator = model, torch.Generator().manual_seed(seed)
        self.stage, self.accuracy = 0, 0.0

    @property
    def passed(self) -> bool:
        return self.stage == len(STAGES)

    @property
    def rate(self) -> float:
        """The learning rate of the stage."""
        context = STAGES[min(self.stage, len(STAGES) - 1)][0]
        return LEARNING_RATE * (1.0 if context < 256 else 0.5 if context < 512 else 0.25)

    def loss(self, step: int) -> Tensor:
        """The loss of the next batch; a high accuracy on it may pass the current stage."""
        stage = self.stage
        if stage > 0 and torch.rand((), generator=self.generator) < REVIEW_SHARE:
            stage = int(torch.randint(stage, (), generator=self.generator))
        loss, accuracy = loss_of(self.model, _draw_step(*STAGES[stage], self.generator))
        if stage == self.stage:
            self.accuracy += 0.1 * (accuracy - self.accuracy)
            if self.accuracy >= PASS_ACCURACY:
                self.stage, self.accuracy = stage + 1, 0.0
        return loss

    def mixed_loss(self, step: int) -> Tensor:
        """The loss of a batch with the longest context or, half of the time, any shorter length."""
        (shortest, _), (longest, most) = STAGES[0], STAGES[-1]
        context = longest
        if torch.rand((), generator=self.generator) < 0.5:
            # Log-uniform: contexts of 16 to 32 words are as frequent as those of 512 to 1,024.
            share = float(torch.rand((), generator=self.generator))
            context = round(shortest * (longest / shortest) ** share)
        facts = 1 + int(torch.randint(min(most, context // 2), (), generator=self.generator))
        return loss_of(self.model, _draw_step(context, facts, self.generator))[0]


def _draw_step(context: int, facts: int, generator: torch.Generator) -> FactBatch:
    return draw(max(1, TOKENS_PER_STEP // (1 + context + 2 * facts)), context, facts, generator)


def loss_of(model: Any, batch: FactBatch) -> tuple[Tensor, float]:
    """The loss of all answers about a batch, and the share of right answers."""
    facts = batch.answer_ids.shape[1]
    pairs = torch.stack([batch.question_ids[:, :, 1], batch.answer_ids], dim=2).flatten(1)
    question = batch.question_ids[:, 0, :1]
    input_ids = torch.cat([batch.context_ids, question, pairs[:, :-1]], dim=1)
    hidden = model.model(input_ids=input_ids, use_cache=False).last_hidden_state
    # An answer is predicted at its key, so only every second of the last positions needs logits.
    logits = model.lm_head(hidden[:, 1 - 2 * facts :: 2])
    loss = cross_entropy(logits.flatten(0, 1), batch.answer_ids.flatten())
    return loss, (logits.argmax(-1) == batch.answer_ids).float().mean().item()


def train(output: Path, *, seed: int = 0) -> None:
    """Train the model, save it with its tokenizer, and print how many answers are right.

    The same seed gives the same model as long as torch and its number of threads are the same.
    """
    torch.manual_seed(seed)
    model = untrained("facts-llama")
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.05)
    curriculum = Curriculum(model, seed)
    steps = takewhile(lambda _: not curriculum.passed, range(CURRICULUM_STEPS))

    def warmed_up(step: int) -> float:
        return curriculum.rate * min(1.0, (step + 1) / WARM_UP_STEPS)

    def decayed(step: int) -> float:
        return curriculum.rate * (1 - step / DECAY_STEPS)

    descend(model, optimizer, steps, warmed_up, curriculum.loss, CURRICULUM_STEPS)
    descend(model, optimizer, range(DECAY_STEPS), decayed, curriculum.mixed_loss, DECAY_STEPS)
    model.save_pretrained(output)
    build_tokenizer().save_pretrained(output)
    print(evaluate(model).to_string(float_format="{:.1%}".format))


def evaluate(
    model: PreTrainedModel,
    contexts: Sequence[int] = (64, 128, 256, 512, 1024, 1536),
    facts: Sequence[int] = (1, 2, 4, 8, 16, 24),
    answers: int = 1_000,
) -> pd.DataFrame:
    """Share of right answers by words in a context (rows) and facts among them (columns).

    Contexts are drawn from a separate seed, because those of small seeds may be training data.
    """

    def accuracy(words: int, count: int) -> float:
        batches = Task(words, count, -(-answers // count), seed=1_000_000).batches()
        right = [answer_unseen(model, None, batch) == batch.answer_ids for batch in batches]
        return float(torch.cat(right).double().mean())

    shares = [[accuracy(words, count) for count in facts] for words in contexts]
    return pd.DataFrame(shares, index=pd.Index(contexts, name="words"), columns=list(facts))
