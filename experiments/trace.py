"""One forward told step by step, hook and patch side by side.

Nothing here is a script of what ought to happen. For the duration of a trace a copy of the press
reports when its hooks or its wrapper run, and the model reports when hidden states enter an
attention module and when its attention function runs; what the layers hold is read off the cache
around each of these. The order of the events is the order in which they arrive.

Times are medians over a few runs and include some µs of recording: enough to see where time goes,
but no benchmark. For that see `experiments.overhead`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from copy import copy
from dataclasses import dataclass, fields, replace
from functools import partial
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

import hooks_impl
from attention_patch.interception import OVERRIDE, with_override
from attention_patch.reversible import wrap
from experiments import UserError
from experiments.compare import PressPair, pair
from experiments.experiment import Experiment, Tables
from experiments.families import FAMILIES, build, supported_implementations
from experiments.loading import load_model, short_name
from experiments.plots import GRID, MUTED, mechanism_colour, new_figure, press_label, save, style
from press_core import AttentionSite, Press, attention_sites, cache_nbytes, kept_lengths
from press_core.scope import Removable

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
        keys_kept: keys per head that the layer's cache holds after the press.
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
        self._index = 0  # of the layer that was entered last
        self._watch = _Stopwatch()
        self._intercepted = False

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
        self._index, slots = site.layer_idx, self._slots()
        n_hidden = site.argument("hidden_states", args, kwargs).shape[1]
        n_before = slots[self._index] if self._index < len(slots) else 0
        self._layers[self._index] = _Layer(n_hidden, n_before)
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

    def _hand_out(self, get_interface: Any, *args: Any, **kwargs: Any) -> Any:
        return partial(self._attention_runs, get_interface(*args, **kwargs))

    def _attention_runs(
        self, function: Any, module: nn.Module, query: Tensor, key: Tensor, *rest: Any, **more: Any
    ) -> Any:
        site = self._sites.get(id(module))
        if site is None:  # a layer that presses leave alone, or a model in another thread
            return function(module, query, key, *rest, **more)
        index, layer = site.layer_idx, self._layers[site.layer_idx]
        if self._intercepted:
            self._intercepted = False
            queries = _count(query.shape[2], "query", "queries")
            self.tell(index, f"attention function is intercepted: {queries} seen", press=True)
        layer.n_made = key.shape[2] - layer.n_before
        event = f"attention runs over {_count(key.shape[2], 'key')}"
        self.tell(index, event, press=False, keys_made=layer.n_made)
        with self._watch.inside(press=False):
            return function(module, query, key, *rest, **more)

    # ... and the press

    def recorded(self, press: Press) -> Press:
        """A copy of `press` that reports what it does; `press` itself is not changed."""
        twin, methods = copy(press), type(press)
        watchers: dict[str, Callable[..., Any]] = {
            "install": self._install,
            "score": self._score,
            "attention_forward": self._wrapped_forward,
        }
        for name, watcher in watchers.items():
            if hasattr(methods, name):
                vars(twin)[name] = partial(watcher, partial(getattr(methods, name), twin))
        return twin

    def _install(
        self, install: Callable[..., Iterator[Removable]], site: AttentionSite
    ) -> Iterator[Removable]:
        for removable in install(site):
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

    def _pre_hook(self, hook: Any, site: AttentionSite, _: str, *args: Any) -> Any:
        with self._watch.inside(press=True):
            result = hook(*args)
        mask = "leaves" if result is None else "replaces"
        self.tell(site.layer_idx, f"pre-hook {mask} the mask", press=True)
        return result

    def _collecting_hook(self, hook: Any, site: AttentionSite, name: str, *args: Any) -> Any:
        with self._watch.inside(press=True):
            result = hook(*args)
        queries = _count(self._layers[site.layer_idx].n_hidden, "query", "queries")
        self.tell(site.layer_idx, f"hook on {name} collects {queries}", press=True)
        return result

    def _forward_hook(self, hook: Any, site: AttentionSite, _: str, *args: Any) -> Any:
        slots, nbytes = self._slots(), self._nbytes(site.layer_idx)
        with self._watch.inside(press=True):
            result = hook(*args)
        self._conclude("forward hook", site.layer_idx, slots, nbytes)
        return result

    def _score(self, score: Callable[..., Tensor], *args: Any) -> Tensor:
        scores = score(*args)
        self.tell(self._index, f"press scores {_count(scores.shape[-1], 'key')}", press=True)
        return scores

    def _wrapped_forward(
        self,
        attention_forward: Callable[..., Any],
        site: AttentionSite,
        forward: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        slots: list[int] = []
        nbytes, given = 0, (args, kwargs)

        def beneath(*args: Any, **kwargs: Any) -> Any:
            nonlocal slots, nbytes
            with self._watch.inside(press=False):
                before, now = (site.argument("attention_mask", *a) for a in (given, (args, kwargs)))
                mask = "leaves" if now is before else "replaces"
                self.tell(site.layer_idx, f"wrapper enters, {mask} the mask", press=True)
                if OVERRIDE in kwargs:
                    kwargs = with_override(kwargs, self._intercept)
                output = forward(*args, **kwargs)
                slots, nbytes = self._slots(), self._nbytes(site.layer_idx)
            return output

        with self._watch.inside(press=True):
            output = attention_forward(site, beneath, *args, **kwargs)
        self._conclude("wrapper", site.layer_idx, slots, nbytes)
        return output

    def _intercept(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        """Stands around the press' own override, which is told of once it has seen the query."""
        self._intercepted = True
        with self._watch.inside(press=True):
            return function(*args, **kwargs)

    def _conclude(self, who: str, index: int, slots: list[int], nbytes: int) -> None:
        """Tell what the press did to the cache since it had `slots` and the layer `nbytes`."""
        after, layer = self._slots(), self._layers[index]
        known = {
            "hidden_states_length": layer.n_hidden,
            "keys_made": layer.n_made,
            "keys_kept": after[index],
            "bytes_before": nbytes,
            "bytes_after": self._nbytes(index),
        }
        if after[index] == slots[index]:
            event = f"{who} leaves {_count(after[index], 'key')}"
        else:
            event = f"{who}{_PRUNES}{slots[index]} → {after[index]}"
        self.tell(index, event, press=True, **known)
        for other in range(len(after)):
            if other != index and after[other] != slots[other]:
                event = f"{who}{_ELSEWHERE}{index} changes {slots[other]} → {after[other]}"
                self.tell(other, event, press=True, keys_kept=after[other])

    def _slots(self) -> list[int]:
        """Keys per head that each layer of the cache holds."""
        return [int(n.max()) if n.numel() else 0 for n in kept_lengths(self.cache)]

    def _nbytes(self, index: int) -> int:
        return cache_nbytes(Cache(layers=[self.cache.layers[index]]))


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
    prompt = torch.randint(3, vocabulary, (1, length), generator=generator).to(model.device)
    runs: dict[str, list[list[Event]]] = {mechanism: [] for mechanism in presses._fields}
    for _ in range(RUNS):  # in turn, so that a busy moment of the machine meets both
        for mechanism, press in presses._asdict().items():
            runs[mechanism].append(_record(model, mechanism, press, prompt, decode))
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
        undo.enter_context(recorder.recorded(press)(model))
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
    name = _press_name(press)
    try:
        presses = pair(name, compression_ratio=ratio)
    except TypeError as error:
        raise UserError(f"{name} cannot be made from a ratio alone: {error}") from error
    events = trace(_model(model), presses, length=length, decode=decode)
    return to_table(events, model=short_name(model), press=name, ratio=ratio)


def _press_name(press: str) -> str:
    """The registered name of a press, given with or without "Press", in any case."""
    for name in hooks_impl.PRESSES:
        if press.lower() in (name.lower(), press_label(name).lower()):
            return name
    known = ", ".join(map(press_label, hooks_impl.PRESSES))
    raise UserError(f"there is no press {press!r}; there are {known}")


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
        output.mkdir(parents=True, exist_ok=True)
        tables["trace"].to_csv(output / "trace.csv", index=False)
        save(figures(tables)["trace"], output / "trace.png")
