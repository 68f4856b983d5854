"""The scope in which head-wise compressed caches are decoded: reach, and what it leaves alone."""

import copy
import itertools
import pickle

import pytest
import torch

import hooks_impl
import patch_impl
from attention_patch import headwise
from press_core import HyperparameterError, ScopeError, UnsupportedModelError, attention_sites
from tests.support import both, build, filled, snapshot, token_ids, unchanged

pytestmark = pytest.mark.usefixtures("left_as_it_was")
LENGTH, QUESTION = 70, token_ids(1, 5, seed=1)


def ada(package=hooks_impl, ratio=0.5):
    return package.AdaKVPress(package.KnormPress(ratio), alpha_safeguard=0.1)


def compressed(model, press=None):
    """The cache of a context after an open and closed scope."""
    return filled(model, press or ada(), token_ids(1, LENGTH))


def ask(model, cache, ids=QUESTION):
    """Logits of a question and of two more steps."""
    steps = [ids, ids[:, :1], ids[:, 1:2]]
    return torch.cat([model(new, past_key_values=cache).logits for new in steps], dim=1)


def plain(model):
    """The same after an uncompressed context."""
    return ask(model, filled(model, None, token_ids(1, LENGTH)))


# ---- with it and without it ----------------------------------------------------------------------


@both
def test_without_it_such_a_cache_raises_and_stays_as_it_was(package, model):
    cache = compressed(model, ada(package))
    untouched = compressed(model, ada(package))
    for ids in (QUESTION, QUESTION[:, :1]):
        with pytest.raises(ScopeError, match=r"attention_patch\.headwise\(model\)"):
            model(ids, past_key_values=cache)
    with headwise(model):
        assert torch.equal(ask(model, cache), ask(model, untouched))
    with pytest.raises(ScopeError):
        model(QUESTION, past_key_values=cache)


@both
def test_other_scopes_do_not_do(package, model):
    """Of another model, and of a press that is not head-wise."""
    cache, other = compressed(model), build("llama", num_layers=3)
    scopes = headwise(other), ada(package)(other), package.KnormPress(0.5)(model)
    with scopes[0], scopes[1], scopes[2], pytest.raises(ScopeError):
        model(QUESTION, past_key_values=cache)


# ---- back ends -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("backend", "reason"),
    [("dense", "'dense'.*known: blocks, varlen"), ("varlen", "CUDA.*on cpu.*use 'blocks'")],
)
def test_back_ends_that_will_not_do_are_refused_before_anything_is_installed(
    backend, reason, model
):
    with pytest.raises(HyperparameterError, match=reason):
        headwise(model, backend=backend).__enter__()


def test_a_back_end_that_does_is_the_one_that_attends(model):
    caches = [compressed(model) for _ in range(2)]
    found = []
    for backend, cache in zip((None, "blocks"), caches, strict=True):
        with headwise(model, backend=backend):
            found.append(model(QUESTION, past_key_values=cache).logits)
    assert torch.equal(*found)
    assert caches[1].layers[0].attended_by == "blocks"


def test_models_whose_attention_cannot_be_taken_over_are_refused():
    model = build("gpt2", attn_implementation="eager")
    for layer in model.transformer.h:
        layer.attn.reorder_and_upcast_attn = True
    refused = pytest.raises(UnsupportedModelError, match=r"head by head.*load")
    with unchanged(model), refused:
        headwise(model).__enter__()


# ---- what it leaves behind -----------------------------------------------------------------------


def test_one_scope_may_be_entered_several_times(model):
    before, scope = snapshot(model), headwise(model)
    with scope:
        with scope:
            expected = ask(model, compressed(model))
        assert torch.equal(ask(model, compressed(model)), expected)
    assert snapshot(model) == before
    with scope:
        assert torch.equal(ask(model, compressed(model)), expected)
    scope.__exit__()  # it is closed
    assert snapshot(model) == before
    with pytest.raises(ZeroDivisionError), headwise(model):
        raise ZeroDivisionError


ORDERS = list(itertools.permutations(range(4)))


@pytest.mark.parametrize("order", ORDERS[::3], ids=str)
def test_scopes_of_both_packages_closed_in_any_order(order, model):
    """As long as one of those that attend is open, the cache can be decoded; all the same bits."""
    whole = compressed(model)
    with headwise(model):
        expected = ask(model, copy.deepcopy(whole))
    presses = [ada(hooks_impl), ada(patch_impl), hooks_impl.SnapKVPress(0.0)]
    opened = [*(press.register(model) for press in presses), headwise(model).__enter__()]
    attending = {0, 1, 3}
    for index in order:
        cache = copy.deepcopy(whole)
        if attending:
            assert torch.equal(ask(model, cache), expected)
        else:
            with pytest.raises(ScopeError):
                ask(model, cache)
        attending -= {index}
        opened[index].__exit__(None, None, None)


def test_copies_made_inside_are_free_of_it(model):
    cache, reference = compressed(model), plain(model)
    with headwise(model):
        copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
        for other in copies:
            assert torch.equal(plain(other), reference)
            with pytest.raises(ScopeError):
                other(QUESTION, past_key_values=copy.deepcopy(cache))
    clean = snapshot(model)
    for other in copies:
        assert snapshot(other).keys() == clean.keys()


# ---- bystanders ----------------------------------------------------------------------------------


@both
def test_other_models_and_plain_caches_get_the_same_bits(package, model):
    others = [build("llama"), build("qwen3"), build("gpt_neox")]
    others.append(build("gemma2", attn_implementation="eager"))
    expected = [plain(other) for other in (model, *others)]
    with headwise(model):
        for other, logits in zip((model, *others), expected, strict=True):
            assert torch.equal(plain(other), logits)
    with ada(package, 0.9)(model):
        for other, logits in zip(others, expected[1:], strict=True):
            assert torch.equal(plain(other), logits)


# ---- whatever else is patched there --------------------------------------------------------------


@both
def test_every_site_is_served_and_no_other_module(package, model):
    """Hooks choose, and lean on the scope: forwards of attention modules are what it patches."""
    with ada(package)(model):
        patched = {name for name, module in model.named_modules() if "forward" in vars(module)}
    decoder = {"model"} if package is patch_impl else set()  # where a patch hears of a forward
    assert patched == {site.name for site in attention_sites(model)} | decoder
