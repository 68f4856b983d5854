"""Slow references: what presses should keep, in loops; a model whose heads see what they keep."""

from contextlib import ExitStack

import torch
from transformers import DynamicCache

from press_core import attention_sites
from press_core.forward import Arguments
from tests.support import filled, watched

INF = float("inf")


def best(scores, n):
    """The `n` best, of equal ones the latest."""
    ranked = sorted(range(len(scores)), key=lambda i: (scores[i], i), reverse=True)
    return sorted(ranked[:n])


def norms(keys):
    """KnormPress: minus the norm of each key `(S, d)`."""
    return [-(sum(x * x for x in key) ** 0.5) for key in keys.tolist()]


def cosines(keys):
    """KeyDiffPress: minus the cosine of each key `(S, d)` and the mean of unit keys."""
    unit = keys / keys.norm(dim=-1, keepdim=True)
    mean = unit.mean(dim=0)
    return [-float(key @ mean / mean.norm()) for key in unit]


def votes(queries, keys):
    """Mean attention on each key of the last queries `(G, w, d)`, d = 16."""
    total, rows = torch.zeros(len(keys), dtype=keys.dtype), queries.shape[1]
    for member in queries:
        for index, query in enumerate(member):
            seen = len(keys) - rows + index + 1
            total[:seen] += (keys[:seen] @ query * 0.25).softmax(dim=0)
    return (total / (len(queries) * rows)).tolist()


def snapkv(queries, keys, window, kernel=5):
    """SnapKVPress, from queries `(G, n, d)` that end with those of the window."""
    before, half = len(keys) - window, kernel // 2
    found = votes(queries[:, -window:], keys)[:before]
    pooled = [sum(found[max(0, j - half) : j + half + 1]) / kernel for j in range(before)]
    return pooled + [INF] * window


def queries_and_keys(model, ids):
    """Per layer, query `(B, H_kv, G, S, d)` and keys `(B, H_kv, S, d)` of a prefill."""
    with watched() as seen:
        filled(model, None, ids)
    found = []
    for layer in sorted(seen):
        ((query, keys),) = seen[layer]
        found.append((query.unflatten(1, (keys.shape[1], -1)), keys))
    return found


def choices(states, choose):
    """What `choose` says of the states of each row and head, given tensors `(B, H_kv, ...)`."""
    of_rows = zip(*states, strict=True)
    return [[choose(*of_head) for of_head in zip(*row, strict=True)] for row in of_rows]


class Whole:
    """A model with a plain cache, of which each head is shown some tokens.

    Attributes:
        shown: per layer, row and KV head, which tokens of the past, by position; None: all.
    """

    def __init__(self, model):
        self.model, self.cache = model, DynamicCache(config=model.config)
        self.shown = None

    def __call__(self, ids, **inputs):
        with ExitStack() as stack:
            for site in attention_sites(self.model) if self.shown is not None else ():
                handle = site.module.register_forward_pre_hook(
                    self._masking(site), with_kwargs=True
                )
                stack.callback(handle.remove)
            return self.model(ids, past_key_values=self.cache, **inputs).logits

    def _masking(self, site):
        def hook(_, args, kwargs):
            given = Arguments(args, kwargs, site.signature.parameters)
            hidden = given.get("hidden_states")
            batch, n_new = hidden.shape[:2]
            past = self.cache.layers[site.layer_idx].get_seq_length()
            mask = torch.full((batch, site.num_heads, n_new, past + n_new), -1e30).triu(past + 1)
            for row, heads in enumerate(self.shown[site.layer_idx]):
                of_heads = mask[row].unflatten(0, (len(heads), -1))
                for head, shown in enumerate(heads):
                    hidden_ones = sorted(set(range(past)) - set(shown))
                    of_heads[head, :, :, hidden_ones] = -1e30
            changed = given.replace(attention_mask=mask.to(hidden.dtype))
            return changed.args, changed.kwargs

        return hook
