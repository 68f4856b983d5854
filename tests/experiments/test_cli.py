"""The front door: what it lists, what it imports, and how it tells errors."""

import runpy
import signal
import subprocess
import sys
from types import SimpleNamespace
from unittest.mock import patch

import pytest
from safetensors import SafetensorError

from experiments import EXPERIMENTS, UserError
from experiments.cli import COMMANDS
from experiments.loading import ModelNotFoundError
from press_core import HyperparameterError
from tests.experiments.tiny import cli, refused, succeeded


def offer(monkeypatch, error: Exception) -> None:
    """Let the command `trace` raise an error."""

    def command() -> None:
        raise error

    module = SimpleNamespace(command=command)
    monkeypatch.setitem(sys.modules, "experiments.questions.trace", module)


def test_help_lists_every_command_with_its_help():
    result = succeeded("--help")
    assert "must you patch its code" in result.output
    text = " ".join(result.output.replace("│", " ").split())
    places = [text.index(f"{name} {entry.help[:30]}") for name, entry in COMMANDS.items()]
    assert places == sorted(places)
    assert set(EXPERIMENTS) <= set(COMMANDS)
    assert "equivalence" in cli().output


def test_help_comes_without_torch():
    code = (
        "import sys, typer.testing, experiments.cli as cli\n"
        "print(typer.testing.CliRunner().invoke(cli.app, ['--help']).exit_code)\n"
        "print(sorted({'torch', 'transformers', 'pandas', 'matplotlib'} & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.splitlines() == ["0", "[]"]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_of_its_own(name):
    assert f"{name} [OPTIONS]" in succeeded(name, "--help").output


@pytest.mark.parametrize(
    "kind", [HyperparameterError, UserError, ModelNotFoundError, FileNotFoundError, MemoryError]
)
def test_errors_of_the_user_take_one_line(monkeypatch, kind):
    offer(monkeypatch, kind("KnormPress(ratio=2):\n  must be\n  smaller"))
    assert refused("trace") == "error: KnormPress(ratio=2): must be smaller\n"
    offer(monkeypatch, RuntimeError("DefaultCPUAllocator: can't allocate memory"))
    assert "can't allocate memory" in refused("trace")


@pytest.mark.parametrize(
    ("error", "args", "env"),
    [
        (HyperparameterError("too large"), ["--debug"], {}),
        (HyperparameterError("too large"), [], {"HOOK_OR_PATCH_DEBUG": "1"}),
        *((kind("a bug"), [], {}) for kind in (RuntimeError, ValueError, KeyError)),
    ],
)
def test_bugs_keep_their_traceback_and_others_can_have_it(monkeypatch, error, args, env):
    offer(monkeypatch, error)
    assert cli(*args, "trace", env=env).exception is error


def test_a_command_that_is_told_to_end_is_interrupted():
    with patch("experiments.cli.app"), patch("signal.signal") as handled:
        runpy.run_module("experiments", run_name="__main__")
    handlers = dict([handled.call_args.args])
    with pytest.raises(KeyboardInterrupt):
        handlers[signal.SIGTERM](signal.SIGTERM, None)


def test_a_misspelt_command_is_told_its_name():
    assert "Did you mean 'equivalence'?" in cli("equivalense", status=2).output


@pytest.mark.parametrize("name", ["facts", "stdlib", "sink", "fitted"])
def test_train(monkeypatch, tmp_path, name):
    seen = []
    fake = SimpleNamespace(train=lambda *args, **named: seen.append((*args, *named.values())))
    monkeypatch.setitem(sys.modules, f"experiments.testbed.training.{name}", fake)
    succeeded("train", name, "--output", tmp_path, "--seed", "7")
    assert seen == [("facts-llama", tmp_path) if name == "fitted" else (tmp_path, 7)]
    cli("train", name, status=0 if name == "fitted" else 2)


def test_a_model_that_cannot_be_saved_is_told_in_one_line(tmp_path):
    full = SafetensorError("No space left")
    with patch("experiments.testbed.training.facts.train", side_effect=full):
        told = refused("train", "facts", "--output", tmp_path)
    assert told == f"error: cannot write the model to {tmp_path}: No space left\n"
