"""The study's folder, its report, and the README's tables from it."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pandas as pd
import pytest
import torch
from matplotlib.colors import to_hex

import experiments
from experiments import UserError
from experiments.framework import plots, report
from experiments.framework.experiment import Contrast, Evidence, Finding
from experiments.framework.manifest import MANIFEST, check_one_run, read_manifest
from experiments.framework.plots import overview
from experiments.framework.readme import blocks
from experiments.framework.report import MAX_ROWS, write_report
from experiments.framework.results import read_parts, read_table, write_tables
from tests.experiments.tiny import BROKEN, ONE, TWO, cli, note, refused, study, succeeded, tiny
from tests.support import table_beside


class Page(HTMLParser):
    """What the page of a study refers to, says and shows."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.tags, self.references, self.links, self.images, self.text = [], [], [], [], ""
        self.feed((folder / "report.html").read_text(encoding="utf-8"))
        self.text = " ".join(self.text.split())

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        self.tags.append(tag)
        named = ("src", "href", "srcset", "data", "poster", "action")
        referred = [value for name, value in attrs if name in named]
        (self.links if tag == "a" else self.references).extend(referred)
        if attributes.get("role") == "img":
            self.images.append(attributes["aria-label"])

    def handle_data(self, data):
        self.text += data


def markdown(folder) -> str:
    return (folder / "report.md").read_text()


# ---- the folder --------------------------------------------------------------------------------


def test_everything_is_written(folder):
    files = {"one.csv", "one.svg", "two.csv", "two.svg", MANIFEST, "report.md", "report.html"}
    assert {path.name for path in folder.iterdir()} == files
    assert (folder / "one.csv").read_text() == "x,word\n0.1,a\n2.0,b\n3.5,c\n"
    assert (folder / "one.svg").read_bytes().startswith(b"<svg")
    run = json.loads((folder / MANIFEST).read_text())
    assert {"python", "torch", "transformers", "wrapt", "numpy"} <= set(run["versions"])
    assert all(entry["date"] for entry in run["experiments"].values())
    assert run["versions"]["torch"] == torch.__version__
    assert run["machine"]["cpu_count"] >= 1
    assert (run["seed"], run["commit"], run["waiting"]) == (0, "0" * 40, [])
    assert run["date"].endswith("+00:00")
    assert list(run["experiments"]) == ["one", "two"]
    one = run["experiments"]["one"]
    assert (one["tables"], one["figures"]) == (["one"], {"one": "A line: x against row"})
    assert (one["error"], one["repeat"]) == (None, "python -m experiments one")
    assert one["seconds"] > 0


def missing(tables):
    raise KeyError("column")


@pytest.mark.parametrize(
    ("changed", "error"),
    [
        ({"measure": BROKEN.measure}, "RuntimeError: no <luck> [today]"),
        ({"measure": ONE.measure}, "'one' is no name"),
        ({"measure": lambda *_: {"bad": pd.DataFrame({"x": []})}}, "UserError: cannot read the"),
        *(({part: missing}, "KeyError: 'column'") for part in ("figures", "findings")),
        *(({part: missing}, "KeyError: 'column'") for part in ("views", "contrasts")),
    ],
)
def test_an_experiment_that_fails_takes_nothing_from_the_others(tmp_path, changed, error):
    failed, printed = study([ONE, tiny("bad", **changed), TWO], tmp_path)
    assert failed == ["bad"]
    assert "Traceback" in printed
    assert {"one.csv", "one.svg", "two.csv", "two.svg"} <= {p.name for p in tmp_path.iterdir()}
    unwritten = (BROKEN.measure, ONE.measure)
    assert (tmp_path / "bad.csv").exists() == (changed.get("measure") not in unwritten)
    assert read_table(tmp_path / "one.csv")["x"].tolist() == [0.1, 2.0, 3.5]
    shown = Page(tmp_path).text
    assert error in shown
    assert "The mean of two is" in shown
    assert f"**This experiment failed:** `{error}" in markdown(tmp_path).replace("ValueError: ", "")


def test_a_study_is_quick_unless_asked_for_the_full_one(tmp_path):
    assert study([ONE], tmp_path, full=False)[0] == []
    assert read_table(tmp_path / "one.csv")["x"].tolist() == [0.1, 2.0, 2.9]
    assert "Repeat it: python -m experiments study --only one" in Page(tmp_path).text


def test_a_second_study_replaces_the_first_and_nothing_else(folder):
    (folder / "README.md").write_text("mine")
    study([TWO], folder)
    files = {path.name for path in folder.iterdir()}
    assert files == {"two.csv", "two.svg", MANIFEST, "report.md", "report.html", "README.md"}
    assert (folder / "README.md").read_text() == "mine"
    assert "mean of one" not in Page(folder).text


def test_some_experiments_can_be_run_again_alone(folder):
    def run(*_):
        return {"two": pd.DataFrame({"x": [9.0], "word": ["new"]})}

    again = [tiny("one", measure=BROKEN.measure), tiny("two", measure=run), BROKEN]
    assert study(again, folder, only=["two"])[0] == []
    assert list(read_table(folder / "one.csv")["x"]) == [0.1, 2.0, 3.5]
    assert list(read_table(folder / "two.csv")["x"]) == [9.0]
    assert "The one experiment" in Page(folder).text
    assert study(again, folder, only=["broken"])[0] == ["broken"]
    run = json.loads((folder / MANIFEST).read_text())
    assert list(run["experiments"]) == ["one", "two", "broken"]


def test_results_do_not_depend_on_the_order_of_experiments(tmp_path):
    def drawing(name):
        return tiny(name, measure=lambda *_: {name: pd.DataFrame({"x": torch.rand(3).tolist()})})

    study([drawing("one"), drawing("two")], tmp_path)
    assert (tmp_path / "one.csv").read_text() == (tmp_path / "two.csv").read_text()


def test_csv_files_keep_values(tmp_path):
    columns = {"float": [0.1 + 0.2, 1e-17, float("nan")], "n": [1.0, float("nan"), 3.0]}
    columns |= {"word": ["None", 'a\r"b\r\nc"', "null"], "flag": [True, False, True]}
    table = pd.DataFrame(columns)
    write_tables({"t": table}, tmp_path)
    pd.testing.assert_frame_equal(read_table(tmp_path / "t.csv"), table, check_exact=True)


# ---- the report --------------------------------------------------------------------------------


def test_the_page_reads_as_a_paper_and_needs_no_other_file(folder):
    html, shown = (folder / "report.html").read_text(encoding="utf-8"), Page(folder)
    assert all(ref.startswith("data:") for ref in shown.references), shown.references
    assert all(link.startswith("#") for link in shown.links), shown.links
    assert not re.search(r"url\((?!#)|@import", html)
    assert "script" not in shown.tags
    for words in ("prefers-color-scheme: dark", 'name="viewport"', 'id="one-mean"'):
        assert words in html
    assert "#one-mean" in shown.links
    assert shown.tags.count("h1") == 1
    place = 0
    for words in [*table_beside(__file__, "cases")["paper"], torch.__version__]:
        place = shown.text.index(words, place)
    assert shown.images == ["A line: x against row"] * 2
    assert shown.tags.count("details") == 4
    assert "Related work" not in shown.text


def test_the_markdown_report(folder):
    text = markdown(folder)
    assert "| What about one? | The mean of one is **1.867**. |" in text
    assert "| know one | works | The mean of one is **1.867**. |" in text
    assert "![A line: x against row](one.svg)" in text
    assert "| x |\n|--:|\n| 3.5 |" in text
    assert "[two.csv](two.csv), 3 rows" in text


def test_nothing_in_the_data_becomes_markup(tmp_path):
    evil = "<script>alert(1)</script>"
    made = {"measure": lambda *_: {"evil": pd.DataFrame({"x": [1], evil: [evil]})}}
    made |= {"findings": lambda tables: [Finding("evil", f"{evil} **1**")]}
    experiment = tiny("evil", title=evil, question=evil, method=evil, **made)
    study([experiment], tmp_path)
    note(tmp_path, "evil", note=f"Measured with `--rounds 3`, {evil}.")
    write_report(tmp_path, [experiment])
    shown = Page(tmp_path)
    assert "script" not in shown.tags
    assert "strong" in shown.tags
    places = ("contents", "title", "question", "finding", "method", "note", "column", "cell")
    assert shown.text.count(evil) == len(places)
    assert "Measured with <code>--rounds 3</code>" in (tmp_path / "report.html").read_text()


def test_long_tables_are_cut_and_say_so(tmp_path):
    rows = MAX_ROWS + 5
    table = pd.DataFrame({"x": range(100_000, 100_000 + rows), "x_units": "1 2"})
    study([tiny("long", measure=lambda *_: {"long": table}, figures=lambda tables: {})], tmp_path)
    shown = Page(tmp_path).text
    for words in (f"{rows} rows", f"The first {MAX_ROWS} rows", str(100_000 + MAX_ROWS - 1)):
        assert words in shown
    assert not any(words in shown for words in (str(100_000 + MAX_ROWS), "x_units"))


@pytest.mark.parametrize(("text", "words"), table_beside(__file__, "refusals")["findings"].items())
def test_a_finding_is_short_and_has_one_number(text, words):
    with pytest.raises(ValueError, match=words):
        Finding("name", text)


def test_findings_say_on_what_evidence_they_rest(tmp_path):
    assert study([tiny("one", evidence=Evidence.TIME), TWO], tmp_path)[0] == []
    shown = Page(tmp_path)
    assert shown.text.count(Evidence.TIME.value) == 2  # among the needs, and beside the finding
    assert Evidence.TIME.threat in shown.text
    assert Evidence.BITS.threat not in shown.text
    assert "**1.867**. *(timing on one machine)*" in markdown(tmp_path)
    assert blocks(tmp_path, [ONE, TWO])["one-mean"].endswith("**1.867**.")
    assert all(one.evidence for one in experiments.load_experiments())


def test_findings_stand_beside_what_others_say(tmp_path, monkeypatch):
    line = {"work": "[Others](https://example.org)", "says": "They say **2**."}
    monkeypatch.setitem(report._WORKS, "one-mean", [line])
    study([ONE, TWO], tmp_path)
    shown = Page(tmp_path)
    assert "Others They say 2. The mean of one is 1.867. See the finding" in shown.text
    assert "https://example.org" in shown.links  # to be followed, not to be loaded
    assert shown.links.count("#one-mean") == 3  # from the needs, beside the finding, and from here
    assert "| [Others](https://example.org) | They say **2**. |" in markdown(tmp_path)


def test_the_committed_report_is_read_off_the_committed_tables():
    results, chosen = Path(__file__).parents[2] / "results", experiments.load_experiments()
    check_one_run(results, read_manifest(results), {each.name: repr(each.full) for each in chosen})
    parts, said = read_parts(results, chosen), markdown(results)
    assert {anchor for *_, anchor, _ in report.related(parts)} == set(report._WORKS)
    # What other interpreters measure: a study goes on without it.
    asked = "overhead-kvpress", "throughput-kvpress", "throughput-inside", "architectures-oldest"
    assert all(f'<a id="{anchor}"></a>' in said for anchor in asked)
    assert read_table(results / "intrusiveness_libraries.csv")["error"].isna().all()
    found = [finding for part in parts for finding in part.findings]
    assert all(f"{each.text} *({each.basis})*" in said for each in found)
    again = read_table(results / "seeds.csv").query("shift != 0")["number"]
    assert sorted(number for each in found for number in each.reseeded) == sorted(again)
    views = [view for part in parts for view in part.experiment.views(part.tables)]
    assert all(view.markdown() in said for view in views)


def test_the_first_figure_sets_hooks_beside_patches(tmp_path):
    contrast = Contrast("Costs", {"hooks": 1.0, "patches": 2.5, "something else": 40.0})
    study([tiny("one", contrasts=lambda tables: [contrast])], tmp_path)
    assert (tmp_path / "overview.svg").exists()
    assert Page(tmp_path).images[0].startswith("Hooks and patches side by side")
    assert "](overview.svg)" in markdown(tmp_path)
    (panel,) = overview([contrast]).axes
    assert [bar.get_width() for bar in panel.patches] == [1.0, 2.5, 40.0]
    assert [label.get_text() for label in panel.texts] == ["1", "2.5", "40"]
    colours = [to_hex(bar.get_facecolor()) for bar in panel.patches]
    assert colours == [plots.MECHANISM_LOOKS[n][0].lower() for n in ("hook", "patch", "bare")]


def test_figures_take_the_colours_of_the_page():
    figure, (panel,) = plots.new_figure()
    panel.plot([1, 2], color=plots.INK)
    panel.plot([1, 3], color="#000000")  # black, where the page is light
    panel.set_title("1.23456")
    plots.svg(figure, "salt")  # the first drawing settles the layout
    drawn = plots.svg(figure, "salt")
    assert drawn.startswith("<svg")
    assert "stroke: var(--ink)" in drawn
    assert ">1.23456<" in drawn, "coordinates are rounded, words are not"
    themed = {plots.INK, plots.MUTED, plots.GRID, "#000000"}
    assert not themed & set(re.findall("#[0-9a-f]{6}", drawn))
    assert drawn == plots.svg(figure, "salt")


# ---- commands ----------------------------------------------------------------------------------


def test_study_and_report_commands(registered, tmp_path):
    registered(ONE, TWO)
    assert "2 of 2: The two experiment" in succeeded("study", "--output", tmp_path).stderr
    written = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    for name in ("report.md", "report.html", "one.svg"):
        (tmp_path / name).unlink()
    registered(TWO, ONE)  # the order is that of the study
    succeeded("report", "--input", tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == written
    registered(BROKEN, TWO)
    told = cli("study", "--output", tmp_path, status=1).stderr
    assert "failed: RuntimeError: no <luck> [today]" in told
    assert "mean of two" in Page(tmp_path).text


def test_a_report_follows_its_tables_and_figures(registered, folder):
    def relabelled(tables):
        (figure,) = ONE.figures(tables).values()
        figure.set_label("A better label")
        return {"one": figure}

    registered(tiny("one", figures=relabelled), TWO)
    before = (folder / "one.svg").read_bytes()
    (folder / "one.csv").write_text("x,word\n7.0,a\n")
    cli("report", "--input", folder, catch_exceptions=False)
    assert "The mean of one is **7.000**." in markdown(folder)
    assert (folder / "one.svg").read_bytes() != before
    assert Page(folder).images[0] == "A better label"
    assert "![A better label](one.svg)" in markdown(folder)


def test_report_refuses_a_folder_that_holds_no_study(registered, finished, tmp_path):
    registered(ONE)
    for where, words in ((tmp_path, "holds no study"), (finished, "'two', which is not")):
        assert words in refused("report", "--input", where)


def test_tables_that_are_not_those_of_the_experiment(folder):
    with pytest.raises(UserError, match="of 'one': 'column'"):
        write_report(folder, [tiny("one", figures=missing), TWO])
    (folder / "one.csv").write_text("y\n1\n")
    with pytest.raises(UserError, match="of 'one': 'x'"):
        write_report(folder, [ONE, TWO])
    note(folder, "one", tables=[])
    with pytest.raises(UserError, match="of 'one': 'one'"):
        write_report(folder, [ONE, TWO])
