"""An example of every press, told how much to evict, with windows that fit into short contexts.

```python
presses = example_pair("AdaKVPress", ratio=0.5)      # around a SnapKVPress
presses = fitted_pair(presses, model)                # with what learned presses have to know
```
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

import hooks_impl
import patch_impl
from experiments.compare import PressPair
from press_core import Press
from press_core.methods.kvzip import RepeatPrompts
from press_core.model.sites import attention_sites

Presses = Mapping[str, type[Any]]
"""The presses of a package by name."""

DELIMITER = 2**31 - 1
"""Token id of the delimiter for FinchPress: beyond any vocabulary, for no model ever sees it."""

PROMPTS = RepeatPrompts(first=(3, 4, 5), following=(6, 7), suffix=(8,))
"""What asks a model without a tokenizer to repeat a context."""


def example(presses: Presses, name: str, ratio: float) -> Press:
    """The press `name` of a package, so that it evicts about `ratio` of short contexts.

    Raises:
        KeyError: if no press has that name.
        HyperparameterError: if the ratio is out of range.
    """
    presses[name]
    make = _EXAMPLES.get(name, _scorer(name))
    return make(presses, ratio)


def example_pair(name: str, ratio: float) -> PressPair:
    """`example` with both mechanisms."""
    both = (example(package, name, ratio) for package in (hooks_impl.PRESSES, patch_impl.PRESSES))
    return PressPair(*both)


_Example = Callable[[Presses, float], Press]

SMALL: dict[str, dict[str, Any]] = {
    "CompactorPress": {"chunk_size": 16, "sketch_dimension": 8},
    "ExpectedAttentionPress": {"n_future_positions": 64},
    "ExpectedAttentionStatsPress": {"n_future_positions": 64},
    "KVzipPress": {"chunk_size": 24, "prompts": PROMPTS},
    "FinchPress": {"delimiter_token_id": DELIMITER},
    "LagKVPress": {"lag_size": 8},
    "LeverageScorePress": {"sketch_dimension": 8},
    "NonCausalAttnPress": {"chunk_size": 16},
    "PyramidKVPress": {"window_size": 8},
    "RandomPress": {"seed": 0},
    "SnapKVPress": {"window_size": 8},
}
"""Fields of presses that are told a ratio and nothing else, for contexts of a few dozen tokens."""


def _scorer(name: str) -> _Example:
    return lambda presses, ratio: presses[name](compression_ratio=ratio, **SMALL.get(name, {}))


def _around(name: str, inner: str = "SnapKVPress", **options: Any) -> _Example:
    return lambda presses, ratio: presses[name](press=example(presses, inner, ratio), **options)


def _composed(presses: Presses, ratio: float) -> Press:
    half = 1 - (1 - ratio) ** 0.5
    parts = [example(presses, name, half) for name in ("KnormPress", "SnapKVPress")]
    return presses["ComposedPress"](parts)


def _per_layer(presses: Presses, ratio: float) -> Press:
    # As many as the model has layers: `fitted` knows.
    return presses["PerLayerCompressionPress"](example(presses, "SnapKVPress", ratio), [ratio])


def _decoding(presses: Presses, ratio: float) -> Press:
    base = example(presses, "SnapKVPress", 0.0)
    size = max(1, round(48 * (1 - ratio)))
    return presses["DecodingPress"](base, compression_interval=2, target_size=size)


def _both_phases(presses: Presses, ratio: float) -> Press:
    decoding = _decoding(presses, ratio)
    return presses["PrefillDecodingPress"](example(presses, "KnormPress", ratio), decoding)


def _streaming(presses: Presses, ratio: float) -> Press:
    return presses["StreamingLLMDecodingPress"](max_capacity=max(5, round(48 * (1 - ratio))))


def _simlayer(presses: Presses, ratio: float) -> Press:
    recent = max(2, round(40 * (1 - ratio)))
    return presses["SimLayerKVPress"](lazy_threshold=1 - ratio, n_recent=recent)


def _duo(presses: Presses, ratio: float) -> Press:
    return presses["DuoAttentionPress"](head_compression_ratio=ratio, sink_size=2, recent_size=6)


def _dms(presses: Presses, ratio: float) -> Press:
    base = example(presses, "RandomPress", ratio)  # scores in [0, 1)
    return presses["DMSPress"](base, ratio, sliding_window_size=8, decoding=True)


_EXAMPLES: dict[str, _Example] = {
    "AdaKVPress": _around("AdaKVPress"),
    "BlockPress": _around("BlockPress", "KeyDiffPress", block_size=8),
    "ChunkKVPress": _around("ChunkKVPress", chunk_length=5),
    "ChunkPress": _around("ChunkPress", chunk_length=16),
    "ComposedPress": _composed,
    "CriticalAdaKVPress": _around("CriticalAdaKVPress"),
    "CriticalKVPress": _around("CriticalKVPress"),
    "DMSPress": _dms,
    "DecodingPress": _decoding,
    "DuoAttentionPress": _duo,
    "KeyRerotationPress": _around("KeyRerotationPress"),
    "PerLayerCompressionPress": _per_layer,
    "PrefillDecodingPress": _both_phases,
    "SimLayerKVPress": _simlayer,
    "StreamingLLMDecodingPress": _streaming,
    "ThinKPress": lambda presses, r: presses["ThinKPress"](key_channel_compression_ratio=r),
}


# ---- what presses have to know about a model -----------------------------------------------------


def fitted_pair(pair: PressPair, model: PreTrainedModel) -> PressPair:
    """`pair` with what its presses have to learn about `model`, from a few random tokens.

    Fields that are filled already stay. The ratios of a PerLayerCompressionPress are repeated for
    all layers.
    """
    return PressPair(*(_fitted(press, model) for press in pair))


def _fitted(press: Press, model: PreTrainedModel) -> Press:
    changed: dict[str, Any] = {}
    for field in fields(press):
        value = getattr(press, field.name)
        if isinstance(value, Press):
            changed[field.name] = _fitted(value, model)
        elif field.name == "presses":
            changed["presses"] = [_fitted(inner, model) for inner in value]
        elif field.name == "compression_ratios":
            n_layers = model.config.num_hidden_layers
            changed[field.name] = (list(value) * n_layers)[:n_layers]
        elif field.name in _LEARNED and value is None and works_on(press, model):
            changed[field.name] = _learned(model, field.name)
    return replace(press, **changed)


@lru_cache(maxsize=64)
def _learned(model: PreTrainedModel, field: str) -> Any:
    vocabulary = model.get_input_embeddings().num_embeddings
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, vocabulary, (2, 48), generator=generator).to(model.device)
    return _LEARNED[field](model, ids)


def _regressor(model: PreTrainedModel, ids: Tensor) -> Any:
    kvzip = hooks_impl.KVzipPress(kvzip_plus_normalization=True, prompts=PROMPTS)
    return hooks_impl.KVzapPress.fit(model, [ids], kvzip.scores, steps=20)


_LEARNED: dict[str, Callable[[PreTrainedModel, Tensor], Any]] = {
    "filters": lambda model, ids: hooks_impl.QFilterPress.fit(model, [ids]),
    "stats": lambda model, ids: hooks_impl.ExpectedAttentionStatsPress.collect(model, [ids]),
    "regressor": _regressor,
    "head_scores": lambda model, ids: hooks_impl.DuoAttentionPress.measure(model, [ids], 2, 6),
}


def works_on(press: Press, model: PreTrainedModel) -> bool:
    """Whether `model` has the position embeddings that `press` asks for."""
    return not press.uses_rope or all(site.rotary is not None for site in attention_sites(model))
