"""Four ways to decode a head-wise pruned cache: the same logits, and nothing stays behind."""

from concurrent.futures.process import BrokenProcessPool
from contextlib import nullcontext, suppress
from copy import deepcopy
from unittest.mock import Mock

import pytest
import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import hooks_impl
from experiments import UserError
from experiments.questions.headwise import four_ways
from experiments.questions.headwise.four_ways import ERROR, FULL, SAME, UNIFORM
from experiments.testbed import variants
from experiments.testbed.families import supported_implementations
from experiments.testbed.timed_models import random_llama
from experiments.testbed.variants import VARIANTS
from press_core import UnsupportedInputError, attention_sites, cache_nbytes, kept_lengths
from press_core.budget import n_kept
from tests.support import build, filled, snapshot, token_ids, unchanged

every_variant = pytest.mark.parametrize("variant", VARIANTS.values(), ids=lambda c: c.name)
PRESS = hooks_impl.AdaKVPress(hooks_impl.KnormPress(0.5))


@pytest.fixture(scope="module")
def pruned(model):
    """A full cache of 40 tokens, and what AdaKV keeps of it."""
    return variants.prefill(model, PRESS, input_ids=token_ids(2, 40))


@pytest.fixture(scope="module")
def flex_was_used():
    """At its first use torch changes `nn.Module`, for good."""
    four_ways.trials(build("llama", num_layers=1), lengths=(24,))


def logits(model, variant, full, kept, ids):
    cache = variant.cache(deepcopy(full), kept)
    with variant.open(model, kept), torch.no_grad():
        return torch.cat([model(part, past_key_values=cache).logits for part in ids], dim=1)


# ---- the same logits -----------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gpt_neox", "gpt_oss", "gemma2"])
def test_variants_give_the_logits_of_the_reference_on(family, flex_was_used):
    offered = supported_implementations(family)
    model = build(family, attn_implementation=offered[0])
    # transformers notes it on the class
    for implementation in (*four_ways.IMPLEMENTATIONS, offered[0]):
        with suppress(ValueError):
            model.set_attn_implementation(implementation)
    with unchanged(model):
        table = four_ways.trials(model, lengths=(40, 32))
    assert len(table) == 2 * len(four_ways.IMPLEMENTATIONS) * len(VARIANTS)
    of = table[table["implementation"].isin(offered)]
    for (name, question), rows in of.groupby(["condition", "question"]):
        # No key is overlooked by more queries than a head has channels, or under capped logits.
        fails = name == "fake keys" and (question > 16 or family == "gemma2")
        assert set(rows["outcome"]) == {ERROR if fails else SAME}, (name, question)
    unsupported = table[~table["implementation"].isin(offered)]
    assert set(unsupported["outcome"]) <= {four_ways.MISSING}
    assert (table["why"] == "").equals(table["outcome"] == SAME)


@every_variant
def test_where_heads_agree_it_is_a_shorter_cache(model, variant):
    """A reference without any mask: the same tokens cut out of the cache."""
    question, kept_tokens = token_ids(1, 3, seed=1), torch.arange(30) % 3 != 1
    full = filled(model, None, token_ids(1, 30))
    with torch.no_grad():
        cut = deepcopy(full)
        for layer in cut.layers:
            layer.keys, layer.values = (s[:, :, kept_tokens] for s in (layer.keys, layer.values))
        places = torch.arange(30, 33)[None]
        expected = model(question, past_key_values=cut, position_ids=places).logits
    kept = {layer: kept_tokens.expand(1, 2, 30).clone() for layer in range(2)}
    ours = logits(model, variant, full, kept, [question])
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-5)


def test_a_variant_that_is_wrong_is_found_out(model, monkeypatch):
    """One that attends to what was evicted."""
    wrong = variants.Variant("mask by hook", lambda *_: nullcontext(), frees=False)
    monkeypatch.setitem(VARIANTS, "mask by hook", wrong)
    table = four_ways.trials(model, lengths=(40,))
    assert set(table.loc[table["condition"] == "mask by hook", "outcome"]) == {four_ways.OTHER}
    assert set(table.loc[table["condition"] == "ragged", "outcome"]) == {SAME}


# ---- scopes --------------------------------------------------------------------------------------


@every_variant
def test_scopes_leave_nothing_and_touch_what_is_told(model, pruned, variant):
    full, kept = pruned
    before, ids = snapshot(model), token_ids(2, 12, seed=3)
    expected = model(ids).logits
    logits(model, variant, full, kept, [token_ids(2, 3, seed=1)])
    assert snapshot(model) == before
    with variant.open(model, kept):
        hooks = [site.module._forward_pre_hooks for site in attention_sites(model)]
        patched = ["forward" in vars(site.module) for site in attention_sites(model)]
        patched.append("get_interface" in vars(ALL_ATTENTION_FUNCTIONS))
        hooked = variant.name == "mask by hook"
        assert patched == [not hooked] * 3
        assert [bool(of_site) for of_site in hooks] == [hooked] * 2
        assert torch.equal(model(ids).logits, expected)  # a prefill is as ever
    with pytest.raises(RuntimeError, match="inside"), variant.open(model, kept):
        raise RuntimeError("inside")
    assert snapshot(model) == before
    held = cache_nbytes(variant.cache(full, kept)) / cache_nbytes(full)
    assert held <= 0.6 if variant.name == "ragged" else held == 1


# ---- what is kept --------------------------------------------------------------------------------


def test_what_is_kept_is_read_off_the_cache(model, pruned):
    full, kept = deepcopy(pruned[0]), pruned[1]
    cache, left = filled(model, PRESS, token_ids(2, 40)), variants.evicted(full, kept)
    for pruned_cache in (cache, left):
        found = variants.kept_in(pruned_cache)
        assert set(found) == {0, 1}
        for layer, heads in found.items():
            assert torch.equal(heads, kept[layer])
            assert torch.equal(heads.sum(dim=-1), kept_lengths(pruned_cache)[layer])
            assert heads.sum() == 2 * 2 * n_kept(40, 0.5)
    with VARIANTS["ragged"].open(model, kept), torch.no_grad():
        model(token_ids(2, 1), past_key_values=left)
    assert left.get_seq_length() == 41
    for layer, untouched in zip(full.layers, pruned[0].layers, strict=True):
        assert torch.equal(layer.keys, untouched.keys)


# ---- masks ---------------------------------------------------------------------------------------


def test_masks_per_head_are_refused_where_there_are_none(model, pruned, monkeypatch):
    (site, heads), _ = variants.sites_of(model, pruned[1])
    monkeypatch.setattr(model.config, "_attn_implementation_internal", "flash_attention_2")
    with pytest.raises(UnsupportedInputError, match="one mask for all heads"):
        variants.head_mask(site, heads, None, torch.zeros(2, 1, 64), 41)


# ---- times ---------------------------------------------------------------------------------------


def test_every_cache_is_timed_and_weighed():
    ratios, advanced = (0.5, 0.8), []
    spec = random_llama("tiny", num_layers=1)
    table = four_ways.decode_times(spec, [512], ratios, 6, lambda: advanced.append(1))
    assert len(advanced) == 6
    pressed = [(name, ratio) for ratio in ratios for name in (UNIFORM, *VARIANTS)]
    found = list(zip(table["condition"], table["ratio"], strict=True))
    assert found == [(FULL, 0.0), *pressed]
    full, timed = table.iloc[0], table.iloc[1:]  # the others are compared with the full cache
    assert (full["time"], full["bytes"]) == (1, full["full_bytes"])
    assert ((timed["low"] > 0) & (timed["low"] <= timed["time"])).all()
    assert (timed["time"] <= timed["high"]).all()
    for row in timed.to_dict("records"):
        held = row["bytes"] / row["full_bytes"]
        stored = row["condition"] in (UNIFORM, "ragged")
        assert held <= (1 - row["ratio"]) * 1.03 if stored else held == 1


@pytest.mark.parametrize(
    ("name", "error"),
    [("in_new_process", BrokenProcessPool("killed")), ("torch.save", RuntimeError("disk full"))],
)
def test_what_ends_a_measurement_is_told(monkeypatch, name, error):
    monkeypatch.setattr(f"{four_ways.__name__}.{name}", Mock(side_effect=error))
    with pytest.raises(UserError, match=f"{error}; if memory or the disk"):
        four_ways.decode_times(random_llama("tiny", num_layers=1), [64], [0.5], 1)


def held_by(model, context, ratio):
    return four_ways.conditions(model, four_ways.prefilled(model, context, (ratio,)))


def test_budgets_come_out_even(model):
    held = {name.condition: cache for name, (cache, _) in held_by(model, 200, 0.75).items()}
    assert all((lengths == 50).all() for lengths in kept_lengths(held[UNIFORM]))
    shared = torch.cat(kept_lengths(held["ragged"]), dim=1)
    assert shared.unique().numel() > 1
    assert shared.double().mean() == 50
    assert {cache.get_seq_length() for cache in held.values()} == {200}


def test_timed_conditions_decode_the_same_tokens_apart(model):
    """No condition spoils the cache of another, and all four ways give the same logits."""
    before, held = snapshot(model), held_by(model, 64, 0.5)
    given = {name.condition: [] for name in held}
    hook = model.register_forward_hook(lambda *seen: outputs.append(seen[-1].logits))
    with hook:
        for name in 2 * list(held):
            outputs = given[name.condition]
            assert four_ways.step_seconds(model, held, name) > 0
    assert snapshot(model) == before
    assert {cache.get_seq_length() for cache, _ in held.values()} == {64 + len(outputs)}
    of = {name: torch.cat(outputs) for name, outputs in given.items()}
    for name in VARIANTS:
        torch.testing.assert_close(of[name], of["ragged"], rtol=0, atol=1e-5)
    assert not torch.allclose(of[FULL], of["ragged"], atol=1e-3)
    ids = torch.ones(1, len(outputs), dtype=torch.int64)
    full = four_ways.prefilled(model, 64, ()).full
    expected = model(ids, past_key_values=full).logits
    torch.testing.assert_close(of[FULL].squeeze(1), expected[0], rtol=0, atol=1e-5)
