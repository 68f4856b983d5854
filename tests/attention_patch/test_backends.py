"""Every back end against attention written out number by number."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask
from torch.nn.functional import scaled_dot_product_attention

from attention_patch.backends import BACKENDS, Query, attend, check_backend, choose
from experiments.testbed.families import build
from press_core import (
    AttentionSite,
    HyperparameterError,
    RaggedLayer,
    UnsupportedInputError,
    attention_sites,
)

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
on_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
ON_CPU = ["heads", "padded", "eager", "flex"]  # varlen has a kernel for CUDA only
backends = pytest.mark.parametrize("backend", ON_CPU)
N = 60  # tokens of the context
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 2e-2, torch.float16: 3e-3}


@pytest.fixture(autouse=True)
def _not_compiled():
    """A compiled kernel takes a C++ compiler and half a minute per shape, and adds nothing."""
    with torch.compiler.set_stance("force_eager"):
        yield


class Example(NamedTuple):
    """A layer, and the states of a call that it has been updated with.

    Attributes:
        n_queries: tokens of the call.
        n_recent: tokens after the pruning, those of the call included.
    """

    layer: RaggedLayer
    query: Tensor
    n_queries: int
    n_recent: int


def example(
    batch: int = 2,
    n_kv: int = 2,
    group: int = 2,
    n_queries: int = 1,
    n_before: int = 3,
    dim: int = 16,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    kept: Tensor | None = None,
) -> Example:
    """Heads that keep some of `N` tokens, one of them one, and got `n_before + n_queries` more."""
    generator = torch.Generator().manual_seed(n_kv + 10 * group + 100 * n_queries)

    def random(heads: int, n: int) -> Tensor:
        drawn = torch.randn(batch, heads, n, dim, generator=generator, dtype=torch.float64)
        return drawn.to(device, dtype)

    if kept is None:
        share = torch.rand(batch, n_kv, 1, generator=generator)
        kept = torch.rand(batch, n_kv, N, generator=generator) < share
        kept[0, 0], kept[0, 0, 7], kept[-1, -1] = False, True, True
    positions = torch.arange(N, device=device).view(1, 1, N)
    layer = RaggedLayer.of(random(n_kv, N), random(n_kv, N), kept.to(device), positions, N)
    for n in (n_before, n_queries, 2):
        layer.serve()
        layer.update(random(n_kv, n), random(n_kv, n))
    layer.crop(-2)  # and leaves room behind each head, with something in it
    query = random(n_kv * group, n_queries)
    return Example(layer, query, n_queries, n_before + n_queries)


def site(**fields: Any) -> AttentionSite:
    """An attention module that scales by 0.3."""
    return replace(attention_sites(build("llama"))[0], scaling=0.3, **fields)


def run(
    backend: str | None,
    case: Example,
    mask: Any = None,
    of: AttentionSite | None = None,
    **kwargs: Any,
) -> Tensor:
    """`(B, H, q, d)`, as an attention module would get it."""

    def untouched(*_: Any, **__: Any) -> Any:
        raise AssertionError("the model's own attention function was called")

    new = torch.full_like(case.query, float("nan"))  # what update returns is not to be read
    module = (of or site()).module
    output, weights = attend(
        of or site(), case.layer, backend, untouched, module, case.query, new, new, mask, **kwargs
    )
    assert weights is None
    assert output.is_contiguous()
    return output.transpose(1, 2)


def slowly(
    case: Example,
    hidden: Any = lambda row, query, recent: False,
    scaling: float = 0.3,
    softcap: float | None = None,
    sinks: list[float] | None = None,
) -> Tensor:
    """The same, one query and one key at a time.

    Args:
        hidden: whether a query of a row must not see one of the tokens after the pruning, beyond
            those that come later than itself.
    """
    batch, n_heads, n_queries, _ = case.query.shape
    output = torch.empty(*case.query.shape[:3], case.layer.values.shape[-1], dtype=torch.float64)
    group = n_heads // case.layer.n_heads
    for row, head, i in itertools.product(range(batch), range(n_heads), range(n_queries)):
        keys, values = case.layer.head(row * case.layer.n_heads + head // group)
        n_old = len(keys) - case.n_recent
        query = case.query[row, head, i].double()
        logits, seen = [], []
        for j in range(len(keys)):
            recent = j - n_old
            own = case.n_recent - n_queries + i
            if recent > own or (recent >= 0 and hidden(row, i, recent)):
                continue
            logit = float(query @ keys[j].double()) * scaling
            logits.append(logit if softcap is None else math.tanh(logit / softcap) * softcap)
            seen.append(values[j].double().cpu())
        extra = [] if sinks is None else [sinks[head]]
        most = max(logits + extra)
        weights = [math.exp(logit - most) for logit in logits]
        total = sum(weights) + sum(math.exp(logit - most) for logit in extra)
        weighted = zip(weights, seen, strict=True)
        output[row, head, i] = sum(weight / total * value for weight, value in weighted)
    return output


def assert_equal(output: Tensor, expected: Tensor) -> None:
    atol = TOLERANCE[output.dtype]
    torch.testing.assert_close(output.double().cpu(), expected, rtol=0, atol=atol)


# ---- against the slow one ------------------------------------------------------------------------

SHAPES = {
    "one KV head per head": {"group": 1, "n_kv": 3},
    "two heads per KV head": {"group": 2},
    "one KV head for all": {"group": 4, "n_kv": 1, "dim": 32},
    "one row": {"batch": 1},
}
shapes = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)


@backends
@shapes
@pytest.mark.parametrize("n_queries", [1, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_step_and_a_question(backend, shape, n_queries, dtype):
    case = example(**shape, n_queries=n_queries, dtype=dtype)
    assert_equal(run(backend, case), slowly(case))


@backends
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(backend, dtype):
    case = example(n_queries=3, dtype=dtype)
    output = run(backend, case)
    assert output.dtype == dtype
    assert_equal(output, slowly(case))


@backends
def test_the_first_tokens_after_the_pruning(backend):
    case = example(n_queries=4, n_before=0)
    assert_equal(run(backend, case), slowly(case))


@backends
def test_heads_that_keep_nothing_but_one_token_each(backend):
    kept = torch.zeros(2, 2, N, dtype=torch.bool)
    kept[:, :, 40] = True
    case = example(kept=kept)
    assert_equal(run(backend, case), slowly(case))


@backends
def test_what_lies_in_spare_room_is_not_read(backend):
    case = example(n_queries=3)
    expected = run(backend, case)
    empty = case.layer.slots < 0
    assert empty.any()
    case.layer.keys[empty], case.layer.values[empty] = 1e4, 1e4
    assert torch.equal(run(backend, case), expected)


@backends
def test_after_many_steps(backend):
    """Heads that have grown and been laid out anew several times."""
    case = example(n_before=0)
    generator = torch.Generator().manual_seed(3)
    for _ in range(20):
        new = torch.randn(2, 2, 2, 1, 16, generator=generator)
        case.layer.serve()
        case.layer.update(*new)
    case = case._replace(n_recent=21)
    assert_equal(run(backend, case), slowly(case))


# ---- masks of every form -------------------------------------------------------------------------


def hidden(row: int, query: int, recent: int) -> bool:
    """Some tokens after the pruning, another in each row, from some queries only."""
    return recent == row or (row == 1 and query > 1 and recent == 4)


def visible(case: Example) -> Tensor:
    """`(B, q, n)` bool, as the model has it: of all tokens, evicted ones and padding included."""
    seen = torch.ones(2, case.n_queries, case.layer.seen, dtype=torch.bool)
    seen[1, :, :9] = False  # padding: a ragged layer does not hold it
    for row, i, j in itertools.product(range(2), range(case.n_queries), range(case.n_recent)):
        if j > case.n_recent - case.n_queries + i or hidden(row, i, j):
            seen[row, i, case.layer.seen - case.n_recent + j] = False
    return seen


def block_mask(seen: Tensor) -> Any:
    def mask_mod(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return seen[b, q, kv]

    return create_block_mask(mask_mod, *seen.shape[:1], None, *seen.shape[1:], device="cpu")


FORMS = {
    "bool": lambda seen: seen[:, None],
    "float": lambda seen: torch.zeros(seen.shape).masked_fill(~seen, torch.finfo().min)[:, None],
    "infinite": lambda seen: torch.zeros(seen.shape).masked_fill(~seen, -math.inf)[:, None],
    "flex": block_mask,
}


@backends
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("n_queries", [1, 4])
def test_masks_say_which_of_the_later_tokens_are_seen(backend, form, n_queries):
    case = example(n_queries=n_queries, n_before=3)
    assert_equal(run(backend, case, FORMS[form](visible(case))), slowly(case, hidden))


@backends
@pytest.mark.parametrize("n_queries", [1, 4])
def test_masks_of_flash_attention(backend, n_queries):
    case = example(n_queries=n_queries)
    mask = torch.ones(2, case.layer.seen, dtype=torch.long)
    mask[1, :9] = 0
    mask[0, -case.n_recent] = 0
    expected = slowly(case, lambda row, _, recent: row == 0 and recent == 0)
    assert_equal(run(backend, case, mask), expected)


@backends
@pytest.mark.parametrize("form", FORMS)
def test_a_causal_mask_changes_nothing(backend, form):
    case = example(n_queries=4)
    causal = torch.ones(2, 4, case.layer.seen, dtype=torch.bool).tril(case.layer.seen - 4)
    assert torch.equal(run(backend, case, FORMS[form](causal)), run(backend, case))


@backends
def test_one_mask_for_all_rows(backend):
    case = example(n_queries=3)
    causal = torch.ones(1, 1, 3, case.layer.seen, dtype=torch.bool).tril(case.layer.seen - 3)
    assert torch.equal(run(backend, case, causal), run(backend, case))


def test_a_mask_of_its_own_for_each_head_is_refused():
    case = example(n_queries=2)
    mask = torch.ones(2, 4, 2, case.layer.seen, dtype=torch.bool)
    with pytest.raises(UnsupportedInputError, match=r"mask.*\(2, 4, 2, 65\)"):
        run(None, case, mask)


# ---- what models add -----------------------------------------------------------------------------


@pytest.mark.parametrize("n_queries", [1, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_soft_capped_logits(n_queries, dtype):
    case, of = example(n_queries=n_queries, dtype=dtype), site(softcap=1.5)
    for backend in ("eager", None):
        assert_equal(run(backend, case, of=of), slowly(case, softcap=1.5))


@pytest.mark.parametrize("n_queries", [1, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_learned_sinks(n_queries, dtype):
    case, sinks = example(n_queries=n_queries, dtype=dtype), [0.5, -1.0, 3.0, 2.0]
    for backend in ("eager", None):
        output = run(backend, case, s_aux=torch.tensor(sinks))
        assert_equal(output, slowly(case, sinks=sinks))


def test_sinks_of_the_module_where_the_call_brings_none():
    model = build("gpt_oss", attn_implementation="eager")
    of = replace(attention_sites(model)[0], scaling=0.3)
    case = example()
    expected = slowly(case, sinks=of.sinks.tolist())
    assert_equal(run(None, case, of=of), expected)


@backends
def test_the_scaling_of_the_call_comes_first(backend):
    case = example(n_queries=2)
    assert_equal(run(backend, case, scaling=0.7), slowly(case, scaling=0.7))


@backends
def test_dropout_is_refused(backend):
    with pytest.raises(UnsupportedInputError, match=r"no dropout, got 0.1; call model\.eval\(\)"):
        run(backend, example(), dropout=0.1)


# ---- the same bits where the arithmetic is the same ----------------------------------------------

dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])


@dtypes
@shapes
@pytest.mark.parametrize("n_queries", [1, 5])
def test_heads_that_evicted_nothing_are_attended_over_as_ever(dtype, shape, n_queries):
    batch, n_kv = shape.get("batch", 2), shape.get("n_kv", 2)
    everything = torch.ones(batch, n_kv, N, dtype=torch.bool)
    case = example(**shape, n_queries=n_queries, dtype=dtype, kept=everything)
    states = [x.view(batch, n_kv, -1, x.shape[-1]) for x in (case.layer.keys, case.layer.values)]
    keys, values = (
        x[:, :, : N + case.n_recent].repeat_interleave(case.query.shape[1] // n_kv, dim=1)
        for x in states
    )
    causal = torch.ones(n_queries, N + case.n_recent, dtype=torch.bool).tril(N + 3)
    expected = scaled_dot_product_attention(case.query, keys, values, causal, scale=0.3)
    assert torch.equal(run("padded", case), expected)
    if case.query.shape[1] == n_kv:  # otherwise a group's queries are asked together
        assert torch.equal(run("heads", case), expected)


@dtypes
@pytest.mark.parametrize("n_queries", [1, 5])
def test_each_head_is_attended_over_as_if_it_were_alone(dtype, n_queries):
    case = example(n_queries=n_queries, dtype=dtype, group=1, n_kv=3)
    output = run("heads", case)
    for row, head in itertools.product(range(2), range(3)):
        keys, values = (x[None, None] for x in case.layer.head(3 * row + head))
        causal = torch.ones(n_queries, keys.shape[2], dtype=torch.bool)
        causal = causal.tril(keys.shape[2] - n_queries) if n_queries > 1 else None
        query = case.query[row, head][None, None]
        alone = scaled_dot_product_attention(query, keys, values, causal, scale=0.3)
        assert torch.equal(output[row, head], alone[0, 0])


# ---- which one -----------------------------------------------------------------------------------


def test_the_one_that_is_chosen():
    case = example()
    plain = Query(case.query, None, True, 0.3)
    assert choose(case.layer, plain) == "heads"
    assert choose(case.layer, replace(plain, softcap=20.0)) == "eager"
    assert choose(case.layer, replace(plain, sinks=torch.zeros(4))) == "eager"
    assert torch.equal(run(None, case), run("heads", case))


def test_unknown_back_ends_are_refused():
    with pytest.raises(HyperparameterError, match=f"'sdpa'.*known: {', '.join(BACKENDS)}"):
        check_backend("sdpa", site())


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_those_without_softcap_and_sinks_are_refused_to_models_that_have_them(family, backend):
    of = attention_sites(build(family, attn_implementation="eager"))[0]
    if backend == "eager":
        check_backend(backend, of)
    else:
        with pytest.raises(HyperparameterError, match=f"'{backend}'.*only 'eager' does"):
            check_backend(backend, of)


# ---- on a GPU ------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", [pytest.param(name, marks=on_gpu) for name in BACKENDS])
@shapes
@pytest.mark.parametrize("n_queries", [1, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu(backend, shape, n_queries, dtype):
    if backend == "varlen" and dtype == torch.float32:
        pytest.skip("the variable-length kernel takes 16-bit states only")
    case = example(**{"dim": 64, **shape}, n_queries=n_queries, dtype=dtype, device="cuda")
    assert_equal(run(backend, case), slowly(case))
    query = Query(case.query, None, True, 0.3)
    assert choose(case.layer, query) == ("varlen" if dtype == torch.bfloat16 else "padded")
