"""Presses of which every head keeps its own tokens, or keys some channels only, end to end.

The reference holds everything: a plain cache on a model of the same weights, of which each head is
shown what it should have kept, by a mask.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

import hooks_impl
import patch_impl
from attention_patch import headwise
from experiments.testbed.recipes import PROMPTS, fitted_pair, recipe_pair
from press_core import (
    AttentionSite,
    HyperparameterError,
    RaggedLayer,
    ScopeError,
    UnsupportedCacheError,
    UnsupportedInputError,
    attention_sites,
    cache_nbytes,
    kept_lengths,
)
from press_core.cache.channels import ChannelPrunedLayer
from press_core.forward import Arguments
from press_core.learned.calibration import model_sizes
from press_core.learned.duo_attention import HeadScores
from press_core.learned.lukv import BudgetCurves
from tests.support import build, in_turn, left_padded, token_ids

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
both = pytest.mark.parametrize("package", [hooks_impl, patch_impl], ids=["hooks", "patches"])
LENGTH = 40
FORWARDS = [LENGTH, 5, 1, 1, 3, 1]
GREEDY = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
INF = float("inf")


@pytest.fixture(autouse=True)
def _not_compiled():
    """A compiled kernel takes a C++ compiler and half a minute per shape, and adds nothing."""
    with torch.compiler.set_stance("force_eager"):
        yield


def duo(package: Any, model: Any) -> Any:
    """Half of the heads stream, others in each layer."""
    n_layers = model.config.num_hidden_layers
    sites = {site.layer_idx: site for site in attention_sites(model)}
    n_kv = next(iter(sites.values())).num_kv_heads
    scores = torch.full((n_layers, n_kv), INF)
    for i, layer in enumerate(sites):
        scores[layer] = torch.arange(n_kv).roll(i).float()
    return package.DuoAttentionPress(
        0.5, head_scores=HeadScores(scores), sink_size=2, recent_size=6
    )


def fast_kvzip(package: Any, model: Any, layerwise: bool = False) -> Any:
    options = {"layerwise": layerwise, "n_sink": 2, "window_ratio": 0.1}
    pair = fitted_pair(recipe_pair("FastKVzipPress", 0.6), model)
    return package.FastKVzipPress(0.6, gates=pair.hook.gates, **options)


def lukv(package: Any, model: Any) -> Any:
    sizes = model_sizes(attention_sites(model)[0])
    rates = torch.linspace(0.3, 0.9, sizes["layers"] * sizes["kv_heads"]).view(sizes["layers"], -1)
    curves = BudgetCurves(rates.expand(99, -1, -1))
    return package.LUKVPress(package.SnapKVPress(window_size=4), 0.6, curves=curves)


PRESSES: dict[str, Callable[[Any, Any], Any]] = {
    "ada": lambda p, m: p.AdaKVPress(p.SnapKVPress(0.6, window_size=4), alpha_safeguard=0.1),
    "critical": lambda p, m: p.CriticalAdaKVPress(p.KeyDiffPress(0.6), alpha_safeguard=0.0),
    "composed": lambda p, m: p.ComposedPress([p.KnormPress(0.3), p.AdaKVPress(p.KnormPress(0.5))]),
    "dms": lambda p, m: p.DMSPress(p.KnormPress(), threshold(m), sliding_window_size=6),
    "dms, decoding": lambda p, m: p.DMSPress(
        p.KnormPress(), threshold(m), sliding_window_size=6, decoding=True
    ),
    "duo": duo,
    "fast kvzip": fast_kvzip,
    "fast kvzip, by layers": lambda p, m: fast_kvzip(p, m, layerwise=True),
    "kvcompose": lambda p, m: p.KVComposePress(0.6, structured=False),
    "kvgrad": lambda p, m: p.KVgradPress(0.6, chunk_size=16, prompts=PROMPTS, n_sink=2),
    "kvzip": lambda p, m: p.KVzipPress(0.6, chunk_size=16, prompts=PROMPTS, n_sink=2),
    "kvzip, by layers": lambda p, m: p.KVzipPress(
        0.6, layerwise=True, chunk_size=64, prompts=PROMPTS
    ),
    "lukv": lukv,
}
presses = pytest.mark.parametrize("name", PRESSES)
REPLAYING = {"kvcompose", "kvgrad", "kvzip", "kvzip, by layers"}
"""Those that run the context again: rows one by one, when all layers have run."""


@torch.no_grad()
def threshold(model: Any) -> float:
    """Minus the norm of the median key: about half of the tokens score below."""
    cache = DynamicCache(config=model.config)
    model(token_ids(1, LENGTH), past_key_values=cache)
    keys = [cache.layers[site.layer_idx].keys for site in attention_sites(model)]
    return -float(torch.stack(keys).norm(dim=-1).median())


def make(family: str = "llama", **options: Any) -> Any:
    """In float64 where that goes, so that a rounding error decides no top-k."""
    # Masks of eager overflow in float64, as transformers makes them.
    eager = family in ("gemma2", "gpt_oss") or options.get("attn_implementation") == "eager"
    options.setdefault("attn_implementation", "eager" if eager else "sdpa")
    options.setdefault("dtype", torch.float32 if eager else torch.float64)
    return build(family, **options)


def tolerance(model: Any) -> float:
    return 1e-10 if model.dtype == torch.float64 else 2e-5


def tokens(lengths: list[int], batch: int = 1, seed: int = 7) -> list[Tensor]:
    """Ids of forwards of these lengths, `(batch, length)` each."""
    return list(token_ids(batch, sum(lengths), seed=seed).split(lengths, dim=1))


def held(cache: Any) -> dict[int, list[list[list[int]]]]:
    """Positions per ragged layer, row and head."""
    return {
        i: [[[p for p in head if p >= 0] for head in row] for row in layer.dense()[2].tolist()]
        for i, layer in enumerate(cache.layers)
        if isinstance(layer, RaggedLayer)
    }


class Whole:
    """A model with a plain cache, of which each head is shown some tokens.

    Attributes:
        shown: per layer, row and KV head, which tokens of the past, by position; None: all.
    """

    def __init__(self, model: Any) -> None:
        self.model, self.cache = model, DynamicCache(config=model.config)
        self.shown: dict[int, list[list[list[int]]]] | None = None

    @torch.no_grad()
    def __call__(self, ids: Tensor, **inputs: Tensor) -> Tensor:
        handles = [
            site.module.register_forward_pre_hook(self._masking(site), with_kwargs=True)
            for site in attention_sites(self.model)
            if self.shown is not None
        ]
        try:
            logits: Tensor = self.model(ids, past_key_values=self.cache, **inputs).logits
        finally:
            for handle in handles:
                handle.remove()
        return logits

    def _masking(self, site: AttentionSite) -> Any:
        def hook(_: Any, args: Any, kwargs: Any) -> Any:
            assert self.shown is not None
            hidden = Arguments(args, kwargs, site.signature.parameters).get("hidden_states")
            batch, n_new = hidden.shape[:2]
            past = self.cache.layers[site.layer_idx].get_seq_length()
            mask = torch.full((batch, site.num_heads, n_new, past + n_new), -1e30)
            group = site.num_heads // site.num_kv_heads
            for row in range(batch):
                for head in range(site.num_heads):
                    shown = self.shown[site.layer_idx][row][head // group]
                    mask[row, head, :, [p for p in shown if p < past]] = 0
                    for i in range(n_new):
                        mask[row, head, i, past : past + i + 1] = 0
            changed = Arguments(args, kwargs, site.signature.parameters).replace(
                attention_mask=mask.to(hidden.dtype)
            )
            return changed.args, changed.kwargs

        return hook


# ---- against heads that are shown what they keep -------------------------------------------------


@torch.no_grad()
def check_against_whole(press: Any, model: Any, whole: Whole, batch: int = 2) -> None:
    cache, atol = DynamicCache(config=model.config), tolerance(model)
    with press(model):
        for step, ids in enumerate(tokens(FORWARDS, batch)):
            logits = model(ids, past_key_values=cache).logits
            torch.testing.assert_close(logits, whole(ids), rtol=0, atol=atol)
            whole.shown = held(cache)
            for i, rows in whole.shown.items():
                assert cache.layers[i].get_seq_length() == sum(FORWARDS[: step + 1])
                for row, heads in enumerate(rows):
                    for head, positions in enumerate(heads):
                        keys, values = cache.layers[i].head(row * len(heads) + head)
                        full = whole.cache.layers[i]
                        for found, all_of_them in ((keys, full.keys), (values, full.values)):
                            expected = all_of_them[row, head, positions]
                            torch.testing.assert_close(found, expected, rtol=0, atol=atol)
    counts = [count for i in whole.shown for count in cache.layers[i].counts]
    assert sum(counts) < 0.8 * len(counts) * sum(FORWARDS)
    assert len(set(counts)) > 1
    assert {site.layer_idx for site in attention_sites(model)} == whole.shown.keys()


@in_turn("name, family", PRESSES, ["llama", "gpt_neox"])
def test_logits_are_those_of_heads_that_are_shown_what_they_keep(package, name, family):
    model = make(family)
    check_against_whole(PRESSES[name](package, model), model, Whole(make(family)))


@in_turn(
    "family, name",
    ["gpt2", "qwen3", "gemma2", "gpt_oss"],
    ["ada", "dms, decoding", "duo", "kvzip"],
)
def test_families(package, family, name):
    model = make(family)
    check_against_whole(PRESSES[name](package, model), model, Whole(make(family)))


@both
@pytest.mark.parametrize("implementation", ["eager", "sdpa", "flex_attention"])
@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
def test_attention_implementations(package, implementation, family):
    model = make(family, attn_implementation=implementation, dtype=torch.float32)
    whole = Whole(make(family, attn_implementation="eager"))
    check_against_whole(PRESSES["ada"](package, model), model, whole)


@both
@pytest.mark.parametrize("num_kv_heads", [1, 4, 8])
def test_groups(package, num_kv_heads):
    options = {"num_heads": 8, "num_kv_heads": num_kv_heads}
    model = make(**options)
    press = package.DMSPress(package.KnormPress(), threshold(model), sliding_window_size=6)
    check_against_whole(press, model, Whole(make(**options)), batch=1)


# ---- both mechanisms -----------------------------------------------------------------------------


@presses
@pytest.mark.parametrize("family", ["llama", "gpt_neox", "gemma2"])
@torch.no_grad()
def test_both_mechanisms_leave_the_same_bits(name, family):
    options = {"attn_implementation": "eager"} if family == "gemma2" else {}
    model = build(family, **options)  # float32
    caches, logits = [], []
    for package in (hooks_impl, patch_impl):
        caches.append(DynamicCache(config=model.config))
        with PRESSES[name](package, model)(model):
            forwards = tokens(FORWARDS, batch=2)
            logits.append([model(ids, past_key_values=caches[-1]).logits for ids in forwards])
    assert held(caches[0]) == held(caches[1])
    for one, other in zip(*logits, strict=True):
        assert torch.equal(one, other)
    for one, other in zip(*(cache.layers for cache in caches), strict=True):
        assert torch.equal(one.keys, other.keys)
        assert torch.equal(one.values, other.values)


# ---- padded batches ------------------------------------------------------------------------------

PADDING = [0, 9, 23]


@torch.no_grad()
def run_padded(model: Any, press: Any, cache: Any, forwards: list[Tensor]) -> Iterator[Tensor]:
    """Logits of each forward of a batch whose first one is padded by `PADDING`."""
    _, mask, positions = left_padded(3, LENGTH, PADDING)
    with press(model):
        for ids in forwards:
            if ids is not forwards[0]:
                mask = torch.cat((mask, torch.ones_like(ids)), dim=1)
                positions = positions[:, -1:] + 1 + torch.arange(ids.shape[1])
            yield model(
                ids, attention_mask=mask, position_ids=positions, past_key_values=cache
            ).logits


# Those that replay rows are refused such batches of hybrid models, see below.
@in_turn("name", [name for name in PRESSES if name not in REPLAYING])
def test_rows_of_a_padded_batch_beside_sliding_layers(package, name):
    test_rows_of_a_padded_batch_are_those_of_the_row_alone(package, name, "gemma2")


@in_turn("name, family", PRESSES, ["llama", "gpt_neox"])
@torch.no_grad()
def test_rows_of_a_padded_batch_are_those_of_the_row_alone(package, name, family):
    model = make(family)
    press, cache = PRESSES[name](package, model), DynamicCache(config=model.config)
    forwards = tokens([LENGTH, 4, 1, 1, 2], batch=3)
    for row, n in enumerate(PADDING):
        forwards[0][row, :n] = 0
    together = list(run_padded(model, press, cache, forwards))
    for row, n in enumerate(PADDING):
        alone = DynamicCache(config=model.config)
        own = [forwards[0][row : row + 1, n:], *(ids[row : row + 1] for ids in forwards[1:])]
        with press(model):
            for logits, ids in zip(together, own, strict=True):
                expected = model(ids, past_key_values=alone).logits[0]
                found = logits[row, -ids.shape[1] :]
                torch.testing.assert_close(found, expected, rtol=0, atol=tolerance(model))
        for layer, heads in held(alone).items():
            assert held(cache)[layer][row] == [[p + n for p in head] for head in heads[0]]


@both
@pytest.mark.parametrize("implementation", ["eager", "sdpa", "flex_attention"])
@torch.no_grad()
def test_padding_is_not_stored(package, implementation):
    model = make(attn_implementation=implementation, dtype=torch.float32)
    cache, (ids, _, _) = DynamicCache(config=model.config), left_padded(3, LENGTH, PADDING)
    press = PRESSES["ada"](package, model)
    for logits in run_padded(model, press, cache, [ids, *tokens([3, 1], batch=3)]):
        assert logits.isfinite().all()
    for layer, lengths in zip(held(cache).values(), kept_lengths(cache), strict=True):
        assert lengths.sum(dim=-1).tolist() == [2 * (int((LENGTH - n) * 0.4) + 4) for n in PADDING]
        for row, n in enumerate(PADDING):
            assert all(min(head) >= n for head in layer[row])


# ---- generate ------------------------------------------------------------------------------------


@both
@presses
def test_generate_in_a_padded_batch_is_generate_of_each_row(package, name):
    model = make("gpt_neox")
    press, (ids, mask, _) = PRESSES[name](package, model), left_padded(3, LENGTH, PADDING)
    with press(model):
        batch = model.generate(ids, attention_mask=mask, **GREEDY)
        for row, n in enumerate(PADDING):
            alone = model.generate(ids[row : row + 1, n:], **GREEDY)
            assert torch.equal(alone[0, -8:], batch[row, -8:])
    assert len({tuple(row) for row in batch[:, -8:].tolist()}) == 3


@both
@pytest.mark.parametrize("name", [name for name in PRESSES if "decoding" not in name])
@torch.no_grad()
def test_generate_inside_the_scope_is_generate_after_it(package, name):
    model, ids = make(), token_ids(2, LENGTH)
    press, cache = PRESSES[name](package, model), DynamicCache(config=model.config)
    with press(model):
        inside = model.generate(ids, **GREEDY)
        first = model(ids, past_key_values=cache).logits[:, -1:].argmax(dim=-1)
    with headwise(model):
        options = {**GREEDY, "max_new_tokens": 7, "past_key_values": cache}
        assert torch.equal(model.generate(torch.cat((ids, first), dim=1), **options), inside)


def log_probabilities(press: Any, model: Any, sequence: Tensor, length: int) -> list[Tensor]:
    """Of each token after the first `length` of a `sequence`, given those before it."""
    cache = DynamicCache(config=model.config)
    with press(model), torch.no_grad():
        found = [model(sequence[None, :length], past_key_values=cache).logits[0, -1]]
        for token in sequence[length:-1]:
            found.append(model(token.view(1, 1), past_key_values=cache).logits[0, -1])
    return [logits.log_softmax(dim=-1) for logits in found]


@presses
def test_beams_score_as_their_sequences_do_alone(name):
    model, ids, found = make(), token_ids(2, LENGTH), []
    options = {**GREEDY, "num_beams": 3, "num_return_sequences": 2, "length_penalty": 0.0}
    for package in (hooks_impl, patch_impl):
        with PRESSES[name](package, model)(model):
            found.append(
                model.generate(ids, return_dict_in_generate=True, output_scores=True, **options)
            )
    assert torch.equal(found[0].sequences, found[1].sequences)
    assert torch.equal(found[0].sequences_scores, found[1].sequences_scores)
    press = PRESSES[name](hooks_impl, model)
    for sequence, score in zip(found[0].sequences, found[0].sequences_scores, strict=True):
        alone = log_probabilities(press, model, sequence, LENGTH)
        total = sum(
            float(logs[token]) for logs, token in zip(alone, sequence[LENGTH:], strict=True)
        )
        assert total == pytest.approx(float(score), abs=1e-4)  # generate adds up in float32


@presses
def test_samples_are_drawn_from_what_each_sequence_gives_alone(name):
    model, ids, found = make(), token_ids(2, LENGTH), []
    options = {**GREEDY, "do_sample": True, "num_return_sequences": 2, "top_k": 0}
    for package in (hooks_impl, patch_impl):
        torch.manual_seed(0)
        with PRESSES[name](package, model)(model):
            found.append(
                model.generate(ids, return_dict_in_generate=True, output_logits=True, **options)
            )
    assert torch.equal(found[0].sequences, found[1].sequences)
    assert len({tuple(row) for row in found[0].sequences[:2].tolist()}) == 2
    press = PRESSES[name](hooks_impl, model)
    for row, sequence in enumerate(found[0].sequences):
        alone = log_probabilities(press, model, sequence, LENGTH)
        for logits, expected in zip(found[0].logits, alone, strict=True):
            logs = logits[row].double().log_softmax(dim=-1)
            torch.testing.assert_close(logs, expected, rtol=0, atol=1e-5)


# ---- what one does with a cache between forwards -------------------------------------------------


@both
@presses
@torch.no_grad()
def test_many_questions_on_one_compressed_cache(package, name):
    """Each is cropped off again; or asked of a copy."""
    model, cache = make(), DynamicCache(config=make().config)
    with PRESSES[name](package, model)(model):
        model(token_ids(2, LENGTH), past_key_values=cache)
    questions = tokens([6, 3, 9], batch=2)
    with headwise(model):
        expected = [model(ids, past_key_values=copy.deepcopy(cache)).logits for ids in questions]
        for ids, logits in zip(questions, expected, strict=True):
            assert torch.equal(model(ids, past_key_values=cache).logits, logits)
            cache.crop(-ids.shape[1])
            assert cache.get_seq_length() == LENGTH


@both
@presses
@torch.no_grad()
def test_rows_may_be_selected_repeated_and_reordered(package, name):
    model = make()
    press, rows = PRESSES[name](package, model), [2, 0, 0, 2]
    ids, following = token_ids(3, LENGTH), tokens([2, 1, 4, 1], batch=3)
    cache, reference = DynamicCache(config=model.config), DynamicCache(config=model.config)
    with press(model):
        model(ids, past_key_values=cache)
        model(ids[rows], past_key_values=reference)
        model(following[0], past_key_values=cache)
        model(following[0][rows], past_key_values=reference)
        cache.batch_select_indices(torch.tensor([2, 0]))
        cache.batch_repeat_interleave(2)
        cache.reorder_cache(torch.tensor([0, 2, 3, 1]))
        for new in following[1:]:
            logits = model(new[rows], past_key_values=cache).logits
            expected = model(new[rows], past_key_values=reference).logits
            torch.testing.assert_close(logits, expected, rtol=0, atol=1e-10)
    assert held(cache) == held(reference)


@both
@pytest.mark.parametrize("name", [*PRESSES, "channels"])
@torch.no_grad()
def test_a_reset_cache_is_refused(package, name):
    model, cache = make(), DynamicCache(config=make().config)
    press = think(package, True) if name == "channels" else PRESSES[name](package, model)
    with press(model):
        model(token_ids(1, LENGTH), past_key_values=cache)
        cache.reset()
        assert cache_nbytes(cache) == 0
        with pytest.raises(ScopeError, match="make a new one"):
            model(token_ids(1, LENGTH), past_key_values=cache)


# ---- memory --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def long_context() -> tuple[Any, int]:
    """A model and the bytes of the whole cache of 2,048 tokens."""
    model = build("llama", num_layers=1, num_heads=4, num_kv_heads=4, head_dim=8)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(token_ids(1, 2048), past_key_values=cache)
    return model, cache_nbytes(cache)


@both
@pytest.mark.parametrize("ratio", [0.2, 0.5, 0.8, 0.9])
@torch.no_grad()
def test_bytes_are_those_of_what_is_kept(package, ratio, long_context):
    """And of a few per cent of room; while decoding, too."""
    model, full = long_context
    scorer = package.KnormPress(ratio)
    for press in (
        package.AdaKVPress(scorer),
        package.CriticalAdaKVPress(scorer),
        package.KVzipPress(ratio, prompts=PROMPTS),
        package.KVgradPress(ratio, prompts=PROMPTS),
        package.KVComposePress(ratio, structured=False),
    ):
        cache = DynamicCache(config=model.config)
        with press(model):
            model(token_ids(1, 2048), past_key_values=cache)
            layer = cache.layers[0]
            assert sum(layer.counts) == pytest.approx(2048 * 4 * (1 - ratio), abs=8)
            assert max(layer.counts) > min(layer.counts)
            assert cache_nbytes(cache) <= (1 - ratio) * 1.03 * full
            for step in range(30):
                model(token_ids(1, 1, seed=step), past_key_values=cache)
        assert cache_nbytes(cache) <= ((1 - ratio) * 2048 + 30) * 1.03 * full / 2048


@both
@torch.no_grad()
def test_bytes_of_presses_that_evict_as_much_as_they_find(package, long_context):
    model, full = long_context
    for press in (
        package.DMSPress(package.KnormPress(), threshold(model)),
        package.DuoAttentionPress(0.5, head_scores=HeadScores(torch.arange(4.0)[None])),
    ):
        cache = DynamicCache(config=model.config)
        with press(model):
            model(token_ids(1, 2048), past_key_values=cache)
        assert 0.1 < press.compression_ratio < 0.9
        assert cache_nbytes(cache) <= (1 - press.compression_ratio) * 1.03 * full


@both
@presses
@torch.no_grad()
def test_ratios_say_what_was_evicted(package, name):
    model, cache = make(), DynamicCache(config=make().config)
    press = PRESSES[name](package, model)
    with press(model):
        model(token_ids(2, LENGTH), past_key_values=cache)
    left = sum(int(lengths.sum()) for lengths in kept_lengths(cache))
    assert press.compression_ratio == pytest.approx(1 - left / (2 * 2 * 2 * LENGTH), abs=0.03)


# ---- fewer channels ------------------------------------------------------------------------------


def think(package: Any, free_memory: bool, ratio: float = 0.5) -> Any:
    return package.ThinKPress(ratio, window_size=8, free_memory=free_memory)


@both
@pytest.mark.parametrize(
    "family", ["llama", "gpt_neox", "gpt2", "qwen3", "gemma2", "gpt_oss", "cohere"]
)
@torch.no_grad()
def test_channels_left_out_are_as_good_as_zeros(package, family):
    model, caches = make(family), []
    logits: list[list[Tensor]] = []
    for free_memory in (False, True):
        caches.append(DynamicCache(config=model.config))
        with think(package, free_memory)(model):
            forwards = tokens([LENGTH, 5, *[1] * 12, 3], batch=2)
            logits.append([model(ids, past_key_values=caches[-1]).logits for ids in forwards])
    for zeroed, freed in zip(*logits, strict=True):
        torch.testing.assert_close(freed, zeroed, rtol=0, atol=tolerance(model))
    plain = DynamicCache(config=model.config)
    assert not torch.allclose(
        logits[0][1], [model(ids, past_key_values=plain).logits for ids in forwards[:2]][1]
    )
    for site in attention_sites(model):
        layer, whole = (cache.layers[site.layer_idx] for cache in reversed(caches))
        assert isinstance(layer, ChannelPrunedLayer)
        kept = whole.keys[:, :, :LENGTH].any(dim=2)  # (B, H_kv, d)
        assert layer.channels.shape[-1] == layer.keys.shape[-1] == site.head_dim // 2
        for row, heads in enumerate(kept):
            for head, of_head in enumerate(heads):
                assert layer.channels[row, head].tolist() == of_head.nonzero().flatten().tolist()


@torch.no_grad()
def test_both_mechanisms_leave_out_the_same_channels():
    model = build("llama")  # float32
    caches, logits = [], []
    for package in (hooks_impl, patch_impl):
        caches.append(DynamicCache(config=model.config))
        with think(package, True)(model):
            forwards = tokens(FORWARDS, batch=2)
            logits.append([model(ids, past_key_values=caches[-1]).logits for ids in forwards])
    assert all(torch.equal(one, other) for one, other in zip(*logits, strict=True))
    for one, other in zip(*(cache.layers for cache in caches), strict=True):
        for name in ("keys", "values", "recent_keys", "channels"):
            assert torch.equal(getattr(one, name), getattr(other, name))


@both
@pytest.mark.parametrize("ratio", [0.25, 0.5, 0.75])
@torch.no_grad()
def test_bytes_of_channels_left_out_are_free(package, ratio):
    model, sizes = build("llama"), []
    for press in (None, think(package, False, ratio), think(package, True, ratio)):
        cache = DynamicCache(config=model.config)
        if press is None:
            model(token_ids(1, 200), past_key_values=cache)
        else:
            with press(model):
                model(token_ids(1, 200), past_key_values=cache)
        sizes.append(cache_nbytes(cache))
    full, zeroed, freed = sizes
    assert zeroed == full
    assert freed == full * (1 - ratio / 2)


@both
@torch.no_grad()
def test_fewer_channels_need_a_scope(package):
    model, caches = make(), []
    for _ in range(2):
        caches.append(DynamicCache(config=model.config))
        with think(package, True)(model):
            model(token_ids(1, LENGTH), past_key_values=caches[-1])
    ids = token_ids(1, 4, seed=2)
    for other in (headwise(make()), package.KnormPress(0.5)(model)):
        with other, pytest.raises(ScopeError, match=r"attention_patch\.headwise\(model\)"):
            model(ids, past_key_values=caches[0])
    with think(package, True)(model):
        expected = model(ids, past_key_values=caches[0]).logits
    with headwise(model):
        assert torch.equal(model(ids, past_key_values=caches[1]).logits, expected)


@both
@torch.no_grad()
def test_fewer_channels_in_a_padded_batch(package):
    model, cache = make(), DynamicCache(config=make().config)
    press, forwards = think(package, True), tokens([LENGTH, 4, 1, 2], batch=3)
    together = list(run_padded(model, press, cache, forwards))
    for row, n in enumerate(PADDING):
        alone = DynamicCache(config=model.config)
        own = [forwards[0][row : row + 1, n:], *(ids[row : row + 1] for ids in forwards[1:])]
        with press(model):
            for logits, ids in zip(together, own, strict=True):
                expected = model(ids, past_key_values=alone).logits[0]
                found = logits[row, -ids.shape[1] :]
                torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
        assert torch.equal(cache.layers[0].channels[row], alone.layers[0].channels[0])


@both
def test_fewer_channels_with_beams_and_questions(package):
    model, ids, found = make(), token_ids(2, LENGTH), []
    for free_memory in (False, True):
        with think(package, free_memory)(model):
            found.append(model.generate(ids, **{**GREEDY, "num_beams": 3}))
    assert torch.equal(*found)
    cache = DynamicCache(config=model.config)
    with think(package, True)(model), torch.no_grad():
        model(ids, past_key_values=cache)
        first = model(token_ids(2, 5, seed=3), past_key_values=cache).logits
        cache.crop(-5)
        assert torch.equal(model(token_ids(2, 5, seed=3), past_key_values=cache).logits, first)
        with pytest.raises(UnsupportedCacheError, match="cannot crop 6 tokens"):
            cache.crop(-6)


@both
@torch.no_grad()
def test_fewer_channels_of_fewer_tokens(package):
    """After a press that evicts tokens; not before it, for it could not read the keys."""
    model, logits = make(), []
    for free_memory in (False, True):
        cache = DynamicCache(config=model.config)
        inner = [package.KnormPress(0.5), think(package, free_memory)]
        with package.ComposedPress(inner)(model):
            ids = tokens(FORWARDS, batch=2)
            logits.append([model(new, past_key_values=cache).logits for new in ids])
    assert cache.layers[0].keys.shape == (2, 2, LENGTH // 2, 8)
    for zeroed, freed in zip(*logits, strict=True):
        torch.testing.assert_close(freed, zeroed, rtol=0, atol=1e-10)
    with pytest.raises(HyperparameterError):
        package.ComposedPress([think(package, True), package.KnormPress(0.5)])
    with (
        package.KnormPress(0.5)(model),
        think(package, True)(model),
        pytest.raises(UnsupportedInputError, match="open that scope outermost"),
    ):
        model(token_ids(1, LENGTH), past_key_values=DynamicCache(config=model.config))


@both
@torch.no_grad()
def test_fewer_channels_under_flex_attention(package):
    logits = []
    for implementation in ("sdpa", "flex_attention"):
        model = build("llama", attn_implementation=implementation)
        cache = DynamicCache(config=model.config)
        with think(package, True)(model):
            model(token_ids(1, LENGTH), past_key_values=cache)
            logits.append(model(token_ids(1, 3), past_key_values=cache).logits)
    torch.testing.assert_close(*logits, rtol=0, atol=1e-5)


# ---- what cannot be ------------------------------------------------------------------------------


class Offloaded(DynamicCache):
    """Says that it moves its layers away, as one on a GPU does."""

    offloading = property(lambda self: True, lambda self, value: None)

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *_: Any, **__: Any) -> Any:
        if layer_idx == len(self.layers):
            self.layers.append(self.layer_class_to_replicate())
        return self.layers[layer_idx].update(keys, values)


@both
@pytest.mark.parametrize("name", [*PRESSES, "channels"])
@torch.no_grad()
def test_offloaded_caches_are_refused(package, name):
    model = make()
    press = think(package, True) if name == "channels" else PRESSES[name](package, model)
    with press(model), pytest.raises(UnsupportedCacheError, match="without offloading"):
        model(token_ids(1, LENGTH), past_key_values=Offloaded())


@both
@pytest.mark.parametrize("name", sorted(REPLAYING))
@torch.no_grad()
def test_rows_that_cannot_be_replayed_alone_are_refused(package, name):
    """Rows are replayed without their padding, which sliding layers have let go of."""
    model, (ids, _, _) = make("gemma2"), left_padded(3, LENGTH, PADDING)
    press, cache = PRESSES[name](package, model), DynamicCache(config=make("gemma2").config)
    with pytest.raises(UnsupportedCacheError, match="run them one by one"):
        next(run_padded(model, press, cache, [ids]))


@both
@pytest.mark.parametrize("name", [name for name in PRESSES if name != "fast kvzip"])
@torch.no_grad()
def test_no_press_prunes_heads_of_different_lengths_again(package, name):
    """(Fast KVzip acts when all layers have run, on what the outer scope has left.)"""
    model = make()
    press = PRESSES[name](package, model)
    with package.KnormPress(0.5)(model), press(model):
        cache = DynamicCache(config=model.config)
        if name in REPLAYING:  # which act after the outer scope
            with pytest.raises(UnsupportedCacheError, match="use it alone"):
                model(token_ids(1, LENGTH), past_key_values=cache)
        else:
            with pytest.raises(UnsupportedInputError, match="open that scope outermost"):
                model(token_ids(1, LENGTH), past_key_values=cache)


@both
@presses
@torch.no_grad()
def test_dropout_is_refused(package, name):
    model = build("llama", attn_implementation="eager")
    press, cache = PRESSES[name](package, model), DynamicCache(config=model.config)
    with press(model):
        model(token_ids(1, LENGTH), past_key_values=cache)
        model.train()
        for layer in model.model.layers:
            layer.self_attn.attention_dropout = 0.1
        with pytest.raises(UnsupportedInputError, match=r"no dropout, got 0.1; call model\.eval"):
            model(token_ids(1, 1), past_key_values=cache)
