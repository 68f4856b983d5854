"""One forward told step by step, hook and patch side by side.

Nothing here is a script of what ought to happen: see `experiments.questions.trace.recorder`. Times
are medians over a few runs and include some µs of recording: enough to see where time goes, but no
benchmark.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import groupby, zip_longest
from statistics import median
from typing import Annotated, Any

import pandas as pd
import torch
import typer
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch as Swatch
from rich.progress import Progress
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from experiments.framework.evidence import Evidence
from experiments.framework.experiment import Experiment, Finding, Tables
from experiments.framework.options import Device, Dtype
from experiments.framework.own_model import OwnModel, Planned
from experiments.framework.plots import (
    GRID,
    MUTED,
    mechanism_colour,
    new_figure,
    press_label,
    style,
)
from experiments.framework.tables import ResultTable
from experiments.loading import load_model, short_name
from experiments.questions.trace.recorder import ELSEWHERE, Event, Recorder, count
from experiments.testbed.compare import Inputs, PressPair
from experiments.testbed.families import FAMILIES, build, supported_implementations
from experiments.testbed.recipes import DELIMITER, press_name, suited_pair
from press_core.presses.finch import Finch
from press_core.scope import InstalledPress

RUNS = 5
"""How often a forward is repeated for the median of its times."""


@dataclass(frozen=True)
class Options:
    """What is traced."""

    model: Annotated[
        str,
        typer.Option(
            help="Shipped model, folder or hub id; or a family such as llama or gpt_neox, for a "
            "small model with random weights."
        ),
    ] = "facts-llama"
    press: Annotated[str, typer.Option(help="Press to trace, such as SnapKVPress.")] = "SnapKVPress"
    ratio: Annotated[float, typer.Option(help="Share of the tokens to evict, in [0, 1).")] = 0.5
    length: Annotated[int, typer.Option(min=1, help="Tokens of the prompt.")] = 512
    decode: Annotated[int, typer.Option(min=0, help="Decode steps after the prefill.")] = 1
    dtype: Dtype = "float32"
    device: Device = "cpu"


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
    model: PreTrainedModel, mechanism: str, press: InstalledPress, prompt: Tensor, decode: int
) -> list[Event]:
    cache, ids = DynamicCache(config=model.config), prompt
    recorder = Recorder(mechanism, model, cache)
    with recorder.recorded(press):
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


_HEADER = ["layer", "hidden states in", "keys made", "keys kept", "KiB before", "KiB after"]
_HEADER += [f"µs in the press, {name}" for name in _MECHANISMS.values()]


def _layer_table(trace: pd.DataFrame) -> ResultTable:
    """The prefill in numbers, by layer."""
    lines = []
    for layer, rows in _prefill(trace).groupby("layer"):
        lines.append(
            [
                str(layer),
                *(_both(rows[column]) for column in _LENGTHS),
                *(_both(rows[column], _kib) for column in _BYTES),
                *(f"{_of(mechanism, rows)['press_us'].sum():,.0f}" for mechanism in _MECHANISMS),
            ]
        )
    return ResultTable(_sentence(trace), _HEADER, lines, left=0)


_Line = tuple[str, float]
"""An event, and µs in the press; NaN for what the model does."""


def _event_table(trace: pd.DataFrame) -> ResultTable:
    """What happened in each step, hook and patch side by side; like layers are told once."""
    first = trace.iloc[0]
    sides = [(place, list(_side_by_side(own))) for place, own in trace.groupby(["step", "layer"])]
    lines = []
    for _, alike in groupby(sides, lambda side: (side[0][0], [_texts(row) for row in side[1]])):
        places, rows = zip(*alike, strict=True)
        name = _place(places[0][0], [layer for _, layer in places])
        for number, same in enumerate(zip(*rows, strict=True)):
            hook, patch = (_cells([row[side] for row in same]) for side in (0, 1))
            lines.append(["" if number else name, *hook, *patch])
    head = ["", "hooks", "µs", "patches", "µs"]
    note = (
        f"What happened, in this order: {press_label(first['press'])} at ratio {first['ratio']:g}. "
        "What has no time beside it the model does; times are means over the layers."
    )
    return ResultTable(note, head, lines, left=None)


def _side_by_side(events: pd.DataFrame) -> Iterator[tuple[_Line | None, _Line | None]]:
    """The events of hook and patch line by line; what the model does stands on one line."""
    none: list[_Line] = []
    hook, patch = (_groups(_of(mechanism, events)) for mechanism in _MECHANISMS)
    for left, right in zip_longest(hook, patch, fillvalue=none):
        yield from zip_longest(left, right)


def _groups(events: pd.DataFrame) -> list[list[_Line]]:
    """The events of one mechanism, in groups that begin where the model does something."""
    groups: list[list[_Line]] = []
    for event, us in zip(events["event"], events["press_us"], strict=True):
        if pd.isna(us) or not groups:
            groups.append([])
        groups[-1].append((event, us))
    return groups


def _texts(row: tuple[_Line | None, _Line | None]) -> tuple[str, ...]:
    return tuple(line[0] if line else "" for line in row)


def _place(step: int, layers: list[int]) -> str:
    where = f"layer {layers[0]}"
    if len(layers) > 1:
        where = f"layers {layers[0]} to {layers[-1]}"
    return f"{f'decode step {step}' if step else 'prefill'}, {where}"


def _cells(lines: list[_Line | None]) -> tuple[str, str]:
    """An event of several layers, and the mean of its times."""
    told = [line for line in lines if line is not None]
    if not told:
        return "", ""
    us = sum(line[1] for line in told) / len(told)
    return told[0][0], "" if pd.isna(us) else f"{us:,.0f}"


def _sentence(trace: pd.DataFrame) -> str:
    first, layers = trace.iloc[0], _prefill(trace)
    hook, patch = (_of(mechanism, layers)[_LENGTHS + _BYTES] for mechanism in _MECHANISMS)
    whose = "With both mechanisms" if hook.equals(patch) else "Hook and patch differ, but"
    entered, made, kept = (_spread(layers[column]) for column in _LENGTHS)
    elsewhere = int(trace["event"].str.contains(ELSEWHERE).sum())
    own = f"{count(elsewhere, 'time')} a press changed" if elsewhere else "no press ever changed"
    return (
        f"{whose} every layer receives {entered} hidden states, makes {made} keys per head, and "
        f"keeps {kept} of them when its own press has acted; {own} the cache of another layer "
        f"({press_label(first['press'])} at ratio {first['ratio']:g}, "
        f"{count(layers['layer'].nunique(), 'layer')} of `{first['model']}`)."
    )


_LEGEND = [(GRID, "hidden states that enter"), ("#b9b9b9", "keys made"), ("#555555", "keys kept")]


def _figure(trace: pd.DataFrame) -> Figure:
    """What enters, is made and stays in each layer, a panel per mechanism."""
    layers = _prefill(trace)
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
    return figure


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


def _model(name: str, dtype: str, device: str) -> PreTrainedModel:
    if name not in FAMILIES:
        return load_model(name, dtype=dtype, device=device)[0]
    implementations = supported_implementations(name)
    model = build(name, attn_implementation="sdpa" if "sdpa" in implementations else "eager")
    return model.to(torch.device(device), getattr(torch, dtype))


class Trace(Experiment[Options]):
    """Follow one forward step by step, hook and patch side by side.

    What the model does has no time beside it, what the press does has. Times include a few µs of
    recording.
    """

    name = "trace"
    title = "One forward, step by step"
    question = "In one forward, when does each mechanism act, and on what?"
    method = (
        "Hooks and wrappers of an open press are watched in place, and the cache is read before "
        "and after each of them. Events are listed in the order in which they arrived. Times are "
        "medians over five runs and include a few microseconds of recording. Another press acts "
        "at other moments: `--press` traces any of them."
    )
    evidence = Evidence.EVENTS
    full = quick = Options()

    def on(self, own: OwnModel) -> Planned[Options]:
        (press,), (length,) = own.opened((Options.press,)), own.at_most(Options.length)
        options = self.quick_on(own, press=press, length=length)
        return Planned(options, 2 * RUNS * length, 2 * RUNS * options.decode, seconds=1)

    def measure(self, options: Options, progress: Progress) -> Tables:
        name, model = (
            press_name(options.press),
            _model(options.model, options.dtype, options.device),
        )
        presses = suited_pair(name, options.ratio, options.length, model)
        events = trace(model, presses, length=options.length, decode=options.decode)
        called = short_name(options.model)
        return {"trace": to_table(events, model=called, press=name, ratio=options.ratio)}

    def findings(self, tables: Tables) -> list[Finding]:
        trace = tables["trace"]
        elsewhere = int(trace["event"].str.contains(ELSEWHERE).sum())
        if elsewhere:
            text = (
                f"**{elsewhere}** events changed the cache of another layer than the press's own."
            )
            return [Finding("layers", text)]
        hook, patch = (_of(mechanism, _prefill(trace)) for mechanism in _MECHANISMS)
        same = hook[_LENGTHS].equals(patch[_LENGTHS])
        text = (
            f"Of {hook['keys_made'].mean():,.0f} keys per head a layer keeps "
            f"**{hook['keys_kept'].mean():,.0f}** once its own hook has run; a patch keeps "
            f"{'as many' if same else 'others'}, at the same moment."
        )
        return [Finding("layers", text)]

    def views(self, tables: Tables) -> list[ResultTable]:
        return [_event_table(tables["trace"]), _layer_table(tables["trace"])]

    def figures(self, tables: Tables) -> dict[str, Figure]:
        return {"trace": _figure(tables["trace"])}


EXPERIMENT = Trace()
