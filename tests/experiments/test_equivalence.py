"""The experiment `equivalence` and its command: what is equal, what differs, bad input."""

import re
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

import pytest
import torch
from hypothesis import given, settings

import hooks_impl
import patch_impl
from experiments import strategies
from experiments.questions.equivalence import EXPERIMENT, Options, run_grid
from experiments.testbed.compare import Difference, Inputs, compare, pair, run
from experiments.testbed.families import VOCABULARY
from experiments.testbed.recipes import recipe_pair
from press_core import UnsupportedModelError
from press_core.press import RatioPress
from tests.experiments.tiny import CASES, SILENT, cli, read_again
from tests.support import build

SMALL = ["--family", "llama", "--dtype", "float32", "--attn", "sdpa", "--length", "20"]


def words(result):
    """What was printed, without boxes and line breaks."""
    return " ".join(re.sub("[│╭╮╰╯─]", " ", result.output).split())


# ---- presses of a user's own ---------------------------------------------------------------------


class NewestPress(hooks_impl.ScorerPress):
    """Keeps the most recent tokens."""

    def score(self, module, hidden_states, keys, values, attentions, kwargs):
        return torch.arange(keys.shape[2]).expand(keys.shape[:3]).float()


class NewestPatch(patch_impl.ScorerPress):
    def score(self, call):
        return torch.arange(call.length).expand(call.keys.shape[:3]).float()


class NewestButOnePatch(NewestPatch):
    """Differs in the last KV head of the second layer, where the first token is kept."""

    def score(self, call):
        scores = super().score(call).clone()
        if call.site.layer_idx == 1:
            scores[:, -1, 0] = call.length
        return scores


class NudgedPatch(patch_impl.KnormPress):
    """Differs in one bit of one value of the first layer."""

    def compress(self, call):
        eviction = super().compress(call)
        values = eviction.values.clone()
        if call.site.layer_idx == 0:
            values[-1, 1, 2, 3] = torch.nextafter(values[-1, 1, 2, 3], torch.tensor(torch.inf))
        return replace(eviction, values=values)


class RefusingPatch(NewestPatch):
    def check_site(self, site):
        raise UnsupportedModelError(f"not on {site.name}")


class WithoutDefaultPress(NewestPress):
    def __init__(self, compression_ratio, n_recent): ...


# ---- the command ---------------------------------------------------------------------------------


OWN = f"{__name__}:NewestPress,{__name__}"


@pytest.mark.parametrize(("presses", "status", "said"), CASES["compared"])
def test_the_status_tells_whether_all_is_equal_and_the_first_difference_is_named(
    presses, status, said
):
    flags = [word for press in presses for word in ("--press", press.format(own=OWN))]
    result = cli("equivalence", *flags, "--ratio", "0.5", *SMALL, status=status)
    assert all(text in words(result) for text in said), words(result)


def test_status_is_1_where_there_is_nothing_to_compare():
    asked = "equivalence", "--press", "ExpectedAttentionPress", "--family", "gpt2"
    compared = cli(*asked, *SMALL, status=0)  # llama was
    assert "ExpectedAttentionPress on gpt2" in words(compared)
    assert "Nothing was compared" in words(cli(*asked, "--dtype", "float32", status=1))


# ---- the table, its summary and its figure -------------------------------------------------------


NAMES = ("ExpectedAttentionPress", "KnormPress")


@pytest.fixture(scope="module")
def cells():
    options = Options(family=("llama", "gpt2"), attn=("sdpa",), dtype=("float32",), length=20)
    return run_grid({name: partial(recipe_pair, name) for name in NAMES}, options, SILENT)


def test_the_table_has_one_row_per_press_and_model(cells):
    places = cells[["press", "family"]].itertuples(index=False, name=None)
    assert sorted(places) == sorted(product(NAMES, ("llama", "gpt2")))
    assert (cells["cells"] == 2).all()  # padded and not
    assert (cells["difference"] == "").all()
    cells = cells.set_index(["press", "family"])
    refused = cells[cells["refusal"] != ""]
    assert list(refused.index) == [("ExpectedAttentionPress", "gpt2")]
    assert refused[["compared", "tokens"]].to_numpy().tolist() == [[0, 0]]
    # two rows of 20 tokens, or 20 and 13; then a question of 4 and one decode step for each
    assert set(cells.xs("llama", level="family")["tokens"]) == {50 + 43}


def test_all_presses_agree_on_a_family():
    options = Options(family=("llama",), attn=("sdpa",), dtype=("float32",), length=40)
    cells = EXPERIMENT.measure(options, SILENT)["equivalence"]
    assert set(cells["press"]) == set(hooks_impl.PRESSES)
    assert (cells["compared"] == cells["cells"]).all(), "no press is refused"
    assert not cells["differ"].any(), cells["difference"].tolist()


def test_what_is_said_can_be_made_from_the_file(cells, tmp_path):
    tables = read_again({"equivalence": cells}, tmp_path)
    assert EXPERIMENT.findings(tables)[0].number == 0
    text = EXPERIMENT.markdown(tables)
    assert "| KnormPress | 4/4 | 4/4 |" in text
    assert "- Both refuse ExpectedAttentionPress on gpt2:" in text
    assert EXPERIMENT.passed(tables)
    (figure,) = EXPERIMENT.figures(tables).values()
    labels = [text.get_text() for text in figure.axes[0].texts]
    assert labels == ["\N{EN DASH}"]  # refused; elsewhere all are equal


def test_what_is_said_shows_differences(cells):
    first = (cells["press"] == "KnormPress") & (cells["family"] == "llama")
    differ = {"differ": 1, "difference": "sdpa, not padded: keys differ first at layer 0"}
    tables = {"equivalence": cells.copy()}
    tables["equivalence"].loc[first, list(differ)] = list(differ.values())
    found, text = EXPERIMENT.findings(tables)[0], EXPERIMENT.markdown(tables)
    assert (found.number, found.verdict) == (1, "breaks")
    assert "- KnormPress at ratio 0.5 on llama, float32, sdpa, not padded: keys differ" in text
    assert not EXPERIMENT.passed(tables)
    (figure,) = EXPERIMENT.figures(tables).values()
    assert "x" in [text.get_text() for text in figure.axes[0].texts]


# ---- the comparison underneath -------------------------------------------------------------------


INPUTS = Inputs.random(VOCABULARY, (30, 30))
PADDED = Inputs.random(VOCABULARY, (30, 20))


def test_one_bit_is_found(model):
    hook, patch = hooks_impl.KnormPress(0.5), NudgedPatch(0.5)
    difference = compare(model, hook, patch, INPUTS)
    kept = run(model, hook, INPUTS).pruned[0]
    expected = kept.values[-1, 1, 2, 3].item()
    place = {"layer": 0, "row": 1, "head": 1, "position": int(kept.positions[1, 1, 2])}
    nudged = torch.tensor(expected).nextafter(torch.tensor(torch.inf)).item()
    told = {"where": "values after the prefill", "hook_value": expected, "patch_value": nudged}
    assert difference == Difference(**told, **place)
    assert str(difference).startswith("values after the prefill differ first at layer 0, row 1")


def test_positions_count_padding(model):
    difference = compare(model, NewestPress(0.5), NewestButOnePatch(0.5), PADDED)
    assert (difference.layer, difference.row, difference.head) == (1, 0, 1)
    swapped = Inputs.random(VOCABULARY, (20, 30))
    difference = compare(model, NewestPress(0.5), NewestButOnePatch(0.5), swapped)
    # the first row is padded by ten, so that its first token stands at place ten
    assert (difference.row, difference.position, difference.patch_value) == (0, 10, 10)


@pytest.mark.parametrize("inputs", [INPUTS, PADDED], ids=["whole", "padded"])
def test_a_run_equals_itself_even_with_random_numbers_and_nan(model, inputs):
    hook, patch = pair("RandomPress", compression_ratio=0.5, seed=None)
    before = torch.get_rng_state()
    assert compare(model, hook, patch, inputs) is None
    assert torch.equal(torch.get_rng_state(), before)
    broken = build("llama", num_layers=1)
    broken.get_input_embeddings().weight.data[5:50] = float("nan")
    assert run(broken, hook, inputs).logits[0].isnan().any()
    assert compare(broken, hook, patch, inputs) is None


def test_later_forwards_are_compared_too(model):
    class LatePatch(patch_impl.KnormPress):
        """Leaves the cache alone and changes the output of every forward of one token."""

        def install(self, scope):
            super().install(scope)
            for site in scope.sites:
                scope.installed.append(self.after(site.module, self.change))

        def change(self, args, output):
            states, *rest = output
            return (states + 1, *rest) if states.shape[1] == 1 else None

    difference = compare(model, hooks_impl.KnormPress(0.5), LatePatch(0.5), INPUTS)
    assert difference.where == "logits of forward 2 after the prefill"
    assert difference.position == 34
    assert (difference.layer, difference.head) == (None, None)


def test_different_numbers_of_kept_tokens_differ_in_shape(model):
    press = hooks_impl.KnormPress(0.5)
    difference = compare(model, press, replace(press, compression_ratio=0.8), INPUTS)
    assert difference.where == "shapes of the kept positions after the prefill"
    assert difference.hook_value == "(2, 2, 15) torch.int32"
    assert difference.patch_value == "(2, 2, 5) torch.int32"


def test_a_press_that_does_not_say_what_it_keeps(model):
    @dataclass
    class EveryOther(RatioPress, hooks_impl.BasePress):
        first: int = 0

        def compress(self, module, hidden_states, keys, values, attentions, kwargs):
            return keys[:, :, self.first :: 2], values[:, :, self.first :: 2]

    assert compare(model, EveryOther(), EveryOther(), INPUTS) is None
    difference = compare(model, EveryOther(), EveryOther(first=1), INPUTS)
    assert (difference.where, difference.layer) == ("keys after the prefill", 0)


NEWEST = strategies.pairs_of(NewestPress, NewestPatch, compression_ratio=strategies.ratios())


@settings(max_examples=20, derandomize=True)
@given(strategies.cases(NEWEST, max_length=20))
def test_strategies_take_presses_of_ones_own(case):
    assert case.difference() is None
