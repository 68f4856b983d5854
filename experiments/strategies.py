"""Hypothesis strategies for models, inputs and presses, to build your own tests from.

```python
@given(strategies.press_pairs("SnapKVPress"), strategies.inputs(my_model.config.vocab_size))
def test_both_mechanisms_agree_on_my_model(presses, inputs):
    assert compare(my_model, presses.hook, presses.patch, inputs) is None

my_pairs = strategies.pairs_of(MyHookPress, MyPatchPress, compression_ratio=strategies.ratios())

@given(strategies.cases(my_pairs))
def test_my_press_is_the_same_twice(case):
    assert case.difference() is None
```

Drawn values are small specifications, so a failing case prints as a few readable lines.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from hypothesis import assume
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy
from transformers import PreTrainedModel

import hooks_impl
from experiments import data_of
from experiments.testbed.compare import Difference, Inputs, PressPair, compare, of_mechanism, pair
from experiments.testbed.families import (
    FAMILIES,
    HYBRID,
    NO_GQA,
    NO_ROPE,
    VOCABULARY,
    build,
    supported_implementations,
)
from experiments.testbed.recipes import DELIMITER, MECHANISMS, PROMPTS, fitted_pair, recipe
from press_core import Evicts, Needs
from press_core.replay.rows import ReplayPress
from press_core.scope import InstalledPress

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MAX_LENGTH = 80
"""Longest context that is drawn by default, in tokens."""


class Heads(NamedTuple):
    """Attention dimensions of a model."""

    num_heads: int
    num_kv_heads: int
    head_dim: int


HEADS = Heads(4, 4, 16), Heads(4, 2, 16), Heads(8, 2, 8), Heads(6, 3, 16), Heads(4, 1, 32)
"""One, two and four query heads per KV head."""


class ModelSpec(NamedTuple):
    """A small model with seeded random weights; equal specs share one model.

    Attributes:
        num_layers: attention layers; hybrid families get as many sliding-window layers in between.
        heads: families without GQA use only `num_heads` and `head_dim`.
    """

    family: str
    num_layers: int
    heads: Heads
    dtype: torch.dtype
    attn_implementation: str
    device: str = "cpu"

    def build(self) -> PreTrainedModel:
        """The model, which equal specs share: undo every change to it."""
        return _build(self)


@cache
def _build(spec: ModelSpec) -> PreTrainedModel:
    family, num_layers, heads, dtype, implementation, device = spec
    kinds: dict[str, Any] = {"dtype": dtype, "attn_implementation": implementation}
    return build(family, num_layers=num_layers, **kinds, **heads._asdict()).to(torch.device(device))


class Case(NamedTuple):
    """One comparison of both mechanisms.

    Attributes:
        presses: one pair per scope, the outermost first.
    """

    model: ModelSpec
    presses: tuple[PressPair, ...]
    inputs: Inputs

    def difference(self) -> Difference | None:
        """The first difference between the mechanisms, or None."""
        hooks, patches = zip(*self.presses, strict=True)
        return compare(self.model.build(), hooks, patches, self.inputs)


# ---- models --------------------------------------------------------------------------------------


@st.composite
def model_specs(
    draw: DrawFn,
    families: Sequence[str] = FAMILIES,
    heads: Sequence[Heads] = HEADS,
    dtypes: Sequence[torch.dtype] = DTYPES,
    implementations: Sequence[str] = ("eager", "sdpa"),
    max_layers: int = 2,
    device: str = "cpu",
) -> ModelSpec:
    """Models of `families`, each with an attention implementation that its family supports."""
    offered = {
        family: [name for name in supported_implementations(family) if name in implementations]
        for family in families
    }
    family = draw(st.sampled_from([family for family in families if offered[family]]))
    shapes = [h for h in heads if h.num_heads == h.num_kv_heads or family not in NO_GQA]
    return ModelSpec(
        family,
        draw(st.integers(1, max_layers)),
        draw(st.sampled_from(shapes or heads)),
        draw(st.sampled_from(dtypes)),
        draw(st.sampled_from(offered[family])),
        device,
    )


# ---- inputs --------------------------------------------------------------------------------------


def lengths(max_length: int = MAX_LENGTH, also: Sequence[int] = ()) -> SearchStrategy[int]:
    """Lengths of a context, in tokens; short ones and those in `also` are more frequent."""
    special = st.sampled_from([n for n in (1, 2, *also) if n <= max_length])
    return st.one_of(st.integers(1, max_length), st.integers(1, min(16, max_length)), special)


@st.composite
def inputs(
    draw: DrawFn,
    vocab_size: int = VOCABULARY,
    max_length: int = MAX_LENGTH,
    also: Sequence[int] = (),
    max_batch: int = 3,
    padded: bool | None = None,
    distinct: bool = False,
) -> Inputs:
    """Random tokens: a context, then a question of several tokens, decode steps, both or neither.

    Args:
        also: lengths to draw often, such as the number of heads.
        padded: whether rows differ in length; None: both are drawn.
        distinct: no token twice within a row, so that equal tokens cause no tied scores.
    """
    longest = draw(lengths(max_length, also).filter(lambda length: length > 1 or not padded))
    if padded is None:
        padded = longest > 1 and max_batch > 1 and draw(st.booleans())
    rows = [longest]
    if padded:
        shorter = st.integers(1, max(1, longest - 1))
        rows += draw(st.lists(shorter, min_size=1, max_size=max_batch - 1))
    else:
        rows *= draw(st.integers(1, max_batch))
    return draw(
        st.builds(
            Inputs.random,
            st.just(vocab_size),
            lengths=st.permutations(rows).map(tuple),
            question=st.integers(0, 5),
            steps=st.integers(0, 2),
            seed=st.integers(0, 2**16),
            distinct=st.just(distinct),
        )
    )


# ---- presses -------------------------------------------------------------------------------------


def ratios() -> SearchStrategy[float]:
    """Compression ratios in [0, 1); common ones are more frequent."""
    common = st.sampled_from([0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99])
    return st.one_of(common, st.floats(0, 1, exclude_max=True))


_DATA = data_of(__file__)

SCORERS: tuple[str, ...] = tuple(_DATA["scorers"])
"""Presses that wrappers are drawn with: one or two for each kind of input that a score reads."""

_EVEN, _WHILE_DECODING = _DATA["even"], _DATA["while_decoding"]

FIELDS: dict[str, SearchStrategy[Any]] = {
    **dict.fromkeys(_DATA["ratios"], ratios()),
    **dict.fromkeys(_DATA["booleans"], st.booleans()),
    **{name: st.integers(*ends) for name, ends in _DATA["integers"].items()},
    **{name: st.floats(*ends) for name, ends in _DATA["floats"].items()},
    **{name: st.sampled_from(values) for name, values in _DATA["values"].items()},
    **dict.fromkeys(("press", "base_press"), st.deferred(lambda: press_pairs(*SCORERS))),
    "compression_ratios": st.lists(ratios(), min_size=1, max_size=4),
    "presses": st.deferred(lambda: st.lists(press_pairs(*_EVEN), min_size=1, max_size=3)),
    "prefilling_press": st.deferred(lambda: press_pairs(*_EVEN)),
    "decoding_press": st.deferred(lambda: press_pairs(*_WHILE_DECODING)),
    "prompts": st.just(PROMPTS),
    "delimiter_token_id": st.just(DELIMITER),
}
"""Hyperparameters by field name, small enough for short contexts; plain ones are in the YAML file.

Values that a press does not allow are filtered out; fields that are not listed keep their defaults.
"""

_OWN_FIELDS: dict[str, dict[str, SearchStrategy[Any]]] = {
    "CriticalKVPress": {
        "press": st.deferred(lambda: press_pairs("KnormPress", "SnapKVPress", "TOVAPress"))
    },
    "DMSPress": {
        "press": st.deferred(lambda: press_pairs("KnormPress", "RandomPress", "KVzapPress"))
    },
    "EntropyGatedChunkKVPress": {
        "chunk_length": st.integers(7, 24),
        "low_entropy_chunk_length": st.integers(1, 6),
    },
    "ExpectedAttentionStatsPress": {"n_sink": st.just(4)},
    "FinchPress": {"chunk_length": st.none() | st.integers(1, 40)},
}
"""Fields of single presses that override `FIELDS`."""


def pairs_of(
    hook: Callable[..., InstalledPress],
    patch: Callable[..., InstalledPress],
    **fields: SearchStrategy[Any],
) -> SearchStrategy[PressPair]:
    """Pairs of instances of two press classes, both with the same drawn `fields`."""
    drawn = st.fixed_dictionaries(fields)
    return drawn.map(lambda values: PressPair(hook(**values), patch(**values)))


def press_pairs(*names: str) -> SearchStrategy[PressPair]:
    """Pairs of the registered presses called `names` (none: all), with drawn hyperparameters.

    Raises:
        KeyError: if a name is not known.
    """
    return st.one_of([_drawn_pairs(name) for name in names or sorted(hooks_impl.PRESSES)])


def _drawn_pairs(name: str) -> SearchStrategy[PressPair]:
    known = FIELDS | _OWN_FIELDS.get(name, {})
    drawn = {
        field.name: known[field.name].filter(partial(_is_taken, field.metadata))
        for field in fields(hooks_impl.PRESSES[name])
        if field.init and field.name in known
    }
    return st.builds(pair, st.just(name), **drawn)


def _is_taken(declared: Mapping[str, Any], value: Any) -> bool:
    """Whether a field with this metadata allows a value; of a pair the hook press is checked."""
    return bool(declared.get("holds", lambda value: True)(of_mechanism(value, 0)))


def nestable_pairs() -> SearchStrategy[PressPair]:
    """Pairs of presses that may be nested, in any order."""
    alone = {*_DATA["alone"], *_WHILE_DECODING}
    return press_pairs(
        *(
            name
            for name in sorted(hooks_impl.PRESSES)
            if name not in alone and recipe(MECHANISMS["hook"], name, 0.5).evicts is Evicts.TOKENS
        )
    )


# ---- all together --------------------------------------------------------------------------------


@st.composite
def cases(
    draw: DrawFn,
    presses: SearchStrategy[PressPair] | None = None,
    models: SearchStrategy[ModelSpec] | None = None,
    max_length: int = MAX_LENGTH,
    scopes: tuple[int, int] = (1, 1),
) -> Case:
    """Models with presses that fit them, and inputs.

    Args:
        presses: drawn once per scope; None: all registered ones.
        models: None: all families.
        scopes: smallest and largest number of nested scopes.
    """
    spec = draw(model_specs() if models is None else models)
    pairs = press_pairs() if presses is None else presses
    stack = st.lists(
        pairs.filter(lambda drawn: fits(drawn, spec)), min_size=scopes[0], max_size=scopes[1]
    )
    also = (spec.heads.num_heads, spec.heads.num_kv_heads)
    drawn = [fitted_pair(pair, spec.build()) for pair in draw(stack)]
    given = draw(inputs(max_length=max_length, also=also))
    if any(isinstance(pair.hook, hooks_impl.FinchPress) for pair in drawn):
        assume(given.context.shape[1] > 1)
        given = given.with_delimiter(DELIMITER, draw(st.integers(1, 12)))
    if any(isinstance(pair.hook, ReplayPress) for pair in drawn):
        assume(spec.family not in HYBRID or given.attention_mask is None)  # refused
    return Case(spec, tuple(drawn), given)


def fits(presses: PressPair, spec: ModelSpec) -> bool:
    """Whether the model has the rotary embedding, or the gradients, that a press needs."""
    no_gradient = spec.attn_implementation == "flex_attention" and spec.device == "cpu"
    if isinstance(presses.hook, hooks_impl.KVgradPress) and no_gradient:
        return False
    return not (Needs.ROPE in presses.hook.needs and spec.family in NO_ROPE)
