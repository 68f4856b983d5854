"""Cells of a sweep: one press at one ratio with one mechanism on one task."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from functools import lru_cache
from itertools import groupby
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from experiments import UserError
from experiments.answers.datasets import contexts_of, expand, load
from experiments.answers.metrics import score
from experiments.answers.presses import make_press, takes_ratio
from experiments.answers.sample import Sample
from experiments.answers.settings import Settings
from experiments.loading import load_model
from experiments.pipeline import ContextAnswerer
from press_core import Press

NO_PRESS, BARE = "no press", "bare"


class Cell(NamedTuple):
    """What distinguishes one result from the others of its sweep.

    Attributes:
        dataset: as `NAME/TASK@LENGTH`.
        press: as text, or `NO_PRESS`.
        ratio: of the tokens to evict; None: the press has an amount of its own.
        mechanism: "hook", "patch", or "bare" without a press.
    """

    dataset: str
    press: str
    ratio: float | None
    mechanism: str

    def make(self, seed: int) -> Press | None:
        """The press, or None without one."""
        if self.press == NO_PRESS:
            return None
        return make_press(self.press, self.mechanism, self.ratio, seed)

    @property
    def key(self) -> str:
        """A file name without suffix, different for all cells."""
        words = re.sub(r"[^\w.]+", "-", "_".join(map(str, self)))[:80].strip("-_.")
        return f"{words}_{hashlib.sha256(repr(tuple(self)).encode()).hexdigest()[:10]}"


def plan(settings: Settings) -> list[Cell]:
    """All cells of a sweep, each once; every press is made, so that mistakes show at once.

    Raises:
        UserError: if a dataset or a press is not there.
        HyperparameterError: if a field of a press is out of range.
    """
    tasks = [task for dataset in settings.dataset for task in expand(dataset)]
    cells = []
    for task in tasks:
        if 0 in settings.ratio:
            cells.append(Cell(task, NO_PRESS, 0.0, BARE))
        for press in settings.press:
            for mechanism in settings.mechanism:
                ratios = [ratio for ratio in settings.ratio if ratio]
                known = ratios if takes_ratio(press, mechanism) else [None]
                cells += [Cell(task, press, ratio, mechanism) for ratio in known]
    cells = list(dict.fromkeys(cells))
    for cell in cells:
        cell.make(settings.seed)
    if not cells:
        raise UserError("there is nothing to run: give a ratio, 0 for no press at all")
    return cells


def run_cell(settings: Settings, cell: Cell) -> list[dict[str, Any]]:
    """Answer the questions of a cell.

    What is drawn at random is drawn from the seed of the settings, so that a cell gives the same
    answers in whatever process and after whatever other cells it runs.

    Returns:
        A row per question: which it is, a digest of its context, references, prediction and score.
    """
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    which = settings.model, settings.dtype, settings.attn_implementation, settings.device
    model, tokenizer = _model(*which)
    samples = _samples(cell.dataset, settings.samples, settings.seed, settings.data, *which)
    answerer, press = ContextAnswerer(model, tokenizer), cell.make(settings.seed)
    devices = [model.device] if model.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(settings.seed)
        predictions = [
            prediction
            for batch in _batches(samples, settings.batch_size)
            for prediction in _answers(answerer, batch, press, settings)
        ]
    return [
        {
            "sample": number,
            "context": hashlib.sha256(sample.context.encode()).hexdigest()[:12],
            "question": sample.question,
            "answers": list(sample.answers),
            "prediction": prediction,
            "metric": sample.metric,
            "score": score(sample, prediction),
        }
        for number, (sample, prediction) in enumerate(zip(samples, predictions, strict=True))
    ]


def press_text(settings: Settings, cell: Cell) -> str:
    """The press of a cell with all its fields."""
    press = cell.make(settings.seed)
    return NO_PRESS if press is None else repr(press)


# Kept in the process for the next cell.


@lru_cache(maxsize=1)
def _model(
    name: str, dtype: str, attn_implementation: str, device: str
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    torch_dtype = getattr(torch, dtype)
    return load_model(
        name, dtype=torch_dtype, attn_implementation=attn_implementation, device=device
    )


@lru_cache(maxsize=4)
def _samples(dataset: str, samples: int, seed: int, data: str | None, *model: str) -> list[Sample]:
    return load(dataset, samples, seed, _model(*model)[1], model[0], data)


def _batches(samples: list[Sample], size: int) -> Iterator[list[list[Sample]]]:
    """Contexts, each with its samples, `size` or fewer at a time that are answered alike."""

    def length(group: list[Sample]) -> int:
        return group[0].max_new_tokens

    for _, same in groupby(contexts_of(samples), key=length):
        groups = list(same)
        for start in range(0, len(groups), size):
            yield groups[start : start + size]


def _answers(
    answerer: ContextAnswerer, batch: list[list[Sample]], press: Press | None, settings: Settings
) -> list[str]:
    """Answers to all samples of a batch, in their order."""
    answers = answerer(
        [group[0].context for group in batch],
        [[sample.question for sample in group] for group in batch],
        press=press,
        answer_prefix=[group[0].answer_prefix for group in batch],
        compress_questions=settings.compress_questions,
        max_context_length=settings.max_context_length,
        max_new_tokens=batch[0][0].max_new_tokens,
        **dict(settings.generation),
    )
    return [answer for row in answers for answer in row]
