"""Retrieval tasks in the words of `facts-llama`, which other models do not know.

RULER's needles in that model's vocabulary: a fact such as `alice tea` among filler words, asked for
as `? alice`. Lengths are words of the context.
"""

from __future__ import annotations

import torch

from experiments import refusing
from experiments.answers.sample import Sample, Wanted
from experiments.testbed.facts import check_vocabulary, draw

TASKS: dict[str, tuple[int, int]] = {
    "single": (1, 1),
    "multikey": (16, 1),
    "multiquery": (16, 4),
}
"""How many facts a context holds, and how many of them are asked for: one needle; one of several
needles; several needles from the same compressed context."""


def make(wanted: Wanted) -> list[Sample]:
    """The samples of a task.

    Raises:
        UserError: if the model speaks other words, or the context is too short for its facts.
    """
    task, length, settings, tokenizer = wanted
    check_vocabulary(tokenizer, settings.model)
    n_facts, asked = TASKS[task]
    n_contexts = -(-settings.samples // asked)
    with refusing(f"facts/{task}@{length}", ValueError):
        batch = draw(n_contexts, length, n_facts, torch.Generator().manual_seed(settings.seed))
    samples = [
        Sample(task, text.context, question, (answer,), "match_all", max_new_tokens=1)
        for text in map(batch.text, range(n_contexts))
        for question, answer in list(zip(text.questions, text.answers, strict=True))[:asked]
    ]
    return samples[: settings.samples]
