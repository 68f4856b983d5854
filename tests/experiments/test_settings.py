"""Presses as text, settings and the cells that they make: planned, or refused in words."""

import contextlib
from dataclasses import fields, replace
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import settings as drawn
from hypothesis import strategies as st

import hooks_impl
import patch_impl
from experiments import UserError
from experiments.answers import sweep as sweeps
from experiments.answers.cells import plan
from experiments.answers.presses import make_press
from experiments.answers.settings import Settings, settings_from
from press_core import HyperparameterError, Tokens
from tests.experiments.sweeping import SMALL
from tests.experiments.test_equivalence import NewestPatch, NewestPress
from tests.experiments.tiny import CASES, REFUSED
from tests.support import table_beside

EXAMPLES = sorted(Path(sweeps.__file__).parent.glob("examples/*.yaml"))
MADE = table_beside(__file__, "presses")
DECODING = "DecodingPress(KnormPress())"


# ---- presses as text ---------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "amount", "python"), MADE)
def test_a_press_is_what_its_text_says(text, amount, python):
    for mechanism, package in (("hook", hooks_impl), ("patch", patch_impl)):
        press = make_press(text, mechanism, eval(amount), 7)
        assert press == eval(python, {**vars(package), "Tokens": Tokens})
        assert make_press(repr(press), mechanism, None, 0) == press


def test_two_classes_of_ones_own_are_a_press():
    text = f"{NewestPress.__module__}:NewestPress, {NewestPatch.__module__}:NewestPatch"
    for mechanism, made in (("hook", NewestPress(0.25)), ("patch", NewestPatch(0.25))):
        assert make_press(text, mechanism, 0.25, 7) == made


def test_parts_may_be_in_a_tuple():
    press = hooks_impl.ComposedPress((hooks_impl.KnormPress(0.2), hooks_impl.SnapKVPress(0.3)))
    assert make_press(repr(press), "hook", None, 0) == press


@pytest.mark.parametrize(
    ("text", "amount", "words"),
    [
        *REFUSED["presses"],
        ("(" * 9999, None, "cannot read the press"),
        ("-" * 9999 + "1", None, "cannot read the press|is not allowed"),
    ],
)
def test_what_is_no_press_is_refused_in_words(text, amount, words):
    told = amount and (Tokens(amount["budget"]) if "budget" in amount else amount["ratio"])
    with pytest.raises(UserError, match=words):
        make_press(text, "hook", told, 0)


# ---- settings and cells ------------------------------------------------------------------------


def test_flags_override_the_file(tmp_path):
    file = tmp_path / "sweep.yaml"
    file.write_text("press: [KnormPress, TOVAPress]\nratio: 0.25\nsamples: 3\nthreads: null\n")
    settings = settings_from(file, {"samples": 5, "ratio": None, "dataset": ["facts/single"]})
    assert settings == Settings(
        press=("KnormPress", "TOVAPress"), ratio=(0.25,), samples=5, dataset=("facts/single",)
    )
    file.write_text("generation: {do_sample: true, temperature: 0.5}")
    assert settings_from(file, {}).generation == {"do_sample": True, "temperature": 0.5}
    assert settings_from(None, {}) == Settings()
    file.write_text("budget: 64")  # in place of ratios that nobody gave
    assert (settings_from(file, {}).ratio, settings_from(file, {}).budget) == ((0.0,), (64,))
    assert settings_from(file, {"ratio": [0.5]}).ratio == (0.5,)
    file.write_text("budget: []")
    assert settings_from(file, {}) == Settings()


@pytest.mark.parametrize(
    ("text", "words"), [*REFUSED["settings"], *REFUSED["code"], ("[" * 2000, "is not YAML")]
)
def test_settings_that_cannot_be_or_would_run_code_are_named(tmp_path, text, words):
    (tmp_path / "sweep.yaml").write_text(text)
    with pytest.raises(UserError, match=words):
        settings_from(tmp_path / "sweep.yaml", {})
    with pytest.raises(UserError, match="there is no file"):
        settings_from(tmp_path / "other.yaml", {})


WORDS = [*"()[]{}=:,.-\\' ", "SnapKVPress", "AdaKVPress", "ratio", "window_size", "0.5", "lambda "]
ATOMS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9) | st.dates()
VALUES = st.recursive(
    ATOMS | st.lists(st.sampled_from(WORDS), max_size=14).map("".join),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(ATOMS, inner, max_size=3),
    max_leaves=6,
)
SETTINGS = st.dictionaries(st.sampled_from([f.name for f in fields(Settings)]) | ATOMS, VALUES)


def test_presses_and_settings_read_anything_without_a_traceback(tmp_path):
    """Whatever a file says is settings that can be planned, or is refused in words."""
    file = tmp_path / "sweep.yaml"

    @given(st.binary(max_size=40) | SETTINGS.map(lambda told: yaml.safe_dump(told).encode()))
    @drawn()
    def read(text):
        file.write_bytes(text)
        with contextlib.suppress(UserError, HyperparameterError):
            plan(settings_from(file, {}))

    read()
    assert [path.name for path in tmp_path.iterdir()] == ["sweep.yaml"]


def test_cells_are_the_grid_each_once():
    settings = Settings(
        dataset=("facts", "facts/single"),
        press=("SnapKVPress", DECODING, "SnapKVPress"),
        ratio=(0.0, 0.5, 0.8),
    )
    cells = plan(settings)
    assert len(set(cells)) == len({cell.key for cell in cells}) == len(cells) == 3 * (1 + 4 + 2)
    single = [cell[1:] for cell in cells if cell.dataset == "facts/single@512"]
    assert [list(cell) for cell in single] == CASES["grid"]


def test_cells_of_budgets():
    presses = tuple(dict.fromkeys(press for press, *_ in CASES["budgets"]))
    asked = {"ratio": (0.5,), "budget": (64, 32), "mechanism": ("hook",)}
    cells = plan(Settings(dataset=("facts/single",), press=presses, **asked))
    assert len({cell.key for cell in cells}) == len(cells)
    assert [[cell.press, cell.ratio, cell.budget] for cell in cells] == CASES["budgets"]
    made = [cell.make(0) for cell in cells[1:4]]
    assert [made[0].amount, made[1].amount, made[2].target_size] == [Tokens(64), Tokens(32), 64]


@pytest.mark.parametrize(("changed", "error", "words"), REFUSED["plans"])
def test_mistakes_show_before_anything_is_run(changed, error, words):
    settings = replace(SMALL, **{name: tuple(given) for name, given in changed.items()})
    with pytest.raises({"user": UserError, "press": HyperparameterError}[error], match=words):
        plan(settings)


@pytest.mark.parametrize("path", EXAMPLES, ids=[path.stem for path in EXAMPLES])
def test_examples_can_be_planned(path):
    settings = settings_from(path, {})
    assert plan(settings)
    if path.stem == "study":
        assert settings == Settings()
