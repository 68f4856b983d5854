"""Correctness and speed of the four ways to decode with different tokens in each head.

A variant is correct if its logits equal those of eager attention over the full cache with each
head's evicted tokens masked. This is tested, never taken from documentation.

Times depend on how many tokens are kept and not on which, so the context is random tokens. Every
head keeps the tokens of Knorm, or AdaKV shares that budget among heads. All conditions take turns,
and are compared round by round with the full cache.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from functools import partial
from typing import Any, NamedTuple

import pandas as pd
import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import Cache, PreTrainedModel

from experiments.framework.intervals import median_of
from experiments.framework.timing import Stopwatch, each_in_turn
from experiments.framework.wording import in_one_line
from experiments.testbed.compare import Inputs
from experiments.testbed.timed_models import random_context
from experiments.testbed.variants import VARIANTS, Kept, Variant, kept_in, overridden, prefill
from hooks_impl import AdaKVPress, KnormPress
from press_core import AttentionSite, RaggedLayer, attention_sites, cache_nbytes
from press_core.forward import cache_of

IMPLEMENTATIONS = ("eager", "sdpa", "flex_attention")
SAME, OTHER, ERROR, MISSING = "same logits", "other logits", "error", "not offered"
"""Outcomes; `MISSING` if the model itself gives other logits with the implementation."""


def reference(model: nn.Module, kept: Kept) -> AbstractContextManager[None]:
    """Scope of eager attention over the full cache with each head's evicted tokens masked."""

    def make(site: AttentionSite, heads: Tensor) -> Callable[..., Any]:
        of_queries = heads.repeat_interleave(site.num_heads // heads.shape[1], dim=1)
        evicted = ~site.ungrouped(of_queries).unsqueeze(2)

        def masked(function: Any, module: Any, *given: Any, **kwargs: Any) -> Any:
            *states, mask = given  # query, key, value and the mask shared by all heads
            hidden = pad(evicted, (0, mask.shape[-1] - evicted.shape[-1]), value=False)
            mask = mask.masked_fill(hidden, torch.finfo(mask.dtype).min)
            return function(module, *states, mask, **kwargs)

        return masked

    return overridden(model, kept, make)


def trials(model: PreTrainedModel, lengths: Sequence[int] = (96, 80)) -> pd.DataFrame:
    """Test every variant with every attention implementation.

    `AdaKVPress(KnormPress)` evicts half of a padded batch. A question follows, of 3 tokens or of
    more tokens than a head has channels, and two decode steps.

    Args:
        model: unchanged afterwards.
        lengths: tokens of each row of the batch, without padding.

    Returns:
        Columns `question` (tokens), `condition`, `implementation`, `outcome`, the largest
        `difference` of a logit, and `why` the logits are not the same, empty if they are.
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
    """The outcome of every variant with every implementation on one batch, pruned once."""
    model.set_attn_implementation("eager")  # every family supports it
    context, *following = inputs.forwards(model.device)
    full, kept = prefill(model, AdaKVPress(KnormPress(0.5)), **context)

    @torch.no_grad()
    def run(variant: Variant, implementation: str = "eager") -> Tensor:
        """Logits of all tokens after the context, `(B, n, vocabulary)` float64."""
        model.set_attn_implementation(implementation)
        cache = variant.cache(deepcopy(full), kept)
        # Run flex attention uncompiled: on a CPU its kernel takes half a minute to compile.
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
    try:  # any error that the libraries raise is an outcome
        difference = float((logits() - expected).abs().max())
    except Exception as error:
        return {"outcome": ERROR, "difference": float("nan"), "why": in_one_line(error)}
    if difference <= torch.finfo(torch.float32).eps ** 0.5 * float(expected.abs().max()):
        return {"outcome": SAME, "difference": difference, "why": ""}
    return {"outcome": OTHER, "difference": difference, "why": f"{difference:.2g} off"}


# ---- how fast they are ---------------------------------------------------------------------------

FULL, UNIFORM = "full", "uniform"
"""The cache without a press, and one with the same number of tokens evicted in every head."""


class Timed(NamedTuple):
    """A timed condition: how the cache is stored and decoded, and the share evicted."""

    condition: str
    ratio: float = 0.0


Held = tuple[Cache, Callable[[], AbstractContextManager[Any]]]
"""A cache, and a function that opens the scope to decode it in."""


@torch.inference_mode()
def caches(model: PreTrainedModel, context: int, ratios: tuple[float, ...]) -> dict[Timed, Held]:
    """The caches of all timed conditions, for one context of random tokens."""
    ids = random_context(model, 1, context)

    def prefilled(scope: AbstractContextManager[Any]) -> Cache:
        with scope:
            return cache_of(model(input_ids=ids, use_cache=True, logits_to_keep=1))

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
    """Seconds to decode one token, which is then removed, so the cache keeps `context` tokens.

    The first three variants share the tensors of the full cache; a step replaces them by longer
    copies, so the originals are restored. Ragged layers write in place and are cropped.
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
        ratios: shares of the context to evict.
        repeats: steps per condition and round, of which the fastest counts.
        turns: see `each_in_turn`.

    Returns:
        Columns `context`, `condition` and `ratio` (evicted); `time`, the median over rounds of the
        ratio to the full cache's time, its interval, `low` and `high`, and its `units`; the sizes
        of the caches, `bytes` and `full_bytes`; and `rounds`.
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
        | {"bytes": n_bytes[name], "full_bytes": n_bytes[full], "rounds": len(seconds)}
        for name, seconds in times.items()
    )
    return pd.DataFrame(rows)
