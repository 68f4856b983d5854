"""Everything that a mechanism could touch; imports none of the packages that do."""

import sys
from contextlib import contextmanager

import torch
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS


def snapshot(model):
    """Everything reachable from `model` that a hook or a patch could change, by identity."""
    state = {"config": repr(model.config)}
    for name, module in model.named_modules():
        state[f"{name}: class"] = type(module)
        for key, value in vars(module).items():
            state[f"{name}.{key}"] = _identity(value)
        for cls in type(module).__mro__:
            for key, value in vars(cls).items():
                state[f"{cls.__qualname__}.{key}"] = id(value)
        modeling = sys.modules[type(module).__module__]
        for key, value in vars(modeling).items():
            state[f"{modeling.__name__}:{key}"] = id(value)
    for registry in (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS):
        state[type(registry).__name__] = (
            _identity(vars(registry)),
            _identity(registry._local_mapping),
            _identity(registry._global_mapping),
        )
    for name, value in vars(torch.nn.modules.module).items():
        if name.startswith("_global"):  # hooks of all modules
            state[name] = _identity(value)
    return state


@contextmanager
def unchanged(model):
    """What is done in the block leaves the model as it was."""
    before = snapshot(model)
    yield
    assert snapshot(model) == before


def _identity(value):
    if isinstance(value, dict):
        return {key: id(item) for key, item in value.items()}
    return id(value)
