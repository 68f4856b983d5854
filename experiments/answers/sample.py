"""What every dataset is made of."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from transformers import PreTrainedTokenizerBase

if TYPE_CHECKING:  # which lists the datasets by name
    from experiments.answers.settings import Settings


class Sample(NamedTuple):
    """One question about one context. Samples with the same context may share its cache.

    Attributes:
        task: which part of the dataset it belongs to.
        context: what is compressed.
        question: what follows the context, separators included.
        answers: the references.
        metric: name of the one of `metrics` that scores a prediction, or `metrics.UNKNOWN`.
        max_new_tokens: how long an answer may be.
        answer_prefix: how the answer begins, given to the model.
        choices: all answers that the task knows, for metrics that choose among them.
        one_line: score the first line of a prediction only.
    """

    task: str
    context: str
    question: str
    answers: tuple[str, ...]
    metric: str
    max_new_tokens: int
    answer_prefix: str = ""
    choices: tuple[str, ...] = ()
    one_line: bool = False


class Wanted(NamedTuple):
    """What samples a dataset is asked for.

    Attributes:
        task: of the dataset.
        length: in tokens with the question; 0: samples have the lengths that they have.
        settings: say how many, and from which seed.
        tokenizer: counts the tokens.
    """

    task: str
    length: int
    settings: Settings
    tokenizer: PreTrainedTokenizerBase
