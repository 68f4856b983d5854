"""The study: what hooks and patches touch, break and cost, measured side by side."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # help has to come at once, and this imports pandas
    from experiments.framework.experiment import AnyExperiment

QUESTION = (
    "To change what a transformer keeps in its KV cache, must you patch its code, or are hooks "
    "enough, and what does each cost?"
)
"""What the study asks."""

EXPERIMENTS: dict[str, str] = {
    "equivalence": "Check that both mechanisms leave the same bits.",
    "architectures": "Sweep every decoder of transformers with tiny weights.",
    "intrusiveness": "Audit what each mechanism, and each library, touches.",
    "isolation": "See which other models, copies and caches a press changes.",
    "coexistence": "See who gets along with accelerate, PEFT, torch.compile...",
    "overhead": "Time decode steps with a press open, by mechanism.",
    "throughput": "Measure speed, memory and what fits, on any model.",
    "headwise": "Compare budgets shared among heads with equal ones.",
    "quality": "Measure what eviction costs in answers, press by press.",
    "error": "Tell in which layers and heads an eviction hurts.",
    "evaluate": "Sweep models, presses and datasets; can be interrupted.",
    "streaming": "Stream thousands of tokens through bounded caches.",
    "seeds": "Draw contexts from other seeds: which findings hold?",
    "trace": "Follow one forward step by step, hook and patch side by side.",
}
"""Modules of `experiments.questions`, in the order of the report, and the help of their commands.

Each has an `EXPERIMENT`, an `experiments.framework.experiment.Experiment`.
"""


class UserError(Exception):
    """What was asked for cannot be done; the message says why, and what to ask for instead."""


@contextmanager
def refusing(what: str, *errors: type[Exception], advice: str = "") -> Iterator[None]:
    """Make a `UserError` of `errors` of the block: what cannot be done, why, and what to do."""
    try:
        yield
    except errors as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise UserError(f"{what}: {reason:.300}{advice}") from error


def library(name: str, extra: str = "evaluate", otherwise: str = "") -> Any:
    """A module of a library that is not always there.

    Args:
        extra: of this package, which brings it.
        otherwise: what else to do where it is not installed.

    Raises:
        UserError: if it is not installed.
    """
    try:
        return import_module(name)
    except ImportError as error:
        raise UserError(
            f"{name.partition('.')[0]} is needed here, and not installed; "
            f'pip install "hook-or-patch[{extra}]"{otherwise}'
        ) from error


def load_experiments() -> list[AnyExperiment]:
    """All experiments of the study, in the order of the report."""
    return [import_module(f"experiments.questions.{name}").EXPERIMENT for name in EXPERIMENTS]
