"""Presses that act while decoding, against references that hold everything and forget nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

import hooks_impl
import patch_impl
from attention_patch.scope import headwise
from press_core import Needs, PressError, attention_sites, kept_lengths
from press_core.forward import Arguments
from tests.support import build, in_turn, left_padded, token_ids, watched

both = pytest.mark.parametrize("package", [hooks_impl, patch_impl], ids=["hooks", "patches"])
FAMILIES = ("llama", "gpt_neox")
families = pytest.mark.parametrize("family", FAMILIES)
INF = float("inf")
GREEDY = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}


def make(family: str = "llama", num_layers: int = 2, **options: Any) -> Any:
    """In float64, so that a rounding error decides no top-k."""
    return build(family, num_layers=num_layers, **{"dtype": torch.float64, **options})


def tokens(lengths: list[int], batch: int = 1) -> list[Tensor]:
    """Ids of forwards of these lengths, `(batch, length)` each."""
    drawn = token_ids(batch, sum(lengths), seed=7)
    return list(drawn.split(lengths, dim=1))


def positions_in(layer: Any) -> list[list[list[int]]]:
    """Positions of what each head of each row holds, tokens after the pruning included."""
    batch, heads, n, _ = layer.keys.shape
    if not hasattr(layer, "all_positions"):
        return [[list(range(n))] * heads] * batch
    positions = layer.all_positions().expand(batch, heads, n).tolist()
    return [[[p for p in head if p >= 0] for head in row] for row in positions]


class Whole:
    """A model with a cache that nothing is evicted from, of which each head may see some.

    It is another than the one with the open scope; made the same way, it has the same weights.

    Attributes:
        visible: per layer `(B, H_kv, n)` bool, which of its first `n` tokens each head may see;
            all later ones are visible.
    """

    def __init__(self, model: Any) -> None:
        self.model, self.cache = model, DynamicCache(config=model.config)
        self.visible: dict[int, Tensor] = {}

    def __call__(self, ids: Tensor) -> Tensor:
        handles = [
            site.module.register_forward_pre_hook(self._hook(site), with_kwargs=True)
            for site in attention_sites(self.model)
        ]
        try:
            with torch.no_grad():
                logits: Tensor = self.model(ids, past_key_values=self.cache).logits
        finally:
            for handle in handles:
                handle.remove()
        return logits

    def _hook(self, site: Any) -> Any:
        def hook(_: Any, args: Any, kwargs: Any) -> Any:
            hidden = Arguments(args, kwargs, site.signature.parameters).get("hidden_states")
            past, n_new = self.cache.layers[site.layer_idx].get_seq_length(), hidden.shape[1]
            shape = hidden.shape[0], site.num_heads, n_new, past + n_new
            mask = torch.ones(shape, dtype=torch.bool).tril(past)
            first = self.visible.get(site.layer_idx)
            if first is not None:
                group = site.num_heads // first.shape[1]
                mask[..., : first.shape[-1]] &= first.repeat_interleave(group, 1).unsqueeze(2)
            added = torch.zeros(shape, dtype=hidden.dtype).masked_fill_(~mask, -1e30)
            changed = Arguments(args, kwargs, site.signature.parameters).replace(
                attention_mask=added
            )
            return changed.args, changed.kwargs

        return hook

    def let_see(self, held: dict[int, Any]) -> None:
        """Let each head see only the positions named, per layer, row and head."""
        for layer, rows in held.items():
            seen = self.cache.layers[layer].get_seq_length()
            self.visible[layer] = torch.tensor(
                [[[p in set(head) for p in range(seen)] for head in row] for row in rows]
            )


# ---- slow scores ---------------------------------------------------------------------------------


def best(scores: list[float], n: int) -> list[int]:
    """The `n` best, of equal ones the latest."""
    ranked = sorted(range(len(scores)), key=lambda i: (scores[i], i), reverse=True)
    return sorted(ranked[:n])


def votes(queries: Tensor, keys: Tensor) -> list[float]:
    """Mean attention on each key of the last queries `(G, w, d)`."""
    total, rows = torch.zeros(len(keys), dtype=keys.dtype), queries.shape[1]
    for member in queries:
        for index, query in enumerate(member):
            seen = len(keys) - rows + index + 1
            total[:seen] += (keys[:seen] @ query * 0.25).softmax(dim=0)
    mean: list[float] = (total / (len(queries) * rows)).tolist()
    return mean


def by_norm(queries: list[Tensor], keys: list[Tensor]) -> list[list[float]]:
    return [(-of_head.norm(dim=-1)).tolist() for of_head in keys]


def by_cosine(queries: list[Tensor], keys: list[Tensor]) -> list[list[float]]:
    scores = []
    for of_head in keys:
        unit = of_head / of_head.norm(dim=-1, keepdim=True)
        mean = unit.mean(dim=0)
        scores.append((-(unit @ mean) / mean.norm()).tolist())
    return scores


def by_last_query(queries: list[Tensor], keys: list[Tensor]) -> list[list[float]]:
    """TOVA: over all heads, which therefore have to hold the same tokens."""
    found = [votes(q[:, -1:], k) for q, k in zip(queries, keys, strict=True)]
    mean = [sum(of_token) for of_token in zip(*found, strict=True)]
    return [[*mean[:-1], INF]] * len(keys)


def by_window(queries: list[Tensor], keys: list[Tensor]) -> list[list[float]]:
    """SnapKV with a window of 6 and a kernel of 3."""
    scores = []
    for of_queries, of_keys in zip(queries, keys, strict=True):
        before = len(of_keys) - 6
        found = votes(of_queries[:, -6:], of_keys)[:before]
        pooled = [sum(found[max(0, j - 1) : j + 2]) / 3 for j in range(before)]
        scores.append(pooled + [INF] * 6)
    return scores


BASES: dict[str, tuple[Callable[[Any], Any], Callable[..., list[list[float]]]]] = {
    "knorm": (lambda p: p.KnormPress(), by_norm),
    "keydiff": (lambda p: p.KeyDiffPress(), by_cosine),
    "tova": (lambda p: p.TOVAPress(), by_last_query),
    "snapkv": (lambda p: p.SnapKVPress(window_size=6, kernel_size=3), by_window),
    "pyramid": (lambda p: p.PyramidKVPress(0.5, window_size=6, kernel_size=3), by_window),
}


# ---- at intervals --------------------------------------------------------------------------------


@both
@families
@torch.no_grad()
def test_lengths_over_steps(package, family):
    model, cache = make(family), DynamicCache(config=make(family).config)
    press = package.DecodingPress(package.KnormPress(), compression_interval=5, target_size=20)
    lengths, seen = [], []
    with press(model):
        for ids in tokens([30] + [1] * 17):
            model(ids, past_key_values=cache)
            lengths.append([int(kept[0, 0]) for kept in kept_lengths(cache)])
            seen.append(cache.get_seq_length())
    expected = [30, 31, 32, 33, 34, *[20, 21, 22, 23, 24] * 2, 20, 21, 22]
    assert lengths == [[n, n] for n in expected]
    assert seen == list(range(30, 48))


@both
@torch.no_grad()
def test_forwards_count_and_not_their_tokens(package):
    model, cache = make(), DynamicCache(config=make().config)
    press = package.DecodingPress(package.KnormPress(), compression_interval=3, target_size=20)
    lengths = []
    with press(model):
        for ids in tokens([30, 7, 7, 1, 2, 1, 7, 1]):
            model(ids, past_key_values=cache)
            lengths.append(cache.layers[0].keys.shape[2])
    assert lengths == [30, 37, 44, 20, 22, 23, 20, 21]


@both
@torch.no_grad()
def test_a_cache_no_longer_than_the_target_is_left_whole_and_the_count_starts_anew(package):
    model, cache = make(), DynamicCache(config=make().config)
    press = package.DecodingPress(package.KnormPress(), compression_interval=5, target_size=20)
    lengths = []
    with press(model):
        for ids in tokens([10] + [1] * 15):
            model(ids, past_key_values=cache)
            lengths.append(cache.layers[0].keys.shape[2])
    assert lengths == [*range(10, 25), 20]
    assert cache.layers[0].get_seq_length() == 25


@both
@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize(
    ("interval", "target", "buffer", "lengths"),
    [
        (5, 20, 256, [30] + [1] * 12),
        (4, 25, 3, [30] + [1] * 9),
        (1, 30, 1, [30, 1, 1, 1, 1]),
        (2, 24, 4, [30, 7, 1, 3, 3]),
        (8, 27, 256, [25] + [1] * 16),
    ],
)
def test_kept_are_the_best_by_the_exact_queries_of_the_last_tokens(
    package, base, interval, target, buffer, lengths
):
    """Scores computed anew from all queries and keys that the model ever made."""
    make_base, slow = BASES[base]
    model, cache = make(), DynamicCache(config=make().config)
    press = package.DecodingPress(make_base(package), interval, target, buffer)
    assert_prunes_by(model, press, cache, slow, tokens(lengths, batch=2))


@both
@pytest.mark.parametrize("base", ["tova", "snapkv"])
def test_kept_are_the_best_in_gpt_neox(package, base):
    make_base, slow = BASES[base]
    model, cache = make("gpt_neox"), DynamicCache(config=make("gpt_neox").config)
    press = package.DecodingPress(make_base(package), 4, 20)
    assert_prunes_by(model, press, cache, slow, tokens([24] + [1] * 9, batch=2))


@torch.no_grad()
def assert_prunes_by(
    model: Any,
    press: Any,
    cache: DynamicCache,
    slow: Any,
    forwards: list[Tensor],
    scope: Any = None,
) -> None:
    """Run the forwards, the first a prefill, and after each compare what every head holds.

    Args:
        press: the DecodingPress whose fields say when to prune.
        scope: the press to open, if that is another.
    """
    with (scope or press)(model):
        model(forwards[0], past_key_values=cache)
        batch, n_kv = cache.layers[0].keys.shape[:2]
        heads = [(layer, row, h) for layer in (0, 1) for row in range(batch) for h in range(n_kv)]
        held = {at: positions_in(cache.layers[at[0]])[at[1]][at[2]] for at in heads}
        keys = {at: list(cache.layers[at[0]].keys[at[1], at[2]]) for at in heads}
        asked: dict[Any, list[Tensor]] = {at: [] for at in heads}
        seen, steps = forwards[0].shape[1], 0
        for ids in forwards[1:]:
            with watched() as calls:
                model(ids, past_key_values=cache)
            n_new, steps = ids.shape[1], steps + 1
            for at in heads:
                ((query, key),) = calls[at[0]]
                grouped = query[at[1]].unflatten(0, (n_kv, -1))[at[2]]
                held[at] = held[at] + list(range(seen, seen + n_new))
                keys[at] += list(key[at[1], at[2], -n_new:])
                asked[at] = (asked[at] + list(grouped.unbind(1)))[
                    -press.hidden_states_buffer_size :
                ]
            seen += n_new
            if steps == press.compression_interval:
                for layer, row in {at[:2] for at in heads}:
                    of_row = [(layer, row, h) for h in range(n_kv)]
                    if len(held[of_row[0]]) > press.target_size:
                        scores = slow(
                            [torch.stack(asked[at], dim=1) for at in of_row],
                            [torch.stack(keys[at]) for at in of_row],
                        )
                        for at, of_head in zip(of_row, scores, strict=True):
                            chosen = best(of_head, press.target_size)
                            held[at] = [held[at][i] for i in chosen]
                            keys[at] = [keys[at][i] for i in chosen]
                steps, asked = 0, {at: [] for at in heads}
            for layer, row, head in heads:
                at = layer, row, head
                assert positions_in(cache.layers[layer])[row][head] == held[at]
                assert torch.equal(cache.layers[layer].keys[row, head], torch.stack(keys[at]))
                assert cache.layers[layer].get_seq_length() >= len(held[at])


@both
@families
@torch.no_grad()
def test_logits_are_those_of_heads_that_see_what_is_kept(package, family):
    model, whole = make(family), Whole(make(family))
    press, cache = (
        package.DecodingPress(package.SnapKVPress(window_size=4), 3, 20),
        DynamicCache(config=model.config),
    )
    with press(model):
        for ids in tokens([30, 5, *[1] * 8, 4], batch=2):
            logits = model(ids, past_key_values=cache).logits
            torch.testing.assert_close(logits, whole(ids), rtol=0, atol=1e-10)
            whole.let_see({i: positions_in(layer) for i, layer in enumerate(cache.layers)})
    assert cache.layers[0].keys.shape[2] < 27


@both
@torch.no_grad()
def test_sequences_in_a_row_count_for_themselves(package):
    """Two caches in turn, and the second prefill of a cache that was reset, in one scope."""
    model = make()
    press = package.DecodingPress(package.SnapKVPress(window_size=4), 4, 20)

    def run(cache: DynamicCache, forwards: list[Tensor]) -> Iterator[list[Any]]:
        for ids in forwards:
            model(ids, past_key_values=cache)
            yield [positions_in(layer) for layer in cache.layers]

    lengths = ([30] + [1] * 9, [25] + [1] * 9)
    alone = []
    for batch, lens in enumerate(lengths, start=1):
        with press(model):
            alone.append(list(run(DynamicCache(config=model.config), tokens(lens, batch))))
    assert [len(row[0][0][0]) for row in alone[0]][-1] != 39
    with press(model):
        first, second = DynamicCache(config=model.config), DynamicCache(config=model.config)
        in_turn = zip(
            run(first, tokens(lengths[0], 1)), run(second, tokens(lengths[1], 2)), strict=True
        )
        assert [list(x) for x in zip(*in_turn, strict=True)] == alone
        first.reset()
        assert list(run(first, tokens(lengths[1], 2))) == alone[1]


@both
@torch.no_grad()
def test_a_scope_that_opens_counts_from_there(package):
    model, cache = make(), DynamicCache(config=make().config)
    press, lengths = package.DecodingPress(package.KnormPress(), 4, 20), []
    for steps in (3, 3, 5):
        with press(model):
            for ids in tokens([30] * (not lengths) + [1] * steps):
                model(ids, past_key_values=cache)
                lengths.append(cache.layers[0].keys.shape[2])
    assert lengths == [30, 31, 32, 33, 34, 35, 36, 37, 38, 39, 20, 21]


DECODING: dict[str, Callable[[Any], Any]] = {
    "knorm": lambda p: p.DecodingPress(p.KnormPress(), 3, 16),
    "snapkv": lambda p: p.DecodingPress(p.SnapKVPress(window_size=4), 3, 16),
    "tova, small buffer": lambda p: p.DecodingPress(p.TOVAPress(), 3, 16, 1),
    "expected": lambda p: p.DecodingPress(
        p.ExpectedAttentionPress(n_future_positions=8, n_sink=1), 3, 16
    ),
    "observed": lambda p: p.DecodingPress(p.ObservedAttentionPress(), 3, 16),
    "lagkv": lambda p: p.DecodingPress(p.LagKVPress(lag_size=3, n_sink=2), 3, 16),
    "critical": lambda p: p.DecodingPress(p.CriticalKVPress(p.TOVAPress()), 3, 16),
    "streaming": lambda p: p.StreamingLLMDecodingPress(max_capacity=16, n_sink=3),
    "streaming, rerotated": lambda p: p.StreamingLLMDecodingPress(16, 3, rerotate=True),
    "both phases": lambda p: p.PrefillDecodingPress(
        p.SnapKVPress(0.5, window_size=4), p.DecodingPress(p.SnapKVPress(window_size=4), 3, 16)
    ),
    "both phases, rerotated": lambda p: p.PrefillDecodingPress(
        p.KeyRerotationPress(p.SnapKVPress(0.5, window_size=4)),
        p.DecodingPress(p.ExpectedAttentionPress(n_future_positions=8, n_sink=1), 3, 16),
    ),
    "both phases, chunks": lambda p: p.PrefillDecodingPress(
        p.ChunkKVPress(p.KnormPress(0.5), chunk_length=7), p.DecodingPress(p.KnormPress(), 3, 16)
    ),
    "dms": lambda p: p.DMSPress(p.KnormPress(), -4.0, sliding_window_size=8, decoding=True),
}
decoding_presses = pytest.mark.parametrize("name", DECODING)


@in_turn("name, family", DECODING, FAMILIES)
@torch.no_grad()
def test_rows_of_a_padded_batch_are_those_of_the_row_alone(package, name, family):
    model, press = make(family), DECODING[name](package)
    padding, length = [0, 13, 33], 40
    ids, mask, positions = left_padded(3, length, padding)
    following = tokens([1, 4, *[1] * 9], batch=3)
    together = list(run_padded(model, press, ids, mask, positions, following))
    for row, n in enumerate(padding):
        cache = DynamicCache(config=model.config)
        with press(model):
            for (logits, held), new in zip(together, [ids[:, n:], *following], strict=True):
                alone = model(new[row : row + 1], past_key_values=cache).logits[0]
                torch.testing.assert_close(logits[row, -len(alone) :], alone, rtol=0, atol=1e-6)
                for layer, single in zip(held, held_in(cache), strict=True):
                    seen = [[p for p in head if p >= n] for head in layer[row]]
                    assert seen == [[p + n for p in head] for head in single[0]]


def held_in(cache: DynamicCache) -> list[Any]:
    """Positions per layer, row and head, whatever kind of layer it is."""
    return [
        [[[p for p in head if p >= 0] for head in row] for row in layer.dense()[2].tolist()]
        if hasattr(layer, "dense")
        else positions_in(layer)
        for layer in cache.layers
    ]


def run_padded(
    model: Any,
    press: Any,
    ids: Tensor,
    mask: Tensor,
    positions: Tensor | None,
    following: list[Tensor],
) -> Iterator[tuple[Tensor, list[Any]]]:
    """Logits and positions held after each forward of a padded batch."""
    cache, last = DynamicCache(config=model.config), None
    with press(model):
        for new in (ids, *following):
            mask = mask if new is ids else torch.cat((mask, torch.ones_like(new)), dim=1)
            if positions is not None:
                last = positions if last is None else last[:, -1:] + 1 + torch.arange(new.shape[1])
            logits = model(
                new, attention_mask=mask, position_ids=last, past_key_values=cache
            ).logits
            yield logits, held_in(cache)


@both
@pytest.mark.parametrize("rerotate", [False, True])
@torch.no_grad()
def test_padding_that_positions_count(package, rerotate):
    """Without `position_ids` models count padding too; rotary embeddings see distances only."""
    model = make()
    press = package.StreamingLLMDecodingPress(16, 3, rerotate)
    padding = [0, 13, 33]
    ids, mask, positions = left_padded(3, 40, padding)
    following = tokens([1, 4, *[1] * 9], batch=3)
    runs = [list(run_padded(model, press, ids, mask, p, following)) for p in (positions, None)]
    for (logits, held), (counted_logits, counted_held) in zip(*runs, strict=True):
        assert held == counted_held
        for row, n in enumerate(padding):
            start = n if logits.shape[1] == 40 else 0
            expected = logits[row, start:]
            torch.testing.assert_close(counted_logits[row, start:], expected, rtol=0, atol=1e-5)


@both
@decoding_presses
def test_generate_is_what_forwards_by_hand_are(package, name):
    model, press, ids = make("gpt_neox"), DECODING[name](package), token_ids(2, 30)
    with press(model):
        generated = model.generate(ids, max_new_tokens=14, **GREEDY)
    cache, by_hand = DynamicCache(config=model.config), []
    with press(model), torch.no_grad():
        logits = model(ids, past_key_values=cache).logits
        for _ in range(14):
            by_hand.append(logits[:, -1:].argmax(dim=-1))
            logits = model(by_hand[-1], past_key_values=cache).logits
    assert torch.equal(generated[:, 30:], torch.cat(by_hand, dim=1))
    assert max(len(head) for layer in held_in(cache) for row in layer for head in row) < 40


@decoding_presses
def test_samples_of_both_mechanisms_agree(name):
    model, ids = make(dtype=torch.float32), token_ids(2, 30)
    found = []
    for package in (hooks_impl, patch_impl):
        torch.manual_seed(0)
        with DECODING[name](package)(model):
            options = {"num_return_sequences": 2, "pad_token_id": 0, "eos_token_id": None}
            found.append(model.generate(ids, do_sample=True, max_new_tokens=12, **options))
    assert found[0].shape == (4, 42)
    assert torch.equal(*found)


@both
@decoding_presses
def test_beams_score_as_their_sequences_do_alone(package, name):
    """Whatever beams are reordered: what is remembered of a row follows the row."""
    model, press, ids = make(), DECODING[name](package), token_ids(2, 30)
    with press(model):
        found = model.generate(
            ids,
            max_new_tokens=11,
            num_beams=3,
            num_return_sequences=2,
            length_penalty=0.0,
            return_dict_in_generate=True,
            output_scores=True,
            **GREEDY,
        )
    assert found.sequences.shape == (4, 41)
    for sequence, score in zip(found.sequences, found.sequences_scores, strict=True):
        cache, total = DynamicCache(config=model.config), 0.0
        with press(model), torch.no_grad():
            logits = model(sequence[None, :30], past_key_values=cache).logits
            for token in sequence[30:]:
                total += float(logits[0, -1].log_softmax(dim=-1)[token])
                logits = model(token.view(1, 1), past_key_values=cache).logits
        assert total == pytest.approx(float(score), abs=1e-4)


@both
@decoding_presses
@torch.no_grad()
def test_rows_of_a_batch_may_be_selected_and_repeated(package, name):
    """Between forwards, and the scope goes on as if they had been run so from the start."""
    model, press = make(), DECODING[name](package)
    ids, following = token_ids(3, 30), tokens([1] * 10, batch=3)
    rows = torch.tensor([2, 0, 0, 2])
    cache, reference = DynamicCache(config=model.config), DynamicCache(config=model.config)
    with press(model):
        model(ids, past_key_values=cache)
        model(ids[rows], past_key_values=reference)
        for step, new in enumerate(following):
            if step == 4:
                cache.batch_select_indices(torch.tensor([2, 0]))
                cache.batch_repeat_interleave(2)
                cache.reorder_cache(torch.tensor([0, 2, 3, 1]))
            logits = model(new if step < 4 else new[rows], past_key_values=cache).logits
            expected = model(new[rows], past_key_values=reference).logits
            logits = logits if step >= 4 else logits[rows]
            torch.testing.assert_close(logits, expected, rtol=0, atol=1e-10)
    assert held_in(cache) == held_in(reference)


@both
@decoding_presses
@torch.no_grad()
def test_ratios_are_those_of_the_scope_opened_last(package, name):
    model, press = make(), DECODING[name](package)
    asked = 0.5 if name.startswith("both phases") else 0  # until something is known
    assert press.compression_ratio == asked
    for _ in range(2):
        cache = DynamicCache(config=model.config)
        with press(model):
            assert press.compression_ratio == asked
            for ids in tokens([30] + [1] * 9, batch=2):
                model(ids, past_key_values=cache)
            n_held = sum(int(kept.sum()) for kept in kept_lengths(cache))
            just_now = n_held / 8 if "streaming" not in name else 16
            seen = 39 if "streaming" not in name else 38
            assert press.compression_ratio == pytest.approx(1 - just_now / seen)
        assert press.compression_ratio == pytest.approx(1 - just_now / seen)
    with press(model):
        assert press.compression_ratio == asked


@both
@pytest.mark.parametrize("name", ["knorm", "streaming", "both phases", "dms"])
@torch.no_grad()
def test_padding_is_not_counted_as_evicted(package, name):
    model, press = make(), DECODING[name](package)
    ids, mask, positions = left_padded(2, 40, [0, 22])
    following = tokens([1] * 9, batch=2)
    *_, (_, held) = run_padded(model, press, ids, mask, positions, following)
    n_held = [len(head) for layer in held for row in layer for head in row]
    late = name == "streaming"  # cuts before the forward
    n_seen = 49 + 27 - 2 * late
    expected = 1 - (sum(n_held) / 4 - 2 * late) / n_seen
    assert press.compression_ratio == pytest.approx(expected)


@both
@torch.no_grad()
def test_presses_that_know_too_few_queries(package):
    """A window or sinks longer than what is remembered: a number for every token all the same."""
    model = make()
    for base in (package.ExpectedAttentionPress(n_sink=4), package.SnapKVPress(window_size=12)):
        cache = DynamicCache(config=model.config)
        with package.DecodingPress(base, compression_interval=2, target_size=16)(model):
            for ids in tokens([30, 1, 1]):
                model(ids, past_key_values=cache)
        held = positions_in(cache.layers[0])[0]
        assert [len(head) for head in held] == [16, 16]
        wanted = list(range(4)) if Needs.ROPE in base.needs else list(range(20, 32))
        assert all(set(wanted) <= set(head) for head in held)


# ---- one press for each phase --------------------------------------------------------------------


@both
@pytest.mark.parametrize(
    "name", ["both phases", "both phases, rerotated", "both phases, chunks", "think", "sinks"]
)
@torch.no_grad()
def test_each_phase_has_its_press(package, name):
    """As two scopes, one of which acts after the prefill and the other while decoding."""
    model = make()
    press = {
        "think": lambda p: p.PrefillDecodingPress(
            p.ThinKPress(0.5, window_size=8), p.DecodingPress(p.SnapKVPress(window_size=4), 3, 16)
        ),
        "sinks": lambda p: p.PrefillDecodingPress(
            p.StreamingLLMPress(0.5), p.DecodingPress(p.StreamingLLMPress(), 3, 16)
        ),
        **DECODING,
    }[name](package)
    one, two = DynamicCache(config=model.config), DynamicCache(config=model.config)
    forwards = tokens([30] + [1] * 8, batch=2)
    with press(model):
        logits = [model(ids, past_key_values=one).logits for ids in forwards]
    with press.prefilling_press(model), press.decoding_press(model):
        expected = [model(ids, past_key_values=two).logits for ids in forwards]
    assert held_in(one) == held_in(two)
    for left, right in zip(logits, expected, strict=True):
        assert torch.equal(left, right)
    for left, right in zip(one.layers, two.layers, strict=True):
        assert torch.equal(left.keys, right.keys)


@both
@torch.no_grad()
def test_either_phase_may_be_left_alone(package):
    model, forwards = make(), tokens([30] + [1] * 7)
    prefilling, decoding = (
        package.KnormPress(0.5),
        package.DecodingPress(package.KnormPress(), 3, 9),
    )

    def lengths(press: Any) -> list[int]:
        cache, found = DynamicCache(config=model.config), []
        with press(model):
            for ids in forwards:
                model(ids, past_key_values=cache)
                found.append(cache.layers[1].keys.shape[2])
        return found

    of = package.PrefillDecodingPress
    assert lengths(of()) == list(range(30, 38))
    assert lengths(of(prefilling)) == list(range(15, 23))
    assert lengths(of(None, decoding)) == [30, 31, 32, 9, 10, 11, 9, 10]
    assert lengths(of(prefilling, decoding)) == [15, 16, 17, 9, 10, 11, 9, 10]


@both
@pytest.mark.parametrize("prefilling", ["snapkv", "rerotated", "composed"])
def test_decoding_goes_on_from_what_the_prefill_has_left(package, prefilling):
    first = {
        "snapkv": lambda p: p.SnapKVPress(0.5, window_size=4),
        "rerotated": lambda p: p.KeyRerotationPress(p.KnormPress(0.5)),
        "composed": lambda p: p.ComposedPress([p.KnormPress(0.3), p.KeyDiffPress(0.3)]),
    }[prefilling](package)
    model, (make_base, slow) = make(), BASES["snapkv"]
    decoding = package.DecodingPress(make_base(package), 4, 12)
    press = package.PrefillDecodingPress(first, decoding)
    cache = DynamicCache(config=model.config)
    assert_prunes_by(model, decoding, cache, slow, tokens([30] + [1] * 10, batch=2), press)


# ---- endless -------------------------------------------------------------------------------------


def streamed(seen: list[int], capacity: int, n_sink: int) -> list[int]:
    """What is left before a forward of what was held after the last."""
    if len(seen) <= capacity:
        return seen
    return seen[:n_sink] + seen[len(seen) - (capacity - n_sink) :]


@both
@families
@pytest.mark.parametrize("rerotate", [False, True])
@pytest.mark.parametrize(("capacity", "n_sink"), [(16, 4), (16, 0), (5, 4), (40, 3)])
@torch.no_grad()
def test_sinks_and_window_at_each_step(package, family, rerotate, capacity, n_sink):
    model, cache = make(family), DynamicCache(config=make(family).config)
    press = package.StreamingLLMDecodingPress(capacity, n_sink, rerotate)
    held: list[int] = []
    seen = n_cuts = 0
    with press(model):
        for ids in tokens([12, 1, 9, 1, 1, 3, *[1] * 30], batch=2):
            n_cuts += len(held) > capacity
            held = streamed(held, capacity, n_sink) + list(range(seen, seen + ids.shape[1]))
            model(ids, past_key_values=cache)
            seen += ids.shape[1]
            for layer in cache.layers:
                assert positions_in(layer) == [[held] * layer.keys.shape[1]] * 2
                assert layer.keys.shape[2] <= capacity + ids.shape[1] or seen == 12
                assert layer.get_seq_length() == seen
            assert press.compression_count == n_cuts
    assert press.compression_count == n_cuts > 0


@both
@families
@torch.no_grad()
def test_streamed_logits_are_those_of_a_full_cache_of_which_little_is_seen(package, family):
    model, cache = make(family), DynamicCache(config=make(family).config)
    whole, held, seen = Whole(make(family)), [], 0
    with package.StreamingLLMDecodingPress(max_capacity=16, n_sink=3)(model):
        for ids in tokens([25, 1, 6, *[1] * 20], batch=2):
            held = streamed(held, 16, 3)
            if seen:
                n_kv = whole.cache.layers[0].keys.shape[1]
                whole.let_see({layer: [[held] * n_kv] * 2 for layer in range(2)})
            logits = model(ids, past_key_values=cache).logits
            torch.testing.assert_close(logits, whole(ids), rtol=0, atol=1e-10)
            held = held + list(range(seen, seen + ids.shape[1]))
            seen += ids.shape[1]


@both
@families
@pytest.mark.parametrize(
    ("dtype", "atol"), [(torch.float32, 2e-4), (torch.bfloat16, None)], ids=["float32", "bfloat16"]
)
@torch.no_grad()
def test_positions_in_the_cache(package, family, dtype, atol):
    """Of one layer, keys depend on a token and its position alone: run what is held as a text.

    The error must not grow either, over hundreds of steps.
    """
    model = make(family, num_layers=1, dtype=dtype)
    cache, forwards = DynamicCache(config=model.config), tokens([30, 3, *[1] * 200])
    everything, held, seen = torch.cat(forwards, dim=1), [], 0
    sizes = []
    with package.StreamingLLMDecodingPress(16, 4, rerotate=True)(model):
        for step, ids in enumerate(forwards):
            held = streamed(held, 16, 4) + list(range(seen, seen + ids.shape[1]))
            logits = model(ids, past_key_values=cache).logits
            seen += ids.shape[1]
            sizes.append(cache.layers[0].keys[:, :, :4].float().norm(dim=-1))
            assert logits.isfinite().all()
            if atol is not None and (step < 8 or step % 50 == 0):
                text = model(everything[:, held]).logits[:, -ids.shape[1] :]
                torch.testing.assert_close(logits, text, rtol=0, atol=atol)
    torch.testing.assert_close(sizes[-1], sizes[0], rtol=0.02, atol=0)


@both
@torch.no_grad()
def test_keys_at_their_positions_in_the_cache(package):
    """Distances are what rotary embeddings see: those in the cache, between any two keys."""
    model = make(num_layers=1)
    cache, forwards = DynamicCache(config=model.config), tokens([30] + [1] * 25)
    everything = torch.cat(forwards, dim=1)
    with package.StreamingLLMDecodingPress(16, 4, rerotate=True)(model):
        for ids in forwards:
            model(ids, past_key_values=cache)
    held = positions_in(cache.layers[0])[0][0]
    assert held == [0, 1, 2, 3, *range(42, 55)]
    text = DynamicCache(config=model.config)
    model(everything[:, held], past_key_values=text)
    products = [keys @ keys.mT for keys in (cache.layers[0].keys, text.layers[0].keys)]
    torch.testing.assert_close(*products, rtol=0, atol=1e-4)


@both
def test_endless_generation_is_bounded(package):
    model, cache = make(dtype=torch.float32), DynamicCache(config=make().config)
    with package.StreamingLLMDecodingPress(24, 4)(model):
        generated = model.generate(
            token_ids(1, 20), past_key_values=cache, max_new_tokens=100, **GREEDY
        )
    assert generated.shape == (1, 120)
    assert [layer.keys.shape[2] for layer in cache.layers] == [25, 25]
    assert cache.get_seq_length() == 119


# ---- by a threshold ------------------------------------------------------------------------------


def threshold_of(model: Any, ids: Tensor) -> float:
    """Halfway between the norms of all keys, so that it decides something in every head."""
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids, past_key_values=cache)
    return -float(torch.cat([layer.keys for layer in cache.layers]).norm(dim=-1).median())


@both
@families
@pytest.mark.parametrize("window", [1, 8, 100])
@pytest.mark.parametrize("decoding", [False, True])
@torch.no_grad()
def test_what_scores_low_is_evicted_once_it_leaves_the_window(package, family, window, decoding):
    """At each step, and the logits are those of heads that see what is left."""
    model, cache = make(family), DynamicCache(config=make(family).config)
    forwards = tokens([30, 1, 5, *[1] * 8], batch=2)
    threshold, whole = threshold_of(model, torch.cat(forwards, dim=1)), Whole(make(family))
    press = package.DMSPress(package.KnormPress(), threshold, window, decoding)
    seen = n_evicted = 0
    with press(model):
        for ids in forwards:
            logits = model(ids, past_key_values=cache).logits
            torch.testing.assert_close(logits, whole(ids), rtol=0, atol=1e-10)
            seen += ids.shape[1]
            judged = seen - window if decoding else 30 - window
            held = {
                index: [
                    [
                        [p for p, norm in enumerate(head) if p >= judged or -norm >= threshold]
                        for head in row
                    ]
                    for row in layer.keys.norm(dim=-1).tolist()
                ]
                for index, layer in enumerate(whole.cache.layers)
            }
            assert held_in(cache) == list(held.values())
            whole.let_see(held)
            n_held = sum(len(head) for rows in held.values() for row in rows for head in row)
            n_heads = 2 * 2 * len(held[0][0])
            n_evicted = seen * n_heads - n_held
            if decoding or seen == 30:
                assert press.compression_ratio == pytest.approx(n_evicted / (seen * n_heads))
    assert (n_evicted > 0) == (window < 30 or (decoding and window < seen))


@both
@torch.no_grad()
def test_equal_to_the_threshold_is_kept(package):
    model, ids = make(num_layers=1), token_ids(1, 30)
    cache = DynamicCache(config=model.config)
    model(ids, past_key_values=cache)
    norms = (-cache.layers[0].keys.norm(dim=-1))[0, 0]
    threshold = float(norms[3])
    cache = DynamicCache(config=model.config)
    with package.DMSPress(package.KnormPress(), threshold, sliding_window_size=1)(model):
        model(ids, past_key_values=cache)
    expected = [p for p in range(30) if float(norms[p]) >= threshold or p == 29]
    assert held_in(cache)[0][0][0] == expected
    assert 3 in expected


@both
@torch.no_grad()
def test_contexts_that_the_scorer_leaves_whole(package):
    """Too short for SnapKV's window: nothing is known that could be below a threshold."""
    model, padding = make(), [0, 35]
    press = package.DMSPress(package.SnapKVPress(window_size=16), 0.03, sliding_window_size=4)
    cache = DynamicCache(config=model.config)
    with press(model):
        model(token_ids(1, 12), past_key_values=cache)
    assert {n for kept in kept_lengths(cache) for n in kept.flatten().tolist()} == {12}
    ids, mask, positions = left_padded(2, 40, padding)
    cache = DynamicCache(config=model.config)
    with press(model):
        model(ids, attention_mask=mask, position_ids=positions, past_key_values=cache)
    for kept in kept_lengths(cache):
        assert kept[1].tolist() == [5, 5]
        assert kept[0].sum() < 70


def only_low_scores_are_gone(cache: DynamicCache, whole: Whole, threshold: float) -> bool:
    """Whether every token that is missing in a head scores below the threshold there."""
    for layer, held in enumerate(held_in(cache)):
        norms = whole.cache.layers[layer].keys.norm(dim=-1)
        for row, of_row in enumerate(held):
            for head, positions in enumerate(of_row):
                gone = set(range(norms.shape[2])) - set(positions)
                if any(-float(norms[row, head, p]) >= threshold for p in gone):
                    return False
    return True


@both
@pytest.mark.parametrize("between", ["headwise", "without decoding", "cropped", "adakv"])
@torch.no_grad()
def test_forwards_that_a_threshold_did_not_see(package, between):
    """Evicted is what was judged and found wanting, or the scope says that it cannot know."""
    model, forwards = make(num_layers=1), tokens([30] + [1] * 20)
    threshold = threshold_of(model, torch.cat(forwards, dim=1))
    whole = Whole(make(num_layers=1))
    press = package.DMSPress(package.KnormPress(), threshold, 8, decoding=True)
    silent = package.DMSPress(package.KnormPress(), threshold, 8)
    first = package.AdaKVPress(package.KnormPress(0.3)) if between == "adakv" else press
    cache = DynamicCache(config=model.config)
    with first(model):
        model(forwards[0], past_key_values=cache)
    if between == "cropped":
        with headwise(model):
            model(token_ids(1, 5, seed=3), past_key_values=cache)
            cache.crop(-5)
    else:
        with silent(model) if between == "without decoding" else headwise(model):
            for ids in forwards[1:6]:
                model(ids, past_key_values=cache)
    for ids in forwards[: 1 if between == "cropped" else 6]:
        whole(ids)
    if between == "adakv":  # evicted what it found less good, by no threshold
        whole.let_see(dict(enumerate(held_in(cache))))
        gone_before = [set(range(35)) - set(head) for head in held_in(cache)[0][0]]
    try:
        with press(model):
            for ids in forwards[6:]:
                model(ids, past_key_values=cache)
                whole(ids)
    except PressError:
        return
    if between == "adakv":
        norms = whole.cache.layers[0].keys.norm(dim=-1)[0]
        for head, positions in enumerate(held_in(cache)[0][0]):
            gone = set(range(norms.shape[1])) - set(positions) - gone_before[head]
            assert all(-float(norms[head, p]) < threshold for p in gone)
    else:
        assert only_low_scores_are_gone(cache, whole, threshold)


@both
@torch.no_grad()
def test_a_question_taken_back_is_forgotten_by_the_threshold_too(package):
    """Nothing was evicted since, so that the cache can be cropped."""
    model, forwards = make(num_layers=1), tokens([30] + [1] * 12)
    whole = Whole(model)
    whole(torch.cat(forwards, dim=1))
    norms = whole.cache.layers[0].keys.norm(dim=-1)[0]
    threshold = -float(norms[:, 22:24].max()) - 1e-9  # the two that leave the window next stay
    assert int((-norms < threshold).sum()) > 4
    press, found = package.DMSPress(package.KnormPress(), threshold, 8, decoding=True), []
    for asked in (False, True):
        cache = DynamicCache(config=model.config)
        with press(model):
            model(forwards[0], past_key_values=cache)
            if asked:
                model(token_ids(1, 2, seed=3), past_key_values=cache)
                cache.crop(-2)
            for ids in forwards[1:]:
                model(ids, past_key_values=cache)
        found.append(held_in(cache))
    assert found[0] == found[1]


@both
@pytest.mark.parametrize("wrapped", [False, True])
@torch.no_grad()
def test_only_what_a_press_reads_is_kept_for_it(package, wrapped):
    class InOwnWords(package.KnormPress):
        def score(self, *arguments: Any) -> Tensor:
            return super().score(*arguments)

    model = make("llama")
    kept = {}
    for base in (package.KnormPress(), package.SnapKVPress(window_size=4), InOwnWords()):
        cache = DynamicCache(config=model.config)
        press = package.CriticalKVPress(base) if wrapped else base
        with package.DecodingPress(press, 8, 20)(model):
            for ids in tokens([24, 1, 1, 1]):
                model(ids, past_key_values=cache)
            (memory,) = cache.layers[0].memories.values()
            kept[type(base).__name__] = set(memory.last())
    where = {"cos", "sin", "position_ids"}
    assert kept["KnormPress"] == set()
    assert kept["SnapKVPress"] == {*where, "query"}
    assert kept["InOwnWords"] == {*where, "hidden_states"}


@both
@torch.no_grad()
def test_a_class_of_ones_own_may_read_hidden_states_without_declaring_it(package):
    class Own(package.SnapKVPress):
        def score(self, call: Any) -> Tensor:
            assert not call.hidden_states.is_meta
            return super().score(call) + call.hidden_states[:, -1, 0].view(-1, 1, 1)

    model = make("llama")
    cache = DynamicCache(config=model.config)
    with package.DecodingPress(Own(window_size=4), 2, 20, hidden_states_buffer_size=3)(model):
        for ids in tokens([24, 1, 1, 1, 1]):
            model(ids, past_key_values=cache)
    assert cache.layers[0].keys.shape[2] == 20
