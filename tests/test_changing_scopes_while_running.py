"""A scope that is opened or closed in one thread while another runs the model."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
from transformers import DynamicCache

import hooks_impl
import patch_impl
from press_core import ScopeError, kept_lengths
from press_core.model.generation import Part, as_part
from tests.support import build, context_for, example_for, snapshot, token_ids

PACKAGES = [hooks_impl, patch_impl]
both = pytest.mark.parametrize("package", PACKAGES, ids=["hooks", "patches"])
N_LAYERS, LENGTH = 3, 40


class Halt:
    """A hook of somebody else's, which holds one thread back until it is let go.

    Args:
        n_calls: how often it lets it pass before.
    """

    def __init__(self, n_calls: int = 0) -> None:
        self.here, self.go, self.thread = threading.Event(), threading.Event(), 0
        self.n_calls = n_calls

    def __call__(self, *_: Any) -> None:
        if threading.get_ident() != self.thread:
            return
        self.n_calls -= 1
        if self.n_calls == -1:
            self.here.set()
            assert self.go.wait(20)


def before_ours(module, halt):
    """In the middle of the hooks: PyTorch has looked up which there are."""
    return module.register_forward_pre_hook(halt, prepend=True)


def inside(module, halt):
    return module.o_proj.register_forward_hook(halt)


def after_ours(module, halt):
    return module.register_forward_hook(halt)


def between_ours(module, halt):
    """In the middle of the hooks: PyTorch has looked up which there are, and ours comes next."""
    return module.register_forward_hook(halt, prepend=True)


PLACES = [before_ours, inside, between_ours, after_ours]


@contextmanager
def running(model, halt, ids=None, cache=None, part=None):
    """A prefill in another thread, held back; it ends with the block, and hands on its error."""
    cache = DynamicCache(config=model.config) if cache is None else cache
    part = Part() if part is None else part

    def prefill():
        halt.thread = threading.get_ident()
        given = token_ids(1, LENGTH) if ids is None else ids
        with torch.no_grad(), as_part(part):
            cache.logits = model(given, past_key_values=cache).logits

    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(prefill)
        try:
            while not halt.here.wait(0.05):
                assert not future.done() or future.result() is None
            yield cache
        finally:
            halt.go.set()
        future.result()


def lengths_of(cache) -> list[int]:
    return [int(lengths[0, 0]) for lengths in kept_lengths(cache)]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("index", range(N_LAYERS))
@both
def test_closing(package, index, place):
    """What is pruned by then stays pruned; then the cache is whole or says that it is not."""
    model = build("llama", num_layers=N_LAYERS)
    before, halt = snapshot(model), Halt()
    scope = package.SnapKVPress(0.5, window_size=4).register(model)
    theirs = place(model.model.layers[index].self_attn, halt)
    with running(model, halt) as cache:
        scope.remove()
    theirs.remove()
    pruned_here = after_ours if package is hooks_impl else between_ours  # a patch is further inside
    n_pruned = index + (place in (pruned_here, after_ours))
    assert lengths_of(cache) == [LENGTH // 2] * n_pruned + [LENGTH] * (N_LAYERS - n_pruned)
    assert snapshot(model) == before
    with torch.no_grad():
        if 0 < n_pruned < N_LAYERS:
            with pytest.raises(ScopeError, match=r"closed.*in the middle of a forward"):
                model(token_ids(1, 1), past_key_values=cache)
        else:
            model(token_ids(1, 1), past_key_values=cache)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("index", range(N_LAYERS))
@both
def test_opening(package, index, place):
    """The forward that had begun is not pruned, in no layer; the next one is."""
    model = build("llama", num_layers=N_LAYERS)
    before, halt = snapshot(model), Halt()
    theirs = place(model.model.layers[index].self_attn, halt)
    with running(model, halt) as cache:
        scope = package.SnapKVPress(0.5, window_size=4).register(model)
    theirs.remove()
    assert lengths_of(cache) == [LENGTH] * N_LAYERS
    later = DynamicCache(config=model.config)
    with torch.no_grad():
        model(token_ids(1, LENGTH), past_key_values=later)
    assert lengths_of(later) == [LENGTH // 2] * N_LAYERS
    scope.remove()
    assert snapshot(model) == before


@both
def test_a_forward_that_begins_while_the_scope_is_being_installed(package):
    """It is not pruned: not in layers that have their hook by then, nor in those behind."""
    model = build("llama", num_layers=N_LAYERS)
    cache, halt = DynamicCache(config=model.config), Halt()
    theirs = inside(model.model.layers[1].self_attn, halt)
    with ExitStack() as until_open:

        class Slow(package.KnormPress):
            def install(self, scope):
                super().install(scope)
                until_open.enter_context(running(model, halt, cache=cache))

        scope = Slow(0.5).register(model)
    theirs.remove()
    scope.remove()
    assert lengths_of(cache) == [LENGTH] * N_LAYERS


@pytest.mark.parametrize("theirs_first", [True, False])
@both
def test_handles_of_others_still_work(package, theirs_first):
    """Registered before or within the scope, and removed while a forward is in progress."""
    model = build("llama", num_layers=N_LAYERS)
    before, halt, calls = snapshot(model), Halt(), []
    module = model.model.layers[1].self_attn

    def register():
        return module.register_forward_hook(lambda *_: calls.append(1))

    handles = [register()] if theirs_first else []
    scope = package.KnormPress(0.5).register(model)
    handles += [register(), inside(module, halt)]
    with running(model, halt):
        scope.remove()
        handles.append(register())
        for handle in handles:
            handle.remove()
    assert not calls
    assert snapshot(model) == before


@pytest.mark.parametrize("name", sorted(hooks_impl.PRESSES))
@pytest.mark.parametrize("opening", [False, True], ids=["closing", "opening"])
@both
def test_every_press(package, opening, name):
    """The forward ends without an error, whatever the press was about to do in it."""
    model = build("llama", num_layers=N_LAYERS)
    press = example_for(package, name, 0.5, model)
    before, halt = snapshot(model), Halt()
    theirs = inside(model.model.layers[1].self_attn, halt)
    scope = press(model)
    if not opening:
        scope.open()
    ids = token_ids(1, 80) if opening else context_for(name, 80)  # a delimiter needs its scope
    with running(model, halt, ids):
        (scope.open if opening else scope.remove)()
    scope.remove()
    theirs.remove()
    assert snapshot(model) == before


@pytest.mark.parametrize("name", ["KVzipPress", "KVComposePress", "KVgradPress", "RestoreKVPress"])
@both
def test_closing_while_a_context_is_run_again(package, name):
    """What the press has begun it ends: all layers are pruned, and the cache can be used."""
    model, halt = build("llama", num_layers=N_LAYERS), Halt(1)
    before = snapshot(model)
    theirs = inside(model.model.layers[1].self_attn, halt)
    scope = example_for(package, name, 0.5, model).register(model)
    with running(model, halt, context_for(name, 80)) as cache:
        scope.remove()
    theirs.remove()
    assert snapshot(model) == before
    assert all(bool((lengths < 80).any()) for lengths in kept_lengths(cache))


@pytest.mark.parametrize("index", range(N_LAYERS))
@both
def test_closing_between_a_context_and_its_drafts(package, index):
    """A hook that is taken off cannot join what both gave any more: the cache is refused."""
    model, halt = build("llama", num_layers=N_LAYERS), Halt(1)
    theirs = inside(model.model.layers[index].self_attn, halt)
    scope = package.KnormPress(0.5).register(model)
    with running(model, halt, part=Part(n_drafts=1)) as cache:
        scope.remove()
    theirs.remove()
    n_pruned = index + 1
    assert lengths_of(cache) == [20] * n_pruned + [LENGTH] * (N_LAYERS - n_pruned)  # 19, the draft
    with torch.no_grad(), pytest.raises(ScopeError, match=r"closed.*in the middle of a forward"):
        model(token_ids(1, 1), past_key_values=cache)


@both
def test_scopes_come_and_go_while_others_run(package):
    """No error, and no cache that is pruned in part without saying so."""
    model = build("llama", num_layers=N_LAYERS)
    before, done = snapshot(model), threading.Event()

    def come_and_go():
        while not done.is_set():
            with package.SnapKVPress(0.5, window_size=4)(model):
                done.wait(0.002)

    def run():
        found = set()
        for _ in range(40):
            cache = DynamicCache(config=model.config)
            with torch.no_grad():
                model(token_ids(1, LENGTH), past_key_values=cache)
                lengths = lengths_of(cache)
                if len(set(lengths)) > 1:
                    assert cache.layers[0].is_torn
                found.add(tuple(lengths))
        return found

    with ThreadPoolExecutor(4) as pool:
        changing, *users = [pool.submit(come_and_go), *(pool.submit(run) for _ in range(3))]
        try:
            found = set().union(*(user.result() for user in users))
        finally:
            done.set()
        changing.result()
    n_pruned = [lengths.count(LENGTH // 2) for lengths in found]
    for lengths, n in zip(found, n_pruned, strict=True):  # the first ones, if any
        assert lengths == (LENGTH // 2,) * n + (LENGTH,) * (N_LAYERS - n)
    assert snapshot(model) == before
