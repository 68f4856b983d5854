"""A study of a model of the user's own: what it has to know of the model, and what it will do.

How long an experiment will take is said before it runs: from the tokens that it reads and the steps
that it decodes, and from what one prefill and a few steps take on the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

OptionsT = TypeVar("OptionsT")

SMALL = "On small random models of its architecture: what counts here is code, and not weights."
"""The note of experiments that copy models, wrap them or train them."""


class LeftOutError(Exception):
    """An experiment has nothing to say of a model; the message says why, as a clause."""


@dataclass(frozen=True)
class OwnModel:
    """A model of the user's own.

    Attributes:
        model: as `load_model` takes it.
        name: what tables call it.
        model_type: of its configuration.
        dtype: in which it is loaded.
        device: where it runs.
        parameters: how many it has.
        trained: tokens of the longest context that it was made for.
        heads: KV heads of all layers that can be pruned.
        keeps_all: whether each of its layers keeps all tokens.
        presses: names of those that can be opened on it, with both mechanisms.
        token_seconds, step_seconds: that a token of a prefill, and a decode step, take.
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

    @property
    def flags(self) -> str:
        """How a command says in what and where it is loaded; empty for what it does by itself."""
        flags = {"--dtype": (self.dtype, "float32"), "--device": (self.device, "cpu")}
        return "".join(f" {name} {own}" for name, (own, usual) in flags.items() if own != usual)

    def at_most(self, *lengths: int) -> tuple[int, ...]:
        """Those of some lengths of contexts that the model was made for; the longest, if none."""
        return tuple(n for n in lengths if n <= self.trained) or (self.trained,)

    def opened(self, names: Sequence[str]) -> tuple[str, ...]:
        """Those of some presses that can be opened on the model.

        Raises:
            LeftOutError: if there is none.
        """
        found = tuple(name for name in names if name in self.presses)
        if not found:
            raise LeftOutError(f"none of {', '.join(names)} can be opened on it")
        return found


@dataclass(frozen=True)
class Planned(Generic[OptionsT]):
    """What an experiment does with a model of the user's own.

    Attributes:
        options: what it runs with.
        tokens: that the model reads in prefills, about.
        steps: that it decodes, about.
        seconds: that do not depend on the model, about.
        note: what a reader of the results has to know, a sentence; empty: nothing.
    """

    options: OptionsT
    tokens: float = 0
    steps: float = 0
    seconds: float = 0
    note: str = ""

    def duration(self, own: OwnModel) -> float | None:
        """Seconds that this takes, about; None if nobody has said."""
        of_model = self.tokens * own.token_seconds + self.steps * own.step_seconds
        return of_model + self.seconds or None
