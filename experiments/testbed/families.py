"""Small models with random weights, one builder per architecture that is tested."""

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from experiments import data_of

VOCABULARY = 128

_DATA: dict[str, dict[str, Any]] = data_of(__file__)
FAMILIES = tuple(_DATA["families"])
"""`model_type` of every tested architecture."""

NO_ROPE = frozenset({"gpt2"})
NO_GQA = frozenset({"gpt2", "gpt_neox"})
HYBRID = frozenset({"gemma2", "gemma3_text", "gpt_oss"})
"""Families whose layers alternate between sliding and full attention."""


def supported_implementations(family: str) -> tuple[str, ...]:
    """Attention implementations that `transformers` supports for a family on any machine."""
    return tuple(_DATA["implementations"].get(family, ("eager", "sdpa", "flex_attention")))


def build(
    family: str,
    *,
    num_layers: int = 2,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 16,
    dtype: torch.dtype = torch.float32,
    attn_implementation: str | None = None,
    seed: int = 0,
) -> PreTrainedModel:
    """A model of `family` with random weights, in eval mode.

    Args:
        family: one of `FAMILIES`.
        num_layers: number of layers; `HYBRID` families get a sliding-window layer before each.
        num_kv_heads: ignored for families without grouped-query attention.
        attn_implementation: None for "sdpa", or "eager" where the family supports no "sdpa".
    """
    default = "sdpa" if "sdpa" in supported_implementations(family) else "eager"
    width = num_heads * head_dim
    hybrid = family in HYBRID
    more: dict[str, Any] = {} if family in NO_GQA else {"num_key_value_heads": num_kv_heads}
    if hybrid:
        more["layer_types"] = ["sliding_attention", "full_attention"] * num_layers
    config = AutoConfig.for_model(
        family,
        **_DATA["common"],
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=2 * width,
        num_attention_heads=num_heads,
        head_dim=head_dim,
        num_hidden_layers=num_layers * (2 if hybrid else 1),
        **_DATA["families"][family],
        **more,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation=attn_implementation or default
        )
        _spread(model)
    return model.eval()


def small(family: str, **kind: Any) -> PreTrainedModel:
    """`build` with two layers, of which one has a sliding window in `HYBRID` families."""
    return build(family, num_layers=1 if family in HYBRID else 2, **kind)


def _spread(model: PreTrainedModel) -> None:
    """Draw larger weights than the default ones, which give all keys nearly the same values."""
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
        else:
            parameter.data.add_(0.1 * torch.randn_like(parameter))
