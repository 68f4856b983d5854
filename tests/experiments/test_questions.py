"""Commands of the study: what they show they have written, and what is wrong they say."""

from importlib import import_module

import pytest

from experiments.framework.results import read_table
from experiments.testbed.facts import KEYS, build_tokenizer
from tests.experiments.tiny import cli
from tests.support import build


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny model in the words of the facts task, and a text of 500 of them."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    build("gpt_neox").save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    (folder / "text.txt").write_text(" ".join(KEYS[:50] * 10), encoding="utf-8")
    return folder


@pytest.fixture
def run(folder):
    def invoke(name, options, *more):
        given = [option.replace("TINY", str(folder)) for option in options.split()]
        return cli(name, *given, *more)

    return invoke


OWN = "tests.experiments.test_equivalence"
"""Where presses of a user's own are."""

SMALL = {
    "error": "--samples 2 --context 128",
    "streaming": "--model TINY --text TINY/text.txt",
    "quality": "--context 32 --facts 4 --samples 2",
    "overhead": "--model TINY --context 80 --rounds 2 --no-compiled --no-kvpress",
    "throughput": "--model TINY --no-kvpress --rounds 1 --tokens 1 --context 128,64",
    "headwise": "--facts 2 --samples 2 --context 64 --rounds 1 --ratio 0.5",
    "trace": "--model llama",
}
RUNS = [
    ("equivalence", "--model TINY --dtype bfloat16 --length 20 --press TOVA", 1),
    ("error", "--press snapkv,knorm --ratio 0.8", 34),
    ("streaming", "--tokens 495 --capacity 31 --n-sink 2 --full 200", 36),
    ("quality", "--press Knorm --ratio 0.5", 8),
    ("isolation", "--mechanism patches", 11),
    ("coexistence", "--mechanism hooks --companion torch.func.functional_call", 3),
    ("overhead", "--press adakv,KVzipPress", 6),
    ("headwise", "--contexts 64 --part decoding --part budgets", 33),
    ("throughput", "--press knorm,StreamingLLM --batch 1 --batch 2 --ratio 0.5 --no-memory", 20),
    ("throughput", "--part first-token --press snapkv,expectedattention,cam", 4),
    ("trace", "--press knorm --length 12 --decode 0", 22),
]


@pytest.mark.parametrize(("name", "options", "rows"), RUNS)
def test_a_command_writes_what_it_shows(run, tmp_path, name, options, rows):
    result = run(name, f"{SMALL.get(name, '')} {options}", "--output", str(tmp_path))
    assert result.exit_code == 0, result.output
    experiment = import_module(f"experiments.questions.{name}").EXPERIMENT
    tables = {path.stem: read_table(path) for path in tmp_path.glob("*.csv")}
    shown = " ".join(result.output.split())
    assert sum(map(len, tables.values())) == rows
    for finding in experiment.findings(tables):
        assert finding.text.replace("**", "") in shown
    for view in experiment.views(tables):
        assert all(str(row[0]) in shown for row in view.rows)
    figures = {path.stem for path in tmp_path.glob("*.svg")}
    assert figures == set(experiment.figures(tables))
    assert all((tmp_path / f"{figure}.svg").stat().st_size > 1_000 for figure in figures)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("equivalence", "--press SnapPress", "no press 'SnapPress'; there are AdaKV"),
        ("equivalence", f"--press {OWN}:NewestPress", "names 1 press; give two"),
        ("equivalence", "--press no_such:A,no_such:B", "No module named 'no_such'"),
        ("equivalence", f"--press {OWN}:A,{OWN}:B", "cannot import"),
        ("equivalence", "--press pathlib:Path,pathlib:Path", "'pathlib:Path' is no press"),
        (
            "equivalence",
            f"--press {OWN}:NoRatioPress,{OWN}:NewestPatch",
            "NoRatioPress' is no press",
        ),
        ("equivalence", "--ratio 1", "1.0 is not in [0, 1)"),
        ("equivalence", "--family lama", "'lama' is unknown; choose from llama"),
        ("equivalence", "--dtype int8", "choose from float32, bfloat16"),
        ("equivalence", "--family gemma2 --attn sdpa", "gemma2 has sdpa; eager"),
        ("equivalence", "--family llama --model TINY", "either --model or --family"),
        ("equivalence", "--length 1", "'--length'"),
        ("equivalence", "--device abacus", "cannot use 'abacus'"),
        ("architectures", "--type lama", "'lama' is no decoder"),
        ("error", "--ratio 1", "1.0 is not above 0"),
        ("error", "--context 40 --facts 30", "--context, --facts"),
        ("streaming", "--tokens 300", "300 tokens are too few"),
        ("streaming", "--tokens 495 --capacity 31 --n-sink 31", "max_capacity must be"),
        ("streaming", "--tokens 900 --capacity 31", "cannot stream 900 tokens"),
        ("quality", "--press NoSuch", "no press 'NoSuch'; there are AdaKV"),
        ("quality", "--press thinkpress", "evicts channels"),
        ("quality", "--ratio 1.5", "1.5 is not above 0"),
        ("quality", "--facts 40", "facts"),
        ("isolation", "--mechanism magic", "'magic' is unknown; choose from hooks"),
        ("coexistence", "--companion PEFT", "'PEFT' is unknown"),
        ("intrusiveness", "--environment TINY", "bin/python"),
        ("overhead", "--layers 0", "0 is less than 1"),
        ("overhead", "--model /no/such/folder", "/no/such/folder"),
        ("throughput", "--context 4k", "cannot read '4k'"),
        ("throughput", "--limit lots", "'lots' is no size"),
        ("throughput", "--dtype float8", "'float8' is unknown"),
        ("throughput", "--press SnapPress", "no press 'SnapPress'"),
        ("headwise", "--part budgets --facts 80", "facts is 80"),
        ("trace", "--press nosuch", "no press 'nosuch'; there are AdaKV"),
        ("trace", "--ratio 1.5", "compression_ratio=1.5"),
        ("trace", "--model gpt2 --press ExpectedAttention", "rotary position"),
        ("trace", "--model no/such/folder", "no folder 'no/such/folder'"),
    ],
)
def test_a_command_says_what_is_wrong(run, name, options, message):
    result = run(name, f"{SMALL.get(name, '')} {options}")
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())
