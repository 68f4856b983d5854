"""Training of the models that ship with the experiments: `python -m experiments train`."""

from importlib import import_module
from pathlib import Path
from typing import Annotated, Literal

import typer
from safetensors import SafetensorError

from experiments import UserError, refusing
from experiments.framework.manifest import check_writable


def command(
    what: Annotated[
        Literal["facts", "stdlib", "sink", "fitted"], typer.Argument(help="What to train.")
    ],
    output: Annotated[
        Path | None,
        typer.Option(help="Folder to write to.", show_default="for fitted: the model's own"),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of weights and data; not for fitted.")] = 0,
    model: Annotated[
        str, typer.Option(help="For fitted: a model trained on the facts task.")
    ] = "facts-llama",
) -> None:
    """Train the small models that ship with the study.

    facts: facts-llama, which retrieves facts from a context; about an hour on two cores.

    stdlib: stdlib-neox, a GPT-NeoX trained on the sources of Python's standard library.

    sink: stdlib-neox-sink, which is stdlib-neox trained further to have an attention sink.

    fitted: the learned parameters of KVzapPress and other presses for facts-llama; twelve minutes.
    """
    train = import_module(f"{__name__}.{what}").train
    if what == "fitted":
        train(model, output)
    elif output is None:
        raise UserError(f"{what} has no folder to write to; give --output")
    else:
        check_writable(output)
        with refusing(f"cannot write the model to {output}", OSError, SafetensorError):
            train(output, seed=seed)
