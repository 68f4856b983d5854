"""`python -m experiments compress`: a text becomes a compressed cache in a file."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from experiments import UserError
from experiments.answers.answerer import ContextAnswerer
from experiments.answers.kept import check_free
from experiments.answers.presses import make_press
from experiments.framework.options import Device, Dtype, checked_share
from experiments.loading import load_model
from press_core import about_cache

_Press = Annotated[str, typer.Option(help="As text, such as SnapKVPress(window_size=32).")]
_Ratio = Annotated[
    float | None,
    typer.Option(
        help="Share of the tokens to evict.", callback=checked_share, show_default="the press's own"
    ),
]


def command(
    output: Annotated[Path, typer.Option(help="A new file, such as context.safetensors.")],
    context: Annotated[
        Path | None, typer.Option(help="File with the text.", show_default="standard input")
    ] = None,
    press: _Press = "SnapKVPress(0.5)",
    ratio: _Ratio = None,
    mechanism: Annotated[Literal["hook", "patch"], typer.Option(help="hook or patch.")] = "hook",
    model: Annotated[str, typer.Option(help="Shipped model, folder or hub id.")] = "facts-llama",
    dtype: Dtype = "float32",
    device: Device = "cpu",
) -> None:
    """Compress a text once, to be asked about later with `ask`."""
    check_free(output)
    made = make_press(press, mechanism, ratio, seed=0)
    text = _read(context)
    console = Console(stderr=True)
    with console.status("Reading and compressing ..."):
        answerer = ContextAnswerer(*load_model(model, dtype=dtype, device=device))
        answerer.save(text, output, press=made)
    about = about_cache(output)
    print(f"{output}: {about.n_seen} tokens, {about.evicted:.0%} evicted by {about.press}")
    if not about.evicted:
        console.print("Nothing was evicted; --ratio 0.5 would evict half of the tokens.")


def _read(path: Path | None) -> str:
    try:
        return sys.stdin.read() if path is None else path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path or 'standard input'} is no text in UTF-8: {error}") from error
