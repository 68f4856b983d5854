"""The study: what hooks and patches touch, break and cost, measured side by side."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # this imports pandas, which would slow --help down
    from experiments.framework.experiment import AnyExperiment

QUESTION = (
    "To change what a transformer keeps in its KV cache, must you patch its code, or are hooks "
    "enough, and what does each cost?"
)
"""What the study asks."""

EXPERIMENTS: dict[str, str] = {
    "equivalence": "Check that both mechanisms give bit-identical results.",
    "architectures": "Test decoders of transformers with tiny random weights.",
    "intrusiveness": "Audit what each mechanism, and each library, changes.",
    "isolation": "Show which other models, copies and caches a press changes.",
    "coexistence": "Test presses together with accelerate, PEFT, torch.compile...",
    "overhead": "Time decode steps while a press is open, by mechanism.",
    "throughput": "Measure speed, memory and maximum context, on any model.",
    "headwise": "Compare budgets shared among heads with equal ones.",
    "quality": "Measure how eviction changes answer accuracy, by press.",
    "error": "Show in which layers and heads eviction causes errors.",
    "evaluate": "Sweep models, presses and datasets; can be interrupted.",
    "streaming": "Stream thousands of tokens through bounded caches.",
    "seeds": "Draw contexts from other seeds: which findings hold?",
    "trace": "Follow one forward step by step, hook and patch side by side.",
}
"""Modules of `experiments.questions`, in the order of the report, with their commands' help.

Each module defines `EXPERIMENT`, an `experiments.framework.experiment.Experiment`.
"""


class UserError(Exception):
    """A request cannot be carried out; the message says why and what to do instead."""


@contextmanager
def refusing(what: str, *errors: type[Exception], advice: str = "") -> Iterator[None]:
    """Turn `errors` raised in the block into a `UserError`.

    Args:
        what: what failed, such as "cannot read a.csv"; the reason is appended.
        advice: what to do, appended to the reason.
    """
    try:
        yield
    except errors as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split()) or repr(error)
        raise UserError(f"{what}: {reason:.300}".rstrip(".") + advice) from error


def data_of(module: str | Path) -> Any:
    """The content of the YAML file beside a module and of the same name.

    Args:
        module: path of the module, or of the YAML file.
    """
    import yaml  # here, so that --help is not slowed down

    return yaml.safe_load(Path(module).with_suffix(".yaml").read_text(encoding="utf-8"))


def library(name: str, extra: str = "evaluate", otherwise: str = "") -> Any:
    """Import a module of an optional dependency.

    Args:
        extra: the extra of this package that installs it.
        otherwise: an alternative to installing it, appended to the error message.

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
