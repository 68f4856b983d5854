"""Datasets by name: generated here, or published and loaded from the hub or a local copy.

A dataset is written `NAME`, `NAME/TASK`, `NAME@LENGTH` or `NAME/TASK@LENGTH`; without a task it
means all of its tasks. Lengths are in tokens (for `facts`: in words).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

from transformers import PreTrainedTokenizerBase

from experiments import UserError
from experiments.answers.datasets import facts, needle, published, synthetic
from experiments.answers.sample import Sample, Wanted

if TYPE_CHECKING:
    from experiments.answers.settings import Settings

_NAME = re.compile(r"([\w-]+)(?:/([\w-]+))?(?:@([1-9]\d*))?")


class Source(NamedTuple):
    """A dataset.

    Attributes:
        tasks: names of its tasks.
        length: default length; 0: the lengths of its samples are fixed.
        check: raises a `UserError` if a length is too short for a task.
        make: makes the requested samples.
    """

    tasks: tuple[str, ...]
    length: int
    make: Callable[[Wanted], list[Sample]]
    check: Callable[[str, int], None] = lambda task, length: None


SOURCES: dict[str, Source] = {
    "facts": Source(tuple(facts.TASKS), 512, facts.make, facts.check),
    "synthetic": Source(tuple(synthetic.TASKS), 4096, synthetic.make),
    "needle": Source(("essays",), 8192, needle.make),
    **{
        name: Source(tuple(found.metrics), found.length, partial(published.make, name))
        for name, found in published.SETS.items()
    },
}
"""Every dataset by its name."""


def expand(text: str) -> list[str]:
    """The tasks that `text` names, each as `NAME/TASK` or `NAME/TASK@LENGTH`.

    Raises:
        UserError: if there is no such dataset or task, if its lengths are fixed, or too short.
    """
    name, task, length = _parse(text)
    source = SOURCES[name]
    if task is not None and task not in source.tasks:
        raise UserError(f"{name} has no task {task!r}; it has {', '.join(source.tasks)}")
    if length is not None and not source.length:
        raise UserError(f"{text!r} asks for a length, and samples of {name} have their own")
    at = f"@{length or source.length}" if source.length else ""
    tasks = [task] if task else source.tasks
    if length is not None:
        for each in tasks:
            source.check(each, length)
    return [f"{name}/{each}{at}" for each in tasks]


def load(text: str, settings: Settings, tokenizer: PreTrainedTokenizerBase) -> list[Sample]:
    """Make or load the samples of one task, `NAME/TASK` or `NAME/TASK@LENGTH`.

    Raises:
        UserError: if they cannot be made or loaded.
    """
    name, task, length = _parse(text)
    source = SOURCES[name]
    (task,) = [task] if task else source.tasks
    if settings.needle_depth and name != "needle":
        raise UserError(f"{name} has no needle to put at a depth; leave out needle_depth")
    return source.make(Wanted(task, length or source.length, settings, tokenizer))


def _parse(text: str) -> tuple[str, str | None, int | None]:
    found = _NAME.fullmatch(text)
    if found is None or found[1] not in SOURCES:
        raise UserError(
            f"there is no dataset {text!r}; write NAME or NAME/TASK, or add @LENGTH, from 1, where "
            f"NAME is one of {', '.join(SOURCES)}"
        )
    return found[1], found[2], int(found[3]) if found[3] else None


def contexts_of(samples: Iterable[Sample]) -> list[list[Sample]]:
    """Group consecutive samples that can share a cache: same context, prefix and answer length."""
    groups = groupby(samples, lambda x: (x.context, x.answer_prefix, x.max_new_tokens))
    return [list(group) for _, group in groups]
