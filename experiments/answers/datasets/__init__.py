"""Datasets by name: generated here, or published and loaded from the hub or a local copy.

A dataset is written `NAME`, `NAME/TASK`, `NAME@LENGTH` or `NAME/TASK@LENGTH`; without a task all of
its tasks are meant. Lengths are tokens (of `facts`: words).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from experiments import UserError
from experiments.answers.datasets import facts, needle, published, synthetic
from experiments.answers.sample import Sample

_NAME = re.compile(r"([\w-]+)(?:/([\w-]+))?(?:@(\d+))?")


class Request(NamedTuple):
    """What to make samples of.

    Attributes:
        task: of the dataset.
        length: of each context with its question, in tokens.
        samples: how many questions.
        fraction: of the questions of a published dataset, in place of `samples`; None: not given.
        depths: where a needle is to be put, from 0 to 1, a sample each; none: evenly spread.
        seed: of everything that is drawn.
        tokenizer: counts the tokens.
        model: what messages call the model.
        data: folder with local copies of published datasets, or None.
    """

    task: str
    length: int
    samples: int
    seed: int
    tokenizer: PreTrainedTokenizerBase
    model: str
    data: str | None
    fraction: float | None = None
    depths: tuple[float, ...] = ()


class Source(NamedTuple):
    """A dataset.

    Attributes:
        tasks: that it has.
        length: where none is asked for; 0: samples have the lengths that they have.
        make: the samples of a request.
    """

    tasks: tuple[str, ...]
    length: int
    make: Callable[[Request], list[Sample]]


SOURCES: dict[str, Source] = {
    "facts": Source(tuple(facts.TASKS), 512, facts.make),
    "synthetic": Source(tuple(synthetic.TASKS), 4096, synthetic.make),
    "needle": Source(("essays",), 8192, needle.make),
    **{
        name: Source(found.tasks, found.length, published.maker(found))
        for name, found in published.SETS.items()
    },
}
"""Every dataset by its name."""


def expand(text: str) -> list[str]:
    """The tasks that `text` names, each as `NAME/TASK` or `NAME/TASK@LENGTH`.

    Raises:
        UserError: if there is no such dataset or task, or if it has no length to choose.
    """
    name, task, length = _parse(text)
    source = SOURCES[name]
    if task is not None and task not in source.tasks:
        raise UserError(f"{name} has no task {task!r}; it has {', '.join(source.tasks)}")
    if length is not None and not source.length:
        raise UserError(f"{text!r} asks for a length, and samples of {name} have their own")
    at = f"@{length or source.length}" if source.length else ""
    return [f"{name}/{each}{at}" for each in ([task] if task else source.tasks)]


def load(
    text: str,
    samples: int,
    seed: int,
    tokenizer: PreTrainedTokenizerBase,
    model: str,
    data: str | None = None,
    *,
    fraction: float | None = None,
    depths: Sequence[float] = (),
) -> list[Sample]:
    """The samples of one task, `NAME/TASK` or `NAME/TASK@LENGTH`.

    Args:
        samples: how many questions at most.
        seed: the same seed gives the same samples.
        tokenizer, model: for which, and what messages call it.
        data: folder with local copies of published datasets, one folder for each; None: the hub.
        fraction: share of the questions of a published dataset to take, in place of `samples`.
        depths: where a needle is to be put, a sample each, in place of `samples`.

    Raises:
        UserError: if they cannot be made or loaded.
    """
    name, task, length = _parse(text)
    source = SOURCES[name]
    (task,) = [task] if task else source.tasks
    if fraction is not None and name not in published.SETS:
        raise UserError(f"{name} is made here, as large as asked for: give samples, no fraction")
    if depths and name != "needle":
        raise UserError(f"{name} has no needle to put at a depth; leave out needle_depth")
    what = task, length or source.length, samples, seed
    request = Request(*what, tokenizer, model, data, fraction, tuple(depths))
    return source.make(request)


def _parse(text: str) -> tuple[str, str | None, int | None]:
    found = _NAME.fullmatch(text)
    name = found[1] if found else text
    if found is None or name not in SOURCES:
        raise UserError(
            f"there is no dataset {text!r}; write NAME, NAME/TASK or NAME/TASK@LENGTH, where NAME "
            f"is one of {', '.join(SOURCES)}"
        )
    return name, found[2], int(found[3]) if found[3] else None


def contexts_of(samples: Sequence[Sample]) -> list[list[Sample]]:
    """Samples in a row that share a context and how they are answered, so that one cache does."""
    groups: list[list[Sample]] = []
    for sample in samples:
        last = groups[-1][-1] if groups else None
        if last is not None and _shared(last) == _shared(sample):
            groups[-1].append(sample)
        else:
            groups.append([sample])
    return groups


def _shared(sample: Sample) -> tuple[str, str, int]:
    return sample.context, sample.answer_prefix, sample.max_new_tokens
