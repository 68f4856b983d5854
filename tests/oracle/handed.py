"""What kvpress finds on the hub or draws at random, handed to both sides alike.

Where kvpress has no argument for it, its own way of getting it is replaced for the moment.
"""

from __future__ import annotations

from collections import Counter
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import torch
from kvpress.presses import expected_attention_with_stats as with_stats
from kvpress.presses import fastkvzip_press, kvzap_press, qfilter_press, restorekv_press
from peft import LoraConfig
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoTokenizer, DynamicCache, PreTrainedModel

from press_core import attention_sites
from press_core.learned.adapter import RestoreAdapter
from press_core.learned.duo_attention import HeadScores
from press_core.learned.expected_attention_stats import ExpectedAttentionStats
from press_core.learned.fast_kvzip import KVzipGates
from press_core.learned.kvzap import KVzapRegressor
from press_core.learned.lukv import BudgetCurves
from press_core.learned.qfilter import QFilters
from press_core.presses.leverage import sketch
from press_core.presses.merging import uniform
from press_core.replay import kvzip
from press_core.replay.rows import ReplayPress
from tests.oracle.running import Context, token_ids

N_LAYERS, N_HEADS, N_KV, D, WIDTH, HIDDEN = 3, 4, 2, 16, 64, 24
"""Of the models in `running`."""


def random(*shape: int) -> Tensor:
    """Normal numbers, the same for the same shape."""
    generator = torch.Generator().manual_seed(len(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64)


FILTERS = QFilters(random(N_LAYERS, N_KV, D))
_ROOT = random(N_LAYERS, N_HEADS, D, D) / D
STATS = ExpectedAttentionStats(random(N_LAYERS, N_HEADS, D), _ROOT @ _ROOT.mT)
LINEAR = KVzapRegressor(random(N_LAYERS, N_KV, WIDTH), random(N_LAYERS, N_KV))
MLP = KVzapRegressor(
    random(N_LAYERS, N_KV, HIDDEN),
    random(N_LAYERS, N_KV),
    random(N_LAYERS, HIDDEN, WIDTH),
    random(N_LAYERS, HIDDEN),
)
HEAD_SCORES = HeadScores(random(N_LAYERS, N_KV))
RANK = 16
GATES = KVzipGates(
    random(N_LAYERS, N_HEADS, RANK, WIDTH),
    random(N_LAYERS, N_HEADS, RANK),
    random(N_LAYERS, N_KV, RANK, WIDTH),
    1 + random(N_LAYERS, RANK) / 4,
    1 - random(N_LAYERS, RANK) / 4,
    random(N_LAYERS, N_KV, RANK, RANK),
    random(N_LAYERS, N_HEADS),
)
_PER_CENT = torch.arange(1, 100).view(-1, 1, 1) / 100
CURVES = BudgetCurves(_PER_CENT + random(99, N_LAYERS, N_KV).sigmoid() * (1 - _PER_CENT) / 3)
PROMPTS = kvzip.RepeatPrompts(first=[5, 8, 6], following=[5, 9, 6, 7, 4], suffix=[3])
DELIMITER = 1


def q_filters(press: Any, filters: QFilters) -> Any:
    """kvpress's `press` with `filters`."""
    module = qfilter_press.QFilters(*filters.directions.shape)
    return _from_the_hub(press, module, {"q_filters": filters.directions})


def stats(press: Any, stats: ExpectedAttentionStats) -> Any:
    """kvpress's `press` with `stats`."""
    about = {"dataset_name": "", "model_name": "", "num_samples": 0, "sample_seq_len": 0}
    module = with_stats.ExpectedAttentionStats(*stats.mean.shape, n_sink=4, **about)
    return _from_the_hub(press, module, {"query_mean": stats.mean, "query_cov": stats.covariance})


def kvzap(press: Any, regressor: KVzapRegressor) -> Any:
    """kvpress's `press` with `regressor`."""
    n_layers, n_kv = regressor.bias.shape
    hidden = None if regressor.hidden_bias is None else regressor.hidden_bias.shape[1]
    width = regressor.sizes["hidden_size"]
    config = kvzap_press.KVzapConfig(
        input_dim=width, output_dim=n_kv, n_modules=n_layers, hidden_dim=hidden
    )
    last = "" if hidden is None else "2."
    parts = {f"{last}weight": regressor.weight, f"{last}bias": regressor.bias}
    if hidden is not None:
        parts |= {"0.weight": regressor.hidden_weight, "0.bias": regressor.hidden_bias}
    tensors = {f"layers.{i}.{name}": x[i] for name, x in parts.items() for i in range(n_layers)}
    return _from_the_hub(press, kvzap_press.KVzapModel(config), tensors)


def gates(press: Any, given: KVzipGates) -> Any:
    """kvpress's `press` with the gates `given`, in float32."""
    modules, sizes = [], given.sizes
    n_kv, width = sizes["kv_heads"], sizes["hidden_size"]
    for i in range(sizes["layers"]):
        groups = sizes["heads"] // n_kv
        module = fastkvzip_press.FastKVzipGate(i, width, n_kv, groups, torch.float32)
        gate = given.of_layer(i)
        parts = {
            "q_proj.weight": gate.query_weight.flatten(0, 1),
            "q_proj.bias": gate.query_bias.flatten(),
            "k_proj.weight": gate.key_weight.flatten(0, 1),
            "q_norm.weight": gate.query_norm,
            "k_norm.weight": gate.key_norm,
            "k_base": gate.base.unsqueeze(1),
            "b": gate.bias.view(n_kv, 1, -1),
        }
        module.load_state_dict(parts)
        modules.append(module)
    load = press.post_init_from_model

    def post_init_from_model(model: Any) -> None:
        with patch.object(fastkvzip_press, "load_fastkvzip", lambda *_, **__: modules):
            load(model)

    press.post_init_from_model = post_init_from_model
    return press


def curves(press: Any, given: BudgetCurves) -> Any:
    """kvpress's `press` with the curves `given`."""
    press._load_budget_curves = lambda _: given.rates.numpy()
    return press


def _from_the_hub(press: Any, found: torch.nn.Module, tensors: dict[str, Tensor]) -> Any:
    """`press`, or the press in it, which finds `found` wherever it looks for one."""
    found.to(next(iter(tensors.values())).dtype).load_state_dict(tensors)
    scorer = getattr(press, "press", press)
    load = scorer.post_init_from_model

    def post_init_from_model(model: Any) -> None:
        with patch.object(type(found), "from_pretrained", lambda *_, **__: found):
            load(model)

    scorer.post_init_from_model = post_init_from_model
    return press


def head_scores(press: Any, scores: HeadScores, sink_size: int, recent_size: int) -> Any:
    """kvpress's `press` with `scores`, and what streaming heads keep."""
    press.load_attention_pattern = lambda _: (sink_size, recent_size, scores.scores.numpy())
    return press


def delimiter(press: Any) -> Any:
    """kvpress's `press` with `DELIMITER`."""
    press.delimiter_token, press.delimiter_token_id = "<sep>", DELIMITER
    return press


@dataclass(frozen=True)
class Question:
    """A prefill of `length` tokens, of which the last ask a question, and a delimiter."""

    length: int
    question_length: int

    def __call__(self, model: PreTrainedModel, press: Any, past: DynamicCache) -> None:
        parts = [self.length - self.question_length, self.question_length]
        given, asked = token_ids(self.length).split(parts, dim=1)
        ids = torch.cat((given, torch.tensor([[DELIMITER]]), asked), dim=1)
        with torch.no_grad(), press(model):
            model(ids, past_key_values=past)

    def __str__(self) -> str:
        return f"{self.length} tokens, the last {self.question_length} a question"


class PromptTokenizer:
    """Knows the words that kvpress asks for a repetition in."""

    chat_template = None

    def encode(self, text: str, **_: Any) -> Tensor:
        ids = {kvzip.FIRST: PROMPTS.first, kvzip.NEXT: PROMPTS.following, "\n": PROMPTS.suffix}
        return torch.tensor([ids.get(text, [])], dtype=torch.long)


class Repeated(Context):
    """A context that kvpress asks to repeat in the words of `PROMPTS`."""

    def __call__(self, model: PreTrainedModel, press: Any, past: DynamicCache) -> None:
        with patch.object(AutoTokenizer, "from_pretrained", lambda *_, **__: PromptTokenizer()):
            super().__call__(model, press, past)


class ReadAgain(Context):
    """A context that is read again, which kvpress leaves in a cache by heads: it is taken out."""

    def __call__(self, model: PreTrainedModel, press: Any, past: DynamicCache) -> None:
        super().__call__(model, press, past)
        for layer in past.layers:
            if layer.keys.shape[2] > self.length and layer.get_seq_length() > self.length:
                layer.keys = layer.keys[:, :, : self.length]
                layer.values = layer.values[:, :, : self.length]


def _adapter() -> RestoreAdapter:
    """Embeddings and an adapter on all linear layers of the attention modules."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) / 4

    sizes = {"q_proj": WIDTH, "k_proj": N_KV * D, "v_proj": N_KV * D, "o_proj": WIDTH}
    layers = [
        (f"layers.{i}.self_attn.{name}", n) for i in range(N_LAYERS) for name, n in sizes.items()
    ]
    down = {name: draw(4, WIDTH) for name, _ in layers}
    return RestoreAdapter(4 * draw(8, WIDTH), down, {name: draw(n, 4) for name, n in layers})


ADAPTER = _adapter()


def published(folder: Path) -> Path:
    """`ADAPTER` as PEFT saves it, with the embeddings beside it."""
    rank, alpha = 4, 8
    tensors = {}
    for name, down in ADAPTER.down.items():
        layer = f"base_model.model.model.{name}"
        tensors[f"{layer}.lora_A.weight"] = down
        tensors[f"{layer}.lora_B.weight"] = ADAPTER.up[name] * rank / alpha
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    save_file({"restore_embeddings": ADAPTER.embeddings}, folder / "restore_embeddings.safetensors")
    names = sorted({name.rpartition(".")[2] for name in ADAPTER.down})
    LoraConfig(
        r=rank, lora_alpha=alpha, target_modules=names, task_type="CAUSAL_LM"
    ).save_pretrained(folder)
    return folder


class Restored(Repeated):
    """A context after which kvpress runs the embeddings of `ADAPTER`, which it finds published."""

    def __call__(self, model: PreTrainedModel, press: Any, past: DynamicCache) -> None:
        if isinstance(press, ReplayPress):
            super().__call__(model, press, past)
            for index, layer in enumerate(past.layers):  # no forward of this cache has made them
                states = (x[:, :, -8:] for x in layer.dense()[:2])
                past.made[index].append(tuple(states))
            return
        own = deepcopy(model)  # adapters stay on a model
        load = own.load_adapter
        with TemporaryDirectory() as name:
            folder = published(Path(name))
            own.load_adapter = lambda _, **more: load(str(folder), **more)
            embeddings = str(folder / "restore_embeddings.safetensors")
            with patch.object(restorekv_press, "hf_hub_download", lambda *_: embeddings):
                super().__call__(own, press, past)
        for one, other in zip(attention_sites(model), attention_sites(own), strict=True):
            one.module.masked_key_indices = other.module.masked_key_indices
        for made in past.made.values():
            del made[1]  # the repetition


def our_sketch(press: Any) -> Any:
    """kvpress's `press`, drawing this repository's numbers."""
    score, randn = press.score, torch.randn

    def score_with_it(module: Any, hidden_states: Tensor, keys: Tensor, *rest: Any) -> Tensor:
        def ours(*shape: int, **_: Any) -> Tensor:
            with patch.object(torch, "randn", randn):
                return sketch(shape[-3:], module.layer_idx, keys).expand(shape)

        with patch.object(torch, "randn", ours):
            return score(module, hidden_states, keys, *rest)

    press.score = score_with_it
    return press


def our_draws(press: Any) -> Any:
    """kvpress's CAMPress, drawing this repository's numbers of seed 0."""
    compress, calls = press.compress, Counter[int]()

    def compress_with_them(module: Any, *args: Any, **kwargs: Any) -> Any:
        calls[module.layer_idx] += 1
        forward = calls[module.layer_idx] * press.compression_interval

        def ours(probabilities: Tensor, **_: Any) -> Tensor:
            numbers = uniform(probabilities.shape[1:], 0, module.layer_idx, forward)
            return (numbers < probabilities).to(probabilities)

        with patch.object(torch, "bernoulli", ours):
            return compress(module, *args, **kwargs)

    press.compress = compress_with_them
    return press
