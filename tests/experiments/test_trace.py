"""A trace tells what happens, in the order in which it happens, and leaves nothing behind."""

import re
import time
from dataclasses import asdict, dataclass

import pandas as pd
import pytest
import torch
from transformers import DynamicCache
from typer.testing import CliRunner

import hooks_impl
import patch_impl
from experiments.cli import app
from experiments.framework.results import read_table, write_table
from experiments.questions import trace as tracing
from experiments.questions.trace import EXPERIMENT, Event, to_table, trace
from experiments.testbed.compare import PressPair, pair
from experiments.testbed.recipes import suited_pair
from press_core import kept_lengths
from tests.support import build, snapshot, token_ids

LENGTH = 80


@pytest.fixture(scope="module")
def model():
    return build("llama")


@pytest.fixture(autouse=True)
def _one_run(monkeypatch):
    monkeypatch.setattr(tracing, "RUNS", 1)


@pytest.fixture(scope="module")
def snapkv(model):
    """Two decode steps after a prefill of 80 tokens, half of which SnapKV evicts."""
    return trace(model, pair("SnapKVPress", compression_ratio=0.5), length=LENGTH, decode=2)


def events_of(events: list[Event], mechanism: str, step: int, layer: int) -> list[str]:
    where = mechanism, step, layer
    return [e.event for e in events if (e.mechanism, e.step, e.layer) == where]


@pytest.mark.parametrize("layer", [0, 1])
def test_hooks_of_a_prefill_in_order(snapkv, layer):
    assert events_of(snapkv, "hook", 0, layer) == [
        "80 hidden states enter",
        "pre-hook leaves the mask",
        "hook on q_proj collects 80 queries",
        "attention runs over 80 keys",
        "press scores 80 keys",
        "forward hook prunes 80 → 40",
    ]


@pytest.mark.parametrize("layer", [0, 1])
def test_patches_of_a_prefill_in_order(snapkv, layer):
    assert events_of(snapkv, "patch", 0, layer) == [
        "80 hidden states enter",
        "wrapper enters, leaves the mask",
        "attention function is intercepted: 80 queries seen",
        "attention runs over 80 keys",
        "press scores 80 keys",
        "wrapper prunes 80 → 40",
    ]


def test_decode_steps(snapkv):
    assert events_of(snapkv, "hook", 1, 0) == [
        "1 hidden state enters",
        "pre-hook leaves the mask",
        "hook on q_proj collects nothing",
        "attention runs over 41 keys",
        "forward hook leaves 41 keys",
    ]
    assert events_of(snapkv, "patch", 2, 1) == [
        "1 hidden state enters",
        "wrapper enters, leaves the mask",
        "attention runs over 42 keys",
        "wrapper leaves 42 keys",
    ]


@pytest.mark.parametrize("mechanism", ["hook", "patch"])
def test_layers_follow_each_other(snapkv, mechanism):
    order = [(e.step, e.layer) for e in snapkv if e.mechanism == mechanism]
    assert order == sorted(order)
    assert set(order) == {(step, layer) for step in range(3) for layer in range(2)}


@pytest.mark.parametrize("mechanism", ["hook", "patch"])
def test_numbers_of_a_prefill(snapkv, mechanism):
    ends = [
        e for e in snapkv if e.keys_kept is not None and (e.mechanism, e.step) == (mechanism, 0)
    ]
    n_bytes = 2 * 2 * 16 * 4  # keys and values, KV heads, channels, float32
    for layer, end in enumerate(ends):
        assert (end.layer, end.hidden_states_length, end.keys_made) == (layer, 80, 80)
        assert (end.keys_kept, end.bytes_before, end.bytes_after) == (
            40,
            80 * n_bytes,
            40 * n_bytes,
        )


@pytest.mark.parametrize("mechanism", ["hook", "patch"])
def test_a_traced_model_keeps_what_an_untraced_one_keeps(model, snapkv, mechanism):
    package = {"hook": hooks_impl, "patch": patch_impl}[mechanism]
    cache = DynamicCache()
    with torch.inference_mode(), package.SnapKVPress(0.5)(model):
        model(token_ids(1, LENGTH), past_key_values=cache)
    told = [e.keys_kept for e in snapkv if e.mechanism == mechanism and e.step == 0 and e.keys_kept]
    assert told == [int(kept.max()) for kept in kept_lengths(cache)]


def test_a_press_that_reads_no_queries_collects_none(model):
    events = trace(model, pair("KnormPress", compression_ratio=0.25), length=20)
    assert events_of(events, "hook", 0, 0) == [
        "20 hidden states enter",
        "pre-hook leaves the mask",
        "attention runs over 20 keys",
        "press scores 20 keys",
        "forward hook prunes 20 → 15",
    ]
    assert events_of(events, "patch", 0, 0) == [
        "20 hidden states enter",
        "wrapper enters, leaves the mask",
        "attention runs over 20 keys",
        "press scores 20 keys",
        "wrapper prunes 20 → 15",
    ]


def test_ratio_zero_prunes_nothing(model):
    events = trace(model, pair("KnormPress", compression_ratio=0.0), length=20)
    assert events_of(events, "hook", 0, 1)[-1] == "forward hook leaves 20 keys"
    assert events_of(events, "patch", 0, 1)[-1] == "wrapper leaves 20 keys"
    assert not any("scores" in e.event for e in events)


# ---- other presses than scorers ------------------------------------------------------------------


def of_press(model, name, ratio=0.5, length=LENGTH, decode=1):
    return trace(model, suited_pair(name, ratio, length, model), length=length, decode=decode)


@pytest.mark.parametrize("name", sorted(hooks_impl.PRESSES))
def test_any_press_can_be_traced(model, name):
    before = snapshot(model)
    events = of_press(model, name)
    assert snapshot(model) == before
    table = to_table(events, model="llama", press=name, ratio=0.5)
    hook, patch = (table[table["mechanism"] == m].reset_index() for m in ("hook", "patch"))
    numbers = ["step", "layer", "keys_made", "keys_kept", "bytes_before", "bytes_after"]
    ends = [side[side["keys_kept"].notna()].reset_index()[numbers] for side in (hook, patch)]
    pd.testing.assert_frame_equal(*ends)
    assert set(zip(hook["step"], hook["layer"], strict=True)) == {
        (s, i) for s in (0, 1) for i in (0, 1)
    }
    assert "With both mechanisms every layer receives" in EXPERIMENT.markdown({"trace": table})


def test_wrappers_name_the_press_that_scores(model):
    events = events_of(of_press(model, "ComposedPress", length=200), "hook", 0, 0)
    assert events[-3:] == [
        "Knorm scores 200 keys",
        "SnapKV scores 141 keys",
        "forward hook prunes 200 → 99",
    ]
    events = events_of(of_press(model, "CriticalKVPress"), "patch", 0, 1)
    assert events[-3:] == [
        "SnapKV scores 80 keys",
        "press scores 80 keys",
        "wrapper prunes 80 → 40",
    ]
    for name in ("AdaKVPress", "PerLayerCompressionPress"):
        assert "SnapKV scores 80 keys" in events_of(of_press(model, name), "patch", 0, 1)


@pytest.mark.parametrize("mechanism", ["hook", "patch"])
def test_heads_of_different_lengths(model, mechanism):
    events = of_press(model, "AdaKVPress", ratio=0.3, length=200)
    who = {"hook": "forward hook", "patch": "wrapper"}[mechanism]
    pruned = events_of(events, mechanism, 0, 0)[-1]
    low, high = map(int, re.fullmatch(rf"{who} prunes 200 → (\d+) to (\d+)", pruned).groups())
    assert low < 140 < high
    assert next(e.keys_kept for e in events if e.event == pruned) == 140
    step = events_of(events, mechanism, 1, 0)
    assert f"attention runs head by head over {low + 1} to {high + 1} keys" in step
    assert step[-1] == f"{who} leaves {low + 1} to {high + 1} keys"


def test_pruning_before_attention_is_told(model):
    events = of_press(model, "StreamingLLMDecodingPress")
    assert events_of(events, "hook", 1, 0) == [
        "hook on the decoder prunes 80 → 40",
        "1 hidden state enters",
        "pre-hook leaves the mask",
        "attention runs over 41 keys",
        "forward hook leaves 41 keys",
    ]
    assert events_of(events, "patch", 1, 0) == [
        "wrapper of the decoder prunes 80 → 40",
        "1 hidden state enters",
        "wrapper enters, leaves the mask",
        "attention runs over 41 keys",
        "wrapper leaves 41 keys",
    ]
    made = [e.keys_made for e in events if e.event == "attention runs over 41 keys"]
    assert made == [1] * 4


def test_pruning_while_decoding_is_told(model):
    events = of_press(model, "DecodingPress", length=200, decode=2)
    assert events_of(events, "hook", 0, 0)[-1] == "forward hook leaves 200 keys"
    for step, n in ((1, 201), (2, 101)):
        assert events_of(events, "patch", step, 1)[-2:] == [
            f"SnapKV scores {n} keys",
            f"wrapper prunes {n} → 100",
        ]


def test_channels_that_are_dropped_are_told(model):
    events = of_press(model, "ThinKPress")
    assert events_of(events, "hook", 0, 0)[-1] == "forward hook rewrites 80 keys"
    assert events_of(events, "hook", 1, 0)[-1] == "forward hook leaves 81 keys"


def test_a_delimiter_that_is_taken_out_is_told(model):
    events = of_press(model, "FinchPress")
    for mechanism, who in (("hook", "hook on"), ("patch", "wrapper of")):
        assert events_of(events, mechanism, 0, 0)[:2] == [
            f"{who} the decoder passes 79 of 80 tokens on",
            "79 hidden states enter",
        ]
        assert events_of(events, mechanism, 1, 0)[0] == "1 hidden state enters"


def test_running_the_model_again_is_told(model):
    """KVzip lets the model repeat its context, and prunes all layers then."""
    events = of_press(model, "KVzipPress")
    for mechanism, who in (("hook", "hook on"), ("patch", "wrapper of")):
        # the context in one chunk, behind four tokens that ask for it
        again = f"{who} the decoder runs the model again: 1 forward of 84 tokens"
        assert events_of(events, mechanism, 0, 1)[-2] == again
        assert sum(e.event == again for e in events) == 1
        ends = [events_of(events, mechanism, 0, layer)[-1] for layer in (0, 1)]
        assert all(end.startswith(f"{who} the decoder prunes 80 → ") for end in ends)


def test_what_all_layers_lose_when_they_have_run_is_told(model):
    """The gates of Fast KVzip judge layer by layer, and share one budget over all of them."""
    events = of_press(model, "FastKVzipPress")
    for mechanism, layer_by, body_by in (
        ("hook", "forward hook", "hook on"),
        ("patch", "wrapper", "wrapper of"),
    ):
        for layer in (0, 1):
            *_, left, pruned = events_of(events, mechanism, 0, layer)
            assert left == f"{layer_by} leaves 80 keys"
            assert pruned.startswith(f"{body_by} the decoder prunes 80 → ")


def test_command(tmp_path):
    options = ["--model", "llama", "--length", "40", "--decode", "0", "--ratio", "0.5"]
    invoke = CliRunner().invoke
    result = invoke(app, ["trace", "--press", "adakv", *options, "--output", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert "AdaKV at ratio 0.5" in result.output
    assert set(pd.read_csv(tmp_path / "trace.csv")["press"]) == {"AdaKVPress"}
    assert (tmp_path / "trace.svg").stat().st_size > 3_000
    result = invoke(app, ["trace", "--press", "SnapPress", *options])
    assert result.exit_code == 2
    assert "there is no press 'SnapPress'; there are AdaKV, Block, " in result.output


# ---- what must not happen ------------------------------------------------------------------------


@dataclass
class MeddlingPress(hooks_impl.KnormPress):
    """When the second layer is done, prunes the first one once more."""

    def forward_hook(self, module, input, kwargs, output):
        output = super().forward_hook(module, input, kwargs, output)
        if module.layer_idx == 1:
            layer = kwargs["past_key_values"].layers[0]
            layer.keys, layer.values = layer.keys[..., :3, :], layer.values[..., :3, :]
        return output


def test_pruning_another_layer_is_told(model):
    events = trace(model, PressPair(MeddlingPress(0.5), patch_impl.KnormPress(0.5)), length=20)
    assert [e.event for e in events if e.mechanism == "hook"][-1] == (
        "forward hook of layer 1 changes 10 → 3"
    )
    table = to_table(events, model="m", press="KnormPress", ratio=0.5)
    assert "1 time a press changed the cache of another layer" in EXPERIMENT.markdown(
        {"trace": table}
    )


@pytest.mark.parametrize("mechanism", ["hook", "patch"])
def test_a_mask_that_is_replaced_is_told(model, mechanism):
    """Of a padded batch that was pruned, the mask of the model does not fit."""
    press = getattr(pair("KnormPress", compression_ratio=0.5), mechanism)
    cache = DynamicCache()
    mask = torch.ones(2, 20, dtype=torch.long)
    mask[0, :6] = 0
    recorder = tracing.Recorder(mechanism, model, cache)
    with torch.inference_mode(), recorder.recorded(press):
        model(token_ids(2, 20), attention_mask=mask, past_key_values=cache)
        recorder.step = 1
        longer = torch.cat((mask, mask.new_ones(2, 1)), dim=1)
        model(token_ids(2, 1), attention_mask=longer, past_key_values=cache)
    replaced = [(e.step, e.layer) for e in recorder.events if "replaces the mask" in e.event]
    assert replaced == [(1, 0), (1, 1)]


@pytest.mark.parametrize(
    ("family", "projection", "layers"),
    [
        ("gpt_neox", "query_key_value", [0, 1]),
        ("gpt2", "c_attn", [0, 1]),
        ("qwen3", "q_norm", [0, 1]),
        ("gemma3_text", "q_norm", [1, 3]),
    ],
)
def test_families(family, projection, layers):
    events = trace(build(family), pair("SnapKVPress", compression_ratio=0.5), length=LENGTH)
    assert sorted({e.layer for e in events}) == layers  # sliding layers are left alone
    for layer in layers:
        assert f"hook on {projection} collects 80 queries" in events_of(events, "hook", 0, layer)
        assert events_of(events, "patch", 0, layer)[-1] == "wrapper prunes 80 → 40"


def test_only_time_in_the_press_is_counted(model, monkeypatch):
    """20 ms in the score are the press', 100 ms in attention and projection are the model's."""

    def slow(function, seconds):
        return lambda *args, **kwargs: (time.sleep(seconds), function(*args, **kwargs))[1]

    attention = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr("torch.nn.functional.scaled_dot_product_attention", slow(attention, 0.1))
    projection = model.model.layers[0].self_attn.o_proj
    monkeypatch.setattr(projection, "forward", slow(projection.forward, 0.1))
    presses = [
        type("Slow", (package.SnapKVPress,), {"score": slow(package.SnapKVPress.score, 0.02)})(0.5)
        for package in (hooks_impl, patch_impl)
    ]
    events = trace(model, PressPair(*presses), length=LENGTH)
    assert sum(event.press_us or 0 for event in events) < 170_000
    scored = [event.press_us for event in events if event.event.startswith("press scores")]
    assert len(scored) == 4
    assert min(scored) >= 20_000


def test_median_of_several_runs():
    runs = [Event("hook", 0, 0, "e", press_us=us) for us in (1.0, 50.0, 3.0)]
    assert tracing._with_median_time(*runs).press_us == 3.0
    assert tracing._with_median_time(*[Event("hook", 0, 0, "e")] * 3).press_us is None


def test_nothing_is_left(model):
    before = snapshot(model)
    trace(model, pair("SnapKVPress", compression_ratio=0.5), length=LENGTH, decode=1)
    assert snapshot(model) == before


@pytest.mark.parametrize("package", [hooks_impl, patch_impl])
def test_nothing_is_left_after_an_error(model, package):
    def fail(self, *args):
        raise RuntimeError("while scoring")

    failing = type("Failing", (package.SnapKVPress,), {"score": fail})(0.5)
    before = snapshot(model)
    with pytest.raises(RuntimeError, match="while scoring"):
        trace(model, PressPair(failing, failing), length=LENGTH)
    assert snapshot(model) == before


def test_the_press_itself_is_not_changed(model):
    presses = pair("SnapKVPress", compression_ratio=0.5)
    trace(model, presses, length=LENGTH)
    for press in presses:
        assert asdict(press) == {"compression_ratio": 0.5, "window_size": 64, "kernel_size": 5}


def test_figure_and_summary_come_from_the_csv_file(snapkv, tmp_path):
    table = to_table(snapkv, model="llama", press="SnapKVPress", ratio=0.5)
    write_table(table, tmp_path / "trace.csv")
    read = read_table(tmp_path / "trace.csv")
    assert read["keys_made"].dropna().tolist() == table["keys_made"].dropna().tolist()
    text = EXPERIMENT.markdown({"trace": read})
    assert text == EXPERIMENT.markdown({"trace": table})
    assert text.startswith("Of 80 keys per head a layer keeps **40** once its own hook has run; ")
    assert (
        "With both mechanisms every layer receives 80 hidden states, makes 80 keys per head, and "
        "keeps 40 of them when its own press has acted; no press ever changed the cache of another "
        "layer (SnapKV at ratio 0.5, 2 layers of `llama`)."
    ) in text
    assert "| 1 | 80 | 80 | 40 | 20.0 | 10.0 |" in text
    assert re.search(
        r"\| hook on q_proj collects 80 queries \| [\d,]+ \| attention function is intercepted",
        text,
    )
    assert "| prefill, layers 0 to 1 | 80 hidden states enter |  | 80 hidden states enter |" in text
    left, right = EXPERIMENT.figures({"trace": read})["trace"].axes
    for panel, name in ((left, "hooks"), (right, "patches")):
        assert panel.get_title(loc="left") == name
        widths = [bar.get_width() for bar in panel.patches]
        assert widths == [80, 80, 80, 80, 40, 40]  # entered, made and kept, of two layers


def test_columns(snapkv):
    table = to_table(snapkv, model="llama", press="SnapKVPress", ratio=0.5)
    assert list(table.columns[:10]) == [
        "mechanism",
        "step",
        "layer",
        "event",
        "hidden_states_length",
        "keys_made",
        "keys_kept",
        "bytes_before",
        "bytes_after",
        "press_us",
    ]
