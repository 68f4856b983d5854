"""A command made from an experiment: its flags, what it shows and writes, and its exit status."""

from dataclasses import dataclass
from enum import Enum
from typing import Annotated

import pandas as pd
import pytest
import typer

from experiments.framework.command import command_of
from experiments.framework.options import Device, checked_positive_share, checked_share, one_of
from tests.experiments.tiny import REFUSED, Tiny, cli, failing


class Colour(str, Enum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True)
class Options:
    word: Annotated[str | None, typer.Option(help="A word.")] = None
    press: Annotated[
        tuple[str, ...], typer.Option(help="Presses.", callback=one_of(("a", "b")))
    ] = ()
    ratio: Annotated[tuple[float, ...], typer.Option(help="R.", callback=checked_share)] = (0.5,)
    part: Annotated[float, typer.Option(help="P.", callback=checked_positive_share)] = 0.25
    colour: Annotated[tuple[Colour, ...], typer.Option(help="Colours.")] = tuple(Colour)
    many_rounds: Annotated[int, typer.Option(min=1, help="Rounds.")] = 3
    loud: Annotated[bool, typer.Option(help="Loudly.")] = False
    device: Device = "cpu"


class Echo(Tiny):
    """Tell what was asked for.

    At some length.
    """

    full = quick = Options()

    def measure(self, options, progress):
        self.seen = options
        return {"echo": pd.DataFrame({"x": [options.many_rounds]})}

    def passed(self, tables):
        return tables["echo"]["x"][0] < 10


ECHO = Echo("echo")


def invoke(*arguments, status=0):
    app = typer.Typer()
    app.command()(command_of(ECHO))
    return cli(*arguments, of=app, status=status)


FLAGS = (
    "--word w --press a --press b --press a --ratio 0 --ratio 0.9 --part 0.5 --colour blue "
    "--many-rounds 4 --loud"
)
GIVEN = Options("w", ("a", "b"), (0.0, 0.9), 0.5, (Colour.BLUE,), 4, True)


@pytest.mark.parametrize(("arguments", "options"), [("", Options()), (FLAGS, GIVEN)])
def test_every_option_is_a_flag(arguments, options):
    invoke(*arguments.split())
    assert ECHO.seen == options


def test_help_is_the_docstring_and_the_fields():
    shown = " ".join(invoke("--help").output.split())
    for words in ("Tell what was asked for. At some length.", "--many-rounds", "Rounds.", "0.25"):
        assert words in shown


def test_tables_findings_files_and_status(tmp_path):
    result = invoke("--output", tmp_path / "new")
    words = " ".join(result.output.split())
    assert words.index("The last.") < words.index("The mean of echo is 3.000.")
    assert (tmp_path / "new" / "echo.csv").read_text() == "x\n3\n"
    assert "The mean of echo is 10.000." in invoke("--many-rounds", "10", status=1).output


def test_what_is_measured_is_written_even_if_it_cannot_be_shown(tmp_path, monkeypatch):
    monkeypatch.setattr(ECHO, "findings", failing)
    invoke("--output", tmp_path, status=1)
    assert (tmp_path / "echo.csv").read_text() == "x\n3\n"


@pytest.mark.parametrize(("arguments", "words"), REFUSED["flags"])
def test_a_wrong_value_is_told_with_its_flag(arguments, words):
    told = invoke(*arguments.split(), status=2).output
    assert words in " ".join(told.replace("│", " ").split())
