"""DMSPress: what scores below a threshold is evicted once it leaves a window, head by head."""

import pytest
import torch
from transformers import DynamicCache

from attention_patch import headwise
from press_core import HyperparameterError, PressError, kept_lengths
from tests.presses import TABLES
from tests.slow import Whole
from tests.support import both, build, filled, forwards, held, left_padded, make, ran, token_ids


def scores_in(whole):
    """What KnormPress scores, per layer `(B, H_kv, n)`."""
    return [-layer.keys.norm(dim=-1) for layer in whole.cache.layers]


def threshold_of(model, ids):
    """Halfway between the scores of all keys, so that it decides something in every head."""
    whole = Whole(model)
    whole(ids)
    return float(torch.cat(scores_in(whole)).median())


@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
@pytest.mark.parametrize("window", [1, 8, 100])
@pytest.mark.parametrize("decoding", [False, True])
def test_what_scores_low_is_evicted_once_it_leaves_the_window(package, family, window, decoding):
    """At each step, and the logits are those of heads that see what is left."""
    model, cache = make(family), DynamicCache(config=make(family).config)
    given = forwards([30, 1, 5, *[1] * 8], batch=2)
    threshold, whole = threshold_of(model, torch.cat(given, dim=1)), Whole(make(family))
    press = package.DMSPress(package.KnormPress(), threshold, window, decoding)
    seen, share = 0, 0.0
    with press(model):
        for ids in given:
            logits = model(ids, past_key_values=cache).logits
            torch.testing.assert_close(logits, whole(ids), rtol=0, atol=1e-10)
            seen += ids.shape[1]
            judged = seen - window if decoding else 30 - window
            stays = torch.stack(scores_in(whole)) >= threshold
            stays |= torch.arange(seen) >= judged
            whole.shown = [
                [[head.nonzero().flatten().tolist() for head in row] for row in layer]
                for layer in stays
            ]
            assert held(cache) == whole.shown
            share = 1 - float(stays.double().mean())
            if decoding or seen == 30:
                assert press.compression_ratio == pytest.approx(share)
    assert (share > 0) == (window < 30 or (decoding and window < seen))


def test_equal_to_the_threshold_is_kept(package):
    model, ids = make(num_layers=1), token_ids(1, 30)
    scores = -filled(model, None, ids).layers[0].keys.norm(dim=-1)[0, 0]
    press = package.DMSPress(package.KnormPress(), float(scores[3]), sliding_window_size=1)
    expected = [p for p in range(30) if scores[p] >= scores[3] or p == 29]
    assert held(filled(model, press, ids))[0][0][0] == expected
    assert 3 in expected


def test_contexts_that_the_scorer_leaves_whole(package):
    """Too short for SnapKV's window: nothing is known that could be below a threshold."""
    model = make()
    press = package.DMSPress(package.SnapKVPress(window_size=16), 0.03, sliding_window_size=4)
    for kept in kept_lengths(filled(model, press, token_ids(1, 12))):
        assert kept.tolist() == [[12, 12]]
    ids, mask, positions = left_padded(2, 40, [0, 35])
    cache = filled(model, press, ids, attention_mask=mask, position_ids=positions)
    for kept in kept_lengths(cache):
        assert kept[1].tolist() == [5, 5]
        assert kept[0].sum() < 70


@both
@pytest.mark.parametrize("between", ["headwise", "without decoding", "cropped", "adakv"])
def test_forwards_that_a_threshold_did_not_see(package, between):
    """Evicted is what was judged and found wanting, or the scope says that it cannot know."""
    model, given = make(num_layers=1), forwards([30] + [1] * 20)
    threshold = threshold_of(model, torch.cat(given, dim=1))
    press = package.DMSPress(package.KnormPress(), threshold, 8, decoding=True)
    silent = package.DMSPress(package.KnormPress(), threshold, 8)
    first = package.AdaKVPress(package.KnormPress(0.3)) if between == "adakv" else press
    cache, n_before = filled(model, first, given[0]), 1 if between == "cropped" else 6
    reading = silent if between == "without decoding" else headwise
    if between == "cropped":
        filled(model, reading, token_ids(1, 5, seed=3), cache).crop(-5)
    ran(model, reading, given[1:n_before], cache)
    gone_before = [set(range(30)) - set(head) for head in held(cache)[0][0]]
    try:
        ran(model, press, given[6:], cache)
    except PressError:
        return
    whole = Whole(model)  # of one layer, keys know nothing of what is seen
    whole(torch.cat(given[:n_before] + given[6:], dim=1))
    heads = zip(scores_in(whole)[0][0], held(cache)[0][0], gone_before, strict=True)
    for scores, positions, gone in heads:
        unjudged = gone if between == "adakv" else set()  # evicted by no threshold
        found = set(range(len(scores))) - set(positions) - unjudged
        assert all(scores[p] < threshold for p in found)


@both
def test_a_question_taken_back_is_forgotten_by_the_threshold_too(package):
    """Nothing was evicted since, so that the cache can be cropped."""
    model, given = make(num_layers=1), forwards([30] + [1] * 12)
    whole = Whole(model)
    whole(torch.cat(given, dim=1))
    scores = scores_in(whole)[0][0]
    threshold = float(scores[:, 22:24].min()) - 1e-9  # the two that leave the window next stay
    assert int((scores < threshold).sum()) > 4
    press, found = package.DMSPress(package.KnormPress(), threshold, 8, decoding=True), []
    for asked in (False, True):
        with press(model):
            cache = filled(model, None, given[0])
            if asked:
                filled(model, None, token_ids(1, 2, seed=3), cache).crop(-2)
            ran(model, None, given[1:], cache)
        found.append(held(cache))
    assert found[0] == found[1]


def of_ones_own(package, **declared):
    """What KnormPress scores, in a user's words."""

    class Own(package.ScorerPress):
        def score(self, *given):
            keys = given[2] if len(given) > 1 else given[0].keys
            return -keys.norm(dim=-1)

    return type("Own", (Own,), declared)()


@both
def test_new_tokens_are_judged_by_a_score_of_ones_own(package):
    model, kept, (context, *steps) = build("llama"), [], forwards([30] + [1] * 12, batch=2)
    for inner in (of_ones_own(package), package.KnormPress()):
        press = package.DMSPress(inner, -4.0, sliding_window_size=6, decoding=True)
        cache, outer = filled(model, press, context), press if kept else inner
        with outer(model):
            ran(model, press, steps, cache)
        kept.append(torch.stack(kept_lengths(cache)))
    with pytest.raises(PressError, match="no press can prune again"):
        ran(model, package.H2OPress(0.5), steps, cache)
    assert torch.equal(*kept)
    assert kept[0].unique().numel() > 1
    assert int(kept[0].min()) < 36  # of those that came one by one, some are gone


@both
@pytest.mark.parametrize("name", TABLES["comparing"])
def test_one_token_is_not_judged_by_a_comparison(package, name):
    press, refused = getattr(package, name)(), "independently"
    package.DMSPress(press, 0.0)
    weighing = package.CriticalKVPress(press, first_stage_ratio=0.0)
    for inner in (press, weighing, of_ones_own(package, independent=False)):
        with pytest.raises(HyperparameterError, match=refused):
            package.DMSPress(inner, 0.0, decoding=True)
    weighing = package.CriticalKVPress(package.KnormPress(), first_stage_ratio=0.0)
    package.DMSPress(weighing, 0.0, decoding=True)  # the first stage alone compares tokens
