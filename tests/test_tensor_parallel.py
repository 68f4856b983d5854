"""Two ranks keep what one process keeps.

Every press on Llama; with both mechanisms, on other families, and on a padded batch, one for each
thing that ranks may have to agree on.
"""

import json
import os
import socket
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM, DynamicCache

import hooks_impl
import patch_impl
from press_core import UnsupportedModelError
from press_core.probe import attention_sites
from tests.presses import TABLES
from tests.support import IS_5_2, build, context_for, example_for, held, left_padded, token_ids

PACKAGES = {"hooks": hooks_impl, "patches": patch_impl}
RANKS = 2
CASES = dict(TABLES["ranks"])
"""On how many ranks the heads of a layer lie, by case."""
if IS_5_2:
    del CASES["gpt_oss"]  # whose experts it sends to accelerators, where there are none too
SOME = ("AdaKVPress", "ChunkKVPress", "KeyRerotationPress", "SnapKVPress", "TOVAPress")
PADDING = 12


def run(model, press, name, padding):
    """Positions kept per layer and KV head, logits of what comes after, and the share evicted.

    Args:
        padding: of each row.
    """
    cache, rows = DynamicCache(config=model.config), len(padding)
    context = context_for(name, 48).repeat(rows, 1)
    mask = left_padded(rows, 48 + 3 + 2, padding)[1]
    given = (context, token_ids(rows, 3, seed=1), *token_ids(rows, 2, seed=2).split(1, dim=1))
    seen = 0
    with press(model):
        for ids in given:
            seen += ids.shape[1]
            logits = model(ids, attention_mask=mask[:, :seen], past_key_values=cache).logits
    kept = [[list(rows) for rows in zip(*layer, strict=True)] for layer in held(cache)]
    return kept, logits.flatten().tolist(), press.evicted_ratio


def names_of(case, mechanism):
    """In turn with either mechanism, for both leave the same bits; on Llama some with both."""
    every = sorted(hooks_impl.PRESSES) if case == "llama" else SOME
    in_turn = every[[*PACKAGES].index(mechanism) :: len(PACKAGES)]
    return sorted({*SOME, *in_turn}) if case == "llama" else [*in_turn]


def found_with(case, model, presses):
    """By case, press and mechanism what `run` finds, or the error."""
    padding, found = [0, PADDING] if "padded" in case else [0], {}
    for mechanism, fitted in presses.items():
        for name, press in fitted.items():
            try:
                found[f"{case} {name} {mechanism}"] = run(model, press, name, padding)
            except Exception as error:  # told to the test, which fails
                found[f"{case} {name} {mechanism}"] = repr(error)
    return found


def rank(index, folder, port):
    """What one rank does: run each press of both packages, and write down what it keeps."""
    os.environ.update(
        RANK=str(index), LOCAL_RANK=str(index), WORLD_SIZE=str(RANKS),
        LOCAL_WORLD_SIZE=str(RANKS), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
    )  # fmt: skip
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=index, world_size=RANKS)
    found = {"sinks": refused_for_sinks(index)}
    for case in CASES:
        family = case.split(",")[0]
        model = AutoModelForCausalLM.from_pretrained(Path(folder, family), tp_plan="auto").eval()
        found[f"{case} ranks"] = attention_sites(model)[0].ranks.size
        presses = torch.load(Path(folder, f"{case}.pt"), weights_only=False)
        found |= found_with(case, model, presses)
    Path(folder, f"{index}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def of_ranks(tmp_path_factory):
    """What one process keeps, and each of two ranks."""
    folder = tmp_path_factory.mktemp("models")
    given, alone = [], {}
    for case in CASES:
        family = case.split(",")[0]
        implementation = "eager" if family == "gpt_oss" else "sdpa"
        model = build(family, num_heads=8, num_kv_heads=4, attn_implementation=implementation)
        model.save_pretrained(folder / family)
        presses = {
            mechanism: {n: example_for(p, n, 0.5, model) for n in names_of(case, mechanism)}
            for mechanism, p in PACKAGES.items()
        }
        torch.save(presses, folder / f"{case}.pt")
        given.append((case, model, presses))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # Forks have torch and transformers loaded. They come before gradients start threads here.
    ranks = mp.start_processes(rank, (str(folder), port), RANKS, join=False, start_method="fork")
    for one in given:
        alone |= found_with(*one)
    while not ranks.join():
        pass
    ranks = [json.loads((folder / f"{index}.json").read_text()) for index in range(RANKS)]
    return alone, ranks


@pytest.mark.parametrize(
    ("case", "name", "mechanism"),
    [(c, name, by) for c, by in product(CASES, PACKAGES) for name in names_of(c, by)],
)
def test_two_ranks_keep_what_one_process_keeps(of_ranks, case, name, mechanism):
    """Heads of the ranks together keep what one process keeps, and go on as it does."""
    alone, ranks = of_ranks
    kept, logits, evicted = alone[f"{case} {name} {mechanism}"]
    found = [of_rank[f"{case} {name} {mechanism}"] for of_rank in ranks]
    if name == "RestoreKVPress":  # refused by name: its adapter is made for whole layers
        assert all("0.self_attn are split" in error for error in found), found
        return
    assert [error for error in found if isinstance(error, str)] == []
    split = ranks[0][f"{case} ranks"] > 1
    for layer, expected in enumerate(kept):
        if split:
            assert [head for of_rank in found for head in of_rank[0][layer]] == expected
        else:
            assert all(of_rank[0][layer] == expected for of_rank in found)
    for of_rank in found:
        assert of_rank[1] == pytest.approx(logits, rel=0, abs=1e-5)
        assert of_rank[2] == pytest.approx(evicted)


def refused_for_sinks(index):
    """What each package says of learned sinks whose heads lie on different ranks."""
    model = build("gpt_oss", attn_implementation="eager")
    model._device_mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("tp",))
    for layer in model.model.layers:
        attention = layer.self_attn
        projections = attention.q_proj, attention.k_proj, attention.v_proj
        split = [(module, name) for module in projections for name in ("weight", "bias")]
        for module, name in [*split, (attention, "sinks")]:
            part = getattr(module, name).detach().chunk(RANKS)[index]
            setattr(module, name, torch.nn.Parameter(part))
        part = attention.o_proj.weight.detach().chunk(RANKS, dim=1)[index]
        attention.o_proj.weight = torch.nn.Parameter(part)
    found = []
    for package in PACKAGES.values():
        with pytest.raises(UnsupportedModelError) as refused:
            package.KnormPress(0.5).register(model)
        found.append(str(refused.value))
    return found


def test_sinks_of_heads_on_other_ranks_are_refused(of_ranks):
    for of_rank in of_ranks[1]:
        assert all("learned sinks" in said for said in of_rank["sinks"])


def test_heads_lie_on_the_ranks_as_is_said(of_ranks):
    _, (first, second) = of_ranks
    split = {case: first[f"{case} ranks"] for case in CASES}
    assert split == {case: second[f"{case} ranks"] for case in CASES}
    assert split == CASES
