"""Every kernel against attention written out number by number."""

import itertools
import math
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.attention import varlen
from transformers.cache_utils import DynamicLayer

from attention_patch import kernels
from attention_patch.kernels import HAS_VARLEN, KERNELS, Query, choose
from attention_patch.scope import attend
from press_core import RaggedLayer, UnsupportedInputError, attention_sites
from press_core.cache import layout
from press_core.cache.in_place import ChannelPrunedLayer
from press_core.cache.masks import causal
from press_core.cache.pruned import PrunedLayer
from press_core.cache.tokens import Kept
from press_core.model.sites import Softmax
from tests.press_core.drawn import drawn
from tests.presses import TABLES
from tests.support import build, update

kinds = pytest.mark.parametrize("kind", ["tokens", "channels"])
N = 60  # tokens of the context
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 2e-2, torch.float16: 3e-3}


BLOCKS = {"FEW": -1, "FEW_ON_GPU": -1, "FEW_QUERIES": -1, "SIZE": 16}
LAYOUTS = {"rows": {}, "blocks": BLOCKS, "shared blocks": BLOCKS | {"FEW_QUERIES": 2**20}}


@pytest.fixture(autouse=True, params=LAYOUTS.values(), ids=LAYOUTS)
def _layout(request, monkeypatch):
    """Of layers as small as these each row has one block, unless told otherwise."""
    for name, limit in request.param.items():
        monkeypatch.setattr(layout, name, limit)


class Example(NamedTuple):
    """A layer, and the states of a call that it has been updated with.

    Attributes:
        n_queries: tokens of the call.
        n_recent: tokens after the pruning, those of the call included.
        whole: keys with zeros in the channels that are lost, and values, `(B, H_kv, n, d)`; None:
            tokens are lost, and no channels.
    """

    layer: Any
    query: Tensor
    n_queries: int
    n_recent: int
    whole: tuple[Tensor, Tensor] | None = None

    def head(self, row, head):
        """Keys and values `(n, d)` that a KV head of a row holds, and where they stand."""
        if self.whole is not None:
            keys, values = (states[row, head] for states in self.whole)
            return keys, values, torch.arange(len(keys))
        keys, values = self.layer.head(row * self.layer.n_heads + head)
        return keys, values, self.layer.dense()[2][row, head, -len(keys) :]


def example(
    batch=2, n_kv=2, group=2, n_queries=1, dim=16, dtype=torch.float32, device="cpu", kept=None
):
    """Heads that keep some of `N` tokens, one of them one, and got `3 + n_queries` more."""
    generator = torch.Generator().manual_seed(n_kv + 10 * group + 100 * n_queries)

    def random(heads, n):
        states = torch.randn(batch, heads, n, dim, generator=generator, dtype=torch.float64)
        return states.to(device, dtype)

    if kept is None:
        share = torch.rand(batch, n_kv, 1, generator=generator)
        kept = torch.rand(batch, n_kv, N, generator=generator) < share
        kept[0, 0], kept[0, 0, 7], kept[-1, -1] = False, True, True
    positions = torch.arange(N, device=device).view(1, 1, N)
    known = Kept(n_seen=N)
    layer = RaggedLayer.of(random(n_kv, N), random(n_kv, N), kept.to(device), positions, known)
    for n in (3, n_queries):
        update(layer, random(n_kv, n), random(n_kv, n))
    query = random(n_kv * group, n_queries)
    return Example(layer, query, n_queries, 3 + n_queries)


CHANNELS = torch.tensor([[[0, 2, 7], [1, 2, 3]], [[4, 5, 6], [0, 1, 7]]])


def of_kind(kind, n_queries=1, dtype=torch.float64):
    """An example whose heads have lost tokens, of some shape, or five of eight channels."""
    if kind != "channels":
        return example(**SHAPES.get(kind, {}), n_queries=n_queries, dtype=dtype)
    keys, values = (drawn(2, 2, 12, 8, seed=seed).to(dtype) for seed in (1, 2))
    index = CHANNELS.unsqueeze(2).expand(-1, -1, 12, -1)
    left = keys.gather(-1, index)
    stored = PrunedLayer(DynamicLayer()).holding(left, values)
    layer = ChannelPrunedLayer(stored.inner, CHANNELS, 8)
    layer.kept = Kept(torch.arange(12, dtype=torch.int32).expand(2, 2, 12), 12, 12)
    keys = torch.zeros_like(keys).scatter(-1, index, left)
    for n in (3, n_queries):
        new = [drawn(2, 2, n, 8, seed=s).to(dtype) for s in (10 + n, -10 - n)]
        update(layer, *new)
        keys, values = (torch.cat(x, dim=2) for x in zip((keys, values), new, strict=True))
    query = drawn(2, 4, n_queries, 8).to(dtype)
    return Example(layer, query, n_queries, 3 + n_queries, (keys, values))


def site(softcap=None, family="llama"):
    """An attention module that scales by 0.3."""
    model = build(family, attn_implementation="eager")
    return replace(attention_sites(model)[0], softmax=Softmax(0.3, softcap))


def run(backend, case, mask=None, of=None, **kwargs):
    """`(B, H, q, d)`, as an attention module would get it; without a `mask` causal."""
    if mask is None and case.n_queries > 1:
        mask = causal(case.n_queries, case.n_recent, case.query.device)[None, None]

    def untouched(*_, **__):
        raise AssertionError("the model's own attention function was called")

    new = torch.full_like(case.query, float("nan"))  # what update returns is not to be read
    of, given = of or site(), (case.query, new, new, mask)
    output, weights = attend(of, case.layer, backend, untouched, of.module, *given, **kwargs)
    assert weights is None
    assert output.is_contiguous()
    return output.transpose(1, 2)


def slowly(case, scaling=0.3, softcap=None, sinks=None, seen=None):
    """The same, one query and one key at a time.

    Args:
        seen: `(B, H, q, n)` bool, which tokens of the sequence each query sees.
    """
    batch, n_heads, n_queries, _ = case.query.shape
    output = torch.empty(*case.query.shape[:3], case.layer.values.shape[-1], dtype=torch.float64)
    group = n_heads // case.layer.values.shape[1] if case.whole else n_heads // case.layer.n_heads
    for row, head, i in itertools.product(range(batch), range(n_heads), range(n_queries)):
        keys, values, places = case.head(row, head // group)
        query = case.query[row, head, i].double()
        logits, read = [], []
        for j in range(len(keys) - n_queries + i + 1):
            if seen is not None and not seen[row, head, i, places[j]]:
                continue
            logit = float(query @ keys[j].double()) * scaling
            logits.append(logit if softcap is None else math.tanh(logit / softcap) * softcap)
            read.append(values[j].double().cpu())
        extra = [] if sinks is None else [sinks[head]]
        most = max(logits + extra)
        weights = [math.exp(logit - most) for logit in logits]
        total = sum(weights) + sum(math.exp(logit - most) for logit in extra)
        weighted = zip(weights, read, strict=True)
        output[row, head, i] = sum(weight / total * value for weight, value in weighted)
    return output


def assert_equal(output, expected):
    atol = TOLERANCE[output.dtype]
    torch.testing.assert_close(output.double().cpu(), expected, rtol=0, atol=atol)


# ---- against the slow one ------------------------------------------------------------------------

SHAPES = TABLES["shapes"]


@pytest.mark.parametrize("kind", ["channels", *SHAPES])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("n_queries", [1, 3])
def test_precision(kind, dtype, n_queries):
    case = of_kind(kind, n_queries, dtype)
    output = run(None, case)
    assert output.dtype == dtype
    assert_equal(output, slowly(case))


@kinds
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_large_logits_are_not_rounded_to_16_bits(kind, dtype):
    """Those of a model whose queries and keys have large biases, such as Qwen2."""
    case = of_kind(kind, dtype=dtype)
    recent = case.layer.recent_keys if kind == "channels" else case.layer.recent.keys
    for states in (case.query, case.layer.keys, recent):
        states += 8
    case = case._replace(whole=case.layer.states() if kind == "channels" else None)
    assert_equal(run(None, case), slowly(case))


def test_what_lies_in_empty_slots_is_not_read():
    case = example(n_queries=3)
    expected, layer = run(None, case), case.layer
    empty = layer.slots < 0
    assert empty.any() or layer.blocks.n == 1
    layer.keys[empty], layer.values[empty] = 1e4, 1e4
    assert torch.equal(run(None, case), expected)


# ---- what is seen --------------------------------------------------------------------------------


@pytest.mark.parametrize("n_queries", [1, 4])
@pytest.mark.parametrize(("rows", "heads"), [(1, 1), (2, 1), (2, 4)])
@pytest.mark.parametrize("of_all", [True, False], ids=["of all tokens", "of recent ones"])
@kinds
def test_masks(kind, of_all, rows, heads, n_queries):
    """Holes anywhere: what a head has kept may be hidden from some queries."""
    case = of_kind(kind, n_queries)
    n = case.layer.n_seen
    n_context = n - case.n_recent
    seen = torch.rand(rows, heads, n_queries, n, generator=torch.Generator().manual_seed(1)) < 0.7
    seen &= causal(n_queries, n, seen.device)
    seen[..., -n_queries:] |= torch.eye(n_queries, dtype=torch.bool)
    seen[..., :n_context] |= not of_all
    mask = seen if of_all else seen[..., n_context:]
    assert_equal(run(None, case, mask), slowly(case, seen=seen.expand(2, 4, -1, -1)))


@pytest.mark.parametrize("kind", ["tokens", "channels", "one row"])
def test_a_query_that_sees_nothing_gets_zeros(kind):
    case = of_kind(kind, n_queries=2)
    seen = causal(2, case.layer.n_seen, case.query.device).repeat(len(case.query), 1, 1, 1)
    expected = run(None, case)
    seen[-1, :, 0] = False
    output = run(None, case, seen)
    assert not output[-1, :, 0].any()
    output[-1, :, 0] = expected[-1, :, 0]
    torch.testing.assert_close(output, expected)


def test_long_questions_are_asked_in_parts(monkeypatch):
    case, held = example(n_queries=5), []
    expected = run(None, case)
    of_context = kernels._old_logits
    monkeypatch.setattr(kernels, "_old_logits", lambda *a: held.append(1) or of_context(*a))
    monkeypatch.setattr(kernels, "LOGITS", 2 * 2 * (case.layer.slots.numel() + 4 * case.n_recent))
    torch.testing.assert_close(run(None, case), expected)
    assert len(held) > 1


@torch.enable_grad()
@pytest.mark.parametrize("softcap", [None, 1.5])
def test_gradients_are_those_of_dense_attention(softcap):
    keys, values, *new = (
        torch.randn(2, 2, n, 16, dtype=torch.float64, requires_grad=True) for n in (N, N, 3, 3)
    )
    kept = torch.rand(2, 2, N, generator=torch.Generator().manual_seed(0)) < 0.4
    layer = RaggedLayer.of(keys, values, kept, torch.arange(N).view(1, 1, -1), Kept(n_seen=N))
    update(layer, *new)
    query = torch.randn(2, 4, 1, 16, dtype=torch.float64, requires_grad=True)
    sinks = torch.randn(4, dtype=torch.float64, requires_grad=True)
    leaves = [query, keys, values, *new, sinks]
    output = run(None, Example(layer, query, 1, 3), of=site(softcap), s_aux=sinks)
    weight = torch.randn_like(output)
    gradients = torch.autograd.grad((output * weight).sum(), leaves)

    all_keys, all_values = (torch.cat(x, dim=2) for x in zip((keys, values), new, strict=True))
    seen = torch.cat((kept, torch.ones(2, 2, 3, dtype=torch.bool)), dim=-1)
    logits = 0.3 * query.unflatten(1, (2, 2)) @ all_keys.unsqueeze(2).mT
    logits = logits if softcap is None else torch.tanh(logits / softcap) * softcap
    logits = logits.masked_fill(~seen[:, :, None, None], -math.inf)
    extra = sinks.view(1, 2, 2, 1, 1).expand(2, -1, -1, -1, -1)
    shares = torch.cat((logits, extra), dim=-1).softmax(dim=-1)[..., :-1]
    expected = (shares @ all_values.unsqueeze(2)).flatten(1, 2)
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-12)
    wanted = torch.autograd.grad((expected * weight).sum(), leaves)
    for one, other in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-11)


# ---- what models add -----------------------------------------------------------------------------


@kinds
@pytest.mark.parametrize("n_queries", [1, 4])
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("sinks", [None, [0.5, -1.0, 3.0, 2.0]])
def test_soft_capped_logits_and_learned_sinks(kind, n_queries, softcap, sinks):
    """And the scaling of the call comes before that of the module."""
    case = of_kind(kind, n_queries)
    given = {} if sinks is None else {"s_aux": torch.tensor(sinks)}
    output = run(None, case, of=site(softcap), scaling=0.7, **given)
    assert_equal(output, slowly(case, scaling=0.7, softcap=softcap, sinks=sinks))


def test_sinks_of_the_module_where_the_call_brings_none():
    of, case = site(family="gpt_oss"), example()
    assert_equal(run(None, case, of=of), slowly(case, sinks=of.sinks.tolist()))


@kinds
def test_dropout_is_refused(kind):
    with pytest.raises(UnsupportedInputError, match=r"0\.1.*model\.eval\(\)"):
        run(None, of_kind(kind), dropout=0.1)


# ---- which one -----------------------------------------------------------------------------------


def test_the_one_that_is_chosen():
    case = example()
    assert choose(case.layer, Query(case.query, None, 0.3)) == "blocks"
    assert torch.equal(run(None, case), run("blocks", case))
    assert case.layer.attended_by == "blocks"
    # The kernel of CUDA takes no mask of the context, and has no gradients.
    mask = torch.ones(2, 1, 1, case.layer.n_seen, dtype=torch.bool)
    assert choose(case.layer, Query(case.query.bfloat16(), mask, 0.3)) == "blocks"
    with pytest.raises(UnsupportedInputError, match=r"mask.*'blocks'"):
        run("varlen", case, mask)
    with torch.enable_grad(), pytest.raises(UnsupportedInputError, match=r"gradients.*'blocks'"):
        run("varlen", case._replace(query=case.query.requires_grad_()))


def varlen_attn(query, key, value, starts, bounds, *_, return_aux, scale, seqused_k):
    """What torch says of its kernel, which runs on CUDA alone: one sequence after another."""
    found = []
    for i, used in enumerate(seqused_k.tolist()):
        of_sequence = query[starts[i] : starts[i + 1]].transpose(0, 1)
        read = slice(int(bounds[i]), int(bounds[i]) + used)
        logits = of_sequence @ key[read].permute(1, 2, 0) * scale
        output = logits.softmax(dim=-1) @ value[read].transpose(0, 1)
        total = logits.logsumexp(dim=-1) if used else logits.new_full(logits.shape[:2], math.inf)
        found.append((output.transpose(0, 1), total))
    outputs, totals = zip(*found, strict=True)
    return torch.cat(outputs), torch.cat(totals, dim=1)


@pytest.mark.parametrize("n_queries", [1, 5])
@pytest.mark.parametrize("held", [[[[1], [40]]], [[[0], [7]]]], ids=str)
def test_the_kernel_of_cuda_is_given_each_head_as_a_sequence(held, n_queries, monkeypatch):
    monkeypatch.setattr(varlen, "varlen_attn", varlen_attn)
    monkeypatch.setattr(layout, "FEW", 2**20)  # so that a CPU stores heads in order, as a GPU does
    case = example(batch=1, n_queries=n_queries, kept=torch.arange(N) < torch.tensor(held))
    assert_equal(run("varlen", case), slowly(case))


# ---- on a GPU ------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("backend", KERNELS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("n_queries", [1, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu(backend, shape, n_queries, dtype):
    if backend == "varlen" and dtype == torch.float32:
        pytest.skip("the variable-length kernel takes 16-bit states only")
    if backend == "varlen" and not HAS_VARLEN:
        pytest.skip("needs torch 2.12")
    case = example(**{"dim": 64, **shape}, n_queries=n_queries, dtype=dtype, device="cuda")
    scaling = 64**-0.5  # a logit is rounded to 16 bits: usual ones
    assert_equal(run(backend, case, scaling=scaling), slowly(case, scaling))
    query = Query(case.query, None, scaling)
    assert (choose(case.layer, query) == "varlen") == (HAS_VARLEN and dtype == torch.bfloat16)
