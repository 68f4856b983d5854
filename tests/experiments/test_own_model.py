"""A study of a model of the user's own: what it runs, what it says beforehand, and its report."""

import re
from dataclasses import replace
from io import StringIO
from unittest.mock import patch

import pandas as pd
import pytest
import torch
from rich.console import Console
from tokenizers import ByteLevelBPETokenizer, Tokenizer, processors
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from experiments import EXPERIMENTS, load_experiments
from experiments.framework.manifest import read_manifest
from experiments.framework.own_model import LeftOutError, OwnModel, Planned
from experiments.framework.plan import plan_on
from experiments.questions import evaluate
from experiments.study import run_plan
from experiments.testbed.facts import FILLER
from experiments.testbed.getting_to_know import get_to_know
from tests.experiments.tiny import CASES, REFUSED, cli, refused
from tests.support import build, table_beside

TRAINED = 512


def tokenizer_for(family: str) -> PreTrainedTokenizerFast:
    """Byte-level BPE; with a first token as Llama and Gemma have it, or none."""
    special = ["<pad>", "<s>", "</s>"] if family in ("llama", "gemma3_text") else ["<pad>", "</s>"]
    trained = ByteLevelBPETokenizer()
    text = [" ".join(FILLER)] * 2
    trained.train_from_iterator(text, 600, special_tokens=special, show_progress=False)
    tokenizer = Tokenizer.from_str(trained.to_str())
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
    for family in ("llama", "gemma3_text", "gpt_oss", "gpt_neox"):
        model = build(family, num_layers=2 if family == "llama" else 1)
        tokenizer = tokenizer_for(family)
        model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
        for embeddings in (model.get_input_embeddings(), model.get_output_embeddings()):
            torch.nn.init.normal_(embeddings.weight, std=embeddings.weight.shape[-1] ** -0.5)
        model.config.max_position_embeddings = TRAINED
        found[family] = tmp_path_factory.mktemp("models") / f"my-{family}"
        model.save_pretrained(found[family])
        tokenizer.save_pretrained(found[family])
    return found


def an_own_model(**changed) -> OwnModel:
    known = OwnModel(
        **{"model": "you/yours", "name": "you/yours", "model_type": "llama"},
        **{"dtype": "float32", "device": "cpu"},
        **{"parameters": 10**9, "trained": 8192, "heads": 64, "keeps_all": True},
        presses=("KnormPress", "SnapKVPress", "KeyRerotationPress", "StreamingLLMDecodingPress"),
        **{"token_seconds": 0.01, "step_seconds": 0.1},
    )
    return replace(known, **changed)


LESS = {
    name: {field: tuple(x) if isinstance(x, list) else x for field, x in options.items()}
    for name, options in table_beside(__file__, "less").items()
}
"""Options that leave experiments on the model itself next to nothing to do."""


def run_less(plan, experiments, output, **told) -> None:
    """Run a plan on next to nothing into a folder."""
    text = output.with_suffix(".txt")  # to read the whole standard library takes seconds
    text.write_text(" ".join(FILLER * 20))
    told = LESS | {"streaming": LESS["streaming"] | {"text": text}} | told
    tasks = []
    for task in plan.tasks:
        options = replace(task.planned.options, **told.get(task.name, {}))
        tasks.append(task._replace(planned=replace(task.planned, options=options)))
    console = Console(file=StringIO(), width=200)
    failed = run_plan(plan._replace(tasks=tasks), experiments, output, console)
    assert failed == [], console.file.getvalue()


def test_every_experiment_runs_on_a_model(folders, tmp_path):
    folder = folders["gpt_neox"]
    own, experiments = get_to_know(str(folder)), load_experiments()
    plan, output = plan_on(own, experiments), tmp_path / "study"
    left_out = {"intrusiveness", "quality", "seeds"}
    assert set(plan.left_out) == left_out
    assert {task.name for task in plan.tasks} == set(EXPERIMENTS) - left_out
    run_less(plan, experiments, output)
    page = (output / "report.html").read_text()
    assert "<code>my-gpt_neox</code>" in page
    assert "What was left out" in page
    assert "small random models" in page
    assert read_manifest(output).model == str(folder)
    names = ("equivalence", "architectures", "isolation", "coexistence", "trace")
    table = {name: pd.read_csv(output / f"{name}.csv") for name in names}
    assert set(table["isolation"]["outcome"]) == {"untouched"}
    assert set(table["coexistence"]["outcome"]) == {"right"}
    assert set(table["architectures"][["hook", "patch"]].stack()) == {"right"}
    assert set(table["equivalence"]["dtype"]) == {own.dtype}
    assert set(table["trace"]["model"]) == {"my-gpt_neox"}


@pytest.mark.parametrize("family", ["gemma3_text", "gpt_oss"])
def test_what_opens_a_press_runs_on_a_model_with_sliding_windows(folders, tmp_path, family):
    experiments, output = load_experiments(), tmp_path / "study"
    opening = "equivalence", "isolation", "overhead", "error", "trace"
    plan = plan_on(get_to_know(str(folders[family])), experiments, opening)
    run_less(plan, experiments, output)
    assert not pd.read_csv(output / "equivalence.csv")["differ"].any()
    assert set(pd.read_csv(output / "isolation.csv")["outcome"]) == {"untouched"}


def test_a_model_that_was_never_trained(tmp_path):
    """Its keys have one norm, so that presses which go by norms refuse it."""
    folder, tokenizer = tmp_path / "untrained", tokenizer_for("gpt_neox")
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        max_position_embeddings=TRAINED,
        **{"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 8},
        **{"num_attention_heads": 4, "num_key_value_heads": 2},
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    experiments, output = load_experiments(), tmp_path / "study"
    plan = plan_on(get_to_know(str(folder)), experiments, ("equivalence",))
    presses = {"press": ("KnormPress", "LUKVPress", "SnapKVPress")}
    run_less(plan, experiments, output, equivalence=presses)
    compared = pd.read_csv(output / "equivalence.csv").set_index("press")
    refused = compared["refusal"].loc[["KnormPress", "LUKVPress"]]
    assert refused.str.contains("different norms").all()
    assert (compared["tokens"].loc["SnapKVPress"] > 0).all()


# ---- the command -------------------------------------------------------------------------------


def test_the_command_tells_what_it_takes(folders, tmp_path):
    folder = folders["llama"]
    with patch("experiments.study.measured", side_effect=KeyboardInterrupt):
        first = cli("study", "--model", folder, "--output", tmp_path, status=130)
    told = " ".join(first.stderr.split())
    for words in CASES["announced"]:
        assert re.search(words, told)
    assert read_manifest(tmp_path).waiting[:2] == ["equivalence", "architectures"]
    assert f"holds a study of {folder}" in refused("study", "--output", tmp_path)


@pytest.mark.parametrize(("args", "words"), REFUSED["studies"].items())
def test_what_cannot_be_is_told_in_a_line(tmp_path, monkeypatch, args, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "trace.csv").write_text("mine")

    def known(*_):
        assert "foreign" not in args, "the folder is looked at before the model"
        return an_own_model()

    monkeypatch.setattr("experiments.study.get_to_know", known)
    assert words in " ".join(cli("study", *args.split(), status=2).stderr.split())


# ---- getting to know a model ---------------------------------------------------------------------


def test_what_is_known_of_a_model(folders):
    own = get_to_know(str(folders["gemma3_text"]))
    assert (own.name, own.model_type) == ("my-gemma3_text", "gemma3_text")
    assert (own.trained, own.keeps_all) == (TRAINED, False)
    assert own.heads == 2
    assert {"KnormPress", "SnapKVPress", "AdaKVPress"} <= set(own.presses)
    assert 0 < own.token_seconds < own.step_seconds
    assert get_to_know(str(folders["llama"])).keeps_all


def tasks_on(own: OwnModel):
    return {task.name: task for task in plan_on(own, load_experiments()).tasks}


def test_what_is_planned_takes_as_long_as_its_tokens_and_steps():
    own = an_own_model(dtype="bfloat16", attn="eager")
    assert Planned(None, tokens=100, steps=7, seconds=2).duration(own) == pytest.approx(3.7)
    assert Planned(None).duration(own) is None
    slow, usual = replace(own, step_seconds=1.0), tasks_on(own)
    slower = {name: task.planned.duration(slow) for name, task in tasks_on(slow).items()}
    more = {n for n, took in slower.items() if took and took > usual[n].planned.duration(own)}
    assert {"equivalence", "overhead", "evaluate", "streaming", "trace"} <= more
    assert usual["equivalence"].planned.options.attn == ("eager",)
    assert usual["evaluate"].planned.options.attn_implementation == "eager"
    study = "python -m experiments study --model you/yours --dtype bfloat16"
    assert usual["trace"].repeat == f"{study} --only trace"


def test_what_cannot_be_opened_is_left_out():
    own = an_own_model(presses=("SnapKVPress",))
    plan = plan_on(own, load_experiments())
    assert "KnormPress" in plan.left_out["overhead"]
    assert "StreamingLLMDecodingPress" in plan.left_out["streaming"]
    (asked,) = (task for task in plan.tasks if task.name == "evaluate")
    assert asked.planned.options.press == ("SnapKVPress",)
    with pytest.raises(LeftOutError):
        evaluate.EXPERIMENT.on(replace(own, presses=()))
    unknown = plan_on(an_own_model(model_type="new_kind"), load_experiments())
    assert {"architectures", "isolation", "coexistence"} <= set(unknown.left_out)
    sliding = plan_on(an_own_model(model_type="new_kind", keeps_all=False), load_experiments())
    assert "sliding windows" in sliding.left_out["headwise"]


def test_contexts_are_no_longer_than_the_model_was_made_for():
    own = an_own_model(trained=600)
    assert own.at_most(512, 1024) == (512,)
    assert own.at_most(1024, 2048) == (568,)  # other tokens follow
    assert own.at_most(1024, 2048, then=0) == (600,)
    tasks = tasks_on(own)
    assert tasks["trace"].planned.options.length == 512
    assert tasks["throughput"].planned.options.context == (512,)
    assert tasks_on(replace(own, trained=100))
