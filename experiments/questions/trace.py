"""One forward told step by step, hook and patch side by side.

Nothing is wrapped or hooked to find out: Python's profiler reports the calls of attention modules,
of attention functions, of what a mechanism has put there and on the decoder, and of presses that
score. Around each of them, what the cache holds is read.
"""

from __future__ import annotations

import inspect
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import groupby, zip_longest
from types import CodeType, FrameType
from typing import Annotated, Any

import pandas as pd
import torch
import typer
from rich.progress import Progress
from transformers import DynamicCache, PreTrainedModel

import attention_patch.scope
import hooks_impl.mechanism
import patch_impl.mechanism
from experiments.framework import shared
from experiments.framework.experiment import Evidence, Experiment, Finding, Tables
from experiments.framework.options import Device, Dtype
from experiments.framework.own_model import OwnModel, Planned
from experiments.framework.plots import press_label
from experiments.framework.tables import ResultTable
from experiments.loading import load_model, short_name
from experiments.testbed.compare import Inputs, PressPair
from experiments.testbed.families import FAMILIES, build, supported_implementations
from experiments.testbed.recipes import DELIMITER, press_name, suited_pair
from press_core import AttentionSite, attention_sites, kept_lengths
from press_core.presses.finch import Finch
from press_core.scoring import TokenScorer

_MECHANISMS = {
    "hook": (hooks_impl.mechanism,),
    "patch": (patch_impl.mechanism, attention_patch.scope),
}
_CALLED = {
    ("hook", "_before"): "pre-hook",
    ("hook", "_collect"): "hook on the query projection",
    ("hook", "_attention"): "forward hook",
    ("hook", "_enter"): "pre-hook of the decoder",
    ("hook", "_leave"): "hook of the decoder",
    ("patch", "_attention"): "wrapper",
    ("patch", "see_query"): "interception of the attention function",
    ("patch", "around_decoder"): "wrapper of the decoder",
}
"""What events call the functions of these files."""
_ATTENDED = "attention has run over"


@dataclass(frozen=True)
class Options:
    """What is traced."""

    model: shared.Model = "facts-llama"
    press: Annotated[str, typer.Option(help="Press to trace, such as SnapKVPress.")] = "SnapKVPress"
    ratio: Annotated[float, typer.Option(help="Share of the tokens to evict, in [0, 1).")] = 0.5
    length: Annotated[int, typer.Option(min=1, help="Tokens of the prompt.")] = 512
    decode: Annotated[int, typer.Option(min=0, help="Decode steps after the prefill.")] = 1
    dtype: Dtype = "float32"
    device: Device = "cpu"


# ---- recording -----------------------------------------------------------------------------------


Held = dict[int, list[int]]
"""By layer, how many keys each row and head holds."""


def _told(held: list[int]) -> str:
    low, high = min(held, default=0), max(held, default=0)
    return f"{low}" if low == high else f"{low} to {high}"


class Recorder:
    """Writes down what happens in the attention layers of a model, with one mechanism.

    Attributes:
        events: so far, in the order in which they arrived.
        step: of the forward that comes next, 0 for the prefill.
    """

    def __init__(self, mechanism: str, model: PreTrainedModel, cache: DynamicCache) -> None:
        self.mechanism, self.cache, self.step = mechanism, cache, 0
        self.events: list[dict[str, Any]] = []
        self._sites = {id(site.module): site for site in attention_sites(model)}
        modules = [site.module for site in self._sites.values()]
        self._forwards = {inspect.unwrap(type(module).forward).__code__ for module in modules}
        self._files = {module.__file__ for module in _MECHANISMS[mechanism]}
        self._held: Held = {}  # at the last event
        self._open: list[FrameType] = []  # calls of the mechanism

    def see(self, frame: FrameType, what: str, result: Any) -> None:
        """A profile function (`sys.setprofile`) that writes down what this thread does."""
        code, begins, ends = frame.f_code, what == "call", what == "return"
        site = self._sites.get(id(frame.f_locals["self"])) if code in self._forwards else None
        if site is not None and begins:
            n = frame.f_locals["hidden_states"].shape[1]
            enter = "hidden states enter" if n > 1 else "hidden state enters"
            self._tell(site.layer_idx, f"{n} {enter}")
        elif site is not None and ends and result is not None:
            held = _told(self._holds()[site.layer_idx])
            self._tell(site.layer_idx, f"{_ATTENDED} {held} keys")
        elif ends and code is TokenScorer.checked_scores.__code__ and result is not None:
            press, layer = frame.f_locals["self"], frame.f_locals["call"].site.layer_idx
            self._tell(layer, f"{press_label(type(press).__name__)} scores {result.shape[-1]} keys")
        elif begins and code.co_filename in self._files and self._name(code):
            self._calls(frame)
        elif ends and self._open and self._open[-1] is frame:
            self._returns(self._name(code))

    def _tell(self, layer: int, event: str) -> None:
        self._held = self._holds()
        held = self._held.get(layer) or [0]
        told = {"mechanism": self.mechanism, "step": self.step, "layer": layer}
        self.events.append({**told, "event": event, "keys": round(sum(held) / len(held))})

    def _calls(self, frame: FrameType) -> None:
        """Torch calls a hook, or the model a wrapper: of a layer or of the decoder."""
        self._open.append(frame)
        for site in (self._sites.get(id(value), value) for value in frame.f_locals.values()):
            if isinstance(site, AttentionSite):
                self._tell(site.layer_idx, self._name(frame.f_code))
                break

    def _returns(self, name: str) -> None:
        """What was called has ended: tell what it did to the layers."""
        self._open.pop()
        before = self._held
        for layer, held in self._holds().items():
            if held != before.get(layer, held):
                self._tell(layer, f"{name} prunes {_told(before[layer])} → {_told(held)}")

    def _name(self, code: CodeType) -> str:
        return _CALLED.get((self.mechanism, code.co_name), "")

    def _holds(self) -> Held:
        own = {site.layer_idx for site in self._sites.values()}
        lengths = enumerate(kept_lengths(self.cache))
        return {layer: of.flatten().tolist() for layer, of in lengths if layer in own}


def trace(
    model: PreTrainedModel, presses: PressPair, *, length: int, decode: int = 0, seed: int = 0
) -> pd.DataFrame:
    """What happens in a prefill and some decode steps, first with hooks, then with patches.

    Nothing is left on the model.

    Args:
        model: any decoder that the presses fit.
        presses: the same press with both mechanisms.
        length: tokens of the prompt, drawn at random.
        decode: decode steps after the prefill, each with the likeliest token.
        seed: of the prompt.

    Returns:
        A row per event, in order: the `mechanism`, "hook" or "patch"; the `step`, 0 for the
        prefill; the `layer`; the `event`, in words; and how many `keys` per head the cache of the
        layer then holds, the mean where heads differ.

    Raises:
        PressError: if a press does not fit the model.
    """
    vocabulary = model.config.get_text_config().vocab_size
    inputs, events = Inputs.random(vocabulary, [length], seed=seed), []
    if isinstance(presses.hook, Finch):
        inputs = inputs.with_delimiter(DELIMITER, question=8)
    for mechanism, press in presses._asdict().items():
        cache, ids = DynamicCache(config=model.config), inputs.context.to(model.device)
        recorder = Recorder(mechanism, model, cache)
        with torch.inference_mode(), press(model), ExitStack() as stack:
            stack.callback(sys.setprofile, sys.getprofile())
            sys.setprofile(recorder.see)
            for recorder.step in range(decode + 1):
                logits = model(input_ids=ids, past_key_values=cache, use_cache=True).logits
                ids = logits[:, -1:].argmax(dim=-1)
        events += recorder.events
    return pd.DataFrame(events)


# ---- reading the table ---------------------------------------------------------------------------


def _prefill(trace: pd.DataFrame, mechanism: str) -> pd.DataFrame:
    """Keys that each layer made and kept in the prefill, with one mechanism."""
    rows = trace[(trace["step"] == 0) & (trace["mechanism"] == mechanism)]
    made = rows[rows["event"].str.startswith(_ATTENDED)].groupby("layer")["keys"].first()
    return pd.DataFrame({"made": made, "kept": rows.groupby("layer")["keys"].last()})


def _event_table(trace: pd.DataFrame) -> ResultTable:
    """What happened in each step, hook and patch side by side; like layers are told once."""
    texts = trace.groupby(["step", "layer", "mechanism"])["event"].agg(list).unstack()
    rows: dict[Any, Any] = texts[list(_MECHANISMS)].T.to_dict("list")
    lines = []
    for (step, sides), alike in groupby(rows.items(), lambda row: (row[0][0], row[1])):
        layers = [layer for (_, layer), _ in alike]
        several = f"layers {layers[0]} to {layers[-1]}" if len(layers) > 1 else f"layer {layers[0]}"
        name = f"{f'decode step {step}' if step else 'prefill'}, {several}"
        for number, both in enumerate(zip_longest(*sides, fillvalue="")):
            lines.append(["" if number else name, *both])
    first = trace.iloc[0]
    note = f"What happened, in order: {press_label(first['press'])} at ratio {first['ratio']:g}."
    return ResultTable(note, ["", "hooks", "patches"], lines, left=None)


def _model(name: str, dtype: str, device: str) -> PreTrainedModel:
    if name not in FAMILIES:
        return load_model(name, dtype=dtype, device=device)[0]
    implementations = supported_implementations(name)
    model = build(name, attn_implementation="sdpa" if "sdpa" in implementations else "eager")
    return model.to(torch.device(device), getattr(torch, dtype))


class Trace(Experiment[Options]):
    """Follow one forward step by step, hook and patch side by side.

    In one forward, when does each mechanism act, and on what?

    Python's profiler reports the calls of attention modules, attention functions, hooks,
    wrappers and scores, and the cache is read around each of them. Events are listed in the
    order in which they arrived. Another press acts at other moments: `--press` traces any of
    them. How long a press takes is measured elsewhere, as a profiler slows it down. A family, as
    in `--model llama`, is built small, with random weights.
    """

    name = "trace"
    title = "One forward, step by step"
    evidence = Evidence.EVENTS
    full = quick = Options()

    def on(self, own: OwnModel) -> Planned[Options]:
        (press,), (length,) = own.opened((Options.press,)), own.at_most(Options.length)
        options = self.quick_on(own, press=press, length=length)
        return Planned(options, 2 * length, 2 * options.decode, seconds=1)

    def measure(self, options: Options, progress: Progress) -> Tables:
        name = press_name(options.press)
        model = _model(options.model, options.dtype, options.device)
        presses = suited_pair(name, options.ratio, options.length, model)
        events = trace(model, presses, length=options.length, decode=options.decode)
        called = short_name(options.model)
        return {"trace": events.assign(model=called, press=name, ratio=options.ratio)}

    def findings(self, tables: Tables) -> list[Finding]:
        hook, patch = (_prefill(tables["trace"], mechanism) for mechanism in _MECHANISMS)
        text = (
            f"Of {hook['made'].mean():,.0f} keys per head a layer keeps "
            f"**{hook['kept'].mean():,.0f}** once its own hook has run; a patch keeps "
            f"{'as many' if hook.equals(patch) else 'others'}, at the same moment."
        )
        return [Finding("layers", text)]

    def views(self, tables: Tables) -> list[ResultTable]:
        return [_event_table(tables["trace"])]


EXPERIMENT = Trace()
