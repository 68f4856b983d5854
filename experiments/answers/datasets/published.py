"""Published benchmarks, from the hub or from a local copy of the same repository.

Prompts are taken from the columns of the repositories, if they have them. This project only defines
the meaning of the columns, and the metric of each task.
"""

import ast
import os
import random
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from pydantic import Field, TypeAdapter
from pydantic.dataclasses import dataclass

from experiments import UserError, data_of, library, refusing
from experiments.answers.metrics import UNKNOWN
from experiments.answers.sample import Sample, Wanted

Columns = Mapping[str, tuple[str, ...]]
"""From a field of a sample to the names that its column may have."""

_QUESTION_ABOUT_CONTEXT: Columns = {
    "context": ("context",),
    "question": ("question", "input"),
    "answers": ("answers", "answer", "outputs"),
}


@dataclass(frozen=True)
class Published:
    """A repository of the hub, and how to read it.

    Attributes:
        hub: id of the repository.
        split: split of the dataset.
        metrics: metric by task.
        length: default length, if the repository has a folder for each length; 0: it has not.
        task_is: how the repository stores tasks: as a "config", as values of the column `task`
            ("column"), or not at all ("").
        config: name of a task's config, with `{}` for the task.
        required: columns that every row must have.
        question: the question if no column holds it.
        max_new_tokens: longest answer in tokens, if no column holds it.
        one_line: tasks whose answers are a single line.
    """

    hub: str
    split: str = "test"
    metrics: Mapping[str, str] = Field(default_factory=dict)
    length: int = 0
    task_is: str = ""
    config: str = "{}"
    required: Columns = Field(default_factory=lambda: _QUESTION_ABOUT_CONTEXT)
    question: str = ""
    max_new_tokens: int = 64
    one_line: tuple[str, ...] = ()


def make(name: str, wanted: Wanted) -> list[Sample]:
    """Samples of a task of the published set called `name`, chosen by the seed."""
    published, settings = SETS[name], wanted.settings
    samples = list(samples_of(published, name, wanted))
    if not samples:
        place = settings.data or published.hub
        raise UserError(f"{name} has no rows of the task {wanted.task!r} in {place}")
    # Chosen at random, and kept in the order of the rows.
    few = min(settings.samples, len(samples))
    chosen = random.Random(settings.seed).sample(range(len(samples)), few)
    return [samples[index] for index in sorted(chosen)]


def rows_of(published: Published, name: str, wanted: Wanted) -> Iterable[Mapping[str, Any]]:
    """The rows of a repository, checked for the required columns.

    They are loaded from the hub, or from a copy in the folder `name` of the settings' `data`.

    Raises:
        UserError: if the repository cannot be loaded, or lacks a column.
    """
    task, length, data = wanted.task, wanted.length, wanted.settings.data
    source = published.hub
    if data is not None:  # absolute, as a relative folder that is missing would be a hub id
        source = os.path.abspath(os.path.join(os.path.expanduser(data), name))
    where: dict[str, Any] = {"split": published.split}
    where |= {"name": published.config.format(task)} if published.task_is == "config" else {}
    where |= {"data_dir": str(length)} if published.length else {}
    advice = (
        "; give the folder of a local copy with --data, which holds the repository "
        f"{published.hub} as {name}/"
    )
    what = f"cannot load {name} ({task}) from {source}"
    datasets = library("datasets")
    with refusing(what, Exception, advice=advice):  # the types depend on the files
        try:
            rows = datasets.load_dataset(source, **where)
        except datasets.exceptions.DatasetGenerationError as error:
            raise error.__cause__ or error from None  # the cause says which line is broken
    needed = [*published.required.values(), *[("task",)] * (published.task_is == "column")]
    if missing := [" or ".join(names) for names in needed if not set(names) & {*rows.column_names}]:
        raise UserError(
            f"{source} lacks a column: it needs {' and '.join(missing)}, and has "
            f"{', '.join(rows.column_names) or 'none'}"
        )
    return rows


def samples_of(published: Published, name: str, wanted: Wanted) -> Iterator[Sample]:
    """The rows of a task as samples; columns whose value is None count as absent.

    Raises:
        UserError: if a row has no context or no answers.
    """
    task, columns = wanted.task, published.required.items()
    for number, row in enumerate(rows_of(published, name, wanted)):
        if published.task_is == "column" and row["task"] != task:
            continue
        held = {name: value for name, value in row.items() if value is not None}
        found = {k: next((held[n] for n in names if n in held), None) for k, names in columns}
        metric = published.metrics[task]
        answers = _answers(found.get("answers"))
        if not str(found["context"] or "").strip() or not (answers or metric == UNKNOWN):
            raise UserError(f"row {number} of {name} ({task}) has an empty context or answer")
        yield Sample(
            str(found["context"]),
            str(found.get("question") or "") or published.question,
            answers,
            metric,
            int(row.get("max_new_tokens") or published.max_new_tokens),
            str(row.get("answer_prefix") or ""),
            tuple(row.get("all_classes") or ()),
            task in published.one_line,
        )


def _answers(value: Any) -> tuple[str, ...]:
    """The references: of one answer, a list, or a mapping written as text (cloze tasks)."""
    if isinstance(value, str) and value.lstrip().startswith("{'<"):
        value = list(ast.literal_eval(value).values())
    values = value if isinstance(value, (list, tuple)) else [value]
    return tuple(str(answer) for answer in values if answer is not None and str(answer).strip())


SETS = TypeAdapter(dict[str, Published]).validate_python(data_of(__file__))
"""Every published set by its name."""
