"""A study of the user's own model: the properties of the model, and what is planned for it.

The duration of an experiment is estimated before it runs: from the number of tokens in its prefills
and of its decode steps, and from the measured time of one prefill and a few steps on the model.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

OptionsT = TypeVar("OptionsT")

SMALL = "On small random models of its architecture: what counts here is code, and not weights."
"""The note of experiments that copy models, wrap them or train them."""


class LeftOutError(Exception):
    """An experiment does not apply to a model; the message is a clause that says why."""


@dataclass(frozen=True)
class OwnModel:
    """The user's own model.

    Attributes:
        model: its name or path, as `load_model` takes it.
        name: its name in tables.
        model_type: from its configuration.
        dtype: dtype in which it is loaded.
        device: device on which it runs.
        parameters: number of its parameters.
        trained: longest context that it was trained for, in tokens.
        heads: number of KV heads in all layers that can be pruned.
        keeps_all: whether all layers keep all tokens, so that none is a sliding window.
        presses: names of the presses that can be opened on it, with both mechanisms.
        token_seconds, step_seconds: seconds per prefill token, and per decode step.
        attn: its attention implementation.
    """

    model: str
    name: str
    model_type: str
    dtype: str
    device: str
    parameters: int
    trained: int
    heads: int
    keeps_all: bool
    presses: tuple[str, ...]
    token_seconds: float
    step_seconds: float
    attn: str = "sdpa"

    @property
    def flags(self) -> str:
        """The flags of a command that loads it in the same way; defaults are left out."""
        flags = {"--dtype": (self.dtype, "float32"), "--device": (self.device, "cpu")}
        return "".join(f" {name} {own}" for name, (own, usual) in flags.items() if own != usual)

    def at_most(self, *lengths: int, then: int = 32) -> tuple[int, ...]:
        """The context lengths after which the model was trained for `then` more tokens.

        Its longest if there is none.
        """
        longest = max(1, self.trained - then)
        return tuple(n for n in lengths if n <= longest) or (longest,)

    def opened(self, names: Sequence[str]) -> tuple[str, ...]:
        """The presses among `names` that can be opened on the model.

        Raises:
            LeftOutError: if there is none.
        """
        found = tuple(name for name in names if name in self.presses)
        if not found:
            raise LeftOutError(f"none of {', '.join(names)} can be opened on it")
        return found


@dataclass(frozen=True)
class Planned(Generic[OptionsT]):
    """An experiment's plan for the user's own model.

    Attributes:
        options: the options that it runs with.
        tokens: approximate number of tokens in its prefills.
        steps: approximate number of its decode steps.
        seconds: approximate time that does not depend on the model.
        note: a sentence that readers of the results need; may be empty.
    """

    options: OptionsT
    tokens: float = 0
    steps: float = 0
    seconds: float = 0
    note: str = ""

    def duration(self, own: OwnModel) -> float | None:
        """Estimated seconds; None if the experiment gives no estimate."""
        of_model = self.tokens * own.token_seconds + self.steps * own.step_seconds
        return of_model + self.seconds or None
