"""`python -m experiments compress` and `ask`: compress a text, and ask questions about it."""

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from experiments import refusing
from experiments.answers.answerer import ContextAnswerer
from experiments.answers.kept import SavedContext, check_savable
from experiments.answers.presses import make_press
from experiments.framework.options import Device, Dtype, checked_share
from experiments.loading import load_model
from press_core import Phase, about_cache

_Press = Annotated[str, typer.Option(help="Press as text, such as SnapKVPress(window_size=32).")]
_Ratio = Annotated[
    float | None,
    typer.Option(
        help="Share of the tokens to evict.", callback=checked_share, show_default="the press's own"
    ),
]
_Mechanism = Annotated[Literal["hook", "patch"], typer.Option(help="hook or patch.")]


def compress(
    output: Annotated[Path, typer.Option(help="A new file, such as context.safetensors.")],
    context: Annotated[
        Path | None, typer.Option(help="File with the text.", show_default="standard input")
    ] = None,
    press: _Press = "SnapKVPress(0.5)",
    ratio: _Ratio = None,
    mechanism: _Mechanism = "hook",
    model: Annotated[str, typer.Option(help="Shipped model, folder or hub id.")] = "facts-llama",
    dtype: Dtype = "float32",
    device: Device = "cpu",
) -> None:
    """Compress a text into a file, for questions with `ask`."""
    made = make_press(press, mechanism, ratio, seed=0)
    check_savable(output, made)
    with refusing(f"{context or 'standard input'} is no text in UTF-8", UnicodeDecodeError):
        text = sys.stdin.read() if context is None else context.read_text(encoding="utf-8")
    console = Console(stderr=True)
    with console.status("Reading and compressing ..."):
        answerer = ContextAnswerer(*load_model(model, dtype=dtype, device=device))
        answerer.save(text, output, press=made)
    about = about_cache(output)
    print(f"{output}: {about.n_seen} tokens, {about.evicted:.0%} evicted by {about.press}")
    if not about.evicted:
        why = "the text is too short for this press" if made.amount else "--ratio 0.5 evicts half"
        if not made.phases & Phase.ON_CONTEXTS:
            why = "this press evicts while decoding; name it to ask, too"
        console.print(f"Nothing was evicted; {why}.")


def ask(
    cache: Annotated[Path, typer.Option(help="The file that compress has written.", exists=True)],
    question: Annotated[list[str], typer.Option(help="Repeat it for several.")],
    max_new_tokens: Annotated[int, typer.Option(help="Tokens of an answer.", min=1)] = 50,
    press: Annotated[
        str | None, typer.Option(help="The same press again, if it acts while decoding.")
    ] = None,
    mechanism: _Mechanism = "hook",
    model: Annotated[
        str | None, typer.Option(help="The model that has read the text.", show_default="its name")
    ] = None,
    dtype: Dtype = "float32",
    device: Device = "cpu",
) -> None:
    """Ask questions about a text that `compress` has compressed, without a new prefill."""
    saved = SavedContext(cache)
    name = saved.about.model if model is None else model
    made = None if press is None else make_press(press, mechanism, None, seed=0)
    with Console(stderr=True).status("Answering ..."):
        answerer = ContextAnswerer(*load_model(name, dtype=dtype, device=device))
        answers = answerer(saved, question, press=made, max_new_tokens=max_new_tokens)
    for answer in answers:
        print(answer)
