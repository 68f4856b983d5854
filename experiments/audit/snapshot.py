"""Snapshots of everything that a mechanism could change.

A snapshot holds references to objects, not their ids, so that no object is freed and its id reused.
Configurations, settings and tensors are recorded by value, because they change in place.
"""

import builtins
import hashlib
import pkgutil
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import chain
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack
from transformers import AttentionInterface, AttentionMaskInterface, GenerationConfig
from transformers.configuration_utils import PreTrainedConfig
from transformers.utils.generic import GeneralInterface

from experiments import data_of
from experiments.framework.timing import no_garbage_collection

CALL, INSTANCE, CLASS, THREAD, PROCESS = REACHES = (
    "this call",
    "this instance",
    "this class",
    "this thread",
    "this process",
)
"""What a change affects, from the narrowest reach to the widest.

`CALL`: one call, through its arguments or its stack. `INSTANCE`: all uses of this model, its
modules or its configuration. `CLASS`: all models whose classes are defined in the same file.
`THREAD`: every model that this thread runs. `PROCESS`: every model.
"""


class Place(NamedTuple):
    """The key of a recorded value.

    Attributes:
        reach: one of `REACHES`.
        kind: "hook", "attribute", "class attribute" and so on.
        owner: path of the module in the model, or name of the class, Python module or registry.
        name: name of the attribute or entry of the owner.
    """

    reach: str
    kind: str
    owner: str
    name: str


Snapshot = dict[Place, Any]
Entries = Iterator[tuple[Place, Any]]

_TABLES = {"_parameters": "parameter", "_buffers": "buffer", "_modules": "submodule"}
_TENSOR_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_DATA: dict[str, Any] = data_of(__file__)
"""Names of Python modules: those that all models use, and those of torch; and settings."""


def snapshot(model: nn.Module) -> Snapshot:
    """Record `model` and the classes, modules, registries and settings that can affect it."""
    homes = dict.fromkeys(type(module).__module__ for module in model.modules())
    own = [name for name in homes if not _is_shared(name)]
    files = chain.from_iterable(_file(name, CLASS) for name in own)
    with no_garbage_collection():  # collecting thousands of small tuples would double the time
        return dict(chain(_instances(model), _classes(model), files, _process(own)))


def same(one: Any, other: Any) -> bool:
    """Whether two recorded values are the same object, or equal plain values."""
    if one is other:
        return True
    # Some values are created anew at each access, so they are compared by value.
    plain = (int, float, complex, str, bytes, torch.dtype, torch.device, CodeType)
    return type(one) is type(other) and isinstance(one, plain) and one == other


# ---- this instance -----------------------------------------------------------------------------


def _instances(model: nn.Module) -> Entries:
    configs: set[int] = set()
    for owner, module in model.named_modules(remove_duplicate=False):
        yield Place(INSTANCE, "class of a module", owner, "__class__"), type(module)
        for name, value in list(vars(module).items()):
            if isinstance(value, (PreTrainedConfig, GenerationConfig)):
                yield Place(INSTANCE, "attribute", owner, name), value
                if id(value) not in configs:
                    configs.add(id(value))
                    yield from _config(_joined(owner, name), value)
            elif name in _TABLES:
                for entry, item in list(value.items()):
                    yield from _nested(Place(INSTANCE, _TABLES[name], owner, entry), item, 0)
            else:
                yield from _nested(Place(INSTANCE, _kind(name), owner, name), value)


def _kind(name: str) -> str:
    if name.endswith(("_with_kwargs", "_always_called")):
        return "hook flag"
    return "hook" if name.endswith("_hooks") else "attribute"


def _config(owner: str, config: Any) -> Entries:
    for name, value in list(vars(config).items()):
        if isinstance(value, PreTrainedConfig):
            yield from _config(_joined(owner, name), value)
        else:
            yield Place(INSTANCE, "configuration", owner, name), repr(value)


def _tensor(place: Place, tensor: Tensor) -> Entries:
    """A tensor, its hooks, and a text that changes with what it is, or any bit of a dense one."""
    # Torch modes under audit must not intercept the auditor's own operations.
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        content = f"{tuple(tensor.shape)} {tensor.dtype} {tensor.device} {tensor.requires_grad}"
        has_bytes = type(tensor) in (Tensor, nn.Parameter, nn.Buffer)  # subclasses may lack them
        is_dense = tensor.layout == torch.strided and not tensor.is_quantized
        is_meta = tensor.is_meta
        if has_bytes and is_dense and not is_meta:
            flat = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
            content += f" {hashlib.blake2b(flat.tobytes(), digest_size=8).hexdigest()}"
        hooks = {n: dict(getattr(tensor, n) or {}) for n in _TENSOR_HOOKS}
    yield place, content if is_meta else tensor  # offloaded weights are new after each forward
    yield place._replace(kind="content of a tensor"), content
    path = _joined(place.owner, place.name)
    for name, entries in hooks.items():
        for key, hook in entries.items():
            yield Place(INSTANCE, "hook", path, f"{name}[{key!r}]"), hook


# ---- this class --------------------------------------------------------------------------------


def _is_shared(module_name: str) -> bool:
    """Whether a Python module is used by all models, not only by one family."""
    package, *rest = module_name.split(".")
    return package in ("torch", "builtins") or (
        package == "transformers" and rest[:1] != ["models"]
    )


def _classes(model: nn.Module) -> Entries:
    classes = dict.fromkeys(cls for m in model.modules() for cls in type(m).__mro__[:-1])
    for cls in classes:
        yield from _class(cls, PROCESS if _is_shared(cls.__module__) else CLASS)


def _class(cls: type, reach: str) -> Entries:
    owner = f"{cls.__module__}.{cls.__qualname__}"
    for name, value in [*vars(cls).items(), ("__bases__", cls.__bases__)]:
        # `_global_mapping` is recorded as a registry; copying an instance adds `__slotnames__`.
        if name not in ("_global_mapping", "__slotnames__"):
            yield from _nested(Place(reach, "class attribute", owner, name), value, 1)


def _file(name: str, reach: str) -> Entries:
    """The globals of a Python module, and the classes that it defines."""
    yield from _globals(name, reach)
    for value in _held(name).values():
        if isinstance(value, type) and value.__module__ == name:
            yield from _class(value, reach)


def _held(name: str) -> dict[str, Any]:
    return dict(vars(sys.modules[name])) if name in sys.modules else {}


def _globals(name: str, reach: str) -> Entries:
    for key, value in _held(name).items():
        # An import sets the submodule on its parent; it is recorded as an imported module.
        imported = isinstance(value, ModuleType) and sys.modules.get(f"{name}.{key}") is value
        if key != "__warningregistry__" and not imported:  # the record of shown warnings
            # Every module refers to the shared builtins, by more than one name after a compilation.
            depth = int(value is not vars(builtins))
            yield from _nested(Place(reach, "module global", name, key), value, depth)


# ---- this thread, this process -----------------------------------------------------------------


def _process(own: list[str]) -> Entries:
    loaded = [n for n in list(sys.modules) if ".modeling_" in n and n.startswith("transformers.")]
    files = [name for name in dict.fromkeys((*_DATA["shared"], *loaded)) if name not in own]
    for name in (*files, builtins.__name__):
        yield from _file(name, PROCESS)
    for name in _DATA["torch"]:
        yield from _globals(name, PROCESS)
    yield from _class(torch.Tensor, PROCESS)
    yield from _registries([*files, *own])
    for reach, settings in _DATA["settings"].items():
        for name, function in settings.items():
            value = pkgutil.resolve_name(function)()
            value = str(value) if isinstance(value, (list, tuple)) else value
            yield Place(reach, "setting", "torch", name), value
    for stack in (_get_current_function_mode_stack, _get_current_dispatch_mode_stack):
        for index, mode in enumerate(stack()):
            yield Place(THREAD, "torch mode", stack.__name__.strip("_"), str(index)), mode
    yield from _nested(Place(PROCESS, "import system", "sys", "meta_path"), sys.meta_path)
    for name, module in list(sys.modules.items()):
        yield Place(PROCESS, "imported module", "sys.modules", name), module


def _registries(names: list[str]) -> Entries:
    """The entries of attention and mask registries: the global ones, and those of each instance."""
    kinds = {AttentionInterface: "attention registry", AttentionMaskInterface: "mask registry"}
    for cls, kind in kinds.items():
        place = Place(PROCESS, kind, cls.__name__, "_global_mapping")
        yield from _nested(place, cls._global_mapping)
    homes = {id(held): (name, held) for name in reversed(names) for held in _held(name).values()}
    for name, registry in homes.values():
        if isinstance(registry, GeneralInterface):
            owner = f"{type(registry).__name__} of {name}"
            kind = kinds.get(type(registry), "registry")
            for attribute, value in list(vars(registry).items()):
                yield from _nested(Place(PROCESS, kind, owner, attribute), value)


# ---- this call ---------------------------------------------------------------------------------


def call_places(frame: FrameType | None, end: CodeType) -> Snapshot:
    """The stack from `frame` up to the function whose code is `end`, with extra arguments.

    Functions are recorded by name and number of occurrences; for calls of attention modules, also
    the names of keyword arguments that their signature does not list.
    """
    found: Snapshot = {}
    counts: Counter[tuple[str, str]] = Counter()
    while frame is not None and frame.f_code is not end:
        file = frame.f_globals.get("__name__", "?")
        name = getattr(frame.f_code, "co_qualname", frame.f_code.co_name)
        counts[file, name] += 1
        found[Place(CALL, "frame", file, f"{name} #{counts[file, name]}")] = frame.f_code
        called = frame.f_locals.get("self")
        attends = isinstance(getattr(called, "layer_idx", None), int)
        if attends and file == type(called).__module__:
            for argument in frame.f_locals.get("kwargs") or ():
                found[Place(CALL, "argument", name, str(argument))] = argument
        frame = frame.f_back
    return found


# ---- containers --------------------------------------------------------------------------------


def _nested(place: Place, value: Any, depth: int = 3) -> Entries:
    """A value, the items of a container, a tensor's content, the code object of a function."""
    if isinstance(value, Tensor):
        yield from _tensor(place, value)
        return
    if isinstance(value, (set, frozenset)):
        yield place, repr(sorted(map(repr, value)))
        return
    by_items = isinstance(value, tuple) and depth > 0
    yield place, tuple if by_items else value
    items: Any = ()
    if isinstance(value, dict):
        items = dict.items(value)  # what is held, whatever a subclass makes of it
    elif isinstance(value, (list, tuple)):
        items = enumerate(value)
    elif isinstance(value, FunctionType):
        yield Place(*place[:3], f"{place.name}.__code__"), value.__code__
        for name in ("__defaults__", "__kwdefaults__"):
            yield from _nested(Place(*place[:3], f"{place.name}.{name}"), getattr(value, name), 1)
    for key, item in list(items) if depth else ():
        yield from _nested(Place(*place[:3], f"{place.name}[{key!r}]"), item, depth - 1)


def _joined(owner: str, name: str) -> str:
    return f"{owner}.{name}" if owner else name
