"""The study's folder, its report, and the README's tables from it."""

import json
import re
import shutil
import sys
from dataclasses import dataclass
from html.parser import HTMLParser
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated
from unittest.mock import patch

import pandas as pd
import pytest
import torch
import typer
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from rich.console import Console
from typer.testing import CliRunner

import experiments
from experiments import UserError
from experiments.cli import app
from experiments.framework import plots
from experiments.framework.evidence import Evidence
from experiments.framework.experiment import Contrast, Experiment, Finding, Related
from experiments.framework.manifest import MANIFEST
from experiments.framework.overview import overview
from experiments.framework.readme import blocks, fill
from experiments.framework.report import MAX_ROWS, related, write_report
from experiments.framework.results import describe, read_parts, read_table, write_table
from experiments.framework.tables import ResultTable
from experiments.study import run_study

COMMIT = "0" * 40


def line_figure(tables):
    figure = Figure(figsize=(3, 2))
    axes = figure.subplots()
    axes.plot(next(iter(tables.values()))["x"])
    axes.set_title("A line")
    axes.set_xlabel("row")
    axes.set_ylabel("x")
    return figure


@dataclass(frozen=True)
class Options:
    last: Annotated[float, typer.Option(help="The last x.")] = 3.5


class Tiny(Experiment[Options]):
    """One table with a column x, and a figure, both of the experiment's name."""

    method = "Three numbers are written down. Others would have another mean."
    full, quick = Options(), Options(last=2.9)

    def __init__(self, name):
        self.name, self.title = name, f"The {name} experiment"
        self.question = f"What about {name}?"

    def measure(self, options, progress):
        return {self.name: pd.DataFrame({"x": [0.1, 2.0, options.last], "word": ["a", "b", "c"]})}

    def findings(self, tables):
        mean = tables[self.name]["x"].mean()
        text = f"The mean of {self.name} is **{mean:.3f}**."
        return [Finding("mean", text, f"know {self.name}", "works")]

    def views(self, tables):
        return [ResultTable("The last.", ["x"], [[tables[self.name]["x"].iloc[-1]]], left=0)]

    def remarks(self, tables):
        return ["Nothing else."]

    def figures(self, tables):
        return {self.name: line_figure(tables)}


def tiny(name, **changed):
    """A `Tiny` with other attributes, or methods that take no `self`."""
    experiment = Tiny(name)
    for attribute, value in changed.items():
        setattr(experiment, attribute, value)
    return experiment


def failing(*_):
    raise RuntimeError("no <luck>\n [today]")


ONE, TWO = tiny("one"), tiny("two")
BROKEN = tiny("broken", measure=failing)


def study(chosen, folder):
    """Run a study; returns who failed, and what was printed."""
    printed = StringIO()
    console = Console(file=printed, width=200)
    with patch("experiments.study._commit", return_value=COMMIT):
        return run_study(chosen, folder, console, full=True), printed.getvalue()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("study")
    assert study([ONE, TWO], path)[0] == []
    return path


@pytest.fixture
def registered(monkeypatch):
    """Offer experiments to the commands, in place of the study's own."""

    def register(*chosen: Experiment) -> None:
        monkeypatch.setattr(experiments, "EXPERIMENTS", {e.name: "" for e in chosen})
        for experiment in chosen:
            module = SimpleNamespace(EXPERIMENT=experiment)
            monkeypatch.setitem(sys.modules, f"experiments.questions.{experiment.name}", module)

    return register


class Page(HTMLParser):
    """What a page refers to, says and shows."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags, self.references, self.links, self.images, self.text = [], [], [], [], ""
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        self.tags.append(tag)
        referred = [
            value
            for name, value in attrs
            if name in ("src", "href", "srcset", "data", "poster", "action")
        ]
        (self.links if tag == "a" else self.references).extend(referred)
        if attributes.get("role") == "img":
            self.images.append(attributes["aria-label"])

    def handle_data(self, data):
        self.text += data


def page(folder) -> Page:
    return Page((folder / "report.html").read_text(encoding="utf-8"))


# ---- the folder --------------------------------------------------------------------------------


def test_everything_is_written(folder):
    assert {path.name for path in folder.iterdir()} == {
        *("one.csv", "one.svg", "two.csv", "two.svg"),
        *("run.json", "report.md", "report.html"),
    }
    assert (folder / "one.csv").read_text() == "x,word\n0.1,a\n2.0,b\n3.5,c\n"
    assert (folder / "one.svg").read_bytes().startswith(b"<svg")


def test_manifest(folder):
    run = json.loads((folder / "run.json").read_text())
    assert set(run["versions"]) == {"python", "torch", "transformers", "wrapt", "pandas"}
    assert run["versions"]["torch"] == torch.__version__
    assert run["machine"]["cpu_count"] >= 1
    assert run["seed"] == 0
    assert run["date"].endswith("+00:00")
    assert "commit" in run
    assert list(run["experiments"]) == ["one", "two"]
    one = run["experiments"]["one"]
    assert one["tables"] == ["one"]
    assert one["figures"] == {"one": "A line: x against row"}
    assert one["error"] is None
    assert one["repeat"] == "python -m experiments one"
    assert one["seconds"] > 0


def test_an_experiment_that_fails_takes_nothing_from_the_others(tmp_path):
    failed, printed = study([ONE, BROKEN, TWO], tmp_path)
    assert failed == ["broken"]
    assert "Traceback" in printed
    assert "no <luck>" in printed
    assert {"one.csv", "one.svg", "two.csv", "two.svg"} <= {p.name for p in tmp_path.iterdir()}
    shown = page(tmp_path)
    assert "RuntimeError: no <luck> [today]" in shown.text
    assert "The mean of two is" in shown.text
    text = (tmp_path / "report.md").read_text()
    assert "**This experiment failed:** `RuntimeError: no <luck> [today]`" in text
    assert "The mean of two is" in text


def test_a_study_is_quick_unless_asked_for_the_full_one(tmp_path):
    assert run_study([ONE], tmp_path, Console(file=StringIO())) == []
    assert read_table(tmp_path / "one.csv")["x"].tolist() == [0.1, 2.0, 2.9]
    assert "Repeat it: python -m experiments study --only one" in page(tmp_path).text


@pytest.mark.parametrize("part", ["figures", "findings", "views", "remarks"])
def test_tables_survive_what_fails_to_read_them(tmp_path, part):
    def fail(tables):
        raise KeyError("column")

    assert study([tiny("one", **{part: fail}), TWO], tmp_path)[0] == ["one"]
    assert (tmp_path / "one.csv").exists()
    assert "KeyError: 'column'" in page(tmp_path).text


def test_two_experiments_cannot_write_one_table(tmp_path):
    assert study([ONE, tiny("two", measure=ONE.measure)], tmp_path)[0] == ["two"]
    assert "'one' is no name for a table or figure of two" in page(tmp_path).text
    assert read_table(tmp_path / "one.csv")["x"].tolist() == [0.1, 2.0, 3.5]


def test_a_second_study_replaces_the_first_and_nothing_else(tmp_path):
    study([ONE, TWO], tmp_path)
    (tmp_path / "README.md").write_text("mine")
    study([TWO], tmp_path)
    assert not (tmp_path / "one.csv").exists()
    assert not (tmp_path / "one.svg").exists()
    assert (tmp_path / "two.csv").exists()
    assert (tmp_path / "README.md").read_text() == "mine"
    assert "mean of one" not in page(tmp_path).text


def test_some_experiments_can_be_run_again_alone(tmp_path):
    study([ONE, TWO], tmp_path)
    ran = []

    def run(*_):
        ran.append("two")
        return {"two": pd.DataFrame({"x": [9.0], "word": ["new"]})}

    console = Console(file=StringIO())
    again = [tiny("one", measure=failing), tiny("two", measure=run)]
    assert run_study(again, tmp_path, console, only=["two"]) == []
    assert ran == ["two"]
    assert list(read_table(tmp_path / "one.csv")["x"]) == [0.1, 2.0, 3.5]
    assert list(read_table(tmp_path / "two.csv")["x"]) == [9.0]
    assert list(json.loads((tmp_path / "run.json").read_text())["experiments"]) == ["one", "two"]
    assert "The two experiment" in (tmp_path / "report.html").read_text()
    with pytest.raises(UserError, match="no experiment is called 'three'; there are one, two"):
        run_study(again, tmp_path, console, only=["three"])
    assert run_study([*again, BROKEN], tmp_path, console, only=["broken"]) == ["broken"]
    assert ran == ["two"]


def test_results_do_not_depend_on_the_order_of_experiments(tmp_path):
    def run(*_):
        return {"drawn": pd.DataFrame({"x": torch.rand(3).tolist()})}

    drawing = tiny("drawn", measure=run)
    study([drawing], tmp_path / "alone")
    study(
        [tiny("drawing", measure=lambda *_: {"drawing": run()["drawn"]}), drawing],
        tmp_path / "second",
    )
    alone, second = (tmp_path / name / "drawn.csv" for name in ("alone", "second"))
    assert alone.read_text() == second.read_text()


def test_csv_files_keep_values(tmp_path):
    table = pd.DataFrame(
        {
            "float": [0.1 + 0.2, 1e-17, float("nan")],
            "word": ["None", "NA", "null"],
            "flag": [True, False, True],
            "n": pd.array([1, None, 3], dtype="Int64"),
        }
    )
    write_table(table, tmp_path / "t.csv")
    read = read_table(tmp_path / "t.csv")
    assert read["float"].tolist()[:2] == table["float"].tolist()[:2]
    assert pd.isna(read["float"][2])
    assert read["word"].tolist() == ["None", "NA", "null"]
    assert read["flag"].tolist() == [True, False, True]
    assert read["n"].dropna().tolist() == [1, 3]


# ---- the report --------------------------------------------------------------------------------


def test_the_page_needs_no_other_file(folder):
    html = (folder / "report.html").read_text(encoding="utf-8")
    shown = Page(html)
    assert all(ref.startswith("data:") for ref in shown.references), shown.references
    assert all(link.startswith("#") for link in shown.links), shown.links
    assert not re.search(r"url\((?!#)", html)
    assert "@import" not in html
    assert "script" not in shown.tags
    assert "prefers-color-scheme: dark" in html
    assert 'name="viewport"' in html


def test_the_page_reads_as_a_paper(folder):
    shown = page(folder)
    assert shown.tags.count("h1") == 1
    text = " ".join(shown.text.split())
    order = [
        "must you patch its code",
        "know one works The mean of one is 1.867.",
        "know two works The mean of two is 1.867.",
        "What was asked What about one? What about two?",
        "The one experiment",
        "What about one?",
        "The mean of one is 1.867.",
        "Figure 1. A line: x against row",
        "Three numbers are written down.",
        "The last.",
        "Nothing else.",
        "Full table one.csv, 3 rows",
        "Repeat it: python -m experiments one",
        "The two experiment",
        "Figure 2.",
        "How this was made",
        torch.__version__,
    ]
    places = []
    for words in order:
        places.append(text.index(words, places[-1] if places else 0))
    assert places == sorted(places)
    assert shown.images == ["A line: x against row"] * 2
    assert shown.tags.count("details") == 4


def test_the_markdown_report(folder):
    text = (folder / "report.md").read_text()
    assert "| What about one? | The mean of one is **1.867**. |" in text
    assert "| know one | works | The mean of one is **1.867**. |" in text
    assert "![A line: x against row](one.svg)" in text
    assert "| x |\n|--:|\n| 3.5 |" in text
    assert "[two.csv](two.csv), 3 rows" in text


def test_a_report_is_rebuilt_from_the_folder_byte_by_byte(folder, tmp_path):
    copied = tmp_path / "elsewhere"
    copied.mkdir()
    for path in folder.iterdir():
        if not path.name.startswith("report"):
            (copied / path.name).write_bytes(path.read_bytes())
    write_report(copied, [TWO, ONE])  # the order is that of the study
    for name in ("report.md", "report.html"):
        assert (copied / name).read_bytes() == (folder / name).read_bytes()


def test_a_report_follows_its_tables(folder, tmp_path):
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "one.csv").write_text("x,word\n7.0,a\n")
    write_report(tmp_path, [ONE, TWO])
    assert "The mean of one is **7.000**." in (tmp_path / "report.md").read_text()
    assert "7.000" in page(tmp_path).text


def test_a_note_may_have_code_in_it_and_no_markup(folder, tmp_path):
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    told = json.loads((tmp_path / MANIFEST).read_text())
    told["experiments"]["one"]["note"] = "Measured with `--rounds 3`, <b>twice</b>."
    (tmp_path / MANIFEST).write_text(json.dumps(told))
    write_report(tmp_path, [ONE, TWO])
    html = (tmp_path / "report.html").read_text()
    assert "Measured with <code>--rounds 3</code>, &lt;b&gt;twice&lt;/b&gt;." in html
    assert "Measured with `--rounds 3`" in (tmp_path / "report.md").read_text()


def test_nothing_in_the_data_becomes_markup(tmp_path):
    evil = "<script>alert(1)</script>"
    experiment = tiny(
        "evil",
        title=evil,
        question=evil,
        measure=lambda *_: {"evil": pd.DataFrame({"x": [1], evil: [evil]})},
        findings=lambda tables: [Finding("evil", f"{evil} **1**")],
        method=evil,
    )
    study([experiment], tmp_path)
    shown = page(tmp_path)
    assert "script" not in shown.tags
    assert "strong" in shown.tags
    places = ("contents", "title", "question", "finding", "method", "column", "cell")
    assert shown.text.count(evil) == len(places)


def test_long_tables_are_cut_and_say_so(tmp_path):
    rows = MAX_ROWS + 5
    table = pd.DataFrame({"x": range(100_000, 100_000 + rows)})
    long = tiny("long", measure=lambda *_: {"long": table}, figures=lambda tables: {})
    study([long], tmp_path)
    shown = page(tmp_path)
    assert f"{rows} rows" in shown.text
    assert f"The first {MAX_ROWS} rows" in shown.text
    assert str(100_000 + MAX_ROWS - 1) in shown.text
    assert str(100_000 + MAX_ROWS) not in shown.text


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("No number at all.", "one number in bold"),
        ("**5** and **6**", "one number in bold"),
        ("**5 of 6**", "one number in bold"),
        ("**five**", "one number in bold"),
        ("**5** " + "word " * 25, "26 words, more than 25"),
    ],
)
def test_a_finding_is_short_and_has_one_number(text, words):
    with pytest.raises(ValueError, match=words):
        Finding("name", text)


def test_every_finding_has_an_anchor(folder):
    text = (folder / "report.html").read_text()
    assert 'id="one-mean"' in text
    assert 'href="#one-mean"' in text


def test_findings_say_on_what_evidence_they_rest(tmp_path):
    assert study([tiny("one", evidence=Evidence.TIME), TWO], tmp_path)[0] == []
    shown = page(tmp_path)
    assert shown.text.count(Evidence.TIME.value) == 2  # among the needs, and beside the finding
    assert Evidence.TIME.threat in shown.text
    assert Evidence.BITS.threat not in shown.text
    assert "**1.867**. *(timing on one machine)*" in (tmp_path / "report.md").read_text()
    assert blocks(tmp_path, [ONE, TWO])["one-mean"].endswith("**1.867**.")
    assert all(one.evidence for one in experiments.load_experiments())


def test_figures_take_the_colours_of_the_page():
    figure, (panel,) = plots.new_figure()
    panel.plot([1, 2], color=plots.INK)
    panel.set_title("1.23456")
    drawn = plots.svg(figure, "salt")
    assert drawn.startswith("<svg")
    assert "stroke: var(--ink)" in drawn
    assert ">1.23456<" in drawn, "coordinates are rounded, words are not"
    assert not {plots.INK, plots.MUTED, plots.GRID} & set(re.findall("#[0-9a-f]{6}", drawn))
    panel.plot([1, 3], **plots.press_line("KVzipPress"))  # black, where the page is light
    assert "#000000" not in plots.svg(figure, "salt")
    again = plots.svg(figure, "salt")  # the first drawing settles the layout
    assert again == plots.svg(figure, "salt")


def test_findings_stand_beside_what_others_say(tmp_path):
    line = Related("mean", "[Others](https://example.org)", "They say **2**.", "Here it is 1.867.")
    study([tiny("one", related=lambda tables: [line]), TWO], tmp_path)
    shown = page(tmp_path)
    text = " ".join(shown.text.split())
    assert "Others They say 2. Here it is 1.867. See the finding" in text
    assert "https://example.org" in shown.links  # to be followed, not to be loaded
    assert shown.links.count("#one-mean") == 3  # from the needs, beside the finding, and from here
    assert (
        "| [Others](https://example.org) | They say **2**. |"
        in (tmp_path / "report.md").read_text()
    )


def test_committed_results_are_compared_with_other_work():
    parts = read_parts(Path(__file__).parents[2] / "results", experiments.load_experiments())
    anchors = {
        f"{part.experiment.name}-{finding.name}" for part in parts for finding in part.findings
    }
    compared = related(parts)
    assert {anchor for anchor, *_ in compared} <= anchors
    works = " ".join(work for _, work, *_ in compared)
    assert all(name in works for name in ("kvpress", "AdaKV", "StreamingLLM", "KVzip"))
    assert not any("nan" in here for *_, here in compared)


def test_without_related_work_there_is_no_such_section(folder):
    assert "Related work" not in page(folder).text


def test_the_first_figure_sets_hooks_beside_patches(tmp_path):
    bars = {"hooks": 1.0, "patches": 2.5, "something else": 40.0}
    study([tiny("one", contrasts=lambda tables: [Contrast("Costs", bars)])], tmp_path)
    assert (tmp_path / "overview.svg").exists()
    assert page(tmp_path).images[0].startswith("Hooks and patches side by side")
    assert "](overview.svg)" in (tmp_path / "report.md").read_text()
    (panel,) = overview([Contrast("Costs", bars)]).axes
    assert [bar.get_width() for bar in panel.patches] == [1.0, 2.5, 40.0]
    assert [label.get_text() for label in panel.texts] == ["1", "2.5", "40"]
    colours = [to_hex(bar.get_facecolor()) for bar in panel.patches]
    assert colours == [plots.mechanism_colour(n).lower() for n in ("hook", "patch", "bare")]


def test_what_a_figure_shows():
    figure = Figure()
    left, right = figure.subplots(1, 2)
    for axes, title in ((left, "Left\nside"), (right, "Right")):
        axes.set_title(title, loc="left")
        axes.set_xlabel("ratio")
    left.set_ylabel("answers")
    assert describe(figure) == "Left side; Right: answers against ratio"
    figure.set_label("Answers by ratio")
    assert describe(figure) == "Answers by ratio"


# ---- commands ----------------------------------------------------------------------------------

runner = CliRunner()


def test_study_and_report_commands(registered, tmp_path):
    registered(ONE, TWO)
    result = runner.invoke(app, ["study", "--output", str(tmp_path / "s")])
    assert result.exit_code == 0, result.output
    assert "2 of 2: The two experiment" in result.stderr
    html = (tmp_path / "s" / "report.html").read_bytes()
    (tmp_path / "s" / "report.html").unlink()
    result = runner.invoke(app, ["report", "--input", str(tmp_path / "s")])
    assert result.exit_code == 0, result.output
    assert (tmp_path / "s" / "report.html").read_bytes() == html


def test_study_exits_with_1_if_an_experiment_fails(registered, tmp_path):
    registered(BROKEN, TWO)
    result = runner.invoke(app, ["study", "--output", str(tmp_path)])
    assert result.exit_code == 1
    assert "[today]" in result.stdout
    assert "mean of two" in page(tmp_path).text


def test_report_can_redraw(registered, tmp_path):
    study([ONE], tmp_path)
    before = (tmp_path / "one.svg").read_bytes()

    def relabelled(tables):
        figure = line_figure(tables)
        figure.axes[0].set_title("A better title")
        return {"one": figure}

    registered(tiny("one", figures=relabelled))
    runner.invoke(app, ["report", "--input", str(tmp_path)], catch_exceptions=False)
    assert (tmp_path / "one.svg").read_bytes() == before
    runner.invoke(app, ["report", "--input", str(tmp_path), "--redraw"], catch_exceptions=False)
    assert (tmp_path / "one.svg").read_bytes() != before
    assert page(tmp_path).images[0] == "A better title: x against row"


def test_report_refuses_a_folder_that_holds_no_study(registered, folder, tmp_path):
    registered(ONE)
    for where, words in ((tmp_path, "holds no study"), (folder, "'two', which is not")):
        result = runner.invoke(app, ["report", "--input", str(where)])
        assert result.exit_code == 2
        assert words in result.stderr
    (tmp_path / MANIFEST).write_text("{")
    assert "is not JSON" in runner.invoke(app, ["report", "--input", str(tmp_path)]).stderr


# ---- the README and other pages --------------------------------------------------------------

README = """# Title

<!-- table: answers -->
<!-- /table -->

Between.

<!-- table: two-mean -->
old
<!-- /table -->
End.
"""


def test_readme_blocks_are_filled_once(folder):
    contents = blocks(folder, [ONE, TWO])
    assert set(contents) == {"answers", "one-mean", "two-mean"}
    filled, stale = fill(README, contents)
    assert stale == ["answers", "two-mean"]
    answers = contents["answers"]
    assert answers.startswith(f"## {ONE.title}\n\n- The mean of one is **1.867**.\n")
    assert f"](../{folder.name}/one.svg)" in answers
    assert f"](../{folder.name}/report.html#two)" in answers
    assert filled == (
        f"# Title\n\n<!-- table: answers -->\n\n{answers}\n\n<!-- /table -->\n\nBetween.\n\n"
        "<!-- table: two-mean -->\n\n- The mean of two is **1.867**.\n\n<!-- /table -->\nEnd.\n"
    )
    assert fill(filled, contents) == (filled, [])


def test_blocks_of_findings(folder):
    contents = blocks(folder, [ONE, TWO])
    opening = "<!-- table: two-mean one-mean -->"
    filled, stale = fill(f"{opening}\n<!-- /table -->\n", contents)
    assert stale == ["two-mean", "one-mean"]
    assert filled == (
        f"{opening}\n\n"
        "- The mean of two is **1.867**.\n- The mean of one is **1.867**.\n\n"
        "<!-- /table -->\n"
    )


def test_readme_command(registered, folder, tmp_path):
    registered(ONE, TWO)
    path = tmp_path / "README.md"
    path.write_text(README)
    options = ["readme", "--page", str(path), "--results", str(folder)]

    stale = runner.invoke(app, [*options, "--check"])
    assert stale.exit_code == 1
    assert "answers, two-mean" in stale.stderr
    assert path.read_text() == README

    assert runner.invoke(app, options).exit_code == 0
    fresh = path.read_text()
    assert "1.867" in fresh
    assert runner.invoke(app, [*options, "--check"]).exit_code == 0
    assert runner.invoke(app, options).exit_code == 0
    assert path.read_text() == fresh

    path.write_text(fresh.replace("two is **1.867**.\n\n<!--", "two is **1.868**.\n\n<!--"))
    stale = runner.invoke(app, [*options, "--check"])
    assert stale.exit_code == 1
    assert f"{folder} holds: two-mean\n" in stale.stderr


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"commit": "1" * 40}, "two ran at 1111"),
        ({"versions": {"torch": "1.0"}}, "two ran with other versions"),
        ({"options": "Options(last=9)"}, "two ran with other options"),
        ({"note": "by hand"}, "two has a note"),
        ({"figures": {}}, "two.svg belongs to no experiment"),
    ],
)
def test_results_of_more_than_one_run_fail_the_check(registered, tmp_path, changed, words):
    registered(ONE, TWO)
    study([ONE, TWO], tmp_path / "results")
    page = tmp_path / "README.md"
    page.write_text(README)
    options = ["readme", "--page", str(page), "--results", str(tmp_path / "results")]
    assert runner.invoke(app, options).exit_code == 0
    path = tmp_path / "results" / MANIFEST
    told = json.loads(path.read_text())
    told["experiments"]["two"] |= changed
    path.write_text(json.dumps(told))
    result = runner.invoke(app, [*options, "--check"])
    assert result.exit_code == 2
    assert words in result.stderr


def test_readme_command_fills_all_pages_of_a_folder(registered, folder, tmp_path, monkeypatch):
    registered(ONE, TWO)
    (tmp_path / "docs" / "deep").mkdir(parents=True)
    pages = [tmp_path / "README.md", tmp_path / "docs" / "deep" / "one.md"]
    for page in pages:
        page.write_text(README)
    plain = tmp_path / "docs" / "plain.md"
    plain.write_text("# Title\n")
    monkeypatch.chdir(tmp_path)
    options = ["readme", "--results", str(folder)]
    citation = tmp_path / "CITATION.cff"
    citation.write_text(
        "commit: kept\nreferences:\n  - type: data\n    date-released: 2001-01-01\n"
    )

    assert runner.invoke(app, options).exit_code == 0
    date = json.loads((folder / "run.json").read_text())["date"][:10]
    assert citation.read_text().startswith("commit: kept\n")
    assert citation.read_text().endswith(f"    date-released: {date}\n")
    assert pages[0].read_text() == pages[1].read_text() != README
    assert plain.read_text() == "# Title\n"
    assert runner.invoke(app, [*options, "--check"]).exit_code == 0
    pages[1].write_text(README)
    stale = runner.invoke(app, [*options, "--check"])
    assert stale.exit_code == 1
    assert "deep/one.md does not show" in stale.stderr
    assert "README.md does not" not in stale.stderr


def test_readme_command_says_which_page_there_is_not(tmp_path):
    result = runner.invoke(app, ["readme", "--page", str(tmp_path / "no.md")])
    assert result.exit_code == 2
    assert "no.md" in result.stderr


def test_a_readme_without_tables_needs_no_results(tmp_path):
    path = tmp_path / "README.md"
    path.write_text("# Title\n")
    result = runner.invoke(app, ["readme", "--page", str(path), "--results", "nowhere", "--check"])
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("<!-- table: three -->\n<!-- /table -->", "no table is called 'three'; there are answers"),
        ("\n<!-- table: one-mean -->\n", "line 2: the block opened here lacks its"),
        ("<!-- /table -->", "line 1: <!-- /table --> closes a block that nothing opens"),
        (
            "<!-- table: one-mean -->\n<!-- table: two-mean -->\n<!-- /table -->",
            "line 2: <!-- table: two-mean --> inside the block that line 1 opens",
        ),
    ],
)
def test_wrong_markers_are_refused(folder, text, words):
    with pytest.raises(UserError) as refused:
        fill(text, blocks(folder, [ONE, TWO]))
    assert words in str(refused.value)


def test_a_failed_study_fills_no_readme(tmp_path):
    study([ONE, BROKEN], tmp_path)
    with pytest.raises(UserError, match="broken failed in the study"):
        blocks(tmp_path, [ONE, BROKEN])


def test_tables_that_are_not_those_of_the_experiment(folder, tmp_path):
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / "one.csv").write_text("y\n1\n")
    with pytest.raises(UserError, match="has no table or column 'x' of 'one'"):
        write_report(tmp_path, [ONE, TWO])
    manifest = json.loads((tmp_path / "run.json").read_text())
    manifest["experiments"]["one"]["tables"] = []
    (tmp_path / "run.json").write_text(json.dumps(manifest))
    with pytest.raises(UserError, match="has no table or column 'one' of 'one'"):
        write_report(tmp_path, [ONE, TWO])
