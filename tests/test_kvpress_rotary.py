"""What a press written for kvpress finds as `module.rotary_emb` is that of the very layer."""

import pytest
import torch
from torch import nn

from hooks_impl import KeyDiffPress, KeyRerotationPress, ScorerPress
from press_core import UnsupportedInputError
from tests.support import build, filled, snapshot, token_ids


class Unrotating(ScorerPress):
    """Rotates keys back by the model's own embeddings, as presses of kvpress do."""

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
    press.seen, before = [], snapshot(model)
    with press(model):
        inside = snapshot(model)
        filled(model, None, token_ids(2, 30))
        assert not [n for n, m in model.named_modules() if n.endswith("attn.rotary_emb")]
    assert press.seen
    for module, cos, sin, (own_cos, own_sin) in press.seen:
        assert torch.equal(cos, own_cos)
        assert torch.equal(sin, own_sin)
        assert module.rotary_emb.inv_freq.dim() == 1
        assert isinstance(module, nn.Module)
        (own,) = [other for other in model.modules() if module == other]
        assert "rotary_emb" not in vars(own)
    assert snapshot(model) == before
    assert before.keys() == inside.keys()


def test_a_layer_that_does_not_rotate_says_so():
    with pytest.raises(AttributeError, match=r"rotary_emb.*rotate"):
        filled(build("gpt2", num_layers=1), Unrotating(0.5), token_ids(1, 30))


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "stablelm", "gpt_neox"])
def test_keys_can_be_turned_by_hand(family):
    """As `KeyRerotationPress` turns them."""
    model, ids = build(family), token_ids(2, 30)

    class Turning(KeyDiffPress):
        def compress(self, module, hidden_states, keys, values, attentions, kwargs):
            kept = super().compress(module, hidden_states, keys, values, attentions, kwargs)
            return KeyRerotationPress.rerotate_keys(module, kept.kept, keys), kept.values

    presses = Turning(0.5), KeyRerotationPress(KeyDiffPress(0.5))
    caches = [filled(model, press, ids) for press in presses]
    for mine, theirs in zip(*(cache.layers for cache in caches), strict=True):
        assert torch.allclose(mine.keys, theirs.keys, atol=1e-6)
    given = nn.Identity(), torch.zeros(1, 2, 1).long(), torch.ones(1, 2, 1, 16)
    with pytest.raises(UnsupportedInputError, match="Identity"):
        KeyRerotationPress.rerotate_keys(*given)
