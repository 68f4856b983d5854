"""Inspect and time the user's own model before a study of it."""

from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

import hooks_impl
from experiments import refusing
from experiments.framework.own_model import OwnModel
from experiments.framework.timing import Stopwatch
from experiments.loading import load_model, short_name
from experiments.testbed.compare import Inputs
from experiments.testbed.recipes import can_open, recipe_pair
from press_core import PressError, attention_sites

PROBE, STEPS = 256, 5
"""Tokens of the timed prefill, and number of decode steps after it."""


def get_to_know(name: str, dtype: str = "float32", device: str = "cpu") -> OwnModel:
    """Load a model, find the presses that support it, and time one prefill and a few decode steps.

    Raises:
        ModelNotFoundError: if there is no such model.
        UserError: if the model or its tokenizer cannot be loaded, or no layer can be pruned.
    """
    model, _ = load_model(name, dtype=dtype, device=device)
    with refusing(f"no press can prune {name}", PressError):
        sites = attention_sites(model)
    config = model.config.get_text_config()
    token_seconds, step_seconds = _pace(model)

    def opens(name: str) -> bool:
        return all(can_open(press, model) for press in recipe_pair(name, 0.5, PROBE))

    return OwnModel(
        model=full_name(name),
        name=short_name(name),
        model_type=config.model_type,
        dtype=dtype,
        device=device,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        trained=trained_length(model),
        heads=sum(site.num_kv_heads for site in sites),
        keeps_all=len(sites) == config.num_hidden_layers,
        presses=tuple(filter(opens, hooks_impl.PRESSES)),
        token_seconds=token_seconds,
        step_seconds=step_seconds,
        attn=model.config._attn_implementation,
    )


def full_name(name: str) -> str:
    """A model's name for any working directory: the absolute path of a folder, or the hub id."""
    return str(Path(name).resolve()) if Path(name).is_dir() else name


def trained_length(model: PreTrainedModel) -> int:
    """The longest context that a model was trained for; 2,048 if its configuration names none."""
    config: Any = model.config.get_text_config()
    return int(getattr(config, "max_position_embeddings", None) or 2048)


@torch.inference_mode()
def _pace(model: PreTrainedModel) -> tuple[float, float]:
    """Seconds per token of a prefill, and seconds per decode step."""
    config = model.config.get_text_config()
    length = min(PROBE, max(2, trained_length(model) - STEPS))
    ids = Inputs.random(config.vocab_size, [length]).context.to(model.device)

    model(input_ids=ids[:, :2], use_cache=True)  # warm-up
    cache, watch = DynamicCache(config=model.config), Stopwatch(model.device)
    for tokens in (ids, *[ids[:, :1]] * STEPS):
        model(input_ids=tokens, past_key_values=cache, logits_to_keep=1)
        watch.lap()
    prefill, *steps = watch.seconds()
    return prefill / length, median(steps)
