"""The four variants tried on a model: with which attention implementations do they work?

Nothing is taken from documentation: a variant works where its logits are those of the full cache
under eager attention, with all that each head has evicted masked.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from functools import partial
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import PreTrainedModel

import hooks_impl
from experiments.framework.wording import in_one_line
from experiments.testbed.compare import Inputs
from experiments.testbed.variants import VARIANTS, Kept, Variant, overridden, prefill
from press_core import AttentionSite, attention_sites

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
    full, kept = prefill(model, hooks_impl.AdaKVPress(hooks_impl.KnormPress(0.5)), **context)

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
