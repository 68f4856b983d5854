"""Reversible patches: wrap any attribute of any object, and restore the original exactly.

```python
patch = wrap(module, "forward", lambda call_next, *args, **kwargs: call_next(*args, **kwargs))
patch.remove()
```

Built on `wrapt`, with these guarantees in addition:

* *Exact.* `remove()` restores the same object, or deletes the attribute if the instance had none.
* *Any order.* All layers on one attribute share one wrapper, so any layer can be removed. The
  latest layer is the innermost: the last to see the arguments, the first to see the result.
* *Other libraries.* If another library has wrapped or replaced the attribute since, its change
  stays. A wrapper without layers passes calls through, and removes itself when it is called or
  patched again as the attribute. If another library restores an earlier attribute, our layers are
  lost; `Patch.is_lost` reports that.
* *Copies.* `deepcopy` and `pickle` of a patched `nn.Module` give an unpatched module.
* *Threads.* The tuple of layers is replaced under a lock; calls read it without one.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from threading import RLock
from types import FunctionType
from typing import Any

from torch import nn
from wrapt.wrappers import FunctionWrapper  # in Python, which torch.compile can trace

Layer = Callable[..., Any]
"""`layer(call_next, *args, **kwargs)`; `call_next` is the next inner layer or the original."""

_MISSING = object()
_lock = RLock()


class _Wrapper(FunctionWrapper):
    """The object that replaces the attribute while there are layers."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # skips wrapt's search for an instance
        call = self._self_stack.call
        if call is None:
            return self._self_wrapper(self.__wrapped__, None, args, kwargs)
        return call(*args, **kwargs)

    # A copy reaches the wrapper itself only where another library has stored it (accelerate stores
    # the forward that it replaces in the module). The copy gets the wrapped attribute.

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.__wrapped__, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.__wrapped__.__reduce_ex__(protocol)


class _Stack:
    """The layers on one attribute, and the wrapper that runs them.

    Attributes:
        original: the attribute in the owner's `__dict__`, or `_MISSING`.
        patches: the open patches, the latest first; see `hold`.
        call: runs the layers; None: `run` does.
        is_method: whether the attribute is a plain method of the owner's class.
    """

    def __init__(self, owner: Any, name: str) -> None:
        self.owner, self.name = owner, name
        wrapped = getattr(owner, name)  # a `cached_property` comes into the `__dict__` with this
        self.original = vars(owner).get(name, _MISSING)
        self.patches: list[Patch] = []
        self.is_method = type(_inherited(type(owner), name, None)) is FunctionType
        # For a class the unbound attribute: wrapt binds it at each call.
        self.wrapped = _inherited(owner, name, _MISSING) if isinstance(owner, type) else wrapped
        if self.wrapped is _MISSING:
            kind = type(owner).__name__
            raise TypeError(f"{owner.__name__} has {name!r} from its metaclass {kind}; patch that")
        self.wrapper = _Wrapper(self.wrapped, self.run)
        self.wrapper._self_stack = self
        self.hold()

    def hold(self) -> None:
        """Run the layers of the open patches from now on.

        Garbage collection may remove a patch in any line, within the thread that has the lock.
        """
        patches: list[Patch] | None = None
        while patches != self.patches:
            patches = self.patches.copy()
            first = {patch.layer: patch for patch in patches if patch.shared}
            self.layers = tuple(p.layer for p in patches if not p.shared or p is first[p.layer])
            is_bound = bool(self.layers) and not isinstance(self.owner, type)
            self.call = self.around(self.beneath) if is_bound else None

    def around(self, call: Layer) -> Layer:
        """`call` wrapped in all layers."""
        for layer in self.layers:
            call = partial(layer, call)
        return call

    def run(self, wrapped: Any, bound_to: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        """Called in place of the attribute; `wrapped` is the attribute, bound by wrapt."""
        if not self.layers:  # another library has stored the wrapper
            _unlink_unused(self.owner, self.name)
        if not isinstance(self.owner, type):
            return self.beneath(*args, **kwargs)
        if self.original is _MISSING:  # a base may have been patched since
            with suppress(TypeError):  # else it is called with an object of another class
                bases: Any = super(self.owner, self.owner if bound_to is None else bound_to)
                wrapped = getattr(bases, self.name, wrapped)
        return self.around(wrapped)(*args, **kwargs)

    def beneath(self, *args: Any, **kwargs: Any) -> Any:
        """Call the original, or the attribute that the class has now, which may be patched, too."""
        if self.original is not _MISSING:
            return self.original(*args, **kwargs)
        if self.is_method:  # compilers cannot look into the `__dict__` of a class
            method = getattr(type(self.owner), self.name)
            if type(method) is FunctionType:
                return method(self.owner, *args, **kwargs)
        attribute = _inherited(type(self.owner), self.name, _MISSING)
        if hasattr(attribute, "__get__"):
            attribute = attribute.__get__(self.owner)
        return (self.wrapped if attribute is _MISSING else attribute)(*args, **kwargs)


def _inherited(cls: type, name: str, default: Any) -> Any:
    """The unbound attribute `name` of `cls` or its first base that defines it, else `default`."""
    return next((vars(base)[name] for base in cls.__mro__ if name in vars(base)), default)


class Patch:
    """One layer on one attribute. `remove()` takes it off; a second `remove()` does nothing."""

    def __init__(self, layer: Layer, shared: bool) -> None:
        self._stack: _Stack | None = None
        self.layer, self.shared = layer, shared

    def remove(self) -> None:
        with _lock:
            stack = self._stack
            if stack is None:
                return
            if self in stack.patches:
                stack.patches.remove(self)
            stack.hold()
            if not stack.patches and (copies := _copies_of(stack.owner)):
                copies.stacks[:] = [other for other in copies.stacks if other is not stack]
                if not copies.stacks:
                    del vars(stack.owner)["__reduce_ex__"]
            _unlink_unused(stack.owner, stack.name)
            self._stack = None  # after an interrupt, removing it again does the rest

    @property
    def is_lost(self) -> bool:
        """Whether another library restored an earlier attribute while this patch is open.

        True only if that is certain: an unknown attribute may call our wrapper.
        """
        stack = self._stack
        if stack is None:
            return False
        owner, name = stack.owner, stack.name
        value = vars(owner).get(name, _MISSING)
        while value is not stack.wrapper and (other := _stack_of(value, owner, name)):
            value = other.original
        if value is stack.wrapper:
            return False
        bare = getattr(value, "__func__", None) is _inherited(type(owner), name, _MISSING)
        return value is _MISSING or value is stack.original or bare


def wrap(owner: Any, name: str, layer: Layer, shared: bool = False) -> Patch:
    """Run `layer` around the attribute `name` of `owner` until the patch is removed.

    Args:
        owner: an instance, a class or a module.
        name: a callable attribute of it, possibly inherited.
        layer: called as `layer(call_next, *args, **kwargs)` in place of the attribute.
        shared: run the layer only once per call, at its first place, however often it is wrapped.

    Raises:
        AttributeError: if there is no such attribute, or the object is frozen.
        TypeError: if the attribute cannot be set, or is not stored in the `__dict__` of the object
            (a child module, a slot, or a property with a setter) or, for a class, of it or a base;
            if it, or `layer`, cannot be called (a property of a class); for `__call__` of an
            instance, which Python looks up on its class.
    """
    for what, value in ((repr(name), getattr(owner, name)), ("the layer", layer)):
        if not callable(value):
            raise TypeError(f"{what} is a {type(value).__name__}, which cannot be called")
    if name == "__call__" and not isinstance(owner, type):
        raise TypeError(f"calls run the __call__ of a class; patch that of {type(owner).__name__}")
    patch = Patch(layer, shared)
    try:
        _install(patch, owner, name)
    except BaseException:  # as by an interrupt: nobody gets the patch
        patch.remove()
        raise
    return patch


def _install(patch: Patch, owner: Any, name: str) -> None:
    with _lock:
        stack = patch._stack = _stack_of(vars(owner).get(name), owner, name) or _Stack(owner, name)
        stack.patches.insert(0, patch)  # first, so that nothing unlinks the wrapper meanwhile
        setattr(owner, name, stack.wrapper)
        if vars(owner).get(name) is not stack.wrapper:
            setattr(owner, name, stack.wrapped)
            raise TypeError(
                f"{name!r} of a {type(owner).__name__} is a child module, a slot or property; "
                "patch a method of what it holds instead, such as the `forward` of a module"
            )
        if isinstance(owner, nn.Module):
            vars(owner).setdefault("__reduce_ex__", _CleanReduce(owner))
        if (copies := _copies_of(owner)) and stack not in copies.stacks:
            copies.stacks.append(stack)
        stack.hold()


def is_covered(owner: nn.Module, name: str) -> bool:
    """Whether another library has wrapped an attribute on top of our layers.

    A layer that is added then becomes the outermost: it cannot be put below that wrapper.
    """
    with _lock:
        copies, value = _copies_of(owner), vars(owner).get(name)
        stacks = [stack for stack in copies.stacks if stack.name == name] if copies else []
        return any(stack.wrapper is not value for stack in stacks)


def _unlink_unused(owner: Any, name: str) -> None:
    """Restore the original if our wrapper is the attribute and has no layers left.

    Under another library's change, the wrapper stays and passes calls through.
    """
    with _lock:
        while stack := _stack_of(vars(owner).get(name), owner, name):
            if stack.patches:
                return
            if stack.original is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, stack.original)


def _stack_of(value: Any, owner: Any, name: str) -> _Stack | None:
    """The stack of the attribute `name` of `owner`, if `value` is its wrapper; else None."""
    if type(value) is not _Wrapper:
        return None
    stack: _Stack = value._self_stack
    return stack if stack.owner is owner and stack.name == name else None


class _CleanReduce:
    """`__reduce_ex__` of a patched module, in its `__dict__`: copies and pickles are unpatched.

    Attributes:
        stacks: the stacks with layers; one attribute has several only if another library has
            wrapped it in between.
    """

    def __init__(self, owner: nn.Module) -> None:
        self.owner = owner
        self.stacks: list[_Stack] = []

    def __call__(self, protocol: Any) -> Any:
        owner = self.owner
        reduced: Any = type(owner).__reduce_ex__(owner, protocol)
        make, args, *rest = reduced
        # A `torch.fx.GraphModule` is made from its `__dict__`; others are given theirs afterwards.
        return make, tuple(map(_unpatched, args)), *map(_unpatched, rest)


def _copies_of(owner: Any) -> _CleanReduce | None:
    """The `_CleanReduce` of a patched module; else None."""
    reduce = getattr(owner, "__dict__", {}).get("__reduce_ex__")
    return reduce if isinstance(reduce, _CleanReduce) else None


def _unpatched(part: Any) -> Any:
    """A part of what is pickled; of a dict that holds something of ours, a copy without it."""
    if not isinstance(part, dict):
        return part
    beneath = {name: _beneath(name, value) for name, value in part.items()}
    is_ours = any(beneath[name] is not value for name, value in part.items())
    return {n: v for n, v in beneath.items() if v is not _MISSING} if is_ours else part


def _beneath(name: str, value: Any) -> Any:
    """The value that a copy gets for the attribute `name`; `_MISSING`: none."""
    if isinstance(value, _CleanReduce):
        return _MISSING
    while type(value) is _Wrapper and value._self_stack.name == name:
        value = value._self_stack.original
    return value
