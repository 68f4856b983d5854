"""What a press should have left, found without any of the code that presses are made of.

The model runs over the whole context with eager attention, and what its attention functions
receive is written down; from that follow the tokens that a press should keep. The logits that the
model should give afterwards are those of a run over the *full* cache in which every evicted key is
masked, by layer and head: what is masked contributes nothing, as if it were not there.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import avg_pool1d, pad

from experiments.questions.architectures.images import image_inputs

TEXT = 99
"""The largest token id that stands for text."""
CACHE_NAMES = ("past_key_values", "past_key_value", "layer_past")


@dataclass
class Call:
    """One call of an attention function, and of the module around it.

    Attributes:
        module: the attention module.
        args, kwargs: of the module's forward.
        query: `(B, H, q, d)`, as the attention function received it.
        key: `(B, H_k, S, d)`, likewise: some models have repeated the heads by then.
        weights: `(B, H, q, S)`, as the function returned them, or None.
    """

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    query: Tensor
    key: Tensor
    weights: Tensor | None


@dataclass
class Layer:
    """One layer of the full cache, and the attention over it.

    Attributes:
        keys, values: `(1, H_kv, S, d)`, as cached.
        call: of the module that filled it.
        readers: the modules that attend over it: more than one where layers share it.
        heads: `(H,)` int64: the KV head that each query head attends over.
    """

    keys: Tensor
    values: Tensor
    call: Call
    readers: list[nn.Module]
    heads: Tensor

    @property
    def length(self) -> int:
        return int(self.keys.shape[2])

    def grouped(self, of_query_heads: Tensor) -> Tensor:
        """`(1, H, S)` to the mean over the query heads of each KV head, `(1, H_kv, S)`."""
        heads = range(self.keys.shape[1])
        return torch.stack([of_query_heads[:, self.heads == h].mean(dim=1) for h in heads], dim=1)


@dataclass
class FullRun:
    """A context that was run without any press.

    Attributes:
        ids: `(1, S)`, the context.
        cache: what the run left.
        layers: by index in the cache, those that hold keys of the whole context.
        rope_delta: where the model says so, by how much the position of the next token differs from
            the number of tokens: an image takes up fewer positions than tokens.
        elsewhere: by positions, what modules were given in runs over these.
    """

    model: nn.Module
    ids: Tensor
    cache: Any
    layers: dict[int, Layer]
    rope_delta: int | None = None
    elsewhere: dict[tuple[int, ...], dict[nn.Module, tuple[Any, Any]]] = field(default_factory=dict)


def feed(model: Any, ids: Tensor, cache: Any, **more: Any) -> Any:
    """One forward over `ids` and the image in them; of the decoder, where there is an encoder."""
    inputs = {"input_ids": ids}
    if model.config.is_encoder_decoder and hasattr(model, "get_encoder"):
        context = torch.arange(5, 5 + ids.shape[0] * 19).view(ids.shape[0], 19) % 100
        inputs = {"input_ids": context, "decoder_input_ids": ids}
        if "attention_mask" in more:
            more["decoder_attention_mask"] = more.pop("attention_mask")
    inputs |= image_inputs(model, ids)
    with torch.no_grad():
        return model(**inputs, past_key_values=cache, use_cache=True, **more)


def layers_of(cache: Any) -> list[Any]:
    """The layers of a cache; of an encoder-decoder cache those of the decoder's own attention."""
    return list(getattr(getattr(cache, "self_attention_cache", cache), "layers", ()))


# ---- watching attention functions ----------------------------------------------------------------

Attend = Callable[..., tuple[Tensor, Any]]


@contextmanager
def replaced_attention(model: nn.Module, attend: Attend) -> Iterator[None]:
    """Let `attend(function, module, query, key, value, mask, **more)` be called for `function`."""
    modeling = [sys.modules[type(module).__module__] for module in model.modules()]
    registries = [getattr(m, "ALL_ATTENTION_FUNCTIONS", None) for m in modeling]
    with ExitStack() as stack:
        for registry in {id(r): r for r in registries if r is not None}.values():
            stack.enter_context(_replaced_in(registry, attend))
        yield


@contextmanager
def _replaced_in(registry: Any, attend: Attend) -> Iterator[None]:
    original = registry.get_interface

    def get_interface(implementation: str, default: Callable[..., Any]) -> Callable[..., Any]:
        function = original(implementation, default)
        return lambda *args, **kwargs: attend(function, *args, **kwargs)

    registry.get_interface = get_interface
    try:
        yield
    finally:
        del registry.get_interface


@contextmanager
def arguments_seen(model: nn.Module) -> Iterator[dict[nn.Module, tuple[Any, Any]]]:
    """The latest arguments of the forward of every module that belongs to a layer."""
    seen: dict[nn.Module, tuple[Any, Any]] = {}

    def note(module: nn.Module, args: Any, kwargs: Any) -> None:
        seen[module] = args, kwargs

    modules = [module for module in model.modules() if hasattr(module, "layer_idx")]
    handles = [module.register_forward_pre_hook(note, with_kwargs=True) for module in modules]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def recorded(model: nn.Module) -> Iterator[list[Call]]:
    """A list to which every call of an attention function of `model` is added, in their order."""
    calls: list[Call] = []
    with arguments_seen(model) as arguments:

        def attend(
            function: Any, module: nn.Module, query: Tensor, key: Tensor, *rest: Any, **more: Any
        ) -> tuple[Tensor, Any]:
            output, weights = function(module, query, key, *rest, **more)
            args, kwargs = arguments.get(module, ((), {}))
            calls.append(Call(module, args, kwargs, query, key, weights))
            return output, weights

        with replaced_attention(model, attend):
            yield calls


def run_in_full(model: nn.Module, ids: Tensor) -> FullRun:
    """Run the context `ids` `(1, S)` with eager attention, and note what its layers did."""
    with recorded(model) as calls:
        cache = feed(model, ids, None).past_key_values
    layers: dict[int, Layer] = {}
    for call in calls:
        for index, cached in enumerate(layers_of(cache)):
            heads = _heads_over(call, index, cached, ids.shape[1])
            if heads is None:
                continue
            if index in layers:
                layers[index].readers.append(call.module)
            else:
                states = cached.keys.clone(), cached.values.clone()
                layers[index] = Layer(*states, call, [call.module], heads)
            break
    delta = getattr(getattr(model, "model", None), "rope_deltas", None)
    return FullRun(model, ids, cache, layers, None if delta is None else int(delta))


def _heads_over(call: Call, index: int, cached: Any, length: int) -> Tensor | None:
    """The KV head of each query head of `call`, if it attends over the layer `cached`."""
    keys = getattr(cached, "keys", None)
    grows = isinstance(keys, Tensor) and keys.dim() == 4 and keys.shape[2] == length
    if not grows or getattr(cached, "is_sliding", False) or call.key.shape[2] != length:
        return None
    assert isinstance(keys, Tensor)
    n_heads, n_given, n_kv = call.query.shape[1], call.key.shape[1], keys.shape[1]
    of_given = torch.arange(n_heads) // (n_heads // n_given)
    if keys.shape[-1] == call.key.shape[-1]:
        same = [[torch.equal(given, head) for head in keys[0]] for given in call.key[0]]
        found = torch.tensor(same, dtype=torch.int64)
        return found.argmax(dim=-1)[of_given] if found.any(dim=-1).all() else None
    if getattr(call.module, "layer_idx", None) != index:
        return None
    # Latents, of which the module makes the keys of all heads: none of them is anybody's own.
    return torch.zeros(n_heads, dtype=torch.int64) if n_kv == 1 else of_given


# ---- which tokens a press should keep ------------------------------------------------------------


def sinks_and_recent(run: FullRun, layer: Layer) -> Tensor:
    """StreamingLLM: the first four tokens, and then the later the better."""
    later = torch.arange(layer.length, dtype=torch.float32)
    later[:4] = float("inf")
    return later.expand(layer.keys.shape[:3])


def key_norms(run: FullRun, layer: Layer) -> Tensor:
    """Knorm: the smaller the norm of a key, the better."""
    return -layer.keys.norm(dim=-1)


def lag_variation(run: FullRun, layer: Layer, sink: int = 2, lag: int = 4) -> Tensor:
    """LagKV: how the keys and values of a block vary, measured by the next block."""
    scores = torch.full(layer.keys.shape[:3], float("inf"))
    n_blocks = (layer.length - sink) // lag
    for head in range(layer.keys.shape[1]):
        for block in range(n_blocks - 1):
            here, after = sink + block * lag, sink + (block + 1) * lag
            total = torch.zeros(lag)
            for states in (layer.keys[0, head], layer.values[0, head]):
                next_block = states[after : after + lag]
                low, high = next_block.amin(dim=0), next_block.amax(dim=0)
                scaled = (states[here:after] - low) / (high - low)
                total += scaled.std(dim=-1).softmax(dim=0) / 2
            scores[0, head, here:after] = total.argsort().argsort() / lag
    return scores


def window_votes(run: FullRun, layer: Layer, window: int = 4) -> Tensor:
    """SnapKV: what the last queries attend to, pooled over neighbouring keys."""
    assert layer.call.weights is not None
    before = layer.length - window
    votes = layer.call.weights[:, :, -window:, :before].float().mean(dim=2)
    pooled = avg_pool1d(layer.grouped(votes), 5, stride=1, padding=2)
    return pad(pooled, (0, window), value=float("inf"))


def expected_attention(run: FullRun, layer: Layer, sink: int = 2, future: int = 4) -> Tensor:
    """ExpectedAttention: what Gaussian queries at the coming positions would attend to.

    The rotation of a query is averaged by asking the model for it at every coming position.
    """
    given = layer.call.kwargs.get("position_ids")
    start = layer.length if given is None else int(given.max()) + 1
    if run.rope_delta is not None:
        start = layer.length + run.rope_delta
    positions = range(start, start + future)
    queries = torch.stack([asked_at(run, layer, p).query for p in positions]).mean(dim=0)
    queries = queries[:, :, sink:].double()
    mean = queries.mean(dim=2)
    centred = queries - mean.unsqueeze(2)
    covariance = centred.mT @ centred / queries.shape[2]
    keys = layer.keys[:, layer.heads, sink:].double()
    d = keys.shape[-1]
    logits = (keys @ mean.unsqueeze(-1)).squeeze(-1) / d**0.5
    logits = logits + ((keys @ covariance) * keys).sum(dim=-1) / (2 * d)
    scores = layer.grouped(logits.softmax(dim=-1)) * layer.values[:, :, sink:].norm(dim=-1)
    return pad(scores, (sink, 0), value=float("inf"))


def asked_at(run: FullRun, layer: Layer, position: int) -> Call:
    """The attention of `layer` once more, with every token of the context at one `position`."""
    module = layer.call.module
    args, kwargs = layer.call.args, dict(layer.call.kwargs)
    moved_args, moved = _arguments_at(run, torch.full_like(run.ids, position))[module]
    parameters = list(inspect.signature(type(module).forward).parameters)[1:]
    for name in ("position_embeddings", "position_ids", "cache_position"):
        if name in moved:
            kwargs[name] = moved[name]
        elif name in parameters[: len(moved_args)]:
            index = parameters.index(name)
            args = (*args[:index], moved_args[index], *args[index + 1 :])
    for name in CACHE_NAMES:
        if name in kwargs:
            kwargs[name] = None
        elif name in parameters[: len(args)]:
            index = parameters.index(name)
            args = (*args[:index], None, *args[index + 1 :])
    with recorded(run.model) as calls, torch.no_grad():
        module(*args, **kwargs)
    return calls[-1]


def _arguments_at(run: FullRun, positions: Tensor) -> dict[nn.Module, tuple[Any, Any]]:
    """What the modules of layers are given in a run at `positions` `(1, q)`."""
    key = tuple(positions[0].tolist())
    if key not in run.elsewhere:
        ids = run.ids[:, : len(key)].clamp(max=TEXT)
        with arguments_seen(run.model) as seen:
            feed(run.model, ids, None, **_positions(run.model, positions))
        run.elsewhere[key] = seen
    return run.elsewhere[key]


def _positions(model: nn.Module, positions: Tensor) -> dict[str, Tensor]:
    accepted = inspect.signature(type(model).forward).parameters
    names = [name for name in ("decoder_position_ids", "position_ids") if name in accepted]
    if not names and "kwargs" in accepted:
        names = ["position_ids"]  # handed on to the language model
    return {name: positions for name in names[:1]}


def tokens_left(layer: Layer, cached: Any) -> Tensor:
    """Which tokens of the full run a compressed layer still holds, `(1, H_kv, S)` bool.

    They are told by their values, which no press changes (by their keys where there are none).

    Raises:
        LookupError: if it holds something else.
    """
    by_values = layer.values.shape[-1] > 0
    full = layer.values if by_values else layer.keys
    kept = torch.zeros(full.shape[:3], dtype=torch.bool)
    for head in range(full.shape[1]):
        if hasattr(cached, "head"):
            held = cached.head(head)[by_values]
        else:
            held = (cached.values if by_values else cached.keys)[0, head]
        distances = torch.cdist(held.float(), full[0, head].float())
        nearest, index = distances.min(dim=-1)
        if nearest.max() > 1e-3 * full.abs().max() or len(index.unique()) < len(index):
            raise LookupError(f"head {head} holds values that the full run has not")
        kept[0, head, index] = True
    return kept


def wrongly_kept(kept: Tensor, scores: Tensor, n: int, headwise: bool) -> str:
    """What is wrong about the tokens `kept` `(1, H_kv, S)`, given all scores; nothing: ""."""
    if headwise:
        n_heads, n_safe = kept.shape[1], max(1, int(n * 0.2))
        best = scores.topk(n_safe, dim=-1).indices
        scores = scores.scatter(-1, best, float("inf"))
        kept, scores, n = kept.reshape(1, 1, -1), scores.reshape(1, 1, -1), n * n_heads
    finite = scores[scores.isfinite()]
    if finite.std() < 1e-5 * finite.abs().mean():
        return "all scores are equal but for rounding, and that is what it chooses by"
    for head in range(kept.shape[1]):
        chosen = kept[0, head]
        if chosen.sum() != n:
            return f"keeps {int(chosen.sum())} tokens, should keep {n}"
        worst, best_left = scores[0, head][chosen].min(), scores[0, head][~chosen].max()
        if worst < best_left - 1e-4 * finite.abs().max():
            return f"keeps a token that scores {worst:.4g}, evicts one that scores {best_left:.4g}"
    return ""


# ---- the logits that follow ----------------------------------------------------------------------


def keys_moved(run: FullRun, layer: Layer, kept: Tensor) -> Tensor:
    """The keys that are `kept`, each at its place among them: `(1, H_kv, S, d)`, others as ever."""
    moved = layer.keys.clone()
    for place in range(int(kept.sum(dim=-1).max())):
        given = asked_at(run, layer, place).key
        for head in range(kept.shape[1]):
            token = kept[0, head].nonzero()[place, 0]
            query_head = int((layer.heads == head).nonzero()[0, 0])
            repeated = query_head // (len(layer.heads) // given.shape[1])
            moved[0, head, token] = given[0, repeated, token]
    return moved


def logits_after(
    run: FullRun, kept: dict[int, Tensor], steps: list[Tensor], moved: dict[int, Tensor] | None
) -> list[Tensor]:
    """The logits of `steps` `(1, q)` each, with all that is not `kept` masked in the full cache.

    Args:
        kept: by layer, `(1, H_kv, S)` bool.
        moved: by layer, keys at other positions, from where the steps then continue there.
    """
    cache = copy.deepcopy(run.cache)
    masks = {}
    for index, of_layer in kept.items():
        layer = run.layers[index]
        for reader in layer.readers:
            masks[reader] = of_layer[:, layer.heads]
        if moved is not None:
            layers_of(cache)[index].keys = moved[index].clone()

    def attend(
        function: Any,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any = None,
        **more: Any,
    ) -> tuple[Tensor, Any]:
        if module in masks:
            attention_mask = _with_evicted(attention_mask, masks[module], query, key)
        result: tuple[Tensor, Any] = function(module, query, key, value, attention_mask, **more)
        return result

    logits, seen = [], run.ids.shape[1]
    for ids in steps:
        places = None if moved is None else _places(run, kept, seen, ids)
        with replaced_attention(run.model, attend), _at(places):
            logits.append(feed(run.model, ids, cache).logits)
        seen += ids.shape[1]
    return logits


def _with_evicted(mask: Any, kept: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """`mask` with the evicted hidden too; `kept` `(1, H, S)` speaks of the first columns."""
    n_queries, n_keys = query.shape[2], key.shape[2]
    lowest = torch.finfo(query.dtype).min
    if mask is None:
        future = torch.ones(n_queries, n_keys, dtype=torch.bool).triu(n_keys - n_queries + 1)
        mask = torch.zeros(1, 1, n_queries, n_keys).masked_fill(future, lowest)
    hidden = torch.zeros(1, kept.shape[1], 1, n_keys)
    hidden[..., : kept.shape[-1]].masked_fill_(~kept.unsqueeze(2), lowest)
    return torch.maximum(mask[..., :n_keys] + hidden, torch.tensor(lowest)).to(query.dtype)


def _places(
    run: FullRun, kept: dict[int, Tensor], seen: int, ids: Tensor
) -> dict[nn.Module, dict[str, Any]]:
    """The positional arguments of every module whose layer continues from fewer tokens."""
    found: dict[nn.Module, dict[str, Any]] = {}
    for index, of_layer in kept.items():
        start = int(of_layer.sum(dim=-1).max()) + seen - run.ids.shape[1]
        positions = torch.arange(start, start + ids.shape[1])[None]
        arguments = _arguments_at(run, positions)
        for reader in run.layers[index].readers:
            names = ("position_embeddings", "position_ids")
            found[reader] = {k: v for k, v in arguments[reader][1].items() if k in names}
    return found


@contextmanager
def _at(places: dict[nn.Module, dict[str, Any]] | None) -> Iterator[None]:
    """Let modules be called with other positional arguments."""

    def replace(module: nn.Module, args: Any, kwargs: Any) -> Any:
        assert places is not None
        return args, {**kwargs, **places[module]}

    modules = list(places or ())
    handles = [module.register_forward_pre_hook(replace, with_kwargs=True) for module in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
