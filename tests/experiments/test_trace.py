"""A trace tells what happens, in the order in which it happens, and leaves nothing behind."""

import re
import sys
from itertools import product

import pytest

import hooks_impl
import patch_impl
from experiments.questions.trace import EXPERIMENT, trace
from experiments.testbed.compare import PressPair, pair
from experiments.testbed.recipes import suited_pair
from press_core import kept_lengths
from tests.experiments.tiny import CASES, read_again
from tests.support import build, filled, table_beside, token_ids, unchanged

LENGTH = 80
SIDES = {"hook": (hooks_impl, "forward hook"), "patch": (patch_impl, "wrapper")}
both_sides = pytest.mark.parametrize("mechanism", SIDES)


@pytest.fixture(scope="module")
def snapkv(model):
    """Two decode steps after a prefill of 80 tokens, half of which SnapKV evicts."""
    return trace(model, pair("SnapKVPress", compression_ratio=0.5), length=LENGTH, decode=2)


def of_press(model, name, ratio=0.5, length=LENGTH, decode=1):
    return trace(model, suited_pair(name, ratio, length, model), length=length, decode=decode)


def events_of(events, mechanism: str, step: int, layer: int) -> list[str]:
    own = events[(events["mechanism"] == mechanism) & (events["step"] == step)]
    return own.loc[own["layer"] == layer, "event"].tolist()


@both_sides
@pytest.mark.parametrize("layer", [0, 1])
def test_a_prefill_in_order(snapkv, mechanism, layer):
    in_order = table_beside(__file__, "events")
    assert events_of(snapkv, mechanism, 0, layer) == in_order[mechanism]


@both_sides
def test_decode_steps(snapkv, mechanism):
    runs = ["1 hidden state enters", "attention has run over 42 keys"]
    assert [e for e in events_of(snapkv, mechanism, 2, 1) if e in runs] == runs
    assert not snapkv.loc[snapkv["step"] > 0, "event"].str.contains("prunes|scores").any()


@both_sides
def test_numbers_are_those_of_an_untraced_prefill(model, snapkv, mechanism):
    own = snapkv[snapkv["mechanism"] == mechanism]
    order = list(zip(own["step"], own["layer"], strict=True))
    assert order == sorted(order)
    assert set(order) == set(product(range(3), range(2)))
    cache = filled(model, SIDES[mechanism][0].SnapKVPress(0.5), token_ids(1, LENGTH))
    kept = own[own["step"] == 0].groupby("layer")["keys"].last().tolist()
    assert kept == [int(lengths.max()) for lengths in kept_lengths(cache)] == [40, 40]


@pytest.mark.parametrize("name", CASES["traced"])
def test_any_kind_of_press_can_be_traced(model, name):
    with unchanged(model):
        events = of_press(model, name)
    assert sys.getprofile() is None
    table = events.assign(model="llama", press=name, ratio=0.5)
    assert "keep as many in each layer" in EXPERIMENT.markdown({"trace": table})


@both_sides
def test_what_evicts_nothing_leaves_all(model, mechanism):
    events = events_of(of_press(model, "KnormPress", ratio=0.0), mechanism, 0, 1)
    assert "attention has run over 80 keys" in events
    assert not any("scores" in event or "prunes" in event for event in events)


def test_a_composition_names_the_presses_that_score(model):
    events = events_of(of_press(model, "ComposedPress", length=200), "hook", 0, 0)
    assert events[-3:] == [
        "Knorm scores 200 keys",
        "SnapKV scores 141 keys",
        "forward hook prunes 200 → 99",
    ]


@both_sides
def test_heads_of_different_lengths(model, mechanism):
    events, who = of_press(model, "AdaKVPress", ratio=0.3, length=200), SIDES[mechanism][1]
    pruned = events_of(events, mechanism, 0, 0)[-1]
    low, high = map(int, re.fullmatch(rf"{who} prunes 200 → (\d+) to (\d+)", pruned).groups())
    assert low < 140 < high
    assert set(events.loc[events["event"] == pruned, "keys"]) == {140}
    step = events_of(events, mechanism, 1, 0)
    assert f"attention has run over {low + 1} to {high + 1} keys" in step


def test_pruning_around_the_decoder_is_told(model):
    events = of_press(model, "StreamingLLMDecodingPress")
    first, *others = events_of(events, "hook", 1, 0)
    assert first == "pre-hook of the decoder prunes 80 → 40"
    assert "attention has run over 41 keys" in others
    # KVzip lets the model repeat its context, behind four tokens that ask for it, and prunes then.
    events = of_press(model, "KVzipPress")
    for mechanism, who in (("hook", "hook"), ("patch", "wrapper")):
        told = events_of(events, mechanism, 0, 1)
        assert told.count("84 hidden states enter") == 1
        assert told[-1].startswith(f"{who} of the decoder prunes 80 → ")


@pytest.mark.parametrize(("family", "layers"), CASES["pruned layers"].items())
def test_families(family, layers):
    events = trace(build(family), pair("SnapKVPress", compression_ratio=0.5), length=LENGTH)
    assert sorted(set(events["layer"])) == layers  # sliding layers are left alone
    for layer in layers:
        assert "hook on the query projection" in events_of(events, "hook", 0, layer)
        assert events_of(events, "patch", 0, layer)[-1] == "wrapper prunes 80 → 40"


@both_sides
def test_nothing_is_left_after_an_error(model, mechanism):
    def fail(self, *args):
        raise RuntimeError("while scoring")

    failing = type("Failing", (SIDES[mechanism][0].SnapKVPress,), {"score": fail})(0.5)
    with unchanged(model), pytest.raises(RuntimeError, match="while scoring"):
        trace(model, PressPair(failing, failing), length=LENGTH)
    assert sys.getprofile() is None


def test_the_summary_comes_from_the_csv_file(snapkv, tmp_path):
    tables = {"trace": snapkv.assign(model="llama", press="SnapKVPress", ratio=0.5)}
    read = read_again(tables, tmp_path)
    text = EXPERIMENT.markdown(read)
    assert text == EXPERIMENT.markdown(tables)
    assert EXPERIMENT.findings(read)[0].number == 40
    assert "| prefill, layers 0 to 1 | pre-hook | wrapper |" in text
    assert "|  | 80 hidden states enter | 80 hidden states enter |" in text
    apart = {"trace": tables["trace"].assign(layer=2 * tables["trace"]["layer"])}
    assert "| prefill, layers 0, 2 | pre-hook | wrapper |" in EXPERIMENT.markdown(apart)
