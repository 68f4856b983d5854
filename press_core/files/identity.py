"""Which model this is: enough to refuse another one, and little enough to be found at once."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from press_core.errors import UnsupportedModelError

N_SAMPLED = 64
"""Numbers that are looked at of each parameter, evenly spread."""

_OF_NO_MATTER = (
    *("transformers_version", "_name_or_path", "dtype", "torch_dtype", "architectures"),
    *("_attn_implementation", "_attn_implementation_internal", "_experts_implementation"),
    *("id2label", "label2id", "problem_type", "use_cache", "return_dict", "auto_map"),
    *("output_attentions", "output_hidden_states"),
)
"""Fields of a configuration that change nothing in keys and values."""


def identity(model: Any) -> dict[str, Any]:
    """What tells `model` from others, as JSON has it.

    Where it lies, its class and its attention implementation are no part of that: a model and its
    decoder body, on any device, are the same.

    Returns:
        `config`: its class, its fields and the dtype; and `weights`: a digest of names, shapes and
        `N_SAMPLED` numbers of every parameter, and of which adapters are on.

    Raises:
        UnsupportedModelError: if the model has no configuration, or weights that are not here.
    """
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "to_dict"):
        raise UnsupportedModelError(
            f"{type(model).__name__} has no configuration of transformers, by which it could be "
            "told from other models"
        )
    body = getattr(model, "base_model", model)
    fields = json.loads(json.dumps(_relevant(config.to_dict()), default=str, sort_keys=True))
    dtype = str(getattr(model, "dtype", "")).removeprefix("torch.")
    kind = {"config_class": type(config).__name__, "dtype": dtype}
    return {"config": {**fields, **kind}, "weights": _digest(body)}


def name_of(model: Any) -> str:
    """What `model` is called: the id on the hub, or the last folder of where it was loaded from."""
    name = str(getattr(getattr(model, "config", None), "name_or_path", None) or "")
    return name if name.count("/") == 1 and not name.startswith((".", "/")) else name.split("/")[-1]


def _relevant(fields: dict[str, Any]) -> dict[str, Any]:
    return {
        name: _relevant(value) if isinstance(value, dict) else value
        for name, value in fields.items()
        if name not in _OF_NO_MATTER
    }


def _digest(body: nn.Module) -> str:
    digest = hashlib.sha256()
    with torch.no_grad():
        for name, parameter in sorted(body.named_parameters()):
            digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}\n".encode())
            for part in _stored(body, name, parameter):
                flat = part.detach().reshape(-1)
                step = max(1, flat.numel() // N_SAMPLED)
                sample = flat[::step][:N_SAMPLED].cpu().contiguous()
                digest.update(sample.view(torch.uint8).numpy().tobytes())
    for name, module in body.named_modules():
        if hasattr(module, "disable_adapters"):  # a layer of PEFT
            digest.update(f"{name} {module.disable_adapters} {module.active_adapters}".encode())
    return digest.hexdigest()


def _stored(body: nn.Module, name: str, parameter: Any) -> Iterator[Tensor]:
    """The plain tensors that hold a parameter.

    Raises:
        UnsupportedModelError: if it is not on this machine's devices.
    """
    if parameter.device.type == "meta":
        owner, _, own = name.rpartition(".")
        hook = getattr(body.get_submodule(owner), "_hf_hook", None)  # of accelerate
        weights = getattr(hook, "weights_map", None)
        if weights is None:
            raise UnsupportedModelError(
                f"the parameter {name} has no data, so that the model cannot be told from others; "
                "load its weights"
            )
        parameter = weights[own]
    if hasattr(parameter, "__tensor_flatten__"):  # quantized, or a part of it on this rank
        for part in parameter.__tensor_flatten__()[0]:
            yield from _stored(body, name, getattr(parameter, part))
    else:
        yield parameter
