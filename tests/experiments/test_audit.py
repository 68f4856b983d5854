"""The auditor finds what is planted, wherever it is planted, and nothing else."""

import builtins
import gc
import sys
import types
import weakref
from contextlib import ExitStack, contextmanager, nullcontext
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from accelerate import cpu_offload
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama
from transformers.utils.generic import GeneralInterface

from experiments.audit import CALL, CLASS, INSTANCE, PROCESS, THREAD, audit, differences, snapshot
from tests.support import build

ATTENTION = "model.layers.0.self_attn"


@pytest.fixture
def model():
    return build("llama")


def planted(*_, **__):
    """Stands in for any function."""


def modes(call):
    """Two kinds of torch modes, for functions and for operators, that hand everything to `call`."""
    of_functions = type("Mode", (TorchFunctionMode,), {"__torch_function__": call})
    return of_functions, type("Dispatch", (TorchDispatchMode,), {"__torch_dispatch__": call})


def called(mode, function, types, args=(), kwargs=None):
    return function(*args, **(kwargs or {}))


Mode, Dispatch = modes(called)


class OtherBase(nn.Module):
    """Another base of a class."""


class OtherAttention(modeling_llama.LlamaAttention):
    """Another class of the same layout."""


def attention(model):
    return model.model.layers[0].self_attn


def add(owner, method, *args):
    """Register a hook, to be removed again."""
    return lambda model, undo: undo.callback(getattr(owner(model), method)(*args).remove)


def own(owner, name, value):
    """Set an entry of an instance's dictionary."""
    return lambda model, undo: patching(undo).setitem(vars(owner(model)), name, value)


def put(owner, name, value):
    """Set an attribute of a class or a Python module."""
    return lambda _, undo: patching(undo).setattr(owner, name, value, raising=False)


def entry(mapping, name, value):
    return lambda _, undo: patching(undo).setitem(mapping, name, value)


def into(table, name, value):
    """Set an entry of a table of the attention module."""
    return lambda model, undo: entry(getattr(attention(model), table), name, value)(model, undo)


def enter(make):
    return lambda _, undo: undo.enter_context(make())


def patching(undo):
    return undo.enter_context(pytest.MonkeyPatch.context())


def shift(model, undo):
    """Change a tensor in place, past its version counter."""
    data = attention(model).q_proj.weight.data
    former = data.clone()
    data[..., 0] += 1
    undo.callback(data.copy_, former)


def swap_class(model, undo):
    patching(undo).setattr(attention(model), "__class__", OtherAttention)


def rebase(_, undo):
    undo.callback(setattr, modeling_llama.LlamaMLP, "__bases__", modeling_llama.LlamaMLP.__bases__)
    modeling_llama.LlamaMLP.__bases__ = (OtherBase,)


def double(_, undo):
    undo.callback(torch.set_default_dtype, torch.get_default_dtype())
    torch.set_default_dtype(torch.float64)


PLANTS = {
    # by reach: what is found, as kind | owner | beginning of the name, and what is planted
    INSTANCE: {
        "hook | self_attn | _forward_hooks[": add(attention, "register_forward_hook", planted),
        "hook flag | self_attn | _forward_hooks_with_kwargs[9]": into(
            "_forward_hooks_with_kwargs", 9, True
        ),
        "attribute | self_attn | scaling": own(attention, "scaling", torch.ops),
        "parameter | self_attn | weight": into(
            "_parameters", "weight", nn.Parameter(torch.ones(2))
        ),
        "content of a tensor | q_proj | weight": shift,
        "content of a tensor | k_proj | weight": lambda model, undo: undo.callback(
            attention(model).k_proj.weight.requires_grad_(False).requires_grad_
        ),
        "hook | q_proj.weight | _backward_hooks[": add(
            lambda model: attention(model).q_proj.weight, "register_hook", planted
        ),
        "buffer | self_attn | mask": into("_buffers", "mask", torch.ones(2)),
        "submodule | self_attn | extra": into("_modules", "extra", nn.Linear(2, 2)),
        "class of a module | self_attn | __class__": swap_class,
        "configuration | config | hidden_size": own(lambda m: m.config, "hidden_size", 3),
    },
    CLASS: {
        "class attribute | LlamaAttention | forward": put(
            modeling_llama.LlamaAttention, "forward", modeling_llama.LlamaMLP.forward
        ),
        "module global | modeling_llama | rotate_half": put(modeling_llama, "rotate_half", planted),
        "module global | modeling_llama | rotate_half.__code__": put(
            modeling_llama.rotate_half, "__code__", (lambda x: x).__code__
        ),
        "module global | modeling_llama | rotate_half.__defaults__": put(
            modeling_llama.rotate_half, "__defaults__", (1,)
        ),
        "class attribute | LlamaMLP | __bases__": rebase,
    },
    PROCESS: {
        "attention registry | AttentionInterface | _global_mapping['mine']": entry(
            AttentionInterface._global_mapping, "mine", planted
        ),
        "attention registry | of transformers | get_interface": own(
            lambda _: ALL_ATTENTION_FUNCTIONS, "get_interface", planted
        ),
        "mask registry | AttentionMaskInterface | _global_mapping['sdpa']": entry(
            AttentionMaskInterface._global_mapping, "sdpa", planted
        ),
        "module global | torch | bmm": put(torch, "bmm", planted),
        "module global | torch.nn.functional | scaled_dot_product_attention": put(
            F, "scaled_dot_product_attention", planted
        ),
        "class attribute | torch.Tensor | note": put(torch.Tensor, "note", planted),
        "class attribute | module.Module | note": put(nn.Module, "note", planted),
        "class attribute | cache_utils.DynamicCache | note": put(DynamicCache, "note", planted),
        "module global | torch.nn.modules.module | _global_forward_hooks[": add(
            lambda _: nn.modules.module, "register_module_forward_hook", planted
        ),
        "module global | builtins | note": put(builtins, "note", 1),
        "imported module | sys.modules | planted": entry(
            sys.modules, "planted", types.ModuleType("planted")
        ),
        "import system | sys | meta_path[": put(sys, "meta_path", [*sys.meta_path, planted]),
        "class attribute | generic.GeneralInterface | note": put(GeneralInterface, "note", planted),
        "setting | torch | default dtype": double,
        "setting | torch | sdpa backends": enter(lambda: sdpa_kernel(SDPBackend.MATH)),
        "setting | torch | cudnn benchmark": put(torch.backends.cudnn, "benchmark", True),
    },
    THREAD: {
        "torch mode | function_mode | 0": enter(Mode),
        "torch mode | dispatch_mode | 0": enter(Dispatch),
        "setting | torch | gradients": enter(torch.no_grad),
        "setting | torch | autocast": enter(lambda: torch.autocast("cpu")),
    },
}
no_run = lambda *_: None  # noqa: E731 - a plant may well break the model


def found(changes, kind, owner, name):
    return [
        change
        for change in changes
        if change.place.kind == kind
        and owner in change.place.owner
        and change.place.name.startswith(name)
    ]


def named(changes):
    return [(change.how, change.place.name) for change in changes]


@pytest.mark.parametrize(
    ("reach", "place"), [(reach, place) for reach in PLANTS for place in PLANTS[reach]]
)
def test_a_plant_is_found_while_open_or_as_left(reach, place, model, monkeypatch):
    plant, expected = PLANTS[reach][place], place.split(" | ")
    # As a compiler does:
    monkeypatch.setattr(modeling_llama, "__builtins_dict__", vars(builtins), raising=False)

    @contextmanager
    def scope():
        with ExitStack() as undo:
            plant(model, undo)
            yield

    result = audit(scope(), model, no_run)
    assert result.left == ()
    with ExitStack() as undo:
        called = audit(lambda: plant(model, undo), model, no_run)
    assert called.open == ()
    for changes in (result.open, called.left):
        assert found(changes, *expected), result.table()
        assert {change.place.reach for change in changes} == {reach}, result.table()


def test_what_was_there_may_be_missing_afterwards(model):
    with model.register_forward_hook(planted) as handle:
        result = audit(handle.remove, model)
    assert named(result.left) == [("removed", f"_forward_hooks[{handle.id}]")]


@pytest.mark.parametrize("family", ["llama", "gpt_neox", "gpt2", "gemma2"])
def test_running_a_model_is_no_change(family):
    model = build(family, attn_implementation="eager")
    result = audit(nullcontext(), model)
    assert result.table().empty
    assert result.counts().to_numpy().sum() == len(audit(lambda: None, model).left) == 0
    before = snapshot(model)
    with torch.no_grad():
        model(torch.arange(3, 9)[None])
    assert differences(before, snapshot(model)) == ()


def test_running_offloaded_weights_is_no_change(model):
    cpu_offload(model, execution_device=torch.device("cpu"))
    assert audit(nullcontext(), model).table().empty


def test_arguments_and_frames_are_of_this_call(model):
    """A pre-hook adds a keyword argument; a patched forward adds a frame."""

    def add_argument(_, args, kwargs):
        return args, {**kwargs, "planted_argument": 1}

    @contextmanager
    def scope():
        module = attention(model)
        with module.register_forward_pre_hook(add_argument, with_kwargs=True):
            module.forward = lambda *args, **kwargs: type(module).forward(module, *args, **kwargs)
            yield
            del module.forward

    result = audit(scope(), model)
    by_kind = {(c.place.kind, c.place.name) for c in result.running if c.place.reach == CALL}
    assert ("argument", "planted_argument") in by_kind
    frames = [name for kind, name in by_kind if kind == "frame"]
    assert any("<lambda>" in name for name in frames)
    assert result.left == ()


def test_what_is_there_during_a_call_only(model):
    module = attention(model)

    def before(*_):
        module.waiting = 1

    def after(*_):
        del module.waiting

    @contextmanager
    def scope():
        with module.register_forward_pre_hook(before), module.register_forward_hook(after):
            yield

    result = audit(scope(), model)
    assert found(result.running, "attribute", ATTENTION, "waiting")
    assert not found(result.open, "attribute", ATTENTION, "waiting")
    assert result.left == ()


def test_a_call_that_stores_no_keys_tells_nothing(model):
    result = audit(patch.object(model, "forward", lambda *_, **__: None), model)
    assert (len(result.open), result.running, result.left) == (1, (), ())


def test_what_is_exchanged_counts_once(model, monkeypatch):
    """Not again for every parameter and hook dictionary inside, or for its code."""

    def exchange():
        attention(model).q_proj = nn.Linear(64, 64)
        monkeypatch.setattr(modeling_llama, "rotate_half", planted)

    result = audit(exchange, model)
    assert named(result.left) == [("changed", "q_proj"), ("changed", "rotate_half")]


def test_tensors_that_are_neither_parameters_nor_buffers_are_recorded_by_value(model):
    scales = attention(model).scales = [torch.ones(2)]
    result = audit(lambda: scales[0].mul_(2), model, no_run)
    assert named(result.left) == [("changed", "scales[0]")]


def test_a_module_that_is_used_twice_is_seen_under_both_names(model):
    model.model.layers[1].self_attn = attention(model)
    result = audit(lambda: setattr(attention(model), "note", 1), model)
    owners = {f"model.layers.{i}.self_attn" for i in (0, 1)}
    assert {change.place.owner for change in result.left} == owners


def test_an_import_is_no_list_of_what_the_module_holds(model, monkeypatch):
    name = "transformers.models.planted.modeling_planted"
    module = types.ModuleType(name)
    module.note = 1
    result = audit(lambda: monkeypatch.setitem(sys.modules, name, module), model)
    assert [change.place.kind for change in result.left] == ["imported module"]


def test_a_snapshot_keeps_what_it_names_alive(model):
    """Otherwise a new object could get the id of one that is gone, and pass for it."""

    class Held:
        """Can be referred to weakly."""

    attention(model).held = Held()
    alive = weakref.ref(attention(model).held)
    before = snapshot(model)
    del attention(model).held
    gc.collect()
    assert alive() is not None
    attention(model).held = Held()
    assert [c.how for c in differences(before, snapshot(model))] == ["changed"]
    del before
    gc.collect()
    assert alive() is None


def test_a_mode_under_audit_does_not_see_the_auditor(model):
    def seen_by(mode, function, *_):
        raise AssertionError(function)

    seeing, seeing_operators = modes(seen_by)
    with seeing_operators(), seeing():
        seen = snapshot(model)
    assert {c.place.reach for c in differences(seen, snapshot(model))} == {THREAD}


def test_a_snapshot_leaves_the_garbage_collector_as_it_was(model):
    assert gc.isenabled()
    snapshot(model)
    assert gc.isenabled()
    gc.disable()
    try:
        snapshot(model)
        assert not gc.isenabled()
    finally:
        gc.enable()


# docs/auditing.md, which is run, shows what `table`, `counts`, `by_kind`, `to_markdown` give.


def test_a_subject_has_to_be_called_or_entered(model):
    with pytest.raises(TypeError, match="callable"):
        audit(3, model)


def test_any_module_can_be_audited():
    module = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    result = audit(lambda: module.append(nn.ReLU()), module)
    assert named(result.left) == [("added", "2")]
    assert result.left[0].place.kind == "submodule"
