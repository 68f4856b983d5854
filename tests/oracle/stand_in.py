"""A stand-in for a model, on which what a press takes can be told from what the model takes.

What a model computes costs the same with every press, so this one computes nothing: it has the
modules of a Llama and hands on hidden states, queries, keys and values that were made before.
Presses that call projections get them computed.
"""

from contextlib import ExitStack, contextmanager
from time import perf_counter
from unittest.mock import patch

import torch
from torch import nn
from transformers import DynamicCache
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from experiments.testbed.families import VOCABULARY, build
from press_core import attention_sites, probe

N_LAYERS, N_HEADS, N_KV, D = 2, 16, 4, 64
WIDTH = N_HEADS * D
REPLAYED = 3072
"""Tokens that may come after the context, when KVzip has it repeated."""

# ---- what is measured ----------------------------------------------------------------------------


class Clock:
    """Measures time.

    Attributes:
        spent: seconds.
    """

    def __init__(self):
        self.spent, self._since = 0.0, 0.0
        self._counting = [False]

    def _switch(self):
        now = perf_counter()
        if self._counting[-1]:
            self.spent += now - self._since
        self._since = now

    @contextmanager
    def at(self, press):
        """While a press is at work, or the model; a decorator of what is."""
        self._switch()
        self._counting.append(press)
        try:
            yield
        finally:
            self._switch()
            self._counting.pop()


@contextmanager
def _hooks_timed(clock):
    """All hooks registered meanwhile are the press's."""

    def timing(register):
        def register_timed(module, hook, **kwargs):
            return register(module, clock.at(press=True)(hook), **kwargs)

        return register_timed

    with ExitStack() as patches:
        for name in ("register_forward_hook", "register_forward_pre_hook"):
            patches.enter_context(patch.object(nn.Module, name, timing(getattr(nn.Module, name))))
        yield


# ---- the stand-in --------------------------------------------------------------------------------


class StandIn:
    """A Llama of 2 layers, 16 query and 4 KV heads of 64, float32.

    Attributes:
        model: to open presses on.
    """

    def __init__(self, length):
        total = length + REPLAYED
        sizes = {"num_layers": N_LAYERS, "num_heads": N_HEADS, "num_kv_heads": N_KV, "head_dim": D}
        self.model = build("llama", **sizes)
        self.model.config.name_or_path = "stand-in"  # kvpress has one set of filters per name
        torch.manual_seed(0)
        for layer in self.model.model.layers:  # kvpress leaves it there: another kind of model
            layer.self_attn.rotary_emb = self.model.model.rotary_emb
        attention_sites(self.model)  # verified while it still computes something
        kind, known = probe._kind_of(self.model), probe._known[type(self.model)]
        self.ids = torch.randint(10, VOCABULARY, (1, length + 1))
        self.hidden = torch.randn(1, total, WIDTH)
        self.positions = torch.arange(total)[None]
        self._clock = Clock()
        self._attending = False
        with torch.no_grad():
            self.rotation = self.model.model.rotary_emb(self.hidden, self.positions)
            for layer in self.model.model.layers:
                attention = layer.self_attn
                for projection in (attention.q_proj, attention.k_proj, attention.v_proj):
                    nn.init.normal_(projection.weight, std=WIDTH**-0.5)
                self._replace(attention)
        self.model.model.forward = self._clock.at(press=False)(self._body)
        known[probe._kind_of(self.model)] = known[kind]  # though its forwards are others by now

    def measure(self, press, ids, then=0, attending=False):
        """Run once with a press: the seconds that it takes.

        Args:
            ids: `(1, S)`, the context.
            then: tokens that are decoded afterwards.
            attending: whether they attend to the context, which then counts as the press's work.
        """
        clock = self._clock
        clock.spent = 0.0
        self._attending = attending
        past = DynamicCache()
        for layer in self.model.model.layers:  # kvpress's attention does so in a prefill
            layer.self_attn.masked_key_indices = None
        with torch.no_grad(), _hooks_timed(clock):
            scope = press(self.model)
            scope.__enter__()
            self.model(ids, past_key_values=past, logits_to_keep=1)
            for _ in range(then):
                self.model(self.ids[:, :1], past_key_values=past, logits_to_keep=1)
            with clock.at(press=True):  # where KVzip of kvpress does its work
                scope.__exit__(None, None, None)
        return clock.spent

    def _states(self, projection):
        return projection(self.hidden).unflatten(-1, (-1, D)).transpose(1, 2)

    def _replace(self, attention):
        project = attention.q_proj.forward
        query = attention.q_proj(self.hidden)
        key, value = (self._states(p) for p in (attention.k_proj, attention.v_proj))
        _, key = apply_rotary_pos_emb(key, key, *self.rotation)
        asked: list[slice] = []  # by the stand-in itself

        def q_proj(hidden_states):
            return query[:, asked[-1]] if asked else project(hidden_states)

        def forward(hidden_states, past_key_values, position_ids, **kwargs):
            start = int(position_ids[0, 0])
            now = slice(start, start + hidden_states.shape[1])
            asked.append(now)
            heads = attention.q_proj(hidden_states).unflatten(-1, (-1, D)).transpose(1, 2)
            asked.pop()
            new = key[:, :, now], value[:, :, now]
            if start and self._attending:
                with self._clock.at(press=True):
                    held = past_key_values.update(*new, attention.layer_idx)
                    attend = ALL_ATTENTION_FUNCTIONS[attention.config._attn_implementation]
                    mask = kwargs.pop("attention_mask")
                    attend(attention, heads, *held, mask, 0.0, scaling=attention.scaling, **kwargs)
            else:
                past_key_values.update(*new, attention.layer_idx)
            return hidden_states, None

        attention.q_proj.forward = q_proj
        attention.forward = self._clock.at(press=False)(forward)

    def _body(self, input_ids, past_key_values, **_):
        body = self.model.model
        n, start = body.embed_tokens(input_ids).shape[1], past_key_values.get_seq_length()
        now = slice(start, start + n)
        for layer in body.layers:
            layer.self_attn(
                hidden_states=self.hidden[:, now],
                position_embeddings=tuple(x[:, now] for x in self.rotation),
                attention_mask=None,
                position_ids=self.positions[:, now],
                past_key_values=past_key_values,
                use_cache=True,
                cache_position=self.positions[0, now],
            )
        return BaseModelOutputWithPast(self.hidden[:, now], past_key_values)
