"""Whatever is opened, closed, run, copied or patched by others, in any order, nothing leaks.

Each program is drawn by Hypothesis. Every model has a twin that is made alike and on which scopes
are only ever opened around a single step, innermost last: after every step a model must have done
what its twin does, and all others nothing. Steps are forwards, contexts in chunks, draft tokens of
which some are taken back, second questions.
"""

from __future__ import annotations

import copy
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from attention_patch import Patch
from experiments.testbed.compare import PressPair, pair
from experiments.testbed.recipes import recipe
from hooks_impl import PRESSES as HOOK_PRESSES
from patch_impl import PRESSES as PATCH_PRESSES
from press_core import Press, PressError, ScopeError, kept_lengths, prefill
from press_core.cache.ragged import RaggedLayer
from press_core.learned.duo_attention import HeadScores
from tests.support import build, token_ids

PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "default")
N_PROGRAMS = {"short": 80, "long": 20_000}.get(PROFILE, 120)
N_SHARDS, MAX_STEPS = 4, 40

NAMES = (
    *("KnormPress", "SnapKVPress", "ExpectedAttentionPress", "StreamingLLMPress", "PyramidKVPress"),
    *("AdaKVPress", "KeyRerotationPress", "ThinKPress", "DuoAttentionPress", "ComposedPress"),
    *("DecodingPress", "StreamingLLMDecodingPress", "ObservedAttentionPress", "EveryTurnPress"),
)
LENGTH, CONTEXT = 12, token_ids(1, 12)
FAMILIES = ("llama", "llama", "gpt_neox")
INDICES = st.sampled_from([0, 0, 1, 2])
SIDES = st.integers(0, 1)


class BrokenError(RuntimeError):
    """Raised on purpose inside a model."""


@lru_cache
def presses(name: str) -> PressPair:
    """A pair of presses that leave half of the context; the same objects in every program."""
    if name == "SnapKVPress":
        return pair(name, compression_ratio=0.5, window_size=3)
    if name == "DuoAttentionPress":
        head_scores = HeadScores(torch.tensor([[0.1, 0.9], [0.8, 0.2]]))
        return pair(
            name, head_compression_ratio=0.5, sink_size=1, recent_size=3, head_scores=head_scores
        )
    if name == "DecodingPress":  # at each step: a twin's scopes are too short to count steps
        base = pair("KnormPress")
        return pair(name, base_press=base, compression_interval=1, target_size=7)
    if name == "EveryTurnPress":
        return pair(name, press=pair("KnormPress"), target_size=9)
    if name == "StreamingLLMDecodingPress":
        return pair(name, max_capacity=8)
    return PressPair(*(recipe(p, name, 0.5) for p in (HOOK_PRESSES, PATCH_PRESSES)))


def made(index: int) -> PreTrainedModel:
    """The model `index`, and any number of twins of it."""
    return build(FAMILIES[index], num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, seed=index)


@lru_cache
def twin(index: int) -> PreTrainedModel:
    return made(index)


@torch.inference_mode()
def answer(model: nn.Module) -> Tensor:
    """Logits without a cache, which no press has a say in."""
    logits: Tensor = model(CONTEXT, use_cache=False).logits
    return logits


@lru_cache
def expected_answer(index: int) -> Tensor:
    return answer(made(index))


@dataclass(eq=False)
class Opened:
    """A scope that is open."""

    name: str
    side: int
    """Of a PressPair: 0 hooks, 1 patches."""
    handle: Any


def own_patches(handle: Any) -> list[Patch]:
    """The patches by which a press prunes, one per attention module; none where hooks do."""
    found = [getattr(ask, "args", ())[1:] for ask in handle.state.warnings]
    return [patch for patches in found for patch in patches[0]] if any(found) else []


@dataclass(eq=False)
class Subject:
    """A model, and what is known of it."""

    index: int
    model: PreTrainedModel
    scopes: list[Opened] = field(default_factory=list)
    foreign: bool = False
    """Whether somebody else has ever changed an attribute of it."""
    fingerprint: Any = None

    def order(self) -> list[str]:
        """Names of the open presses, the one that acts last first.

        A forward hook sees what a patched forward has left, whichever was opened first.
        """
        return [scope.name for side in (0, 1) for scope in self.scopes if scope.side == side]


@dataclass(eq=False)
class CachePair:
    """A cache that a model fills, and the one that its twin fills with the same."""

    subject: Subject
    cache: DynamicCache
    expected: DynamicCache
    batch: int
    contents: Any = None


def contents(cache: DynamicCache) -> list[Any]:
    """All that a cache says of itself."""
    said: list[Any] = [(type(layer).__name__, layer.get_seq_length()) for layer in cache.layers]
    said += [lengths.clone() for lengths in kept_lengths(cache)]
    for layer in cache.layers:
        if isinstance(layer, RaggedLayer):
            said += [states.clone() for states in layer.dense()]
        elif layer.is_initialized:
            said += [layer.keys.clone(), layer.values.clone()]
    return said


def same(left: Any, right: Any) -> bool:
    if isinstance(left, Tensor):
        return isinstance(right, Tensor) and torch.equal(left, right)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


def fingerprint(model: nn.Module) -> list[Any]:
    """Every instance attribute and hook of a model, by identity."""
    found: list[Any] = []
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            inside = [id(x) for x in value.values()] if isinstance(value, dict) else id(value)
            found.append((name, key, inside))
    return found


def registry() -> list[Any]:
    found = [(name, id(value)) for name, value in vars(ALL_ATTENTION_FUNCTIONS).items()]
    found += [(name, id(value)) for name, value in vars(type(ALL_ATTENTION_FUNCTIONS)).items()]
    return found + [(name, id(ALL_ATTENTION_FUNCTIONS[name])) for name in ("sdpa",)]


@dataclass(frozen=True)
class Step:
    """What a model is run over, and how: the same with it and with its twin.

    Attributes:
        n: how many tokens come; none: some are taken back alone.
        chunk_size: tokens of each forward, of a prefill in chunks; None: it comes at once.
        n_rejected: how many of the last tokens are taken back afterwards.
    """

    n: int
    chunk_size: int | None = None
    n_rejected: int = 0

    def __call__(self, model: nn.Module, cache: DynamicCache, batch: int = 1) -> Tensor:
        ids = token_ids(batch, self.n, seed=cache.get_seq_length())
        logits = torch.empty(0)
        if self.chunk_size is not None:
            logits = prefill(model, ids, cache, self.chunk_size).logits
        elif self.n:
            logits = model(ids, past_key_values=cache).logits
        if self.n_rejected:
            take_back(cache, self.n_rejected)
        return logits


TOKEN = Step(1)
LATER = {
    "a token": [TOKEN],
    "a question": [Step(3)],
    "a second turn": [Step(6), TOKEN, TOKEN],
    **{f"drafts, {n} of them rejected": [Step(4, n_rejected=n)] for n in range(4)},
    **{f"{n} tokens taken back": [Step(0, n_rejected=n)] for n in (1, 2, 5)},
}
"""What may follow a context."""


def take_back(cache: DynamicCache, n: int) -> None:
    """Crop the last `n` tokens, of which transformers 5.2 wants to know how many stay."""
    tells_length = "tokens_to_remove" not in type(cache).crop.__code__.co_varnames
    cache.crop(cache.get_seq_length() - n if tells_length else -n)


@torch.inference_mode()
def outcome(run: Callable[[], Any]) -> Any:
    """What it returns (logits, of a forward), or which error."""
    try:
        return run()
    except PressError as error:
        return type(error), str(error).replace(" of hooks_impl", "").replace(" of patch_impl", "")


class Programs(RuleBasedStateMachine):
    """Models, scopes, caches, threads and other patchers."""

    @classmethod
    def counted(cls, count: list[int]) -> type[Programs]:
        return type("Programs", (cls,), {"count": count})

    count: list[int]

    def __init__(self) -> None:
        super().__init__()
        self.count[0] += 1
        self.subjects = [Subject(index, made(index)) for index in range(len(FAMILIES))]
        for subject in self.subjects:
            subject.fingerprint = fingerprint(subject.model)
        self.caches: list[CachePair] = []
        self.wrapped: dict[nn.Module, tuple[Any, list[int], Any]] = {}
        self.undo_registry: Callable[[], None] | None = None
        self.registry = registry()
        self.fields = {name: repr(presses(name)) for name in NAMES}

    # ---- scopes ----

    @initialize(opened=st.lists(st.tuples(INDICES, st.sampled_from(NAMES), SIDES), max_size=4))
    def begin(self, opened: list[tuple[int, str, int]]) -> None:
        for index, name, side in opened:
            self.open_scope(index, name, side, elsewhere=False)

    @rule(index=INDICES, name=st.sampled_from(NAMES), side=SIDES, elsewhere=st.booleans())
    def open(self, index: int, name: str, side: int, elsewhere: bool) -> None:
        self.open_scope(index, name, side, elsewhere)

    def open_scope(self, index: int, name: str, side: int, elsewhere: bool) -> None:
        subject = self.subjects[index]
        if len(subject.scopes) == 3:
            return
        press: Press = presses(name)[side]
        try:
            handle = _in_thread(elsewhere, lambda: press.register(subject.model))
        except PressError:
            assert self._may_refuse(subject, name, side)
            return
        subject.scopes.append(Opened(name, side, handle))

    def _may_refuse(self, subject: Subject, name: str, side: int) -> bool:
        if (name, FAMILIES[subject.index]) == ("DuoAttentionPress", "gpt_neox"):
            return True  # whose head scores are those of a model with other heads
        # Another owner's wrapper above a patch of ours, where a new one could not get beneath.
        return side == 1 and any(module in self.wrapped for module in subject.model.modules())

    @precondition(lambda self: any(subject.scopes for subject in self.subjects))
    @rule(data=st.data(), elsewhere=st.booleans())
    def close(self, data: st.DataObject, elsewhere: bool) -> None:
        """In any order, from any thread, twice."""
        subject = self._opened(data)
        scope = subject.scopes[data.draw(st.integers(0, len(subject.scopes) - 1))]
        subject.scopes.remove(scope)
        _in_thread(elsewhere, scope.handle.remove)
        scope.handle.remove()

    @rule(index=INDICES, side=SIDES)
    def fail_to_open(self, index: int, side: int) -> None:
        """The last layer is refused, after all others were installed or not."""
        subject, press = self.subjects[index], presses("SnapKVPress")[side]

        class Failing(type(press)):  # type: ignore[misc]
            def install(self, scope: Any) -> None:
                scope.sites = scope.sites[:1]
                super().install(scope)
                raise BrokenError

        try:
            Failing(0.5).register(subject.model)
        except ScopeError:
            assert self._may_refuse(subject, "SnapKVPress", side)
        except BrokenError:
            return
        else:
            pytest.fail("opened")

    def _opened(self, data: st.DataObject) -> Subject:
        """Any model with an open scope."""
        found = [subject for subject in self.subjects if subject.scopes]
        return found[data.draw(st.integers(0, len(found) - 1))]

    # ---- forwards ----

    @rule(
        index=INDICES,
        batch=st.sampled_from([1, 2]),
        chunk_size=st.sampled_from([None, None, 5, 8]),
        later=st.sampled_from(["nothing", "a token", "a question"]),
    )
    def prefill(self, index: int, batch: int, chunk_size: int | None, later: str) -> None:
        """A new cache, and the tokens that follow at once."""
        both = self._new_cache(index, batch)
        for step in (Step(LENGTH, chunk_size), *LATER.get(later, [])):
            self._run(both, step)

    def _new_cache(self, index: int, batch: int) -> CachePair:
        if len(self.caches) == 4:
            self.caches.pop(0)
        subject = self.subjects[index]
        caches = (DynamicCache(config=subject.model.config) for _ in range(2))
        self.caches.append(CachePair(subject, *caches, batch))
        return self.caches[-1]

    @precondition(lambda self: self.caches)
    @rule(data=st.data(), later=st.sampled_from(sorted(LATER)), elsewhere=st.booleans())
    def go_on(self, data: st.DataObject, later: str, elsewhere: bool) -> None:
        """In this thread, or in one of its own."""
        both = self._any_cache(data)
        for step in LATER[later]:
            self._run(both, step, elsewhere)

    def _any_cache(self, data: st.DataObject) -> CachePair:
        return self.caches[data.draw(st.integers(0, len(self.caches) - 1))]

    @precondition(lambda self: len(self.caches) > 1)
    @rule()
    def decode_in_two_threads(self) -> None:
        first, second = self.caches[:2]
        barrier = threading.Barrier(2)

        def run(both: CachePair) -> Any:
            barrier.wait()
            return self._actual(both, TOKEN)

        with ThreadPoolExecutor(2) as pool:
            found = dict(zip((first, second), pool.map(run, (first, second)), strict=True))
        for both in (first, second):
            self._compare(both, found[both], TOKEN)

    @precondition(lambda self: any(s.scopes for s in self.subjects))
    @rule(data=st.data(), error=st.sampled_from([BrokenError, KeyboardInterrupt]))
    def break_off(self, data: st.DataObject, error: type[BaseException]) -> None:
        """A forward that fails half way leaves nothing of its own behind."""
        subject = self._opened(data)

        def explode(*_: Any) -> None:
            raise error

        hook = _attention(subject.model, 1).register_forward_pre_hook(explode)
        try:
            with pytest.raises((error, PressError)), torch.inference_mode():
                subject.model(CONTEXT, past_key_values=DynamicCache(config=subject.model.config))
        finally:
            hook.remove()

    @precondition(lambda self: self.caches)
    @rule(data=st.data(), name=st.sampled_from(NAMES), side=SIDES, elsewhere=st.booleans())
    def open_in_a_forward(self, data: st.DataObject, name: str, side: int, elsewhere: bool) -> None:
        """The forward has nothing to do with the new scope."""
        both = self._any_cache(data)
        self._change_in_a_forward(
            both, lambda: self.open_scope(both.subject.index, name, side, elsewhere)
        )

    @precondition(lambda self: any(both.subject.scopes for both in self.caches))
    @rule(data=st.data(), elsewhere=st.booleans())
    def close_in_a_forward(self, data: st.DataObject, elsewhere: bool) -> None:
        """The forward is the scope's to its end, and another thread waits for that."""
        found = [both for both in self.caches if both.subject.scopes]
        both = found[data.draw(st.integers(0, len(found) - 1))]
        scopes, threads = both.subject.scopes, []
        scope = scopes[data.draw(st.integers(0, len(scopes) - 1))]

        def close() -> None:
            scopes.remove(scope)
            threads.append(threading.Thread(target=scope.handle.remove, daemon=True))
            threads[0].start() if elsewhere else scope.handle.remove()

        self._change_in_a_forward(both, close)
        if elsewhere:
            threads[0].join(20)
            assert not threads[0].is_alive()

    def _change_in_a_forward(self, both: CachePair, change: Callable[[], None]) -> None:
        model, order, changed = both.subject.model, both.subject.order(), []

        def once(*_: Any) -> None:
            if not changed:
                changed.append(True)
                change()

        hook = _attention(model, 1).register_forward_pre_hook(once)
        try:
            found = self._actual(both, TOKEN)
        finally:
            hook.remove()
        once()  # of a forward that was refused before
        self._compare(both, found, TOKEN, order)

    def _actual(self, both: CachePair, step: Step) -> Any:
        return outcome(lambda: step(both.subject.model, both.cache, both.batch))

    def _run(self, both: CachePair, step: Step, elsewhere: bool = False) -> None:
        if both not in self.caches or both.cache.get_seq_length() + step.n <= step.n_rejected:
            return
        self._compare(both, _in_thread(elsewhere, lambda: self._actual(both, step)), step)

    def _compare(
        self, both: CachePair, found: Any, step: Step, order: list[str] | None = None
    ) -> None:
        """Compare what a step has done with what it does in scopes of presses in this `order`."""
        model = twin(both.subject.index)
        with ExitStack() as scopes:
            for name in both.subject.order() if order is None else order:
                scopes.callback(presses(name).hook.register(model).remove)
            expected = outcome(lambda: step(model, both.expected, both.batch))
        assert same(found, expected), (found, expected)
        if not isinstance(found, Tensor):  # refused half way: nobody goes on with such a cache
            self.caches.remove(both)
            return
        both.contents = contents(both.cache)
        assert same(both.contents, contents(both.expected))

    # ---- others ----

    @rule(index=INDICES, layer=st.integers(0, 1))
    def wrap_forward(self, index: int, layer: int) -> None:
        """As accelerate does: an instance attribute, which remembers what it replaced."""
        subject = self.subjects[index]
        module = _attention(subject.model, layer)
        if module in self.wrapped:
            return
        subject.foreign = True
        former, calls = module.forward, [0]

        def forward(*args: Any, **kwargs: Any) -> Any:
            calls[0] += 1
            return former(*args, **kwargs)

        module.forward = forward
        self.wrapped[module] = former, calls, forward

    @precondition(lambda self: self.wrapped)
    @rule(data=st.data())
    def unwrap_forward(self, data: st.DataObject) -> None:
        """Puts back what it had found, which may be a wrapper that was closed meanwhile.

        Scopes that were opened since lose their patch of the module, and say so.
        """
        modules = list(self.wrapped)
        module = modules[data.draw(st.integers(0, len(modules) - 1))]
        former, _, wrapper = self.wrapped.pop(module)
        takes_others = module.forward is not wrapper
        module.forward = former
        if not takes_others:
            return
        subject = next(s for s in self.subjects if any(module is m for m in s.model.modules()))
        lost = [[patch.is_lost for patch in own_patches(scope.handle)] for scope in subject.scopes]
        acting = [
            scope.name != "StreamingLLMDecodingPress" for scope in subject.scopes
        ]  # in layers
        if any(
            acts and any(layers) and not all(layers)
            for acts, layers in zip(acting, lost, strict=True)
        ):
            cache = DynamicCache(config=subject.model.config)
            found = outcome(lambda: [Step(n)(subject.model, cache) for n in (LENGTH, 1)])
            assert issubclass(found[0], PressError)  # of this scope, or of one inside of it
        for scope, layers in zip(subject.scopes, lost, strict=True):
            if any(layers):
                with pytest.warns(RuntimeWarning, match="put back what this scope had patched"):
                    scope.handle.remove()
            scope.handle.remove()
        subject.scopes = []

    @rule()
    def change_registry(self) -> None:
        """Another attention function under the name that the models use, or that one gone again."""
        if self.undo_registry is not None:
            self.undo_registry()
            self.undo_registry = None
            return
        former = ALL_ATTENTION_FUNCTIONS["sdpa"]

        def attention(*args: Any, **kwargs: Any) -> Any:
            return former(*args, **kwargs)

        ALL_ATTENTION_FUNCTIONS["sdpa"] = attention
        self.undo_registry = lambda: ALL_ATTENTION_FUNCTIONS.__delitem__("sdpa")

    @rule(index=INDICES)
    def copy_model(self, index: int) -> None:
        """A copy is not pruned, whatever is open on the model; it answers and goes."""
        subject = self.subjects[index]
        if subject.foreign:  # a copied closure still calls the original
            return
        clone = copy.deepcopy(subject.model)
        cache = DynamicCache(config=clone.config)
        with torch.inference_mode():
            logits = clone(CONTEXT, past_key_values=cache).logits
        assert torch.equal(logits, expected_answer(index))
        assert all(int(kept.min()) == LENGTH for kept in kept_lengths(cache))

    # ---- what always holds ----

    @invariant()
    def models_answer_as_untouched(self) -> None:
        for subject in self.subjects:
            before = {m: calls[0] for m, (_, calls, _) in self.wrapped.items()}
            assert torch.equal(answer(subject.model), expected_answer(subject.index))
            for module, (_, calls, _) in self.wrapped.items():
                own = any(module is m for m in subject.model.modules())
                assert calls[0] == before[module] + own  # nobody's wrapper was lost

    @invariant()
    def nothing_is_left(self) -> None:
        for subject in self.subjects:
            if not subject.scopes and not subject.foreign:
                assert fingerprint(subject.model) == subject.fingerprint
        if self.undo_registry is None and not any(s.scopes for s in self.subjects):
            assert registry() == self.registry

    @invariant()
    def caches_change_only_when_they_are_used(self) -> None:
        for both in self.caches:
            assert same(contents(both.cache), both.contents)

    @invariant()
    def presses_hold_no_state(self) -> None:
        assert {name: repr(presses(name)) for name in NAMES} == self.fields

    def teardown(self) -> None:
        for subject in self.subjects:
            while subject.scopes:
                subject.scopes.pop(0).handle.remove()
        if self.undo_registry is not None:
            self.undo_registry()
        self.undo_registry = None
        for module, (former, *_) in self.wrapped.items():
            module.forward = former
        self.wrapped = {}
        self.nothing_is_left()
        self.models_answer_as_untouched()


def _in_thread(elsewhere: bool, run: Callable[[], Any]) -> Any:
    """What `run` returns or raises, called here or in a thread of its own."""
    if not elsewhere:
        return run()
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(run).result()


def _attention(model: nn.Module, layer: int) -> nn.Module:
    found = [m for name, m in model.named_modules() if name.endswith(("self_attn", "attention"))]
    return found[layer]


@pytest.mark.filterwarnings("ignore:.*before this scope opened")
@pytest.mark.parametrize("shard", range(N_SHARDS))
def test_programs(shard, record_property):
    count = [0]
    machine = seed(shard)(Programs.counted(count))
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=N_PROGRAMS // N_SHARDS,
            stateful_step_count=MAX_STEPS,
            deadline=None,
            database=None,
            print_blob=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
    assert count[0] >= N_PROGRAMS // N_SHARDS
    record_property("programs", count[0])
