"""Hooks and patches touch what they say and leave nothing; what others leave is found."""

import json
import runpy
import sys
from importlib.util import find_spec
from pathlib import Path

import pandas as pd
import pytest

from experiments.audit import CALL, INSTANCE, LEFT, OPEN, RUNNING
from experiments.interventions import LIBRARIES
from experiments.mechanisms import TRIED
from experiments.questions import intrusiveness
from experiments.questions.intrusiveness import EXITS, EXPERIMENT, leftovers, touched
from tests.experiments.tiny import CASES, succeeded

OURS = [name for name in TRIED if name.split(",")[0] in ("hooks", "patches")]
every_exit = pytest.mark.parametrize("how", EXITS)


def reaches(name, when):
    changes = touched(TRIED[name])
    return set(changes[changes["when"] == when]["reach"])


# ---- touched and left --------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*OURS, "plain hook", "registry patch", "class patch"])
@every_exit
def test_nothing_is_left(name, how):
    row = leftovers(TRIED[name], how)
    assert (row["leftovers"], row["error"]) == (0, ""), row


@pytest.mark.parametrize(("reach", "names"), CASES["reached"])
def test_how_far_a_mechanism_reaches(reach, names):
    for name in names:
        assert reaches(name, OPEN) == set(reach), name


def test_the_attention_interface_reaches_configuration_and_registries():
    kinds = set(touched(TRIED["attention interface"])["kind"])
    assert {"configuration", "attention registry", "mask registry"} <= kinds


def test_exact_queries_ride_in_the_arguments_of_a_patched_call():
    assert CALL in reaches("patches, SnapKV", RUNNING)


@pytest.mark.parametrize("name", ["plain instance patch", "permanent class patch"])
@every_exit
def test_what_others_leave_is_found(name, how):
    row = leftovers(TRIED[name], how)
    assert (row["leftovers"] > 0, row["error"]) == (True, "")
    assert row["example"].endswith(".forward")


def test_an_error_of_leaving_is_noted():
    row = leftovers(TRIED["attention interface"], "outer scope first")
    assert row["error"].startswith("ValueError: Specified `attn_implementation=")
    assert row["leftovers"] > 1


@every_exit
def test_every_exit_runs_the_model_inside_of_the_scope(how):
    """Otherwise nothing could be left of what is only done in a call."""
    ran = []

    def opens(model):
        model.model.layers[0].self_attn.register_forward_hook(lambda *_: ran.append(how))
        return TRIED["hooks"](model)

    row = leftovers(opens, how)
    assert row["leftovers"] > 0
    assert ran


# ---- libraries ---------------------------------------------------------------------------------

ROW = {"library": "peft", "version": "1.0", "transformers": "5.0", "subject": "LoRA", "error": ""}
CHANGE = {"when": LEFT, "reach": INSTANCE, "how": "added", "kind": "hook", "changes": 2}


def environment(folder: Path, *, output: str = "", status: int = 0) -> Path:
    """A virtual environment whose Python prints `output`."""
    python = folder / "bin" / "python"
    python.parent.mkdir(parents=True)
    (folder / "output").write_text(output)
    stream = 2 if status else 1
    python.write_text(f"#!/bin/sh\ncat {folder}/output >&{stream}\nexit {status}\n")
    python.chmod(0o755)
    return folder


def test_the_first_environment_that_has_a_library_counts(tmp_path):
    one, other = ({**ROW, "version": version} for version in ("2.0", "1.0"))
    printed = json.dumps([{**one, "changes": [CHANGE]}, {**one, "subject": "x", "changes": []}])
    folders = [
        environment(tmp_path / "a", output=printed),
        environment(tmp_path / "b", output=json.dumps([{**other, "changes": []}])),
    ]
    table = intrusiveness.of_libraries(map(intrusiveness.audit_libraries, folders))
    own = table[table["library"] == "peft"]
    found = own[["version", "subject", "changes"]].values.tolist()
    assert found == [["2.0", "LoRA", 2], ["2.0", "x", 0]]
    others = table[table["library"] != "peft"]
    assert set(others["library"]) == set(LIBRARIES) - {"peft"}
    assert others["error"].str.contains("`make subjects` installs it").all()


def test_an_environment_whose_installation_was_interrupted_is_not_taken(tmp_path, monkeypatch):
    monkeypatch.setattr(intrusiveness.shared, "ROOT", tmp_path)
    one, _ = (environment(tmp_path / name) for name in intrusiveness.ENVIRONMENTS)
    (one / ".installed").touch()
    assert intrusiveness.Options().environments == [one]


@pytest.mark.skipif(not find_spec("accelerate"), reason="accelerate is not installed here")
def test_accelerate_leaves_a_forward_behind(monkeypatch, capsys):
    """Asked for beside PEFT, and beside a library that is not there, which is passed over."""
    monkeypatch.setattr(sys, "argv", ["", "no-such-library", "accelerate", "peft"])
    runpy.run_module("experiments.interventions", run_name="__main__", alter_sys=True)
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert {row["library"] for row in rows} - {"peft"} == {"accelerate"}
    assert all(row["error"] == "" for row in rows), rows
    by_subject = {row["subject"]: row["changes"] for row in rows}
    left = by_subject["add_hook_to_module, remove_hook_from_module"][-1]
    assert (left["when"], left["changes"]) == (LEFT, 2)
    assert left["example"] == "model.layers.0.self_attn.forward"


# ---- tables, figures, command ------------------------------------------------------------------


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    """Written by the command."""
    chosen, output = ["hooks", "plain instance patch"], tmp_path_factory.mktemp("out")
    rows = [{**ROW, "changes": [CHANGE]}, {**ROW, "subject": "import", "changes": []}]
    folder = environment(tmp_path_factory.mktemp("env") / "e", output=json.dumps(rows))
    broken = environment(folder / "broken", output="Traceback\nImportError: no torch", status=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(intrusiveness, "TRIED", {name: TRIED[name] for name in chosen})
        given = "--environment", folder, "--environment", broken
        result = succeeded("intrusiveness", *given, "--output", output)
    assert "make subjects" in result.output
    assert "ImportError: no torch" in result.output
    assert (output / "intrusiveness.svg").stat().st_size > 3_000
    return {path.stem: pd.read_csv(path) for path in output.glob("*.csv")}


def test_summary_says_what_is_left(tables):
    exits = tables["intrusiveness_exits"]
    assert len(exits) == 2 * len(EXITS)
    text = EXPERIMENT.markdown(tables)
    assert "1 of 1 other mechanisms" in text.split("\n")[0]
    assert "left by plain instance patch" in text
    (found,) = EXPERIMENT.findings(tables)
    assert (found.number, found.verdict) == (0, "works")
    spoilt = tables | {"intrusiveness_exits": exits.assign(leftovers=1)}
    (found,) = EXPERIMENT.findings(spoilt)
    assert (found.number, found.verdict) == (5, "breaks")
    assert "| peft | 1.0 | LoRA |  | 0 | 2 | 0 | 0 | 0 |" in text
    assert "| kvpress |  |  | not run: none of the environments has it" in text
