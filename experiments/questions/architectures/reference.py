"""The expected result of a press, computed without any code that presses use.

The model runs over the whole context with eager attention, and the inputs of its attention
functions are recorded; the tokens that a press should keep are computed from these. The expected
logits are those of a run over the *full* cache in which every evicted key is masked, by layer and
head, because a masked key contributes nothing.
"""

import copy
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from experiments.questions.architectures.decoders import image_inputs

TEXT = 99
"""The largest token id of text; larger ones mark images and other modalities."""
CACHE_NAMES = {"cache", "past_key_values", "past_key_value", "layer_past"}
_POSITIONAL = ("position_embeddings", "position_ids", "cache_position")


@dataclass
class Call:
    """One call of an attention function, and of the module around it.

    Attributes:
        module: the attention module.
        arguments: arguments of the module's forward, by name.
        query: `(B, H, q, d)`, as passed to the attention function.
        key: `(B, H_k, S, d)`, as passed to the attention function; some models repeat KV heads
            before, so `H_k` is `H_kv` or `H`.
        weights: `(B, H, q, S)`, as returned by the attention function, or None.
    """

    module: nn.Module
    arguments: dict[str, Any]
    query: Tensor
    key: Tensor
    weights: Tensor | None


@dataclass
class Layer:
    """One layer of the full cache, and the attention over it.

    Attributes:
        keys, values: `(1, H_kv, S, d)`, as cached.
        call: the call of the module that filled the layer.
        readers: the modules that attend over it; several if layers share it.
        heads: `(H,)` int64, the KV head that each query head attends over.
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
        """Mean over the query heads of each KV head: from `(1, H, S)` to `(1, H_kv, S)`."""
        heads = range(self.keys.shape[1])
        return torch.stack([of_query_heads[:, self.heads == h].mean(dim=1) for h in heads], dim=1)


@dataclass
class FullRun:
    """A run of a context without a press.

    Attributes:
        ids: `(1, S)`, the token ids of the context.
        cache: the cache after the run.
        layers: the layers that hold keys of the whole context, by index in the cache.
        rope_delta: difference between the position of the next token and the number of tokens, if
            the model reports it: an image takes up fewer positions than tokens.
        elsewhere: arguments of modules in runs at other positions, by these positions.
    """

    model: nn.Module
    ids: Tensor
    cache: Any
    layers: dict[int, Layer]
    rope_delta: int | None = None
    elsewhere: dict[tuple[int, ...], dict[nn.Module, dict[str, Any]]] = field(default_factory=dict)


def feed(model: Any, ids: Tensor, cache: Any, **more: Any) -> Any:
    """One forward over `ids` and their image; in an encoder-decoder, `ids` go to the decoder."""
    inputs = {"input_ids": ids}
    if model.config.is_encoder_decoder and hasattr(model, "get_encoder"):
        context = torch.arange(5, 5 + ids.shape[0] * 19).view(ids.shape[0], 19) % 100
        inputs = {"input_ids": context, "decoder_input_ids": ids}
        if "attention_mask" in more:
            more["decoder_attention_mask"] = more.pop("attention_mask")
    inputs |= image_inputs(model, ids)
    with torch.no_grad():
        return model(**inputs, past_key_values=cache, use_cache=True, **more)


def cache_of(output: Any) -> Any:
    """The cache that a model returned; transformers 5.24 has renamed it."""
    return getattr(output, "cache", None) or output.past_key_values


def layers_of(cache: Any) -> list[Any]:
    """The layers of a cache; for an encoder-decoder cache those of the decoder's self-attention."""
    return list(getattr(getattr(cache, "self_attention_cache", cache), "layers", ()))


# ---- watching attention functions ----------------------------------------------------------------


@contextmanager
def replaced_attention(model: nn.Module, attend: Callable[..., Any]) -> Iterator[None]:
    """Replace each attention `function`'s call by `attend(function, module, query, key, ...)`."""
    modeling = [sys.modules[type(module).__module__] for module in model.modules()]
    registries = {id(r): r for m in modeling if (r := getattr(m, "ALL_ATTENTION_FUNCTIONS", None))}
    with ExitStack() as stack:
        for registry in registries.values():
            original = registry.get_interface
            registry.get_interface = lambda *names, of=original, **named: partial(
                attend, of(*names, **named)
            )
            stack.callback(delattr, registry, "get_interface")
        yield


def _named(module: nn.Module, args: Any, kwargs: Any) -> dict[str, Any]:
    return dict(zip(inspect.signature(module.forward).parameters, args, strict=False)) | kwargs


@contextmanager
def _before_each(modules: Iterable[nn.Module], hook: Callable[..., Any]) -> Iterator[None]:
    """Call `hook(module, args, kwargs)` before the forward of each of `modules`."""
    with ExitStack() as stack:
        for module in modules:
            stack.enter_context(module.register_forward_pre_hook(hook, with_kwargs=True))
        yield


@contextmanager
def arguments_seen(model: nn.Module) -> Iterator[dict[nn.Module, dict[str, Any]]]:
    """The latest forward arguments of every module with a `layer_idx`."""
    seen: dict[nn.Module, dict[str, Any]] = {}

    def note(module: nn.Module, args: Any, kwargs: Any) -> None:
        seen[module] = _named(module, args, kwargs)

    with _before_each((m for m in model.modules() if hasattr(m, "layer_idx")), note):
        yield seen


@contextmanager
def recorded(model: nn.Module) -> Iterator[list[Call]]:
    """A list to which every call of an attention function of `model` is appended."""
    calls: list[Call] = []
    with arguments_seen(model) as arguments:

        def attend(
            function: Any, module: nn.Module, *given: Any, **more: Any
        ) -> tuple[Tensor, Any]:
            output, weights = function(module, *given, **more)
            query, key = given[:2]
            calls.append(Call(module, arguments.get(module, {}), query, key, weights))
            return output, weights

        with replaced_attention(model, attend):
            yield calls


def run_in_full(model: nn.Module, ids: Tensor) -> FullRun:
    """Run the context `ids` `(1, S)` with eager attention, and record its layers."""
    with recorded(model) as calls:
        cache = cache_of(feed(model, ids, None))
    layers: dict[int, Layer] = {}
    for call in calls:
        for index, cached in enumerate(layers_of(cache)):
            heads = _heads_over(call, index, cached, ids.shape[1])
            if heads is not None:
                states = cached.keys.clone(), cached.values.clone()
                layer = layers.setdefault(index, Layer(*states, call, [], heads))
                layer.readers.append(call.module)
                break
    delta = getattr(getattr(model, "model", None), "rope_deltas", None)
    return FullRun(model, ids, cache, layers, None if delta is None else int(delta))


def _heads_over(call: Call, index: int, cached: Any, length: int) -> Tensor | None:
    """The KV head of each query head of `call`; None if it does not attend over `cached`."""
    keys: Any = getattr(cached, "keys", None)
    grows = isinstance(keys, Tensor) and keys.dim() == 4 and keys.shape[2] == length
    if not grows or getattr(cached, "is_sliding", False) or call.key.shape[2] != length:
        return None
    n_heads, n_given, n_kv = call.query.shape[1], call.key.shape[1], keys.shape[1]
    of_given = torch.arange(n_heads) // (n_heads // n_given)
    if keys.shape[-1] == call.key.shape[-1]:
        same = [[torch.equal(given, head) for head in keys[0]] for given in call.key[0]]
        found = torch.tensor(same, dtype=torch.int64)
        return found.argmax(dim=-1)[of_given] if found.any(dim=-1).all() else None
    if getattr(call.module, "layer_idx", None) != index:
        return None
    # The cached keys are latents, from which the module makes the keys of all heads.
    return torch.zeros(n_heads, dtype=torch.int64) if n_kv == 1 else of_given


# ---- which tokens a press has kept ---------------------------------------------------------------


def call_at(run: FullRun, layer: Layer, position: int) -> Call:
    """Repeat the attention call of `layer` with every token of the context at one `position`."""
    module, arguments = layer.call.module, dict(layer.call.arguments)
    moved = _arguments_at(run, torch.full_like(run.ids, position))[module]
    arguments |= {name: moved[name] for name in _POSITIONAL if name in moved}
    arguments |= dict.fromkeys(CACHE_NAMES & arguments.keys())
    with recorded(run.model) as calls, torch.no_grad():
        module(**arguments)
    return calls[-1]


def _arguments_at(run: FullRun, positions: Tensor) -> dict[nn.Module, dict[str, Any]]:
    """Arguments of the layers' modules in a run at `positions` `(1, q)`."""
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
        names = ["position_ids"]  # passed on to the language model
    return {name: positions for name in names[:1]}


def tokens_left(layer: Layer, cached: Any) -> Tensor:
    """Which tokens of the full run a compressed layer still holds, `(1, H_kv, S)` bool.

    Tokens are identified by their values, which no press changes, or by their keys if the layer has
    no values.

    Raises:
        LookupError: if the layer holds a value that the full run does not have.
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
            raise LookupError(f"head {head} holds values that the full run does not have")
        kept[0, head, index] = True
    return kept


def wrongly_kept(kept: Tensor, scores: Tensor, n: int, headwise: bool) -> str:
    """What is wrong with the `kept` tokens, given all scores; empty if nothing is.

    Args:
        kept: `(1, H_kv, S)` bool.
        scores: expected scores, `(1, H_kv, S)`.
        n: expected number of kept tokens per head.
        headwise: whether heads share one budget; each keeps its best 20% of `n` in any case.
    """
    if headwise:
        n_heads, n_safe = kept.shape[1], max(1, int(n * 0.2))
        best = scores.topk(n_safe, dim=-1).indices
        scores = scores.scatter(-1, best, float("inf"))
        kept, scores, n = kept.reshape(1, 1, -1), scores.reshape(1, 1, -1), n * n_heads
    finite = scores[scores.isfinite()]
    if finite.std() < 1e-5 * finite.abs().mean():
        return "all scores are equal up to rounding, so the choice rests on rounding"
    for head in range(kept.shape[1]):
        chosen = kept[0, head]
        if chosen.sum() != n:
            return f"keeps {int(chosen.sum())} tokens, should keep {n}"
        worst, best_left = scores[0, head][chosen].min(), scores[0, head][~chosen].max()
        if worst < best_left - 1e-4 * finite.abs().max():
            return f"keeps a token that scores {worst:.4g}, evicts one that scores {best_left:.4g}"
    return ""


# ---- expected logits -----------------------------------------------------------------------------


def keys_moved(run: FullRun, layer: Layer, kept: Tensor) -> Tensor:
    """Keys `(1, H_kv, S, d)` with the `kept` ones rotated to positions 0, 1, ... in their head."""
    moved = layer.keys.clone()
    for position in range(int(kept.sum(dim=-1).max())):
        given = call_at(run, layer, position).key
        for head in range(kept.shape[1]):
            token = kept[0, head].nonzero()[position, 0]
            query_head = int((layer.heads == head).nonzero()[0, 0])
            repeated = query_head // (len(layer.heads) // given.shape[1])
            moved[0, head, token] = given[0, repeated, token]
    return moved


def logits_after(
    run: FullRun, kept: dict[int, Tensor], steps: list[Tensor], moves: bool
) -> list[Tensor]:
    """The logits of `steps` `(1, q)` each, with the evicted tokens masked in the full cache.

    Args:
        kept: the kept tokens of each layer, `(1, H_kv, S)` bool.
        moves: whether kept keys are rerotated to new positions, after which the steps continue.
    """
    cache = copy.deepcopy(run.cache)
    masks: dict[nn.Module, Tensor] = {}
    for index, of_layer in kept.items():
        layer = run.layers[index]
        masks |= dict.fromkeys(layer.readers, of_layer[:, layer.heads])
        if moves:
            layers_of(cache)[index].keys = keys_moved(run, layer, of_layer)

    def attend(
        function: Any, module: Any, *states: Any, attention_mask: Any = None, **more: Any
    ) -> tuple[Tensor, Any]:
        query, key, value, mask = (*states, attention_mask)[:4]
        if module in masks:
            mask = _with_evicted(mask, masks[module], query, key)
        return function(module, query, key, value, mask, **more)

    logits, seen = [], run.ids.shape[1]
    for ids in steps:
        moved = _positions_after(run, kept, seen, ids) if moves else {}

        def move(module: nn.Module, args: Any, kwargs: Any, moved: Any = moved) -> Any:
            return (), _named(module, args, kwargs) | moved[module]

        with replaced_attention(run.model, attend), _before_each(moved, move):
            logits.append(feed(run.model, ids, cache).logits)
        seen += ids.shape[1]
    return logits


def _with_evicted(mask: Any, kept: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """`mask` with evicted keys masked as well; `kept` `(1, H, S)` covers the first `S` columns."""
    n_queries, n_keys = query.shape[2], key.shape[2]
    lowest = torch.finfo(query.dtype).min
    if mask is None:
        future = torch.ones(n_queries, n_keys, dtype=torch.bool).triu(n_keys - n_queries + 1)
        mask = torch.zeros(1, 1, n_queries, n_keys).masked_fill(future, lowest)
    hidden = torch.zeros(1, kept.shape[1], 1, n_keys)
    hidden[..., : kept.shape[-1]].masked_fill_(~kept.unsqueeze(2), lowest)
    return torch.maximum(mask[..., :n_keys] + hidden, torch.tensor(lowest)).to(query.dtype)


def _positions_after(
    run: FullRun, kept: dict[int, Tensor], seen: int, ids: Tensor
) -> dict[nn.Module, dict[str, Any]]:
    """Positional arguments of `ids` for the modules of layers that hold fewer tokens now."""
    found: dict[nn.Module, dict[str, Any]] = {}
    for index, of_layer in kept.items():
        start = int(of_layer.sum(dim=-1).max()) + seen - run.ids.shape[1]
        positions = torch.arange(start, start + ids.shape[1])[None]
        arguments = _arguments_at(run, positions)
        for reader in run.layers[index].readers:
            found[reader] = {k: v for k, v in arguments[reader].items() if k in _POSITIONAL[:2]}
    return found
