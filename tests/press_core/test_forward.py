"""The arguments of a forward are found, and replaced, however they are passed."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from press_core.forward import Arguments, Forward

NAMES = ("hidden_states", "attention_mask", "cache")


@given(st.integers(0, 3), st.sets(st.sampled_from([*NAMES, "other"])), st.data())
def test_arguments_are_found_and_replaced_however_they_are_passed(
    n_positional: int, by_name: set[str], data: st.DataObject
) -> None:
    args = NAMES[:n_positional]  # each argument is its own name
    kwargs = {name: name for name in by_name - set(args)}
    passed, given_kwargs = {*args, *kwargs}, dict(kwargs)
    arguments = Arguments(args, kwargs, NAMES)
    for name in (*NAMES, "other", "nobody"):
        assert arguments.get(name) == (name if name in passed else None)
    new = dict.fromkeys(data.draw(st.sets(st.sampled_from([*NAMES, "other"]))), "new")
    changed = arguments.replace(**new)
    assert (arguments.args, arguments.kwargs, kwargs) == (args, given_kwargs, given_kwargs)
    for name in (*NAMES, "other"):
        assert changed.get(name) == (new.get(name) or arguments.get(name))
    assert len(changed.args) == n_positional  # nothing is passed twice
    assert set(changed.kwargs) == (set(kwargs) | set(new)) - set(args)


def test_what_all_layers_need_is_made_once_for_each_key() -> None:
    forward = Forward(torch.nn.Identity(), Arguments((), {}, ()))
    made: list[str] = []

    def make(name: str) -> str:
        made.append(name)
        return name

    mask, other = torch.zeros(1), torch.zeros(1)
    for _ in range(2):
        for name, key in (("a", (mask, 1)), ("b", (mask, 2)), ("c", (other, 1))):
            assert forward.once(lambda name=name: make(name), *key) == name
    assert made == ["a", "b", "c"]
