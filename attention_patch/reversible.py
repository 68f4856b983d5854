"""Patches that come off: wrap any attribute of any object, and restore exactly what was there.

```python
patch = wrap(module, "forward", lambda call_next, *args, **kwargs: call_next(*args, **kwargs))
patch.remove()
```

What `wrapt` leaves open is settled here:

* *Exact.* Where the object had no attribute of its own, none is left; where it had one, it gets
  the very same object back.
* *Any order.* All our layers on one attribute share one wrapper, so a layer can be taken from the
  middle. The latest layer is the innermost: it runs first on the way out of the call.
* *Other owners.* If somebody else has wrapped or replaced the attribute since, their change stays.
  Our wrapper, once it has no layers, passes calls through, and unlinks itself when it is called or
  patched again as the attribute. If somebody puts back what stood there before, our layers go with
  it: `Patch.is_lost` tells.
* *Copies.* `deepcopy` and `pickle` of a patched `nn.Module` give a clean module.
* *Threads.* Layers are replaced as a whole, under a lock; calls read them without one.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from threading import RLock
from types import FunctionType
from typing import Any

import wrapt
from torch import nn

Layer = Callable[..., Any]
"""`layer(call_next, *args, **kwargs)`; `call_next` is whatever lies beneath."""

_MISSING = object()
_lock = RLock()
_wrappers: dict[tuple[int, str], list[_Wrapper]] = {}
"""Our wrappers with layers, by (object, attribute); several only where others wrap in between."""


class _Wrapper(wrapt.FunctionWrapper):  # type: ignore[type-arg]
    """What stands in the attribute's place while there are layers."""

    def __init__(self, owner: Any, name: str) -> None:
        self._self_original = vars(owner).get(name, _MISSING)
        self._self_target, self._self_name = owner, name
        self._self_patches: tuple[Patch, ...] = ()
        self._self_layers: tuple[Layer, ...] = ()
        # Of a class the attribute itself, not what it binds to: wrapt binds it call by call.
        wrapped = getattr(owner, name)
        if isinstance(owner, type):
            wrapped = _inherited(owner, name, wrapped)
        super().__init__(wrapped, self._self_run)

    def _self_run(self, wrapped: Any, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        layers, owner = self._self_layers, self._self_target
        if not layers:
            _unlink_unused(owner, self._self_name)
        if self._self_original is _MISSING and not isinstance(owner, type):
            wrapped = _inherited(type(owner), self._self_name, wrapped)  # patched meanwhile, maybe
            wrapped = _bound(wrapped, owner)
        for layer in layers:
            wrapped = partial(layer, wrapped)
        return wrapped(*args, **kwargs)

    def _self_hold(self, patches: tuple[Patch, ...]) -> None:
        """Run the layers of `patches`, the latest of which comes first."""
        first = {patch.layer: patch for patch in patches if patch.shared}
        self._self_patches = patches
        self._self_layers = tuple(
            patch.layer for patch in patches if not patch.shared or patch is first[patch.layer]
        )

    # Copies meet a wrapper itself only where somebody else has kept it (accelerate keeps the
    # forward that it replaces in the module): they get what lies beneath.

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.__wrapped__, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.__wrapped__.__reduce_ex__(protocol)


def _inherited(cls: type, name: str, default: Any) -> Any:
    """The attribute `name` of `cls` as it stands in its own or a base's dictionary, unbound."""
    for base in cls.__mro__:
        if name in vars(base):
            return vars(base)[name]
    return default


def _bound(attribute: Any, owner: Any) -> Any:
    """An inherited attribute as `owner` has it."""
    if type(attribute) is FunctionType:
        # Not a method: at a graph break torch.compile looks methods up by their name again, and
        # would find our wrapper there.
        return partial(attribute, owner)
    return attribute.__get__(owner) if hasattr(attribute, "__get__") else attribute


class Patch:
    """One layer on one attribute; `remove()` takes it off, a second `remove()` does nothing."""

    def __init__(self, wrapper: _Wrapper, layer: Layer, shared: bool) -> None:
        self._wrapper: _Wrapper | None = wrapper
        self.layer, self.shared = layer, shared

    def remove(self) -> None:
        with _lock:
            wrapper, self._wrapper = self._wrapper, None
            if wrapper is None:
                return
            owner, name = wrapper._self_target, wrapper._self_name
            wrapper._self_hold(tuple(p for p in wrapper._self_patches if p is not self))
            if not wrapper._self_patches:
                _forget(wrapper)
            _unlink_unused(owner, name)

    @property
    def name(self) -> str | None:
        """The attribute that is patched; None once the patch is removed."""
        return None if self._wrapper is None else self._wrapper._self_name

    @property
    def is_lost(self) -> bool:
        """Whether somebody has put back an attribute from before this patch, which is still open.

        True only where that is certain: an attribute that is none of ours may call ours.
        """
        wrapper = self._wrapper
        if wrapper is None:
            return False
        owner, name = wrapper._self_target, wrapper._self_name
        value = vars(owner).get(name, _MISSING)
        while value is not wrapper and _is_ours(value, owner, name):
            value = value._self_original
        if value is wrapper:
            return False
        bare = getattr(value, "__func__", None) is _inherited(type(owner), name, _MISSING)
        return value is _MISSING or value is wrapper._self_original or bare


def wrap(owner: Any, name: str, layer: Layer, shared: bool = False) -> Patch:
    """Run `layer` around the attribute `name` of `owner` until the patch is removed.

    Args:
        owner: an instance, a class or a module.
        name: a callable attribute of it, its own or inherited.
        layer: called as `layer(call_next, *args, **kwargs)` in place of the attribute.
        shared: run it once, where it was put on first, however often it is put on.

    Raises:
        AttributeError: if there is no such attribute.
        TypeError: if the object does not let its attributes be set.
    """
    with _lock:
        wrapper = vars(owner).get(name)
        if not _is_ours(wrapper, owner, name):
            wrapper = _Wrapper(owner, name)
            setattr(owner, name, wrapper)
        _remember(wrapper)
        patch = Patch(wrapper, layer, shared)
        wrapper._self_hold((patch, *wrapper._self_patches))
        return patch


def is_covered(owner: Any, name: str) -> bool:
    """Whether somebody else's wrapper stands above layers of ours on an attribute.

    A layer that is added then cannot get beneath it, and so comes out as the outermost.
    """
    with _lock:
        wrapper = vars(owner).get(name)
        return any(other is not wrapper for other in _wrappers.get((id(owner), name), ()))


def _unlink_unused(owner: Any, name: str) -> None:
    """Put back what stood beneath our wrapper if it is the attribute and has no layers left.

    Where somebody else's change is on top, it stays; ours passes calls through until then.
    """
    with _lock:
        while _is_ours(wrapper := vars(owner).get(name), owner, name):
            if wrapper._self_patches:
                return
            if wrapper._self_original is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, wrapper._self_original)


def _is_ours(value: Any, owner: Any, name: str) -> bool:
    return type(value) is _Wrapper and value._self_target is owner and value._self_name == name


def _remember(wrapper: _Wrapper) -> None:
    owner = wrapper._self_target
    live = _wrappers.setdefault((id(owner), wrapper._self_name), [])
    if not any(wrapper is other for other in live):
        live.append(wrapper)
    if isinstance(owner, nn.Module):
        owner.__dict__.setdefault("__reduce_ex__", _CleanReduce(owner))


def _forget(wrapper: _Wrapper) -> None:
    owner, key = wrapper._self_target, (id(wrapper._self_target), wrapper._self_name)
    _wrappers[key] = [other for other in _wrappers[key] if other is not wrapper]
    if not _wrappers[key]:
        del _wrappers[key]
    patched = any(owner_id == id(owner) for owner_id, _ in _wrappers)
    if not patched and isinstance(
        getattr(owner, "__dict__", {}).get("__reduce_ex__"), _CleanReduce
    ):
        del owner.__dict__["__reduce_ex__"]


class _CleanReduce:
    """Stands in a patched module's `__dict__` as `__reduce_ex__`: copies and pickles it clean."""

    def __init__(self, owner: nn.Module) -> None:
        self.owner = owner

    def __call__(self, protocol: Any) -> Any:
        owner = self.owner
        reduced: Any = type(owner).__reduce_ex__(owner, protocol)
        make, args, state, *rest = reduced
        state = {name: _beneath(name, value) for name, value in state.items()}
        return make, args, {n: v for n, v in state.items() if v is not _MISSING}, *rest


def _beneath(name: str, value: Any) -> Any:
    """What a copy gets for the attribute `name`."""
    if isinstance(value, _CleanReduce):
        return _MISSING
    while type(value) is _Wrapper and value._self_name == name:
        value = value._self_original
    return value
