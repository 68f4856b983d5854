"""Later turns against a dense model: no cache, and a mask for each layer, head and query.

The reference reads all tokens at once, and sees of the context what `kept_positions` says that each
head holds. What a mask of a later turn hides, it hides there. Nothing else of this project takes
part in it.
"""

from contextlib import ExitStack, nullcontext
from functools import partial

import pytest
import torch
from torch.nn.functional import pad
from transformers import DynamicCache

import hooks_impl
from attention_patch import headwise
from experiments.testbed.families import supported_implementations
from press_core import UnsupportedInputError, attention_sites, kept_positions
from tests.presses import TABLES, listed
from tests.support import both, build, context_for, example_for, left_padded, nested, token_ids

CONTEXT, TURNS = 60, (5, 1, 3)
IDS = left_padded(2, CONTEXT + sum(TURNS), [0, 13])[0]
"""Tokens of two rows, of which the second begins with padding."""
NOT_JUDGED = {*TABLES["other_states"], "FinchPress"}
"""FinchPress takes its delimiter out of what the model reads."""


TOLERANCE = {"sdpa": 1e-9, "eager": 1e-4, "flex_attention": 2e-5}


def dense(model, ids, visible, position_ids):
    """Logits of a model whose layers see what is `visible`, `(B, H, q, kv)` each."""

    def masked(seen, _, args, kwargs):
        mask = torch.zeros(seen.shape, dtype=model.dtype).masked_fill(~seen, -1e30)
        return args, {**kwargs, "attention_mask": mask}

    with ExitStack() as stack:
        for site in attention_sites(model):
            hook = partial(masked, visible[site.layer_idx])
            stack.callback(site.module.register_forward_pre_hook(hook, with_kwargs=True).remove)
        return model(ids, position_ids=position_ids, use_cache=False).logits


def visible_in(kept, real, later, n_heads):
    """Per layer what each query sees, `(B, H, N, N)` bool.

    Args:
        kept: before which token which positions each head held, per layer.
        real: which tokens are no padding, `(B, N)` bool.
        later: what the tokens after the context see of all, `(B, 1 or H, n, N)` bool.
    """
    batch, n = real.shape
    causal = torch.ones(n, n, dtype=torch.bool).tril()
    seen = (causal & real[:, None, None]).expand(batch, n_heads, n, n).clone()
    seen[:, :, CONTEXT:] = later
    per_layer = []
    for layer in range(len(kept[CONTEXT])):
        of_layer = seen.clone()
        for at, (turn, positions) in enumerate(kept.items()):
            end = [*kept, n][at + 1]
            of_heads = positions[layer].expand(batch, -1, -1)
            held = torch.zeros(batch, of_heads.shape[1], turn + 1, dtype=torch.bool)
            held.scatter_(-1, torch.where(of_heads < 0, turn, of_heads), True)
            held = held[..., :turn].repeat_interleave(n_heads // held.shape[1], dim=1)
            of_layer[:, :, turn:end, :turn] &= held.unsqueeze(2)
        per_layer.append(of_layer)
    return per_layer


# ---- masks of later turns ------------------------------------------------------------------------


def whole(seen):
    pass


def of_context(seen):
    seen[..., 40:50] = False


def first_tokens(seen):
    seen[..., :10] = False


def of_question(seen):
    seen[:1, :, 5:, CONTEXT + 3 : CONTEXT + 5] = False


def by_query(seen):
    drawn = torch.rand(seen.shape, generator=torch.Generator().manual_seed(1)) < 0.3
    seen &= ~drawn
    seen |= torch.eye(seen.shape[-1], dtype=torch.bool)[-seen.shape[2] :]


MASKS = {
    "whole": (whole, 2),
    "hides context": (of_context, 2),
    "hides context, tokens to come": (of_context, 2.5),
    "hides the first": (first_tokens, 2),
    "hides a question": (of_question, 2),
    "causal, 4-d": (whole, 4),
    "hides context, 4-d": (of_context, 4),
    "other for each query": (by_query, 4),
}
"""What lets later tokens see less of what they see, `(B, 1 or H, n, N)` bool, and dimensions.

2.5: two, and columns for tokens that are to come.
"""


def in_form(seen, dims, form):
    """The mask of a turn as a user gives it, from what its tokens see, `(B, 1 or H, q, n)`."""
    if dims != 4:
        return pad(seen[:, 0, -1].long(), (0, 7 * (dims > 2)))
    if form == "eager":
        return torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
    return seen


def differs(
    press, ids, padding, mask, form="sdpa", *, heads=1, family="llama", reading=None, **options
):
    """By how much logits of the turns after a compressed context differ from dense ones.

    Args:
        reading: what is open in the later turns; None: the scope of the press.
        options: of the model.
    """
    # Eager attention takes its softmax in float32 whatever the model's dtype.
    dtype = torch.float64 if form == "sdpa" else torch.float32
    model = build(family, attn_implementation=form, **options).to(dtype)
    hide, dims = MASKS[mask]
    batch, n = len(padding), CONTEXT + sum(TURNS)
    real = torch.arange(n) >= torch.tensor(padding)[:, None]
    positions = (real.cumsum(dim=-1) - 1).clamp(min=0)
    seen = (torch.ones(n, n, dtype=torch.bool).tril() & real[:, None, None])[:, :, CONTEXT:]
    seen = seen.expand(batch, heads, -1, -1).clone()
    hide(seen)
    cache, logits, at, kept = DynamicCache(config=model.config), [], CONTEXT, {}
    with ExitStack() as stack:
        scope = stack.enter_context(press(model))
        more = {"attention_mask": real[:, :CONTEXT].long()} if any(padding) else {}
        given = positions[:, :CONTEXT]
        model(ids[:, :CONTEXT], past_key_values=cache, position_ids=given, **more)
        if reading is not None:
            scope.remove()
            stack.enter_context(reading(model))
        for length in TURNS:
            kept[at] = kept_positions(cache)
            of_turn = seen[:, :, at - CONTEXT : at - CONTEXT + length, : at + length]
            output = model(
                ids[:, at : at + length],
                past_key_values=cache,
                position_ids=positions[:, at : at + length],
                attention_mask=in_form(of_turn, dims, form),
            )
            logits.append(output.logits)
            at += length
    visible = visible_in(kept, real, seen, model.config.num_attention_heads)
    exact = "sdpa" in supported_implementations(family)
    reference = build(family, **options)
    reference = reference.double() if exact else reference
    expected = dense(reference, ids, visible, positions)[:, CONTEXT:]
    return float((torch.cat(logits, dim=1) - expected).abs().max())


def ids_for(name):
    return torch.cat((context_for(name, CONTEXT), token_ids(1, sum(TURNS), seed=1)), dim=1)


@pytest.mark.parametrize("mask", ["hides context", "other for each query"])
@pytest.mark.parametrize("name", [x for x in hooks_impl.PRESSES if x not in NOT_JUDGED])
def test_every_press(name, mask):
    press = example_for(hooks_impl, name, 0.5, build("llama", dtype=torch.float64))
    assert differs(press, ids_for(name), [0], mask) < 1e-9


HELD = listed("held")
"""A press for each way in which layers hold what is left."""


@pytest.mark.parametrize("reading", [None, headwise], ids=["open", "read later"])
@pytest.mark.parametrize("form", ["sdpa", "eager"])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("held", HELD)
@pytest.mark.parametrize("padding", [0, 13])
def test_every_kind_of_layer(package, padding, held, mask, form, reading):
    found = differs(HELD[held](package), IDS, [0, padding], mask, form, reading=reading)
    assert found < TOLERANCE[form]


@pytest.mark.parametrize("form", ["sdpa", "eager"])
@pytest.mark.parametrize("held", ["even", "uneven", "nothing evicted", "at different times"])
def test_two_scopes_with_padding(package, held, form):
    two = nested(package.KnormPress(0.5), package.StreamingLLMDecodingPress(999))
    assert differs(HELD[held](package), IDS, [0, 13], "whole", form, reading=two) < TOLERANCE[form]


OF_HEADS = ("AdaKVPress", "DMSPress", "DuoAttentionPress", "KVComposePress", "KVzipPress")


@pytest.mark.parametrize("family", ["gemma2", "gpt2", "gpt_neox", "gpt_oss", "qwen3"])
@pytest.mark.parametrize("name", OF_HEADS)
def test_heads_of_every_family(package, name, family):
    """Capped logits, learned sinks, layers that slide or rotate a part, one KV head per head."""
    form = "sdpa" if "sdpa" in supported_implementations(family) else "eager"
    press = example_for(package, name, 0.6, build(family))
    found = differs(press, ids_for(name).repeat(2, 1), [0, 0], "whole", form, family=family)
    assert found < (2e-5 if form == "eager" else 1e-9)


@pytest.mark.usefixtures("not_compiled")
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
def test_heads_under_flex_attention(package, family):
    press = HELD["by head"](package)
    found = differs(press, IDS, [0, 13], "whole", "flex_attention", family=family)
    assert found < TOLERANCE["flex_attention"]


@pytest.mark.parametrize("num_kv_heads", [1, 4, 8])
def test_groups_of_heads(package, num_kv_heads):
    ids, heads = ids_for("AdaKVPress"), {"num_heads": 8, "num_kv_heads": num_kv_heads}
    assert differs(HELD["by threshold"](package), ids, [0], "whole", **heads) < 1e-9


@pytest.mark.parametrize("held", [held for held in HELD if held != "at different times"])
def test_masks_that_differ_from_head_to_head(package, held):
    found = differs(HELD[held](package), IDS, [0, 13], "other for each query", heads=4)
    assert found < 1e-9


# ---- outside of any scope ------------------------------------------------------------------------


@both
@pytest.mark.parametrize("form", ["sdpa", "eager"])
@pytest.mark.parametrize("mask", MASKS)
def test_outside_of_any_scope_a_mask_is_honoured_or_refused(package, mask, form):
    """Nobody knows there which keys the columns of a full mask have become."""
    press, ids = HELD["even"](package), ids_for("SnapKVPress")
    refused = mask not in ("whole", "hides a question")
    with pytest.raises(UnsupportedInputError) if refused else nullcontext():
        assert differs(press, ids, [0], mask, form, reading=nullcontext) < TOLERANCE[form]
