"""What the shipped model ships with, and what FastKVzipPress and LUKVPress cannot learn or do."""

from pathlib import Path

import pytest
import torch

import hooks_impl
from experiments import UserError
from experiments.loading import load_model
from experiments.testbed.facts import answer_unseen, draw
from experiments.testbed.training import fitted as training
from experiments.testbed.training.fitted import ASKED, RECENT, SINKS, fact_batches, train
from press_core import HyperparameterError, kept_lengths
from press_core.learned.calibration import CalibrationError
from press_core.learned.measured import HeadScores, streaming_heads
from tests.press_core.test_learned import same
from tests.support import both, build, filled, token_ids
from tests.test_learned_presses import close, learn

# ---- what curves are learned of ------------------------------------------------------------------


def test_texts_too_short_for_curves_are_refused(package):
    with pytest.raises(CalibrationError, match=r"4 \+ 1 protected"):
        package.LUKVPress.fit(build("llama"), [token_ids(4, 6)])


@both
def test_curves_are_learned_for_the_press_that_ranks(package):
    model, batches = build("llama"), [token_ids(4, 60)]
    filters = package.QFilterPress.fit(model, batches)
    ranking = [None, package.KnormPress(), package.QFilterPress(filters=filters)]
    fits = [package.LUKVPress.fit(model, batches, press) for press in ranking]
    assert not same(fits[0], fits[1])
    assert not same(fits[1], fits[2])
    default = package.LUKVPress().press
    assert default == package.ExpectedAttentionPress(epsilon=2e-2)
    assert same(fits[0], package.LUKVPress.fit(model, batches, default))
    with pytest.raises(HyperparameterError, match="scores tokens"):
        package.LUKVPress.fit(model, batches, package.ThinKPress())


# ---- the shipped model ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shipped():
    return load_model("facts-llama")[0]


def right(model, press):
    """Share of right answers about 16 contexts of the facts task."""
    batch = draw(16, 256, 8, torch.Generator().manual_seed(1))
    return float((answer_unseen(model, press, batch) == batch.answer_ids).float().mean())


def test_what_is_shipped_keeps_the_facts(shipped, package):
    assert right(shipped, package.FastKVzipPress(0.5)) > 0.97
    for press in (
        package.FastKVzipPress(0.9),
        package.FastKVzipPress(0.9, layerwise=True),
        package.KVzapPress(0.9, model_type="linear"),
        package.KVzapPress(0.9, model_type="mlp"),
    ):
        assert right(shipped, press) > 0.9
    expected = package.ExpectedAttentionPress(0.8, epsilon=2e-2)
    assert right(shipped, package.LUKVPress(compression_ratio=0.5)) > 0.97
    of_curves = right(shipped, package.LUKVPress(compression_ratio=0.8))
    assert of_curves > right(shipped, expected) + 0.03


def test_the_shipped_head_scores_tell_which_heads_can_stream(shipped, package):
    options = {"sink_size": SINKS, "recent_size": RECENT}
    press = package.DuoAttentionPress(0.25, **options)
    ids = next(fact_batches(1, seed=5))[:1, :60]
    kept = torch.cat(kept_lengths(filled(shipped, press, ids)))  # 4 layers of 4 KV heads
    assert sorted(kept.flatten().tolist()) == [32] * 4 + [60] * 12
    scores = press.prepare(shipped).scores
    assert torch.equal(kept == 32, streaming_heads(scores, 0.25))
    other = HeadScores(-scores)
    streaming = [
        package.DuoAttentionPress(0.5, head_scores=given, **options) for given in (None, other)
    ]
    assert right(shipped, press) > 0.95
    assert right(shipped, streaming[0]) > right(shipped, streaming[1]) + 0.2


def test_the_shipped_files_are_what_learning_them_again_gives(shipped):
    """With hooks: patches learn the same, bit for bit."""
    for name in ("ExpectedAttentionStatsPress", "QFilterPress"):
        again = learn(name, hooks_impl, shipped, fact_batches())
        close(again, hooks_impl.PRESSES[name]().prepare(shipped))
    duo, lukv = hooks_impl.DuoAttentionPress, hooks_impl.LUKVPress
    close(duo.measure(shipped, fact_batches(), SINKS, RECENT), duo().prepare(shipped))
    again = lukv.fit(shipped, fact_batches(), horizon=ASKED)
    close(again, lukv().prepare(shipped), atol=1e-3)


def test_one_command_makes_all_files(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(training, "ROWS_PER_BATCH", 4)
    monkeypatch.setattr(training, "TOKENS_PER_BATCH", 512)
    monkeypatch.setattr(training, "STEPS", 10)
    train("facts-llama", tmp_path, batches=1)
    printed = capsys.readouterr().out
    names = {path.name for path in tmp_path.iterdir()}
    folder = Path(load_model("facts-llama")[0].config.name_or_path)
    assert names == {path.name for path in folder.glob("*.safetensors")} - {"model.safetensors"}
    assert all(str(tmp_path / name) in printed for name in names)
    with pytest.raises(UserError, match="vocabulary"):
        train("stdlib-neox")
