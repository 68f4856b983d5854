"""A patch comes off without a trace, whatever else happens to the attribute."""

from __future__ import annotations

import copy
import functools
import inspect
import io
import pickle
import sys
import threading
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from attention_patch import Patch, wrap

# ---- things to patch -----------------------------------------------------------------------------


class Base:
    def f(self, trace: list[str], *, end: str = "base") -> list[str]:
        return [*trace, end]


class Derived(Base):
    pass


class Doubling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(2.0), requires_grad=False)

    def forward(self, x: Any) -> Any:
        return x * self.weight


def _own(trace: list[str], *, end: str = "own") -> list[str]:
    return [*trace, end]


def _base_instance() -> Any:
    return Base()


def _instance_with_its_own() -> Any:
    owner: Any = Base()
    owner.f = _own
    return owner


def _module() -> Any:
    owner: Any = types.ModuleType("patched")
    owner.f = _own
    return owner


def _class() -> Any:
    return type("Fresh", (), {"f": Base.f})


OWNERS = [_base_instance, _instance_with_its_own, _module, _class]
of_every_owner = pytest.mark.parametrize("make", OWNERS)


def _call(owner: Any, *args: Any, **kwargs: Any) -> list[str]:
    instance = owner() if isinstance(owner, type) else owner
    result: list[str] = instance.f([], *args, **kwargs)
    return result


def _layer(name: str) -> Callable[..., Any]:
    def layer(call_next: Any, trace: list[str], **kwargs: Any) -> Any:
        return call_next([*trace, name], **kwargs)

    return layer


def _attributes(owner: Any) -> dict[str, Any]:
    return dict(vars(owner))


def _same(owner: Any, before: dict[str, Any]) -> bool:
    """Whether `owner` has the very attributes that it had."""
    now = _attributes(owner)
    return now.keys() == before.keys() and all(now[name] is before[name] for name in before)


# ---- putting on and taking off -------------------------------------------------------------------


@of_every_owner
def test_a_layer_runs_around_the_attribute_until_it_is_removed(make: Callable[[], Any]) -> None:
    owner = make()
    before, untouched = _attributes(owner), _call(owner)
    patch = wrap(owner, "f", _layer("layer"))
    assert _call(owner) == ["layer", *untouched]
    assert _call(owner, end="given") == ["layer", "given"]
    patch.remove()
    assert _same(owner, before)
    assert _call(owner) == untouched


def test_the_same_layer_put_on_twice_runs_twice_and_comes_off_once_each() -> None:
    owner, layer = Base(), _layer("twice")
    first, second = wrap(owner, "f", layer), wrap(owner, "f", layer)
    assert _call(owner) == ["twice", "twice", "base"]
    second.remove()
    assert _call(owner) == ["twice", "base"]
    first.remove()
    assert _call(owner) == ["base"]


def test_two_attributes_and_two_objects_do_not_mix() -> None:
    one, other = Base(), Base()
    patch = wrap(one, "f", _layer("one"))
    string = wrap(one, "__init__", lambda call_next: call_next())
    assert _call(other) == ["base"]
    patch.remove()
    assert set(vars(one)) == {"__init__"}
    string.remove()
    assert vars(one) == {}


def test_another_name_for_a_patched_attribute_is_an_attribute_of_its_own() -> None:
    owner: Any = Base()
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


def test_a_layer_may_take_itself_off_while_it_runs() -> None:
    owner = Base()
    patches: list[Patch] = []

    def once(call_next: Any, trace: list[str]) -> Any:
        patches[0].remove()
        return call_next([*trace, "once"])

    patches.append(wrap(owner, "f", once))
    assert _call(owner) == ["once", "base"]
    assert _call(owner) == ["base"]
    assert vars(owner) == {}


def test_a_patched_function_looks_like_the_original() -> None:
    owner = Base()
    signature, name, doc = inspect.signature(owner.f), owner.f.__name__, owner.f.__doc__
    patch = wrap(owner, "f", _layer("layer"))
    assert inspect.signature(owner.f) == signature  # transformers reads signatures of forwards
    assert (owner.f.__name__, owner.f.__doc__) == (name, doc)
    patch.remove()


@pytest.mark.parametrize("raised", [ValueError("no"), KeyboardInterrupt()])
def test_exceptions_pass_through_and_leave_the_patch_in_order(raised: BaseException) -> None:
    class Failing:
        def f(self, trace: list[str]) -> Any:
            raise raised

    def failing(_: Any, *args: Any) -> Any:
        raise raised

    for owner, layer in ((Failing(), _layer("layer")), (Base(), failing)):
        patch = wrap(owner, "f", layer)
        for _ in range(2):
            with pytest.raises(type(raised)) as caught:
                _call(owner)
            assert caught.value is raised
        patch.remove()
        assert vars(owner) == {}


def test_a_missing_attribute_is_an_error_that_leaves_nothing() -> None:
    owner = Base()
    with pytest.raises(AttributeError, match="nothing_of_that_name"):
        wrap(owner, "nothing_of_that_name", _layer("layer"))
    assert vars(owner) == {}


def test_an_object_that_cannot_be_patched_is_an_error_that_leaves_nothing() -> None:
    with pytest.raises(TypeError, match="immutable"):
        wrap(int, "bit_length", _layer("layer"))


# ---- attributes of classes -----------------------------------------------------------------------


class Shouting:
    def __call__(self, x: str) -> str:
        return x.upper()


class Kinds:
    @staticmethod
    def static(x: str) -> str:
        return x

    @classmethod
    def of_class(cls, x: str) -> str:
        return f"{cls.__name__} {x}"

    callable_object = Shouting()


class SubKinds(Kinds):
    pass


def _marking(call_next: Any, x: str) -> str:
    return f"marked {call_next(x)}"


@pytest.mark.parametrize(
    "owner",
    [Kinds, SubKinds, Kinds(), SubKinds()],
    ids=["class", "subclass", "instance", "instance of subclass"],
)
@pytest.mark.parametrize("name", ["static", "of_class", "callable_object"])
def test_any_kind_of_method_is_patched_and_restored(owner: Any, name: str) -> None:
    before = _attributes(owner)
    expected = f"marked {getattr(owner, name)('x')}"
    callers = [owner, owner()] if isinstance(owner, type) else [owner]
    patch = wrap(owner, name, _marking)
    try:
        assert [getattr(caller, name)("x") for caller in callers] == [expected] * len(callers)
    finally:
        patch.remove()
    assert _same(owner, before)
    assert f"marked {getattr(owner, name)('x')}" == expected


def test_a_class_method_still_knows_the_class_it_was_called_on() -> None:
    patch = wrap(Kinds, "of_class", _marking)
    try:
        assert SubKinds.of_class("x") == "marked SubKinds x"
    finally:
        patch.remove()


def test_an_inherited_method_is_patched_for_the_subclass_alone() -> None:
    before = _attributes(Derived)
    patch = wrap(Derived, "f", _layer("derived"))
    try:
        assert Derived().f([]) == ["derived", "base"]
        assert Base().f([]) == ["base"]
    finally:
        patch.remove()
    assert _same(Derived, before)


@pytest.mark.parametrize("first", ["class", "instance"])
def test_a_class_and_its_instance_may_both_be_patched(first: str) -> None:
    owner, before = Base(), _attributes(Base)
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

    def __init__(self, owner: Any, name: str, style: str = "closure") -> None:
        self.owner, self.name = owner, name
        self.had_own = "f" in vars(owner)
        self.found = vars(owner).get("f")
        call_next = owner.f

        def run(*args: Any, **kwargs: Any) -> Any:
            *of_class, trace = args  # a class hands the instance over first
            return call_next(*of_class, [*trace, name], **kwargs)

        if style == "partial":  # as accelerate does
            self.wrapper: Any = functools.update_wrapper(functools.partial(run), call_next)
        else:
            self.wrapper = run
        owner.f = self.wrapper

    def remove(self) -> None:
        if self.had_own:
            self.owner.f = self.found
        else:
            del self.owner.f


@of_every_owner
@pytest.mark.parametrize("chance", ["call", "wrap"])
@pytest.mark.parametrize("style", ["closure", "partial"])
def test_under_a_foreign_wrapper_a_removed_patch_is_inert_and_then_gone(
    make: Callable[[], Any], chance: str, style: str
) -> None:
    if make is _class and style == "partial":
        style = "closure"  # a partial in a class binds no instance
    owner = make()
    before = _attributes(owner)
    patch = wrap(owner, "f", _layer("ours"))
    foreign = Foreign(owner, "foreign", style)
    assert _call(owner)[:-1] == ["foreign", "ours"]
    patch.remove()
    assert vars(owner)["f"] is foreign.wrapper
    assert _call(owner)[:-1] == ["foreign"]
    foreign.remove()
    if chance == "call":
        assert _call(owner)[:-1] == []
    else:
        wrap(owner, "f", _layer("next")).remove()
    assert _same(owner, before)
    assert _call(owner)[:-1] == []


def test_a_foreign_replacement_is_never_taken_away() -> None:
    owner: Any = Base()
    patch = wrap(owner, "f", _layer("ours"))

    def replacement(trace: list[str]) -> list[str]:
        return [*trace, "replacement"]

    owner.f = replacement
    patch.remove()
    assert vars(owner) == {"f": replacement}
    assert _call(owner) == ["replacement"]


def test_a_patch_that_somebody_deleted_comes_off_in_silence() -> None:
    owner: Any = Doubling()
    before = _attributes(owner)
    patch = wrap(owner, "forward", _tenfold)
    del owner.forward
    patch.remove()
    assert _same(owner, before)


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["wrap", "remove", "foreign wrap", "foreign unwrap", "call"]),
        st.integers(0, 7),
    ),
    max_size=25,
)


@pytest.mark.parametrize("order", ["last first", "any"])
@of_every_owner
@given(OPERATIONS)
@settings(deadline=None)
def test_any_sequence_of_patches_ours_and_foreign_ends_clean(
    make: Callable[[], Any], order: str, operations: list[tuple[str, int]]
) -> None:
    owner = make()
    before = _attributes(owner)
    end = _call(owner)
    # The model: what lies around the attribute, inside out. A list holds our layers that lie side
    # by side, the oldest first; anything else is a foreign wrapper.
    around: list[Any] = []
    patches: list[tuple[Patch, str]] = []
    names = iter(range(100))

    def unwrap(foreign: Foreign) -> None:
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
            expected: list[str] = []
            for part in reversed(around):
                expected += [part.name] if isinstance(part, Foreign) else part
            assert _call(owner) == [*expected, *end]

    for patch, _ in patches:
        patch.remove()
    for foreign in reversed([part for part in around if isinstance(part, Foreign)]):
        foreign.remove()
    assert _call(owner) == end
    assert _same(owner, before)


# ---- copies --------------------------------------------------------------------------------------


def _tenfold(call_next: Any, x: Any) -> Any:
    return 10 * call_next(x)


def _pickled(module: nn.Module) -> Any:
    return pickle.loads(pickle.dumps(module))


def _pickled_by_the_oldest_protocol(module: nn.Module) -> Any:
    return pickle.loads(pickle.dumps(module, protocol=2))


def _saved(module: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


DEEP_COPIES = [copy.deepcopy, _pickled, _pickled_by_the_oldest_protocol, _saved]
COPIES = [copy.copy, *DEEP_COPIES]
by_every_copy = pytest.mark.parametrize("make_copy", COPIES)


@by_every_copy
def test_a_copy_of_a_patched_module_is_clean(make_copy: Callable[[Any], Any]) -> None:
    module = Doubling()
    before = _attributes(module)
    patch = wrap(module, "forward", _tenfold)
    other = make_copy(module)
    assert type(other) is Doubling
    assert vars(other).keys() == before.keys()
    assert float(other(3)) == 6
    assert float(module(3)) == 60  # the original stays patched
    patch.remove()
    assert _same(module, before)
    assert float(other(3)) == 6


@by_every_copy
def test_a_copy_of_a_model_with_a_patched_part_is_clean(make_copy: Callable[[Any], Any]) -> None:
    part = Doubling()
    part.weight.fill_(3.0)
    model = nn.Sequential(Doubling(), part)
    patch = wrap(part, "forward", _tenfold)
    other = make_copy(model)
    assert float(model(torch.tensor(1.0))) == 60
    expected = 60 if make_copy is copy.copy else 6  # a shallow copy shares its parts
    assert float(other(torch.tensor(1.0))) == expected
    patch.remove()
    assert float(other(torch.tensor(1.0))) == 6


@by_every_copy
def test_a_forward_of_the_modules_own_goes_along(make_copy: Callable[[Any], Any]) -> None:
    module: Any = Doubling()
    module.forward = _negative
    patch = wrap(module, "forward", _tenfold)
    other = make_copy(module)
    assert vars(other)["forward"] is _negative
    assert (other(3), module(3)) == (-3, -30)
    patch.remove()
    assert vars(module)["forward"] is _negative


def _negative(x: Any) -> Any:
    return -x


@by_every_copy
def test_copies_stay_clean_until_the_last_attribute_is_restored(
    make_copy: Callable[[Any], Any],
) -> None:
    module = Doubling()
    before = _attributes(module)
    forward, text = (
        wrap(module, "forward", _tenfold),
        wrap(module, "extra_repr", lambda call_next: "patched"),
    )
    forward.remove()
    assert vars(make_copy(module)).keys() == before.keys()
    text.remove()
    assert _same(module, before)


def test_a_copy_may_be_patched_by_itself() -> None:
    module = Doubling()
    patch = wrap(module, "forward", _tenfold)
    other = copy.deepcopy(module)
    patch_of_copy = wrap(other, "forward", _tenfold)
    patch.remove()
    assert (float(module(3)), float(other(3))) == (6, 60)
    patch_of_copy.remove()
    assert float(other(3)) == 6


def test_a_way_of_copying_that_the_module_had_is_left_alone() -> None:
    module: Any = Doubling()
    module.__reduce_ex__ = own = lambda protocol: (Doubling, ())
    patch = wrap(module, "forward", _tenfold)
    assert vars(module)["__reduce_ex__"] is own
    patch.remove()
    assert vars(module)["__reduce_ex__"] is own


@pytest.mark.parametrize("make_copy", DEEP_COPIES)
def test_a_copy_under_a_foreign_wrapper_runs_the_foreign_one_alone(
    make_copy: Callable[[Any], Any],
) -> None:
    module: Any = Doubling()
    patch = wrap(module, "forward", _tenfold)
    module._old_forward = module.forward  # as accelerate hooks a module
    wrapper = functools.partial(_plus_one, module)
    module.forward = functools.update_wrapper(wrapper, module._old_forward)
    other = make_copy(module)
    other.weight.fill_(7.0)
    assert float(module(3)) == 61
    assert float(other(3)) == 22  # its own weight, and no layer of ours
    module.forward = module._old_forward
    del module._old_forward
    patch.remove()
    assert "forward" not in vars(module)
    assert "__reduce_ex__" not in vars(module)


def _plus_one(module: Any, x: Any) -> Any:
    return module._old_forward(x) + 1


def _put_back(module: Any, former: Any) -> None:
    module.forward = former


def _delete(module: Any, _: Any) -> None:
    del module.forward


@pytest.mark.parametrize("take", [_put_back, _delete])
def test_a_patch_that_somebody_took_away_says_so(take: Callable[[Any, Any], None]) -> None:
    module: Any = Doubling()
    former = module.forward
    patches = [wrap(module, "forward", _tenfold)]
    assert not patches[0].is_lost
    take(module, former)
    assert patches[0].is_lost
    assert float(module(3)) == 6
    patches.append(wrap(module, "forward", _tenfold))
    assert [patch.is_lost for patch in patches] == [True, False]
    for patch in patches:
        patch.remove()
        assert not patch.is_lost
    vars(module).pop("forward", None)  # what was put back is somebody else's
    assert float(module(3)) == 6


def test_a_patch_beneath_a_foreign_wrapper_is_not_lost() -> None:
    module: Any = Doubling()
    patch = wrap(module, "forward", _tenfold)
    module._old_forward = module.forward
    module.forward = functools.partial(_plus_one, module)
    assert not patch.is_lost
    later = wrap(module, "forward", _tenfold)
    assert not patch.is_lost
    module.forward = module._old_forward
    del module._old_forward
    assert not patch.is_lost
    assert later.is_lost
    later.remove()
    patch.remove()
    assert "forward" not in vars(module)


# ---- threads -------------------------------------------------------------------------------------


def test_threads_that_patch_at_once_end_clean() -> None:
    module = Doubling()
    before = _attributes(module)
    failures: list[BaseException] = []
    start = threading.Barrier(3)

    def patching(index: int) -> None:
        ran = 0

        def layer(call_next: Any, x: Any) -> Any:
            nonlocal ran
            ran += 1
            return call_next(x)

        start.wait()
        for _ in range(300):
            first, second = wrap(module, "forward", layer), wrap(module, "forward", layer)
            already = ran
            assert float(module(3)) == 6
            assert ran >= already + 2
            (first if index else second).remove()
            assert float(module(3)) == 6
            (second if index else first).remove()

    def calling() -> None:
        start.wait()
        for _ in range(900):
            assert float(module(3)) == 6

    def guarded(run: Callable[..., None], *args: Any) -> None:
        try:
            run(*args)
        except BaseException as error:
            failures.append(error)

    threads = [
        threading.Thread(target=guarded, args=args)
        for args in ((patching, 0), (patching, 1), (calling,))
    ]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not failures
    assert _same(module, before)
