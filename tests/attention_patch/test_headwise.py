"""The scope in which head-wise compressed caches are decoded: reach, and what it leaves alone."""

from __future__ import annotations

import copy
import gc
import itertools
import pickle
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import wrapt
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import hooks_impl
import patch_impl
from attention_patch import headwise, intercept, with_override
from press_core import (
    HyperparameterError,
    RaggedLayer,
    ScopeError,
    UnsupportedModelError,
    attention_sites,
)
from press_core.cache.channels import ChannelPrunedLayer
from tests.support import both, build, filled, snapshot, token_ids

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
LENGTH, QUESTION = 70, token_ids(1, 5, seed=1)


@pytest.fixture
def model() -> PreTrainedModel:
    return build("llama", num_layers=3)


@pytest.fixture(autouse=True)
def _not_compiled():
    with torch.compiler.set_stance("force_eager"):
        yield


def ada(package: Any = hooks_impl, ratio: float = 0.5) -> Any:
    return package.AdaKVPress(package.KnormPress(ratio), alpha_safeguard=0.1)


def compressed(model: Any, press: Any = None, length: int = LENGTH) -> DynamicCache:
    """The cache of a context after an open and closed scope."""
    return filled(model, press or ada(), token_ids(1, length))


def ask(model: Any, cache: Any, ids: Tensor = QUESTION) -> Tensor:
    """Logits of a question and of two more steps."""
    steps = [ids, ids[:, :1], ids[:, 1:2]]
    return torch.cat([model(new, past_key_values=cache).logits for new in steps], dim=1)


def plain(model: Any, ids: Tensor = QUESTION) -> Tensor:
    """The same after an uncompressed context."""
    return ask(model, filled(model, None, token_ids(1, LENGTH)), ids)


# ---- with it and without it ----------------------------------------------------------------------


@both
def test_without_it_such_a_cache_raises_and_stays_as_it_was(package, model):
    cache = compressed(model, ada(package))
    untouched = compressed(model, ada(package))
    for ids in (QUESTION, QUESTION[:, :1]):
        with pytest.raises(ScopeError, match=r"with attention_patch\.headwise\(model\)"):
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


@pytest.mark.parametrize("name", ["heads", "channels"])
def test_a_forward_that_fails_leaves_nothing_served(name, model):
    def explode(*_: Any) -> None:
        raise ZeroDivisionError

    thin = hooks_impl.ThinKPress(0.5, window_size=4, free_memory=True)
    press, kind = {"heads": (ada(), RaggedLayer), "channels": (thin, ChannelPrunedLayer)}[name]
    cache = compressed(model, press)
    handle = model.model.layers[1].self_attn.k_proj.register_forward_hook(explode)
    with headwise(model), pytest.raises(ZeroDivisionError):
        model(QUESTION, past_key_values=cache)
    handle.remove()
    for layer in cache.layers:
        assert type(layer) is kind
        with pytest.raises(ScopeError):
            layer.update(*torch.zeros(2, 1, 2, 1, 16))


# ---- back ends -----------------------------------------------------------------------------------


def test_a_back_end_may_be_chosen(model):
    """And the cache tells which it was."""
    chosen, asked = compressed(model), compressed(model)
    with headwise(model):
        expected = ask(model, chosen)
    assert {layer.attended_by for layer in chosen.layers} == {"blocks"}
    with headwise(model, backend="blocks"):
        assert torch.equal(ask(model, asked), expected)


@pytest.mark.parametrize(
    ("backend", "reason"),
    [("dense", "'dense'.*known: blocks, varlen"), ("varlen", "CUDA.*on cpu.*use 'blocks'")],
)
def test_back_ends_that_will_not_do_are_refused_before_anything_is_installed(
    backend, reason, model
):
    before = snapshot(model)
    with pytest.raises(HyperparameterError, match=reason):
        headwise(model, backend=backend).__enter__()
    assert snapshot(model) == before


def test_models_whose_attention_cannot_be_taken_over_are_refused():
    model = build("gpt2", attn_implementation="eager")
    model.config.reorder_and_upcast_attn = True
    for layer in model.transformer.h:
        layer.attn.reorder_and_upcast_attn = True
    before = snapshot(model)
    with pytest.raises(UnsupportedModelError, match=r"head by head.*load the model with"):
        headwise(model).__enter__()
    assert snapshot(model) == before


# ---- what it leaves behind -----------------------------------------------------------------------


def test_it_leaves_nothing(model):
    before = snapshot(model)
    scope = headwise(model)
    assert snapshot(model) == before
    with scope:
        assert snapshot(model) != before
        ask(model, compressed(model))
    assert snapshot(model) == before
    with pytest.raises(ZeroDivisionError), headwise(model):
        raise ZeroDivisionError
    assert snapshot(model) == before


def test_one_scope_may_be_entered_several_times(model):
    before, scope = snapshot(model), headwise(model)
    expected = None
    with scope:
        with scope:
            expected = ask(model, compressed(model))
        assert torch.equal(ask(model, compressed(model)), expected)
    assert snapshot(model) == before
    with scope:
        assert torch.equal(ask(model, compressed(model)), expected)
    assert snapshot(model) == before


ORDERS = list(itertools.permutations(range(4)))


@pytest.mark.parametrize("order", ORDERS[::3], ids=str)
def test_scopes_of_both_packages_closed_in_any_order(order, model):
    """As long as one of those that attend is open, the cache can be decoded; all the same bits."""
    before = snapshot(model)
    expected = ask_inside(model, compressed(model))
    presses = [ada(hooks_impl), ada(patch_impl), hooks_impl.SnapKVPress(0.0)]
    opened: list[Any] = [press.register(model) for press in presses]
    scope = headwise(model)
    scope.__enter__()
    opened.append(scope)
    attending = {0, 1, 3}
    for index in order:
        cache = compressed_by_copy(model)
        if attending:
            assert torch.equal(ask(model, cache), expected)
        else:
            with pytest.raises(ScopeError):
                ask(model, cache)
        attending -= {index}
        opened[index].__exit__(None, None, None)
    assert snapshot(model) == before


def ask_inside(model: Any, cache: DynamicCache) -> Tensor:
    with headwise(model):
        return ask(model, cache)


def compressed_by_copy(model: Any) -> DynamicCache:
    """As `compressed`, on a model of the same weights on which nothing is open."""
    return compressed(build("llama", num_layers=len(model.model.layers)))


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


def test_it_keeps_no_model_alive():
    model = build("llama")
    with headwise(model):
        ask(model, compressed(model))
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


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


def test_two_caches_in_turn(model):
    """One compressed, one not: each forward as if it had the model for itself."""
    steps = [token_ids(1, n, seed=n) for n in (5, 1, 1, 3, 1)]
    full = DynamicCache(config=model.config)
    model(token_ids(1, LENGTH), past_key_values=full)
    alone = [model(ids, past_key_values=full).logits for ids in steps]
    with headwise(model):
        first = compressed(model)
        ragged_alone = [model(ids, past_key_values=first).logits for ids in steps]
    full, cache, other = DynamicCache(config=model.config), compressed(model), compressed(model)
    with headwise(model):
        model(token_ids(1, LENGTH), past_key_values=full)
        for ids, plainly, raggedly in zip(steps, alone, ragged_alone, strict=True):
            assert torch.equal(model(ids, past_key_values=cache).logits, raggedly)
            assert torch.equal(model(ids, past_key_values=full).logits, plainly)
            assert torch.equal(model(ids, past_key_values=other).logits, raggedly)
    for one, another in zip(cache.layers, other.layers, strict=True):
        assert torch.equal(one.keys, another.keys)


def test_threads(model):
    """Compressed and plain caches on one model, other models beside it, all at the same time."""
    other = build("qwen3")
    ids = [token_ids(1, 5, seed=seed) for seed in range(8)]
    with headwise(model):
        expected = [ask(model, compressed_by_copy(model), question) for question in ids]
        full = [plain(model, question) for question in ids]
        others = [plain(other, question) for question in ids]
        caches = [compressed_by_copy(model) for _ in ids]
        barrier = threading.Barrier(6)

        def compressed_one(i: int) -> bool:
            barrier.wait(60)
            return torch.equal(ask(model, caches[i], ids[i]), expected[i])

        def plain_one(i: int) -> bool:
            barrier.wait(60)
            return torch.equal(plain(model, ids[i]), full[i])

        def other_one(i: int) -> bool:
            barrier.wait(60)
            with headwise(other):
                return torch.equal(plain(other, ids[i]), others[i])

        with ThreadPoolExecutor(6) as pool:
            jobs = [
                pool.submit(f, i) for f in (compressed_one, plain_one, other_one) for i in (0, 1)
            ]
            assert all(job.result() for job in jobs)


# ---- whatever else is patched there --------------------------------------------------------------


def counting(counts: list[int]) -> Any:
    def wrapper(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        counts.append(1)
        return wrapped(*args, **kwargs)

    return wrapper


@pytest.mark.parametrize("when", ["before", "during"])
@pytest.mark.parametrize("where", ["forward", "registry"])
def test_wrappers_of_others_stay_and_work(when, where, model):
    expected, counts = ask_inside(model, compressed(model)), []
    attention = model.model.layers[1].self_attn
    owner, name = attention, "forward"
    if where == "registry":
        owner, name = ALL_ATTENTION_FUNCTIONS, "get_interface"
    original = vars(owner).get(name)
    cache, scope = compressed(model), headwise(model)
    try:
        if when == "during":
            scope.__enter__()
        theirs = wrapt.FunctionWrapper(getattr(owner, name), counting(counts))
        setattr(owner, name, theirs)
        if when == "before":
            scope.__enter__()
        assert torch.equal(ask(model, cache), expected)
        assert len(counts) == (3 if where == "forward" else 9)
        scope.__exit__(None, None, None)
        assert vars(owner)[name] is theirs
        with pytest.raises(ScopeError):
            model(QUESTION, past_key_values=cache)
        with headwise(model):
            assert torch.equal(ask(model, compressed_by_copy(model)), expected)
        assert vars(owner)[name] is theirs
    finally:
        delattr(owner, name)
    assert original is None
    assert torch.equal(plain(model), plain(build("llama", num_layers=3)))


def test_a_registered_attention_function_goes_on_to_serve_plain_caches(model):
    """Somebody's own function in the registry: ragged layers do not need it, others get it."""
    called: list[int] = []
    function = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def theirs(module: Any, *args: Any, **kwargs: Any) -> Any:
        called.append(module.layer_idx)
        return function(module, *args, **kwargs)

    cache, expected = compressed(model), ask_inside(model, compressed(model))
    ALL_ATTENTION_FUNCTIONS["sdpa"] = theirs
    try:
        with headwise(model):
            assert torch.equal(ask(model, cache), expected)
            assert called == []
            plain(model)
            assert called == [0, 1, 2] * 4
    finally:
        del ALL_ATTENTION_FUNCTIONS["sdpa"]


def test_an_override_that_a_call_carries_runs_beneath(model):
    """Another layer's override sees the queries; ours attends in place of the function."""
    seen: list[Any] = []

    def watching(function: Any, module: Any, query: Tensor, *args: Any, **kwargs: Any) -> Any:
        seen.append(tuple(query.shape))
        return function(module, query, *args, **kwargs)

    cache, expected = compressed(model), ask_inside(model, compressed(model))
    patch = intercept(ALL_ATTENTION_FUNCTIONS)
    reference = plain(model)
    with headwise(model):
        full = DynamicCache(config=model.config)
        model(token_ids(1, LENGTH), past_key_values=full)
        ids = [QUESTION, QUESTION[:, :1], QUESTION[:, 1:2]]
        forwards = [
            [model(new, past_key_values=c, **with_override({}, watching)).logits for new in ids]
            for c in (cache, full)
        ]
    patch.remove()
    assert torch.equal(torch.cat(forwards[0], dim=1), expected)
    assert torch.equal(torch.cat(forwards[1], dim=1), reference)
    assert seen[-9:] == [(1, 4, n, 16) for n in (5, 1, 1) for _ in range(3)]


@both
def test_every_site_is_served_and_no_other_module(package, model):
    """Hooks choose, and lean on the scope: forwards of attention modules are what it patches."""
    with ada(package)(model):
        patched = {name for name, module in model.named_modules() if "forward" in vars(module)}
    decoder = {"model"} if package is patch_impl else set()  # where a patch hears of a forward
    assert patched == {site.name for site in attention_sites(model)} | decoder
