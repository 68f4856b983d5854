"""`python -m experiments ask`: answers from what `compress` has written."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from experiments.answers.answerer import ContextAnswerer
from experiments.answers.kept import SavedContext
from experiments.answers.presses import make_press
from experiments.framework.options import Device, Dtype
from experiments.loading import load_model


def command(
    cache: Annotated[Path, typer.Option(help="The file that compress has written.")],
    question: Annotated[list[str], typer.Option(help="Repeat it for several.")],
    max_new_tokens: Annotated[int, typer.Option(help="Tokens of an answer.", min=1)] = 50,
    press: Annotated[
        str | None, typer.Option(help="As text: the same again, if it acts while decoding.")
    ] = None,
    mechanism: Annotated[Literal["hook", "patch"], typer.Option(help="hook or patch.")] = "hook",
    model: Annotated[
        str | None, typer.Option(help="The model that has read the text.", show_default="its name")
    ] = None,
    dtype: Dtype = "float32",
    device: Device = "cpu",
) -> None:
    """Ask about a text that was compressed with `compress`, without reading it again."""
    saved = SavedContext(cache)
    name = saved.about.model if model is None else model
    made = None if press is None else make_press(press, mechanism, None, seed=0)
    console = Console(stderr=True)
    with console.status("Answering ..."):
        answerer = ContextAnswerer(*load_model(name, dtype=dtype, device=device))
        answers = answerer(saved, question, press=made, max_new_tokens=max_new_tokens)
    for answer in answers:
        print(answer)
