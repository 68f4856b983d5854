"""Trainings of the shipped models: a few steps of each, and what their model cards say."""

from __future__ import annotations

import re

import pytest
import torch
import typer
from transformers import GPTNeoXForCausalLM, LlamaForCausalLM
from typer.testing import CliRunner

from experiments.loading import load_model
from experiments.testbed.asking import answer_unseen
from experiments.testbed.facts import draw
from experiments.testbed.training import common, facts, sink, stdlib


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A model of the facts task after a few steps, evaluated on a few answers."""
    folder = tmp_path_factory.mktemp("facts")
    evaluate, evaluate_depths = facts.evaluate, facts.evaluate_depths
    with pytest.MonkeyPatch.context() as patch:
        sizes = {"contexts": (16, 32), "facts": (1, 2), "answers": 4}
        patch.setattr(facts, "evaluate", lambda model: evaluate(model, **sizes))
        depths = {"context": 16, "depths": (0.0, 1.0), "answers": 4}
        patch.setattr(facts, "evaluate_depths", lambda model: evaluate_depths(model, **depths))
        facts.train(folder, seed=3, max_steps=2, decay_steps=1, progress=False)
    return folder


def test_a_model_of_facts_is_saved_with_its_tokenizer(trained):
    model, tokenizer = load_model(str(trained))
    assert isinstance(model, LlamaForCausalLM)
    torch.manual_seed(3)
    assert not torch.equal(model.lm_head.weight, facts.build_model().lm_head.weight)  # it moved
    batch = draw(2, 16, 2, torch.Generator().manual_seed(0))
    assert answer_unseen(model, None, batch).shape == (2, 2)
    assert tokenizer("alice").input_ids == load_model("facts-llama")[1]("alice").input_ids


def test_the_card_of_facts_says_how_it_was_trained_and_measured(trained):
    card = (trained / "README.md").read_text()
    assert "--seed 3 --max-steps 2 --max-minutes inf --decay-steps 1`" in card
    assert "128 keys (first names), 128 values" in card
    assert re.search(
        r"\| words \| 1 \| 2 \|\n\|--:\|--:\|--:\|\n\| 16 \| [\d.]+ \| [\d.]+ \|", card
    )
    assert re.search(r"\| depth \| 0% \| 100% \|\n.*\n\| right \| [\d.]+ \| [\d.]+ \|", card)
    assert not re.findall(r"[{}]", card)


def test_the_card_of_stdlib_says_how_it_was_trained_and_measured(tmp_path):
    run = stdlib.Run(
        seed=3,
        steps=7,
        minutes=2.0,
        threads=1,
        train_tokens=10_000,
        held_out_tokens=500,
        train_unknown=0.05,
        held_out_unknown=0.06,
    )
    measures = stdlib.Measures(2.0, [0.01, 0.02], "def f(x):")
    model = stdlib.build_model()
    assert isinstance(model, GPTNeoXForCausalLM)
    stdlib.write_card("stdlib", tmp_path, run, stdlib.figures(model, run, measures))
    card = (tmp_path / "README.md").read_text()
    assert "--seed 3 --steps 7`" in card
    assert "10,000 tokens; every 20th module" in card
    assert "In blocks of 256 tokens: 2.000 nats per token, a perplexity of 7.4." in card
    assert "No layer has made it an attention sink" in card
    assert "```text\ndef f(x):\n```" in card
    assert not re.findall(r"[{}]", card)


def test_an_update_goes_down_the_gradient():
    model = facts.build_model()
    batch = draw(8, 16, 2, torch.Generator().manual_seed(0))
    optimizer = torch.optim.AdamW(model.parameters())
    losses = [facts._step(model, optimizer, batch, rate)[0] for rate in (0.5, 0.5, 0.0, 0.0)]
    assert losses[0] > losses[1] > losses[2]
    assert losses[2] == losses[3]  # at a rate of zero nothing moves


@pytest.mark.parametrize("module", [facts, stdlib, sink])
def test_the_flags_that_the_cards_tell_are_there(module):
    app = typer.Typer()
    app.command()(module.train)
    shown = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "160"}).output
    card = common._CARDS / f"{module.__name__.rpartition('.')[2]}.md"
    told = re.search(r"- command: `(.*)`", card.read_text())[1]
    assert re.findall(r"--[a-z-]+", told)
    assert all(f"{flag} " in shown for flag in [*re.findall(r"--[a-z-]+", told), "--threads"])
