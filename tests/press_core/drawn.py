"""A prefill made of drawn numbers, for formulas against slow references."""

import itertools
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any

import torch
from hypothesis import strategies as st
from torch import nn

from press_core import AttentionCall, attention_sites
from press_core.learned.fast_kvzip import KVzipGates
from press_core.learned.kvzap import KVzapRegressor
from press_core.learned.lukv import BudgetCurves
from press_core.learned.measured import ExpectedAttentionStats, HeadScores, QFilters
from press_core.learned.restorekv import RestoreAdapter
from press_core.model.sites import Softmax
from press_core.observed import Positions, Query
from tests.support import build, table_beside

TABLES = table_beside(__file__, "tables")
BATCH, HEADS, KV_HEADS, GROUP, DIM, WIDTH, LAYERS = 2, 4, 2, 2, 8, 32, 3
KV = list(itertools.product(range(BATCH), range(KV_HEADS)))
"""Each KV head of each row."""


def drawn(*shape, seed=0):
    """Normal numbers in float64."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


@cache
def site(layer=0):
    """An attention module of a small Llama."""
    model = build("llama", num_layers=LAYERS, num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=DIM)
    return attention_sites(model)[layer]


def with_sinks():
    """With attention sinks of its own."""
    module = nn.Module()
    module.sinks = nn.Parameter(torch.tensor([0.5, -1.0, 2.0, 0.0]), requires_grad=False)
    return replace(site(), module=module)


SITES = {
    "plain": site,
    "scaled": lambda: replace(site(), softmax=Softmax(0.11)),
    "softcapped": lambda: replace(site(), softmax=Softmax(scaling=0.9, softcap=0.7)),
    "with sinks": with_sinks,
}


def called(query=None, query_is_rotated=False, **fields):
    """A call with a query `(B, H, q, d)`, as it is before RoPE or after it."""
    names = "position_embeddings", "position_ids", "rotary_positions"
    embeddings, ids, rotary = (fields.pop(name, None) for name in names)
    query = None if query is None else Query(query, query_is_rotated)
    return AttentionCall(query=query, at=Positions(embeddings, ids, rotary=rotary), **fields)


def drawn_call(length, seed=0, batch=BATCH, dtype=torch.float64, scale=1.0, **fields):
    """A prefill; the query is given as it is before RoPE, unless `query_is_rotated` is among them.

    Args:
        fields: what is not drawn, see `called`.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        states = torch.randn(batch, *shape, generator=generator, dtype=torch.float64)
        return (scale * states).to(dtype)

    positions = torch.arange(length)[None]
    rotary = site().rotary
    known = {
        "site": site(),
        "hidden_states": draw(length, WIDTH),
        "keys": draw(KV_HEADS, length, DIM),
        "values": draw(KV_HEADS, length, DIM),
        "query": draw(HEADS, length, DIM),
        "position_embeddings": rotary.embeddings(torch.zeros(1, dtype=dtype), positions),
        "position_ids": positions,
    }
    return called(**{**known, **fields})


def of_family(recorded, **fields):
    """The call of what `record` has recorded."""
    names = "site", "hidden_states", "keys", "values", "position_embeddings", "query"
    known = {name: getattr(recorded, name) for name in names}
    return called(**{**known, "query_is_rotated": True, **fields})


def rotated(x, position):
    """RoPE of one state `(d,)`, channels paired by halves, theta 10,000."""
    half = len(x) // 2
    turned = torch.empty_like(x)
    for i in range(half):
        angle = torch.tensor(position * 10000.0 ** (-2 * i / len(x)), dtype=torch.float64)
        a, b = x[i], x[half + i]
        turned[i] = a * angle.cos() - b * angle.sin()
        turned[half + i] = a * angle.sin() + b * angle.cos()
    return turned


def attention_row(call, row, head, token):
    """What the query of `token` puts on each of the keys up to its own, `(token + 1,)`."""
    assert not call.query.is_rotated
    query = rotated(call.query.states[row, head, token], token)
    keys = call.keys[row, head // GROUP, : token + 1]
    logits = torch.stack([key @ query for key in keys]) * call.site.softmax.scaling
    cap = call.site.softmax.softcap
    if cap is not None:
        logits = cap * (logits / cap).tanh()
    weights = (logits - logits.max()).exp()
    beside = 0 if call.site.sinks is None else (call.site.sinks[head] - logits.max()).exp()
    return weights / (weights.sum() + beside)


# ---- what presses have learned -------------------------------------------------------------------


def fitted(kind, *names, **sizes):
    """Something learned, of drawn numbers, about the model of `site`.

    Args:
        names: the tensors that it has; none: all of them.
        sizes: others than those of the model.
    """
    model = {"layers": LAYERS, "heads": HEADS, "kv_heads": KV_HEADS, "head_dim": DIM}
    known = {**model, "hidden_size": WIDTH, "width": 5, **sizes}
    dims = {field.name: field.metadata["dims"].split() for field in fields(kind)}
    shapes = {name: dims[name] for name in names or dims}
    drawn_with = enumerate(shapes.items())
    return kind(**{n: drawn(*[known[x] for x in of], seed=seed) for seed, (n, of) in drawn_with})


def learned(layers, heads, kv_heads, head_dim, hidden_size):
    """What presses might have learned about a model of these sizes, by names in capitals."""
    sizes = {"layers": layers, "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
    sizes["hidden_size"] = hidden_size
    stats = fitted(ExpectedAttentionStats, **sizes)
    gates = fitted(KVzipGates, rank=16, n_base=16, **sizes)
    per_cent, root = torch.arange(1, 100).view(-1, 1, 1) / 100, stats.covariance / head_dim
    return {
        "FILTERS": fitted(QFilters, **sizes),
        "STATS": replace(stats, covariance=root @ root.mT),
        "LINEAR": fitted(KVzapRegressor, "weight", "bias", **sizes | {"width": hidden_size}),
        "MLP": fitted(KVzapRegressor, **sizes | {"width": 24}),
        "HEAD_SCORES": fitted(HeadScores, **sizes),
        "GATES": replace(
            gates, query_norm=1 + gates.query_norm / 4, key_norm=1 - gates.key_norm / 4
        ),
        "CURVES": BudgetCurves(
            per_cent + drawn(99, layers, kv_heads).sigmoid() * (1 - per_cent) / 3
        ),
    }


ADAPTED = [f"layers.{i}.self_attn.q_proj" for i in range(2)]
FITS = {
    "filters": fitted(QFilters),
    "stats": fitted(ExpectedAttentionStats),
    "linear": fitted(KVzapRegressor, "weight", "bias", width=WIDTH),
    "mlp": fitted(KVzapRegressor),
    "gates": fitted(KVzipGates, rank=3, n_base=5),
    "curves": BudgetCurves(drawn(99, LAYERS, KV_HEADS).sigmoid()),
    "head scores": fitted(HeadScores),
    "adapter": RestoreAdapter(
        drawn(8, WIDTH),
        dict.fromkeys(ADAPTED, drawn(3, WIDTH)),  # one tensor for both
        {name: drawn(WIDTH, 3) for name in ADAPTED},
    ),
}
"""One of everything that presses learn."""


def as_published(fit):
    """In the layout of nthngdy/*_qfilt, alessiodevoto/exp_att_stats_* or KVzap-*.

    Gates in that of the published pickle, which `docs/learned.md` turns into safetensors.
    """
    if isinstance(fit, QFilters):
        return {"q_filters": fit.directions}
    if isinstance(fit, ExpectedAttentionStats):
        return {"query_mean": fit.mean, "query_cov": fit.covariance}
    if isinstance(fit, KVzipGates):
        parts = {
            "q_proj.weight": fit.query_weight.flatten(1, 2),
            "q_proj.bias": fit.query_bias.flatten(1),
            "k_proj.weight": fit.key_weight.flatten(1, 2),
            "q_norm.weight": fit.query_norm,
            "k_norm.weight": fit.key_norm,
            "k_base": fit.base.unsqueeze(2),
            "b": fit.bias.view(*fit.base.shape[:2], 1, -1),
        }
    elif fit.hidden_weight is None:
        parts = fit.tensors
    else:
        parts = {"0.weight": fit.hidden_weight, "0.bias": fit.hidden_bias}
        parts |= {"2.weight": fit.weight, "2.bias": fit.bias}
    stacked = parts.items()
    return {f"layers.{i}.{name}": x.contiguous() for name, of in stacked for i, x in enumerate(of)}


PUBLISHED = {
    name: as_published(FITS[name]) for name in ("filters", "stats", "linear", "mlp", "gates")
}


@dataclass
class Prepared:
    """Stands for an open scope whose press has prepared `known`."""

    known: Any

    def prepared(self, press):
        return self.known


WORDS = st.text(max_size=5) | st.sampled_from(["tensor", "of", "dtype"])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=5,
)
"""What a header might hold."""
