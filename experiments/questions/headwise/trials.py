"""The four variants tried on a model: with which attention implementations do they work?

Nothing is taken from documentation: a variant works where its logits are those of a reference,
which masks the full cache head by head and computes attention in float64.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from functools import partial
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

import hooks_impl
from experiments.framework.wording import in_one_line
from experiments.testbed.compare import Inputs
from experiments.testbed.variants import (
    VARIANTS,
    Kept,
    Variant,
    overridden,
    prefill,
    seen_by_heads,
)
from press_core import AttentionSite, attention_sites

IMPLEMENTATIONS = ("eager", "sdpa", "flex_attention")
SAME, OTHER, ERROR, MISSING = "same logits", "other logits", "error", "not offered"
"""Outcomes; the last where the model itself is not right with the implementation."""

NOTHING = Variant("nothing", lambda *_: nullcontext(), frees=False)
"""The model as it is, on the full cache."""


# ---- the reference -------------------------------------------------------------------------------


def reference(model: nn.Module, kept: Kept) -> AbstractContextManager[None]:
    """Attend in float64 over all that is stored, what each head has evicted masked away."""
    return overridden(model, kept, lambda site, heads: partial(_dense, site, heads))


def _dense(
    site: AttentionSite,
    kept: Tensor,
    function: Any,
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    seen = seen_by_heads(site, kept, attention_mask, query.shape[2], key.shape[2])
    group, softcap = query.shape[1] // key.shape[1], site.softmax.softcap
    keys, values = (x.double().repeat_interleave(group, dim=1) for x in (key, value))
    logits = query.double() @ site.ungrouped(keys).mT * site.scaling
    if softcap is not None:
        logits = (logits / softcap).tanh() * softcap
    logits = logits.masked_fill(~seen, float("-inf"))
    if site.sinks is not None:
        sinks = site.sinks.double().view(1, -1, 1, 1).expand(*logits.shape[:3], 1)
        logits = torch.cat((logits, sinks), dim=-1)
    weights = logits.softmax(dim=-1)[..., : key.shape[2]]
    return (weights @ site.ungrouped(values)).to(query.dtype).transpose(1, 2).contiguous(), None


# ---- trying --------------------------------------------------------------------------------------


def reach(model: PreTrainedModel, variant: Variant, kept: Kept) -> dict[str, Any]:
    """What `variant` changes on `model` while it is open.

    Returns:
        `hooks`: attention modules with a hook more; `forwards`: with another forward; `registry`:
        whether attention functions are found another way.
    """
    sites = attention_sites(model)

    def look() -> dict[str, list[Any]]:
        modules = [site.module for site in sites]
        interfaces = [site.signature.interface for site in sites]
        return {
            "hooks": [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in modules],
            "forwards": [vars(module).get("forward") for module in modules],
            "registry": [vars(interface).get("get_interface") for interface in interfaces],
        }

    before = look()
    with variant.open(model, kept):
        after = look()
    changed = {
        name: sum(old is not new for old, new in zip(before[name], after[name], strict=True))
        for name in before
    }
    return changed | {"registry": changed["registry"] > 0}


def trials(
    model: PreTrainedModel,
    *,
    lengths: Sequence[int] = (96, 80),
    advance: Callable[[], None] = lambda: None,
) -> pd.DataFrame:
    """Try every variant with every attention implementation.

    A padded batch is pruned to half by `AdaKVPress(KnormPress)`; then comes a question, short or
    with more tokens than a head has channels, and two decode steps.

    Args:
        model: left as it was.
        lengths: tokens of the rows of the batch.
        advance: called after each trial.

    Returns:
        Columns `question` (tokens), `condition`, `implementation`, `outcome`, `difference` (largest
        of all logits), `why` (of an error), and those of `reach`.
    """
    own, sites = model.config._attn_implementation, attention_sites(model)
    short_and_long = 3, max(site.head_dim for site in sites) + 4
    rows = []
    try:
        for n_question in short_and_long:
            inputs = Inputs.random(model.config.vocab_size, lengths, question=n_question)
            trial = _Trial(model, inputs)
            for implementation in IMPLEMENTATIONS:
                why_not = trial.why_not(implementation)
                for variant in VARIANTS.values():
                    rows.append(trial.outcome(variant, implementation, why_not))
                    advance()
    finally:
        model.set_attn_implementation(own)
    return pd.DataFrame(rows)


N_TRIALS = 2 * len(IMPLEMENTATIONS) * len(VARIANTS)
"""How often `trials` calls `advance`."""


class _Trial:
    """One batch, pruned once and decoded in many ways."""

    def __init__(self, model: PreTrainedModel, inputs: Inputs) -> None:
        model.set_attn_implementation("eager")  # which every family has
        self.model = model
        context, *self.following = list(inputs.forwards(model.device))
        self.n_question = self.following[0]["input_ids"].shape[1]
        press = hooks_impl.AdaKVPress(hooks_impl.KnormPress(0.5))
        self.full, self.kept = prefill(model, press, **context)
        self.expected = self.logits(Variant("reference", reference, frees=False))
        self.rounding = torch.finfo(model.dtype).eps ** 0.5 * float(self.expected.abs().max())
        self.plain = self.logits(NOTHING)

    @torch.no_grad()
    def logits(self, variant: Variant) -> Tensor:
        """Of all tokens after the context, `(B, n, vocabulary)` float64."""
        cache = variant.cache(deepcopy(self.full), self.kept)
        with variant.open(self.model, self.kept), _flex_uncompiled():
            outputs = [
                self.model(**arguments, past_key_values=cache).logits.double()
                for arguments in self.following
            ]
        return torch.cat(outputs, dim=1)

    def why_not(self, implementation: str) -> str:
        """Why the model cannot decode with an implementation, whatever is evicted; "" if it can."""
        try:
            self.model.set_attn_implementation(implementation)
            difference = float((self.logits(NOTHING) - self.plain).abs().max())
        except Exception as error:
            return in_one_line(error)
        if difference <= self.rounding:
            return ""
        return f"with nothing evicted its logits are {difference:.2g} off those of eager attention"

    def outcome(self, variant: Variant, implementation: str, why_not: str) -> dict[str, Any]:
        """What comes of `variant` with an attention implementation: a row of the table."""
        row = {"question": self.n_question, "condition": variant.name}
        row |= {"implementation": implementation, "outcome": MISSING, "difference": float("nan")}
        row |= {"why": why_not, "hooks": 0, "forwards": 0, "registry": False}
        if why_not:
            return row
        row["outcome"] = ERROR
        try:  # whatever the libraries raise is the result
            row |= reach(self.model, variant, self.kept)
            logits = self.logits(variant)
        except Exception as error:
            return row | {"why": in_one_line(error)}
        difference = float((logits - self.expected).abs().max())
        outcome = SAME if difference <= self.rounding else OTHER
        return row | {"outcome": outcome, "difference": difference}


@contextmanager
def _flex_uncompiled() -> Iterator[None]:
    """Run flex attention as it is: on a CPU its kernel takes half a minute to compile."""
    with torch.compiler.set_stance("force_eager"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "flex_attention called without torch.compile")
        yield
