"""A study of a model of the user's own: what it runs, what it says beforehand, and its report."""

from __future__ import annotations

import re
from dataclasses import replace
from io import StringIO

import pandas as pd
import pytest
import torch
from rich.console import Console
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from typer.testing import CliRunner

from experiments import EXPERIMENTS, UserError, load_experiments
from experiments.answers.datasets.published import SETS
from experiments.cli import app
from experiments.framework.manifest import read_manifest
from experiments.framework.own_model import LeftOutError, OwnModel, Planned
from experiments.loading import ModelNotFoundError
from experiments.questions import evaluate
from experiments.study import plan_on, run_plan
from experiments.testbed import getting_to_know
from experiments.testbed.facts import FILLER
from experiments.testbed.getting_to_know import get_to_know
from tests.support import build

FAMILIES = ("llama", "qwen3", "gemma3_text", "gpt_neox")
HALF = "qwen3"
"""The one that is studied in 16 bits."""

TRAINED = 512

runner = CliRunner(env={"COLUMNS": "200"})


def tokenizer_for(family: str) -> PreTrainedTokenizerFast:
    """Byte-level BPE; with a first token as Llama and Gemma have it, or none."""
    special = ["<pad>", "<s>", "</s>"] if family in ("llama", "gemma3_text") else ["<pad>", "</s>"]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([" ".join(FILLER)] * 2, trainer)
    if "<s>" in special:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 1)]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="</s>",
        bos_token="<s>" if "<s>" in special else None,
    )


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A tiny random model of each family with a tokenizer of its own, as a user has one."""
    found = {}
    for family in FAMILIES:
        model = build(family, num_layers=1 if family == "gemma3_text" else 2)
        tokenizer = tokenizer_for(family)
        model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
        for embeddings in (model.get_input_embeddings(), model.get_output_embeddings()):
            torch.nn.init.normal_(embeddings.weight, std=embeddings.weight.shape[-1] ** -0.5)
        model.config.max_position_embeddings = TRAINED
        found[family] = tmp_path_factory.mktemp("models") / f"my-{family}"
        model.save_pretrained(found[family])
        tokenizer.save_pretrained(found[family])
    return found


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")


def an_own_model(**changed) -> OwnModel:
    known = OwnModel(
        **{"model": "you/yours", "name": "you/yours", "model_type": "llama"},
        **{"dtype": "float32", "device": "cpu"},
        **{"parameters": 10**9, "trained": 8192, "heads": 64, "keeps_all": True, "online": False},
        presses=("KnormPress", "SnapKVPress", "KeyRerotationPress", "StreamingLLMDecodingPress"),
        **{"token_seconds": 0.01, "step_seconds": 0.1},
    )
    return replace(known, **changed)


LESS = {
    "equivalence": {"press": ("KnormPress", "SnapKVPress", "AdaKVPress")},
    "coexistence": {
        "companion": ("nothing else", "PEFT LoRA, merged", "wrapped layers, as FSDP does")
    },
    "overhead": {"prefill_rounds": 2, "decode_rounds": 2, "scope_rounds": 2, "context": 32},
    "headwise": {"samples": 2, "context": 48, "facts": 2, "contexts": (64,), "rounds": 2},
    "evaluate": {
        "dataset": ("synthetic/niah_single@256", "synthetic/qa@384"),
        "press": ("SnapKVPress",),
        "samples": 2,
    },
    "streaming": {"tokens": 480, "capacity": 31, "full": 64},
    "trace": {"length": 48},
    "error": {"context": 48, "facts": 2, "samples": 1},
    "throughput": {
        **{"context": (64,), "first_context": 64, "rounds": 1, "tokens": 2},
        **{"memory": False, "every": ("KnormPress",)},
    },
}
"""Options that leave experiments next to nothing to do."""


@pytest.mark.parametrize("family", ["gemma3_text", "gpt_neox"])  # the least like the shipped ones
def test_every_experiment_runs_on_models_of_several_families(folders, tmp_path, family):
    own = get_to_know(str(folders[family]), "bfloat16" if family == HALF else "float32")
    experiments = load_experiments()
    plan = plan_on(own, experiments)
    left_out = {"intrusiveness", "quality", "ragged_attention"} & set(EXPERIMENTS)
    assert set(plan.left_out) == left_out
    assert {task.name for task in plan.tasks} == set(EXPERIMENTS) - left_out
    text = tmp_path / "text.txt"  # to read the whole standard library takes seconds
    text.write_text(" ".join(FILLER * 20))
    told = LESS | {"streaming": LESS["streaming"] | {"text": text}}
    less = [
        task._replace(options=replace(task.options, **told.get(task.name, {})))
        for task in plan.tasks
    ]
    console = Console(file=StringIO(), width=200)
    failed = run_plan(plan._replace(tasks=less), experiments, tmp_path / "study", console)
    assert failed == [], console.file.getvalue()
    folder = tmp_path / "study"
    page = (folder / "report.html").read_text()
    assert f"<code>my-{family}</code>" in page
    assert "What was left out" in page
    assert "On small random models of its architecture" in page
    assert read_manifest(folder).model == str(folders[family])
    table = {task.name: pd.read_csv(folder / f"{task.name}.csv") for task in less[:4]}
    assert set(table["isolation"]["outcome"]) == {"untouched"}
    assert not table["equivalence"]["differ"].any()
    assert set(table["coexistence"]["outcome"]) == {"right"}
    assert set(table["architectures"][["hook", "patch"]].stack()) == {"right"}
    assert set(table["equivalence"]["dtype"]) == {own.dtype}
    flags = " --dtype bfloat16" if family == HALF else ""
    repeat = read_manifest(folder).experiments["trace"].repeat
    assert repeat == f"python -m experiments study --model {own.model}{flags} --only trace"
    assert set(pd.read_csv(folder / "trace.csv")["model"]) == {f"my-{family}"}


def test_a_model_that_was_never_trained(tmp_path, monkeypatch):
    """Its keys have one norm, so that presses which go by norms refuse it; it predicts nothing."""
    folder, tokenizer = tmp_path / "untrained", tokenizer_for("qwen3")
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        max_position_embeddings=TRAINED,
        **{"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 8},
        **{"num_attention_heads": 4, "num_key_value_heads": 2},
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    text = tmp_path / "text.txt"
    text.write_text(" ".join(FILLER * 20))
    experiments = load_experiments()
    plan = plan_on(get_to_know(str(folder)), experiments, ("equivalence", "streaming", "trace"))
    told = {
        "equivalence": {"press": ("KnormPress", "LUKVPress", "SnapKVPress")},
        "streaming": LESS["streaming"] | {"text": text},
        "trace": {},
    }
    tasks = [t._replace(options=replace(t.options, **told[t.name])) for t in plan.tasks]

    def fails(*_):
        raise RuntimeError("a planted fault")

    monkeypatch.setattr("experiments.questions.trace.Trace.measure", fails)
    console, output = Console(file=StringIO()), tmp_path / "study"
    failed = run_plan(plan._replace(tasks=tasks), experiments, output, console)
    assert failed == ["trace"], console.file.getvalue()
    compared = pd.read_csv(output / "equivalence.csv").set_index("press")
    refused = compared["refusal"].loc[["KnormPress", "LUKVPress"]]
    assert refused.str.contains("different norms").all()
    assert (compared["tokens"].loc["SnapKVPress"] > 0).all()
    for name in ("report.md", "report.html"):
        page = (output / name).read_text()
        assert page.index("a planted fault") < page.index("get the same cache from either")
        assert "stream without the first tokens" not in page


# ---- the command -------------------------------------------------------------------------------


def test_the_command_tells_what_it_takes_and_goes_on_after_an_interrupt(
    folders, tmp_path, monkeypatch
):
    args = ["study", "--model", str(folders["llama"]), "--output", str(tmp_path)]
    ran = []

    def measured(experiment, options, progress):
        ran.append(experiment.name)
        if interrupts and experiment.name == "isolation":
            raise KeyboardInterrupt
        return {experiment.name: pd.DataFrame({"x": [1]})}

    for experiment in load_experiments():
        monkeypatch.setattr(type(experiment), "figures", lambda *_: {})
        monkeypatch.setattr(type(experiment), "markdown", lambda *_: "")
        for silent in ("findings", "views", "remarks", "contrasts"):
            monkeypatch.setattr(type(experiment), silent, lambda *_: [])
    monkeypatch.setattr("experiments.study.measured", measured)
    monkeypatch.setattr("experiments.study.write_report", lambda *_: None)
    interrupts = True
    first = runner.invoke(app, args)
    assert first.exit_code == 130, first.output
    told = " ".join(first.stderr.split())
    assert re.search(
        r"my-llama \(0\.\d M parameters in float32 on cpu: [\d,]+ tokens a second", told
    )
    assert re.search(r"will take about \d+ (s|min)", told)
    assert re.search(r"quality │ left out │ its questions are in the words of facts-llama", told)
    assert re.search(r"equivalence │ \d+ s │", told)
    assert ran == ["equivalence", "architectures", "isolation"]
    interrupts = False
    second = runner.invoke(app, args)
    assert second.exit_code == 0, second.output
    assert ran[3:5] == ["isolation", "coexistence"]
    assert "equivalence" not in ran[3:]
    manifest = read_manifest(tmp_path)
    assert manifest.waiting == []
    folder = folders["llama"]
    assert manifest.experiments["trace"].repeat == (
        f"python -m experiments study --model {folder} --only trace"
    )
    other = runner.invoke(app, ["study", "--output", str(tmp_path)])
    assert other.exit_code == 2
    assert f"holds a study of {folder}" in " ".join(other.stderr.split())


def test_the_folder_is_looked_at_before_the_model(tmp_path, monkeypatch):
    monkeypatch.setattr("experiments.study.get_to_know", None)
    (tmp_path / "trace.csv").write_text("mine")
    args = ["study", "--model", "you/yours", "--output", str(tmp_path)]
    refused = runner.invoke(app, args)
    assert refused.exit_code == 2, refused.exception
    assert "trace.csv was not written by the study" in refused.stderr


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--only", "quality"], "on my-llama quality is left out: its questions"),
        (["--only", "nothing"], "no experiment is called 'nothing'"),
        (["--full"], "--full is for the shipped models"),
        (["--device", "nowhere"], "cannot use 'nowhere'"),
        (["--dtype", "int8"], "'int8' is unknown; choose from float32, bfloat16, float16"),
    ],
)
def test_what_cannot_be_is_told_in_a_line(folders, tmp_path, args, words):
    model = ["--model", str(folders["llama"]), "--output", str(tmp_path / "new")]
    refused = runner.invoke(app, ["study", *model, *args])
    assert refused.exit_code == 2, refused.exception
    assert words in " ".join(refused.stderr.split())


@pytest.mark.parametrize("flag", [["--device", "meta"], ["--dtype", "bfloat16"]])
def test_how_a_model_is_loaded_is_for_ones_own(tmp_path, flag):
    refused = runner.invoke(app, ["study", *flag, "--output", str(tmp_path)])
    assert refused.exit_code == 2
    assert "give --model too" in refused.stderr


# ---- getting to know a model ---------------------------------------------------------------------


def test_a_model_without_its_tokenizer_is_refused(folders, tmp_path):
    for path in folders["llama"].iterdir():
        if "tokenizer" not in path.name:
            (tmp_path / path.name).write_bytes(path.read_bytes())
    with pytest.raises(UserError, match=f"cannot load {tmp_path} with its tokenizer"):
        get_to_know(str(tmp_path))
    with pytest.raises(ModelNotFoundError):
        get_to_know(str(tmp_path / "nothing"))


def test_what_is_known_of_a_model(folders):
    own = get_to_know(str(folders["gemma3_text"]))
    assert (own.name, own.model_type) == ("my-gemma3_text", "gemma3_text")
    assert (own.trained, own.keeps_all, own.online) == (TRAINED, False, False)
    assert own.heads == 2
    assert {"KnormPress", "SnapKVPress", "AdaKVPress"} <= set(own.presses)
    assert 0 < own.token_seconds < own.step_seconds
    assert get_to_know(str(folders["llama"])).keeps_all


def test_what_is_planned_takes_as_long_as_its_tokens_and_steps():
    own = an_own_model()
    assert Planned(None, tokens=100, steps=7, seconds=2).duration(own) == pytest.approx(3.7)
    assert Planned(None).duration(own) is None
    plans = {task.name: task for task in plan_on(own, load_experiments()).tasks}
    slower = plan_on(an_own_model(step_seconds=1.0), load_experiments()).tasks
    of_model = {"equivalence", "overhead", "evaluate", "streaming", "trace"}
    more = {t.name for t in slower if t.duration and t.duration > plans[t.name].duration}
    assert of_model <= more


def test_what_cannot_be_opened_is_left_out():
    own = an_own_model(presses=("SnapKVPress",))
    plan = plan_on(own, load_experiments())
    assert "KnormPress" in plan.left_out["headwise"]
    assert "none of KnormPress can be opened" in plan.left_out["overhead"]
    assert "StreamingLLMDecodingPress" in plan.left_out["streaming"]
    (asked,) = (task for task in plan.tasks if task.name == "evaluate")
    assert asked.options.press == ("SnapKVPress",)
    with pytest.raises(LeftOutError):
        evaluate.EXPERIMENT.on(replace(own, presses=()))
    unknown = plan_on(an_own_model(model_type="new_kind"), load_experiments())
    assert {"architectures", "isolation", "coexistence"} <= set(unknown.left_out)


def test_contexts_are_no_longer_than_the_model_was_made_for():
    own = an_own_model(trained=600)
    assert own.at_most(512, 1024) == (512,)
    assert own.at_most(1024, 2048) == (600,)
    plans = {task.name: task.options for task in plan_on(own, load_experiments()).tasks}
    assert plans["trace"].length == 512
    assert plans["throughput"].context == (512,)
    assert plan_on(replace(own, trained=100), load_experiments()).tasks


def test_published_tasks_are_asked_where_they_can_be_had(monkeypatch):
    asked_for = []

    def rows_of(published, name, task, length, data):
        asked_for.append(task)
        assert published is SETS["ruler"]
        if len(asked_for) > enough:
            raise UserError("no")
        return []

    monkeypatch.setattr(evaluate, "rows_of", rows_of)

    def published(**changed):
        datasets = evaluate.EXPERIMENT.on(an_own_model(**changed)).options.dataset
        return [name for name in datasets if name.startswith("ruler/")]

    enough = 2
    assert published() == []
    assert asked_for == []
    assert published(online=True) == ["ruler/niah_multikey_1@4096", "ruler/qa_1@4096"]
    assert published(online=True, trained=2048) == []
    enough = 3
    assert published(online=True) == []


def test_a_machine_without_a_network_is_offline(monkeypatch):
    monkeypatch.delenv("HF_DATASETS_OFFLINE")
    monkeypatch.setattr(getting_to_know.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(getting_to_know.constants, "ENDPOINT", "http://127.0.0.1:9")
    assert not getting_to_know._is_online()
