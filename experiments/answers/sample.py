"""Samples of datasets: questions about contexts."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from transformers import PreTrainedTokenizerBase

if TYPE_CHECKING:  # which lists the datasets by name
    from experiments.answers.settings import Settings


class Sample(NamedTuple):
    """One question about one context. Samples with the same context may share its cache.

    Attributes:
        context: the text that is compressed.
        question: the text after the context, separators included.
        answers: the reference answers.
        metric: name of the metric in `metrics` that scores a prediction, or `metrics.UNKNOWN`.
        max_new_tokens: longest answer, in tokens.
        answer_prefix: beginning of the answer, given to the model.
        choices: all possible answers of the task, for metrics that choose among them.
        one_line: score only the first line of a prediction.
    """

    context: str
    question: str
    answers: tuple[str, ...]
    metric: str
    max_new_tokens: int
    answer_prefix: str = ""
    choices: tuple[str, ...] = ()
    one_line: bool = False


class Wanted(NamedTuple):
    """A request for samples of a dataset.

    Attributes:
        task: a task of the dataset.
        length: tokens of context and question; 0: published samples, whose length is fixed.
        settings: hold the number of samples and the seed.
        tokenizer: counts the tokens.
    """

    task: str
    length: int
    settings: Settings
    tokenizer: PreTrainedTokenizerBase
