"""Two ranks keep what one process keeps, with every press and both mechanisms."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

import hooks_impl
import patch_impl
from experiments.testbed.families import build
from press_core import Press
from press_core.model.sites import attention_sites
from tests.support import context_for, example_for, token_ids

PACKAGES = {"hooks": hooks_impl, "patches": patch_impl}
RANKS = 2


def run(model: PreTrainedModel, press: Press, name: str) -> tuple[list[Any], list[float], float]:
    """Positions kept per layer and KV head, logits of what comes after, and the share evicted."""
    cache, context = DynamicCache(config=model.config), context_for(name, 48)
    with press(model), torch.no_grad():
        model(context, past_key_values=cache)
        for ids in (token_ids(1, 3, seed=1), *token_ids(4, 1, seed=2).split(1)):
            logits = model(ids, past_key_values=cache).logits
    kept = [positions_in(layer).tolist() for layer in cache.layers]
    return kept, logits.flatten().tolist(), press.evicted_ratio


def positions_in(layer: Any) -> Tensor:
    """`(H_kv, n)` position of every slot that a layer holds, -1 for what is not there."""
    if hasattr(layer, "dense"):
        return layer.dense()[2][0]
    n_heads, n_slots = layer.values.shape[1:3]
    known = layer.all_positions() if hasattr(layer, "all_positions") else torch.arange(n_slots)
    return known.expand(1, n_heads, -1)[0]


def heads_only(kept: list[Any]) -> list[Any]:
    return [[[p for p in head if p >= 0] for head in layer] for layer in kept]


def presses_of(package: Any, model: PreTrainedModel) -> dict[str, Press]:
    return {name: example_for(package, name, 0.5, model) for name in sorted(package.PRESSES)}


def rank(index: int, folder: str, port: int) -> None:
    """What one rank does: run each press of both packages, and write down what it keeps."""
    os.environ.update(
        RANK=str(index), LOCAL_RANK=str(index), WORLD_SIZE=str(RANKS),
        LOCAL_WORLD_SIZE=str(RANKS), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
    )  # fmt: skip
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=index, world_size=RANKS)
    model = AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto").eval()
    assert attention_sites(model)[0].heads.size == RANKS
    found: dict[str, Any] = {}
    for mechanism in PACKAGES:
        fitted = torch.load(Path(folder, f"{mechanism}.pt"), weights_only=False)
        for name, press in fitted.items():
            try:
                found[f"{name} {mechanism}"] = run(model, press, name)
            except Exception as error:  # told to the test, which fails
                found[f"{name} {mechanism}"] = repr(error)
    Path(folder, f"{index}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def of_ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], list[Any]]:
    """What one process keeps, and each of two ranks."""
    folder = tmp_path_factory.mktemp("model")
    model = build("llama", num_heads=8, num_kv_heads=4)
    model.save_pretrained(folder)
    alone = {}
    for mechanism, package in PACKAGES.items():
        presses = presses_of(package, model)
        torch.save(presses, folder / f"{mechanism}.pt")
        for name, press in presses.items():
            alone[f"{name} {mechanism}"] = run(model, press, name)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(rank, (str(folder), port), nprocs=RANKS)
    ranks = [json.loads((folder / f"{index}.json").read_text()) for index in range(RANKS)]
    return alone, ranks


@pytest.mark.parametrize("mechanism", PACKAGES)
@pytest.mark.parametrize("name", sorted(hooks_impl.PRESSES))
def test_two_ranks_keep_what_one_process_keeps(of_ranks, name, mechanism):
    alone, ranks = of_ranks
    kept, logits, evicted = alone[f"{name} {mechanism}"]
    found = [of_rank[f"{name} {mechanism}"] for of_rank in ranks]
    if name == "RestoreKVPress":  # refused by name: its adapter is made for whole layers
        assert all("ranks share those of model.layers.0" in error for error in found)
        return
    assert [error for error in found if isinstance(error, str)] == []
    together = [
        [head for of_rank in found for head in of_rank[0][layer]] for layer in range(len(kept))
    ]
    assert heads_only(together) == heads_only(kept)
    for of_rank in found:
        torch.testing.assert_close(
            torch.tensor(of_rank[1]), torch.tensor(logits), rtol=0, atol=1e-5
        )
        assert of_rank[2] == pytest.approx(evicted)
