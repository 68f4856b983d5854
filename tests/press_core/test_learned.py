"""What presses learn about a model: formulas, learning, files, and where they are looked for."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from press_core import AttentionCall
from press_core.learned.calibration import Calibration, CalibrationError
from press_core.learned.examples import Examples
from press_core.learned.expected_attention_stats import (
    ExpectedAttentionStats,
    ExpectedAttentionWithStats,
)
from press_core.learned.fast_kvzip import KVzipGates
from press_core.learned.kvzap import KVzap, KVzapRegressor, fit_regressor
from press_core.learned.lukv import BudgetCurves
from press_core.learned.qfilter import QFilter, QFilters, filter_directions
from press_core.presses.expected_attention import ExpectedAttention, query_statistics
from tests.press_core.drawn import (
    BATCH,
    DIM,
    KV,
    KV_HEADS,
    LAYERS,
    WIDTH,
    Prepared,
    drawn,
    drawn_call,
    fitted,
    site,
)

LENGTH = 17
FILTERS, STATS = fitted(QFilters), fitted(ExpectedAttentionStats)
LINEAR = fitted(KVzapRegressor, "weight", "bias", width=WIDTH)
MLP = fitted(KVzapRegressor)
GATES = fitted(KVzipGates, rank=3, n_base=5)
CURVES = BudgetCurves(drawn(99, LAYERS, KV_HEADS).sigmoid())
PRESSES: dict[str, tuple[Any, Calibration]] = {
    "filters": (QFilter(0.5), FILTERS),
    "stats": (ExpectedAttentionWithStats(0.5, n_future_positions=9), STATS),
    "linear": (KVzap(0.5), LINEAR),
    "mlp": (KVzap(0.5), MLP),
}
FILES = {
    "qfilters.safetensors": FILTERS,
    "expected_attention_stats.safetensors": STATS,
    "kvzap-linear.safetensors": LINEAR,
    "kvzap-mlp.safetensors": MLP,
    "fast_kvzip_gates.safetensors": GATES,
    "lukv_curves.safetensors": CURVES,
}


def a_call(length: int = LENGTH, **fields: Any) -> AttentionCall:
    return drawn_call(length, **{"site": site(1), **fields})


def scores_of(name: str, call: AttentionCall) -> Tensor:
    press, known = PRESSES[name]
    scores: Tensor = press.score(call.replace(scope=Prepared(known)))
    return scores


# ---- formulas ------------------------------------------------------------------------------------


def test_a_key_scores_by_how_far_it_lies_against_its_filter() -> None:
    call = a_call()
    scores = scores_of("filters", call)
    for row, head in KV:
        expected = [-float(key @ FILTERS.directions[1, head]) for key in call.keys[row, head]]
        assert scores[row, head].tolist() == pytest.approx(expected)


def regressed(given: KVzapRegressor, state: Tensor) -> Tensor:
    """One token through the regressor of layer 1."""
    if given.hidden_weight is not None and given.hidden_bias is not None:
        hidden = given.hidden_weight[1] @ state + given.hidden_bias[1]
        state = hidden * 0.5 * (1 + torch.erf(hidden / math.sqrt(2)))
    return given.weight[1] @ state + given.bias[1]


@pytest.mark.parametrize("name", ["linear", "mlp"])
def test_a_token_scores_by_its_hidden_state(name: str) -> None:
    call, given = a_call(), PRESSES[name][1]
    assert isinstance(given, KVzapRegressor)
    scores = scores_of(name, call)
    for row in range(BATCH):
        for token in range(LENGTH):
            expected = regressed(given, call.hidden_states[row, token])
            torch.testing.assert_close(scores[row, :, token], expected)
    positions = torch.rand(BATCH, KV_HEADS, LENGTH).topk(6).indices.sort().values
    left = scores_of(name, call.select(positions))
    torch.testing.assert_close(left, scores.gather(-1, positions))


@pytest.mark.parametrize("n_sink", [0, 4])
def test_statistics_of_the_context_itself_give_expected_attention(n_sink: int) -> None:
    call = a_call(batch=1)
    measured = [x.expand(LAYERS, *x.shape[1:]) for x in query_statistics(call, n_sink)]
    known = Prepared(ExpectedAttentionStats(*measured))
    found = ExpectedAttentionWithStats(n_future_positions=9, n_sink=n_sink).score(
        call.replace(scope=known)
    )
    expected = ExpectedAttention(n_future_positions=9, n_sink=n_sink).score(call)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", PRESSES)
def test_scores_are_single_precision_and_finite(name: str, dtype: torch.dtype) -> None:
    scores = scores_of(name, a_call(dtype=dtype))
    assert scores.shape == (BATCH, KV_HEADS, LENGTH)
    assert scores.dtype == torch.float32
    assert scores.isfinite().all()


@pytest.mark.parametrize("name", PRESSES)
def test_a_row_of_a_batch_scores_as_it_does_alone(name: str) -> None:
    call = a_call()
    scores = scores_of(name, call)
    for row in range(BATCH):
        torch.testing.assert_close(scores_of(name, call.of_rows([row], None))[0], scores[row])


# ---- learning ------------------------------------------------------------------------------------


@pytest.mark.parametrize("offset", [-2.0, 2.0])
def test_a_filter_is_the_first_right_singular_vector_turned_from_the_mean(offset: float) -> None:
    queries = drawn(KV_HEADS, 100, DIM) + offset
    second = queries.mT @ queries / 100
    directions = filter_directions(queries.mean(dim=1), second)
    for head in range(KV_HEADS):
        singular = torch.linalg.svd(queries[head]).Vh[0]
        assert abs(float(singular @ directions[head])) == pytest.approx(1)
        assert float(directions[head] @ queries[head].mean(dim=0)) < 0


def of_layer_1(scores: Tensor) -> list[Tensor]:
    return [torch.zeros(0), scores, torch.zeros(0)]


def examples(
    target: Any, n: int = 400, max_tokens: int = 10_000, dtype: torch.dtype = torch.float32
) -> Examples:
    """Hidden states of layer 1, with scores whose logarithm is `target` of them."""
    learned = Examples(max_tokens)
    for seed in range(2):
        call = a_call(n // 2 // BATCH, dtype=dtype)
        states = (2 + 3 * drawn(*call.hidden_states.shape, seed=seed)).to(dtype)
        learned.see(replace(call, hidden_states=states))
        learned.label(of_layer_1(target(states.double()).mT.exp()))
    return learned


WEIGHT = drawn(KV_HEADS, WIDTH, seed=7) / WIDTH


def a_line(states: Tensor) -> Tensor:
    return states @ WEIGHT.mT - 3


def a_bend(states: Tensor) -> Tensor:
    return (states @ WEIGHT.mT - 0.3).abs() - 3


def left_over(given: KVzapRegressor, learned: Examples) -> float:
    """Share of the variance of the targets that the regressor leaves unexplained."""
    states = torch.cat(learned.states[1])[None]
    call = a_call(states.shape[1], batch=1, dtype=torch.float32, scope=Prepared(given))
    targets = torch.cat(learned.targets[1]).log().mT[None]
    scores = KVzap(0.5).score(call.replace(hidden_states=states))
    return float((scores - targets).var() / targets.var())


def test_ridge_regression_finds_a_linear_function() -> None:
    learned = examples(a_line)
    given = fit_regressor(learned, "linear", None, 0, 0)
    assert given.model_type == "linear"
    assert given.sizes == {"layers": LAYERS, "kv_heads": KV_HEADS, "hidden_size": WIDTH}
    assert left_over(given, learned) < 1e-4
    torch.testing.assert_close(given.weight[1].double(), WEIGHT, atol=1e-3, rtol=1e-2)


def test_a_hidden_layer_finds_what_a_linear_function_cannot() -> None:
    learned = examples(a_bend)
    straight = left_over(fit_regressor(learned, "linear", None, 0, 0), learned)
    given = fit_regressor(learned, "mlp", 16, 1000, 0)
    assert given.model_type == "mlp"
    assert given.hidden_weight is not None
    assert given.hidden_weight.shape == (LAYERS, 16, WIDTH)
    assert left_over(given, learned) < 0.25 * straight


def test_the_width_of_the_hidden_layer_is_an_eighth_by_default() -> None:
    given = fit_regressor(examples(a_line), "mlp", None, 1, 0)
    assert given.hidden_bias is not None
    assert given.hidden_bias.shape == (LAYERS, WIDTH // 8)


def test_the_same_seed_learns_the_same() -> None:
    learned = examples(a_bend)
    torch.manual_seed(1)
    one = fit_regressor(learned, "mlp", 4, 20, 5)
    state = torch.get_rng_state()
    torch.manual_seed(2)
    two = fit_regressor(learned, "mlp", 4, 20, 5)
    other = fit_regressor(learned, "mlp", 4, 20, 6)
    for name, tensor in one.tensors.items():
        assert torch.equal(tensor, two.tensors[name])
    assert not torch.equal(one.weight, other.weight)
    torch.manual_seed(1)
    assert torch.equal(torch.get_rng_state(), state)


def test_learning_works_where_gradients_are_off() -> None:
    learned = examples(a_bend, dtype=torch.bfloat16)
    with torch.inference_mode():
        given = fit_regressor(learned, "mlp", 4, 5, 0)
    assert given.weight.dtype == torch.float32
    assert not given.weight.requires_grad


def test_no_more_tokens_are_held_than_asked_for() -> None:
    learned = examples(a_line, n=400, max_tokens=250)
    assert learned.full
    assert learned.n_tokens == 250
    assert len(torch.cat(learned.states[1])) == len(torch.cat(learned.targets[1])) == 250


def test_scores_of_zero_can_be_learned() -> None:
    learned = Examples(1000)
    call = a_call(dtype=torch.float32)
    learned.see(call)
    learned.label(of_layer_1(torch.zeros(BATCH, KV_HEADS, LENGTH)))
    assert fit_regressor(learned, "linear", None, 0, 0).bias.isfinite().all()


def test_tokens_of_infinite_score_are_not_learned_from() -> None:
    learned, call = Examples(1000), a_call(dtype=torch.float32)
    scores = torch.ones(BATCH, KV_HEADS, LENGTH)
    scores[0, 1, :3] = float("inf")  # such as those that a chat template begins with
    learned.see(call)
    learned.label(of_layer_1(scores))
    assert learned.n_tokens == BATCH * LENGTH - 3
    assert torch.equal(learned.states[1][0], call.hidden_states.flatten(0, 1)[3:])
    assert bool((learned.targets[1][0] == 1).all())


def test_scores_of_another_shape_are_refused() -> None:
    too_short = torch.zeros(BATCH, KV_HEADS, LENGTH - 1)
    for scores in (of_layer_1(too_short), [torch.zeros(BATCH, KV_HEADS, LENGTH)] * 2):
        learned = Examples(1000)
        learned.see(a_call())
        with pytest.raises(CalibrationError, match=r"3 layers.*layer 1 must be \(2, 2, 17\)"):
            learned.label(scores)


# ---- files ---------------------------------------------------------------------------------------


SPOILT: list[tuple[Any, str, Tensor | None]] = [
    (FILTERS, "directions", torch.zeros(2, 3)),
    (STATS, "covariance", torch.zeros(3, 4, 8)),
    (STATS, "covariance", torch.zeros(3, 4, 8, 9)),
    (LINEAR, "bias", torch.zeros(3, 4)),
    (MLP, "hidden_bias", None),
    (MLP, "hidden_weight", torch.zeros(3, 6, 32)),
    *((GATES, name, tensor[..., :-1]) for name, tensor in GATES.tensors.items()),
    *((GATES, name, tensor[0]) for name, tensor in GATES.tensors.items()),
    (CURVES, "rates", torch.zeros(99, 2)),
    (CURVES, "rates", torch.zeros(98, 3, 2)),
    (CURVES, "rates", torch.zeros(99, 0, 2)),
    (CURVES, "rates", torch.full((99, 3, 2), 1.1)),
    (CURVES, "rates", torch.full((99, 3, 2), float("nan"))),
]


@pytest.mark.parametrize(("fit", "field", "tensor"), SPOILT)
def test_tensors_that_do_not_fit_each_other_are_refused(
    fit: Any, field: str, tensor: Tensor | None
) -> None:
    with pytest.raises(CalibrationError, match=field):
        replace(fit, **{field: tensor})


def test_what_was_learned_says_what_it_is_for() -> None:
    assert repr(STATS) == "ExpectedAttentionStats(layers=3, heads=4, head_dim=8)"
    assert repr(FILTERS) == "QFilters(layers=3, kv_heads=2, head_dim=8)"
    assert repr(MLP) == "KVzapRegressor(layers=3, kv_heads=2, hidden_size=32)"


def same(one: Calibration, two: Calibration) -> bool:
    names = one.tensors.keys()
    return names == two.tensors.keys() and all(
        torch.equal(one.tensors[name], two.tensors[name]) for name in names
    )


@pytest.mark.parametrize("name", FILES)
def test_what_is_saved_is_loaded(name: str, tmp_path: Path) -> None:
    fit = FILES[name]
    beside = fit.save(tmp_path / "new" / "folder")
    alone = fit.save(str(tmp_path / "other.safetensors"))
    assert beside == tmp_path / "new" / "folder" / name
    assert alone == tmp_path / "other.safetensors"
    for source in (beside, str(beside.parent), alone, str(alone)):
        assert same(type(fit).load(source), fit)
    assert beside.stat().st_mode & 0o044, "as readable as any file"
    with safe_open(beside, framework="pt") as file:
        metadata = file.metadata()
    about = {"kind": fit.kind, "version": 1, "model": fit.sizes}
    assert {key: json.loads(text) for key, text in metadata.items()} == {"hook-or-patch": about}


def test_a_file_that_changed_is_read_again(tmp_path: Path) -> None:
    FILTERS.save(tmp_path)
    QFilters.load(tmp_path)
    changed = QFilters(drawn(LAYERS, KV_HEADS, DIM, seed=9))
    changed.save(tmp_path)
    assert same(QFilters.load(tmp_path), changed)


def by_layer(**stacked: Tensor) -> dict[str, Tensor]:
    """Each tensor in parts, by the names that published files have."""
    return {
        f"layers.{i}.{name.replace('__', '.')}": x.contiguous()
        for name, of_layers in stacked.items()
        for i, x in enumerate(of_layers)
    }


PUBLISHED: list[tuple[Any, dict[str, Tensor]]] = [
    (FILTERS, {"q_filters": FILTERS.directions}),
    (QFilters(torch.ones(3, 2, 8)), {"q_filters": torch.ones(3, 2, 8).bfloat16()}),
    (STATS, {"query_mean": STATS.mean, "query_cov": STATS.covariance}),
    (LINEAR, by_layer(weight=LINEAR.weight, bias=LINEAR.bias)),
    (
        MLP,
        by_layer(
            **{"0__weight": MLP.tensors["hidden_weight"], "0__bias": MLP.tensors["hidden_bias"]},
            **{"2__weight": MLP.weight, "2__bias": MLP.bias},
        ),
    ),
    (
        GATES,
        by_layer(
            q_proj__weight=GATES.query_weight.flatten(1, 2),
            q_proj__bias=GATES.query_bias.flatten(1),
            k_proj__weight=GATES.key_weight.flatten(1, 2),
            q_norm__weight=GATES.query_norm,
            k_norm__weight=GATES.key_norm,
            k_base=GATES.base.unsqueeze(2),
            b=GATES.bias.view(LAYERS, KV_HEADS, 1, -1),
        ),
    ),
]
"""In the layouts of nthngdy/*_qfilt, alessiodevoto/exp_att_stats_* and KVzap-*.

The gates are in that of the published pickle, as `docs/learned.md` says how to turn it into
safetensors.
"""


@pytest.mark.parametrize(("fit", "tensors"), PUBLISHED)
def test_what_is_published_is_read(fit: Any, tensors: dict[str, Tensor], tmp_path: Path) -> None:
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    assert same(type(fit).load(tmp_path), fit)


def about(version: int) -> dict[str, str]:
    return {"hook-or-patch": json.dumps({"kind": "Q-filters", "version": version})}


def test_files_of_something_else_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    with pytest.raises(CalibrationError, match=r"holds 'Q-filters', not a KVzap regressor"):
        KVzapRegressor.load(FILTERS.save(tmp_path))
    save_file({"embed_tokens.weight": torch.zeros(2, 2)}, path)
    for kind in (QFilters, ExpectedAttentionStats, KVzapRegressor):
        with pytest.raises(CalibrationError, match=r"it holds 'embed_tokens\.weight'"):
            kind.load(path)
    save_file({"directions": torch.zeros(1, 1, 2)}, path, about(2))
    with pytest.raises(CalibrationError, match=r"version 2 of the format; this release reads 1"):
        QFilters.load(path)
    for name in ("gate.pt", "gate.bin"):
        (tmp_path / name).touch()
        with pytest.raises(CalibrationError, match=f"{name}' is a pickle"):
            KVzipGates.load(tmp_path / name)


# ---- the hub -------------------------------------------------------------------------------------


class Hub:
    """Stands for `hf_hub_download`: remembers what was asked, and has some files."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, files: dict[str, Path] | None = None
    ) -> None:
        self.files, self.asked = files or {}, list[tuple[str, str, bool]]()
        monkeypatch.setattr(huggingface_hub, "hf_hub_download", self)

    def __call__(self, repo: str, name: str, *, local_files_only: bool) -> str:
        self.asked.append((repo, name, local_files_only))
        if f"{repo}/{name}" not in self.files:
            raise LocalEntryNotFoundError("check your connection. And more.")
        return str(self.files[f"{repo}/{name}"])


@pytest.mark.parametrize("name", FILES)
def test_a_hub_without_network_is_an_error_that_names_the_id(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = Hub(monkeypatch)
    with pytest.raises(CalibrationError, match=r"'owner/thing'.*no network.*check your connection"):
        type(FILES[name]).load("owner/thing")
    asked_online = [asked for asked in hub.asked if not asked[2]]
    assert len(asked_online) == 1, "nobody waits for a dead network twice"


def test_a_repository_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = FILTERS.save(tmp_path)
    Hub(monkeypatch, {"owner/thing/qfilters.safetensors": path})
    assert same(QFilters.load("owner/thing"), FILTERS)


@pytest.mark.parametrize(
    "source", [Path("owner/thing"), "a/b/c", "/no/where", "owner/q.safetensors", "~/x", ""]
)
def test_a_path_that_is_missing_is_not_looked_for_on_the_hub(
    source: str | Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = Hub(monkeypatch)
    with pytest.raises(CalibrationError, match=r"no file or folder|no qfilters\.safetensors"):
        QFilters.load(source)
    assert not hub.asked


def test_a_folder_without_the_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        CalibrationError, match=r"no qfilters\.safetensors and no model\.safetensors"
    ):
        QFilters.load(tmp_path)


# ---- finding what belongs to a model -------------------------------------------------------------


def looked_for(given: Any, name: str | None) -> Calibration:
    config = SimpleNamespace() if name is None else SimpleNamespace(name_or_path=name)
    return QFilter(0.5, given).find(SimpleNamespace(config=config))


def test_the_file_beside_the_model_is_found(tmp_path: Path) -> None:
    FILTERS.save(tmp_path)
    assert same(looked_for(None, str(tmp_path)), FILTERS)


def test_a_folder_without_it_is_told_how_to_get_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = Hub(monkeypatch)
    (tmp_path / "a-model").mkdir()
    folder = str(tmp_path / "a-model")
    fit = re.escape(f"QFilter.fit(model, token_batches).save({folder!r})")
    with pytest.raises(
        CalibrationError, match=rf"qfilters\.safetensors.*{fit}.*'nthngdy/a-model_qfilt'"
    ):
        looked_for(None, folder)
    assert not hub.asked, "a local model is not looked up on the hub unasked"


@pytest.mark.parametrize("name", [None, "", "/no/such/folder"])
def test_a_model_of_no_origin_is_told_how_to_get_one(name: str | None) -> None:
    with pytest.raises(CalibrationError, match=r"hand over what QFilter\.fit\(model"):
        looked_for(None, name)


def test_a_model_of_the_hub_gets_what_is_published_or_is_told_how_to_get_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub, file = Hub(monkeypatch), "nthngdy/Model-8B_qfilt/model.safetensors"
    with pytest.raises(CalibrationError, match=r"_qfilt'.*company/Model-8B.*QFilter\.fit"):
        looked_for(None, "company/Model-8B")
    save_file({"q_filters": FILTERS.directions}, tmp_path / "model.safetensors")
    hub.files[file] = tmp_path / "model.safetensors"
    assert same(looked_for(None, "company/Model-8B"), FILTERS)


def test_what_is_given_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = FILTERS.save(tmp_path)
    Hub(monkeypatch, {"owner/mine/qfilters.safetensors": path})
    for given in (FILTERS, path, str(path), tmp_path, "owner/mine"):
        assert same(looked_for(given, None), FILTERS)
    STATS.save(tmp_path)
    press = ExpectedAttentionWithStats(stats_folder=str(tmp_path))
    assert same(press.find(None), STATS)


@pytest.mark.parametrize(
    ("press", "repository"),
    [
        (QFilter(), "nthngdy/Llama-3.1-8B-Instruct_qfilt"),
        (KVzap(), "nvidia/KVzap-mlp-Llama-3.1-8B-Instruct"),
        (KVzap(model_type="linear"), "nvidia/KVzap-linear-Llama-3.1-8B-Instruct"),
        (
            ExpectedAttentionWithStats(n_sink=2, num_samples=7),
            "alessiodevoto/exp_att_stats_meta-llama_Llama-3.1-8B-Instruct_kmfoda_booksum_7_1000_2",
        ),
    ],
)
def test_the_repositories_are_those_of_kvpress(
    press: Any, repository: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub, name = Hub(monkeypatch), "meta-llama/Llama-3.1-8B-Instruct"
    with pytest.raises(CalibrationError, match=re.escape(repository)):
        press.find(SimpleNamespace(config=SimpleNamespace(name_or_path=name)))
    assert {asked[:2] for asked in hub.asked} == {(repository, "model.safetensors")}
