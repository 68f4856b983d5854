"""What several tests need: small inputs, and a snapshot of all that a mechanism could touch."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import patch_impl
from experiments.testbed.families import VOCABULARY
from experiments.testbed.recipes import DELIMITER, fitted_pair, recipe_pair
from press_core import Press

_GLOBAL_HOOKS = (
    "_global_forward_hooks",
    "_global_forward_pre_hooks",
    "_global_backward_hooks",
    "_global_module_registration_hooks",
)


def token_ids(batch: int, length: int, seed: int = 0) -> Tensor:
    """`(batch, length)` random token ids without special tokens."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (batch, length), generator=generator)


def example_for(package: Any, name: str, ratio: float, model: PreTrainedModel) -> Press:
    """The press `name` of a package, ready for `model` and for contexts of a few dozen tokens."""
    pair = fitted_pair(recipe_pair(name, ratio), model)
    return pair.patch if package is patch_impl else pair.hook


def context_for(name: str, length: int) -> Tensor:
    """`(1, length)` token ids that the press `name` can prune."""
    ids = token_ids(1, length)
    if name == "FinchPress":  # which asks for a delimiter between context and question
        ids[:, -8] = DELIMITER
    return ids


def left_padded(batch: int, length: int, padding: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Input ids, attention mask and position ids of a left-padded batch, each `(batch, length)`."""
    ids, mask = token_ids(batch, length), torch.ones(batch, length, dtype=torch.long)
    for row, n in enumerate(padding):
        ids[row, :n], mask[row, :n] = 0, 0
    return ids, mask, (mask.cumsum(dim=-1) - 1).clamp(min=0)


class Reader:
    """Stands for an open scope that helps with reading a layer."""

    is_open = True


def snapshot(model: nn.Module) -> dict[str, Any]:
    """Everything reachable from `model` that a hook or a patch could change, by identity."""
    state: dict[str, Any] = {"config": repr(model.config)}
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
    for name in _GLOBAL_HOOKS:
        state[name] = _identity(getattr(torch.nn.modules.module, name))
    return state


def _identity(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: id(item) for key, item in value.items()}
    return id(value)


PIPELINE_PRESSES = {
    "none": lambda p: None,
    "snapkv": lambda p: p.SnapKVPress(0.5, window_size=8),
    "adakv": lambda p: p.AdaKVPress(p.SnapKVPress(0.5, window_size=8)),
    "pyramid": lambda p: p.PyramidKVPress(0.5, window_size=4),
    "rerotated": lambda p: p.KeyRerotationPress(p.KeyDiffPress(0.4)),
    "channels": lambda p: p.ThinKPress(0.3, window_size=8, free_memory=True),
    "decoding": lambda p: p.DecodingPress(p.KnormPress(), compression_interval=2, target_size=40),
    "streaming": lambda p: p.StreamingLLMDecodingPress(max_capacity=40),
    "dms": lambda p: p.DMSPress(p.RandomPress(seed=0), 0.3, sliding_window_size=8, decoding=True),
    "kvzip": lambda p: p.KVzipPress(0.5),
}
"""By name, presses that compress a context in as many ways, from a package of them."""
