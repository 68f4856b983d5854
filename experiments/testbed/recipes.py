"""How to make each press so that it evicts about a given share of a context.

```python
presses = recipe_pair("AdaKVPress", ratio=0.5)                # for a few dozen tokens
presses = recipe_pair("AdaKVPress", ratio=0.5, length=512)    # around SnapKVPress, defaults
presses = fitted_pair(presses, model)                         # fitted on a few random tokens
presses = suited_pair("AdaKVPress", 0.5, 512, model)          # fitted only if nothing is saved
```

With a length, fields keep their defaults, except those whose defaults are too large for contexts of
hundreds of tokens; a window of recent tokens is at most half of what is kept. Without one, windows
and chunks are small enough for a few dozen tokens.
"""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import fields, replace
from inspect import signature
from pkgutil import resolve_name
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor
from transformers import PreTrainedModel

import hooks_impl
import patch_impl
from experiments import UserError, data_of, refusing
from experiments.framework.plots import is_own, press_label
from experiments.testbed.compare import Inputs, PressPair
from press_core import HyperparameterError, Needs, PressError
from press_core.budget import n_kept
from press_core.probe import attention_sites
from press_core.replay.kvzip import KVzip, RepeatPrompts
from press_core.scope import InstalledPress, bound_to

Presses = Mapping[str, type[Any]]
"""The presses of one mechanism's package by name."""

MECHANISMS: dict[str, Presses] = {"hook": hooks_impl.PRESSES, "patch": patch_impl.PRESSES}

DELIMITER = 2**31 - 1
"""Token id of the delimiter for FinchPress, outside any vocabulary, as no model ever reads it."""

PROMPTS = RepeatPrompts(first=(3, 4, 5), following=(6, 7), suffix=(8,))
"""Prompts to repeat a context, as token ids, for models without a tokenizer."""

SHORT = 48
"""Tokens of a context if no length is given."""

_WINDOWS = ("window_size", "lag_size")
"""Fields with the number of recent tokens that a press always keeps."""


def press_name(given: str) -> str:
    """The name of the press `given`, with or without "Press", in upper or lower case.

    Two classes of the user's own, `"my_module:MyHookPress,my_module:MyPatchPress"`, are their name.

    Raises:
        UserError: if there is no such press; the message lists all names.
    """
    if is_own(given):
        _own_classes(given)
        return given
    for name in hooks_impl.PRESSES:
        if given.lower() in (name.lower(), press_label(name).lower()):
            return name
    known = ", ".join(map(press_label, hooks_impl.PRESSES))
    raise UserError(f"there is no press {given!r}; there are {known}")


def class_of(presses: Presses, name: str) -> type[Any]:
    """The press `name` of a package, or the one of the user's own with the same mechanism.

    Raises:
        KeyError: if no press has that name.
    """
    if is_own(name):
        return _own_classes(name)[presses is patch_impl.PRESSES]
    return presses[name]


def _own_classes(text: str) -> list[type[Any]]:
    """The two classes that a text names.

    Raises:
        UserError: if they cannot be imported, are not a press with hooks and one with patches, or
            are not made by a `compression_ratio` alone.
    """
    with refusing(f"cannot import {text!r}", Exception, advice="; --debug shows where"):
        classes: list[Any] = [resolve_name(part.strip()) for part in text.split(",")]
    are_presses = [getattr(cls, "mechanism", None) for cls in classes] == ["hooks", "patches"]
    with suppress(TypeError):  # which says that a class takes other arguments
        if are_presses and all(signature(c).bind(compression_ratio=0.0) for c in classes):
            return classes
    raise UserError(
        f"{text!r} is not a press with hooks and one with patches, both with a field "
        "compression_ratio and a default for all others; derive them from ScorerPress of "
        "hooks_impl and of patch_impl, as in my_module:MyHookPress,my_module:MyPatchPress"
    )


# ---- recipes -------------------------------------------------------------------------------------


def recipe(presses: Presses, name: str, ratio: float, length: int | None = None) -> InstalledPress:
    """The press `name` of a package, set to evict about a share `ratio` of `length` tokens.

    A DMSPress evicts tokens that a RandomPress scores below `ratio`. A SimLayerKVPress keeps a
    share `1 - ratio` in layers whose attention is mostly on that share. A ThinKPress evicts a share
    `ratio` of the key channels.

    Args:
        presses: the presses of a package by name.
        length: number of tokens of the context; None for a few dozen.

    Raises:
        KeyError: if no press has that name.
        HyperparameterError: if the ratio is out of range.
    """
    if not 0 <= ratio < 1:
        raise HyperparameterError(f"compression_ratio={ratio}: it must be a number in [0, 1)")
    made = {**_FIELDS["usual"].get(name, {}), **({} if length else _FIELDS["short"].get(name, {}))}
    made |= _amount(name, ratio, length or SHORT, made)
    if length and not is_own(name):
        windows = {n: getattr(presses[name], n) for n in _WINDOWS if hasattr(presses[name], n)}
        made |= {n: min(usual, max(1, n_kept(length, ratio) // 2)) for n, usual in windows.items()}
    parts, of_parts = made.pop("parts", {}), made.pop("ratio_of_parts", ratio)
    made |= {field: recipe(presses, part, of_parts, length) for field, part in parts.items()}
    if name == "ComposedPress":
        half = 1 - (1 - ratio) ** 0.5
        made["presses"] = [recipe(presses, each, half, length) for each in made["presses"]]
    return class_of(presses, name)(**made)


def _amount(name: str, ratio: float, length: int, given: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that set how much is evicted; empty if wrapped presses set it."""
    kept = n_kept(length, ratio)
    match name:
        case "CAMPress" | "DecodingPress" | "EveryTurnPress":
            return {"target_size": kept}
        case "CompressionRatioDecodingPress":
            return {"target_compression_ratio": ratio}
        case "DMSPress":  # scores are drawn from [0, 1)
            window = given.get("sliding_window_size", max(1, length // 8))
            return {"threshold": ratio, "sliding_window_size": window}
        case "DuoAttentionPress":
            held = min(given["sink_size"] + given["recent_size"], length - 1)  # per streaming head
            return {"head_compression_ratio": min(1.0, ratio / (1 - held / length))}
        case "PerLayerCompressionPress":  # `fitted_pair` repeats it for all layers
            return {"compression_ratios": [ratio]}
        case "SimLayerKVPress":
            return {"lazy_threshold": 1 - ratio, "n_recent": max(2, kept - 4)}
        case "StreamingLLMDecodingPress":
            return {"max_capacity": max(5, kept)}
        case "ThinKPress":
            return {"key_channel_compression_ratio": ratio}
    return {} if "parts" in given or "presses" in given else {"compression_ratio": ratio}


def recipe_pair(name: str, ratio: float, length: int | None = None) -> PressPair:
    """`recipe` with both mechanisms."""
    return PressPair(*(recipe(presses, name, ratio, length) for presses in MECHANISMS.values()))


_FIELDS = data_of(__file__)
_FIELDS["usual"]["FinchPress"] = {"delimiter_token_id": DELIMITER}
for _name in ("KVgradPress", "KVzipPress", "RestoreKVPress"):
    _FIELDS["short"][_name] = {"chunk_size": 24, "prompts": PROMPTS}


# ---- presses with parameters learned from a model ------------------------------------------------


def suited_pair(name: str, ratio: float, length: int, model: PreTrainedModel) -> PressPair:
    """`recipe_pair`; if no learned parameters for `model` are saved, fitted on a few random tokens.

    A press that does not support `model` raises an error when it is opened, not here.
    """
    pair = recipe_pair(name, ratio, length)
    if all(can_open(press, model) for press in pair):
        return pair
    if isinstance(pair.hook, KVzip):  # there is no tokenizer
        pair = PressPair(*(replace(press, prompts=PROMPTS) for press in pair))  # type: ignore[call-arg]
    return fitted_pair(pair, model)


def can_open(press: InstalledPress, model: PreTrainedModel) -> bool:
    """Whether `press` fits `model`, and all that it has to know of the model is there."""
    with suppress(PressError):
        bound_to(press, model)
        return True
    return False


def fitted_pair(pair: PressPair, model: PreTrainedModel) -> PressPair:
    """`pair` with the learned parameters of its presses fitted to `model` on a few random tokens.

    Fields that are already set stay unchanged. The ratios of a PerLayerCompressionPress are
    repeated for all layers.
    """
    return PressPair(*(_fitted(press, model) for press in pair))


def _fitted(press: InstalledPress, model: PreTrainedModel) -> InstalledPress:
    changed: dict[str, Any] = {}
    for field in fields(press):
        value: Any = getattr(press, field.name, None)
        if isinstance(value, InstalledPress):
            changed[field.name] = _fitted(value, model)
        elif field.name == "presses":
            changed["presses"] = [_fitted(inner, model) for inner in value]
        elif field.name == "compression_ratios":
            n_layers = model.config.get_text_config().num_hidden_layers
            changed[field.name] = (list(value) * n_layers)[:n_layers]
        elif field.name in _LEARNED and value is None and _works_on(press, model):
            changed[field.name] = _learned(model, field.name)
    return replace(press, **changed)


def _works_on(press: InstalledPress, model: PreTrainedModel) -> bool:
    """Whether `model` has the rotary embeddings that `press` needs, if it needs them."""
    return Needs.ROPE not in press.needs or all(x.rotary for x in attention_sites(model))


_KNOWN: WeakKeyDictionary[PreTrainedModel, dict[str, Any]] = WeakKeyDictionary()
"""Cache of learned parameters by model and field; entries live as long as their model."""


def _learned(model: PreTrainedModel, field: str) -> Any:
    known = _KNOWN.setdefault(model, {})
    if field not in known:
        vocabulary = model.get_input_embeddings().num_embeddings
        ids = Inputs.random(vocabulary, (SHORT, SHORT)).context.to(model.device)
        known[field] = _LEARNED[field](model, ids)
    return known[field]


def _regressor(model: PreTrainedModel, ids: Tensor) -> Any:
    kvzip = hooks_impl.KVzipPress(kvzip_plus_normalization=True, prompts=PROMPTS)
    return hooks_impl.KVzapPress.fit(model, [ids], kvzip.scores, steps=20)


def _gates(model: PreTrainedModel, ids: Tensor) -> Any:
    kvzip = hooks_impl.KVzipPress(prompts=PROMPTS)
    return hooks_impl.FastKVzipPress.fit(model, [ids], kvzip.scores, rank=4, n_base=4, steps=20)


_LEARNED: dict[str, Callable[[PreTrainedModel, Tensor], Any]] = {
    "filters": lambda model, ids: hooks_impl.QFilterPress.fit(model, [ids]),
    "stats": lambda model, ids: hooks_impl.ExpectedAttentionStatsPress.collect(model, [ids]),
    "regressor": _regressor,
    "gates": _gates,
    "curves": lambda model, ids: hooks_impl.LUKVPress.fit(model, [ids], hooks_impl.KnormPress()),
    "head_scores": lambda model, ids: hooks_impl.DuoAttentionPress.measure(model, [ids], 2, 6),
    "adapter": lambda model, ids: hooks_impl.RestoreKVPress.fit(
        model, [ids], n_following=8, rank=2, prompts=PROMPTS
    ),
}
