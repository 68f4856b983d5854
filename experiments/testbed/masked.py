"""The masked reference: the effect of an eviction, measured on the full cache with a mask.

It shares nothing with the presses except which tokens they kept. Masking the evicted tokens of all
heads has to reproduce the logits of the pruned cache. Masking those of a single head isolates the
effect of that head's eviction.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from copy import deepcopy
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache, PreTrainedModel

from experiments import UserError
from experiments.testbed.variants import Kept, kept_in, mask_by_hook
from press_core import AttentionSite, PressError, attention_sites
from press_core.scope import InstalledPress


class Sample(NamedTuple):
    """Token ids of a context, `(B, S)`, and of its question, `(B, q)`."""

    context: Tensor
    question: Tensor


class Read(NamedTuple):
    """The results of a forward over a question.

    Attributes:
        logits: `(B, vocabulary)`, after the last token.
        outputs: by site, the attention output before the output projection, `(B, q, H, d)`.
        weights: by site, the attention weights that eager attention returns, `(B, H, q, keys)`.
    """

    logits: Tensor
    outputs: list[Tensor]
    weights: list[Tensor]


class Reader:
    """Runs the question of one sample on caches of one model with eager attention.

    Attributes:
        sites: attention modules, in the order of `Read.outputs` and `Read.weights`.
        full: the results of the question on the full cache.
    """

    @torch.inference_mode()
    def __init__(self, model: PreTrainedModel, sample: Sample) -> None:
        self.model, self.sites = model, attention_sites(model)
        self.context, self.question = (ids.to(model.device) for ids in sample)
        self._cache = self._prefilled()
        self.full = self.masked({})

    @torch.inference_mode()
    def masked(self, kept: Kept) -> Read:
        """Run the question on the full cache with each head's evicted tokens masked."""
        with mask_by_hook(self.model, kept):
            return self._read(deepcopy(self._cache))

    @torch.inference_mode()
    def pruned(self, press: InstalledPress) -> tuple[Read, Kept]:
        """Run the question on the cache that a press leaves, inside its scope.

        Returns:
            The results, and the tokens that the press kept.

        Raises:
            PressError: if the press does not support the model, or does not report kept positions.
        """
        with torch.random.fork_rng(devices=[]), press(self.model):
            torch.default_generator.manual_seed(0)
            cache = self._prefilled()
            kept = kept_in(cache)
            return self._read(cache), kept

    def _prefilled(self) -> DynamicCache:
        cache = DynamicCache(config=self.model.config)
        self.model(input_ids=self.context, past_key_values=cache, logits_to_keep=1)
        return cache

    def _read(self, cache: Cache) -> Read:
        outputs: list[Tensor] = []
        weights: list[Tensor] = []

        with ExitStack() as hooks:
            for site in self.sites:
                before = _projection(site).register_forward_pre_hook
                hooks.enter_context(before(lambda _, args: outputs.append(args[0].clone())))
                after = site.module.register_forward_hook
                hooks.enter_context(after(lambda _, args, output: weights.append(output[1])))
            logits = self.model(input_ids=self.question, past_key_values=cache).logits
        heads = (site.num_heads for site in self.sites)
        by_head = [o.unflatten(-1, (n, -1)) for n, o in zip(heads, outputs, strict=True)]
        return Read(logits[:, -1], by_head, weights)


def _projection(site: AttentionSite) -> nn.Module:
    for name in ("o_proj", "dense", "out_proj", "c_proj"):
        child = getattr(site.module, name, None)
        if isinstance(child, nn.Module):
            return child
    raise UserError(
        f"{site.name} ({type(site.module).__name__}) has no output projection called o_proj, "
        "dense, out_proj or c_proj, so the outputs of its heads cannot be read"
    )


def by_kv_head(site: AttentionSite, of_queries: Tensor) -> Tensor:
    """Mean over rows, queries and the query heads of a group: from `(B, H, q)` to `(H_kv,)`."""
    return site.grouped(of_queries).unflatten(1, (site.num_kv_heads, -1)).mean((0, 2, 3))


def harm(reader: Reader, pair: Sequence[InstalledPress]) -> tuple[list[dict[str, Any]], Any]:
    """The errors that an eviction causes in one sample: a row per layer and head, one for logits.

    What a mask does not explain is scaled to the precision of float32, for one limit to fit all.

    Raises:
        PressError: if the press evicts nothing, or does not report kept positions.
    """
    (pruned, kept), (patched, _) = map(reader.pruned, pair)
    if all(bool(kept[site.layer_idx].all()) for site in reader.sites):
        raise PressError("it evicts no tokens in the prefill")
    full, logits = reader.full.logits, pruned.logits
    precision = (torch.finfo(torch.float32).eps / torch.finfo(logits.dtype).eps) ** 0.5
    bits = zip((logits, *pruned.outputs), (patched.logits, *patched.outputs), strict=True)
    return list(_harm_by_heads(reader, kept)), {
        "logit_error": float((logits - full).abs().max()),
        "same_token": float((logits.argmax(-1) == full.argmax(-1)).float().mean()),
        "unexplained": float((logits - reader.masked(kept).logits).abs().max()) * precision,
        "equal": all(torch.equal(*both) for both in bits),
    }


def _harm_by_heads(reader: Reader, kept: Kept) -> Iterator[dict[str, Any]]:
    """For each head, what it evicts and the errors if it is the only head that evicts."""
    for index, site in enumerate(reader.sites):
        heads, full = kept[site.layer_idx], reader.full.outputs[index]
        of_queries = site.ungrouped(heads.repeat_interleave(site.num_heads // heads.shape[1], 1))
        weights = reader.full.weights[index][..., : heads.shape[-1]]
        mass_lost = by_kv_head(site, (weights * ~of_queries.unsqueeze(2)).sum(-1))
        for head in range(site.num_kv_heads):
            only = torch.ones_like(heads)
            only[:, head] = heads[:, head]
            alone = reader.masked({site.layer_idx: only})
            off = (alone.outputs[index] - full).norm(dim=-1) / full.norm(dim=-1).clamp(min=1e-12)
            yield {
                "layer": site.layer_idx,
                "head": head,
                "kept": float(heads[:, head].float().mean()),
                "mass_lost": float(mass_lost[head]),
                "alone": float(by_kv_head(site, off.transpose(1, 2))[head]),
                "logit_error": float((alone.logits - reader.full.logits).abs().max()),
            }
