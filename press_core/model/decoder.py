"""Finding the decoder of a model, its last layer, its device, its ranks and its tokenizer."""

import inspect
from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn
from transformers import AutoTokenizer

from press_core.errors import PressError, UnsupportedModelError
from press_core.model.sites import AttentionSite, HeadGroup


def decoder_of(model: nn.Module, names: Sequence[str]) -> nn.Module:
    """The innermost module that takes token ids and contains all modules in `names`."""
    for name, module in reversed([*model.named_modules()]):
        runs_all = all(other.startswith(f"{name}." if name else "") for other in names)
        if runs_all and "input_ids" in inspect.signature(type(module).forward).parameters:
            return module
    return model


def uncompiled(model: Any) -> Any:
    """The model that `torch.compile` was given, whose modules have the names that presses know."""
    return getattr(model, "_orig_mod", model)


def has_encoder(model: Any) -> bool:
    """Whether the decoder of `model` also reads the output of an encoder."""
    return bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))


def n_positions(decoder: nn.Module) -> int | None:
    """How many positions a decoder has that looks them up in a table; None: it has no table."""
    limit = getattr(getattr(decoder, "config", None), "max_position_embeddings", None)
    tables = [m.num_embeddings for m in decoder.modules() if isinstance(m, nn.Embedding)]
    return limit if limit and any(0 <= n - limit <= 2 for n in tables) else None


def last_layer(model: nn.Module, sites: list[AttentionSite]) -> nn.Module:
    """The last decoder layer, whose output goes into the final norm.

    Raises:
        UnsupportedModelError: if the layers of `sites` are not in one `nn.ModuleList`.
    """
    for name, module in model.named_modules():  # outermost first
        inside = all(site.name.startswith(f"{name}.") for site in sites)
        if inside and isinstance(module, nn.ModuleList):
            return module[-1]
    raise UnsupportedModelError(
        f"the attention modules of {type(model).__name__} are not in one nn.ModuleList of layers, "
        "so the last layer is unknown"
    )


def device_of(module: nn.Module) -> torch.device:
    """The device for the inputs of `module`: the device of its first weights.

    If all weights are offloaded between forwards, the device that accelerate moves them to. A
    module without weights gives the CPU.
    """
    current = (x.device for x in module.parameters() if x.device.type != "meta")
    hooks = (getattr(part, "_hf_hook", None) for part in module.modules())
    runs_on = (getattr(hook, "execution_device", None) for hook in hooks)
    return torch.device(next(chain(current, (x for x in runs_on if x is not None), ["cpu"])))


def ranks_of(model: nn.Module) -> HeadGroup:
    """The tensor-parallel ranks of `model`, whether or not they share heads."""
    mesh: Any = getattr(model, "_device_mesh", None)
    if mesh is None:
        return HeadGroup()
    mesh = mesh["tp"] if "tp" in (mesh.mesh_dim_names or ()) else mesh
    return HeadGroup(mesh.get_group(), mesh.get_local_rank(), mesh.size())


def tokenizer_of(model: Any, instead: str) -> Any:
    """The tokenizer from the folder or hub repository that `model` was loaded from.

    Raises:
        PressError: if there is none; the message ends with `instead`, which says what to do.
    """
    name = str(getattr(model.config, "name_or_path", "") or "")
    try:
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise PressError(
            f"found no tokenizer for {type(model).__name__} ({name or 'no name'}): {instead}"
        ) from error
