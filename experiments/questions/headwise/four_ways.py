"""The four ways to decode with different tokens in each head: whether they are right, how fast.

Nothing is taken from documentation: a variant works where its logits are those of the full cache
under eager attention, with all that each head has evicted masked.

Times depend on how many tokens are kept, not on which: the context is one of random tokens, of
which all heads keep those of Knorm, or share that budget by AdaKV. All of them take turns, and are
compared round by round with the full cache.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import Cache, PreTrainedModel

from experiments.framework.shared import median_of
from experiments.framework.timing import Stopwatch, each_in_turn
from experiments.framework.wording import in_one_line
from experiments.testbed.compare import Inputs
from experiments.testbed.timed_models import random_context
from experiments.testbed.variants import VARIANTS, Kept, Variant, kept_in, overridden, prefill
from hooks_impl import AdaKVPress, KnormPress
from press_core import AttentionSite, RaggedLayer, attention_sites, cache_nbytes

IMPLEMENTATIONS = ("eager", "sdpa", "flex_attention")
SAME, OTHER, ERROR, MISSING = "same logits", "other logits", "error", "not offered"
"""Outcomes; the last where the model itself is not right with the implementation."""


def reference(model: nn.Module, kept: Kept) -> AbstractContextManager[None]:
    """Attend, under eager attention, to all that is stored but what each head has evicted."""

    def make(site: AttentionSite, heads: Tensor) -> Callable[..., Any]:
        of_queries = heads.repeat_interleave(site.num_heads // heads.shape[1], dim=1)
        evicted = ~site.ungrouped(of_queries).unsqueeze(2)

        def masked(function: Any, module: Any, *given: Any, **kwargs: Any) -> Any:
            *states, mask = given  # query, key, value and the mask of all heads
            hidden = pad(evicted, (0, mask.shape[-1] - evicted.shape[-1]), value=False)
            mask = mask.masked_fill(hidden, torch.finfo(mask.dtype).min)
            return function(module, *states, mask, **kwargs)

        return masked

    return overridden(model, kept, make)


def trials(model: PreTrainedModel, lengths: Sequence[int] = (96, 80)) -> pd.DataFrame:
    """Try every variant with every attention implementation.

    A padded batch is pruned to half by `AdaKVPress(KnormPress)`; then comes a question, short or
    with more tokens than a head has channels, and two decode steps.

    Args:
        model: left as it was.
        lengths: tokens of the rows of the batch.

    Returns:
        Columns `question` (tokens), `condition`, `implementation`, `outcome`, `difference` (largest
        of all logits), and `why` where they are not the same.
    """
    own = model.config._attn_implementation
    longer = max(site.head_dim for site in attention_sites(model)) + 4
    try:
        rows = [
            {"question": n} | row
            for n in (3, longer)
            for row in _outcomes(model, Inputs.random(model.config.vocab_size, lengths, question=n))
        ]
    finally:
        model.set_attn_implementation(own)
    return pd.DataFrame(rows)


def _outcomes(model: PreTrainedModel, inputs: Inputs) -> Iterator[dict[str, Any]]:
    """What comes of every variant with every implementation, over one batch that is pruned once."""
    model.set_attn_implementation("eager")  # which every family has
    context, *following = inputs.forwards(model.device)
    full, kept = prefill(model, AdaKVPress(KnormPress(0.5)), **context)

    @torch.no_grad()
    def run(variant: Variant, implementation: str = "eager") -> Tensor:
        """Logits of all tokens after the context, `(B, n, vocabulary)` float64."""
        model.set_attn_implementation(implementation)
        cache = variant.cache(deepcopy(full), kept)
        # Flex attention as it is: on a CPU its kernel takes half a minute to compile.
        with torch.compiler.set_stance("force_eager"), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "flex_attention called without torch.compile")
            with variant.open(model, kept):
                outputs = [model(**given, past_key_values=cache).logits for given in following]
        return torch.cat(outputs, dim=1).double()

    untouched = Variant("nothing", lambda *_: nullcontext(), frees=False)
    plain, expected = run(untouched), run(Variant("reference", reference, frees=False))
    for implementation in IMPLEMENTATIONS:
        of_model = _outcome(partial(run, untouched, implementation), plain)
        for variant in VARIANTS.values():
            found = of_model | {"outcome": MISSING}
            if of_model["outcome"] == SAME:
                found = _outcome(partial(run, variant, implementation), expected)
            yield {"condition": variant.name, "implementation": implementation} | found


def _outcome(logits: Callable[[], Tensor], expected: Tensor) -> dict[str, Any]:
    try:  # whatever the libraries raise is the result
        difference = float((logits() - expected).abs().max())
    except Exception as error:
        return {"outcome": ERROR, "difference": float("nan"), "why": in_one_line(error)}
    if difference <= torch.finfo(torch.float32).eps ** 0.5 * float(expected.abs().max()):
        return {"outcome": SAME, "difference": difference, "why": ""}
    return {"outcome": OTHER, "difference": difference, "why": f"{difference:.2g} off"}


# ---- how fast they are ---------------------------------------------------------------------------

FULL, UNIFORM = "full", "uniform"
"""The cache without a press, and one from which all heads have evicted as many tokens."""


class Timed(NamedTuple):
    """What is timed: a way to hold a context, and the share of it that is evicted."""

    condition: str
    ratio: float = 0.0


Held = tuple[Cache, Callable[[], AbstractContextManager[Any]]]
"""A cache, and what opens the scope that decodes it."""


@torch.inference_mode()
def caches(model: PreTrainedModel, context: int, ratios: tuple[float, ...]) -> dict[Timed, Held]:
    """Everything that is timed at one context length, of one context of random tokens."""
    ids = random_context(model, 1, context)

    def prefilled(scope: AbstractContextManager[Any]) -> Cache:
        with scope:
            return model(input_ids=ids, use_cache=True, logits_to_keep=1).past_key_values

    full = prefilled(nullcontext())
    held: dict[Timed, Held] = {Timed(FULL): (full, nullcontext)}
    for ratio in ratios:
        evenly = KnormPress(ratio)
        held[Timed(UNIFORM, ratio)] = (prefilled(evenly(model)), nullcontext)
        kept = kept_in(prefilled(AdaKVPress(evenly)(model)))
        for variant in VARIANTS.values():
            opened = partial(variant.open, model, kept)
            held[Timed(variant.name, ratio)] = (variant.cache(full, kept), opened)
    return held


@torch.inference_mode()
def step_seconds(model: PreTrainedModel, cache: Cache, context: int) -> float:
    """What it takes to decode one token, which is taken away again: `context` tokens stay.

    The first three variants share the tensors of the full cache, which are put back, as a step
    leaves longer copies; ragged layers write into the room that they have.
    """
    before = [(layer.keys, layer.values) for layer in cache.layers]
    token = torch.ones(1, 1, dtype=torch.int64, device=model.device)
    watch = Stopwatch(model.device)
    model(input_ids=token, past_key_values=cache)
    watch.lap()
    for layer, states in zip(cache.layers, before, strict=True):
        if isinstance(layer, RaggedLayer):
            layer.crop(context - layer.get_seq_length())
        else:
            layer.keys, layer.values = states
    return watch.seconds()[0]


@torch.inference_mode()
def decode_times(
    model: PreTrainedModel, context: int, ratios: tuple[float, ...], repeats: int = 2, **turns: Any
) -> pd.DataFrame:
    """Times and bytes at one context length.

    Args:
        ratios: shares of it evicted.
        repeats: steps of each in a round, of which the quickest counts.
        turns: see `each_in_turn`.

    Returns:
        Columns `context`, `condition`, `ratio` (evicted); `time` the median of the ratio to the
        full cache over rounds, `low` and `high` its interval; `ms` and `full_ms` the median
        milliseconds, for context; `bytes` and `full_bytes` that the caches hold; `rounds`.
    """
    held = caches(model, context, ratios)

    def quickest(name: Timed) -> float:
        cache, opened = held[name]
        with opened():
            return min(step_seconds(model, cache, context) for _ in range(repeats))

    times = each_in_turn(list(held), quickest, **turns)
    n_bytes, full = {name: cache_nbytes(cache) for name, (cache, _) in held.items()}, Timed(FULL)
    rows = (
        {"context": context, **name._asdict()}
        | median_of("time", seconds / times[full])
        | {"ms": 1e3 * float(np.median(seconds)), "full_ms": 1e3 * float(np.median(times[full]))}
        | {"bytes": n_bytes[name], "full_bytes": n_bytes[full], "rounds": len(seconds)}
        for name, seconds in times.items()
    )
    return pd.DataFrame(rows)
