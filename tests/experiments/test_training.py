"""Trainings of the shipped models: a few steps of each."""

import pytest
import torch

from experiments.loading import load_model
from experiments.testbed.facts import answer_unseen, draw
from experiments.testbed.training import facts, loop, sink, stdlib


def test_a_model_of_facts_is_trained_and_saved(tmp_path, monkeypatch, capsys):
    evaluate = facts.evaluate
    for name, few in (("TOKENS_PER_STEP", 500), ("CURRICULUM_STEPS", 2), ("DECAY_STEPS", 1)):
        monkeypatch.setattr(facts, name, few)
    monkeypatch.setattr(facts, "evaluate", lambda model: evaluate(model, (16, 32), (1, 2), 4))
    facts.train(tmp_path, seed=3)
    model, tokenizer = load_model(str(tmp_path))
    torch.manual_seed(3)
    weights = [m.lm_head.weight for m in (model, loop.untrained("facts-llama"))]
    assert not torch.equal(*weights)  # it moved
    assert tokenizer("alice").input_ids == load_model("facts-llama")[1]("alice").input_ids
    batch = draw(4, 16, 2, torch.Generator().manual_seed(0))
    assert answer_unseen(model, None, batch).shape == (4, 2)
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[-2:]] == ["16", "32"]


def test_the_shipped_model_passes_the_evaluation():
    found = facts.evaluate(load_model("facts-llama")[0], (64, 128), (1, 8), 40)
    assert (found > 0.95).all(axis=None)


@pytest.mark.parametrize("training", [stdlib, sink], ids=["stdlib", "sink"])
def test_a_model_of_the_standard_library_is_trained_and_saved(
    tmp_path, monkeypatch, capsys, training
):
    _, tokenizer = load_model("stdlib-neox")
    stream = torch.randint(3, len(tokenizer), (4_000,), generator=torch.Generator().manual_seed(0))
    text = stdlib.Text(tokenizer, stream, stream[:1_000])
    monkeypatch.setattr(stdlib.Text, "load", lambda: text)
    monkeypatch.setattr(stdlib, "ROWS", 2)
    drawn = stdlib._draw(stream, torch.Generator())[:, 1:]  # runs of the text
    assert all((stream.unfold(0, drawn.shape[1], 1) == row).all(dim=1).any() for row in drawn)
    training.train(tmp_path, seed=3, steps=2)
    model, saved = load_model(str(tmp_path))
    assert saved.get_vocab() == tokenizer.get_vocab()
    words = [m.get_input_embeddings().weight for m in (model, load_model("stdlib-neox")[0])]
    moved = float((words[0] - words[1]).detach().abs().max())
    assert (moved < 0.05) is (training is sink)  # which begins with that model
    assert moved > 0
    printed = capsys.readouterr().out.splitlines()
    assert "nats per held-out token" in printed[-4]
    assert printed[-1].startswith("heads of layer 2 pay <bos> ")
