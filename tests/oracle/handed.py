"""What kvpress finds on the hub or draws at random, handed to both sides alike.

Where kvpress has no argument for it, its own way of getting it is replaced.
"""

from collections import Counter
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from inspect import signature
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import kvpress
import torch
from kvpress.presses import expected_attention_with_stats as with_stats
from kvpress.presses import fastkvzip_press, kvzap_press, qfilter_press, restorekv_press
from transformers import AutoTokenizer

import hooks_impl
from press_core import attention_sites
from press_core.learned.restorekv import RestoreAdapter
from press_core.presses.keys import sketch
from press_core.presses.wrappers import uniform
from press_core.replay import kvzip
from press_core.replay.rows import ReplayPress
from tests.oracle.running import Context, token_ids
from tests.press_core.drawn import as_published, learned
from tests.test_restorekv import peft_folder

N_LAYERS, N_HEADS, N_KV, D, WIDTH = 3, 4, 2, 16, 64
"""Of the models in `running`."""

PROMPTS = kvzip.RepeatPrompts(first=[5, 8, 6], following=[5, 9, 6, 7, 4], suffix=[3])
DELIMITER = 1


def _adapter():
    """Embeddings and an adapter on all linear layers of the attention modules."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(shape, generator=generator) / 4

    sizes = {"q_proj": WIDTH, "k_proj": N_KV * D, "v_proj": N_KV * D, "o_proj": WIDTH}
    layers = [
        (f"layers.{i}.self_attn.{name}", n) for i in range(N_LAYERS) for name, n in sizes.items()
    ]
    down = {name: draw(4, WIDTH) for name, _ in layers}
    return RestoreAdapter(4 * draw(8, WIDTH), down, {name: draw(n, 4) for name, n in layers})


ADAPTER = _adapter()
GIVEN = learned(N_LAYERS, N_HEADS, N_KV, D, WIDTH) | {
    "PROMPTS": PROMPTS,
    "DELIMITER": DELIMITER,
    "ADAPTER": ADAPTER,
}
"""By the names that texts of presses have for it."""


# ---- presses of kvpress, given what it would look for --------------------------------------------


def _q_filters(press, filters):
    _from_the_hub(press, qfilter_press.QFilters(*filters.directions.shape), filters)


def _stats(press, stats):
    about = {"dataset_name": "", "model_name": "", "num_samples": 0, "sample_seq_len": 0}
    module = with_stats.ExpectedAttentionStats(*stats.mean.shape, n_sink=4, **about)
    _from_the_hub(press, module, stats)


def _kvzap(press, regressor):
    sizes, hidden = regressor.sizes, regressor.hidden_bias
    config = kvzap_press.KVzapConfig(
        input_dim=sizes["hidden_size"],
        output_dim=sizes["kv_heads"],
        n_modules=sizes["layers"],
        hidden_dim=None if hidden is None else hidden.shape[1],
    )
    _from_the_hub(press, kvzap_press.KVzapModel(config), regressor)


def _from_the_hub(press, found, fit):
    """Have `press` find `found`, with what `fit` has learned, wherever it looks for one."""
    tensors = as_published(fit)
    found.to(next(iter(tensors.values())).dtype).load_state_dict(tensors)
    _loading(press, type(found), "from_pretrained", found)


def _gates(press, gates):
    sizes = gates.sizes
    n_kv, group = sizes["kv_heads"], sizes["heads"] // sizes["kv_heads"]
    modules = torch.nn.ModuleList(
        fastkvzip_press.FastKVzipGate(i, sizes["hidden_size"], n_kv, group, torch.float32)
        for i in range(sizes["layers"])
    )
    torch.nn.ModuleDict({"layers": modules}).load_state_dict(as_published(gates))
    _loading(press, fastkvzip_press, "load_fastkvzip", [*modules])


def _loading(press, where, name, found):
    """Have `press` find `found` where it calls the function `name`."""
    load = press.post_init_from_model

    def post_init_from_model(model):
        with patch.object(where, name, lambda *_, **__: found):
            load(model)

    press.post_init_from_model = post_init_from_model


def _curves(press, curves):
    press._load_budget_curves = lambda _: curves.rates.numpy()


def _head_scores(press, head_scores, sink_size=128, recent_size=256):
    press.load_attention_pattern = lambda _: (sink_size, recent_size, head_scores.scores.numpy())


def _delimiter(press, delimiter_token_id):
    press.delimiter_token, press.delimiter_token_id = "<sep>", delimiter_token_id


def _replayed(press, prompts=None, adapter=None):
    """`Repeated` and `Restored` hand these over."""


def _sketch(press):
    """Have it draw this repository's numbers."""
    score, randn = press.score, torch.randn

    def score_with_it(module, hidden_states, keys, *rest):
        def ours(*shape, **_):
            with patch.object(torch, "randn", randn):
                return sketch(shape[-3:], module.layer_idx, keys).expand(shape)

        with patch.object(torch, "randn", ours):
            return score(module, hidden_states, keys, *rest)

    press.score = score_with_it


def _draws(press, seed):
    """Have it draw this repository's numbers."""
    compress, calls = press.compress, Counter[int]()

    def compress_with_them(module, *args, **kwargs):
        calls[module.layer_idx] += 1
        forward = calls[module.layer_idx] * press.compression_interval

        def ours(probabilities, **_):
            numbers = uniform(probabilities.shape[1:], seed, module.layer_idx, forward)
            return (numbers < probabilities).to(probabilities)

        with patch.object(torch, "bernoulli", ours):
            return compress(module, *args, **kwargs)

    press.compress = compress_with_them


HANDED = {
    "QFilterPress": _q_filters,
    "ExpectedAttentionStatsPress": _stats,
    "KVzapPress": _kvzap,
    "FastKVzipPress": _gates,
    "LUKVPress": _curves,
    "DuoAttentionPress": _head_scores,
    "FinchPress": _delimiter,
    "LeverageScorePress": _sketch,
    "CURPress": _sketch,
    "CAMPress": _draws,
    **dict.fromkeys(("KVzipPress", "KVgradPress", "RestoreKVPress"), _replayed),
}


def _handed(name, *args, **kwargs):
    """kvpress's press, which also takes the arguments that only ours has."""
    wanted = [*signature(HANDED[name]).parameters][1:]
    given = {key: kwargs.pop(key) for key in wanted if key in kwargs}
    press = getattr(kvpress, name)(*args, **kwargs)
    if given or not wanted:
        HANDED[name](press, **given)
    return press


PRESSES = {n: getattr(kvpress, n) for n in hooks_impl.PRESSES if hasattr(kvpress, n)}
PRESSES |= {name: partial(_handed, name) for name in HANDED}
"""kvpress's presses, by name; they take the arguments of ours."""


# ---- what a model is given -----------------------------------------------------------------------


@dataclass(frozen=True)
class Question:
    """A prefill of `length` tokens, of which the last ask a question, and a delimiter."""

    length: int
    question_length: int

    def __call__(self, model, press, past):
        parts = [self.length - self.question_length, self.question_length]
        given, asked = token_ids(self.length).split(parts, dim=1)
        ids = torch.cat((given, torch.tensor([[DELIMITER]]), asked), dim=1)
        with torch.no_grad(), press(model):
            model(ids, past_key_values=past)

    def __str__(self):
        return f"{self.length} tokens, the last {self.question_length} a question"


class PromptTokenizer:
    """Knows the words that kvpress asks for a repetition in."""

    chat_template = None

    def encode(self, text, **_):
        ids = {kvzip.FIRST: PROMPTS.first, kvzip.NEXT: PROMPTS.following, "\n": PROMPTS.suffix}
        return torch.tensor([ids.get(text, [])], dtype=torch.long)


def knowing_prompts():
    """While it is open, kvpress finds a tokenizer of `PROMPTS`."""
    return patch.object(AutoTokenizer, "from_pretrained", lambda *_, **__: PromptTokenizer())


class Repeated(Context):
    """A context that kvpress asks to repeat in the words of `PROMPTS`."""

    def __call__(self, model, press, past):
        with knowing_prompts():
            super().__call__(model, press, past)


class ReadAgain(Context):
    """A context that is read again, which kvpress leaves in a cache by heads: it is taken out."""

    def __call__(self, model, press, past):
        super().__call__(model, press, past)
        for layer in past.layers:
            if layer.keys.shape[2] > self.length and layer.get_seq_length() > self.length:
                layer.keys = layer.keys[:, :, : self.length]
                layer.values = layer.values[:, :, : self.length]


class Restored(Repeated):
    """A context after which kvpress runs the embeddings of `ADAPTER`, which it finds published."""

    def __call__(self, model, press, past):
        if isinstance(press, ReplayPress):
            super().__call__(model, press, past)
            for index, layer in enumerate(past.layers):  # no forward of this cache has made them
                states = (x[:, :, -8:] for x in layer.dense()[:2])
                past.made[index].append(tuple(states))
            return
        own = deepcopy(model)  # adapters stay on a model
        load = own.load_adapter
        names = sorted({name.rpartition(".")[2] for name in ADAPTER.down})
        config = {"r": 4, "lora_alpha": 8, "target_modules": names, "task_type": "CAUSAL_LM"}
        with TemporaryDirectory() as name:
            folder = peft_folder(Path(name), ADAPTER, **config)
            own.load_adapter = lambda _, **more: load(str(folder), **more)
            embeddings = str(folder / "restore_embeddings.safetensors")
            with patch.object(restorekv_press, "hf_hub_download", lambda *_: embeddings):
                super().__call__(own, press, past)
        for one, other in zip(attention_sites(model), attention_sites(own), strict=True):
            one.module.masked_key_indices = other.module.masked_key_indices
        for made in past.made.values():
            del made[1]  # the repetition
