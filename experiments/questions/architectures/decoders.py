"""A tiny random model of every causal and image-text decoder of the installed transformers.

A configuration is made from the fields of its class: fields named in `SIZES` are set, other fields
keep their defaults, and sub-configurations are filled in the same way. Further fields that a class
needs, mostly numbers that have to be consistent, are in `DEMANDS`. Both are in `decoders.yaml`.
"""

import copy
import dataclasses
import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING
from transformers.models.auto import modeling_auto as auto

from experiments import data_of

LARGEST = 120_000_000
"""Largest number of parameters of a tiny model; some classes ignore sizes of the configuration."""

DATA: dict[str, Any] = data_of(__file__)
"""The contents of `decoders.yaml`."""

SIZES = {name: size for size, names in DATA["sizes"].items() for name in names.split()}
DEMANDS: dict[str, dict[str, Any]] = DATA["demands"]
"""Fields that a configuration needs in addition to `SIZES`, by model type."""

VARIANTS: dict[str, dict[str, Any]] = DATA["variants"]
"""Further ways to build or run a type, by name: with other fields, or with an image."""

_FILLED = ("pad_token_id", "bos_token_id", "eos_token_id", "num_key_value_heads", "head_dim")
"""Fields that get a size although their default is None."""

_ABSENT_AT_ZERO = ("num_shared_experts", "shared_intermediate_size", "n_shared_experts")


@dataclasses.dataclass(frozen=True)
class Decoder:
    """How to build and run one type of decoder.

    Attributes:
        name: the `model_type`, or the name of a variant.
        model_type: as in transformers' auto mappings.
        loader: the auto class that builds the model.
        fields: fields of its configuration in addition to `SIZES`.
        image: whether its context contains an image.
    """

    name: str
    model_type: str
    loader: type
    fields: dict[str, Any]
    image: bool = False


def decoders() -> dict[str, Decoder]:
    """Every causal, image-text and encoder-decoder type of the installed transformers, by name."""
    mappings = {
        auto.AutoModelForCausalLM: auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        auto.AutoModelForImageTextToText: auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        auto.AutoModelForSeq2SeqLM: dict.fromkeys(("t5", "bart", "m2m_100", "t5gemma")),
    }
    found: dict[str, Decoder] = {}
    for loader, types in mappings.items():
        for model_type in filter(CONFIG_MAPPING.__contains__, types):
            seq2seq = loader is auto.AutoModelForSeq2SeqLM
            name = f"{model_type} (seq2seq)" if seq2seq else model_type
            found.setdefault(name, Decoder(name, model_type, loader, DEMANDS.get(model_type, {})))
    for name, variant in VARIANTS.items():
        if plain := found.get(variant["type"]):
            fields, image = plain.fields | variant.get("fields", {}), variant.get("image", False)
            found[name] = dataclasses.replace(plain, name=name, fields=fields, image=image)
    return dict(sorted(found.items()))


def build(decoder: Decoder) -> nn.Module:
    """The model in float32 with eager attention, and random weights larger than the default ones.

    Raises:
        ValueError: if it would have more than `LARGEST` parameters.
        Exception: any other error of its classes, mostly because of a missing package.
    """
    kind = CONFIG_MAPPING[decoder.model_type]
    config = kind(**_small(kind, decoder.fields))
    loader: Any = decoder.loader
    with torch.device("meta"):
        sizes = loader.from_config(copy.deepcopy(config), dtype=torch.float32)
    n_parameters = sum(parameter.numel() for parameter in sizes.parameters())
    if n_parameters > LARGEST:
        raise ValueError(f"{n_parameters / 1e6:.0f} M parameters, which is not tiny")
    torch.manual_seed(0)
    model = loader.from_config(config, dtype=torch.float32, attn_implementation="eager")
    torch.manual_seed(0)
    # Matrices preserve the variance of their input. Norms and biases get noise, so that omitting
    # one of them changes the logits.
    with torch.no_grad():
        for parameter in filter(torch.is_floating_point, model.parameters()):
            if parameter.dim() > 1:
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
            else:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


# ---- configurations ------------------------------------------------------------------------------


def _defaults(kind: type) -> dict[str, Any]:
    """The fields of a configuration class with their defaults."""
    if dataclasses.is_dataclass(kind):
        return {field.name: field.default for field in dataclasses.fields(kind)}
    parameters = inspect.signature(kind).parameters  # transformers 5.2
    return {
        name: dataclasses.MISSING if parameter.default is parameter.empty else parameter.default
        for name, parameter in parameters.items()
        if parameter.kind is not parameter.VAR_KEYWORD and name != "self"
    }


def _is_size(name: str, default: Any) -> bool:
    """Whether a field is set to its size: not if its default disables a part or has a meaning."""
    if name not in SIZES or (default == 0 and name in _ABSENT_AT_ZERO):
        return False
    if default is None or (name == "num_key_value_heads" and default == 1):
        return default is None and name in _FILLED
    if default is dataclasses.MISSING or default == "auto":
        return True
    return isinstance(default, (int, float)) and not isinstance(default, bool)


def _small(kind: Any, given: dict[str, Any], is_text: bool = True) -> dict[str, Any]:
    """Keyword arguments for a small configuration of class `kind`, with its sub-configurations."""
    defaults = _defaults(kind)
    fields = {name: SIZES[name] for name, default in defaults.items() if _is_size(name, default)}
    if "kv_lora_rank" in defaults and "num_key_value_heads" in defaults:
        fields["num_key_value_heads"] = 4  # latents are projected to a key for every query head
    if "is_decoder" in defaults and is_text:
        fields["is_decoder"] = True
    fields |= given
    for name, sub_kind, sub_given in _sub_configurations(kind, given):
        fields[name] = _small(sub_kind, sub_given, "text" in name or "decoder" in name)
        model_type = getattr(sub_kind, "model_type", None)
        fields[name]["model_type"] = sub_given.get("model_type", model_type)
    for name in {"layer_types", "layers_block_type"} & (defaults.keys() - fields.keys()):
        # The few layers alternate between all kinds of layers that the default has.
        kinds = _default_kinds(kind, name)
        if len(kinds) > 1:
            n_layers = fields.get("num_hidden_layers", 4)
            fields[name] = [kinds[i % len(kinds)] for i in range(n_layers)]
    return fields


def _sub_configurations(
    kind: Any, given: dict[str, Any]
) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """Name, class and given fields of each sub-configuration."""
    described = getattr(kind, "sub_configs_defaults", None)
    if described is None:
        described = getattr(kind, "sub_configs", {})  # transformers 5.2: classes only
    for name, sub_kind in described.items():
        sub_given = given.get(name, {})
        if sub_given is None:
            continue
        if not isinstance(sub_kind, type):
            if sub_kind.optional and not sub_given:
                continue
            preset = {k: v for k, v in sub_kind.init_kwargs.items() if k not in SIZES}
            model_type = sub_given.get("model_type") or sub_kind.model_type
            auto = sub_kind.config_class.__name__ == "AutoConfig" or "model_type" in sub_given
            sub_given = {**preset, **sub_given}
            sub_kind = CONFIG_MAPPING[model_type] if auto else sub_kind.config_class
        elif sub_kind.__name__ == "AutoConfig":
            default = getattr(kind(), name, None)
            if default is None:
                continue
            sub_kind = type(default)
        yield name, sub_kind, sub_given


def _default_kinds(kind: Any, name: str) -> list[str]:
    """The kinds of layers in the default of field `name`, without duplicates."""
    try:
        types = getattr(kind(), name, None)
    except Exception:  # the class has required arguments, so there is no default
        return []
    return list(dict.fromkeys(types)) if isinstance(types, (list, tuple)) else []


# ---- contexts with an image: placeholder tokens and pixels ---------------------------------------

START = 10
"""Position of the image, after the padding of a padded row and before further text."""
_HEIGHT, _WIDTH = 4, 6
"""Patches of an image for models that accept any size; four patches are one token."""


def with_image(model: Any, ids: Tensor) -> Tensor:
    """`ids` `(1, S)` with the tokens of an image in the middle."""
    ids = ids.clone()
    n_tokens = _HEIGHT * _WIDTH // 4 if _takes_any_size(model) else 4
    ids[:, START : START + n_tokens] = model.config.image_token_id
    begins = getattr(model.config, "vision_start_token_id", None)
    if begins is not None:  # transformers 5.2 finds images by this token
        ids[:, START - 1] = begins
    return ids


def image_inputs(model: Any, ids: Tensor) -> dict[str, Any]:
    """Further inputs of a forward over `ids` `(B, S)` for the image in each row; {} without one."""
    token = getattr(model.config, "image_token_id", None)
    if token is None or not (ids == token).any():
        return {}
    inputs = _pixels(model, len(ids))
    kinds = (ids == token).long()
    accepted = inspect.signature(type(model).forward).parameters
    if "mm_token_type_ids" in accepted:
        inputs["mm_token_type_ids"] = kinds
    if "token_type_ids" in accepted:  # for PaliGemma they mark the prompt instead of the image
        is_prompt = model.config.model_type == "paligemma"
        inputs["token_type_ids"] = torch.zeros_like(kinds) if is_prompt else kinds
    return inputs


def _takes_any_size(model: Any) -> bool:
    return hasattr(model.config.vision_config, "spatial_merge_size")


def _pixels(model: Any, batch: int) -> dict[str, Any]:
    vision, generator = model.config.vision_config, torch.Generator().manual_seed(2)
    if _takes_any_size(model):
        width = 3 * vision.temporal_patch_size * vision.patch_size**2
        patches = torch.randn(_HEIGHT * _WIDTH, width, generator=generator)
        grid = torch.tensor([[1, _HEIGHT, _WIDTH]])
        return {"pixel_values": patches.repeat(batch, 1), "image_grid_thw": grid.repeat(batch, 1)}
    size = vision.image_size
    size = size if isinstance(size, int) else size[0]
    pixels = torch.randn(1, 3, size, size, generator=generator).repeat(batch, 1, 1, 1)
    several_each = model.config.model_type in ("idefics3", "smolvlm")
    return {"pixel_values": pixels[:, None] if several_each else pixels}
