"""The command line: `python -m experiments --help`.

The modules behind the commands import torch, which would slow `--help` down, so each is imported
only when its command is called.
"""

import inspect
import re
from importlib import import_module
from typing import Annotated, Any, NamedTuple

import typer
from rich.console import Console
from typer.core import TyperGroup
from typer.main import get_command

from experiments import EXPERIMENTS, QUESTION, UserError

_HELP = f"""\
{QUESTION}

Every press (a policy that evicts tokens from the cache) is implemented twice: with PyTorch's own \
hooks, and with reversible patches of the attention forwards. The commands below show both at \
work, check that their results are bit-identical, and measure what each costs.

New here? Start with [bold]trace[/bold]; [bold]study[/bold] runs everything and writes one page.
"""


class _Entry(NamedTuple):
    """What `--help` needs to know of a command without importing its module."""

    panel: str
    help: str
    module: str
    function: str = "command"


def _experiment(name: str, panel: str = "Measure") -> _Entry:
    return _Entry(panel, EXPERIMENTS[name], f"experiments.questions.{name}")


_CLAIM = "Measure one finding of the study again; without a name, list them."
_COMPRESS = "Compress a text into a file, for questions with `ask`."
_ASK = "Ask questions about a text that `compress` has compressed, without a new prefill."
_STUDY = "Run all experiments and write tables, figures and the report."
_REPORT = "Rebuild the figures and the report of a study from its tables."
_TRAIN = "Train the small models that ship with the study."
_README = "Update the tables in README and docs/ from the committed results."

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
"""Commands in the order of `--help`: what a new user needs first comes first."""


class FrontDoor(TyperGroup):
    """Imports a command's module when it is called, and prints user errors in one line."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] in COMMANDS:
            with Console(stderr=True).status("loading"):
                self.commands[args[0]] = _load(args[0])
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except Exception as error:
            from press_core.errors import PressError

            # The messages of these say what to do instead, or that memory ran out.
            users = isinstance(error, (UserError, PressError, OSError, MemoryError))
            users = users or (isinstance(error, RuntimeError) and "allocate" in str(error))
            if ctx.params.get("debug") or not users or isinstance(error, BrokenPipeError):
                raise
            reason = str(error)
            if isinstance(error, OSError) and error.filename:
                missing = isinstance(error, FileNotFoundError)
                what = "there is no file" if missing else f"{error.strerror}:"
                reason = f"{what} {error.filename}"
            typer.echo(f"error: {' '.join(reason.split())}", err=True)
            raise typer.Exit(2) from None


def _load(name: str) -> Any:
    module = import_module(COMMANDS[name].module)
    if (command := getattr(module, COMMANDS[name].function, None)) is None:
        from experiments.framework.command import command_of

        command = command_of(module.EXPERIMENT)
    app = typer.Typer(add_completion=False)
    # Typer keeps a docstring's line breaks: join the lines of each paragraph.
    help_ = re.sub(r"(?<!\n)\n(?!\n)", " ", inspect.getdoc(command) or "")
    app.command(name, help=help_)(command)
    return get_command(app)


app = typer.Typer(
    cls=FrontDoor,
    help=_HELP,
    rich_markup_mode="rich",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,  # --debug shows the plain traceback
)


@app.callback()
def _front_door(
    debug: Annotated[
        bool,
        typer.Option(
            "--debug",
            envvar="HOOK_OR_PATCH_DEBUG",
            help="Show the full traceback of an error instead of one line.",
        ),
    ] = False,
) -> None:
    """Declare the options of all commands, which `FrontDoor` reads."""


for _name, _entry in COMMANDS.items():
    # A placeholder for `--help`; `FrontDoor` replaces it when the command is called.
    app.command(_name, help=_entry.help, rich_help_panel=_entry.panel)(lambda: None)
