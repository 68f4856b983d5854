"""Whatever is opened, closed, run, copied or patched by others, in any order, nothing leaks.

Each program is drawn by Hypothesis. Every model has a twin that is made alike and on which scopes
are only ever opened around a single step, innermost last: after every step a model must have done
what its twin does, and all others nothing. Steps are forwards, contexts in chunks, draft tokens of
which some are taken back, second questions.
"""

import copy
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
import torch
from hypothesis import HealthCheck, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule, run_state_machine_as_test
from torch import Tensor
from transformers import DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from press_core import Press, PressError, ScopeError, kept_lengths
from tests import twins
from tests.support import PROFILE

N_PROGRAMS = {"short": 20, "long": 20_000}.get(PROFILE, 48)
N_SHARDS, MAX_STEPS = 4, 30

INDICES = st.sampled_from([0, 0, 1, 2])
SIDES = st.integers(0, 1)


def _as_its_twin_does(subject, order, run):
    """What `run(model)` comes to in scopes of presses in this `order`, or which error."""
    model = twins.twin(subject.index)
    with ExitStack() as scopes:
        for name in order:
            scopes.callback(twins.presses(name).hook.register(model).remove)
        return twins.outcome(lambda: run(model))


def _drawn(data, found):
    """Any one of what was found."""
    return found[data.draw(st.integers(0, len(found) - 1))]


def _two_forwards(model):
    cache = DynamicCache(config=model.config)
    return [twins.Step(n)(model, cache) for n in (twins.LENGTH, 1)]


class Programs(twins.Twins):
    """Models, scopes, caches, threads and other patchers."""

    # ---- scopes ----

    @initialize(
        opened=st.lists(st.tuples(INDICES, st.sampled_from(twins.NAMES), SIDES), max_size=4)
    )
    def begin(self, opened):
        for index, name, side in opened:
            self.open(index, name, side, elsewhere=False)

    @rule(index=INDICES, name=st.sampled_from(twins.NAMES), side=SIDES, elsewhere=st.booleans())
    def open(self, index, name, side, elsewhere):
        subject = self.subjects[index]
        if len(subject.scopes) == 3:
            return
        press: Press = twins.presses(name)[side]
        try:
            handle = twins.in_thread(elsewhere, lambda: press.register(subject.model))
        except PressError:
            assert self._may_refuse(subject, name, side)
            return
        subject.scopes.append(twins.Opened(name, side, handle))

    def _may_refuse(self, subject, name, side):
        if (name, twins.FAMILIES[subject.index]) == ("DuoAttentionPress", "gpt_neox"):
            return True  # whose head scores are those of a model with other heads
        # Another owner's wrapper above a patch of ours, where a new one could not get beneath.
        return side == 1 and any(module in self.wrapped for module in subject.model.modules())

    @precondition(lambda self: any(subject.scopes for subject in self.subjects))
    @rule(data=st.data(), elsewhere=st.booleans())
    def close(self, data, elsewhere):
        """In any order, from any thread, twice."""
        subject = _drawn(data, [subject for subject in self.subjects if subject.scopes])
        scope = _drawn(data, subject.scopes)
        subject.scopes.remove(scope)
        twins.in_thread(elsewhere, scope.handle.remove)
        scope.handle.remove()

    @rule(index=INDICES, side=SIDES)
    def fail_to_open(self, index, side):
        """The last layer is refused, after all others were installed or not."""
        subject, press = self.subjects[index], twins.presses("SnapKVPress")[side]

        class Failing(type(press)):  # type: ignore[misc]
            def install(self, scope):
                scope.sites = scope.sites[:1]
                super().install(scope)
                raise KeyboardInterrupt

        with pytest.raises((ScopeError, KeyboardInterrupt)) as raised:
            Failing(0.5).register(subject.model)
        refused = raised.type is not KeyboardInterrupt
        assert not refused or self._may_refuse(subject, "SnapKVPress", side)

    # ---- forwards ----

    @rule(
        index=INDICES,
        batch=st.sampled_from([1, 2]),
        chunk_size=st.sampled_from([None, None, 5, 8]),
        later=st.sampled_from(["nothing", "a token", "a question"]),
    )
    def prefill(self, index, batch, chunk_size, later):
        """A new cache, and the tokens that follow at once."""
        both = self._new_cache(index, batch)
        for step in (twins.Step(twins.LENGTH, chunk_size), *twins.LATER.get(later, [])):
            self._run(both, step)

    def _new_cache(self, index, batch):
        if len(self.caches) == 4:
            self.caches.pop(0)
        subject = self.subjects[index]
        caches = (DynamicCache(config=subject.model.config) for _ in range(2))
        self.caches.append(twins.CachePair(subject, *caches, batch))
        return self.caches[-1]

    @precondition(lambda self: self.caches)
    @rule(data=st.data(), later=st.sampled_from(sorted(twins.LATER)), elsewhere=st.booleans())
    def go_on(self, data, later, elsewhere):
        """In this thread, or in one of its own."""
        both = _drawn(data, self.caches)
        for step in twins.LATER[later]:
            self._run(both, step, elsewhere)

    @precondition(lambda self: len(self.caches) > 1)
    @rule()
    def decode_in_two_threads(self):
        first, second = self.caches[:2]
        barrier = threading.Barrier(2)

        def run(both):
            barrier.wait()
            return self._actual(both, twins.TOKEN)

        with ThreadPoolExecutor(2) as pool:
            found = dict(zip((first, second), pool.map(run, (first, second)), strict=True))
        for both in (first, second):
            self._compare(both, found[both], twins.TOKEN)

    @precondition(lambda self: any(s.scopes for s in self.subjects))
    @rule(data=st.data(), error=st.sampled_from([ZeroDivisionError, KeyboardInterrupt]))
    def break_off(self, data, error):
        """A forward that fails half way leaves nothing of its own behind."""
        subject = _drawn(data, [subject for subject in self.subjects if subject.scopes])

        def explode(*_):
            raise error

        cache = DynamicCache(config=subject.model.config)
        hook = twins.attention_of(subject.model, 1).register_forward_pre_hook(explode)
        try:
            with pytest.raises((error, PressError)), torch.inference_mode():
                subject.model(twins.CONTEXT, past_key_values=cache)
        finally:
            hook.remove()

    @precondition(lambda self: self.caches)
    @rule(data=st.data(), name=st.sampled_from(twins.NAMES), side=SIDES, elsewhere=st.booleans())
    def open_in_a_forward(self, data, name, side, elsewhere):
        """The forward has nothing to do with the new scope."""
        both = _drawn(data, self.caches)
        self._change_in_a_forward(
            both, lambda: self.open(both.subject.index, name, side, elsewhere)
        )

    @precondition(lambda self: any(both.subject.scopes for both in self.caches))
    @rule(data=st.data(), elsewhere=st.booleans())
    def close_in_a_forward(self, data, elsewhere):
        """The forward is the scope's to its end, and another thread waits for that."""
        both = _drawn(data, [both for both in self.caches if both.subject.scopes])
        scopes, threads = both.subject.scopes, []
        scope = _drawn(data, scopes)

        def close():
            scopes.remove(scope)
            threads.append(threading.Thread(target=scope.handle.remove, daemon=True))
            threads[0].start() if elsewhere else scope.handle.remove()

        self._change_in_a_forward(both, close)
        if elsewhere:
            threads[0].join(20)
            assert not threads[0].is_alive()

    def _change_in_a_forward(self, both, change):
        model, order, changed = both.subject.model, both.subject.order(), []

        def once(*_):
            if not changed:
                changed.append(True)
                change()

        hook = twins.attention_of(model, 1).register_forward_pre_hook(once)
        try:
            found = self._actual(both, twins.TOKEN)
        finally:
            hook.remove()
        once()  # of a forward that was refused before
        self._compare(both, found, twins.TOKEN, order)

    def _actual(self, both, step):
        return twins.outcome(lambda: step(both.subject.model, both.cache, both.batch))

    def _run(self, both, step, elsewhere=False):
        if both not in self.caches or both.cache.get_seq_length() + step.n <= step.n_rejected:
            return
        self._compare(both, twins.in_thread(elsewhere, lambda: self._actual(both, step)), step)

    def _compare(self, both, found, step, order=None):
        """Compare what a step has done with what it does in scopes of presses in this `order`."""
        order = both.subject.order() if order is None else order
        expected = _as_its_twin_does(
            both.subject, order, lambda model: step(model, both.expected, both.batch)
        )
        assert twins.same(found, expected), (found, expected)
        if not isinstance(found, Tensor):  # refused half way: nobody goes on with such a cache
            self.caches.remove(both)
            return
        both.contents = twins.contents(both.cache)
        assert twins.same(both.contents, twins.contents(both.expected))

    # ---- others ----

    @rule(index=INDICES, layer=st.integers(0, 1))
    def wrap_forward(self, index, layer):
        """As accelerate does: an instance attribute, which remembers what it replaced."""
        subject = self.subjects[index]
        module = twins.attention_of(subject.model, layer)
        if module in self.wrapped:
            return
        subject.foreign = True
        former, calls = module.forward, [0]

        def forward(*args, **kwargs):
            calls[0] += 1
            return former(*args, **kwargs)

        module.forward = forward
        self.wrapped[module] = former, calls, forward

    @precondition(lambda self: self.wrapped)
    @rule(data=st.data())
    def unwrap_forward(self, data):
        """Puts back what it had found, which may be a wrapper that was closed meanwhile.

        Scopes that were opened since lose their patch of the module, and say so.
        """
        module = _drawn(data, [*self.wrapped])
        former, _, wrapper = self.wrapped.pop(module)
        takes_others = module.forward is not wrapper
        module.forward = former
        if not takes_others:
            return
        subject = next(s for s in self.subjects if any(module is m for m in s.model.modules()))

        def lost():
            of_scopes = [twins.own_patches(scope.handle) for scope in subject.scopes]
            return [[patch.is_lost for patch in patches] for patches in of_scopes]

        in_part = [any(layers) and not all(layers) for layers in lost()]
        if any(
            part and scope.name != "StreamingLLMDecodingPress"  # which acts before any layer
            for part, scope in zip(in_part, subject.scopes, strict=True)
        ):
            expected = _as_its_twin_does(subject, subject.order(), _two_forwards)
            found = twins.outcome(lambda: _two_forwards(subject.model))
            # Refused by this scope, or by one inside of it; or nothing was to do on layers before
            # all patches were put on anew.
            assert twins.same(found, expected) or issubclass(found[0], PressError)
        for scope, layers in zip(subject.scopes, lost(), strict=True):
            if any(layers):
                with pytest.warns(RuntimeWarning, match="put back"):
                    scope.handle.remove()
            scope.handle.remove()
        subject.scopes = []

    @rule()
    def change_registry(self):
        """Another attention function under the name that the models use, or that one gone again."""
        if self.undo_registry is not None:
            self.undo_registry()
            self.undo_registry = None
            return
        former = ALL_ATTENTION_FUNCTIONS["sdpa"]

        def attention(*args, **kwargs):
            return former(*args, **kwargs)

        ALL_ATTENTION_FUNCTIONS["sdpa"] = attention
        self.undo_registry = lambda: ALL_ATTENTION_FUNCTIONS.__delitem__("sdpa")

    @rule(index=INDICES)
    def copy_model(self, index):
        """A copy is not pruned, whatever is open on the model; it answers and goes."""
        subject = self.subjects[index]
        if subject.foreign:  # a copied closure still calls the original
            return
        clone = copy.deepcopy(subject.model)
        cache = DynamicCache(config=clone.config)
        with torch.inference_mode():
            logits = clone(twins.CONTEXT, past_key_values=cache).logits
        assert torch.equal(logits, twins.expected_answer(index))
        assert all(int(kept.min()) == twins.LENGTH for kept in kept_lengths(cache))


@pytest.mark.filterwarnings("ignore:.*before this scope opened")
@pytest.mark.parametrize("shard", range(N_SHARDS))
def test_programs(shard):
    run_state_machine_as_test(
        seed(shard)(type("Shard", (Programs,), {})),
        settings=settings(
            max_examples=N_PROGRAMS // N_SHARDS,
            stateful_step_count=MAX_STEPS,
            database=None,
            print_blob=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
