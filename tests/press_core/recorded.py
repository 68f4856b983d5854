"""What the model's own code computes, recorded without any press."""

import sys
from contextlib import ExitStack
from types import SimpleNamespace

import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from press_core import attention_sites
from tests.support import build

BATCH = 2


def record(family, length, dtype=torch.float32):
    """One eager forward of an attention module, that of `site`, over two rows.

    Its `hidden_states` and `position_embeddings`; `collected`, what `site.query_in` makes of each
    output of `site.query_module`; `query`, `keys` (both after RoPE) and `values` as the attention
    function received them; the `weights` that the family's own eager function computed.
    """
    model = build(family, num_layers=1, dtype=dtype, attn_implementation="eager")
    site = attention_sites(model)[0]
    modeling = sys.modules[type(site.module).__module__]
    found = SimpleNamespace(site=site, collected=[])

    def enter(_, args, kwargs):
        found.hidden_states = args[0] if args else kwargs["hidden_states"]
        found.position_embeddings = kwargs.get("position_embeddings")

    def collect(_, __, output):
        found.collected.append(site.query_in(output))

    def attention(module, *states, **options):
        output, weights = modeling.eager_attention_forward(module, *states, **options)
        if module is site.module:
            found.query, found.keys, found.values = states[:3]
            found.weights = weights
        return output, weights

    with ExitStack() as stack:
        stack.enter_context(site.module.register_forward_pre_hook(enter, with_kwargs=True))
        stack.enter_context(site.query_module.register_forward_hook(collect))
        ALL_ATTENTION_FUNCTIONS["eager"] = attention
        stack.callback(ALL_ATTENTION_FUNCTIONS.__delitem__, "eager")
        ids = torch.randint(3, 128, (BATCH, length), generator=torch.Generator().manual_seed(0))
        model(ids)
    return found
