"""Hooks of a press written for kvpress, registered or overridden by itself: as they run there."""

from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch

from hooks_impl import (
    BasePress,
    ChunkPress,
    ComposedPress,
    DecodingPress,
    KnormPress,
    PrefillDecodingPress,
    ScorerPress,
    SnapKVPress,
    StreamingLLMPress,
    is_prefilling,
)
from press_core import HyperparameterError, PressError, UnsupportedInputError, kept_lengths
from tests.support import build, filled, left_padded, lengths, ran, token_ids
from tests.test_kvpress_compatibility import NegativeNormPress


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


class Around(KnormPress):
    """Does something around the scope, and leaves the hooks to it."""

    @contextmanager
    def __call__(self, model):
        with super().__call__(model):
            yield


def test_a_press_that_registers_hooks_is_refused_in_words():
    with pytest.raises(UnsupportedInputError, match="__call__"):
        lengths(Registering(0.5))
    assert lengths(Around(0.5)) == [[20, 20]] * 2


def test_a_forward_hook_is_called_after_every_forward():
    class Counting(DecodingPress):
        calls = 0

        def forward_hook(self, module, input, kwargs, output):
            self.calls += 1
            return super().forward_hook(module, input, kwargs, output)

    model, press = build("llama", num_layers=2), Counting(KnormPress(), 8, target_size=16)
    cache, _ = ran(model, press, [token_ids(1, 20), *token_ids(9, 1).split(1)])
    assert press.calls == 2 * 10
    assert kept_lengths(cache)[0].tolist() == [[17, 17]]


def test_what_a_forward_hook_changes_is_what_compress_gets():
    class Weighting(BasePress):
        def forward_hook(self, module, input, kwargs, output):
            given = output[0], torch.full((1, 4, 20, 20), 7.0)
            super().forward_hook(module, input, {**kwargs, "mine": 3}, given)
            return output

        def compress(self, module, hidden_states, keys, values, attentions, kwargs):
            n = kwargs["mine"] + int((attentions == 7).all())
            return keys[:, :, :n], values[:, :, :n]

    class Masking(KnormPress):
        def forward_hook(self, module, input, kwargs, output):
            module.masked_key_indices = torch.where(torch.ones(1, 2, 20) > 0)
            return output

    model, ids = build("llama", num_layers=1), token_ids(1, 20)
    assert kept_lengths(filled(model, Weighting(), ids))[0].tolist() == [[4, 4]]
    with pytest.raises(UnsupportedInputError, match="masked_key_indices"):
        filled(model, Masking(0.5), ids)


def test_keyword_arguments_are_of_the_tokens_of_the_call():
    class Reading(ScorerPress):
        def score(self, module, hidden_states, keys, values, attentions, kwargs):
            n = kwargs["position_embeddings"][0].shape[1]
            assert kwargs["hidden_states"].shape[:2] == (len(keys), n)
            assert len(kwargs["cache_position"]) == 24
            return keys.norm(dim=-1)

    model, (ids, mask, positions) = build("llama", num_layers=1), left_padded(2, 24, (0, 8))
    for press in (ChunkPress(Reading(0.5), 8), ComposedPress([KnormPress(0.5), Reading(0.5)])):
        filled(model, press, ids, attention_mask=mask, position_ids=positions)


def test_a_forward_hook_may_compress_by_itself():
    class Own(NegativeNormPress):
        def forward_hook(self, module, input, kwargs, output):
            layer = kwargs["past_key_values"].layers[module.layer_idx]
            given = module, kwargs["hidden_states"], layer.keys, layer.values, output[1], kwargs
            self.found, _ = self.compress(*given)
            return output

    press = Own(0.5)
    filled(build("llama", num_layers=1), press, token_ids(1, 20))
    assert press.found.shape[2] == 10


def test_a_forward_hook_may_compress_by_queries():
    @dataclass
    class Hooked(BasePress):
        press: ScorerPress

        def forward_hook(self, module, input, kwargs, output):
            layer = kwargs["past_key_values"].layers[module.layer_idx]
            given = module, kwargs["hidden_states"], layer.keys, layer.values, output[1], kwargs
            layer.keys, layer.values = self.press.compress(*given)
            return output

    model, ids, press = build("llama", num_layers=2), token_ids(2, 40), SnapKVPress(0.5, 8)
    by_hand, by_press = (filled(model, p, ids) for p in (Hooked(press), press))
    for layer, other in zip(by_hand.layers, by_press.layers, strict=True):
        assert torch.equal(layer.keys, other.keys)


def test_a_forward_hook_that_hands_on_to_other_presses():
    """As presses are composed in kvpress."""

    class OneAfterTheOther(BasePress):
        def __init__(self, *presses):
            self.presses = list(presses)

        def forward_hook(self, module, input, kwargs, output):
            assert is_prefilling(kwargs["cache_position"], 40)
            for press in self.presses:
                output = press.forward_hook(module, input, kwargs, output)
            return output

    parts = KnormPress(0.5), StreamingLLMPress(0.5)
    composed = ComposedPress([*parts])
    assert lengths(OneAfterTheOther(*parts)) == lengths(composed) == [[10, 10]] * 2
    with pytest.raises(HyperparameterError, match="forward_hook"):
        PrefillDecodingPress(OneAfterTheOther(*parts))


@pytest.mark.filterwarnings("error")
def test_a_forward_hook_that_writes_keys_itself():
    """Right as in kvpress, where nothing counts what was evicted; a pruned layer does."""

    class Latest(KnormPress):
        def forward_hook(self, module, input, kwargs, output):
            layer = kwargs["past_key_values"].layers[module.layer_idx]
            layer.keys, layer.values = layer.keys[:, :, -9:], layer.values[:, :, -9:]
            return output

    model = build("llama")
    assert lengths(Latest(), model) == [[9, 9]] * 2
    cache = filled(model, KnormPress(0.5), token_ids(1, 40))
    with Latest()(model), pytest.raises(PressError, match=r"of 21 keys, 20 .* assigned 9;"):
        filled(model, None, token_ids(1, 1), cache)
    with type("Idle", (Latest,), {"forward_hook": lambda self, *given: given[-1]})()(model):
        model(token_ids(1, 9), use_cache=False)
