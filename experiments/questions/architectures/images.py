"""Contexts with an image in them: placeholder tokens, and the pixels that take their place."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

START = 10
"""Where the image begins: behind what is padding in a padded row, and with text behind it."""
_HEIGHT, _WIDTH = 4, 6
"""Patches of an image whose size the model leaves open; four of them make up a token."""


def with_image(model: Any, ids: Tensor) -> Tensor:
    """`ids` `(1, S)` with the tokens of an image in the middle."""
    ids = ids.clone()
    n_tokens = _HEIGHT * _WIDTH // 4 if _takes_any_size(model) else 4
    ids[:, START : START + n_tokens] = model.config.image_token_id
    begins = getattr(model.config, "vision_start_token_id", None)
    if begins is not None:  # by which transformers 5.2 finds images
        ids[:, START - 1] = begins
    return ids


def image_inputs(model: Any, ids: Tensor) -> dict[str, Any]:
    """What a forward over `ids` `(B, S)` is given besides, if there is an image in each row."""
    token = getattr(model.config, "image_token_id", None)
    if token is None or not (ids == token).any():
        return {}
    inputs = _pixels(model, len(ids))
    kinds = (ids == token).long()
    accepted = inspect.signature(type(model).forward).parameters
    if "mm_token_type_ids" in accepted:
        inputs["mm_token_type_ids"] = kinds
    if "token_type_ids" in accepted:  # of PaliGemma, which tokens are the prompt
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
