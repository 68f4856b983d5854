"""Correctness and speed of the four ways to decode with different tokens in each head.

A variant is correct if its logits equal those of eager attention over the full cache with each
head's evicted tokens masked. This is tested, never taken from documentation.

Times depend on how many tokens are kept and not on which, so the context is random tokens. Every
head keeps the tokens of Knorm, or AdaKV shares that budget among heads. How long copies of
megabytes take depends on the memory that a process was given, so each round has a process of its
own. In it all conditions take turns and are compared with the full cache.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import Cache, PreTrainedModel

from experiments import UserError, refusing
from experiments.framework.intervals import median_of
from experiments.framework.timing import Stopwatch, each_in_turn
from experiments.framework.wording import in_one_line
from experiments.testbed.compare import Inputs
from experiments.testbed.processes import in_new_process
from experiments.testbed.timed_models import ModelSpec, random_context
from experiments.testbed.variants import VARIANTS, Kept, Variant, kept_in, overridden, prefill
from hooks_impl import AdaKVPress, KnormPress
from press_core import AttentionSite, attention_sites, cache_nbytes
from press_core.forward import cache_of, with_cache

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


class Prefilled(NamedTuple):
    """What one context leaves: the full cache, and by share evicted the uniformly pruned one and
    what AdaKV keeps."""

    full: Cache
    uniform: dict[float, Cache]
    kept: dict[float, Kept]


@torch.inference_mode()
def prefilled(model: PreTrainedModel, context: int, ratios: Sequence[float]) -> Prefilled:
    """Prefill one context of random tokens, without a press and with each of both presses."""
    ids = random_context(model, 1, context)

    def filled(scope: AbstractContextManager[Any]) -> Cache:
        with scope:
            return cache_of(model(input_ids=ids, use_cache=True, logits_to_keep=1))

    presses = {ratio: KnormPress(ratio) for ratio in ratios}
    return Prefilled(
        filled(nullcontext()),
        {ratio: filled(press(model)) for ratio, press in presses.items()},
        {ratio: kept_in(filled(AdaKVPress(press)(model))) for ratio, press in presses.items()},
    )


def conditions(model: PreTrainedModel, made: Prefilled) -> dict[Timed, Held]:
    """The cache of each timed condition, which no other shares, and the scope to decode it in."""
    held: dict[Timed, Held] = {Timed(FULL): (deepcopy(made.full), nullcontext)}
    for ratio, kept in made.kept.items():
        held[Timed(UNIFORM, ratio)] = (made.uniform[ratio], nullcontext)
        for variant in VARIANTS.values():
            cache = variant.cache(deepcopy(made.full), kept)
            held[Timed(variant.name, ratio)] = (cache, partial(variant.open, model, kept))
    return held


_STEPS = 5
"""Tokens that a condition decodes at a turn, of whose times the median counts."""


@torch.inference_mode()
def step_seconds(model: PreTrainedModel, held: dict[Timed, Held], name: Timed) -> float:
    """Seconds to decode one token in a condition; its cache grows by `_STEPS` tokens."""
    cache, opened = held[name]
    token = torch.ones(1, 1, dtype=torch.int64, device=model.device)
    given = with_cache(model, cache)
    watch = Stopwatch(model.device)
    with opened():
        for _ in range(_STEPS):
            model(input_ids=token, **given)
            watch.lap()
    return float(np.median(watch.seconds()))


Taken = dict[tuple[int, Timed], tuple[float, int]]
"""By context and condition: seconds per step, and the bytes of the cache before the first one."""

_LESS = "; if memory or the disk is full, give shorter --contexts, or set TMPDIR to a larger disk"


@torch.inference_mode()
def one_round(spec: ModelSpec, files: dict[int, Path]) -> Taken:
    """Time every condition once, after a warm-up; by context, the file of what is `Prefilled`."""
    model, taken = spec.load(), Taken()
    for context, file in files.items():
        held = conditions(model, torch.load(file, map_location=spec.device, weights_only=False))
        n_bytes = {name: cache_nbytes(cache) for name, (cache, _) in held.items()}
        times = each_in_turn(list(held), partial(step_seconds, model, held), rounds=1)
        taken |= {(context, name): (float(times[name][0]), n_bytes[name]) for name in held}
    return taken


def decode_times(
    spec: ModelSpec,
    contexts: Sequence[int],
    ratios: Sequence[float],
    rounds: int,
    advance: Callable[[], object] = lambda: None,
) -> pd.DataFrame:
    """Times and bytes at each context length.

    Args:
        ratios: shares of a context to evict.
        rounds: number of processes, each of which times every condition.
        advance: called after each of them.

    Raises:
        UserError: if some layers of the model have a sliding window, or memory or disk are full.

    Returns:
        Columns `context`, `condition` and `ratio` (evicted); `time`, the median over rounds of the
        ratio to the full cache's time, its interval, `low` and `high`, and its `units`; the sizes
        of the caches, `bytes` and `full_bytes`; and `rounds`.
    """
    found: list[Taken] = []
    with TemporaryDirectory() as folder:
        files = {context: Path(folder, f"{context}.pt") for context in contexts}
        model = spec.load()
        if len(attention_sites(model)) < model.config.get_text_config().num_hidden_layers:
            raise UserError(
                f"some layers of {spec.name} have a sliding window or no keys, so its decode steps "
                "do not show what head-wise caches cost; give a model without, or another --part"
            )
        for context, file in files.items():
            made = prefilled(model, context, ratios)
            with refusing(f"cannot write to {folder}", OSError, RuntimeError, advice=_LESS):
                torch.save(made, file)
        del model, made  # each process loads its own
        for _ in range(rounds):
            with refusing("a process that timed steps has ended", BrokenProcessPool, advice=_LESS):
                found.append(in_new_process(one_round, spec, files))
            advance()

    def row(context: int, name: Timed) -> dict[str, Any]:
        full = context, Timed(FULL)
        shares = [taken[context, name][0] / taken[full][0] for taken in found]
        n_bytes = {"bytes": found[0][context, name][1], "full_bytes": found[0][full][1]}
        of = {"context": context, **name._asdict()}
        return of | median_of("time", shares) | n_bytes | {"rounds": rounds}

    return pd.DataFrame([row(*key) for key in found[0]])
