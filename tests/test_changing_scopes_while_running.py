"""Scopes begin and end between forwards, whoever opens and closes them, however these end."""

import threading
from contextlib import ExitStack, contextmanager
from multiprocessing import get_context
from unittest.mock import Mock

import pytest
import torch
from transformers import DynamicCache

import hooks_impl
from press_core import Phase, ScopeError, kept_lengths
from tests.support import PACKAGES, both, context_for, example_for, filled, replaying, token_ids

pytestmark = pytest.mark.usefixtures("left_as_it_was")

N_LAYERS, LENGTH = 3, 40
WHOLE, HALF = [LENGTH] * N_LAYERS, [LENGTH // 2] * N_LAYERS
LONG = 20
"""Seconds after which a thread hangs."""


class Started:
    """A thread that runs a function, and does not keep the tests from ending if it hangs."""

    def __init__(self, function):
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._run, args=(function,), daemon=True)
        self.thread.start()

    def _run(self, function):
        try:
            function()
        except BaseException as error:
            self.error = error

    def is_over(self, seconds):
        self.thread.join(seconds)
        return not self.thread.is_alive()

    def end(self):
        """Wait for it, and hand on its error."""
        assert self.is_over(LONG), "it hangs"
        if self.error is not None:
            raise self.error


class Halt:
    """A hook of somebody else's, which holds one thread back until it is let go.

    Args:
        n_calls: how often it lets it pass before.
    """

    def __init__(self, n_calls=0):
        self.here, self.go, self.thread = threading.Event(), threading.Event(), 0
        self.n_calls = n_calls

    def __call__(self, *_):
        if threading.get_ident() != self.thread:
            return
        self.n_calls -= 1
        if self.n_calls == -1:
            self.here.set()
            assert self.go.wait(LONG)


def before_ours(module, hook):
    """In the middle of the hooks: PyTorch has looked up which there are."""
    return module.register_forward_pre_hook(hook, prepend=True)


def inside(module, hook):
    return module.o_proj.register_forward_hook(hook)


def between_ours(module, hook):
    """In the middle of the hooks: PyTorch has looked up which there are, and ours comes next."""
    return module.register_forward_hook(hook, prepend=True)


def after_ours(module, hook):
    return module.register_forward_hook(hook)


def everywhere(test):
    """With both packages, at each place in the attention of the first or the last layer."""
    test = pytest.mark.parametrize("index", [0, N_LAYERS - 1])(both(test))
    places = [before_ours, inside, between_ours, after_ours]
    return pytest.mark.parametrize("place", places)(test)


def half(package):
    return package.SnapKVPress(0.5, window_size=4)


def prefilled(model, ids=None, cache=None):
    return filled(model, None, token_ids(1, LENGTH) if ids is None else ids, cache)


@contextmanager
def running(model, place=inside, index=1, ids=None, n_calls=0):
    """A prefill in another thread, held back; it ends with the block, and hands on its error.

    Args:
        place: where in the attention of layer `index` it is held, see `Halt` for `n_calls`.
    """
    cache, halt = DynamicCache(config=model.config), Halt(n_calls)
    theirs = place(model.model.layers[index].self_attn, halt)

    def run():
        halt.thread = threading.get_ident()
        prefilled(model, ids, cache)

    thread = Started(run)
    try:
        while not halt.here.wait(0.01):
            assert thread.thread.is_alive(), thread.error
        yield cache
    finally:
        halt.go.set()
    thread.end()
    theirs.remove()


def lengths_of(cache):
    return [int(lengths.max()) if lengths.numel() else 0 for lengths in kept_lengths(cache)]


# ---- by other threads ----------------------------------------------------------------------------


def test_a_forked_process_has_no_other_threads_to_wait_for(package, model):
    with half(package)(model) as scope, running(model):
        child = get_context("fork").Process(target=scope.remove)
        child.start()
        child.join(LONG)
        child.kill()
        assert child.exitcode == 0


@everywhere
def test_closing_waits_for_forwards_that_have_begun(package, index, place, model):
    """They are pruned in all layers; a forward that begins in the meantime is in none."""
    scope = half(package).register(model)
    with running(model, place, index) as cache:
        closing = Started(scope.remove)
        assert not closing.is_over(0.02)
        assert lengths_of(prefilled(model)) == WHOLE
    closing.end()
    assert lengths_of(cache) == HALF
    assert lengths_of(prefilled(model, token_ids(1, 1), cache)) == [LENGTH // 2 + 1] * N_LAYERS


@everywhere
def test_opening_leaves_forwards_that_have_begun_alone(package, index, place, model):
    """They are pruned in no layer; the next one is, while they still run."""
    with running(model, place, index) as cache:
        scope = half(package).register(model)
        assert lengths_of(prefilled(model)) == HALF
        scope.remove()  # and nobody waits for them
        scope.open()
    assert lengths_of(cache) == WHOLE
    scope.remove()


@both
def test_a_forward_that_begins_while_the_scope_is_being_installed(package, model):
    """It is not pruned: not in layers that have their hook by then, nor in those behind."""
    with ExitStack() as until_open:
        caches = []

        class Slow(package.KnormPress):
            def install(self, scope):
                super().install(scope)
                caches.append(until_open.enter_context(running(model)))

        scope = Slow(0.5).register(model)
    scope.remove()
    assert lengths_of(caches[0]) == WHOLE


@pytest.mark.parametrize("theirs_first", [True, False])
@both
def test_handles_of_others_still_work(package, theirs_first, model):
    """Registered before or within the scope, and removed while a forward is in progress."""
    module, calls = model.model.layers[1].self_attn, []

    def register():
        return module.register_forward_hook(lambda *_: calls.append(1))

    handles = [register()] if theirs_first else []
    scope = package.KnormPress(0.5).register(model)
    handles += [register(), inside(module, lambda *_: None)]
    with running(model):
        closing = Started(scope.remove)
        for handle in [*handles, register()]:
            handle.remove()
    closing.end()
    assert not calls


@pytest.mark.parametrize("name", sorted(hooks_impl.PRESSES))
@pytest.mark.parametrize("opening", [False, True], ids=["closing", "opening"])
def test_every_press(package, opening, name, model):
    """The forward ends without an error, whatever the press was about to do in it."""
    press = example_for(package, name, 0.5, model)
    scope = press(model) if opening else press.register(model)
    ids = token_ids(1, 80) if opening else context_for(name, 80)  # a delimiter needs its scope
    with running(model, ids=ids) as cache:
        changing = Started(scope.open if opening else scope.remove)
        if opening:
            changing.end()
    changing.end()
    if opening and press.phases & Phase.DECODING:  # closed in a step, for which nobody waits
        press.is_awaited = lambda *_: scope.remove()
        prefilled(model, token_ids(1, 1), cache)
    scope.remove()


@both
@replaying
def test_closing_while_a_context_is_run_again(package, name, model):
    """What the press has begun it ends: all layers are pruned, and the cache can be used."""
    scope = example_for(package, name, 0.5, model).register(model)
    with running(model, ids=context_for(name, 80), n_calls=1) as cache:
        closing = Started(scope.remove)
    closing.end()
    assert all(bool((lengths < 80).any()) for lengths in kept_lengths(cache))


@pytest.mark.filterwarnings("ignore:.*before this scope opened")
@pytest.mark.parametrize("packages", [PACKAGES[:1], PACKAGES[1:], PACKAGES], ids=len)
def test_scopes_come_and_go_while_others_run(packages, model):
    """No error, no cache that is pruned in part, and no thread that hangs."""
    done, found = threading.Event(), set()

    def come_and_go(package):
        while not done.is_set():
            with half(package)(model):
                done.wait(0.002)

    def run():
        for i in range(40):
            cache = prefilled(model)
            (length,) = set(lengths_of(cache))
            found.add(length)
            assert lengths_of(prefilled(model, token_ids(1, 1), cache)) == [length + 1] * N_LAYERS
            if i % 10 == 9:
                with pytest.raises(IndexError):
                    prefilled(model, torch.tensor([[10**6]]))

    changing = [Started(lambda package=package: come_and_go(package)) for package in packages]
    users = [Started(run) for _ in range(3)]
    try:
        for user in users:
            user.end()
    finally:
        done.set()
    for thread in changing:
        thread.end()
    assert found <= {LENGTH, LENGTH // 2, LENGTH // 4}
    assert len(found) > 1


# ---- from inside of a forward --------------------------------------------------------------------


@everywhere
@pytest.mark.parametrize("closed", [["outer"], ["inner"], ["outer", "inner"]])
def test_closing_from_inside(package, closed, index, place, model):
    """The forward is the scope's to its end, and the next one is not."""
    scopes = {name: half(package).register(model) for name in ("outer", "inner")}

    def close(*_):
        for name in closed:
            scopes[name].remove()

    theirs = place(model.model.layers[index].self_attn, close)
    assert lengths_of(prefilled(model)) == [LENGTH // 4] * N_LAYERS
    theirs.remove()
    assert lengths_of(prefilled(model)) == (WHOLE if len(closed) == 2 else HALF)
    for scope in scopes.values():
        scope.remove()


@both
def test_two_threads_that_close_a_scope_of_each_other(package, model):
    """Both are inside of a forward of both scopes, and neither can wait for the other's there."""
    scopes, meeting = [half(package).register(model) for _ in range(2)], threading.Barrier(2)
    waiting = list(scopes)

    def close(*_):
        meeting.wait(LONG)
        waiting.pop().remove()

    theirs = inside(model.model.layers[1].self_attn, close)
    caches = [DynamicCache(config=model.config) for _ in range(2)]
    threads = [Started(lambda cache=cache: prefilled(model, None, cache)) for cache in caches]
    for thread in threads:
        thread.end()
    theirs.remove()
    assert [lengths_of(cache) for cache in caches] == [[LENGTH // 4] * N_LAYERS] * 2


# ---- forwards that do not end --------------------------------------------------------------------


def breaking(place, model, index, error):
    return place(model.model.layers[index].self_attn, Mock(side_effect=error))


errors = pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt, GeneratorExit])


@errors
@everywhere
def test_a_forward_that_fails(package, error, index, place, model):
    """Its cache is as it was or says that it is pruned in part; nothing else is touched by it."""
    scope, cache = half(package).register(model), DynamicCache(config=model.config)
    with breaking(place, model, index, error), pytest.raises(error):
        prefilled(model, None, cache)
    assert lengths_of(prefilled(model)) == HALF
    n_pruned = lengths_of(cache).count(LENGTH // 2)
    assert n_pruned in (index, index + 1)
    if n_pruned:
        with pytest.raises(ScopeError, match="exception"):
            prefilled(model, token_ids(1, 1), cache)
    scope.remove()


@errors
@pytest.mark.parametrize("where", ["inside", "afterwards", "elsewhere"])
@both
def test_closing_around_a_forward_that_fails(package, where, error, model):
    """Whichever thread closes it waits for nobody, and the cache is refused from then on."""
    scope, cache = half(package).register(model), DynamicCache(config=model.config)
    theirs = breaking(inside, model, 1, error)
    if where == "inside":
        closing = inside(model.model.layers[0].self_attn, lambda *_: scope.remove())
    with pytest.raises(error):
        prefilled(model, None, cache)
    if where == "inside":
        closing.remove()
    if where == "elsewhere":
        Started(scope.remove).end()
    scope.remove()
    theirs.remove()
    with pytest.raises(ScopeError, match="exception"):
        prefilled(model, token_ids(1, 1), cache)
    assert lengths_of(prefilled(model)) == WHOLE


@pytest.mark.parametrize("closing", [False, True])
@pytest.mark.parametrize("name", ["SnapKVPress", "DecodingPress", "ComposedPress"])
@both
def test_a_forward_inside_of_another_one_of_its_model(package, name, closing, model):
    """As a hook that asks the model itself: both keep what each keeps alone."""
    press, own = example_for(package, name, 0.5, model), DynamicCache(config=model.config)
    ids, other = token_ids(1, LENGTH), token_ids(1, LENGTH // 2)
    expected = [lengths_of(filled(model, press, each)) for each in (ids, other)]
    found = []

    def ask(*_):
        theirs.remove()
        if closing:
            scope.remove()
        found.append(lengths_of(prefilled(model, other)))
        fails = model.model.register_forward_pre_hook(lambda *_: 1 / 0, prepend=True)
        with fails, pytest.raises(ZeroDivisionError):  # a third one, which ends before it begins
            prefilled(model)

    theirs = model.model.embed_tokens.register_forward_hook(ask)
    with press(model) as scope:
        prefilled(model, ids, own)
    assert [lengths_of(own), *found] == expected
