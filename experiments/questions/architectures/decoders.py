"""A tiny random model of every causal and image-text decoder of the installed transformers.

Configurations are made from the fields that their class has: a field whose name stands in `SIZES`
is set, any other keeps its default, sub-configurations are filled in the same way. What a class
demands beyond that (numbers that have to fit together) is in `DEMANDS`.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSeq2SeqLM,
)
from transformers.models.auto import modeling_auto

LARGEST = 120_000_000
"""Parameters above which a model is not tiny, whatever its configuration was told."""

_NAMES: dict[Any, str] = {
    64: "hidden_size n_embd d_model embed_dim emb_dim dim embedding_size embedding_dim lru_width "
    "hidden_size_global input_embedding_size output_embedding_size out_hidden_size "
    "text_hidden_size encoder_hidden_size backbone_hidden_size projector_hidden_size "
    "projection_dim projection_size patch_embed_hidden_size vision_output_dim projector_input_dim "
    "projector_output_dim adapter_out_dim adapter_in_dim output_dim image_token_embed_dim "
    "projection_hidden_size vision_hidden_size output_proj_dims mm_embed_dim moe_hidden_size "
    "image_text_hidden_size projection_hidden_dim output_channels shared_intermediate_size",
    128: "vocab_size vocab_size_per_layer_input decoder_vocab_size unpadded_vocab_size "
    "audio_vocab_size intermediate_size ffn_dim decoder_ffn_dim encoder_ffn_dim ffn_hidden_size "
    "d_ff dim_ff dff d_inner feed_forward_size mlp_dim dense_intermediate_size "
    "intermediate_size_mlp prefix_dense_intermediate_size alignment_intermediate_size "
    "projection_intermediate_size "
    "mamba_d_ssm",
    4: "num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers layers "
    "num_decoder_layers num_attention_heads n_head n_heads num_heads decoder_attention_heads "
    "encoder_attention_heads attention_heads num_encoder_attention_heads "
    "num_decoder_attention_heads resampler_n_heads resampler_heads swa_num_attention_heads "
    "num_experts num_local_experts n_routed_experts moe_num_experts mamba_n_heads n_mamba_heads "
    "mamba_num_heads linear_num_value_heads linear_num_heads num_query_tokens "
    "mm_tokens_per_image",
    2: "depth num_encoder_layers resampler_depth num_key_value_heads swa_num_key_value_heads "
    "num_experts_per_tok moe_topk moe_k top_k_experts zero_expert_num o_groups index_n_heads "
    "n_groups linear_num_key_heads eos_token_id sep_token_id",
    1: "num_global_layers aligner_ffn_mult aligner_num_add_layers n_group topk_group "
    "n_shared_experts num_shared_experts moe_num_shared_experts first_k_dense_replace "
    "moe_layer_start_index num_dense_layers mamba_n_groups mamba_ngroups bos_token_id "
    "decoder_start_token_id cls_token_id",
    16: "head_dim resampler_head_dim resampler_dim_head swa_head_dim dim_head d_kv d_head "
    "attention_head_size global_head_dim kv_channels router_hidden_size kv_lora_rank "
    "qk_nope_head_dim v_head_dim o_lora_rank index_head_dim index_topk mamba_d_state "
    "mamba_chunk_size ssm_state_size chunk_size state_size linear_key_head_dim "
    "linear_value_head_dim linear_head_dim sliding_window sliding_window_size "
    "attention_window_size attention_chunk_size query_pre_attn_scalar",
    24: "q_lora_rank qk_head_dim",
    8: "hidden_size_per_layer_input laurel_rank qk_rope_head_dim hc_lowrank time_step_rank "
    "mamba_dt_rank adapter_rank gated_norm_rank rotary_dim additional_vocab_size",
    32: "moe_intermediate_size shared_expert_intermediate_size shared_experts_intermediate_size "
    "share_expert_dim expert_ffn_hidden_size moe_shared_expert_intermediate_size mamba_d_head "
    "mamba_headdim mamba_head_dim",
    101: "ngram_vocab_size_base encoder_hash_byte_group_vocab",
    1024: "max_position_embeddings n_positions n_ctx max_seq_len max_target_positions",
    0: "pad_token_id",
    3: "mask_token_id",
    120: "image_token_id image_token_index",
    121: "video_token_id video_token_index",
    122: "audio_token_id audio_token_index",
    123: "vision_start_token_id boi_token_index boi_token_id image_start_id",
    124: "vision_end_token_id eoi_token_index eoi_token_id image_end_id",
    125: "vision_token_id boa_token_id boa_token_index audio_start_token_id",
    126: "eoa_token_id eoa_token_index audio_end_token_id",
}
SIZES = {name: size for size, names in _NAMES.items() for name in names.split()}

_SPECIAL_TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id")
_DERIVED_UNLESS_SET = ("num_key_value_heads", "head_dim")  # None: as many as there are queries
_ABSENT_AT_ZERO = ("num_shared_experts", "shared_intermediate_size", "n_shared_experts")


def _sections(*sections: int, **more: Any) -> dict[str, Any]:
    """Rotary parameters of positions in three dimensions: frequencies of time, height, width."""
    return {"rope_type": "default", "rope_theta": 1e4, "mrope_section": list(sections), **more}


def _text(**fields: Any) -> dict[str, Any]:
    return {"text_config": fields}


_ALTERNATING = ["sliding_attention", "full_attention"]
_CONVOLUTIONS = {"layer_types": ["conv", "full_attention"] * 2}
_IN_3D = {"rope_parameters": _sections(2, 3, 3)}
_SHARING = {"num_hidden_layers": 6, "layer_types": _ALTERNATING * 3, "num_kv_shared_layers": 2}
_COMPASS = {
    "rope_parameters": {kind: _sections(2, 3, 3) for kind in _ALTERNATING},
    "layer_types": _ALTERNATING * 2,
}
_DOTS3 = {
    **dict.fromkeys(("num_key_value_heads", "swa_num_attention_heads"), 4),
    **dict.fromkeys(("head_dim", "swa_q_lora_rank", "swa_head_dim"), 24),
    **dict.fromkeys(("swa_kv_lora_rank", "swa_qk_nope_head_dim", "swa_v_head_dim"), 16),
    "swa_num_key_value_heads": 4,
    "swa_qk_rope_head_dim": 8,
    "layer_types": ["indexed_attention", "sliding_attention"] * 2,
}
_INDEXED = {
    **{"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16},
    **{"indexer_budget": 16, "indexer_compress_ratio": 4},
}
_LOCAL = {
    **{"axial_pos_embds": False, "local_attn_chunk_length": 15, "lsh_attn_chunk_length": 15},
    **{"attn_layers": ["local", "lsh"] * 2, "num_buckets": 2},
}

DEMANDS: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1, 3]},
    "chameleon": {"vocabulary_map": {}},
    "cohere_compass": {"text_config": _COMPASS},
    "cohere_compass_text": _COMPASS,
    "cosmos3_edge": _text(**_IN_3D),
    "cosmos3_omni": _text(**_IN_3D),
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
        "ffn_config": {
            **{"hidden_size": 64, "ffn_hidden_size": 128, "moe_num_experts": 4, "moe_top_k": 2}
        },
    },
    "deepseek_ocr2": _text(mlp_layer_types=["dense", "sparse"] * 2, num_experts_per_tok=2),
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "dots3_note": _text(**_DOTS3, per_layer_config={}),
    "dots3_note_text": _DOTS3,
    "emu3": {"vocabulary_map": {"<image>": 120}},
    "ernie4_5_vl_moe": _text(rope_parameters=_sections(3, 3, 2), moe_intermediate_size=[32, 32]),
    "gemma3n_text": {**_SHARING, "activation_sparsity_pattern": [0.0] * 6},
    "gemma4_assistant": _text(hidden_size_per_layer_input=0, vocab_size_per_layer_input=0),
    "gemma4_text": _SHARING,
    "gemma4_unified_text": _SHARING,
    "glm46v": _text(**_IN_3D),
    "glm4v": _text(**_IN_3D),
    "glm4v_moe": _text(rope_parameters=_sections(1, 1, 2, partial_rotary_factor=0.5)),
    "glm5_next": _text(qk_rope_head_dim=0),
    "glm_ocr": _text(**_IN_3D),
    "glmga": _text(**_IN_3D),
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": 16},
    "granite4_vision": {"deepstack_layer_map": [], "spatial_target_layers": []},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "hrm_text": {"num_hidden_layers": 2},
    "hunyuan_vl": _text(rope_parameters=_sections(2, 2, 2, 2)),
    "jamba": {
        **{"attn_layer_period": 2, "attn_layer_offset": 1},
        **{"expert_layer_period": 2, "expert_layer_offset": 1},
    },
    "lfm2": _CONVOLUTIONS,
    "lfm2_moe": _CONVOLUTIONS,
    "lfm2_vl": _text(**_CONVOLUTIONS),
    "longcat_flash": {"head_dim": 8},
    "mamba2": {"num_heads": 4, "head_dim": 32, "n_groups": 1},
    "molmo2": {"adapter_config": {"vision_feature_layer": [-1, -2]}},
    "paddleocr_vl": _text(**_IN_3D),
    "prophetnet": {"num_encoder_layers": 4},
    "qwen2_5_omni_thinker": _text(**_IN_3D),
    "qwen2_5_vl": _text(**_IN_3D),
    "qwen2_vl": _text(**_IN_3D),
    "qwen4_exp": _text(**_INDEXED, **_IN_3D),
    "qwen4_exp_text": _INDEXED,
    "reformer": _LOCAL,
    "step3p7": _text(layer_types=_ALTERNATING * 2, sliding_window=16),
    "whisper": {"num_mel_bins": 16},
    "xlstm": {"num_heads": 2, "qk_dim_factor": 1.0},
    "xmod": {"languages": ["en_XX"], "default_language": "en_XX"},
    "zaya": {"num_experts_per_tok": 1},
}
"""What a configuration needs besides `SIZES`, by model type."""

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2 (sliding)": (
        "qwen2",
        {"use_sliding_window": True, "layer_types": ["full_attention", "sliding_attention"] * 2},
    ),
}
"""Types whose default leaves a kind of layer out: name, type and what its configuration is told."""

IMAGES: dict[str, dict[str, Any]] = {
    **{name: {} for name in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "glm4v")},
    **{name: {"image_size": 28, "patch_size": 14} for name in ("llava", "paligemma")},
    "gemma3": {"image_size": 32, "patch_size": 8},
    **{name: {"image_size": 64, "patch_size": 16} for name in ("idefics3", "smolvlm")},
    "internvl": {"image_size": (56, 56), "patch_size": (14, 14)},
}
"""Types that are run with an image too, and what their vision model is told to make few tokens."""


@dataclass(frozen=True)
class Decoder:
    """A kind of decoder to be built.

    Attributes:
        name: the `model_type`, or the name of a variant.
        model_type: as in transformers' auto mappings.
        loader: the auto class that makes it.
        fields: what its configuration is told besides `SIZES`.
        image: whether there is an image in its context.
    """

    name: str
    model_type: str
    loader: type
    fields: dict[str, Any]
    image: bool = False


def decoders() -> dict[str, Decoder]:
    """Every causal, image-text and encoder-decoder type of the installed transformers, by name."""
    mappings = {
        AutoModelForCausalLM: modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        AutoModelForImageTextToText: modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        AutoModelForSeq2SeqLM: dict.fromkeys(("t5", "bart", "m2m_100", "t5gemma")),
    }
    found: dict[str, Decoder] = {}
    for loader, types in mappings.items():
        for model_type in types:
            if model_type not in CONFIG_MAPPING:
                continue
            seq2seq = loader is AutoModelForSeq2SeqLM
            name = f"{model_type} (seq2seq)" if seq2seq else model_type
            found.setdefault(name, Decoder(name, model_type, loader, DEMANDS.get(model_type, {})))
    for name, (model_type, fields) in VARIANTS.items():
        found[name] = dataclasses.replace(found[model_type], name=name, fields=fields)
    for model_type in IMAGES.keys() & found.keys():
        plain, name = found[model_type], f"{model_type} (image)"
        fields = plain.fields
        if IMAGES[model_type]:
            fields = {**fields, "vision_config": IMAGES[model_type]}
        found[name] = dataclasses.replace(plain, name=name, fields=fields, image=True)
    return dict(sorted(found.items()))


def build(decoder: Decoder) -> nn.Module:
    """The model, in float32 and eager attention, its random weights large enough to matter.

    Raises:
        ValueError: if it would have more than `LARGEST` parameters.
        Exception: whatever else its classes raise (a missing package, mostly).
    """
    config = _configuration(decoder)
    with torch.device("meta"):
        sizes = decoder.loader.from_config(copy.deepcopy(config), dtype=torch.float32)  # type: ignore[attr-defined]
        n_parameters = sum(parameter.numel() for parameter in sizes.parameters())
    if n_parameters > LARGEST:
        raise ValueError(f"{n_parameters / 1e6:.0f} M parameters, which is not tiny")
    torch.manual_seed(0)
    model: nn.Module = decoder.loader.from_config(  # type: ignore[attr-defined]
        config, dtype=torch.float32, attn_implementation="eager"
    )
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                _fill(parameter)
    return model.eval()


def _fill(parameter: torch.Tensor) -> None:
    # A matrix gives its output the variance of its input; norms and biases are shaken a little, so
    # that none of them can be left out unnoticed.
    if parameter.dim() > 1:
        parameter.normal_(std=parameter.shape[-1] ** -0.5)
    else:
        parameter.add_(0.1 * torch.randn_like(parameter))


# ---- configurations ------------------------------------------------------------------------------


def _configuration(decoder: Decoder) -> Any:
    kind = CONFIG_MAPPING[decoder.model_type]
    fields = _small(kind, decoder.fields)
    _spread_layer_types(kind, fields)
    return kind(**fields)


def _defaults(kind: type) -> dict[str, Any]:
    """What a configuration class can be told, and what it assumes if it is not."""
    if dataclasses.is_dataclass(kind):
        return {field.name: field.default for field in dataclasses.fields(kind)}
    parameters = inspect.signature(kind).parameters  # transformers 5.2
    return {
        name: dataclasses.MISSING if parameter.default is parameter.empty else parameter.default
        for name, parameter in parameters.items()
        if parameter.kind is not parameter.VAR_KEYWORD and name != "self"
    }


def _is_number(default: Any) -> bool:
    if default is dataclasses.MISSING or default == "auto":
        return True
    return isinstance(default, (int, float)) and not isinstance(default, bool)


def _size_of(name: str, default: Any) -> Any:
    """The size of a field, or its default where that means something that has to stay."""
    if name not in SIZES or (default == 0 and name in _ABSENT_AT_ZERO):
        return default
    if default is None:
        filled = name in _DERIVED_UNLESS_SET or name in _SPECIAL_TOKENS
        return SIZES[name] if filled else default
    one_head = name == "num_key_value_heads" and default == 1
    return SIZES[name] if _is_number(default) and not one_head else default


def _small(kind: type, told: dict[str, Any], is_text: bool = True) -> dict[str, Any]:
    """Keyword arguments for a small configuration of class `kind`, with its sub-configurations."""
    told, defaults = dict(told), _defaults(kind)
    fields = {}
    for name, default in defaults.items():
        size = _size_of(name, default)
        if name in SIZES and size is not default:
            fields[name] = size
    if "kv_lora_rank" in defaults and "num_key_value_heads" in defaults:
        fields["num_key_value_heads"] = 4  # latents are projected to keys of every head
    if "is_decoder" in defaults and is_text:
        fields["is_decoder"] = True
    for name, sub_kind, sub_told in _sub_configurations(kind, told):
        if sub_told is None:
            fields[name] = told.pop(name)
            continue
        told.pop(name, None)
        is_decoder = "text" in name or "decoder" in name
        sub = _small(sub_kind, sub_told, is_decoder)
        model_type = sub_told.get("model_type", getattr(sub_kind, "model_type", None))
        fields[name] = {**sub, "model_type": model_type}
    return {**fields, **told}


def _sub_configurations(
    kind: Any, told: dict[str, Any]
) -> list[tuple[str, type, dict[str, Any] | None]]:
    """Name, class and what is told of each sub-configuration; told None where there is none."""
    found: list[tuple[str, type, dict[str, Any] | None]] = []
    described = getattr(kind, "sub_configs_defaults", None)
    if described is None:
        described = getattr(kind, "sub_configs", {})  # transformers 5.2: classes alone
    for name, sub_kind in described.items():
        sub_told: dict[str, Any] | None = told.get(name, {})
        if not isinstance(sub_kind, type) and sub_told is not None:
            if sub_kind.optional and not sub_told:
                continue
            preset = {k: v for k, v in sub_kind.init_kwargs.items() if k not in SIZES}
            model_type = sub_told.get("model_type") or sub_kind.model_type
            auto = sub_kind.config_class.__name__ == "AutoConfig" or "model_type" in sub_told
            sub_told = {**preset, **sub_told}
            sub_kind = CONFIG_MAPPING[model_type] if auto else sub_kind.config_class
        elif sub_told is not None and sub_kind.__name__ == "AutoConfig":
            default = getattr(kind(), name, None)
            if default is None:
                continue
            sub_kind = type(default)
        found.append((name, sub_kind, sub_told))
    return found


def _spread_layer_types(kind: Any, fields: dict[str, Any]) -> None:
    """Let the few layers be of all kinds that the many of the default are of, in turn."""
    for name, sub_kind, told in _sub_configurations(kind, fields):
        if told is not None and isinstance(fields.get(name), dict):
            model_type = fields[name].get("model_type")
            known = CONFIG_MAPPING.get(model_type, sub_kind)
            _spread_layer_types(known, fields[name])
    for name in {"layer_types", "layers_block_type"} & (_defaults(kind).keys() - fields.keys()):
        kinds = list(dict.fromkeys(_default_layer_types(kind, name)))
        if len(kinds) > 1:
            n_layers = fields.get("num_hidden_layers", 4)
            fields[name] = [kinds[i % len(kinds)] for i in range(n_layers)]


def _default_layer_types(kind: Any, name: str) -> list[str]:
    try:
        types = getattr(kind(), name, None)
    except Exception:  # a class that cannot be made without arguments has no default
        return []
    return list(types) if isinstance(types, (list, tuple)) else []
