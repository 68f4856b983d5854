"""Cells of a sweep: one press at one ratio with one mechanism on one task, and its result."""

import hashlib
import json
from collections.abc import Iterator
from functools import lru_cache
from itertools import groupby
from time import perf_counter
from typing import Any, NamedTuple

import torch
from pydantic import BaseModel
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from experiments import UserError
from experiments.answers.answerer import Answered, ContextAnswerer
from experiments.answers.datasets import contexts_of, expand, load
from experiments.answers.metrics import score
from experiments.answers.presses import make_press, takes
from experiments.answers.sample import Sample
from experiments.answers.settings import Settings
from experiments.framework.intervals import mean_interval
from experiments.loading import load_model
from press_core import Tokens
from press_core.scope import InstalledPress

NO_PRESS, BARE = "no press", "bare"


class Cell(NamedTuple):
    """What distinguishes a result from the others of its sweep.

    Attributes:
        dataset: as `NAME/TASK@LENGTH`.
        press: as text, or `NO_PRESS`.
        ratio: share of the tokens to evict; None: the press gets no ratio.
        mechanism: "hook", "patch", or "bare" without a press.
        budget: number of tokens to keep, instead of a ratio; if both are None, the press's own
            fields set the amount.
    """

    dataset: str
    press: str
    ratio: float | None
    mechanism: str
    budget: int | None = None

    def make(self, seed: int) -> InstalledPress | None:
        """The press, or None without one."""
        if self.press == NO_PRESS:
            return None
        amount = self.ratio if self.budget is None else Tokens(self.budget)
        return make_press(self.press, self.mechanism, amount, seed)

    @property
    def key(self) -> str:
        """A text that identifies the cell."""
        return json.dumps(self)


class Prediction(BaseModel):
    """The answer to one question of a cell.

    Attributes:
        sample: number of the question within the cell.
        context: a digest of the context.
        score: None if the reference answers are not published.
    """

    sample: int
    context: str
    question: str
    answers: list[str]
    prediction: str
    metric: str
    score: float | None


class Result(BaseModel):
    """A finished cell.

    Attributes:
        press_text: the press with all its fields.
        evicted: measured share of evicted tokens, mean over contexts.
        seconds: how long it took, loading included.
    """

    cell: Cell
    press_text: str
    evicted: float
    seconds: float
    predictions: list[Prediction]

    def summary(self) -> dict[str, Any]:
        """A row of a table: the score, None if unknown, with its interval over contexts."""
        scores = [each.score for each in self.predictions if each.score is not None]
        contexts = [each.context for each in self.predictions if each.score is not None]
        low, high = mean_interval(scores, contexts)
        return {
            **self.cell._asdict(),
            "score": sum(scores) / len(scores) if scores else None,
            "low": low,
            "high": high,
            "questions": len(self.predictions),
            **self.model_dump(include={"evicted", "press_text", "seconds"}),
        }


def plan(settings: Settings) -> list[Cell]:
    """All cells of a sweep, without duplicates; every press is built once, to find errors early.

    Raises:
        UserError: if there is no such dataset or press.
        HyperparameterError: if a field of a press is out of range.
    """
    cells = []
    for task in [task for dataset in settings.dataset for task in expand(dataset)]:
        if 0 in settings.ratio:
            cells.append(Cell(task, NO_PRESS, 0.0, BARE))
        for press in settings.press:
            for mechanism in settings.mechanism:
                amounts = _amounts(settings, press, mechanism)
                cells += [Cell(task, press, ratio, mechanism, n) for ratio, n in amounts]
    cells = list(dict.fromkeys(cells))
    for cell in cells:
        cell.make(settings.seed)
    return cells


Amounts = list[tuple[float | None, int | None]]
"""Pairs of a ratio and a budget, one of them None; both are None if a press has its own amount."""


def _amounts(settings: Settings, press: str, mechanism: str) -> Amounts:
    """The ratios and budgets of the settings that a press can take.

    Raises:
        UserError: if the text describes no press, or one that takes only a ratio while the settings
            give only budgets.
    """
    kinds = takes(press, mechanism)
    amounts: Amounts = [(ratio, None) for ratio in settings.ratio if ratio and "ratio" in kinds]
    amounts += [(None, budget) for budget in settings.budget if "budget" in kinds]
    if amounts or "ratio" not in kinds:
        return amounts or [(None, None)]
    if settings.budget:
        raise UserError(
            f"{press} takes a ratio, and no number of tokens; give a ratio, or write `budget` "
            "where it takes one"
        )
    return []


def run_cell(settings: Settings, cell: Cell) -> Result:
    """Answer the questions of a cell.

    Generators are seeded with the seed of the settings, so a cell gives the same answers in any
    process and after any other cells.
    """
    start = perf_counter()
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    model, tokenizer = loaded(settings)
    samples, press = _samples(cell.dataset, settings), cell.make(settings.seed)
    if isinstance(samples, UserError):
        raise samples
    answerer = ContextAnswerer(model, tokenizer)
    with torch.random.fork_rng(devices=[model.device] if model.device.type == "cuda" else []):
        torch.manual_seed(settings.seed)
        batches = list(_batches(samples, settings.batch_size))
        answered = [_answered(answerer, batch, press, settings) for batch in batches]
    texts = [text for batch in answered for row in batch.answers for text in row]
    evicted = sum(a.evicted * len(b) for a, b in zip(answered, batches, strict=True))
    return Result(
        cell=cell,
        press_text=NO_PRESS if press is None else repr(press),
        evicted=evicted / sum(len(batch) for batch in batches),
        seconds=round(perf_counter() - start, 2),
        predictions=[
            Prediction(
                sample=number,
                context=hashlib.sha256(sample.context.encode()).hexdigest()[:12],
                question=sample.question,
                answers=list(sample.answers),
                prediction=text,
                metric=sample.metric,
                score=score(sample, text),
            )
            for number, (sample, text) in enumerate(zip(samples, texts, strict=True))
        ],
    )


# Model and samples stay in the process for the next cell.


def forget() -> None:
    """Free the cached model and samples of earlier cells."""
    loaded.cache_clear()
    _samples.cache_clear()


@lru_cache(maxsize=1)
def loaded(settings: Settings) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model of the settings, and its tokenizer."""
    return load_model(
        settings.model,
        dtype=settings.dtype,
        attn_implementation=settings.attn_implementation,
        device=settings.device,
        trust_remote_code=settings.trust_remote_code,
        **settings.model_kwargs,
    )


@lru_cache(maxsize=4)
def _samples(dataset: str, settings: Settings) -> list[Sample] | UserError:
    """The samples, or why there are none: what cannot be loaded is not tried for every cell."""
    try:
        return load(dataset, settings, loaded(settings)[1])
    except UserError as error:
        return error


def _batches(samples: list[Sample], size: int) -> Iterator[list[list[Sample]]]:
    """Batches of at most `size` contexts with equal `max_new_tokens`, each with its samples."""
    for _, same in groupby(contexts_of(samples), key=lambda group: group[0].max_new_tokens):
        groups = list(same)
        for start in range(0, len(groups), size):
            yield groups[start : start + size]


def _answered(
    answerer: ContextAnswerer,
    batch: list[list[Sample]],
    press: InstalledPress | None,
    settings: Settings,
) -> Answered:
    """Answers to all samples of a batch, in their order."""
    generation = {"max_new_tokens": batch[0][0].max_new_tokens, **settings.generation}
    if settings.max_new_tokens is not None:
        generation["max_new_tokens"] = settings.max_new_tokens
    generation["num_return_sequences"] = 1  # whatever the model's generation config says
    return answerer.answered(
        [group[0].context for group in batch],
        [[sample.question for sample in group] for group in batch],
        press=press,
        answer_prefix=[group[0].answer_prefix for group in batch],
        compress_questions=settings.compress_questions,
        max_context_length=settings.max_context_length,
        **generation,
    )
