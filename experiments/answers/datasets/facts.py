"""Retrieval tasks in the vocabulary of `facts-llama`, which other models do not have.

They are RULER's needle tasks in that vocabulary: a fact such as `alice tea` among filler words, and
the question `? alice`. Lengths are in words of the context.
"""

import torch

from experiments import refusing
from experiments.answers.sample import Sample, Wanted
from experiments.testbed.facts import check_vocabulary, draw

TASKS = {"single": (1, 1), "multikey": (16, 1), "multiquery": (16, 4)}
"""Number of facts in a context, and of questions about it: one needle; one of several needles;
several needles from the same compressed context."""


def check(task: str, length: int) -> None:
    """Check that the facts of a task fit in a context of `length` words.

    Raises:
        UserError: if they do not.
    """
    with refusing(f"facts/{task}@{length}", ValueError):
        draw(1, length, TASKS[task][0], torch.Generator())


def make(wanted: Wanted) -> list[Sample]:
    """The samples of a task.

    Raises:
        UserError: if the model has another vocabulary, or the context is too short for its facts.
    """
    task, length, settings, tokenizer = wanted
    check_vocabulary(tokenizer, settings.model)
    n_facts, n_questions = TASKS[task]
    n_contexts = -(-settings.samples // n_questions)
    check(task, length)
    batch = draw(n_contexts, length, n_facts, torch.Generator().manual_seed(settings.seed))
    samples = [
        Sample(text.context, question, (answer,), "match_all", max_new_tokens=1)
        for text in map(batch.text, range(n_contexts))
        for question, answer in list(zip(text.questions, text.answers, strict=True))[:n_questions]
    ]
    return samples[: settings.samples]
