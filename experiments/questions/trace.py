"""One forward told step by step, hook and patch side by side.

Nothing here is a script of what ought to happen. For the duration of a trace a copy of the press
(and of those that it wraps) reports when its hooks or its wrapper run, and the model reports when
hidden states enter an attention module and when its attention function runs; what the layers hold
is read off the cache around each of these. The order of the events is the order in which they
arrive.

Times are medians over a few runs and include some µs of recording: enough to see where time goes,
but no benchmark. For that see `experiments.questions.overhead`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from copy import copy
from dataclasses import dataclass, fields, replace
from functools import partial
from importlib import import_module
from itertools import zip_longest
from pathlib import Path
from statistics import median
from time import perf_counter_ns
from typing import Annotated, Any, NamedTuple

import pandas as pd
import torch
import typer
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch as Swatch
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor, nn
from transformers import Cache, DynamicCache, PreTrainedModel

from attention_patch.interception import OVERRIDE, with_override
from attention_patch.reversible import wrap
from experiments.framework.experiment import Experiment, Tables
from experiments.framework.plots import (
    GRID,
    MUTED,
    mechanism_colour,
    new_figure,
    press_label,
    style,
)
from experiments.framework.report import write_results
from experiments.loading import load_model, short_name
from experiments.testbed.compare import Inputs, PressPair
from experiments.testbed.families import FAMILIES, build, supported_implementations
from experiments.testbed.recipes import DELIMITER, press_name, suited_pair
from press_core import AttentionSite, Press, attention_sites, cache_nbytes, kept_lengths
from press_core.model.decoder import body_argument
from press_core.model.forward import AttentionForward
from press_core.presses.finch import Finch
from press_core.scope import Removable, Run

MODEL, PRESS, RATIO, LENGTH, DECODE = "facts-llama", "SnapKVPress", 0.5, 512, 1
"""What the study traces; the defaults of the command."""

RUNS = 5
"""How often a forward is repeated for the median of its times."""


_PRUNES, _ELSEWHERE = " prunes ", " of layer "
"""In the text of an event that prunes its layer; of one whose cause lies in another layer."""


# ---- recording ---------------------------------------------------------------------------------


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
        self.mechanism, self.cache, self.step = mechanism, cache, 0
        self.events: list[Event] = []
        self._sites = {id(site.module): site for site in attention_sites(model)}
        self._layers = {site.layer_idx: _Layer() for site in self._sites.values()}
        self._index = min(self._layers)  # of the layer that was entered last
        self._watch = _Stopwatch()
        self._intercepted = False
        self._replayed: list[int] | None = None  # tokens of forwards that the press itself makes

    def tell(self, layer: int, event: str, press: bool, **known: int) -> None:
        """Add an event, of the press or of the model."""
        with self._watch.inside(press=False):
            press_us = self._watch.take() if press else None
            self.events.append(
                Event(self.mechanism, self.step, layer, event, press_us=press_us, **known)
            )

    # The model ...

    def watch_entries(self) -> Iterator[Removable]:
        """Report what enters each attention module.

        To be called before the scope of the press opens: its hooks then come after.
        """
        for site in self._sites.values():
            enter = partial(self._hidden_states_enter, site)
            yield site.module.register_forward_pre_hook(enter, with_kwargs=True)

    def _hidden_states_enter(
        self, site: AttentionSite, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        n_hidden = AttentionForward(args, kwargs, site).argument("hidden_states").shape[1]
        if self._replayed is not None:
            if site.layer_idx == min(self._layers):
                self._replayed.append(n_hidden)
            return
        self._index = site.layer_idx
        self._layers[self._index] = _Layer(n_hidden, self._held(self._index).mean)
        event = f"{_count(n_hidden, 'hidden state')} {'enters' if n_hidden == 1 else 'enter'}"
        self.tell(self._index, event, press=False, hidden_states_length=n_hidden)

    def watch_attention(self) -> Iterator[Removable]:
        """Report when an attention function runs.

        To be called after the scope of the press has opened: what it intercepts is then seen from
        inside, where the function itself runs.
        """
        interfaces = {id(site.interface): site.interface for site in self._sites.values()}
        for interface in interfaces.values():
            yield wrap(interface, "get_interface", self._hand_out)
        # Over heads of different lengths another function attends. (Not `from attention_patch
        # import headwise`: that is the scope of the same name.)
        yield wrap(import_module("attention_patch.headwise"), "attend", self._attention_by_head)

    def _hand_out(self, get_interface: Any, *args: Any, **kwargs: Any) -> Any:
        return partial(self._attention_runs, get_interface(*args, **kwargs))

    def _attention_runs(
        self, function: Any, module: nn.Module, query: Tensor, key: Tensor, *rest: Any, **more: Any
    ) -> Any:
        site = self._sites.get(id(module))
        # Also layers that presses leave alone, and models in other threads, come here.
        if site is None or self._replayed is not None:
            return function(module, query, key, *rest, **more)
        made = key.shape[2] - self._layers[site.layer_idx].n_before
        over = _count(key.shape[2], "key")
        self._attends(site.layer_idx, query, made, f"attention runs over {over}")
        with self._watch.inside(press=False):
            return function(module, query, key, *rest, **more)

    def _attention_by_head(
        self,
        attend: Callable[..., Any],
        site: AttentionSite,
        layer: Any,
        backend: Any,
        function: Any,
        module: nn.Module,
        query: Tensor,
        *rest: Any,
        **more: Any,
    ) -> Any:
        if id(module) in self._sites and self._replayed is None:
            held = self._held(site.layer_idx)
            made = held.mean - self._layers[site.layer_idx].n_before
            event = f"attention runs head by head over {held} keys"
            self._attends(site.layer_idx, query, made, event)
        with self._watch.inside(press=False):
            return attend(site, layer, backend, function, module, query, *rest, **more)

    def _attends(self, index: int, query: Tensor, made: int, event: str) -> None:
        if self._intercepted:
            self._intercepted = False
            queries = _count(query.shape[2], "query", "queries")
            self.tell(index, f"attention function is intercepted: {queries} seen", press=True)
        self._layers[index].n_made = made
        self.tell(index, event, press=False, keys_made=made)

    # ... and the press

    def recorded(self, press: Press, model: nn.Module) -> Press:
        """A copy of `press` as it acts on `model`, which reports what it does."""
        return self._twin(press.resolve(model), "press")

    def _twin(self, press: Press, called: str) -> Press:
        twin, methods = copy(press), type(press)
        for name, value in vars(press).items():  # presses that it wraps
            vars(twin)[name] = self._twin_of_field(value)
        vars(twin)["resolve"] = lambda model: twin
        watchers: dict[str, Callable[..., Any]] = {
            "install": self._install,
            "score": partial(self._score, called),
            "with_ratio": partial(self._told_ratio, called),
            "attention_forward": self._wrapped_forward,
            "without_delimiter": self._without_delimiter,
            "after_body": self._after_body,
        }
        for name, watcher in watchers.items():
            if hasattr(methods, name):
                vars(twin)[name] = partial(watcher, partial(getattr(methods, name), twin))
        return twin

    def _twin_of_field(self, value: Any) -> Any:
        if isinstance(value, Press):
            return self._twin(value, press_label(type(value).__name__))
        if isinstance(value, (list, tuple)):
            return [self._twin_of_field(item) for item in value]
        return value

    def _told_ratio(self, called: str, with_ratio: Callable[[float], Press], ratio: float) -> Press:
        return self._twin(with_ratio(ratio), called)

    def _install(
        self, install: Callable[..., Iterator[Removable]], site: AttentionSite, run: Run
    ) -> Iterator[Removable]:
        for removable in install(site, run):
            if isinstance(removable, torch.utils.hooks.RemovableHandle):
                # The hook gets a recorder around it in its very place, and goes with its handle.
                hooks: Any = removable.hooks_dict_ref()
                watcher, name = self._watcher_of(site, hooks)
                hooks[removable.id] = partial(watcher, hooks[removable.id], site, name)
            yield removable

    def _watcher_of(self, site: AttentionSite, hooks: Any) -> tuple[Callable[..., Any], str]:
        """Who reports a hook in the dictionary `hooks`, and the name of the module it is on."""
        for name, module in site.module.named_modules():
            if hooks is module._forward_pre_hooks:
                return self._pre_hook, name
            if hooks is module._forward_hooks:
                return self._collecting_hook if name else self._forward_hook, name
        raise AssertionError(f"a hook outside of {site.name}")

    def _pre_hook(
        self,
        hook: Any,
        site: AttentionSite,
        _: str,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        held = self._all_held()
        with self._watch.inside(press=True):
            result = hook(module, args, kwargs)
        self._enters("pre-hook", "", site, held, (args, kwargs), result or (args, kwargs))
        return result

    def _enters(
        self, who: str, enters: str, site: AttentionSite, held: list[_Held], given: Any, now: Any
    ) -> None:
        """Tell what the press did before the attention module runs."""
        index, masks = (
            site.layer_idx,
            [AttentionForward(*a, site).argument("attention_mask") for a in (given, now)],
        )
        if self._changes(who, index, held):
            self._layers[index].n_before = self._held(index).mean
        mask = "leaves" if masks[0] is masks[1] else "replaces"
        self.tell(index, f"{who} {enters}{mask} the mask", press=True)

    def _collecting_hook(self, hook: Any, site: AttentionSite, name: str, *args: Any) -> Any:
        with self._watch.inside(press=True):
            result = hook(*args)
        queries = _count(self._layers[site.layer_idx].n_hidden, "query", "queries")
        self.tell(site.layer_idx, f"hook on {name} collects {queries}", press=True)
        return result

    def _forward_hook(self, hook: Any, site: AttentionSite, _: str, *args: Any) -> Any:
        held = self._all_held()
        with self._watch.inside(press=True):
            result = hook(*args)
        self._conclude("forward hook", site.layer_idx, held)
        return result

    def _score(self, called: str, score: Callable[..., Tensor], *args: Any) -> Tensor:
        scores = score(*args)
        self.tell(self._index, f"{called} scores {_count(scores.shape[-1], 'key')}", press=True)
        return scores

    def _wrapped_forward(
        self,
        attention_forward: Callable[..., Any],
        site: AttentionSite,
        run: Run,
        forward: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        held, given = self._all_held(), (args, kwargs)

        def beneath(*args: Any, **kwargs: Any) -> Any:
            nonlocal held
            with self._watch.inside(press=False):
                self._enters("wrapper", "enters, ", site, held, given, (args, kwargs))
                if OVERRIDE in kwargs:
                    kwargs = with_override(kwargs, self._intercept)
                output = forward(*args, **kwargs)
                held = self._all_held()
            return output

        with self._watch.inside(press=True):
            output = attention_forward(site, run, beneath, *args, **kwargs)
        self._conclude("wrapper", site.layer_idx, held)
        return output

    def _intercept(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        """Stands around the press' own override, which is told of once it has seen the query."""
        self._intercepted = True
        with self._watch.inside(press=True):
            return function(*args, **kwargs)

    def _without_delimiter(
        self, without_delimiter: Callable[..., Any], body: nn.Module, args: Any, kwargs: Any
    ) -> Any:
        n_given = body_argument(body, "input_ids", args, kwargs).shape[1]
        with self._watch.inside(press=True):
            result = without_delimiter(body, args, kwargs)
        n_left = body_argument(body, "input_ids", *result).shape[1]
        self._index = min(self._layers)
        event = f"{_BODY[self.mechanism]} passes {n_left} of {_count(n_given, 'token')} on"
        self.tell(self._index, event, press=True)
        return result

    def _after_body(self, after_body: Callable[..., Any], *args: Any) -> None:
        """Around what happens when all layers have run: the press may run them again."""
        if self._replayed is not None:
            return after_body(*args)
        held, self._replayed = self._all_held(), []
        with self._watch.inside(press=True):
            after_body(*args)
        replayed, self._replayed = self._replayed, None
        who = _BODY[self.mechanism]
        if replayed:
            forwards = _count(len(replayed), "forward")
            event = f"{who} runs the model again: {forwards} of {sum(replayed):,} tokens"
            self.tell(self._index, event, press=True)
        for index in self._layers:
            self._conclude(who, index, held, itself_only=True)
        return None

    def _conclude(self, who: str, index: int, held: list[_Held], itself_only: bool = False) -> None:
        """Tell what the press did to the cache, which held `held` before.

        Args:
            itself_only: not what it did to layers other than `index`.
        """
        if not self._changes(who, index, held):
            left = self._held(index)
            keys = f"{left} keys" if left.mean != 1 else "1 key"
            self.tell(index, f"{who} leaves {keys}", press=True, **self._known(index, held))
        for other in self._layers:
            before, after = held[other] if other < len(held) else _NOTHING, self._held(other)
            if other != index and not itself_only and after.lengths != before.lengths:
                event = f"{who}{_ELSEWHERE}{index} changes {before} → {after}"
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


def _count(n: int, noun: str, nouns: str = "") -> str:
    return f"{n} {noun if n == 1 else nouns or noun + 's'}"


def trace(
    model: PreTrainedModel, presses: PressPair, *, length: int, decode: int = 0, seed: int = 0
) -> list[Event]:
    """What happens in a prefill and some decode steps, first with hooks, then with patches.

    Nothing is left on the model.

    Args:
        model: any decoder that the presses fit.
        presses: the same press with both mechanisms.
        length: tokens of the prompt, drawn at random.
        decode: decode steps after the prefill, each with the likeliest token.
        seed: of the prompt.

    Raises:
        PressError: if a press does not fit the model.
    """
    vocabulary = model.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(seed)
    # Past the first ids, which most vocabularies give to special tokens.
    prompt = torch.randint(3, vocabulary, (1, length), generator=generator)
    if isinstance(presses.hook, Finch):
        prompt = Inputs(prompt).with_delimiter(DELIMITER, question=8).context
    runs: dict[str, list[list[Event]]] = {mechanism: [] for mechanism in presses._fields}
    for _ in range(RUNS):  # in turn, so that a busy moment of the machine meets both
        for mechanism, press in presses._asdict().items():
            runs[mechanism].append(
                _record(model, mechanism, press, prompt.to(model.device), decode)
            )
    return [event for own in runs.values() for event in map(_with_median_time, *own)]


def _with_median_time(*runs: Event) -> Event:
    """The same event of several runs as one, with the median of its times."""
    times = [run.press_us for run in runs if run.press_us is not None]
    return replace(runs[0], press_us=median(times)) if times else runs[0]


@torch.inference_mode()
def _record(
    model: PreTrainedModel, mechanism: str, press: Press, prompt: Tensor, decode: int
) -> list[Event]:
    cache, ids = DynamicCache(config=model.config), prompt
    recorder = Recorder(mechanism, model, cache)
    with ExitStack() as undo:
        for removable in recorder.watch_entries():
            undo.callback(removable.remove)
        undo.enter_context(recorder.recorded(press, model)(model))
        for removable in recorder.watch_attention():
            undo.callback(removable.remove)
        for recorder.step in range(decode + 1):
            logits = model(input_ids=ids, past_key_values=cache, use_cache=True).logits
            ids = logits[:, -1:].argmax(dim=-1)
    return recorder.events


def to_table(events: Sequence[Event], *, model: str, press: str, ratio: float) -> pd.DataFrame:
    """The events as a table: a row each, in order, with what they are events of."""
    table = pd.DataFrame([vars(event) for event in events])
    whole = [f.name for f in fields(Event) if f.type == "int | None"]
    table[whole] = table[whole].astype("Int64")
    table["press_us"] = table["press_us"].astype(float).round(1)
    return table.assign(model=model, press=press, ratio=ratio)


# ---- reading the table -------------------------------------------------------------------------

_MECHANISMS = {"hook": "hooks", "patch": "patches"}
_LENGTHS = ["hidden_states_length", "keys_made", "keys_kept"]
_BYTES = ["bytes_before", "bytes_after"]


def _prefill(trace: pd.DataFrame) -> pd.DataFrame:
    """The prefill as a row per mechanism and layer: what came in, was made, kept, and the time."""
    rows = trace[trace["step"] == 0].groupby(["mechanism", "layer"], sort=False)
    layers = rows[_LENGTHS + _BYTES].last().astype("Int64")
    return layers.join(rows["press_us"].sum()).reset_index()


def _of(mechanism: str, rows: pd.DataFrame) -> pd.DataFrame:
    return rows[rows["mechanism"] == mechanism].reset_index(drop=True)


def _both(values: Any, text: Callable[[Any], str] = "{:,}".format) -> str:
    """What hook and patch have in common, or both where they differ."""
    return " / ".join(dict.fromkeys(map(text, values)))


def _kib(nbytes: int) -> str:
    return f"{nbytes / 1024:,.1f}"


def _spread(values: Any) -> str:
    low, high = values.min(), values.max()
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _layer_rows(trace: pd.DataFrame) -> Iterator[list[str]]:
    """Per layer what `_HEADER` says of the prefill."""
    for layer, rows in _prefill(trace).groupby("layer"):
        yield [
            str(layer),
            *(_both(rows[column]) for column in _LENGTHS),
            *(_both(rows[column], _kib) for column in _BYTES),
            *(f"{_of(mechanism, rows)['press_us'].sum():,.0f}" for mechanism in _MECHANISMS),
        ]


class _Line(NamedTuple):
    """An event to show, and µs in the press; NaN for what the model does."""

    event: str
    us: float


def _side_by_side(events: pd.DataFrame) -> Iterator[tuple[_Line | None, _Line | None]]:
    """The events of hook and patch line by line; what the model does stands on one line."""
    none: list[_Line] = []
    hook, patch = (_groups(_of(mechanism, events)) for mechanism in _MECHANISMS)
    for left, right in zip_longest(hook, patch, fillvalue=none):
        yield from zip_longest(left, right)


def _groups(events: pd.DataFrame) -> list[list[_Line]]:
    """The events of one mechanism, in groups that begin where the model does something."""
    groups: list[list[_Line]] = []
    for line in map(_Line, events["event"], events["press_us"]):
        if pd.isna(line.us) or not groups:
            groups.append([])
        groups[-1].append(line)
    return groups


_HEADER = ["layer", "hidden states in", "keys made", "keys kept", "KiB before", "KiB after"]
_HEADER += [f"µs in the press, {name}" for name in _MECHANISMS.values()]


def summary(tables: Tables) -> str:
    """What was seen, as Markdown."""
    trace = tables["trace"]
    lines = [_sentence(trace), "", f"| {' | '.join(_HEADER)} |", "|" + "--:|" * len(_HEADER)]
    lines += [f"| {' | '.join(row)} |" for row in _layer_rows(trace)]
    layer = trace["layer"].iloc[0]
    lines += ["", f"What happened in layer {layer} during the prefill, in this order:", ""]
    first = trace[(trace["step"] == 0) & (trace["layer"] == layer)]
    lines += [f"| {' | '.join(_MECHANISMS.values())} |", "|---|---|"]
    for row in _side_by_side(first):
        lines.append("| " + " | ".join(line.event if line else "" for line in row) + " |")
    return "\n".join(lines)


def _sentence(trace: pd.DataFrame) -> str:
    first, layers = trace.iloc[0], _prefill(trace)
    hook, patch = (_of(mechanism, layers)[_LENGTHS + _BYTES] for mechanism in _MECHANISMS)
    whose = "With both mechanisms" if hook.equals(patch) else "Hook and patch differ, but"
    entered, made, kept = (_spread(layers[column]) for column in _LENGTHS)
    elsewhere = int(trace["event"].str.contains(_ELSEWHERE).sum())
    own = f"{_count(elsewhere, 'time')} a press changed" if elsewhere else "no press ever changed"
    return (
        f"{whose} every layer receives {entered} hidden states, makes {made} keys per head, and "
        f"keeps {kept} of them when its own press has acted; {own} the cache of another layer "
        f"({press_label(first['press'])} at ratio {first['ratio']:g}, "
        f"{_count(layers['layer'].nunique(), 'layer')} of `{first['model']}`)."
    )


_LEGEND = [(GRID, "hidden states that enter"), ("#b9b9b9", "keys made"), ("#555555", "keys kept")]


def figures(tables: Tables) -> dict[str, Figure]:
    """What enters, is made and stays in each layer: `trace`, a panel per mechanism."""
    layers = _prefill(tables["trace"])
    names = [f"layer {layer}" for layer in layers["layer"].unique()]
    height = 1.4 + min(0.6 * len(names), 10)
    figure, axes = new_figure(columns=2, width=9.0, height=height, sharex=True, sharey=True)
    with style():
        for panel, (mechanism, name) in zip(axes, _MECHANISMS.items(), strict=True):
            panel.set_title(name)
            panel.set_xlabel("tokens")
            panel.set_xlim(0, 1.3 * float(layers[_LENGTHS].max().max()))
            _draw_layers(panel, _of(mechanism, layers), mechanism_colour(mechanism))
        axes[0].set_yticks(range(len(names)), names)
        axes[0].invert_yaxis()  # the forward runs from the top to the bottom
        handles = [Swatch(color=colour, label=label) for colour, label in _LEGEND]
        figure.legend(handles=handles, loc="outside lower center", ncols=3)
    figure.set_label(
        "Hidden states that enter each layer, keys that it makes, and keys that are kept once its "
        "press has acted, during the prefill, with hooks (left) and with patches (right)"
    )
    return {"trace": figure}


def _draw_layers(panel: Axes, rows: pd.DataFrame, colour: str) -> None:
    """Three bars per layer, one below the other, with their numbers and the time in the press."""
    pale = tuple(1 - 0.35 * (1 - channel) for channel in to_rgb(colour))
    looks = zip((-0.26, 0.0, 0.26), _LENGTHS, (GRID, pale, colour), strict=True)
    for offset, column, face in looks:
        places = [place + offset for place in range(len(rows))]
        bars = panel.barh(places, rows[column].astype(float), 0.24, color=face)
        panel.bar_label(bars, fmt="{:,.0f}", padding=3, fontsize=7.5)
    for place, us in enumerate(rows["press_us"]):
        at, text = (panel.get_xlim()[1], place + 0.26), f"{us:,.0f} µs in the press"
        panel.text(*at, text, ha="right", va="center", fontsize=7.5, color=MUTED)
    panel.grid(axis="y", visible=False)


# ---- command -----------------------------------------------------------------------------------


def show(trace: pd.DataFrame, console: Console) -> None:
    """Print every step of a trace, and what it comes to."""
    first = trace.iloc[0]
    for step in sorted(trace["step"].unique()):
        title = f"{_step_name(step)}: {press_label(first['press'])} at ratio {first['ratio']:g}"
        console.print(_step_table(trace[trace["step"] == step], title))
        console.print()
    console.print(_layer_table(trace))
    console.print(_sentence(trace).replace("`", ""), markup=False)


def _step_name(step: int) -> str:
    return f"decode step {step}" if step else "prefill"


def _step_table(events: pd.DataFrame, title: str) -> Table:
    table = Table(title=title, title_justify="left", caption_justify="left", padding=(0, 1))
    table.add_column("layer", justify="right")
    for name in _MECHANISMS.values():
        table.add_column(name, ratio=1)
        table.add_column("µs", justify="right", no_wrap=True)
    for layer, own in events.groupby("layer"):
        for number, (hook, patch) in enumerate(_side_by_side(own)):
            table.add_row("" if number else str(layer), *_cells(hook), *_cells(patch))
        table.add_section()
    return table


def _cells(line: _Line | None) -> tuple[Text, str]:
    if line is None:
        return Text(), ""
    of_model = pd.isna(line.us)
    look = "dim" if of_model else "bold green" if _PRUNES in line.event else ""
    return Text(line.event, style=look), "" if of_model else f"{line.us:,.0f}"


def _layer_table(trace: pd.DataFrame) -> Table:
    table = Table(title="the prefill in numbers", title_justify="left")
    for column in _HEADER:
        table.add_column(column, justify="right")
    for row in _layer_rows(trace):
        table.add_row(*row)
    return table


def run() -> Tables:
    """The study: SnapKV on the shipped model, a prefill and one decode step."""
    return {"trace": _trace(MODEL, PRESS, RATIO, LENGTH, DECODE)}


def _trace(model: str, press: str, ratio: float, length: int, decode: int) -> pd.DataFrame:
    name, loaded = press_name(press), _model(model)
    presses = suited_pair(name, ratio, length, loaded)
    events = trace(loaded, presses, length=length, decode=decode)
    return to_table(events, model=short_name(model), press=name, ratio=ratio)


def _model(name: str) -> PreTrainedModel:
    if name not in FAMILIES:
        return load_model(name)[0]
    implementations = supported_implementations(name)
    return build(name, attn_implementation="sdpa" if "sdpa" in implementations else "eager")


EXPERIMENT = Experiment(
    name="trace",
    title="One forward, step by step",
    question="In one forward, when does each mechanism act, and on what?",
    run=run,
    figures=figures,
    summary=summary,
    repeat="python -m experiments trace",
)


def command(
    model: Annotated[
        str,
        typer.Option(
            help="Shipped model, folder or hub id; or a family such as llama or gpt_neox, for a "
            "small model with random weights."
        ),
    ] = MODEL,
    press: Annotated[str, typer.Option(help="Press to trace, such as SnapKVPress.")] = PRESS,
    ratio: Annotated[float, typer.Option(help="Share of the tokens to evict, in [0, 1).")] = RATIO,
    length: Annotated[int, typer.Option(min=1, help="Tokens of the prompt.")] = LENGTH,
    decode: Annotated[int, typer.Option(min=0, help="Decode steps after the prefill.")] = DECODE,
    output: Annotated[
        Path | None, typer.Option(help="Folder to write the table and the figure to.")
    ] = None,
) -> None:
    """Follow one forward step by step, hook and patch side by side.

    Every line is something that happened, in this order: what the model does is dim, what the
    press does has its time beside it. Times include a few µs of recording.
    """
    tables = {"trace": _trace(model, press, ratio, length, decode)}
    show(tables["trace"], Console())
    if output is not None:
        write_results(tables, figures(tables), output)
