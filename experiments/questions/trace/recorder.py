"""What happens in the attention layers of a model while a press is open on it.

Every hook that the press has installed is watched in its place, and the forwards that it may have
wrapped are watched from above and from beneath; so are the attention functions, and the scores of
the press and of those that it wraps. What the layers hold is read off the cache around each of
these. The order of the events is the order in which they arrive.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from time import perf_counter_ns
from typing import Any, NamedTuple

from torch import Tensor, nn
from transformers import Cache

from attention_patch.interception import OVERRIDE, with_override
from attention_patch.reversible import wrap
from experiments.framework.plots import press_label
from press_core import AttentionSite, cache_nbytes, kept_lengths
from press_core.forward import Arguments, here, names_of
from press_core.model.decoder import decoder_of
from press_core.probe import attention_sites
from press_core.scope import InstalledPress
from press_core.scoring import TokenScorer

_PRUNES, ELSEWHERE = " prunes ", " of layer "
"""In the text of an event that prunes its layer; of one whose cause lies in another layer."""


@dataclass(frozen=True)
class Event:
    """One thing that happened in an attention layer; None: not a matter of this event.

    Attributes:
        mechanism: "hook" or "patch".
        step: 0 for the prefill, then the decode steps.
        layer: index of the layer in the cache.
        event: what happened, in words.
        hidden_states_length: tokens whose hidden states entered the layer in this step.
        keys_made: keys per head that the layer added to its cache in this step.
        keys_kept: keys per head that the layer's cache holds after the press; the mean, rounded,
            where heads hold different numbers.
        bytes_before, bytes_after: key and value storage of the layer's cache around the press.
        press_us: µs spent in the press since its last event; None for what the model does.
    """

    mechanism: str
    step: int
    layer: int
    event: str
    hidden_states_length: int | None = None
    keys_made: int | None = None
    keys_kept: int | None = None
    bytes_before: int | None = None
    bytes_after: int | None = None
    press_us: float | None = None


@dataclass
class _Layer:
    """What is known of one layer in the step in progress."""

    n_hidden: int = 0
    n_before: int = 0
    n_made: int = 0


class _Held(NamedTuple):
    """What one layer of the cache holds.

    Attributes:
        lengths: keys of each row and head.
        storage: of the keys: another one where they were replaced.
        nbytes: of keys and values.
    """

    lengths: tuple[int, ...] = ()
    storage: int = 0
    nbytes: int = 0

    @property
    def mean(self) -> int:
        """Keys per head."""
        return round(sum(self.lengths) / len(self.lengths)) if self.lengths else 0

    def __str__(self) -> str:
        low, high = min(self.lengths, default=0), max(self.lengths, default=0)
        return f"{low}" if low == high else f"{low} to {high}"


_NOTHING = _Held()
_FORWARD = {"hook": "forward hook", "patch": "wrapper"}
_BODY = {"hook": "hook on the decoder", "patch": "wrapper of the decoder"}


class _Stopwatch:
    """Time inside the press alone, however calls of press and model nest."""

    def __init__(self) -> None:
        self._in_press = [False]
        self._since, self._ns = perf_counter_ns(), 0

    @contextmanager
    def inside(self, press: bool) -> Iterator[None]:
        """Count the block as time in the press, or in the model."""
        self._book()
        self._in_press.append(press)
        self._since = perf_counter_ns()
        try:
            yield
        finally:
            self._book()
            self._in_press.pop()
            self._since = perf_counter_ns()

    def take(self) -> float:
        """µs in the press since this was last asked."""
        taken, self._ns = self._ns, 0
        return taken / 1000

    def _book(self) -> None:
        if self._in_press[-1]:
            self._ns += perf_counter_ns() - self._since


class Recorder:
    """Writes down what happens in the attention layers of a model, with one mechanism.

    Attributes:
        events: so far, in the order in which they arrived.
        step: of the forward that comes next, 0 for the prefill.
    """

    def __init__(self, mechanism: str, model: nn.Module, cache: Cache) -> None:
        self.mechanism, self.model, self.cache, self.step = mechanism, model, cache, 0
        self.events: list[Event] = []
        sites = attention_sites(model)  # before anything is watched: it runs the model itself
        self._sites = {id(site.module): site for site in sites}
        self._body = decoder_of(model, [site.name for site in sites])
        self._names = names_of(self._body)
        self._layers = {site.layer_idx: _Layer() for site in sites}
        self._index = min(self._layers)  # of the layer that was entered last
        self._watch = _Stopwatch()
        self._wrapped: _Wrapped | None = None  # the call of a wrapper in progress
        self._body_wrapped: _Wrapped | None = None  # the same, of the decoder
        self._after_body = ExitStack()  # what a wrapper of the decoder does afterwards
        self._attended = False  # whether the attention function itself ran under an override
        self._replayed: list[int] | None = None  # tokens of forwards that the press itself makes

    def tell(self, layer: int, event: str, press: bool, **known: int) -> None:
        """Add an event, of the press or of the model."""
        with self._watch.inside(press=False):
            press_us = self._watch.take() if press else None
            self.events.append(
                Event(self.mechanism, self.step, layer, event, press_us=press_us, **known)
            )

    @contextmanager
    def recorded(self, press: InstalledPress) -> Iterator[None]:
        """The scope of `press`, in which all that it does is watched; nothing is left of either."""
        with ExitStack() as undo:

            def watch(owner: Any, name: str, layer: Callable[..., Any]) -> None:
                undo.callback(wrap(owner, name, layer).remove)

            for kind in dict.fromkeys(_kinds(press)):
                called = "press" if kind is type(press) else press_label(kind.__name__)
                if issubclass(kind, TokenScorer):
                    watch(kind, "checked_scores", partial(self._score, called))
            for site in self._sites.values():
                enter = partial(self._hidden_states_enter, site)
                undo.callback(site.module.register_forward_pre_hook(enter, with_kwargs=True).remove)
            # Of the layers around one forward the first is the outermost, the last the innermost.
            if self.mechanism == "patch":
                watch(self._body, "forward", self._above_body)
                for site in self._sites.values():
                    watch(site.module, "forward", partial(self._above, site))
            known = {id(hooks): set(hooks) for hooks, _ in self._hooks()}
            self._replayed = []  # what the press tries out on the model as it opens
            undo.enter_context(press(self.model))
            self._replayed = None
            for hooks, watcher in self._hooks():
                for key in hooks.keys() - known[id(hooks)]:
                    hooks[key] = partial(watcher, hooks[key])  # goes with the hook that it watches
            for site in self._sites.values():
                watch(site.module, "forward", partial(self._beneath, site))
            watch(self._body, "forward", self._beneath_body)
            interfaces = [site.signature.interface for site in self._sites.values()]
            for interface in {id(interface): interface for interface in interfaces}.values():
                watch(interface, "get_interface", self._hand_out)
            yield

    def _hooks(self) -> Iterator[tuple[Any, Callable[..., Any]]]:
        """The dictionaries into which presses put hooks, with what is to watch those."""
        yield self._body._forward_pre_hooks, self._body_pre_hook
        yield self._body._forward_hooks, self._body_hook
        for site in self._sites.values():
            yield site.module._forward_pre_hooks, partial(self._pre_hook, site)
            for name, module in site.module.named_modules():
                watcher = partial(self._collecting_hook, name) if name else self._forward_hook
                yield module._forward_hooks, partial(watcher, site)

    # The model ...

    def _hidden_states_enter(
        self, site: AttentionSite, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        n_hidden = Arguments(args, kwargs, site.signature.parameters).get("hidden_states").shape[1]
        if self._replayed is not None:
            if site.layer_idx == min(self._layers):
                self._replayed.append(n_hidden)
            return
        self._index = site.layer_idx
        self._layers[self._index] = _Layer(n_hidden, self._held(self._index).mean)
        event = f"{count(n_hidden, 'hidden state')} {'enters' if n_hidden == 1 else 'enter'}"
        self.tell(self._index, event, press=False, hidden_states_length=n_hidden)

    def _hand_out(self, get_interface: Any, *args: Any, **kwargs: Any) -> Any:
        return partial(self._attention_runs, get_interface(*args, **kwargs))

    def _attention_runs(
        self, function: Any, module: nn.Module, query: Tensor, key: Tensor, *rest: Any, **more: Any
    ) -> Any:
        site = self._sites.get(id(module))
        # Also layers that presses leave alone, and models in other threads, come here.
        if site is None or self._replayed is not None:
            return function(module, query, key, *rest, **more)
        self._attended = True
        self._attends(site.layer_idx, key.shape[2], f"over {count(key.shape[2], 'key')}")
        with self._watch.inside(press=False):
            return function(module, query, key, *rest, **more)

    def _override_runs(
        self,
        site: AttentionSite,
        function: Any,
        module: nn.Module,
        query: Tensor,
        *rest: Any,
        **more: Any,
    ) -> Any:
        """Around what has been put in the place of the attention function, or around it."""
        if self.mechanism == "patch":
            queries = count(query.shape[2], "query", "queries")
            event = f"attention function is intercepted: {queries} seen"
            self.tell(site.layer_idx, event, press=True)
        self._attended = False
        output = function(module, query, *rest, **more)
        if not self._attended:
            held = self._held(site.layer_idx)
            self._attends(site.layer_idx, held.mean, f"head by head over {held} keys")
        return output

    def _attends(self, index: int, length: int, event: str) -> None:
        made = length - self._layers[index].n_before
        self._layers[index].n_made = made
        self.tell(index, f"attention runs {event}", press=False, keys_made=made)

    # ... the press ...

    def _score(self, called: str, score: Callable[..., Tensor], *args: Any) -> Tensor:
        scores = score(*args)
        self.tell(self._index, f"{called} scores {count(scores.shape[-1], 'key')}", press=True)
        return scores

    # ... its hooks ...

    def _pre_hook(self, site: AttentionSite, hook: Any, module: nn.Module, *given: Any) -> Any:
        if self._replayed is not None:
            return hook(module, *given)
        with self._watch.inside(press=True):
            result = hook(module, *given)
        self._enters("pre-hook ", site, given, result or given)
        return result

    def _collecting_hook(self, name: str, site: AttentionSite, hook: Any, *args: Any) -> Any:
        if self._replayed is not None:
            return hook(*args)
        with self._watch.inside(press=True):
            result = hook(*args)
        n_queries = self._layers[site.layer_idx].n_hidden
        collected = "nothing" if here.query is None else count(n_queries, "query", "queries")
        self.tell(site.layer_idx, f"hook on {name} collects {collected}", press=True)
        return result

    def _forward_hook(self, site: AttentionSite, hook: Any, *args: Any) -> Any:
        if self._replayed is not None:
            return hook(*args)
        held = self._all_held()
        with self._watch.inside(press=True):
            result = hook(*args)
        self._conclude(_FORWARD["hook"], site.layer_idx, held)
        return result

    def _body_pre_hook(self, hook: Any, body: nn.Module, *given: Any) -> Any:
        if self._replayed is not None:
            return hook(body, *given)
        held = self._all_held()
        with self._watch.inside(press=True):
            result = hook(body, *given)
        self._enters_body(given, result or given, held)
        return result

    def _body_hook(self, hook: Any, *args: Any) -> None:
        if self._replayed is not None:
            hook(*args)
            return
        with self._replaying():
            hook(*args)

    # ... and its wrappers

    def _above(self, site: AttentionSite, forward: Any, *args: Any, **kwargs: Any) -> Any:
        if self._replayed is not None:
            return forward(*args, **kwargs)
        self._wrapped = call = _Wrapped((args, kwargs), self._all_held())
        with self._watch.inside(press=True):
            output = forward(*args, **kwargs)
        self._wrapped = None
        self._conclude(_FORWARD["patch"], site.layer_idx, call.held)
        return output

    def _beneath(self, site: AttentionSite, forward: Any, *args: Any, **kwargs: Any) -> Any:
        if self._replayed is not None:
            return forward(*args, **kwargs)
        call = self._wrapped
        with self._watch.inside(press=False):
            if call is not None:
                self._enters("wrapper enters, ", site, call.given, (args, kwargs))
            if OVERRIDE in kwargs:
                kwargs = with_override(kwargs, partial(self._override_runs, site))
            output = forward(*args, **kwargs)
            if call is not None:
                call.held = self._all_held()
        return output

    def _above_body(self, forward: Any, *args: Any, **kwargs: Any) -> Any:
        if self._replayed is not None:
            return forward(*args, **kwargs)
        self._body_wrapped = _Wrapped((args, kwargs), self._all_held())
        with self._watch.inside(press=True), ExitStack() as self._after_body:
            return forward(*args, **kwargs)

    def _beneath_body(self, forward: Any, *args: Any, **kwargs: Any) -> Any:
        if self._replayed is not None:
            return forward(*args, **kwargs)
        call = self._body_wrapped
        with self._watch.inside(press=False):
            if call is not None:
                self._enters_body(call.given, (args, kwargs), call.held)
            output = forward(*args, **kwargs)
        if call is not None:
            self._after_body.enter_context(self._replaying())
        return output

    # What came of it

    def _enters_body(self, given: Any, now: Any, held: list[_Held]) -> None:
        """Tell what the press did before the decoder runs: to its tokens, and to what is cached."""
        self._index, who = min(self._layers), _BODY[self.mechanism]
        self._layers = {index: _Layer() for index in self._layers}
        n_given, n_left = (
            Arguments(args, kwargs, self._names).get("input_ids").shape[1]
            for args, kwargs in (given, now)
        )
        if n_left != n_given:
            event = f"{who} passes {n_left} of {count(n_given, 'token')} on"
            self.tell(self._index, event, press=True)
        for index in self._layers:
            self._changes(who, index, held)

    @contextmanager
    def _replaying(self) -> Iterator[None]:
        """Around what happens when all layers have run: the press may run them again."""
        held, self._replayed = self._all_held(), []
        with self._watch.inside(press=True):
            yield
        replayed, self._replayed = self._replayed, None
        who = _BODY[self.mechanism]
        if replayed:
            forwards = count(len(replayed), "forward")
            event = f"{who} runs the model again: {forwards} of {sum(replayed):,} tokens"
            self.tell(self._index, event, press=True)
        for index in self._layers:
            self._changes(who, index, held)

    def _enters(self, who: str, site: AttentionSite, given: Any, now: Any) -> None:
        """Tell what the press did before the attention module runs."""
        names = site.signature.parameters
        before, after = (
            Arguments(args, kwargs, names).get("attention_mask") for args, kwargs in (given, now)
        )
        mask = "leaves" if before is after else "replaces"
        self.tell(site.layer_idx, f"{who}{mask} the mask", press=True)

    def _conclude(self, who: str, index: int, held: list[_Held]) -> None:
        """Tell what the press did to the cache, which held `held` before."""
        if not self._changes(who, index, held):
            left = self._held(index)
            keys = f"{left} keys" if left.mean != 1 else "1 key"
            self.tell(index, f"{who} leaves {keys}", press=True, **self._known(index, held))
        for other in self._layers:
            before, after = held[other] if other < len(held) else _NOTHING, self._held(other)
            if other != index and after.lengths != before.lengths:
                event = f"{who}{ELSEWHERE}{index} changes {before} → {after}"
                self.tell(other, event, press=True, keys_kept=after.mean)

    def _changes(self, who: str, index: int, held: list[_Held]) -> bool:
        """Tell whether layer `index`, among `held` before, has lost keys or got others."""
        before, after = held[index] if index < len(held) else _NOTHING, self._held(index)
        if after.lengths != before.lengths:
            event = f"{who}{_PRUNES}{before} → {after}"
        elif after.storage != before.storage:
            event = f"{who} rewrites {after} keys"
        else:
            return False
        self.tell(index, event, press=True, **self._known(index, held))
        return True

    def _known(self, index: int, held: list[_Held]) -> dict[str, int]:
        """The numbers of an event that concludes what happens to layer `index`."""
        layer, after = self._layers[index], self._held(index)
        return {
            "hidden_states_length": layer.n_hidden,
            "keys_made": layer.n_made,
            "keys_kept": after.mean,
            "bytes_before": held[index].nbytes if index < len(held) else 0,
            "bytes_after": after.nbytes,
        }

    def _held(self, index: int) -> _Held:
        """What layer `index` of the cache holds."""
        if index >= len(self.cache.layers):
            return _NOTHING
        alone = Cache(layers=[self.cache.layers[index]])
        lengths = tuple(kept_lengths(alone)[0].flatten().tolist())
        if not lengths:
            return _NOTHING
        return _Held(lengths, alone.layers[0].keys.data_ptr(), cache_nbytes(alone))

    def _all_held(self) -> list[_Held]:
        return [self._held(index) for index in range(len(self.cache.layers))]


@dataclass
class _Wrapped:
    """A call of a forward that a press has wrapped.

    Attributes:
        given: its arguments, as the wrapper got them.
        held: what the cache held before it, and once what lies beneath has run.
    """

    given: tuple[Any, Any]
    held: list[_Held]


def _kinds(press: InstalledPress) -> Iterator[type[InstalledPress]]:
    """The class of a press, and of those that it wraps."""
    yield type(press)
    for value in vars(press).values():
        for item in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(item, InstalledPress):
                yield from _kinds(item)


def count(n: int, noun: str, nouns: str = "") -> str:
    return f"{n} {noun if n == 1 else nouns or noun + 's'}"
