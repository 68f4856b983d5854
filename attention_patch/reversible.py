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
  Our wrapper, once it has no layers, passes calls through and unlinks itself as soon as it is the
  attribute again.
* *Copies.* `deepcopy` and `pickle` of a patched `nn.Module` give a clean module.
* *Threads.* Layers are replaced as a whole, under a lock; calls read them without one.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from threading import RLock
from typing import Any

import wrapt
from torch import nn

Layer = Callable[..., Any]
"""`layer(call_next, *args, **kwargs)`; `call_next` is whatever lies beneath."""

_MISSING = object()
_lock = RLock()
_wrappers: dict[tuple[int, str], list[_Wrapper]] = {}
"""Our wrappers on each (object, attribute), the latest last; several only where others wrap too."""


class _Wrapper(wrapt.FunctionWrapper):  # type: ignore[type-arg]
    """What stands in the attribute's place while there are layers."""

    def __init__(self, owner: Any, name: str) -> None:
        self._self_original = vars(owner).get(name, _MISSING)
        self._self_target, self._self_name = owner, name
        self._self_layers: tuple[Layer, ...] = ()
        super().__init__(getattr(owner, name), self._self_run)

    def _self_run(self, wrapped: Any, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        layers = self._self_layers
        if not layers:
            _unlink_unused(self._self_target, self._self_name)
        if self._self_original is _MISSING:  # somebody may have patched the class meanwhile
            owner = self._self_target
            wrapped = getattr(type(owner), self._self_name).__get__(owner)
        for layer in layers:
            wrapped = partial(layer, wrapped)
        return wrapped(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.__wrapped__, memo)  # reached only through somebody else's wrapper

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.__wrapped__.__reduce_ex__(protocol)


class Patch:
    """One layer on one attribute; `remove()` takes it off, a second `remove()` does nothing."""

    def __init__(self, wrapper: _Wrapper, layer: Layer) -> None:
        self._wrapper: _Wrapper | None = wrapper
        self._layer = layer

    def remove(self) -> None:
        with _lock:
            wrapper, self._wrapper = self._wrapper, None
            if wrapper is None:
                return
            wrapper._self_layers = tuple(
                layer for layer in wrapper._self_layers if layer is not self._layer
            )
            _unlink_unused(wrapper._self_target, wrapper._self_name)


def wrap(owner: Any, name: str, layer: Layer) -> Patch:
    """Run `layer` around the attribute `name` of `owner` until the patch is removed.

    Args:
        owner: an instance, a class or a module.
        name: a callable attribute of it, its own or inherited.
        layer: called as `layer(call_next, *args, **kwargs)` in place of the attribute.

    Raises:
        AttributeError: if there is no such attribute.
    """
    with _lock:
        _unlink_unused(owner, name)
        wrapper = vars(owner).get(name)
        wrappers = _wrappers.setdefault((id(owner), name), [])
        if not any(wrapper is ours for ours in wrappers):
            wrapper = _Wrapper(owner, name)
            wrappers.append(wrapper)
            setattr(owner, name, wrapper)
            if isinstance(owner, nn.Module):
                owner.__dict__.setdefault("__reduce_ex__", _CleanReduce(owner))
        layer = partial(layer)  # its own object, so that the same layer can be put on twice
        wrapper._self_layers = (layer, *wrapper._self_layers)
        return Patch(wrapper, layer)


def _unlink_unused(owner: Any, name: str) -> None:
    """Take our wrappers off, from the top, as long as they have no layers left."""
    with _lock:
        wrappers = _wrappers.get((id(owner), name), [])
        while wrappers and not wrappers[-1]._self_layers:
            if vars(owner).get(name) is not wrappers[-1]:
                return  # somebody else's change is on top: it stays, ours passes calls through
            original = wrappers.pop()._self_original
            if original is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, original)
        if not wrappers:
            _wrappers.pop((id(owner), name), None)
            _forget_copying(owner)


def _forget_copying(owner: Any) -> None:
    patched = any(key[0] == id(owner) for key in _wrappers)
    if not patched and isinstance(vars(owner).get("__reduce_ex__"), _CleanReduce):
        del owner.__dict__["__reduce_ex__"]


class _CleanReduce:
    """Stands in a patched module's `__dict__` as `__reduce_ex__`: copies and pickles it clean."""

    def __init__(self, owner: nn.Module) -> None:
        self.owner = owner

    def __call__(self, protocol: Any) -> Any:
        owner = self.owner
        reduced: Any = type(owner).__reduce_ex__(owner, protocol)
        make, args, state, *rest = reduced
        state = {name: _beneath(value) for name, value in state.items()}
        return make, args, {n: v for n, v in state.items() if v is not _MISSING}, *rest


def _beneath(value: Any) -> Any:
    if isinstance(value, _CleanReduce):
        return _MISSING
    while type(value) is _Wrapper:
        value = value._self_original
    return value
