"""One forward traced step by step, hook and patch side by side.

The trace wraps and hooks nothing: Python's profiler reports the calls of attention modules, of
attention functions, of the hooks or wrappers that a mechanism put on attention modules and on the
decoder, and of presses that score. The number of keys in the cache is read around each call.
"""

import inspect
import sys
from contextlib import ExitStack
from dataclasses import dataclass, field
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
from experiments import UserError, data_of
from experiments.framework import shared
from experiments.framework.experiment import Evidence, Experiment, Finding, Tables
from experiments.framework.options import Device, Dtype
from experiments.framework.own_model import OwnModel, Planned
from experiments.framework.plots import press_label
from experiments.framework.tables import ResultTable
from experiments.loading import load_model, short_name
from experiments.mechanisms.scenarios import OF_FAMILY
from experiments.testbed.compare import Inputs, PressPair
from experiments.testbed.families import build
from experiments.testbed.recipes import DELIMITER, press_name, suited_pair
from press_core import AttentionSite, attention_sites, kept_lengths
from press_core.presses.finch import Finch
from press_core.scoring import TokenScorer

_MECHANISMS = {
    "hook": (hooks_impl.mechanism,),
    "patch": (patch_impl.mechanism, attention_patch.scope),
}
_CALLED: dict[str, dict[str, str]] = data_of(__file__)
"""By mechanism, names in events of the functions that it installs."""
_ATTENDED = "attention has run over"


@dataclass(frozen=True)
class Options:
    """Which press to trace, on which model, and for how many tokens."""

    model: shared.Model = "facts-llama"
    press: Annotated[str, typer.Option(help="Press to trace, such as SnapKVPress.")] = "SnapKVPress"
    ratio: Annotated[float, typer.Option(help="Share of the tokens to evict, in [0, 1).")] = 0.5
    length: Annotated[int, typer.Option(min=1, help="Tokens of the prompt.")] = 512
    decode: Annotated[int, typer.Option(min=0, help="Decode steps after the prefill.")] = 1
    dtype: Dtype = "float32"
    device: Device = "cpu"
    # Not in the repr, by which a study compares options: no study traces a family.
    family: Annotated[str | None, OF_FAMILY] = field(default=None, repr=False)


# ---- recording -----------------------------------------------------------------------------------


Held = dict[int, list[int]]
"""By layer, the number of keys that each row and head holds."""


def _text(held: list[int]) -> str:
    low, high = min(held, default=0), max(held, default=0)
    return f"{low}" if low == high else f"{low} to {high}"


class Recorder:
    """Records what happens in the attention layers of a model, with one mechanism.

    Attributes:
        events: the events so far, in order.
        step: number of the next forward, 0 for the prefill.
    """

    def __init__(self, mechanism: str, model: PreTrainedModel, cache: DynamicCache) -> None:
        self.mechanism, self.cache, self.step = mechanism, cache, 0
        self.events: list[dict[str, Any]] = []
        sites = attention_sites(model)
        self._sites = {id(part): site for site in sites for part in site.module.modules()}
        self._forwards = {inspect.unwrap(type(x.module).forward).__code__ for x in sites}
        self._files = {module.__file__ for module in _MECHANISMS[mechanism]}
        self._held: Held = {}  # at the last event
        self._open: list[FrameType] = []  # running calls of the mechanism

    def see(self, frame: FrameType, what: str, result: Any) -> None:
        """The profile function (`sys.setprofile`) that records the events of this thread."""
        code, begins, ends = frame.f_code, what == "call", what == "return"
        site = self._sites.get(id(frame.f_locals["self"])) if code in self._forwards else None
        if site is not None and begins:
            n = frame.f_locals["hidden_states"].shape[1]
            enter = "hidden states enter" if n > 1 else "hidden state enters"
            self._note(site.layer_idx, f"{n} {enter}")
        elif site is not None and ends and result is not None:
            held = _text(self._holds()[site.layer_idx])
            self._note(site.layer_idx, f"{_ATTENDED} {held} {'key' if held == '1' else 'keys'}")
        elif ends and code is TokenScorer.checked_scores.__code__ and result is not None:
            press, layer = frame.f_locals["self"], frame.f_locals["call"].site.layer_idx
            self._note(layer, f"{press_label(type(press).__name__)} scores {result.shape[-1]} keys")
        elif begins and code.co_filename in self._files and self._name(code):
            self._calls(frame)
        elif ends and self._open and self._open[-1] is frame:
            self._returns(self._name(code))

    def _note(self, layer: int, event: str) -> None:
        self._held = self._holds()
        held = self._held.get(layer) or [0]
        where = {"mechanism": self.mechanism, "step": self.step, "layer": layer}
        self.events.append({**where, "event": event, "keys": round(sum(held) / len(held))})

    def _calls(self, frame: FrameType) -> None:
        """Record the call of a hook or wrapper, if it is that of a layer."""
        self._open.append(frame)
        for site in (self._sites.get(id(value), value) for value in frame.f_locals.values()):
            if isinstance(site, AttentionSite):
                self._note(site.layer_idx, self._name(frame.f_code))
                break

    def _returns(self, name: str) -> None:
        """Record which layers the hook or wrapper that returns has pruned."""
        self._open.pop()
        before = self._held
        for layer, held in self._holds().items():
            if held != before.get(layer, held):
                self._note(layer, f"{name} prunes {_text(before[layer])} → {_text(held)}")

    def _name(self, code: CodeType) -> str:
        return _CALLED[self.mechanism].get(code.co_name, "")

    def _holds(self) -> Held:
        own = {site.layer_idx for site in self._sites.values()}
        lengths = enumerate(kept_lengths(self.cache))
        return {layer: of.flatten().tolist() for layer, of in lengths if layer in own}


def trace(
    model: PreTrainedModel, presses: PressPair, *, length: int, decode: int = 0, seed: int = 0
) -> pd.DataFrame:
    """Trace a prefill and decode steps, first with hooks, then with patches.

    The model is unchanged afterwards.

    Args:
        model: any decoder that the presses support.
        presses: the same press with both mechanisms.
        length: tokens of the random prompt.
        decode: greedy decode steps after the prefill.
        seed: of the prompt.

    Returns:
        A row per event, in order: the `mechanism`, "hook" or "patch"; the `step`, 0 for the
        prefill; the `layer`; the `event`, in words; and the number of `keys` per head in the
        layer's cache after it, a mean where heads differ.

    Raises:
        PressError: if a press does not support the model.
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
    """Number of keys that each layer attended over and kept in the prefill, with one mechanism."""
    rows = trace[(trace["step"] == 0) & (trace["mechanism"] == mechanism)]
    made = rows[rows["event"].str.startswith(_ATTENDED)].groupby("layer")["keys"].first()
    return pd.DataFrame({"made": made, "kept": rows.groupby("layer")["keys"].last()})


def _event_table(trace: pd.DataFrame) -> ResultTable:
    """The events of each step, hook and patch side by side; layers with equal events are merged."""
    texts = trace.groupby(["step", "layer", "mechanism"])["event"].agg(list).unstack()
    rows: dict[Any, Any] = texts[list(_MECHANISMS)].T.to_dict("list")
    lines = []
    for (step, sides), equal in groupby(rows.items(), lambda row: (row[0][0], row[1])):
        layers = [layer for (_, layer), _ in equal]
        run = 1 < len(layers) == layers[-1] - layers[0] + 1  # no sliding window is among them
        several = f"{layers[0]} to {layers[-1]}" if run else ", ".join(map(str, layers))
        where = f"layer{'s' * (len(layers) > 1)} {several}"
        name = f"{f'decode step {step}' if step else 'prefill'}, {where}"
        for number, both in enumerate(zip_longest(*sides, fillvalue="")):
            lines.append(["" if number else name, *both])
    first = trace.iloc[0]
    note = f"Events in order, {press_label(first['press'])} at ratio {first['ratio']:g}."
    return ResultTable(note, ["", "hooks", "patches"], lines, left=None)


class Trace(Experiment[Options]):
    """Trace one forward step by step, hook and patch side by side.

    During one forward, when does each mechanism act, and on which keys?

    Python's profiler reports the calls of attention modules, attention functions, hooks,
    wrappers and scores, and the number of keys in the cache is read around each call. Events are
    listed by layer, and in each layer in the order in which they happen. Other presses act at
    other moments: `--press` traces any of them. The profiler slows everything down, so the trace
    says nothing about time. `--family` traces a small random model instead.
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
        if options.family and options.model != Options.model:
            raise UserError("give either --model or --family, not both")
        name = press_name(options.press)
        progress.add_task(self.name, total=None)
        how: Any = {"dtype": getattr(torch, options.dtype), "device": torch.device(options.device)}
        of_family = options.family and build(options.family).to(**how)
        model = of_family or load_model(options.model, **how)[0]
        presses = suited_pair(name, options.ratio, options.length, model)
        events = trace(model, presses, length=options.length, decode=options.decode)
        called = options.family or short_name(options.model)
        return {"trace": events.assign(model=called, press=name, ratio=options.ratio)}

    def findings(self, tables: Tables) -> list[Finding]:
        hook, patch = (_prefill(tables["trace"], mechanism) for mechanism in _MECHANISMS)
        text = (
            f"Of {hook['made'].mean():,.0f} keys per head, layers keep "
            f"**{hook['kept'].mean():,.0f}** on average after the prefill; hooks and patches "
            f"{'keep as many in each layer' if hook.equals(patch) else 'differ'}."
        )
        return [Finding("layers", text)]

    def views(self, tables: Tables) -> list[ResultTable]:
        return [_event_table(tables["trace"])]


EXPERIMENT = Trace()
