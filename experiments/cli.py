"""The front door: `python -m experiments --help`.

Help has to come at once, and the modules behind the commands import torch: each is imported when
its command is called, and not before.
"""

from __future__ import annotations

import inspect
import re
from importlib import import_module
from typing import Annotated, Any, NamedTuple

import typer
from typer.core import TyperGroup
from typer.main import get_command

from experiments import EXPERIMENTS, QUESTION, UserError

_HELP = f"""\
{QUESTION}

Every press (a policy that evicts tokens from the cache) is built here twice: with PyTorch's own \
hooks, and with reversible patches of the attention forwards. The commands below watch both at \
work, check that both leave the same bits, and measure what each costs.

New here? Start with [bold]trace[/bold]; [bold]study[/bold] runs everything and writes one page.
"""


class _Entry(NamedTuple):
    """A command, known by its name and help before its module is imported."""

    panel: str
    help: str
    module: str
    function: str = "command"


def _experiment(name: str, panel: str = "Measure") -> _Entry:
    return _Entry(panel, EXPERIMENTS[name], f"experiments.questions.{name}")


_CLAIM = "Measure one finding of the study again; without a name, list them."
_COMPRESS = "Compress a text once, to be asked about later with `ask`."
_ASK = "Ask about a text that was compressed with `compress`, without reading it again."
_STUDY = "Run all experiments and write tables, figures and the report."
_REPORT = "Rebuild the figures and the report of a study from its tables."
_TRAIN = "Train the small models that ship with the study."
_README = "Rewrite the tables of README and docs/ from the committed results."

COMMANDS: dict[str, _Entry] = {
    "trace": _experiment("trace", "Look"),
    **{name: _experiment(name) for name in EXPERIMENTS if name != "trace"},
    "claim": _Entry("Measure", _CLAIM, "experiments.claim"),
    "compress": _Entry("Use", _COMPRESS, "experiments.answers.commands", "compress"),
    "ask": _Entry("Use", _ASK, "experiments.answers.commands", "ask"),
    "study": _Entry("Report", _STUDY, "experiments.study"),
    "report": _Entry("Report", _REPORT, "experiments.framework.report"),
    "readme": _Entry("Report", _README, "experiments.framework.readme"),
    "train": _Entry("Models", _TRAIN, "experiments.testbed.training"),
}
"""Commands in the order in which a newcomer needs them."""


class FrontDoor(TyperGroup):
    """Imports the module of a command when it is called; tells user errors in one line."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] in COMMANDS:
            self.commands[args[0]] = _load(args[0])
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except Exception as error:
            from press_core.errors import PressError

            users = isinstance(error, (UserError, PressError, OSError))  # say what to do instead
            if ctx.params.get("debug") or not users or isinstance(error, BrokenPipeError):
                raise
            typer.echo(f"error: {' '.join(str(error).split())}", err=True)
            raise typer.Exit(2) from None


def _load(name: str) -> Any:
    module = import_module(COMMANDS[name].module)
    if (command := getattr(module, COMMANDS[name].function, None)) is None:
        from experiments.framework.command import command_of

        command = command_of(module.EXPERIMENT)
    app = typer.Typer(add_completion=False)
    # Typer breaks lines where a docstring breaks them; a blank line parts paragraphs.
    help_ = re.sub(r"(?<!\n)\n(?!\n)", " ", inspect.getdoc(command) or "")
    app.command(name, help=help_)(command)
    return get_command(app)


app = typer.Typer(
    cls=FrontDoor,
    help=_HELP,
    rich_markup_mode="rich",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,  # a traceback that is shown is asked for: show it as it is
)


@app.callback()
def _front_door(
    debug: Annotated[
        bool,
        typer.Option(
            "--debug",
            envvar="HOOK_OR_PATCH_DEBUG",
            help="Show the traceback of an error, rather than one line.",
        ),
    ] = False,
) -> None:
    """Options of all commands; `FrontDoor` reads them."""


for _name, _entry in COMMANDS.items():
    # `--help` lists it; `FrontDoor` puts the command in its place when it is called.
    app.command(_name, help=_entry.help, rich_help_panel=_entry.panel)(lambda: None)
