"""A patch comes off without a trace, whatever else happens to the attribute."""

import functools
import inspect
import types

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attention_patch import Patch, wrap

# ---- things to patch -----------------------------------------------------------------------------


class Base:
    def f(self, trace, *, end="base"):
        return [*trace, end]


def _own(trace, *, end="own"):
    return [*trace, end]


def _with_its_own(owner):
    owner.f = _own
    return owner


OWNERS = {
    "instance": Base,
    "instance with its own": lambda: _with_its_own(Base()),
    "module": lambda: _with_its_own(types.ModuleType("patched")),
    "class": lambda: type("Fresh", (), {"f": Base.f}),
}


def _call(owner, *args, **kwargs):
    instance = owner() if isinstance(owner, type) else owner
    return instance.f([], *args, **kwargs)


def _layer(name):
    def layer(call_next, trace, **kwargs):
        return call_next([*trace, name], **kwargs)

    return layer


def _same(owner, before):
    """Whether `owner` has the very attributes that it had."""
    now = vars(owner)
    return now.keys() == before.keys() and all(now[name] is before[name] for name in before)


# ---- putting on and taking off -------------------------------------------------------------------


def test_the_same_layer_put_on_twice_runs_twice_and_comes_off_once_each():
    owner, layer = Base(), _layer("twice")
    first, second = wrap(owner, "f", layer), wrap(owner, "f", layer)
    assert _call(owner) == ["twice", "twice", "base"]
    second.remove()
    assert _call(owner) == ["twice", "base"]
    first.remove()
    assert _call(owner) == ["base"]


def test_another_name_for_a_patched_attribute_is_an_attribute_of_its_own():
    owner = Base()
    patch = wrap(owner, "f", _layer("f"))
    owner.g = owner.f  # as accelerate keeps the forward that it replaces
    patch_of_g = wrap(owner, "g", _layer("g"))
    assert _call(owner) == ["f", "base"]
    assert owner.g([]) == ["g", "f", "base"]
    patch.remove()
    assert owner.g([]) == ["g", "base"]
    patch_of_g.remove()
    assert _call(owner) == owner.g([]) == ["base"]
    assert set(vars(owner)) == {"g"}


def test_a_layer_may_take_itself_off_while_it_runs():
    owner = Base()
    patches: list[Patch] = []

    def once(call_next, trace):
        patches[0].remove()
        return call_next([*trace, "once"])

    patches.append(wrap(owner, "f", once))
    assert _call(owner) == ["once", "base"]
    assert _call(owner) == ["base"]
    assert vars(owner) == {}


def test_a_removal_that_was_interrupted_may_be_done_again(monkeypatch):
    owner = Base()
    patch = wrap(owner, "f", _layer("a"))
    with monkeypatch.context() as changed:
        changed.setattr(type(patch._stack), "hold", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            patch.remove()
    patch.remove()
    assert "f" not in vars(owner)


def test_a_patched_function_looks_like_the_original():
    owner = Base()
    signature, name, doc = inspect.signature(owner.f), owner.f.__name__, owner.f.__doc__
    patch = wrap(owner, "f", _layer("layer"))
    assert inspect.signature(owner.f) == signature  # transformers reads signatures of forwards
    assert (owner.f.__name__, owner.f.__doc__) == (name, doc)
    patch.remove()


def test_a_missing_attribute_is_an_error_that_leaves_nothing():
    owner = Base()
    with pytest.raises(AttributeError, match="nothing_of_that_name"):
        wrap(owner, "nothing_of_that_name", _layer("layer"))
    assert vars(owner) == {}


class Elsewhere(torch.nn.Module):
    """Callables that are stored outside of the `__dict__`, and one that comes there when asked."""

    __slots__ = ("slot",)

    def __init__(self):
        super().__init__()
        self.child = self.setter = self.slot = torch.nn.Identity()

    setter = property(lambda self: self.child, lambda self, value: setattr(self, "child", value))
    cached = functools.cached_property(lambda self: abs)


@pytest.mark.parametrize("name", ["child", "setter", "slot", "training"])
def test_what_is_stored_elsewhere_is_refused_and_stays(name):
    owner = Elsewhere()
    before, value = dict(vars(owner)), getattr(owner, name)
    with pytest.raises(TypeError, match=name):
        wrap(owner, name, _marking)
    assert getattr(owner, name) is value
    assert _same(owner, before)
    assert list(owner.children()) == [owner.child]


def test_an_attribute_that_is_cached_when_asked_for():
    owner = Elsewhere()
    patch = wrap(owner, "cached", _marking)
    assert owner.cached(-1) == "marked 1"
    patch.remove()
    assert owner.cached is abs


# ---- attributes of classes -----------------------------------------------------------------------


class Shouting:
    def __call__(self, x):
        return x.upper()


class Kinds:
    def method(self, x):
        return x

    @staticmethod
    def static(x):
        return x

    @classmethod
    def of_class(cls, x):
        return f"{cls.__name__} {x}"

    callable_object = Shouting()


class SubKinds(Kinds):
    pass


def _marking(call_next, x):
    return f"marked {call_next(x)}"


@pytest.mark.parametrize(
    "owner",
    [Kinds, SubKinds, Kinds(), SubKinds()],
    ids=["class", "subclass", "instance", "instance of subclass"],
)
@pytest.mark.parametrize("name", ["static", "of_class", "callable_object"])
def test_any_kind_of_method_is_patched_and_restored(owner, name):
    before = dict(vars(owner))
    expected = f"marked {getattr(owner, name)('x')}"
    callers = [owner, owner()] if isinstance(owner, type) else [owner]
    patch = wrap(owner, name, _marking)
    try:
        assert [getattr(caller, name)("x") for caller in callers] == [expected] * len(callers)
    finally:
        patch.remove()
    assert _same(owner, before)
    assert f"marked {getattr(owner, name)('x')}" == expected


@pytest.mark.parametrize("owners", [(Kinds, SubKinds), (SubKinds, Kinds)], ids=["base", "sub"])
@pytest.mark.parametrize("name", ["method", "static", "of_class", "callable_object"])
def test_a_class_and_its_base_may_both_be_patched(owners, name):
    plain, before = getattr(SubKinds(), name)("x"), dict(vars(SubKinds))
    patches = [wrap(owner, name, _marking) for owner in owners]
    assert getattr(SubKinds(), name)("x") == f"marked marked {plain}"
    patches[0].remove()
    assert getattr(SubKinds(), name)("x") == f"marked {plain}"
    patches[1].remove()
    assert getattr(SubKinds(), name)("x") == plain
    assert _same(SubKinds, before)


@pytest.mark.parametrize(
    ("owner", "name", "layer", "why"),
    [
        (Elsewhere, "setter", _marking, "'setter' is a property"),
        (Kinds, "method", None, "the layer is a NoneType"),
        (Shouting(), "__call__", _marking, "patch that of Shouting"),
    ],
)
def test_a_patch_that_would_never_be_called_is_refused(owner, name, layer, why):
    before = dict(vars(owner))
    with pytest.raises(TypeError, match=why):
        wrap(owner, name, layer)
    assert _same(owner, before)


class Meta(type):
    def of_meta(cls, x):
        return x


def test_a_method_of_the_metaclass_is_patched_there():
    owner = Meta("Made", (), {})
    before = dict(vars(owner))
    with pytest.raises(TypeError, match="metaclass Meta"):
        wrap(owner, "of_meta", _marking)
    assert _same(owner, before)
    patch = wrap(Meta, "of_meta", _marking)
    assert owner.of_meta("x") == "marked x"
    patch.remove()
    assert owner.of_meta("x") == "x"


@pytest.mark.parametrize("first", ["class", "instance"])
def test_a_class_and_its_instance_may_both_be_patched(first):
    owner, before = Base(), dict(vars(Base))
    owners = {"class": Base, "instance": owner}
    order = [first, *(owners.keys() - {first})]
    patches = {name: wrap(owners[name], "f", _layer(name)) for name in order}
    assert owner.f([]) == ["instance", "class", "base"]
    assert Base().f([]) == ["class", "base"]
    patches["class"].remove()
    assert owner.f([]) == ["instance", "base"]
    assert _same(Base, before)
    patches["instance"].remove()
    assert owner.f([]) == ["base"]
    assert vars(owner) == {}


# ---- other owners of the attribute ---------------------------------------------------------------


class Foreign:
    """Somebody else's wrapper: takes what it finds, and puts that back."""

    def __init__(self, owner, name):
        self.owner, self.name = owner, name
        self.had_own = "f" in vars(owner)
        self.found = vars(owner).get("f")
        call_next = owner.f

        def run(*args, **kwargs):
            *of_class, trace = args  # a class hands the instance over first
            return call_next(*of_class, [*trace, name], **kwargs)

        owner.f = run

    def remove(self):
        if self.had_own:
            self.owner.f = self.found
        else:
            del self.owner.f


KINDS = st.sampled_from(["wrap", "remove", "foreign wrap", "foreign unwrap", "call"])


@pytest.mark.parametrize("order", ["last first", "any"])
@pytest.mark.parametrize("make", OWNERS.values(), ids=OWNERS)
@given(st.lists(st.tuples(KINDS, st.integers(0, 7)), max_size=25))
def test_any_sequence_of_patches_ours_and_foreign_ends_clean(make, order, operations):
    owner = make()
    before = dict(vars(owner))
    end = _call(owner)
    # The model: what lies around the attribute, inside out. A list holds our layers that lie side
    # by side, the oldest first; anything else is a foreign wrapper.
    around = []
    patches: list[tuple[Patch, str]] = []
    names = iter(range(100))

    def unwrap(foreign):
        del around[[part is foreign for part in around].index(True) :]  # and what lies on it
        foreign.remove()

    for operation, index in operations:
        name = f"{operation} {next(names)}"
        foreigners = [part for part in around if isinstance(part, Foreign)]
        if operation == "wrap":
            patches.append((wrap(owner, "f", _layer(name)), name))
            if not around or isinstance(around[-1], Foreign):
                around.append([])
            around[-1].append(name)
        elif operation == "remove" and patches:
            patch, name = patches[index % len(patches)]
            patch.remove()
            for part in around:
                if isinstance(part, list) and name in part:
                    part.remove(name)
        elif operation == "foreign wrap":
            around.append(Foreign(owner, name))
        elif operation == "foreign unwrap" and foreigners:
            if order == "any":
                unwrap(foreigners[index % len(foreigners)])
            elif around[-1] is foreigners[-1] or around[-1] == []:
                unwrap(foreigners[-1])
        elif operation == "call":
            expected = []
            for part in reversed(around):
                expected += [part.name] if isinstance(part, Foreign) else part
            assert _call(owner) == [*expected, *end]

    for patch, _ in patches:
        patch.remove()
    for foreign in reversed([part for part in around if isinstance(part, Foreign)]):
        foreign.remove()
    assert _call(owner) == end
    assert _same(owner, before)
