"""Every press at its usual settings, told how much to evict of a context of hundreds of tokens.

```python
presses = usual_pair("AdaKVPress", ratio=0.5, length=512)    # around a SnapKVPress, window 64
presses = suited_pair("AdaKVPress", 0.5, 512, model)         # with what they have to know
```

Fields are at their defaults, but for those that such contexts are too short for. Contexts of a few
dozen tokens need smaller windows: see `experiments.testbed.catalogue`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from transformers import PreTrainedModel

import hooks_impl
import patch_impl
from experiments import UserError
from experiments.framework.plots import press_label
from experiments.testbed.catalogue import DELIMITER, PROMPTS, fitted_pair
from experiments.testbed.compare import PressPair
from press_core import HyperparameterError, Press, PressError, attention_sites
from press_core.select import n_kept

Presses = Mapping[str, type[Any]]
"""The presses of a package by name."""

MECHANISMS: dict[str, Presses] = {"hook": hooks_impl.PRESSES, "patch": patch_impl.PRESSES}


def press_name(given: str) -> str:
    """The name of the press that a user calls `given`, with or without "Press", in any case.

    Raises:
        UserError: if there is none, with the names of all.
    """
    for name in hooks_impl.PRESSES:
        if given.lower() in (name.lower(), press_label(name).lower()):
            return name
    known = ", ".join(map(press_label, hooks_impl.PRESSES))
    raise UserError(f"there is no press {given!r}; there are {known}")


def usual(presses: Presses, name: str, ratio: float, length: int) -> Press:
    """The press `name` of a package, so that it evicts about `ratio` of `length` tokens.

    A DMSPress evicts what a RandomPress scores below `ratio`, a SimLayerKVPress all but
    `1 - ratio` of a layer that looks at little else, a ThinKPress `ratio` of the key channels.

    Raises:
        KeyError: if no press has that name.
        HyperparameterError: if the ratio is out of range.
    """
    presses[name]
    if not 0 <= ratio < 1:
        raise HyperparameterError(f"compression_ratio={ratio}: it must be a number in [0, 1)")
    if name in WRAPPED:
        inner = usual(presses, WRAPPED[name], ratio, length)
        return presses[name](press=inner, **_FIELDS.get(name, {}))
    if name in _OTHERS:
        return _OTHERS[name](presses, ratio, length)
    return presses[name](compression_ratio=ratio, **_FIELDS.get(name, {}))


def usual_pair(name: str, ratio: float, length: int) -> PressPair:
    """`usual` with both mechanisms."""
    return PressPair(*(usual(presses, name, ratio, length) for presses in MECHANISMS.values()))


def suited_pair(name: str, ratio: float, length: int, model: PreTrainedModel) -> PressPair:
    """`usual_pair`, where nothing was learned about `model` with what a few random tokens teach.

    What no press can do on `model` is refused when it is opened, not here.
    """
    pair = usual_pair(name, ratio, length)
    if all(_knows(press, model) for press in pair):
        return pair
    if name == "KVzipPress":  # there is no tokenizer
        return PressPair(*(replace(press, prompts=PROMPTS) for press in pair))  # type: ignore[call-arg]
    return fitted_pair(pair, model)


def _knows(press: Press, model: PreTrainedModel) -> bool:
    try:
        resolved = press.resolve(model)
        for site in attention_sites(model):
            resolved.check_site(site)
    except PressError:
        return False
    return True


WRAPPED: dict[str, str] = {
    "AdaKVPress": "SnapKVPress",
    "BlockPress": "KeyDiffPress",
    "ChunkKVPress": "SnapKVPress",
    "ChunkPress": "SnapKVPress",
    "CriticalAdaKVPress": "SnapKVPress",
    "CriticalKVPress": "SnapKVPress",
    "KeyRerotationPress": "SnapKVPress",
}
"""What is wrapped by presses that evict as much as what they wrap."""

_FIELDS: dict[str, dict[str, Any]] = {
    "ChunkPress": {"chunk_length": 256},  # 1024 would be one chunk
    "FinchPress": {"delimiter_token_id": DELIMITER},
    "RandomPress": {"seed": 0},
}


def _composed(presses: Presses, ratio: float, length: int) -> Press:
    half = 1 - (1 - ratio) ** 0.5
    parts = [usual(presses, name, half, length) for name in ("KnormPress", "SnapKVPress")]
    return presses["ComposedPress"](parts)


def _decoding(presses: Presses, ratio: float, length: int) -> Press:
    base = usual(presses, "SnapKVPress", 0.0, length)
    size = n_kept(length, ratio)
    return presses["DecodingPress"](base, compression_interval=1, target_size=size)


def _both_phases(presses: Presses, ratio: float, length: int) -> Press:
    prefilling = usual(presses, "SnapKVPress", ratio, length)
    return presses["PrefillDecodingPress"](prefilling, _decoding(presses, ratio, length))


def _per_layer(presses: Presses, ratio: float, length: int) -> Press:
    # As many as the model has layers: `fitted_pair` knows.
    press = usual(presses, "SnapKVPress", ratio, length)
    return presses["PerLayerCompressionPress"](press, [ratio])


def _dms(presses: Presses, ratio: float, length: int) -> Press:
    scored = usual(presses, "RandomPress", ratio, length)  # scores in [0, 1)
    window = max(1, length // 8)
    return presses["DMSPress"](scored, ratio, sliding_window_size=window, decoding=True)


def _duo(presses: Presses, ratio: float, length: int) -> Press:
    # What streaming heads keep by default, 384 tokens, would be most of such a context.
    options = {"sink_size": 4, "recent_size": 28}
    streaming = ratio / (1 - min(32, length - 1) / length)
    return presses["DuoAttentionPress"](head_compression_ratio=min(1.0, streaming), **options)


def _simlayer(presses: Presses, ratio: float, length: int) -> Press:
    recent = max(2, n_kept(length, ratio) - 4)
    return presses["SimLayerKVPress"](lazy_threshold=1 - ratio, n_recent=recent)


def _streaming(presses: Presses, ratio: float, length: int) -> Press:
    return presses["StreamingLLMDecodingPress"](max_capacity=max(5, n_kept(length, ratio)))


def _think(presses: Presses, ratio: float, _: int) -> Press:
    return presses["ThinKPress"](key_channel_compression_ratio=ratio)


_OTHERS: dict[str, Callable[[Presses, float, int], Press]] = {
    "ComposedPress": _composed,
    "DMSPress": _dms,
    "DecodingPress": _decoding,
    "DuoAttentionPress": _duo,
    "PerLayerCompressionPress": _per_layer,
    "PrefillDecodingPress": _both_phases,
    "SimLayerKVPress": _simlayer,
    "StreamingLLMDecodingPress": _streaming,
    "ThinKPress": _think,
}
