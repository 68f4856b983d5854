"""Models with twins, scopes and caches: what `test_state_machine.py` draws programs about."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from hypothesis.stateful import RuleBasedStateMachine, invariant
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from attention_patch import Patch
from experiments.testbed.compare import pair
from experiments.testbed.recipes import recipe_pair
from patch_impl import mechanism
from press_core import PressError, kept_lengths, prefill
from press_core.cache.ragged import RaggedLayer
from press_core.learned.measured import HeadScores
from tests.presses import TABLES
from tests.support import build, token_ids

NAMES = tuple(TABLES["twins"])
LENGTH, CONTEXT = 12, token_ids(1, 12)
FAMILIES = ("llama", "llama", "gpt_neox")


@lru_cache
def presses(name):
    """A pair of presses that leave half of the context; the same objects in every program."""
    fields = dict(TABLES["twins"][name])
    for field_name in {"press", "base_press"} & fields.keys():
        fields[field_name] = pair(fields[field_name])
    if name == "DuoAttentionPress":
        fields["head_scores"] = HeadScores(torch.tensor(fields["head_scores"]))
    return pair(name, **fields) if fields else recipe_pair(name, 0.5)


def made(index):
    """The model `index`, and any number of twins of it."""
    return build(FAMILIES[index], num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, seed=index)


twin = lru_cache(made)


@torch.inference_mode()
def answer(model):
    """Logits without a cache, which no press has a say in."""
    return model(CONTEXT, use_cache=False).logits


@lru_cache
def expected_answer(index):
    return answer(made(index))


@dataclass(eq=False)
class Opened:
    """A scope that is open."""

    name: str
    side: int
    """Of a PressPair: 0 hooks, 1 patches."""
    handle: Any


def own_patches(handle):
    """The patches by which a press prunes, one per attention module; none where hooks do."""
    installed = handle.state.on_layers.by_scope.get(handle.state, [])
    patches = [patch for patch in installed if isinstance(patch, Patch)]
    return [p for p in patches if getattr(p.layer, "func", None) is mechanism._attention]


@dataclass(eq=False)
class Subject:
    """A model, and what is known of it."""

    index: int
    model: PreTrainedModel
    scopes: list[Opened] = field(default_factory=list)
    foreign: bool = False
    """Whether somebody else has ever changed an attribute of it."""
    fingerprint: Any = None

    def order(self):
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


def contents(cache):
    """All that a cache says of itself."""
    said = [(type(layer).__name__, layer.get_seq_length()) for layer in cache.layers]
    said += [lengths.clone() for lengths in kept_lengths(cache)]
    for layer in cache.layers:
        if isinstance(layer, RaggedLayer):
            said += [states.clone() for states in layer.dense()]
        elif layer.is_initialized:
            said += [layer.keys.clone(), layer.values.clone()]
    return said


def same(left, right):
    if isinstance(left, Tensor):
        return isinstance(right, Tensor) and torch.equal(left, right)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


def fingerprint(model):
    """Every instance attribute and hook of a model, by identity."""
    found = []
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            inside = [id(x) for x in value.values()] if isinstance(value, dict) else id(value)
            found.append((name, key, inside))
    return found


def registry():
    owners = ALL_ATTENTION_FUNCTIONS, type(ALL_ATTENTION_FUNCTIONS)
    found = [(name, id(value)) for owner in owners for name, value in vars(owner).items()]
    return [*found, id(ALL_ATTENTION_FUNCTIONS["sdpa"])]


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

    def __call__(self, model, cache, batch=1):
        ids = token_ids(batch, self.n, seed=cache.get_seq_length())
        logits = torch.empty(0)
        if self.chunk_size is not None:
            logits = prefill(model, ids, cache, self.chunk_size).logits
        elif self.n:
            logits = model(ids, past_key_values=cache).logits
        if self.n_rejected:
            cache.crop(-self.n_rejected)
        return logits


TOKEN = Step(1)
LATER = {
    name: [Step(n, n_rejected=n_rejected) for n, n_rejected in steps]
    for name, steps in TABLES["later"].items()
}
"""What may follow a context."""


@torch.inference_mode()
def outcome(run):
    """What it returns (logits, of a forward), or which error."""
    try:
        return run()
    except PressError as error:
        return type(error), str(error).replace(" of hooks_impl", "").replace(" of patch_impl", "")


def in_thread(elsewhere, run):
    """What `run` returns or raises, called here or in a thread of its own."""
    if not elsewhere:
        return run()
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(run).result()


def attention_of(model, layer):
    found = [m for name, m in model.named_modules() if name.endswith(("self_attn", "attention"))]
    return found[layer]


class Twins(RuleBasedStateMachine):
    """Models whose twins tell what they must do, and what always holds of them."""

    def __init__(self):
        super().__init__()
        self.subjects = [Subject(index, made(index)) for index in range(len(FAMILIES))]
        for subject in self.subjects:
            subject.fingerprint = fingerprint(subject.model)
        self.caches: list[CachePair] = []
        self.wrapped: dict[nn.Module, tuple[Any, list[int], Any]] = {}
        self.undo_registry = None
        self.registry = registry()
        self.fields = {name: repr(presses(name)) for name in NAMES}

    @invariant()
    def models_answer_as_untouched(self):
        for subject in self.subjects:
            before = {m: calls[0] for m, (_, calls, _) in self.wrapped.items()}
            assert torch.equal(answer(subject.model), expected_answer(subject.index))
            for module, (_, calls, _) in self.wrapped.items():
                own = any(module is m for m in subject.model.modules())
                assert calls[0] == before[module] + own  # nobody's wrapper was lost

    @invariant()
    def nothing_is_left(self):
        for subject in self.subjects:
            if not subject.scopes and not subject.foreign:
                assert fingerprint(subject.model) == subject.fingerprint
        if self.undo_registry is None and not any(s.scopes for s in self.subjects):
            assert registry() == self.registry

    @invariant()
    def caches_change_only_when_they_are_used(self):
        for both in self.caches:
            assert same(contents(both.cache), both.contents)

    @invariant()
    def presses_hold_no_state(self):
        assert {name: repr(presses(name)) for name in NAMES} == self.fields

    def teardown(self):
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
