"""Running a model without side effects while recording the inputs of its attention modules.

Nothing is patched or hooked: a `sys.setprofile` function, which is called for every call of a
Python function in this thread, records them and is removed afterwards. No press takes part.
"""

import inspect
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from press_core.forward import current, own_cache, with_cache
from press_core.model.decoder import device_of
from press_core.model.rotary import Rotary


@dataclass
class Attended:
    """One call of an attention function: states `(B, H, q, d)`, other arguments by name.

    Attributes:
        weights: the weights that it returned, `(B, H, q, S)`, or None.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    options: dict[str, Any]
    weights: Tensor | None = None

    @property
    def scaling(self) -> float:
        """The factor on the logits: the `scaling` argument, or a fit to the returned weights."""
        given, usual = self.options.get("scaling"), self.query.shape[-1] ** -0.5
        if given is not None or not isinstance(self.weights, Tensor):
            return usual if given is None else float(given)
        keys = self.key.repeat_interleave(self.query.shape[1] // self.key.shape[1], dim=1)
        products = self.query[:, :, -1:].double() @ keys.double().transpose(-1, -2)
        products, weights = products - products.mean(-1, keepdim=True), self.weights[:, :, -1:]
        fitted = (products * weights.double().log()).sum() / products.square().sum()
        explains = torch.allclose((fitted * products).softmax(-1), weights.double(), atol=1e-5)
        return float(fitted) if explains and abs(fitted / usual - 1) > 1e-2 else usual


@dataclass
class Seen:
    """What was observed of one module that has a layer in the cache.

    Attributes:
        model: the model that it is part of.
        makers: modules of any model that returned two tensors, with the first tensor and their
            arguments.
        arguments: of its last forward, by name, including `**kwargs`.
        parameters: names of the parameters of that forward, in order.
        extra: names of the arguments in `**kwargs` that no inherited forward takes by name; None:
            the forward has no `**kwargs`.
        n_forwards: number of forwards.
        attended: calls of attention functions with this module.
        interface: the registry that it got an attention function from.
        rotations: candidates for its rotation: functions that it called with its cosines and sines.
        outputs: outputs of its submodules by name, the latest last.
        output: its output.
    """

    name: str
    module: Any
    model: nn.Module
    makers: list[tuple[Any, Tensor, dict[str, Any]]]
    arguments: dict[str, Any] = field(default_factory=dict)
    parameters: tuple[str, ...] = ()
    extra: tuple[str, ...] | None = None
    n_forwards: int = 0
    attended: list[Attended] = field(default_factory=list)
    interface: Any = None
    rotations: list[Rotary] = field(default_factory=list)
    outputs: dict[str, Tensor] = field(default_factory=dict)
    output: Tensor | None = None

    @property
    def cache_name(self) -> str:
        """The name of the argument that is a cache; empty: none."""
        return next((name for name, x in self.arguments.items() if isinstance(x, Cache)), "")

    @property
    def cache(self) -> Any:
        """Its cache, for an encoder-decoder the decoder's self-attention cache; or None."""
        return own_cache(self.arguments.get(self.cache_name))

    @property
    def layer(self) -> Any:
        """The layer of the cache that it fills, or None."""
        layers, index = getattr(self.cache, "layers", ()), self.module.layer_idx
        return layers[index] if index < len(layers) else None

    @property
    def embeddings(self) -> Any:
        """Its `position_embeddings` argument: cosines and sines, or None."""
        return self.arguments.get("position_embeddings")

    @cached_property
    def ignores_positions(self) -> bool:
        """Whether it makes equal keys of equal tokens at different positions; runs it again."""
        given = self.arguments
        names = ["hidden_states"] if "hidden_states" in given else [*given]
        states = {n: x for n in names if isinstance(x := given[n], Tensor) and x.dim() == 3}
        try:
            keys = self.again(**{n: x[:, :1].expand_as(x) for n, x in states.items()}).key
        except Exception:  # the module runs in its place alone
            return False
        return close(keys, keys[:, :, :1].expand_as(keys))

    def again(self, **changed: Any) -> Attended:
        """Run it again with changed arguments; returns its first attention call."""
        with watched(self.model) as watch:
            self.module(**{**self.arguments, self.cache_name: None, **changed})
        return watch.of_module[id(self.module)].attended[0]


def code_of(module: nn.Module) -> Any:
    """The code of the forward of `module`, below all wrappers; None: it is not in Python."""
    return getattr(inspect.unwrap(module.forward), "__code__", None)


def layers_of(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The modules of `model` with an integer `layer_idx`, with their names."""
    modules = model.named_modules()
    return [(n, m) for n, m in modules if isinstance(getattr(m, "layer_idx", None), int)]


class Watch:
    """A profile function that records the modules of a model that have a `layer_idx`."""

    def __init__(self, model: nn.Module) -> None:
        self.makers: list[tuple[Any, Tensor, dict[str, Any]]] = []
        self.seen = [Seen(*named, model, self.makers) for named in layers_of(model)]
        self.of_module = {id(seen.module): seen for seen in self.seen}
        self._running: list[tuple[FrameType, Seen]] = []
        self._attending: dict[FrameType, Attended] = {}

    def __call__(self, frame: FrameType, event: str, returned: Any) -> None:
        code = frame.f_code
        if not code.co_argcount:
            return
        if event == "call":
            self._called(frame, frame.f_locals[code.co_varnames[0]])
        elif event == "return" and frame in self._attending:
            weights = returned[1] if isinstance(returned, tuple) and len(returned) == 2 else None
            self._attending.pop(frame).weights = weights
        elif event == "return":
            if self._running and self._running[-1][0] is frame:
                self._running.pop()
            if code.co_name in ("forward", "_call_impl"):
                self._returned(frame, frame.f_locals[code.co_varnames[0]], returned)

    def _called(self, frame: FrameType, first: Any) -> None:
        code, seen = frame.f_code, self.of_module.get(id(first))
        if seen is not None and (code.co_name == "forward" or code is code_of(seen.module)):
            if any(other is seen for _, other in self._running):  # `super().forward(...)`
                seen.extra = seen.extra and tuple(x for x in seen.extra if x not in frame.f_locals)
                return
            _note_arguments(seen, frame)
            self._running.append((frame, seen))
        elif seen is not None and code.co_argcount > 3:
            query, key, value = (frame.f_locals[name] for name in code.co_varnames[1:4])
            if all(isinstance(x, Tensor) and x.dim() == 4 for x in (query, key, value)):
                options = frame.f_locals | _extra(frame)
                seen.attended.append(Attended(query, key, value, options))
                self._attending[frame] = seen.attended[-1]
        elif self._running:
            inside = self._running[-1][1]
            if code.co_name == "get_interface":
                inside.interface = first
            elif isinstance(inside.embeddings, tuple) and len(inside.embeddings) == 2:
                inside.rotations += _rotations(frame, *inside.embeddings)

    def _returned(self, frame: FrameType, module: Any, returned: Any) -> None:
        first = returned[0] if isinstance(returned, tuple) and returned else returned
        if not isinstance(first, Tensor):
            return
        if frame.f_code.co_name == "_call_impl":  # the output that hooks see, gathered over ranks
            if id(module) in self.of_module:
                self.of_module[id(module)].output = first
            for _, seen in self._running[-1:]:
                for name in [n for n, x in seen.module.named_children() if x is module]:
                    seen.outputs.pop(name, None)
                    seen.outputs[name] = first
        elif isinstance(returned, tuple) and len(returned) == 2 and _are_alike(*returned):
            self.makers.append((module, first, dict(frame.f_locals)))


def close(a: Tensor, b: Tensor, tolerance: float | None = None) -> bool:
    """Whether two tensors are equal within `tolerance` times the largest value; None: rounding."""
    if a.shape != b.shape:
        return False
    tolerance = 8 * torch.finfo(b.dtype).eps if tolerance is None else tolerance
    return bool(((a - b).abs() <= tolerance * b.abs().amax()).all())


def _are_alike(first: Tensor, second: Any) -> bool:
    """Whether two results may be cosines and sines, and not an output and its weights."""
    return isinstance(second, Tensor) and second.shape == first.shape


def _extra(frame: FrameType) -> dict[str, Any]:
    """The arguments that a function was given beyond its parameters."""
    return dict(frame.f_locals.get(inspect.getargvalues(frame).keywords or "", {}))


def _note_arguments(seen: Seen, frame: FrameType) -> None:
    names, _, starred, given = inspect.getargvalues(frame)
    extra = _extra(frame)
    seen.arguments = {name: given[name] for name in names[1:]} | extra
    seen.extra = tuple(extra) if starred else None
    seen.parameters = (*names[1:], *(("kwargs",) if starred else ()))
    seen.n_forwards += 1


def _rotations(frame: FrameType, cos: Any, sin: Any) -> list[Rotary]:
    """Candidate rotations for the function that `frame` runs, if it takes `cos` and `sin`.

    Such functions take queries and keys together or one at a time, as `(B, H, S, d)` or
    `(B, S, H, d)`.
    """
    code = frame.f_code
    function = frame.f_globals.get(code.co_name)
    given = {name: frame.f_locals[name] for name in code.co_varnames[: code.co_argcount]}
    angles = [name for angle in (cos, sin) for name, x in given.items() if x is angle]
    states = [name for name, x in given.items() if isinstance(x, Tensor) and x.dim() == 4]
    if not callable(function) or len(angles) != 2 or len(states) not in (1, 2):
        return []
    settings = {n: x for n, x in given.items() if not isinstance(x, Tensor) and x is not None}

    def rotate(heads: int, x: Tensor, *cos_sin: Tensor) -> Tensor:
        x = x.transpose(1, heads)
        no_key = x.narrow(heads, 0, 0)
        rotated = dict(zip(states, (x, no_key), strict=False))
        found = function(**rotated, **dict(zip(angles, cos_sin, strict=True)), **settings)
        return (found[0] if len(states) == 2 else found).transpose(1, heads)

    n_channels = given[states[0]].shape[-1]
    return [Rotary(partial(rotate, heads), n_channels) for heads in (1, 2)]


@contextmanager
def watched(model: nn.Module) -> Iterator[Watch]:
    """Record `model` in this thread until the block ends; a profiler that runs is paused."""
    watch, before = Watch(model), sys.getprofile()
    # Up to Python 3.11 this can be a profiler in C (cProfile), which is no profile function.
    profiler: Any = None if before is None or callable(before) else before
    if profiler is not None:
        profiler.disable()
    sys.setprofile(watch)
    try:
        yield watch
    finally:
        sys.setprofile(None if profiler is not None else before)
        if profiler is not None:
            profiler.enable()


N_TOKENS = 7
one_at_a_time = threading.RLock()


@contextmanager
def as_if_nothing_happened(model: nn.Module) -> Iterator[None]:
    """Restore what a forward changes: random generators, attributes and small buffers of modules.

    Some rotary modules adapt their frequencies to the input, and image models store the offset of
    positions from token indices (`rope_deltas`). The model is in evaluation mode. Open scopes take
    no part in forwards of this thread; hooks of others run.
    """
    modules = list(model.modules())
    devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
    rng = torch.random.fork_rng(list(devices))
    with one_at_a_time, current.apart(), rng, _eagerly(), restored(modules):
        for module in modules:
            module.training = False
            if "rope_deltas" in vars(module):  # from the last image; transformers 5.2 would use it
                module.rope_deltas = None  # type: ignore[assignment]
        yield


@contextmanager
def restored(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Restore attributes and small buffers of `modules` at the end of the block."""
    saved = [(m, values_of(m), m._buffers.copy()) for m in modules]
    found = [x for _, _, buffers in saved for x in buffers.values() if x is not None]
    # Larger ones hold weights in some formats.
    copies = [(x, x.clone()) for x in found if not x.is_meta and x.numel() <= 2**16]
    try:
        yield
    finally:
        for module, attributes, buffers in saved:
            for name in values_of(module).keys() - attributes.keys():
                vars(module).pop(name, None)
            vars(module).update(attributes)
            module._buffers.update(buffers)
        for buffer, before in copies:
            if not torch.equal(buffer, before):
                buffer.copy_(before)


def rotating_as_before(model: nn.Module) -> AbstractContextManager[None]:
    """Restore rotary modules that adapt to far positions at the end of the block."""
    adapt = (m for m in model.modules() if any("max_seq_len_cached" in name for name in [*vars(m)]))
    return restored(adapt)


def values_of(module: nn.Module) -> dict[str, Any]:
    """The attributes of a module, without functions: other threads may put patches on it."""
    return {name: x for name, x in vars(module).copy().items() if not callable(x)}


def _eagerly() -> Any:
    """A context in which compiled models run eagerly."""
    compiles = "torch._dynamo" in sys.modules
    return torch.compiler.set_stance("force_eager") if compiles else nullcontext()


def run(model: Any, module: Any, cache: Any = None) -> Any:
    """Run `module` of `model` over `N_TOKENS` tokens, or over one more token after `cache`."""
    config = getattr(module, "config", None) or model.config
    ids = _ordinary_tokens(config).to(device_of(module))
    new = ids if cache is None else ids[:, :1]
    parameters = inspect.signature(type(module).forward).parameters
    given: dict[str, Any] = {"input_ids": new}
    if "decoder_input_ids" in parameters:
        given = {"input_ids": ids[:, 2:], "decoder_input_ids": new}
    more = {"use_cache": True, "logits_to_keep": 1}
    given |= {name: value for name, value in more.items() if name in parameters}
    return module(**given, **({} if cache is None else with_cache(module, cache)))


def _ordinary_tokens(config: Any) -> Tensor:
    """`(1, N_TOKENS)` ids of tokens that are not special tokens."""
    text = config.get_text_config()
    special: set[int] = set()
    for part in (config, text):
        for name, value in part.to_dict().items():
            if name.endswith(("_token_id", "_token_index", "_id")):
                special.update([value] if isinstance(value, int) else value or ())
    size = getattr(text, "vocab_size", None) or 1000
    ordinary = [token for token in range(min(size, 1000)) if token not in special]
    return torch.tensor([ordinary[-N_TOKENS:]])
