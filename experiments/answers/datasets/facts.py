"""Retrieval tasks in the words of `facts-llama`, which other models do not know.

RULER's needles in that model's vocabulary: a fact such as `alice tea` among filler words, asked for
as `? alice`. Lengths are words of the context.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from experiments import UserError
from experiments.answers.sample import Sample
from experiments.testbed.facts import VOCABULARY, draw

if TYPE_CHECKING:
    from experiments.answers.datasets import Request


class Task(NamedTuple):
    """How many facts a context holds, and how many of them are asked for."""

    facts: int
    asked: int


TASKS: dict[str, Task] = {
    "single": Task(1, 1),
    "multikey": Task(16, 1),
    "multiquery": Task(16, 4),
}
"""One needle; one of several needles; several needles from the same compressed context."""


def make(request: Request) -> list[Sample]:
    """The samples of a task.

    Raises:
        UserError: if the model speaks other words, or the context is too short for its facts.
    """
    if request.tokenizer.get_vocab() != {word: index for index, word in enumerate(VOCABULARY)}:
        raise UserError(
            f"the dataset facts is in the words of facts-llama, which {request.model!r} does not "
            "share; use synthetic, which any tokenizer can read"
        )
    task = TASKS[request.task]
    n_contexts = -(-request.samples // task.asked)
    try:
        batch = draw(
            n_contexts, request.length, task.facts, torch.Generator().manual_seed(request.seed)
        )
    except ValueError as error:
        raise UserError(f"facts/{request.task}@{request.length}: {error}") from error
    samples = [
        Sample(request.task, text.context, question, (answer,), "match_all", max_new_tokens=1)
        for text in map(batch.text, range(n_contexts))
        for question, answer in list(zip(text.questions, text.answers, strict=True))[: task.asked]
    ]
    return samples[: request.samples]
