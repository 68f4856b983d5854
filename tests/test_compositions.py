"""What presses and presses made of presses say that they evicted, and are told; their copies."""

import copy
import pickle
from dataclasses import replace

import pytest
import torch

import hooks_impl
from press_core import kept_lengths
from press_core.learned.measured import HeadScores
from tests.presses import TABLES, listed, presses_of
from tests.support import both, context_for, example_for, filled, left_padded, make, ran, token_ids

LENGTH, LAYERS, HEADS = 60, 2, 2
every_press = pytest.mark.parametrize("name", sorted(hooks_impl.PRESSES))

STEPS = TABLES["until_due"]
EARLIER = {"StreamingLLMDecodingPress": 2}  # prunes before a step, which then adds its token


def run(model, press, context, n_steps=0, since=0):
    """Share of the tokens that is gone after so many steps, and what the press says.

    Args:
        since: tokens that came after it has pruned last.
    """
    cache, _ = ran(model, press, [context, *[context[:, -1:]] * n_steps])
    kept = float(torch.stack(kept_lengths(cache)).double().mean())
    return 1 - (kept - since) / (context.shape[1] + n_steps - since), press.evicted_ratio


def evicting(package, name, model):
    """The press, such that it evicts about half of a few dozen tokens of any text."""
    press = example_for(package, name, 0.5, model)
    return replace(press, lazy_threshold=0.0) if name == "SimLayerKVPress" else press


def told(press):
    """Whether its `compression_ratio` is a field, which says what it is told."""
    return any(name == "compression_ratio" for name in vars(press))


@both
@every_press
def test_what_every_press_says_is_what_is_gone(model, package, name):
    press = evicting(package, name, model)
    finch = name == "FinchPress"  # which takes the delimiter out
    n_steps, since = STEPS.get(name, EARLIER.get(name, 0)), int(name in EARLIER)
    gone, said = run(model, press, context_for(name, 61 + finch), n_steps, since)
    gone = 1 - (1 - gone) * 62 / 61 if finch else gone
    assert said == pytest.approx(gone, abs=1e-6)
    assert press.acts_on(61) or name in STEPS
    if name == "ThinKPress":  # loses channels, and no token
        assert gone == 0
    else:
        assert 0.2 < gone < 0.9
    if name != "ThinKPress" and not told(press):
        assert press.compression_ratio == press.evicted_ratio
    if told(press):
        assert press.compression_ratio == 0.5  # what it is told stays
        assert press.evicted_ratio == pytest.approx(0.5, abs=(1 + n_steps) / 61)


@every_press
def test_where_nothing_is_evicted_nothing_is_said_to_be(model, package, name):
    """Contexts of two tokens, and presses that were told to evict half."""
    press = example_for(package, name, 0.5, model)
    context = context_for(name, 9)[:, -9:] if name == "FinchPress" else token_ids(1, 2)
    gone, said = run(model, press, context)
    if name == "FinchPress":
        gone = 1 - (1 - gone) * 9 / 8  # without the delimiter
    assert said == pytest.approx(gone, abs=1e-6)
    if not told(press) and name != "ThinKPress":
        assert press.compression_ratio == said


def test_a_window_longer_than_the_context(model, package):
    press = package.AdaKVPress(package.SnapKVPress(0.5))
    assert press.compression_ratio == 0.5
    assert run(model, press, token_ids(1, 40)) == (0, 0)
    assert press.compression_ratio == 0
    assert run(model, press, token_ids(1, 80)) == (0.5, 0.5)
    assert press.compression_ratio == 0.5


# ---- of compositions -----------------------------------------------------------------------------


def duo(package):
    scores = HeadScores(torch.tensor([[0.9, 0.1], [0.2, 0.8]]))
    return package.DuoAttentionPress(0.5, head_scores=scores, sink_size=2, recent_size=7)


MEASURED = listed("measured") | {"duo": lambda p: p.ComposedPress([duo(p)])}


@pytest.mark.parametrize("name", MEASURED)
def test_what_was_really_evicted_is_reported(package, name):
    """Of padded rows no padding, and in each scope anew."""
    model, press = make(), MEASURED[name](package)
    ids, mask, positions = left_padded(2, LENGTH, [30, 0])
    given = {"attention_mask": mask, "position_ids": positions}
    for inputs, length in ((given, 45), ({}, LENGTH)):
        cache = filled(model, press, ids, **inputs)
        n_kept = sum(int(kept.sum()) for kept in kept_lengths(cache))
        assert press.evicted_ratio == pytest.approx(1 - n_kept / (2 * HEADS * LAYERS * length))
        assert 0.2 < press.evicted_ratio < 1
        assert press.compression_ratio in (0.5, press.evicted_ratio)
        assert press.compression_count == 1
        assert all(part.last_run is None for part in press.parts), "it measures what was opened"


def test_ratios_of_composed_presses_multiply(package):
    inner = [package.KnormPress(0.5), package.KnormPress(0.2), package.KnormPress(0.75)]
    press = package.ComposedPress(inner)
    assert press.compression_ratio == pytest.approx(1 - 0.5 * 0.8 * 0.25)
    assert package.ComposedPress([package.ThinKPress(0.5)]).compression_ratio == 0.25
    assert package.PerLayerCompressionPress(inner[0], [0.5, 0.25]).compression_ratio == 0.375
    snapkv, think = package.SnapKVPress(0.5), package.ThinKPress(0.5)
    assert package.ComposedPress([think, inner[0]]).keeps(100) == 50
    assert package.KeyRerotationPress(package.ComposedPress([inner[0], snapkv])).keeps(100) == 50
    cache = filled(make(), press, token_ids(1, LENGTH))
    assert {int(n) for kept in kept_lengths(cache) for n in kept.flatten()} == {6}


@both
@presses_of("ratios")
def test_the_ratio_of_a_composition_can_be_set(package, make_press):
    """Of the press itself; none that it was made of changes."""
    inner, ids = package.KnormPress(0.5), token_ids(1, 50)
    press, model = make_press(package, inner=inner), make(num_layers=1)
    press.compression_ratio = 0.9
    filled(model, press, ids)
    press.compression_ratio = 0.36
    assert press.compression_ratio == pytest.approx(0.36)
    assert inner.compression_ratio == 0.5
    assert float(kept_lengths(filled(model, press, ids))[0].float().mean()) == 32
    assert press.with_ratio(0.1).compression_ratio == pytest.approx(0.1)
    assert press.compression_ratio == pytest.approx(0.36)


# ---- taking off, counting, copying ---------------------------------------------------------------


PRESSES = listed("copied")


@both
@pytest.mark.parametrize("name", PRESSES)
def test_remove_takes_off_the_scope_opened_last(package, name):
    models, press, ids = [make(), make()], PRESSES[name](package), token_ids(1, LENGTH)
    press.remove()  # there is none yet
    handles = [press.register(model) for model in models]
    press.compression_ratio = 0.3  # forgets what was measured, not what is open
    press.remove()
    press.remove()
    lengths = [int(kept_lengths(filled(model, None, ids))[0].max()) for model in models]
    assert lengths[0] < lengths[1] == LENGTH
    handles[0].remove()
    press.register(models[0]).remove()


def pickled(press):
    return pickle.loads(pickle.dumps(press))


@both
@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickled])
@pytest.mark.parametrize("name", PRESSES)
def test_a_copy_of_a_press_that_has_run_is_a_fresh_press(package, name, copied):
    model, press, ids = make(), PRESSES[name](package), token_ids(1, LENGTH)
    cache = filled(model, press, ids)
    with press(model):
        other = copied(press)
    assert other == press
    assert other.last_run is None
    assert other.compression_count == 0
    for one, two in zip(filled(model, other, ids).layers, cache.layers, strict=True):
        assert torch.equal(one.keys, two.keys)
    assert press.last_run is not other.last_run
