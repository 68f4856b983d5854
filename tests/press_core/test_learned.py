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

from press_core import AttentionCall, HyperparameterError, PressError, attention_sites
from press_core.calibration import Calibration, CalibrationError, QueryMoments, find, rows_alone
from press_core.examples import Examples
from press_core.presses.expected_attention import (
    ExpectedAttention,
    expected_attention_scores,
    query_statistics,
)
from press_core.presses.expected_attention_stats import (
    ExpectedAttentionStats,
    ExpectedAttentionWithStats,
    expected_attention_stats_scores,
)
from press_core.presses.fast_kvzip import KVzipGates
from press_core.presses.kvzap import KVzap, KVzapRegressor, fit_regressor, kvzap_scores
from press_core.presses.lukv import BudgetCurves
from press_core.presses.qfilter import QFilter, QFilters, filter_directions, qfilter_scores
from tests.support import build

BATCH, HEADS, KV_HEADS, LENGTH, DIM, WIDTH, LAYERS = 2, 4, 2, 17, 8, 32, 3


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def a_call(
    dtype: torch.dtype = torch.float64, layer: int = 1, length: int = LENGTH
) -> AttentionCall:
    model = build("llama", num_layers=LAYERS, num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=DIM)
    site = attention_sites(model)[layer]
    positions = torch.arange(length)[None]
    assert site.rotary is not None
    return AttentionCall(
        site=site,
        hidden_states=drawn(BATCH, length, WIDTH, seed=1).to(dtype),
        keys=drawn(BATCH, KV_HEADS, length, DIM, seed=2).to(dtype),
        values=drawn(BATCH, KV_HEADS, length, DIM, seed=3).to(dtype),
        position_embeddings=site.rotary.embeddings(torch.zeros(1, dtype=dtype), positions),
        position_ids=positions,
        query=drawn(BATCH, HEADS, length, DIM, seed=4).to(dtype),
    )


def filters() -> QFilters:
    return QFilters(drawn(LAYERS, KV_HEADS, DIM))


def stats() -> ExpectedAttentionStats:
    spread = drawn(LAYERS, HEADS, DIM, DIM)
    return ExpectedAttentionStats(drawn(LAYERS, HEADS, DIM), spread @ spread.mT)


def linear_regressor() -> KVzapRegressor:
    return KVzapRegressor(drawn(LAYERS, KV_HEADS, WIDTH), drawn(LAYERS, KV_HEADS, seed=1))


def mlp_regressor() -> KVzapRegressor:
    return KVzapRegressor(
        drawn(LAYERS, KV_HEADS, 5),
        drawn(LAYERS, KV_HEADS, seed=1),
        drawn(LAYERS, 5, WIDTH, seed=2),
        drawn(LAYERS, 5, seed=3),
    )


def gates() -> KVzipGates:
    return KVzipGates(
        drawn(LAYERS, HEADS, 3, WIDTH),
        drawn(LAYERS, HEADS, 3, seed=1),
        drawn(LAYERS, KV_HEADS, 3, WIDTH, seed=2),
        drawn(LAYERS, 3, seed=3),
        drawn(LAYERS, 3, seed=4),
        drawn(LAYERS, KV_HEADS, 5, 3, seed=5),
        drawn(LAYERS, HEADS, seed=6),
    )


def curves() -> BudgetCurves:
    return BudgetCurves(drawn(99, LAYERS, KV_HEADS).sigmoid())


MAKERS = {
    "filters": filters,
    "stats": stats,
    "linear": linear_regressor,
    "mlp": mlp_regressor,
}
FITS = {**MAKERS, "gates": gates, "curves": curves}
"""All that can be saved; what is not in `MAKERS` has tests of its formula elsewhere."""


# ---- formulas ------------------------------------------------------------------------------------


def test_a_key_scores_by_how_far_it_lies_against_its_filter() -> None:
    call, given = a_call(), filters()
    scores = qfilter_scores(call.keys, given, 1)
    for row in range(BATCH):
        for head in range(KV_HEADS):
            for token in range(LENGTH):
                key = call.keys[row, head, token].tolist()
                product = math.fsum(
                    k * f for k, f in zip(key, given.directions[1, head].tolist(), strict=True)
                )
                assert scores[row, head, token].item() == pytest.approx(-product)


def regressed(given: KVzapRegressor, layer: int, state: list[float]) -> list[float]:
    """One token through the regressor, one number at a time."""

    def affine(weight: Tensor, bias: Tensor, x: list[float]) -> list[float]:
        return [
            math.fsum(w * v for w, v in zip(row, x, strict=True)) + b
            for row, b in zip(weight.tolist(), bias.tolist(), strict=True)
        ]

    if given.hidden_weight is not None and given.hidden_bias is not None:
        hidden = affine(given.hidden_weight[layer], given.hidden_bias[layer], state)
        state = [x * 0.5 * (1 + math.erf(x / math.sqrt(2))) for x in hidden]
    return affine(given.weight[layer], given.bias[layer], state)


@pytest.mark.parametrize("maker", [linear_regressor, mlp_regressor])
def test_a_token_scores_by_its_hidden_state(maker: Any) -> None:
    call, given = a_call(), maker()
    scores = kvzap_scores(call, given)
    for row in range(BATCH):
        for token in range(LENGTH):
            expected = regressed(given, 1, call.hidden_states[row, token].tolist())
            assert scores[row, :, token].tolist() == pytest.approx(expected)


@pytest.mark.parametrize("maker", [linear_regressor, mlp_regressor])
def test_scores_of_tokens_follow_the_keys_that_are_left(maker: Any) -> None:
    call, given = a_call(), maker()
    positions = torch.rand(BATCH, KV_HEADS, LENGTH).topk(6).indices.sort().values
    left = call.select(positions)
    torch.testing.assert_close(
        kvzap_scores(left, given), kvzap_scores(call, given).gather(-1, positions)
    )


@pytest.mark.parametrize("n_sink", [0, 4])
def test_statistics_of_the_context_itself_give_expected_attention(n_sink: int) -> None:
    call = a_call()
    one = call.of_rows([0], None)
    mean, covariance = query_statistics(one, n_sink)
    measured = ExpectedAttentionStats(
        mean.expand(LAYERS, -1, -1), covariance.expand(LAYERS, -1, -1, -1)
    )
    press = ExpectedAttentionWithStats(n_future_positions=9, n_sink=n_sink, stats=measured)
    expected = expected_attention_scores(
        one, mean, covariance, ExpectedAttention(n_future_positions=9, n_sink=n_sink)
    )
    torch.testing.assert_close(expected_attention_stats_scores(one, press), expected)


def scores_of(name: str, call: AttentionCall) -> Tensor:
    given: Any = MAKERS[name]()
    if name == "filters":
        return qfilter_scores(call.keys, given, call.site.layer_idx)
    if name == "stats":
        press = ExpectedAttentionWithStats(n_future_positions=9, stats=given)
        return expected_attention_stats_scores(call, press)
    return kvzap_scores(call, given)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", MAKERS)
def test_scores_are_single_precision_and_finite(name: str, dtype: torch.dtype) -> None:
    scores = scores_of(name, a_call(dtype))
    assert scores.shape == (BATCH, KV_HEADS, LENGTH)
    assert scores.dtype == torch.float32
    assert scores.isfinite().all()


@pytest.mark.parametrize("name", MAKERS)
def test_a_row_of_a_batch_scores_as_it_does_alone(name: str) -> None:
    call = a_call()
    scores = scores_of(name, call)
    for row in range(BATCH):
        torch.testing.assert_close(scores_of(name, call.of_rows([row], None))[0], scores[row])


# ---- learning ------------------------------------------------------------------------------------


def test_moments_of_batches_are_those_of_all_queries() -> None:
    moments, call = QueryMoments(), a_call()
    queries = drawn(BATCH, HEADS, 40, DIM)
    for part in queries.float().split([25, 0, 15], dim=2):
        moments.add(call, part)
    first, second = moments.stacked()
    assert first.dtype == second.dtype == torch.float64
    for head in range(HEADS):
        of_head = queries[:, head].reshape(-1, DIM)
        torch.testing.assert_close(first[1, head], of_head.mean(dim=0), atol=1e-6, rtol=1e-6)
        expected = (of_head.unsqueeze(-1) * of_head.unsqueeze(-2)).mean(dim=0)
        torch.testing.assert_close(second[1, head], expected, atol=1e-6, rtol=1e-6)
    for layer in (0, 2):  # of which no query was seen
        assert not first[layer].any()
        assert not second[layer].any()


def test_moments_of_nothing_are_refused() -> None:
    with pytest.raises(CalibrationError, match="no token"):
        QueryMoments().stacked()


@pytest.mark.parametrize("offset", [-2.0, 2.0])
def test_a_filter_is_the_first_right_singular_vector_turned_from_the_mean(offset: float) -> None:
    queries = drawn(KV_HEADS, 100, DIM) + offset
    second = queries.mT @ queries / 100
    directions = filter_directions(queries.mean(dim=1), second)
    for head in range(KV_HEADS):
        singular = torch.linalg.svd(queries[head]).Vh[0]
        assert abs(float(singular @ directions[head])) == pytest.approx(1)
        assert float(directions[head] @ queries[head].mean(dim=0)) < 0


def test_keys_that_queries_look_at_score_high() -> None:
    """The paper's theorem: scores go with the mean logit where queries share a direction."""
    queries = 3 + 0.5 * drawn(1, 200, DIM)
    given = QFilters(filter_directions(queries.mean(dim=1), queries.mT @ queries / 200)[None])
    keys = drawn(1, 1, 50, DIM, seed=1)
    logits = (queries @ keys[0].mT).mean(dim=1)
    scores = qfilter_scores(keys, given, 0)[0]
    assert torch.corrcoef(torch.cat((logits, scores)))[0, 1] > 0.95


def of_layer_1(scores: Tensor) -> list[Tensor]:
    return [torch.zeros(0), scores, torch.zeros(0)]


def examples(
    target: Any, n: int = 400, max_tokens: int = 10_000, dtype: torch.dtype = torch.float32
) -> Examples:
    """Hidden states of layer 1, with scores whose logarithm is `target` of them."""
    learned = Examples(max_tokens)
    for seed in range(2):
        call = a_call(dtype, length=n // 2 // BATCH)
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
    call, states = a_call(torch.float32), torch.cat(learned.states[1])[None]
    keys = call.keys[:1, :, :1].expand(-1, -1, states.shape[1], -1)
    call = replace(call, hidden_states=states, keys=keys)
    targets = torch.cat(learned.targets[1]).log().mT[None]
    return float((kvzap_scores(call, given) - targets).var() / targets.var())


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
    call = a_call(torch.float32)
    learned.see(call)
    learned.label(of_layer_1(torch.zeros(BATCH, KV_HEADS, LENGTH)))
    assert fit_regressor(learned, "linear", None, 0, 0).bias.isfinite().all()


def test_tokens_of_infinite_score_are_not_learned_from() -> None:
    learned, call = Examples(1000), a_call(torch.float32)
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


def test_nothing_to_learn_from_is_refused() -> None:
    with pytest.raises(CalibrationError, match="no token"):
        fit_regressor(Examples(10), "linear", None, 0, 0)


def test_rows_alone_have_no_padding() -> None:
    ids = torch.arange(12).view(3, 4)
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1], [0, 1, 1, 1]])
    whole = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    rows = rows_alone([ids, {"input_ids": ids, "attention_mask": mask}, whole])
    assert [x.tolist() for x in rows] == [
        ids.tolist(),
        [[2, 3]],
        [[4, 5, 6, 7]],
        [[9, 10, 11]],
        ids.tolist(),
    ]


# ---- data ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        lambda: QFilters(torch.zeros(2, 3)),
        lambda: ExpectedAttentionStats(torch.zeros(2, 3, 4), torch.zeros(2, 3, 4)),
        lambda: ExpectedAttentionStats(torch.zeros(2, 3, 4), torch.zeros(2, 3, 4, 5)),
        lambda: KVzapRegressor(torch.zeros(2, 3, 4), torch.zeros(2, 4)),
        lambda: KVzapRegressor(torch.zeros(2, 3, 4), torch.zeros(2, 3), torch.zeros(2, 4, 9)),
        lambda: KVzapRegressor(
            torch.zeros(2, 3, 4), torch.zeros(2, 3), torch.zeros(2, 5, 9), torch.zeros(2, 5)
        ),
    ],
)
def test_tensors_that_do_not_fit_each_other_are_refused(make: Any) -> None:
    with pytest.raises(CalibrationError, match="must be"):
        make()


@pytest.mark.parametrize(
    ("method", "field"),
    [(QFilter, "filters"), (ExpectedAttentionWithStats, "stats"), (KVzap, "regressor")],
)
def test_a_field_of_another_type_is_refused(method: Any, field: str) -> None:
    with pytest.raises(HyperparameterError, match=f"{field}.*must be"):
        method(**{field: 3})


def test_other_fields_are_checked() -> None:
    with pytest.raises(HyperparameterError, match="model_type='cubic'"):
        KVzap(model_type="cubic")  # type: ignore[arg-type]
    with pytest.raises(HyperparameterError, match="stats_folder"):
        ExpectedAttentionWithStats(stats="somewhere", stats_folder="elsewhere")


def test_what_was_learned_says_what_it_is_for() -> None:
    assert repr(stats()) == "ExpectedAttentionStats(layers=3, heads=4, head_dim=8)"
    assert repr(filters()) == "QFilters(layers=3, kv_heads=2, head_dim=8)"
    assert repr(mlp_regressor()) == "KVzapRegressor(layers=3, kv_heads=2, hidden_size=32)"


# ---- files ---------------------------------------------------------------------------------------


def same(one: Calibration, two: Calibration) -> bool:
    names = one.tensors.keys()
    return names == two.tensors.keys() and all(
        torch.equal(one.tensors[name], two.tensors[name]) for name in names
    )


FILES = {
    "filters": "qfilters.safetensors",
    "stats": "expected_attention_stats.safetensors",
    "linear": "kvzap-linear.safetensors",
    "mlp": "kvzap-mlp.safetensors",
    "gates": "fast_kvzip_gates.safetensors",
    "curves": "lukv_curves.safetensors",
}


@pytest.mark.parametrize("name", FITS)
def test_what_is_saved_is_loaded(name: str, tmp_path: Path) -> None:
    fitted = FITS[name]()
    beside = fitted.save(tmp_path / "new" / "folder")
    alone = fitted.save(str(tmp_path / "other.safetensors"))
    assert beside == tmp_path / "new" / "folder" / FILES[name]
    assert alone == tmp_path / "other.safetensors"
    for source in (beside, str(beside.parent), alone, str(alone)):
        assert same(type(fitted).load(source), fitted)
    assert beside.stat().st_mode & 0o044, "as readable as any file"


@pytest.mark.parametrize("name", FITS)
def test_a_file_says_what_it_holds(name: str, tmp_path: Path) -> None:
    fitted = FITS[name]()
    with safe_open(fitted.save(tmp_path), framework="pt") as file:
        metadata = file.metadata()
    about = {"kind": fitted.kind, "version": 1, "model": fitted.sizes}
    assert {key: json.loads(text) for key, text in metadata.items()} == {"hook-or-patch": about}


def test_a_file_that_changed_is_read_again(tmp_path: Path) -> None:
    filters().save(tmp_path)
    QFilters.load(tmp_path)
    changed = QFilters(drawn(LAYERS, KV_HEADS, DIM, seed=9))
    changed.save(tmp_path)
    assert same(QFilters.load(tmp_path), changed)


def test_what_kvpress_publishes_is_read(tmp_path: Path) -> None:
    """The layouts of the repositories nthngdy/*_qfilt, alessiodevoto/exp_att_stats_*, KVzap-*."""

    def folder(name: str, tensors: dict[str, Tensor]) -> str:
        (tmp_path / name).mkdir()
        save_file(tensors, tmp_path / name / "model.safetensors", {"format": "pt"})
        return str(tmp_path / name)

    directions = drawn(LAYERS, KV_HEADS, DIM)
    found = QFilters.load(folder("q", {"q_filters": directions.bfloat16()}))
    assert torch.equal(found.directions, directions.bfloat16().float())

    published = {"query_mean": stats().mean, "query_cov": stats().covariance}
    assert same(ExpectedAttentionStats.load(folder("s", published)), stats())

    given = linear_regressor()
    tensors = {}
    for i in range(LAYERS):
        tensors |= {f"layers.{i}.weight": given.weight[i], f"layers.{i}.bias": given.bias[i]}
    assert same(KVzapRegressor.load(folder("l", tensors)), given)

    given = mlp_regressor()
    assert given.hidden_weight is not None
    assert given.hidden_bias is not None
    tensors = {}
    for i in range(LAYERS):
        tensors |= {
            f"layers.{i}.0.weight": given.hidden_weight[i],
            f"layers.{i}.0.bias": given.hidden_bias[i],
            f"layers.{i}.2.weight": given.weight[i],
            f"layers.{i}.2.bias": given.bias[i],
        }
    assert same(KVzapRegressor.load(folder("m", tensors)), given)


def about(version: int) -> dict[str, str]:
    return {"hook-or-patch": json.dumps({"kind": "Q-filters", "version": version})}


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CalibrationError, match=r"holds 'Q-filters', not a KVzap regressor"):
        KVzapRegressor.load(filters().save(tmp_path))
    model = tmp_path / "model.safetensors"
    save_file({"embed_tokens.weight": torch.zeros(2, 2)}, model)
    for kind in (QFilters, ExpectedAttentionStats, KVzapRegressor):
        with pytest.raises(CalibrationError, match=r"it holds 'embed_tokens\.weight'"):
            kind.load(model)
    save_file({"other": torch.zeros(2)}, model, about(1))
    with pytest.raises(CalibrationError, match="it holds 'other'"):
        QFilters.load(model)


def test_a_file_of_a_later_format_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "later.safetensors"
    save_file({"directions": torch.zeros(1, 1, 2)}, path, about(2))
    with pytest.raises(CalibrationError, match=r"version 2 of the format; this release reads 1"):
        QFilters.load(path)


def test_a_broken_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "broken.safetensors"
    path.write_bytes(b"nothing")
    with pytest.raises(CalibrationError, match=f"cannot read {re.escape(repr(str(path)))}"):
        QFilters.load(path)


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


@pytest.mark.parametrize("name", FITS)
def test_a_hub_without_network_is_an_error_that_names_the_id(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = Hub(monkeypatch)
    with pytest.raises(PressError, match=r"'owner/thing'.*no network.*check your connection"):
        type(FITS[name]()).load("owner/thing")
    asked_online = [asked for asked in hub.asked if not asked[2]]
    assert len(asked_online) == 1, "nobody waits for a dead network twice"


def test_a_repository_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = filters().save(tmp_path)
    Hub(monkeypatch, {"owner/thing/qfilters.safetensors": path})
    assert same(QFilters.load("owner/thing"), filters())


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


def model_of(name: str | None) -> Any:
    config = SimpleNamespace() if name is None else SimpleNamespace(name_or_path=name)
    return SimpleNamespace(config=config, parameters=lambda: iter([torch.zeros(1)]))


def looked_for(given: Any, name: str | None) -> QFilters:
    return find(
        QFilters,
        given,
        model_of(name),
        fit="Some.fit(model, token_batches)",
        hub_id=lambda model_name: f"owner/{model_name.split('/')[-1]}_q",
    )


def test_the_file_beside_the_model_is_found(tmp_path: Path) -> None:
    filters().save(tmp_path)
    assert same(looked_for(None, str(tmp_path)), filters())


def test_a_folder_without_it_is_told_how_to_get_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = Hub(monkeypatch)
    (tmp_path / "a-model").mkdir()
    folder = str(tmp_path / "a-model")
    expected = re.escape(f"Some.fit(model, token_batches).save({folder!r})")
    with pytest.raises(
        CalibrationError, match=rf"qfilters\.safetensors.*{expected}.*'owner/a-model_q'"
    ):
        looked_for(None, folder)
    assert not hub.asked, "a local model is not looked up on the hub unasked"


@pytest.mark.parametrize("name", [None, "", "/no/such/folder"])
def test_a_model_of_no_origin_is_told_how_to_get_one(name: str | None) -> None:
    with pytest.raises(CalibrationError, match=r"hand over what Some\.fit\(model, token_batches\)"):
        looked_for(None, name)


def test_a_model_of_the_hub_gets_what_is_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_file({"q_filters": filters().directions}, tmp_path / "model.safetensors")
    Hub(monkeypatch, {"owner/Model-8B_q/model.safetensors": tmp_path / "model.safetensors"})
    assert same(looked_for(None, "company/Model-8B"), filters())


def test_a_model_of_the_hub_without_any_is_told_how_to_get_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Hub(monkeypatch)
    with pytest.raises(CalibrationError, match=r"'owner/Model-8B_q'.*company/Model-8B.*Some\.fit"):
        looked_for(None, "company/Model-8B")


def test_what_is_given_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = filters().save(tmp_path)
    Hub(monkeypatch, {"owner/mine/qfilters.safetensors": path})
    for given in (filters(), path, str(path), tmp_path, "owner/mine"):
        assert same(looked_for(given, None), filters())


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
    hub = Hub(monkeypatch)
    with pytest.raises(CalibrationError, match=re.escape(repository)):
        press.bind(model_of("meta-llama/Llama-3.1-8B-Instruct"))
    assert {asked[:2] for asked in hub.asked} == {(repository, "model.safetensors")}


def test_stats_folder_is_stats_as_a_folder(tmp_path: Path) -> None:
    stats().save(tmp_path)
    press: Any = ExpectedAttentionWithStats(stats_folder=str(tmp_path)).bind(model_of(None))
    assert same(press.stats, stats())
