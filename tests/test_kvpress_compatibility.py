"""A press written for kvpress runs unchanged on `hooks_impl`: one import is all that differs."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Barrier

import pytest
import torch
from torch import nn
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, pipeline

import experiments.pipeline
import hooks_impl
import patch_impl
from experiments.answers.cells import plan, run_cell
from experiments.answers.settings import settings_from
from experiments.loading import load_model
from hooks_impl import (
    AdaKVPress,
    BasePress,
    BlockPress,
    ChunkPress,
    ComposedPress,
    CriticalKVPress,
    DecodingPress,
    DMSPress,
    KeyDiffPress,
    KeyRerotationPress,
    KnormPress,
    PrefillDecodingPress,
    RandomPress,
    ScorerPress,
    SimLayerKVPress,
    SnapKVPress,
    StreamingLLMPress,
    is_prefilling,
    queries,
)
from press_core import HyperparameterError, Needs, UnsupportedInputError, kept_lengths
from tests.support import build, left_padded, snapshot, token_ids

both = pytest.mark.parametrize("package", [hooks_impl, patch_impl], ids=["hooks", "patches"])


@dataclass
class ValueNormPress(ScorerPress):
    """As a user of kvpress would write it."""

    power: float = 1.0

    def score(self, module, hidden_states, keys, values, attentions, kwargs):
        assert module.layer_idx >= 0
        assert hidden_states.shape[1] == keys.shape[2]
        assert attentions is None
        assert "position_embeddings" in kwargs
        return values.norm(dim=-1) ** self.power


@dataclass
class EveryOther(BasePress):
    """Overrides `compress` and tells nobody which positions it kept."""

    def post_init_from_model(self, model: nn.Module) -> None:
        self.n_layers = model.config.num_hidden_layers

    def compress(self, module, hidden_states, keys, values, attentions, kwargs):
        if module.layer_idx == self.n_layers - 1:
            return keys, values
        return keys[:, :, ::2], values[:, :, ::2]


@dataclass
class Counting(KnormPress):
    """Overrides `forward_hook`, and calls the original."""

    def __post_init__(self):
        super().__post_init__()
        self.calls = 0

    def forward_hook(self, module, input, kwargs, output):
        self.calls += 1
        return super().forward_hook(module, input, kwargs, output)


def prefill(press, length=30):
    model = build("llama", num_layers=2)
    cache = DynamicCache(config=model.config)
    with torch.no_grad(), press(model):
        model(token_ids(2, length), past_key_values=cache)
        logits = model(token_ids(2, 3), past_key_values=cache).logits
    return [int(kept[0, 0]) - 3 for kept in kept_lengths(cache)], logits


def test_score():
    kept, logits = prefill(ValueNormPress(compression_ratio=0.4, power=2.0))
    assert kept == [18, 18]
    assert torch.isfinite(logits).all()


def test_compress_with_layers_of_different_length():
    kept, logits = prefill(EveryOther())
    assert kept == [15, 30]
    assert torch.isfinite(logits).all()


def test_a_press_that_does_not_say_what_it_kept_is_refused_where_that_matters():
    """Its keys could be told neither from padding nor which queries they belong to."""
    model = build("llama", num_layers=2)
    ids, mask, _ = left_padded(2, 30, [0, 7])
    with (
        torch.no_grad(),
        EveryOther()(model),
        pytest.raises(UnsupportedInputError, match="padded batch"),
    ):
        model(ids, attention_mask=mask, past_key_values=DynamicCache(config=model.config))
    with (
        torch.no_grad(),
        KnormPress(0.5)(model),
        EveryOther()(model),
        pytest.raises(UnsupportedInputError, match="inner scope"),
    ):
        model(ids, past_key_values=DynamicCache(config=model.config))
    cache = DynamicCache(config=model.config)
    with torch.no_grad(), EveryOther()(model), KnormPress(0.5)(model):
        model(ids, past_key_values=cache)
    assert [int(kept[0, 0]) for kept in kept_lengths(cache)] == [8, 15]


def test_forward_hook():
    press = Counting(0.5)
    kept, _ = prefill(press)
    assert kept == [15, 15]
    assert press.calls == 4  # two layers, prefill and question


def test_exact_queries_for_presses_of_ones_own():
    seen = []

    @dataclass
    class Peeking(ScorerPress):
        needs = Needs.QUERIES

        def score(self, module, hidden_states, keys, values, attentions, kwargs):
            seen.append(queries(kwargs, last=4))
            return keys.norm(dim=-1)

    prefill(Peeking(0.5))
    assert [tuple(query.shape) for query in seen] == [(2, 4, 4, 16)] * 2


# ---- presses in presses --------------------------------------------------------------------------


@both
def test_compositions_in_compositions(package):
    """Wherever the inner one stands, it is as if its presses stood there themselves."""
    model = build("llama", num_layers=2)

    def kept_by(press):
        cache = DynamicCache(config=model.config)
        with torch.no_grad(), press(model):
            model(token_ids(2, 48), past_key_values=cache)
            logits = model(token_ids(2, 3), past_key_values=cache).logits
        return [layer.positions for layer in cache.layers], logits

    first, second, third = (
        package.KnormPress(0.3),
        package.SnapKVPress(0.4, window_size=4),
        package.KeyDiffPress(0.2),
    )
    flat, logits = kept_by(package.ComposedPress([first, second, third]))
    for nested in (
        [first, package.ComposedPress([second, third])],
        [package.ComposedPress([first, second]), third],
        [first, package.ComposedPress([package.ComposedPress([second]), third])],
    ):
        found, same = kept_by(package.ComposedPress(nested))
        assert all(map(torch.equal, found, flat))
        assert torch.equal(same, logits)


@dataclass
class HiddenNormPress(ScorerPress):
    """Reads hidden states, keys and values of the same tokens."""

    def score(self, module, hidden_states, keys, values, attentions, kwargs):
        assert hidden_states.shape[1] == keys.shape[2]
        return hidden_norm(hidden_states, keys)


def hidden_norm(hidden_states, keys):
    return hidden_states.norm(dim=-1)[:, None] * keys.norm(dim=-1)


def observed_states(model, ids):
    """Hidden states and keys of the first layer, of the whole context."""
    seen = []

    @dataclass
    class Seeing(ScorerPress):
        def score(self, module, hidden_states, keys, values, attentions, kwargs):
            seen.append((hidden_states, keys))
            return keys.norm(dim=-1)

    with torch.no_grad(), Seeing(0.5)(model):
        model(ids)
    return seen[0]


def test_blocks_hand_a_scorer_the_hidden_states_of_its_keys():
    """Heads keep different tokens, so each has its own, as a loop over heads and blocks shows."""
    model, ids, n, block = build("llama", num_layers=1), token_ids(2, 45), 20, 8
    hidden, keys = observed_states(model, ids)
    cache = DynamicCache(config=model.config)
    with torch.no_grad(), BlockPress(HiddenNormPress(1 - 20 / 45), block_size=block)(model):
        model(ids, past_key_values=cache)
    different = False
    for row in range(2):
        for head in range(2):
            kept = list(range(n))
            for start in range(n, 45, block):
                candidates = [*kept, *range(start, min(start + block, 45))]
                scores = [
                    float(hidden[row, t].norm() * keys[row, head, t].norm()) for t in candidates
                ]
                best = sorted(range(len(candidates)), key=lambda i: -scores[i])[:n]
                kept = sorted(candidates[i] for i in best)
            assert cache.layers[0].positions[row, head].tolist() == kept
            different |= kept != cache.layers[0].positions[row, 0].tolist()
    assert different


@pytest.mark.parametrize("padding", [[0, 0], [0, 7]])
def test_what_is_left_by_a_press_before_brings_its_hidden_states(padding):
    model, (ids, mask, positions) = build("llama", num_layers=1), left_padded(2, 40, padding)
    cache = DynamicCache(config=model.config)
    press = ComposedPress([KnormPress(0.5), HiddenNormPress(0.5)])
    with torch.no_grad(), press(model):
        model(ids, attention_mask=mask, position_ids=positions, past_key_values=cache)
    for row, n_padding in enumerate(padding):
        alone = ids[row : row + 1, n_padding:]
        hidden, keys = observed_states(model, alone)
        first = (-keys.norm(dim=-1)).topk(alone.shape[1] // 2).indices[0]
        for head, tokens in enumerate(first):
            scores = hidden_norm(hidden[:, tokens], keys[:, head : head + 1, tokens])[0, 0]
            expected = tokens[scores.topk(len(tokens) // 2).indices].sort().values
            found = cache.layers[0].positions[row, head]
            assert (found[found >= 0] - n_padding).tolist() == expected.tolist()


@dataclass
class Halving(BasePress):
    """Returns plain tensors, as a press of kvpress does, and says no more."""

    def compress(self, module, hidden_states, keys, values, attentions, kwargs):
        return keys[:, :, ::2], values[:, :, ::2]


@pytest.mark.parametrize(
    ("press", "kept"),
    [
        (ComposedPress([Halving()]), 20),
        (ComposedPress([KnormPress(0.5), Halving()]), 10),
        (PrefillDecodingPress(Halving()), 20),
        (PrefillDecodingPress(Halving(), DecodingPress(KnormPress(), 2, 8)), 8),
        (PrefillDecodingPress(Halving(), DecodingPress(SnapKVPress(window_size=2), 2, 8)), 8),
    ],
)
def test_plain_tensors_are_taken_where_nobody_asks_whose_they_are(press, kept):
    model, cache = build("llama", num_layers=2), DynamicCache()
    with torch.no_grad(), press(model):
        model(token_ids(2, 40), past_key_values=cache)
        for _ in range(2):
            logits = model(token_ids(2, 1), past_key_values=cache).logits
    decodes = isinstance(press, PrefillDecodingPress) and press.decoding_press is not None
    assert [int(n[0, 0]) for n in kept_lengths(cache)] == [kept if decodes else kept + 2] * 2
    assert torch.isfinite(logits).all()


def test_plain_tensors_are_refused_in_words_where_somebody_does():
    with pytest.raises(UnsupportedInputError, match="without saying which tokens") as refused:
        build_and_run(ComposedPress([Halving(), KnormPress(0.5)]))
    assert "scope" not in str(refused.value)


def build_and_run(press):
    model = build("llama", num_layers=1)
    with torch.no_grad(), press(model):
        model(token_ids(1, 40), past_key_values=DynamicCache(config=model.config))


# ---- rotary embeddings ---------------------------------------------------------------------------


@dataclass
class Unrotating(ScorerPress):
    """Rotates keys back by the model's own embeddings, as presses of kvpress do."""

    def __post_init__(self):
        super().__post_init__()
        self.seen = []

    def score(self, module, hidden_states, keys, values, attentions, kwargs):
        positions = torch.arange(keys.shape[2])[None]
        cos, sin = module.rotary_emb(values, positions)
        self.seen.append((module, cos, sin, kwargs["position_embeddings"]))
        return keys.norm(dim=-1) + cos.sum()


@pytest.mark.parametrize(
    "family", ["llama", "phi3", "qwen3", "gemma3_text", "gpt_neox", "cohere", "stablelm", "olmo2"]
)
def test_modules_have_the_rotary_embedding_of_their_layer(family):
    """In gemma3, full and sliding layers rotate by other frequencies, of one module."""
    model, press = build(family), Unrotating(0.5)
    before = snapshot(model)
    with torch.no_grad(), press(model):
        inside = snapshot(model)
        model(token_ids(2, 30), past_key_values=DynamicCache(config=model.config))
        assert not [n for n, m in model.named_modules() if n.endswith("attn.rotary_emb")]
    assert press.seen
    for module, cos, sin, (own_cos, own_sin) in press.seen:
        assert torch.equal(cos, own_cos)
        assert torch.equal(sin, own_sin)
        assert module.rotary_emb.inv_freq.dim() == 1
        assert isinstance(module, nn.Module)
        assert module == model.get_submodule(module_name(model, module))
        assert "rotary_emb" not in vars(model.get_submodule(module_name(model, module)))
    assert snapshot(model) == before
    assert before.keys() == inside.keys()


def module_name(model, module):
    return next(name for name, other in model.named_modules() if module == other)


def test_a_layer_that_does_not_rotate_says_so():
    model, press = build("gpt2", num_layers=1), Unrotating(0.5)
    with (
        torch.no_grad(),
        press(model),
        pytest.raises(AttributeError, match=r"has no rotary_emb.*does not rotate its keys"),
    ):
        model(token_ids(1, 30), past_key_values=DynamicCache(config=model.config))


def test_asking_for_far_positions_changes_no_model():
    """Frequencies of dynamic embeddings adapt to the farthest position that they see."""
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 1}
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    config = LlamaConfig(**sizes, vocab_size=99, max_position_embeddings=64, rope_parameters=rope)
    model = LlamaForCausalLM(config).eval()
    frequencies = model.model.rotary_emb.inv_freq.clone()

    @dataclass
    class Far(ScorerPress):
        def score(self, module, hidden_states, keys, values, attentions, kwargs):
            module.rotary_emb(values, torch.tensor([[4000]]))
            return keys.norm(dim=-1)

    with torch.no_grad(), Far(0.5)(model):
        model(token_ids(1, 30) % 99, past_key_values=DynamicCache())
    assert torch.equal(model.model.rotary_emb.inv_freq, frequencies)


def test_rotary_embeddings_in_threads_and_nested_scopes():
    """Whoever leaves first takes nothing from the others, and nothing is left in the end."""
    model = build("llama", num_layers=2)
    before, meet = snapshot(model), Barrier(3)

    def run(index):
        presses = [Unrotating(0.5), Unrotating(0.25)]
        scopes = [press.register(model) for press in presses]
        meet.wait(20)
        if index == 0:
            scopes[0].remove()  # the outer one first
        meet.wait(20)  # PyTorch reads a module's hooks while it runs
        with torch.no_grad():
            model(token_ids(1, 20 + index), past_key_values=DynamicCache(config=model.config))
        meet.wait(20)
        for scope in scopes:
            scope.remove()
        return presses

    with ThreadPoolExecutor(3) as pool:
        found = [press for pair in pool.map(run, range(3)) for press in pair]
    assert all(press.seen for press in found[1:])
    for press in found:
        for _, cos, _, own in press.seen:  # of fewer keys, where other scopes have pruned before
            assert torch.equal(cos, own[0][:, : cos.shape[1]])
    assert snapshot(model) == before


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "stablelm", "gpt_neox"])
def test_keys_can_be_turned_by_hand(family):
    """As `KeyRerotationPress` turns them."""
    model, ids = build(family), token_ids(2, 30)

    @dataclass
    class Turning(KeyDiffPress):
        def compress(self, module, hidden_states, keys, values, attentions, kwargs):
            kept = super().compress(module, hidden_states, keys, values, attentions, kwargs)
            return KeyRerotationPress.rerotate_keys(module, kept.kept, keys), kept.values

    caches = []
    for press in (Turning(0.5), KeyRerotationPress(KeyDiffPress(0.5))):
        caches.append(DynamicCache(config=model.config))
        with torch.no_grad(), press(model):
            model(ids, past_key_values=caches[-1])
    for mine, theirs in zip(*(cache.layers for cache in caches), strict=True):
        assert torch.allclose(mine.keys, theirs.keys, atol=1e-6)
    given = nn.Identity(), torch.zeros(1, 2, 1).long(), torch.ones(1, 2, 1, 16)
    with pytest.raises(UnsupportedInputError, match=r"Identity was given.*a press is handed"):
        KeyRerotationPress.rerotate_keys(*given)


# ---- DMS while decoding --------------------------------------------------------------------------


@dataclass
class NegativeNormPress(ScorerPress):
    """What KnormPress scores, in a user's words."""

    def score(self, module, hidden_states, keys, values, attentions, kwargs):
        assert hidden_states.shape[1] == keys.shape[2]
        return -keys.norm(dim=-1)


@dataclass
class NegativeNormPatch(patch_impl.ScorerPress):
    def score(self, call):
        return -call.keys.norm(dim=-1)


@pytest.mark.parametrize(
    ("own", "known"), [(NegativeNormPress, KnormPress), (NegativeNormPatch, patch_impl.KnormPress)]
)
def test_dms_judges_new_tokens_by_a_score_of_ones_own(own, known):
    model = build("llama", num_layers=2)
    dms = (hooks_impl if known is KnormPress else patch_impl).DMSPress
    kept = []
    for press in (own(), known()):
        cache = DynamicCache(config=model.config)
        with torch.no_grad(), dms(press, -4.0, sliding_window_size=6, decoding=True)(model):
            model(token_ids(2, 30), past_key_values=cache)
            for seed in range(12):
                model(token_ids(2, 1, seed), past_key_values=cache)
        kept.append(torch.stack(kept_lengths(cache)))
    assert torch.equal(*kept)
    assert kept[0].unique().numel() > 1
    assert int(kept[0].min()) < 36  # of those that came one by one, some are gone


@pytest.mark.parametrize(
    "name",
    [
        *("KeyDiffPress", "CURPress", "LagKVPress", "LeverageScorePress", "NonCausalAttnPress"),
        *("CompactorPress", "SnapKVPress", "TOVAPress", "ExpectedAttentionPress"),
        *("StreamingLLMPress", "ObservedAttentionPress"),
    ],
)
@both
def test_dms_refuses_to_judge_one_token_by_a_comparison(package, name):
    press = getattr(package, name)()
    with pytest.raises(HyperparameterError, match=r"scores each token by itself .*when it comes"):
        package.DMSPress(press, 0.0, decoding=True)
    package.DMSPress(press, 0.0)
    with pytest.raises(HyperparameterError, match="scores each token by itself"):
        package.DMSPress(package.CriticalKVPress(press), 0.0, decoding=True)


def test_a_score_of_ones_own_can_say_that_it_compares():
    @dataclass
    class Comparing(NegativeNormPress):
        independent = False

    with pytest.raises(HyperparameterError, match="scores each token by itself"):
        DMSPress(Comparing(), 0.0, decoding=True)


# ---- hooks of one's own --------------------------------------------------------------------------


@dataclass
class Registering(KnormPress):
    """Registers its hooks itself, as kvpress's own `__call__` does."""

    @contextmanager
    def __call__(self, model):
        hook = self.forward_hook
        modules = [layer.self_attn for layer in model.model.layers]
        handles = [m.register_forward_hook(hook, with_kwargs=True) for m in modules]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


@dataclass
class Around(KnormPress):
    """Does something around the scope, and leaves the hooks to it."""

    @contextmanager
    def __call__(self, model):
        with super().__call__(model):
            yield


def test_a_press_that_registers_hooks_is_refused_in_words():
    with pytest.raises(UnsupportedInputError, match=r"do not override __call__"):
        build_and_run(Registering(0.5))
    assert prefill(Around(0.5))[0] == [15, 15]


# ---- the pipeline and sweeps ---------------------------------------------------------------------

CONTEXT = "river alice tea garden over hector lamp morning " + "meadow march light " * 20


@pytest.fixture(scope="module")
def pipe():
    model, tokenizer = load_model("facts-llama")
    return pipeline(experiments.pipeline.TASK, model=model, tokenizer=tokenizer)


def test_a_sweep_may_say_how_many_tokens_are_generated(tmp_path):
    path = tmp_path / "sweep.yaml"
    path.write_text(
        "dataset: facts/single@48\npress: KnormPress\nratio: 0.5\nsamples: 2\n"
        "generation: {max_new_tokens: 3, eos_token_id: [1]}\n"
    )
    settings = settings_from(path, {})
    rows, _ = run_cell(settings, plan(settings)[0])
    assert {len(row["prediction"].split()) for row in rows} == {3}


def test_answers_are_greedy_whatever_the_model_says(pipe, monkeypatch):
    monkeypatch.setattr(pipe.model.generation_config, "do_sample", True)
    monkeypatch.setattr(pipe.model.generation_config, "temperature", 50.0)
    options = {"question": "? alice", "press": KnormPress(0.5), "max_new_tokens": 4}
    answers = [pipe(CONTEXT, **options)["answer"] for _ in range(3)]
    assert len(set(answers)) == 1
    assert len({pipe(CONTEXT, do_sample=True, **options)["answer"] for _ in range(3)}) > 1


@pytest.mark.parametrize("asked", [{}, {"question": ""}, {"question": None}, {"questions": [""]}])
@pytest.mark.parametrize("context", [CONTEXT, "", "  \n"])
def test_there_need_be_no_question_and_no_context(pipe, context, asked):
    answer = pipe(context, press=KnormPress(0.5), max_new_tokens=3, **asked)
    (text,) = answer.get("answers", [answer.get("answer")])
    assert len(text.split()) > 0


def test_a_context_that_is_cut_loses_its_middle_and_says_so(pipe, caplog):
    ends = "river alice tea " + "meadow " * 60 + "over hector lamp morning"
    options = {"questions": ["? alice", "? hector"], "max_new_tokens": 1}
    with caplog.at_level(logging.WARNING):
        answers = pipe(ends, max_context_length=20, **options)["answers"]
    assert answers == ["tea", "lamp"]  # kvpress keeps the beginning: the second would be gone
    assert "cut to 20" in caplog.text
    assert "middle" in caplog.text


def test_thinking_is_off_unless_asked_for(pipe, monkeypatch):
    template = "{% if enable_thinking %}river{% else %}over{% endif %}{{ messages[0].content }}"
    seen = []
    encode = type(pipe.tokenizer).__call__

    def watched(self, text, **options):
        seen.append(text)
        return encode(self, text, **options)

    monkeypatch.setattr(pipe.tokenizer, "chat_template", template, raising=False)
    monkeypatch.setattr(type(pipe.tokenizer), "__call__", watched)
    for options in ({}, {"enable_thinking": True}):
        pipe("alice tea", question="? alice", max_new_tokens=1, **options)
    assert [text for text in seen if "alice tea" in text] == ["overalice tea", "riveralice tea"]


@both
def test_lengths_are_logged(pipe, caplog, package):
    with caplog.at_level(logging.DEBUG, logger="experiments"):
        pipe(CONTEXT, question="? alice", press=package.KnormPress(0.5), max_new_tokens=1)
    n = len(pipe.tokenizer(CONTEXT)["input_ids"])
    assert f"context length: {n} tokens" in caplog.text.lower()
    assert f"compressed length: {n // 2}" in caplog.text.lower()


# ---- names and small things ----------------------------------------------------------------------


def test_a_window_of_no_recent_tokens_is_refused_in_words():
    with pytest.raises(HyperparameterError, match=r"n_recent=1\): n_recent must be .* n_last=1"):
        SimLayerKVPress(n_recent=1, n_last=1)


def test_names_that_scripts_import():
    model = build("llama", num_layers=1)
    assert isinstance(model, hooks_impl.SUPPORTED_MODELS)
    assert is_prefilling(torch.arange(20), 20)
    assert not is_prefilling(torch.arange(20, 21), 1)
    assert not is_prefilling(torch.arange(20, 25), 5)


@both
def test_presses_are_what_they_are_in_kvpress(package):
    for press, kind in (
        ("PyramidKVPress", "SnapKVPress"),
        ("ExpectedAttentionStatsPress", "ExpectedAttentionPress"),
        ("CriticalKVPress", "ScorerPress"),
        ("CAMPress", "DecodingPress"),
        ("SnapKVPress", "ScorerPress"),
        ("AdaKVPress", "BasePress"),
    ):
        assert issubclass(getattr(package, press), getattr(package, kind)), press
    press = package.CriticalKVPress(package.KnormPress(0.5))
    assert press.compression_ratio == 0.5
    assert press.with_ratio(0.25).press == package.KnormPress(0.25)


@both
def test_a_press_has_nothing_to_reset(package):
    press = package.DecodingPress(package.KnormPress(), 2, 8)
    for _ in range(2):
        model, cache = build("llama", num_layers=1), DynamicCache()
        with torch.no_grad(), press(model):
            model(token_ids(1, 20), past_key_values=cache)
            model(token_ids(1, 1), past_key_values=cache)
        assert int(kept_lengths(cache)[0][0, 0]) == 21  # the other run's step does not count
        press.reset()


@both
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("AdaKVPress", lambda p: p.AdaKVPress(p.KnormPress(0.36))),
        ("CriticalKVPress", lambda p: p.CriticalKVPress(p.KnormPress(0.36))),
        ("ComposedPress", lambda p: p.ComposedPress([p.KnormPress(0.2), p.KeyDiffPress(0.2)])),
        ("PrefillDecodingPress", lambda p: p.PrefillDecodingPress(p.KnormPress(0.36))),
    ],
)
def test_the_ratio_of_a_composition_can_be_set(package, name, expected):
    """The press itself becomes what is expected, and none that it was made of changes."""
    made = {
        "ComposedPress": lambda: package.ComposedPress(
            [package.KnormPress(0.5), package.KeyDiffPress(0.5)]
        ),
    }
    inner = package.KnormPress(0.5)
    press = made.get(name, lambda: getattr(package, name)(inner))()
    model, cache = build("llama", num_layers=1), DynamicCache()
    with torch.no_grad(), press(model):
        model(token_ids(1, 50), past_key_values=cache)
    press.compression_ratio = 0.36
    assert press.compression_ratio == pytest.approx(0.36)
    assert inner.compression_ratio == 0.5
    cache = DynamicCache()
    with torch.no_grad(), press(model):
        model(token_ids(1, 50), past_key_values=cache)
    assert float(kept_lengths(cache)[0].float().mean()) == 32
    assert press.asked_ratio == pytest.approx(expected(package).asked_ratio)


@both
def test_a_ratio_cannot_be_set_where_none_can_be_told(package):
    press = package.DMSPress(package.KnormPress(), 0.0)
    with pytest.raises(HyperparameterError, match="cannot be told a compression ratio"):
        press.compression_ratio = 0.5


@pytest.mark.parametrize(
    "press",
    [
        KnormPress(0.5),
        RandomPress(0.5, seed=3),
        StreamingLLMPress(0.5),
        KeyDiffPress(0.5),
        NegativeNormPress(0.5),
        AdaKVPress(KnormPress(0.5)),
        ChunkPress(KnormPress(0.5), chunk_length=8),
        BlockPress(KeyDiffPress(0.5), block_size=8),
        ComposedPress([KnormPress(0.3), KeyDiffPress(0.3)]),
    ],
    ids=lambda press: type(press).__name__,
)
def test_compress_outside_of_any_scope(press):
    """What it gives by hand is what it leaves in a cache."""
    model, cache = build("llama", num_layers=1), DynamicCache()
    whole = DynamicCache()
    with torch.no_grad():
        model(token_ids(2, 40), past_key_values=whole)
        with press(model):
            model(token_ids(2, 40), past_key_values=cache)
    attention = model.model.layers[0].self_attn
    keys, values = whole.layers[0].keys, whole.layers[0].values
    given = attention, torch.zeros(2, 40, 64), keys, values, None, {}
    left = press.compress(*given)
    if left.head_mask is None:
        left_keys, left_values = left
        assert torch.equal(left_keys, cache.layers[0].keys)
        assert torch.equal(left_values, cache.layers[0].values)
    else:
        with pytest.raises(UnsupportedInputError, match="return the Eviction as it is"):
            _ = [*left]
        assert torch.equal(left.head_mask.sum(dim=-1), kept_lengths(cache)[0])
    if isinstance(press, ScorerPress):
        assert press.score(*given).shape == keys.shape[:3]


@pytest.mark.parametrize(
    "press",
    [SnapKVPress(0.5), KeyRerotationPress(KnormPress(0.5)), CriticalKVPress(KnormPress(0.5))],
    ids=lambda press: type(press).__name__,
)
def test_compress_outside_of_any_scope_needs_no_more_than_it_is_given(press):
    attention = build("llama", num_layers=1).model.layers[0].self_attn
    keys = torch.randn(1, 2, 100, 16)
    with pytest.raises(UnsupportedInputError, match=r"with press\(model\): \.\.\."):
        press.compress(attention, torch.zeros(1, 100, 64), keys, keys, None, {})
