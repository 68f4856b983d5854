"""The front door: what it lists, what it imports, and how it tells errors."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from experiments import EXPERIMENTS, UserError
from experiments.cli import COMMANDS, app
from experiments.loading import ModelNotFoundError
from press_core import HyperparameterError

runner = CliRunner()
ALL = [*COMMANDS, "train"]


def offer(monkeypatch, error: Exception) -> None:
    """Let the command `trace` raise an error."""

    def command() -> None:
        raise error

    monkeypatch.setitem(
        sys.modules, "experiments.questions.trace", SimpleNamespace(command=command)
    )


def test_help_lists_every_command_with_its_help():
    result = runner.invoke(app, ["--help"])
    assert result.exit_code == 0
    assert "must you patch its code" in result.output
    text = " ".join(result.output.replace("│", " ").split())
    places = [text.index(f"{name} {entry.help[:30]}") for name, entry in COMMANDS.items()]
    assert places == sorted(places)
    assert "train Train the small models" in text
    assert set(EXPERIMENTS) <= set(COMMANDS)
    assert "equivalence" in runner.invoke(app, []).output


def test_help_comes_without_torch():
    code = (
        "import sys, typer.testing, experiments.cli as cli\n"
        "print(typer.testing.CliRunner().invoke(cli.app, ['--help']).exit_code)\n"
        "print(sorted({'torch', 'transformers', 'pandas', 'matplotlib'} & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.splitlines() == ["0", "[]"]


@pytest.mark.parametrize("name", ALL)
def test_every_command_has_help_of_its_own(name):
    result = runner.invoke(app, [name, "--help"])
    assert result.exit_code == 0, result.output
    assert f"{name} [OPTIONS]" in result.output


@pytest.mark.parametrize(
    "kind", [HyperparameterError, UserError, ModelNotFoundError, FileNotFoundError]
)
def test_errors_of_the_user_take_one_line(monkeypatch, kind):
    offer(monkeypatch, kind("KnormPress(ratio=2):\n  must be\n  smaller"))
    result = runner.invoke(app, ["trace"])
    assert result.exit_code == 2
    assert result.stderr == "error: KnormPress(ratio=2): must be smaller\n"
    assert result.stdout == ""


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
    assert runner.invoke(app, [*args, "trace"], env=env).exception is error


def test_a_misspelt_command_is_told_its_name():
    result = runner.invoke(app, ["equivalense"])
    assert result.exit_code == 2
    assert "Did you mean 'equivalence'?" in result.output


@pytest.mark.parametrize("name", ["facts", "stdlib", "sink"])
def test_train(monkeypatch, tmp_path, name):
    seen = []
    fake = SimpleNamespace(train=lambda output, *, seed: seen.append((output, seed)))
    monkeypatch.setitem(sys.modules, f"experiments.testbed.training.{name}", fake)
    result = runner.invoke(app, ["train", name, "--output", str(tmp_path), "--seed", "7"])
    assert result.exit_code == 0, result.output
    assert seen == [(tmp_path, 7)]


def test_trace_from_the_command_line(tmp_path):
    args = ["trace", "--model", "llama", "--press", "knorm", "--length", "12", "--decode", "0"]
    result = runner.invoke(app, [*args, "--output", str(tmp_path)], env={"COLUMNS": "160"})
    assert result.exit_code == 0, result.output
    assert "forward hook prunes 12 → 6" in result.output
    assert "wrapper prunes 12 → 6" in result.output
    assert {path.name for path in tmp_path.iterdir()} == {"trace.csv", "trace.svg"}


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--press", "nosuch"], "there is no press 'nosuch'; there are AdaKV, Block, CAM, CUR"),
        (["--ratio", "1.5"], "compression_ratio=1.5: it must be a number in [0, 1)"),
        (["--model", "gpt2", "--press", "ExpectedAttention"], "needs rotary position embeddings"),
        (["--model", "no/such/folder"], "there is no folder 'no/such/folder'"),
    ],
)
def test_trace_refuses_in_one_line(args, words):
    result = runner.invoke(app, ["trace", "--model", "llama", *args])
    assert result.exit_code == 2
    assert words in result.stderr
    assert result.stderr.count("\n") == 1
