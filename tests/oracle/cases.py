"""The table `cases.yaml`: every press and wrapper, built from the same text here and in kvpress."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

import hooks_impl
import patch_impl
from tests.oracle import handed
from tests.oracle.running import Context, Run, Setting
from tests.support import table_beside

PACKAGES: dict[str, Mapping[str, Any]] = {
    "hooks": hooks_impl.PRESSES,
    "patches": patch_impl.PRESSES,
    "kvpress": handed.PRESSES,
}
MECHANISMS = "hooks", "patches"
RATIOS = (0.25, 0.5, 0.8)
TWO_ROWS, ONE_ROW = Context(390, batch=2), Context(390)
LLAMA, QWEN3, PHI3 = Setting(), Setting("qwen3"), Setting("phi3")
EAGER, FLOAT32 = Setting(attn_implementation="eager"), Setting(dtype=torch.float32)


def press_of(text, whose, ratio, given=handed.GIVEN):
    """The press that the Python `text` builds from a package, in which `r` is the ratio."""
    return eval(text, {**PACKAGES[whose], **given, "r": ratio})


@dataclass(frozen=True)
class Case:
    """A press that has to keep what kvpress's keeps.

    Attributes:
        press: see `press_of`; a user of kvpress would change one import.
        run: what the model is given.
        setting: the model.
        ratios: what `r` is.
        note: why the case is not run as the others are, if it is not.
    """

    press: str
    run: Run = TWO_ROWS
    setting: Setting = LLAMA
    ratios: tuple[float, ...] = RATIOS
    note: str = ""

    @property
    def presses(self):
        """Names of the presses in it."""
        return set(re.findall(r"\w+Press\b", self.press))


def _several(given: Any) -> list[Any]:
    return given if isinstance(given, list) else [given]


def _read() -> Iterator[Case]:
    """The cases of `cases.yaml`; text other than presses and notes is Python with these names."""
    names = {**vars(handed), **globals()}
    for told in table_beside(__file__, "cases"):
        run = eval(told["run"], names) if "run" in told else TWO_ROWS
        ratios, note = tuple(told.get("ratios", RATIOS)), told.get("note", "")
        for press in _several(told["press"]):
            for setting in _several(told.get("setting", "LLAMA")):
                yield Case(press, run, eval(setting, names), ratios, note)


CASES = [*_read()]
"""Every case."""
