"""The auditor finds what is planted, wherever it is planted, and nothing else."""

from __future__ import annotations

import gc
import sys
import types
import weakref
from contextlib import ExitStack, contextmanager, nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama

from experiments.audit import (
    CALL,
    CLASS,
    INSTANCE,
    LEFT,
    OPEN,
    PROCESS,
    RUNNING,
    THREAD,
    audit,
    differences,
    snapshot,
)
from tests.support import build

ATTENTION = "model.layers.0.self_attn"
LLAMA = modeling_llama.__name__


@pytest.fixture
def model():
    return build("llama")


def planted(*_, **__):
    """Stands in for any function."""


class Mode(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


class Dispatch(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


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


def enter(make):
    return lambda _, undo: undo.enter_context(make())


def patching(undo):
    return undo.enter_context(pytest.MonkeyPatch.context())


def shift(tensor):
    """Change a tensor in place, past its version counter."""

    def plant(model, undo):
        data = tensor(model).data
        former = data.clone()
        data[..., 0] += 1
        undo.callback(data.copy_, former)

    return plant


def swap_class(model, undo):
    module = attention(model)
    undo.callback(setattr, module, "__class__", type(module))
    module.__class__ = OtherAttention


def swap_code(_, undo):
    function = modeling_llama.rotate_half
    undo.callback(setattr, function, "__code__", function.__code__)
    function.__code__ = (lambda x: x).__code__


def no_grad(_, undo):
    undo.callback(torch.set_grad_enabled, torch.is_grad_enabled())
    torch.set_grad_enabled(False)


def double(_, undo):
    undo.callback(torch.set_default_dtype, torch.get_default_dtype())
    torch.set_default_dtype(torch.float64)


def importer(_, undo):
    finder = types.SimpleNamespace(find_spec=planted)
    sys.meta_path.append(finder)
    undo.callback(sys.meta_path.remove, finder)


def global_hook(_, undo):
    hook = torch.nn.modules.module.register_module_forward_hook(planted)
    undo.callback(hook.remove)


PLANTS = {
    # what is planted: how, the reach, the kind, the owner, and the name it is to be found under
    "forward hook": (
        add(attention, "register_forward_hook", planted),
        (INSTANCE, "hook", ATTENTION, "_forward_hooks["),
    ),
    "pre-hook": (
        add(attention, "register_forward_pre_hook", planted),
        (INSTANCE, "hook", ATTENTION, "_forward_pre_hooks["),
    ),
    "backward hook": (
        add(attention, "register_full_backward_pre_hook", planted),
        (INSTANCE, "hook", ATTENTION, "_backward_pre_hooks["),
    ),
    "state dict hook": (
        add(attention, "register_state_dict_post_hook", planted),
        (INSTANCE, "hook", ATTENTION, "_state_dict_hooks["),
    ),
    "flag of a hook": (
        lambda model, undo: entry(attention(model)._forward_hooks_with_kwargs, 999, True)(
            model, undo
        ),
        (INSTANCE, "hook flag", ATTENTION, "_forward_hooks_with_kwargs[999]"),
    ),
    "own forward": (
        own(attention, "forward", modeling_llama.LlamaAttention.forward),
        (INSTANCE, "attribute", ATTENTION, "forward"),
    ),
    "value of an attribute": (
        own(attention, "scaling", 0.5),
        (INSTANCE, "attribute", ATTENTION, "scaling"),
    ),
    "attribute of the model": (own(lambda m: m, "note", "x"), (INSTANCE, "attribute", "", "note")),
    "parameter": (
        lambda model, undo: entry(
            attention(model).q_proj._parameters, "weight", nn.Parameter(torch.zeros(64, 64))
        )(model, undo),
        (INSTANCE, "parameter", f"{ATTENTION}.q_proj", "weight"),
    ),
    "bits of a parameter": (
        shift(lambda model: attention(model).q_proj.weight),
        (INSTANCE, "content of a tensor", f"{ATTENTION}.q_proj", "weight"),
    ),
    "bits of a buffer": (
        shift(lambda model: model.model.rotary_emb.inv_freq),
        (INSTANCE, "content of a tensor", "model.rotary_emb", "inv_freq"),
    ),
    "buffer": (
        lambda model, undo: entry(attention(model)._buffers, "mask", torch.ones(2))(model, undo),
        (INSTANCE, "buffer", ATTENTION, "mask"),
    ),
    "submodule": (
        lambda model, undo: entry(attention(model)._modules, "extra", nn.Linear(2, 2))(model, undo),
        (INSTANCE, "submodule", ATTENTION, "extra"),
    ),
    "class of a module": (swap_class, (INSTANCE, "class of a module", ATTENTION, "__class__")),
    "configuration": (
        own(lambda m: m.config, "rope_theta_2", 3),
        (INSTANCE, "configuration", "config", "rope_theta_2"),
    ),
    "value in the configuration": (
        own(lambda m: m.config, "num_attention_heads", 3),
        (INSTANCE, "configuration", "config", "num_attention_heads"),
    ),
    "generation configuration": (
        own(lambda m: m.generation_config, "temperature", 3.0),
        (INSTANCE, "configuration", "generation_config", "temperature"),
    ),
    "forward of the class": (
        put(modeling_llama.LlamaAttention, "forward", modeling_llama.LlamaMLP.forward),
        (CLASS, "class attribute", f"{LLAMA}.LlamaAttention", "forward"),
    ),
    "attribute of the class": (
        put(modeling_llama.LlamaAttention, "note", 1),
        (CLASS, "class attribute", f"{LLAMA}.LlamaAttention", "note"),
    ),
    "function of the modeling file": (
        put(modeling_llama, "apply_rotary_pos_emb", planted),
        (CLASS, "module global", LLAMA, "apply_rotary_pos_emb"),
    ),
    "class of the modeling file": (
        put(modeling_llama, "LlamaMLP", nn.Identity),
        (CLASS, "module global", LLAMA, "LlamaMLP"),
    ),
    "code of a function": (swap_code, (CLASS, "module global", LLAMA, "rotate_half.__code__")),
    "attention function": (
        entry(AttentionInterface._global_mapping, "mine", planted),
        (PROCESS, "attention registry", "AttentionInterface", "_global_mapping['mine']"),
    ),
    "attention function of one registry": (
        entry(ALL_ATTENTION_FUNCTIONS._local_mapping, "sdpa", planted),
        (PROCESS, "attention registry", "of transformers", "_local_mapping['sdpa']"),
    ),
    "method of one registry": (
        own(lambda _: ALL_ATTENTION_FUNCTIONS, "get_interface", planted),
        (PROCESS, "attention registry", "of transformers", "get_interface"),
    ),
    "mask function": (
        entry(AttentionMaskInterface._global_mapping, "sdpa", planted),
        (PROCESS, "mask registry", "AttentionMaskInterface", "_global_mapping['sdpa']"),
    ),
    "function of torch": (put(torch, "bmm", planted), (PROCESS, "module global", "torch", "bmm")),
    "functional attention": (
        put(F, "scaled_dot_product_attention", planted),
        (PROCESS, "module global", "torch.nn.functional", "scaled_dot_product_attention"),
    ),
    "method of tensors": (
        put(torch.Tensor, "note", planted),
        (PROCESS, "class attribute", "torch.Tensor", "note"),
    ),
    "forward of linear layers": (
        put(nn.Linear, "note", planted),
        (PROCESS, "class attribute", "torch.nn.modules.linear.Linear", "note"),
    ),
    "method of all modules": (
        put(nn.Module, "note", planted),
        (PROCESS, "class attribute", "torch.nn.modules.module.Module", "note"),
    ),
    "method of caches": (
        put(DynamicCache, "note", planted),
        (PROCESS, "class attribute", "transformers.cache_utils.DynamicCache", "note"),
    ),
    "hook of all modules": (
        global_hook,
        (PROCESS, "module global", "torch.nn.modules.module", "_global_forward_hooks["),
    ),
    "builtin": (put(__import__("builtins"), "note", 1), (PROCESS, "module global", "builtins", "")),
    "imported module": (
        entry(sys.modules, "planted_module", types.ModuleType("planted_module")),
        (PROCESS, "imported module", "sys.modules", "planted_module"),
    ),
    "importer": (importer, (PROCESS, "import system", "sys", "meta_path[")),
    "default dtype": (double, (PROCESS, "setting", "torch", "default dtype")),
    "function mode": (enter(Mode), (THREAD, "torch mode", "function_mode", "0")),
    "dispatch mode": (enter(Dispatch), (THREAD, "torch mode", "dispatch_mode", "0")),
    "gradients": (no_grad, (THREAD, "setting", "torch", "gradients")),
}

every_plant = pytest.mark.parametrize("name", PLANTS)
no_run = lambda *_: None  # noqa: E731 - a plant may well break the model


def found(changes, reach, kind, owner, name):
    return [
        change
        for change in changes
        if change.place.reach == reach
        and change.place.kind == kind
        and owner in change.place.owner
        and change.place.name.startswith(name)
    ]


@every_plant
def test_a_plant_is_found_while_open_and_nothing_is_left(name, model):
    plant, expected = PLANTS[name]

    @contextmanager
    def scope():
        with ExitStack() as undo:
            plant(model, undo)
            yield

    result = audit(scope(), model, no_run)
    assert found(result.open, *expected), result.table()
    assert {change.place.reach for change in result.open} == {expected[0]}, result.table()
    assert result.left == ()


@every_plant
def test_a_plant_that_stays_is_found_as_left(name, model):
    plant, expected = PLANTS[name]
    with ExitStack() as undo:
        result = audit(lambda: plant(model, undo), model, no_run)
    assert result.open == ()
    assert found(result.left, *expected), result.table()
    assert {change.place.reach for change in result.left} == {expected[0]}


def test_what_was_there_may_be_missing_afterwards(model):
    with model.register_forward_hook(planted) as handle:
        result = audit(handle.remove, model)
    assert [(c.how, c.place.name) for c in result.left] == [
        ("removed", f"_forward_hooks[{handle.id}]")
    ]


def test_nothing_is_found_where_nothing_is_done(model):
    result = audit(nullcontext(), model)
    assert result.open == result.running == result.left == ()
    assert audit(lambda: None, model).left == ()
    assert result.counts().to_numpy().sum() == 0


@pytest.mark.parametrize("family", ["qwen3", "gpt_neox", "gpt2", "gemma2"])
def test_running_a_model_is_no_change(family):
    model = build(family, attn_implementation="eager")
    assert audit(nullcontext(), model).table().empty
    before = snapshot(model)
    with torch.no_grad():
        model(torch.arange(3, 9)[None])
    assert differences(before, snapshot(model)) == ()


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
    assert found(result.running, INSTANCE, "attribute", ATTENTION, "waiting")
    assert not found(result.open, INSTANCE, "attribute", ATTENTION, "waiting")
    assert result.left == ()


def test_an_exchanged_submodule_counts_once(model):
    """Not again for every parameter and hook dictionary inside."""
    result = audit(lambda: setattr(attention(model), "q_proj", nn.Linear(64, 64)), model)
    assert [(c.how, c.place.owner, c.place.name) for c in result.left] == [
        ("changed", ATTENTION, "q_proj")
    ]


def test_a_patched_function_counts_once(model, monkeypatch):
    """Not again for its code."""
    with monkeypatch.context() as patch:
        result = audit(lambda: patch.setattr(modeling_llama, "rotate_half", planted), model)
    assert [change.place.name for change in result.left] == ["rotate_half"]


def test_a_module_that_is_used_twice_is_seen_under_both_names(model):
    model.model.layers[1].self_attn = attention(model)
    result = audit(lambda: setattr(attention(model), "note", 1), model)
    assert {change.place.owner for change in result.left} == {
        "model.layers.0.self_attn",
        "model.layers.1.self_attn",
    }


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
    class Seeing(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            raise AssertionError(function)

    class SeeingDispatch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            raise AssertionError(function)

    with SeeingDispatch(), Seeing():
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


# ---- results -----------------------------------------------------------------------------------


@pytest.fixture
def result(model):
    @contextmanager
    def scope():
        hooks = [m.register_forward_hook(planted) for m in (model, attention(model))]
        yield
        hooks[0].remove()

    return audit(scope(), model)


def test_table_has_a_row_per_change(result):
    table = result.table()
    hooks = table[table["kind"] == "hook"]
    assert hooks.groupby("when").size().to_dict() == {OPEN: 2, LEFT: 1}
    row = hooks[hooks["when"] == LEFT].iloc[0]
    assert (row["reach"], row["how"], row["owner"]) == (INSTANCE, "added", ATTENTION)
    assert row["before"] == ""
    assert "planted" in row["after"]


def test_counts_and_kinds(result):
    counts = result.counts()
    assert counts.loc[INSTANCE, OPEN] == 2
    assert counts.loc[INSTANCE, LEFT] == 1
    assert counts.loc[CALL, RUNNING] >= 1  # torch calls hooked modules in another way
    assert counts.loc[PROCESS].sum() == counts.loc[CLASS].sum() == counts.loc[THREAD].sum() == 0
    kinds = result.by_kind().set_index(["when", "kind"])
    assert kinds.loc[(OPEN, "hook"), "changes"] == 2
    assert kinds["changes"].sum() == len(result.table())


def test_markdown_has_two_tables(result):
    counts, changes = result.to_markdown().split("\n\n")
    assert f"| {INSTANCE} | 2 |" in counts
    assert changes.count("\n") == 1 + len(result.table())


def test_a_subject_has_to_be_called_or_entered(model):
    with pytest.raises(TypeError, match="no context manager and no callable"):
        audit(3, model)


def test_any_module_can_be_audited():
    module = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    result = audit(lambda: module.append(nn.ReLU()), module)
    assert [(c.how, c.place.kind, c.place.name) for c in result.left] == [
        ("added", "submodule", "2")
    ]
