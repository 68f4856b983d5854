"""A scope leaves nothing behind, however it ends."""

import copy
import gc
import inspect
import pickle
import subprocess
import sys
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from transformers import DynamicCache

import hooks_impl
import patch_impl
from attention_patch.reversible import _install, _Stack, wrap
from press_core import ScopeError, kept_lengths
from press_core.on_layers import OnLayers
from press_core.scope import ScopeState, bound_to
from tests import support
from tests.presses import read_press


def run(model):
    """Logits of a prefill."""
    return support.ran(model, None, [support.token_ids(1, 40)])[1][0]


def kept(model):
    """Tokens that each layer keeps of one."""
    cache = support.filled(model, None, support.token_ids(1, 40))
    return [int(n[0, 0]) for n in kept_lengths(cache)]


@support.both
@pytest.mark.parametrize("name", sorted(hooks_impl.PRESSES))
def test_normal_exit(package, name, model):
    press = support.example_for(package, name, 0.5, model)
    before, weights, reference = support.snapshot(model), model.state_dict(), run(model)
    with press(model):
        support.ran(model, None, [support.context_for(name, 80), *support.forwards([1, 1, 1])])
        assert support.snapshot(model) != before
        torch.testing.assert_close(model.state_dict(), weights, rtol=0, atol=0)
    assert support.snapshot(model) == before
    assert torch.equal(run(model), reference)


@support.both
def test_a_scope_may_not(package, model):
    scope = package.KnormPress(0.5)(model)
    before = support.snapshot(model)
    with scope:
        with pytest.raises(ScopeError, match="open already"):
            scope.open()
        assert kept(model) == [20] * 3
    assert support.snapshot(model) == before
    scope.remove()  # documented: closing a closed scope does nothing
    assert support.snapshot(model) == before
    with scope:  # and it can be opened again
        assert kept(model) == [20] * 3


@support.both
@pytest.mark.parametrize(
    "make_copy",
    [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))],
    ids=["deepcopy", "pickle"],
)
def test_a_copy_made_inside_a_scope_is_not_pruned(package, make_copy, model):
    reference = run(model)
    with package.SnapKVPress(0.5, window_size=4)(model) as model.scope:
        twin = make_copy(model)
        twin.scope.remove()  # it is closed
        assert kept(model) == [20] * 3
        assert kept(twin) == [40] * 3
    assert kept(twin) == [40] * 3
    assert torch.equal(run(twin), reference)
    if package is patch_impl:  # of hooks, PyTorch copies the (inert) entries along
        assert all({"forward", "__reduce_ex__"}.isdisjoint(vars(m)) for m in twin.modules())


@support.both
def test_one_model_run_by_several_threads(package, model):
    """Queries wait for the attention hook per thread; a mix-up would show in the kept sets."""
    with package.SnapKVPress(0.5, window_size=4)(model):
        expected = [
            support.filled(model, None, support.token_ids(1, 60, seed)) for seed in range(4)
        ]

        def work(seed):
            for _ in range(5):
                cache = support.filled(model, None, support.token_ids(1, 60, seed))
                assert support.held(cache) == support.held(expected[seed])

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(work, range(4)))


def test_importing_changes_nothing():
    """In a process of its own: what `transformers` holds before and after the import.

    One module registers something, the pipeline of `experiments`.
    """
    program = """
import sys
from transformers.pipelines import PIPELINE_REGISTRY
from tests.snapshot import snapshot
from experiments.testbed.families import build
model = build("llama")
before, tasks = snapshot(model), PIPELINE_REGISTRY.get_supported_tasks()
assert "press_core" not in sys.modules
import press_core, attention_patch, hooks_impl, patch_impl
assert snapshot(model) == before
assert PIPELINE_REGISTRY.get_supported_tasks() == tasks
from experiments.pipeline import TASK
assert set(PIPELINE_REGISTRY.get_supported_tasks()) == {*tasks, TASK}
"""
    subprocess.run([sys.executable, "-c", program], env=support.PLAIN, check=True)


def test_a_patch_that_somebody_takes_away_is_not_silent(model):
    """As accelerate does when hooks that it added before the scope are removed inside of it."""
    modules = [layer.self_attn for layer in model.model.layers]
    former = modules[1].forward
    modules[1].forward = lambda *args, **kwargs: former(*args, **kwargs)
    scope = patch_impl.KnormPress(0.5).register(model)
    modules[1].forward = former
    with pytest.raises(ScopeError, match="some layers"):
        run(model)
    with pytest.warns(RuntimeWarning, match="put back"):
        scope.remove()
    del modules[1].forward
    assert kept(model) == [40, 40, 40]


def test_a_scope_that_could_not_act_before_the_others_is_refused(model):
    module = model.model.layers[1].self_attn
    with patch_impl.KnormPress(0.5)(model):
        former = module.forward
        module.forward = lambda *args, **kwargs: former(*args, **kwargs)
        with pytest.raises(ScopeError, match="wrapped"):
            patch_impl.SnapKVPress(0.5, window_size=4).register(model)
        with hooks_impl.SnapKVPress(0.5, window_size=4)(model):  # after the patch, as ever
            assert kept(model) == [10, 10, 10]
        module.forward = former
    assert kept(model) == [40, 40, 40]


def test_so_is_one_that_could_not_act_in_turn_around_the_decoder(model):
    with patch_impl.StreamingLLMDecodingPress(max_capacity=30, n_sink=8)(model):
        former = model.model.forward
        model.model.forward = lambda *args, **kwargs: former(*args, **kwargs)
        with pytest.raises(ScopeError, match="wrapped the forward of the decoder"):
            patch_impl.StreamingLLMDecodingPress(max_capacity=30, n_sink=0).register(model)
        model.model.forward = former


BY_GARBAGE, BY_KEYBOARD = [_Stack.hold, OnLayers.put_on], [_install, wrap, ScopeState.take_off]


@support.both
@pytest.mark.parametrize("interrupted", BY_GARBAGE + BY_KEYBOARD)
def test_opening_and_closing_may_be_interrupted_in_any_line(package, interrupted, model):
    """By the keyboard, or as by a garbage collection that closes another scope."""
    source, first = inspect.getsourcelines(interrupted)
    code = inspect.unwrap(interrupted).__code__

    def trace(frame, event, _):
        # Python looks for interrupts in calls and loops, never where a block begins or ends.
        ends = "with", "try", "return"
        own = frame.f_code is code and event == "line"
        if own and not source[frame.f_lineno - first].strip().startswith(ends):
            lines.append(frame.f_lineno)
            if len(lines) == n and interrupted in BY_GARBAGE:
                other.remove()
            elif len(lines) == n:
                raise KeyboardInterrupt
        return trace

    press = package.AdaKVPress(package.SnapKVPress(0.5))
    before, n, lines = support.snapshot(model), 0, []
    while len(lines) >= n:
        n, lines, other = n + 1, [], press.register(model)
        sys.settrace(trace)
        try:
            press.register(model).remove()
        except KeyboardInterrupt:
            assert len(lines) >= n
        finally:
            sys.settrace(None)
        other.remove()
        assert support.snapshot(model) == before
    assert n > 8


def test_hooks_that_are_passed_by_are_not_silent(model):
    layer, passing = model.model.layers[1], torch.nn.Module()
    passing.inner = layer.self_attn
    passing.forward = lambda *args, **kwargs: passing.inner.forward(*args, **kwargs)
    layer.self_attn = passing
    scope = hooks_impl.KnormPress(0.5).register(model)
    with pytest.raises(ScopeError, match=r"some layers.* \[1\].*nothing"):
        run(model)
    with pytest.warns(RuntimeWarning, match=r"KnormPress.* \[1\].*nothing"):
        scope.remove()
    with patch_impl.KnormPress(0.5)(model), warnings.catch_warnings():
        warnings.simplefilter("error")
        assert kept(model) == [20, 20, 20]


@support.both
@pytest.mark.parametrize("press", ["KnormPress(0.5)", "StreamingLLMDecodingPress(20)"])
def test_a_model_may_run_its_first_layers_only(package, press, model):
    """As models that draft for themselves do."""
    caches = DynamicCache(), DynamicCache(config=model.config)
    with read_press(press, package)(model):
        model.config.num_hidden_layers = 2
        for cache in caches:
            support.ran(model, None, support.forwards([40, 1]), cache)
            assert [int(n[0, 0]) for n in kept_lengths(cache)[:2]] == [21, 21]


@support.both
def test_a_forward_that_breaks_off_is_no_reason_for_a_warning(package, model):
    package.KnormPress(0.5).register(model).remove()  # which runs a model that it has not seen yet
    model.model.layers[1].mlp.register_forward_hook(lambda *_: 1 / 0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(ZeroDivisionError), package.KnormPress(0.5)(model):
            run(model)


def replace_attention(model):
    for layer in model.model.layers:
        layer.self_attn = copy.deepcopy(layer.self_attn)


def replace_decoder(model):
    model.model = copy.deepcopy(model.model)


def restore_forward(model):
    del model.model.forward


@pytest.mark.parametrize(
    ("package", "replace"),
    [
        *product(support.PACKAGES, (replace_attention, replace_decoder)),
        (patch_impl, restore_forward),
    ],
)
def test_modules_that_are_replaced_are_not_silent(package, replace, model):
    scope = package.KnormPress(0.5).register(model)
    replace(model)
    assert kept(model) == [40, 40, 40]
    with pytest.warns(RuntimeWarning, match=r"\[0, 1, 2\].*nothing|replaced"):
        scope.remove()


@support.both
@pytest.mark.filterwarnings("error")
def test_scopes_that_close_in_one_forward_all_do_though_warnings_are_errors(package, model):
    scopes = [package.KnormPress(0.5).register(model) for _ in range(2)]
    replace_attention(model)
    model.model.norm.register_forward_hook(lambda *_: [s.remove() for s in scopes] and None)
    with pytest.raises(RuntimeWarning, match="nothing"):
        run(model)
    assert not model.model._forward_pre_hooks
    assert "forward" not in vars(model.model)


@support.both
@pytest.mark.parametrize("name", ["SnapKVPress", "RestoreKVPress"])
def test_a_press_keeps_no_part_of_a_model_alive(package, name):
    model = support.build("llama")
    press = support.example_for(package, name, 0.5, model)
    cache = weakref.ref(support.filled(model, press, support.token_ids(1, 40)))
    assert cache() is None  # at once: garbage may fill a GPU before it is searched for
    parts = [*map(weakref.ref, (*model.modules(), *model.parameters()))]
    del model
    gc.collect()
    assert not [part for ref in parts if (part := ref()) is not None]


@pytest.mark.parametrize("names", [["a", "b", "c"], ["a", "stuck", "c"]])
def test_what_was_installed_comes_off_once_the_last_first(names, model):
    """Also if one part cannot."""
    state, removed = bound_to(patch_impl.KnormPress(0.5), model), list[str]()
    state.key.is_open = True

    def remove(name):
        removed.append(name)
        if name == "stuck":
            raise RuntimeError(name)

    state.installed += [SimpleNamespace(remove=partial(remove, name)) for name in names]
    with pytest.raises(RuntimeError, match="stuck") if "stuck" in names else nullcontext():
        state.close()
    state.close()
    assert removed == names[::-1]
    assert not state.key.is_open
    assert state.model is None


@support.both
@pytest.mark.usefixtures("no_graphs_after")
def test_a_scope_may_be_opened_in_a_function_that_is_compiled(package, model):
    def opening():
        with package.KnormPress(0.5)(model):
            return run(model)

    torch.compile(opening, backend="eager")()
    assert kept(model) == [40, 40, 40]
