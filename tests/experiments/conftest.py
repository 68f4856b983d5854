"""A finished study of tiny experiments, and commands that offer them."""

import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import experiments
from experiments.answers import sweep as sweeps
from experiments.answers.answerer import ContextAnswerer
from experiments.answers.cells import run_cell
from experiments.framework.experiment import Experiment
from experiments.loading import SHIPPED, load_model
from experiments.testbed.facts import build_tokenizer
from tests.experiments.tiny import ONE, TWO, study
from tests.support import build


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    path = tmp_path_factory.mktemp("study")
    assert study([ONE, TWO], path)[0] == []
    return path


@pytest.fixture
def folder(finished, tmp_path):
    """A copy of the study of `ONE` and `TWO`, to be changed."""
    return Path(shutil.copytree(finished, tmp_path / "results"))


@pytest.fixture
def registered(monkeypatch):
    """Offer experiments to the commands, in place of the study's own."""

    def register(*chosen: Experiment) -> None:
        monkeypatch.setattr(experiments, "EXPERIMENTS", {e.name: "" for e in chosen})
        for experiment in chosen:
            module = SimpleNamespace(EXPERIMENT=experiment)
            monkeypatch.setitem(sys.modules, f"experiments.questions.{experiment.name}", module)

    return register


@pytest.fixture(scope="module")
def model(request):
    """Of a test file: its `MODEL`, a shipped one or a tiny one of a family, in its `DTYPE`."""
    name = getattr(request.module, "MODEL", "llama")
    made = load_model(name)[0] if name in SHIPPED else build(name)
    return made.to(getattr(request.module, "DTYPE", torch.float32))


@pytest.fixture
def tokenizer():
    """That of facts-llama, to be changed."""
    return build_tokenizer()


@pytest.fixture
def answerer(model, tokenizer):
    """Of the model of a test file."""
    return ContextAnswerer(model, tokenizer)


@pytest.fixture(autouse=True)
def _threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def ran(monkeypatch):
    """The cells that sweeps run."""
    seen = []
    monkeypatch.setattr(sweeps, "run_cell", lambda s, c: seen.append(c) or run_cell(s, c))
    return seen
