"""One press on one small model: what every layer holds afterwards, whoever wrote the press.

Nothing that a press says about itself is believed. The keys and values that the model makes are
recorded on their way into the cache; a token is held where its value is still there, bit for bit,
or its key, where values were merged.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from experiments.testbed.families import build
from press_core import RaggedLayer, attention_sites

VOCABULARY = 1024

Press = Any
Run = Callable[[PreTrainedModel, Press, DynamicCache], None]
"""Runs a model once with a press, filling the cache."""


class RecordingCache(DynamicCache):
    """A cache that remembers all it was ever given, whatever happens to it.

    Attributes:
        made: per layer, keys and values `(B, H_kv, q, d)`, forward by forward.
    """

    def __init__(self):
        super().__init__()
        self.made = defaultdict(list)

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        self.made[layer_idx].append((key_states, value_states))
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)


class Head(NamedTuple):
    """What one KV head of one row of the batch holds.

    Attributes:
        positions: `(n,)` int64, in the sequence, in the order in which they lie in the cache.
        keys, values: `(n, d)`, in that order.
    """

    positions: Tensor
    keys: Tensor
    values: Tensor

    def in_time(self):
        """The same in temporal order."""
        order = self.positions.argsort()
        return Head(self.positions[order], self.keys[order], self.values[order])

    @property
    def kept(self):
        """Positions in temporal order."""
        return self.positions.sort().values.tolist()


class Setting(NamedTuple):
    """A small random model, as arguments of `build`."""

    family: str = "llama"
    num_layers: int = 3
    dtype: torch.dtype = torch.float64
    attn_implementation: str = "sdpa"

    def __str__(self):
        parts = [self.family, str(self.dtype).removeprefix("torch.")]
        if self.attn_implementation != "sdpa":
            parts.append(self.attn_implementation)
        if self.num_layers == 1:
            parts.append("one layer")
        return ", ".join(parts)


@cache
def model_for(whose, setting):
    """The same weights for everyone, but nobody's model is touched by anybody else."""
    model = build(**setting._asdict(), seed=1)
    embedding = model.resize_token_embeddings(VOCABULARY, mean_resizing=False)
    torch.nn.init.normal_(embedding.weight, generator=torch.Generator().manual_seed(1))
    return model


def token_ids(length, batch=1, seed=0):
    """`(batch, length)` token ids, none of them twice in a row, so that no two values are equal."""
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randperm(VOCABULARY - 3, generator=generator)[:length] + 3 for _ in range(batch)]
    return torch.stack(rows)


@dataclass(frozen=True)
class Context:
    """A prefill of `length` tokens, and `then` more tokens one by one."""

    length: int
    batch: int = 1
    then: int = 0

    def __call__(self, model, press, past):
        ids = token_ids(self.length + self.then, self.batch)
        with torch.no_grad(), press(model):
            model(ids[:, : self.length], past_key_values=past)
            for i in range(self.length, ids.shape[1]):
                # kvpress leaves it to its users to say where a token stands.
                model(ids[:, i : i + 1], past_key_values=past, position_ids=torch.tensor([[i]]))

    def __str__(self):
        rows = f"{self.batch} rows of " if self.batch > 1 else ""
        return f"{rows}{self.length}{f' + {self.then}' if self.then else ''} tokens"


def held_after(run, press, model):
    """What the layers hold after `run`, with a press of this repository or of kvpress."""
    past = RecordingCache()
    for site in attention_sites(model):
        site.module.__dict__.pop("masked_key_indices", None)  # kvpress leaves the last run's there
    torch.manual_seed(0)
    run(model, press, past)
    return held(past, model)


def held(past, model):
    """What the layers of `past` hold: per layer, the heads of all rows, row by row."""
    made = {
        index: [torch.cat(states, dim=2) for states in zip(*forwards, strict=True)]
        for index, forwards in past.made.items()
    }
    return [
        [
            Head(_positions_of(keys, values, *(x[row, head] for x in made[index])), keys, values)
            for row, head, keys, values in _heads(past.layers[index], site.module)
        ]
        for index, site in enumerate(attention_sites(model))
    ]


def _heads(layer, module):
    """Row, KV head, keys and values `(n, d)` of each head of a layer."""
    if isinstance(layer, RaggedLayer):
        for index in range(len(layer.counts)):
            yield (*divmod(index, layer.n_heads), *layer.head(index))
        return
    batch, n_kv = layer.keys.shape[:2]
    kept = layer.values.any(dim=-1)  # shorter rows have empty slots on their left
    masked = getattr(module, "masked_key_indices", None)  # how kvpress lets heads differ
    if masked is not None:
        kept[tuple(masked)] = False
    for row in range(batch):
        for head in range(n_kv):
            mine = kept[row, head]
            yield row, head, layer.keys[row, head][mine], layer.values[row, head][mine]


def _positions_of(keys, values, made_keys, made_values):
    """Which of the tokens that were made the held ones `(n, d)` are, `(n,)` int64."""
    found = _found(values, made_values)
    if found is None and keys.shape[-1] == made_keys.shape[-1]:
        found = _found(keys, made_keys)
    assert found is not None, "the cache holds tokens that were never made"
    return found


def _found(states, made):
    """Where `states` `(n, d)` are among those `made` `(S, d)`, `(n,)` int64; None: not there.

    Of equal ones the first, which are the context's where it was replayed.
    """
    known, order = made[:, 0].sort(stable=True)
    first = torch.searchsorted(known, states[:, 0].contiguous()).clamp(max=len(made) - 1)
    return order[first] if torch.equal(made[order[first]], states) else None
