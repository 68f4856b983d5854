"""An override reaches the calls that carry it, and no others."""

import pytest
import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from attention_patch import intercept, with_override
from tests.support import build


class Registry:
    """As `AttentionInterface`: hands a function out by its name."""

    def __init__(self):
        self.calls = []

    def get_interface(self, name, default):
        return {"attend": self.attend}.get(name, default)

    def attend(self, module, *args, **kwargs):
        self.calls.append(kwargs)
        return f"{module}{args}"


@pytest.fixture
def registry():
    """One that is intercepted."""
    registry = Registry()
    patch = intercept(registry)
    yield registry
    patch.remove()


def _asked(registry, **kwargs):
    """What an attention module does: ask for the function, and call it."""
    function = registry.get_interface("attend", default=None)
    return function("module", 1, 2, scaling=0.5, **kwargs)


def _tagging(tag):
    def override(function, *args, **kwargs):
        return f"{tag}[{function(*args, **kwargs)}]"

    return override


def test_a_call_that_carries_an_override_is_run_by_it_and_no_other(registry):
    seen = []

    def override(function, *args, **kwargs):
        seen.append((args, kwargs))
        return f"over {function(*args, **kwargs)}"

    assert _asked(registry) == "module(1, 2)"
    assert _asked(registry, **with_override({"mask": 7}, override)) == "over module(1, 2)"
    assert _asked(registry) == "module(1, 2)"
    assert seen == [(("module", 1, 2), {"scaling": 0.5, "mask": 7})]
    plain = {"scaling": 0.5}
    assert registry.calls == [plain, {**plain, "mask": 7}, plain]  # no trace of the override
    assert registry.get_interface("unknown", lambda x: x + 1)(1) == 2  # the default too


def test_an_override_may_answer_itself_or_fail(registry):
    assert _asked(registry, **with_override({}, lambda *_, **__: "instead")) == "instead"
    assert registry.calls == []
    with pytest.raises(ZeroDivisionError):
        _asked(registry, **with_override({}, lambda *_, **__: 1 / 0))
    assert _asked(registry) == "module(1, 2)"


def test_two_overrides_compose_the_later_around_the_former(registry):
    former = with_override({"mask": 7}, _tagging("former"))
    before = dict(former)
    both = with_override(former, _tagging("later"))
    assert _asked(registry, **both) == "later[former[module(1, 2)]]"
    assert former == before


def test_several_interceptions_act_once_and_cost_a_call_what_one_does():
    """Every module of a model asks for its own."""
    registry = Registry()
    before = dict(vars(registry))
    patches = [intercept(registry) for _ in range(3)]
    kwargs = with_override({}, _tagging("over"))
    for patch in (patches[1], patches[2], patches[0]):
        assert _asked(registry, **kwargs) == "over[module(1, 2)]"
        assert registry.get_interface("attend", None).args == (registry.attend,)
        patch.remove()
    registry.calls.clear()
    assert vars(registry) == before
    assert registry.get_interface("attend", None) == registry.attend


# ---- transformers' own registry ------------------------------------------------------------------

IDS = torch.arange(3, 12)[None]


def test_an_override_reaches_each_attention_of_its_forward():
    model = build("llama")
    expected = model(IDS).logits
    shapes = []

    def watching(function, module, query, *args, **kwargs):
        shapes.append((module.layer_idx, tuple(query.shape)))
        return function(module, query, *args, **kwargs)

    patch = intercept(ALL_ATTENTION_FUNCTIONS)
    logits = model(IDS, **with_override({}, watching)).logits
    patch.remove()
    assert shapes == [(0, (1, 4, 9, 16)), (1, (1, 4, 9, 16))]
    assert torch.equal(logits, expected)
