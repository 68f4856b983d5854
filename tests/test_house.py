"""What stands in which room."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
from pathlib import Path

import pytest

import hooks_impl
import patch_impl

ROOT = Path(__file__).parent.parent


def calls_in(path: str) -> set[str]:
    """Names of all functions and methods that a file, or the files of a folder, call."""
    names, place = set(), ROOT / path
    for path in [place] if place.is_file() else place.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                function = node.func
                names.add(getattr(function, "attr", getattr(function, "id", "")))
    return names


def test_both_packages_hold_the_same_files():
    """But for what makes one of them a drop-in for kvpress."""
    hooks, patches = (
        {path.name for path in (ROOT / name).glob("*.py")} for name in ("hooks_impl", "patch_impl")
    )
    assert hooks - {"kvpress.py"} == patches


def test_patches_register_no_hooks():
    assert not {name for name in calls_in("patch_impl") if name.startswith("register_")}
    assert "register_forward_hook" in calls_in("hooks_impl")


def test_hooks_set_no_attributes():
    calls = calls_in("hooks_impl/mechanism.py") | calls_in("hooks_impl/presses.py")
    assert not calls & {"setattr", "wrap", "intercept", "__setattr__"}
    assert {"wrap", "intercept"} <= calls_in("patch_impl")


@pytest.mark.parametrize("name", ["hooks_impl", "patch_impl"])
def test_a_mechanism_stands_in_one_file_of_two_pages(name):
    assert len((ROOT / name / "mechanism.py").read_text().splitlines()) <= 225


def test_formulas_hold_no_module():
    for path in (ROOT / "press_core" / "presses").glob("*.py"):
        assert "nn.Module" not in path.read_text(), path.name


def test_same_presses():
    assert hooks_impl.PRESSES.keys() == patch_impl.PRESSES.keys()
    assert hooks_impl.PRESSES.keys() >= SIGNATURES.keys()
    assert len(SIGNATURES) == 49


@pytest.mark.parametrize("name", sorted(hooks_impl.PRESSES))
def test_same_fields_and_defaults(name):
    def fields(package):
        return [(f.name, f.type, f.default) for f in dataclasses.fields(package.PRESSES[name])]

    assert fields(hooks_impl) == fields(patch_impl)
    assert inspect.getdoc(hooks_impl.PRESSES[name]) == inspect.getdoc(patch_impl.PRESSES[name])


KNOWN = """
AdaKVPress(press=None, alpha_safeguard=0.2)
BlockPress(press=None, block_size=128)
CAMPress(base_press=None, compression_interval=512, target_size=2048,
    hidden_states_buffer_size=256, merge_budget=32)
CURPress(compression_ratio=0.0, num_sinks=4, leverage_type='kv_product',
    use_random_leverage=False, use_local_approximation=True, local_window_size=16)
CapPress(compression_ratio=0.0, tau=5.0, n_future_positions=512, n_sink=4, epsilon=1e-06)
ChunkKVPress(press=None, chunk_length=20)
ChunkPress(press=None, chunk_length=1024)
CompactorPress(compression_ratio=0.0, sink_size_start=8, sink_size_end=4, chunk_size=256,
    sketch_dimension=48, blending=None)
ComposedPress(presses=None)
CompressionRatioDecodingPress(base_press=None, compression_interval=512,
    hidden_states_buffer_size=256, target_compression_ratio=0.5)
CriticalAdaKVPress(press=None, alpha_safeguard=0.2, epsilon=0.0001, first_stage_ratio=0.5)
CriticalKVPress(press=None, epsilon=0.0001, first_stage_ratio=0.5)
DMSPress(press=None, threshold=None, sliding_window_size=128, decoding=False)
DecodingPress(base_press=None, compression_interval=512, target_size=2048,
    hidden_states_buffer_size=256)
DropKVPress(compression_ratio=0.0, window_size=32, kernel_size=7, epsilon=1e-06)
DuoAttentionPress(head_compression_ratio=0.0, on_the_fly_scoring=False)
EntropyGatedChunkKVPress(press=None, chunk_length=10, low_entropy_chunk_length=4)
EveryTurnPress(press=None, target_size=2048, hidden_states_buffer_size=256)
ExpectedAttentionPress(compression_ratio=0.0, n_future_positions=512, n_sink=4,
    use_covariance=True, use_vnorm=True, epsilon=0.0)
ExpectedAttentionStatsPress(compression_ratio=0.0, n_future_positions=512, n_sink=4,
    use_covariance=True, use_vnorm=True, epsilon=0.0)
FastKVzipPress(compression_ratio=0.0, layerwise=False, n_sink=4, window_size=4096,
    window_ratio=0.02)
FinchPress(compression_ratio=0.0, chunk_length=None, normalize_scores=True, rerotate_keys=True)
H2OPress(compression_ratio=0.0)
KVComposePress(compression_ratio=0.0, structured=True, agg_task='max', agg_group='mean',
    agg_head='mean', add_v_norm=False, add_mean_across_heads=True, keep_token_lower_bound=0)
KVgradPress(compression_ratio=0.0, layerwise=False, n_sink=4, chunk_size=512)
KVzapPress(compression_ratio=0.0, model_type='mlp')
KVzipPress(compression_ratio=0.0, layerwise=False, n_sink=4, kvzip_plus_normalization=False,
    chunk_size=2048)
KeyDiffPress(compression_ratio=0.0)
KeyRerotationPress(press=None)
KnormPress(compression_ratio=0.0)
LUKVPress(press=None, compression_ratio=0.0, sink=4, window=1)
LagKVPress(compression_ratio=0.0, n_sink=4, lag_size=128, cross_scoring=False)
LeverageScorePress(compression_ratio=0.0, sketch_dimension=48)
MergingPress(press=None, similarity_threshold=0.0, merge_fraction=1.0)
NonCausalAttnPress(compression_ratio=0.0, chunk_size=256)
ObservedAttentionPress(compression_ratio=0.0)
PerLayerCompressionPress(press=None, compression_ratios=None)
PrefillDecodingPress(prefilling_press=None, decoding_press=None)
PyramidKVPress(compression_ratio=0.0, window_size=64, kernel_size=5, beta=20)
QFilterPress(compression_ratio=0.0)
RKVPress(compression_ratio=0.0)
RandomPress(compression_ratio=0.0, seed=None)
RestoreKVPress(compression_ratio=0.0, layerwise=False, n_sink=4, kvzip_plus_normalization=False,
    chunk_size=2048)
SimLayerKVPress(lazy_threshold=1.0, n_last=1, n_recent=1024, n_initial=4)
SnapKVPress(compression_ratio=0.0, window_size=64, kernel_size=5)
StreamingLLMDecodingPress(max_capacity=256, n_sink=4, rerotate=False)
StreamingLLMPress(compression_ratio=0.0, n_sink=4)
TOVAPress(compression_ratio=0.0)
ThinKPress(key_channel_compression_ratio=0.0, window_size=32)
"""
"""The first fields, which are those of kvpress; one without a default is None here."""
SIGNATURES = dict(re.findall(r"(\w+)\((.*)\)", re.sub(r"\n +", " ", KNOWN)))


@pytest.mark.parametrize("name", sorted(SIGNATURES))
def test_first_fields_and_their_defaults_are_those_of_kvpress(name):
    """More may follow, for what kvpress takes from elsewhere."""
    fields = dataclasses.fields(hooks_impl.PRESSES[name])
    known = [(f.name, None if f.default is dataclasses.MISSING else f.default) for f in fields]
    said = ", ".join(f"{field}={default!r}" for field, default in known)
    assert f"{said}, ".startswith(f"{SIGNATURES[name]}, ")
    n_first = SIGNATURES[name].count("=")
    assert not [f.name for f in fields[n_first:] if f.default is dataclasses.MISSING]


def test_all_packages_are_typed():
    for name in ("press_core", "attention_patch", "hooks_impl", "patch_impl", "experiments"):
        assert (ROOT / name / "py.typed").exists()
