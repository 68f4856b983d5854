"""What several tests need: small inputs, presses, and `snapshot`."""

import copy
import itertools
import os
import pickle
from collections import defaultdict
from contextlib import ExitStack, contextmanager, nullcontext
from functools import lru_cache
from io import BytesIO
from pathlib import Path

import pytest
import torch
import transformers
import yaml
from torch import nn
from transformers import DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import hooks_impl
import patch_impl
from experiments.testbed import families
from experiments.testbed.families import VOCABULARY
from experiments.testbed.recipes import DELIMITER, fitted_pair, recipe_pair
from press_core import kept_lengths, kept_positions
from press_core.forward import Arguments, Forward, current, with_cache
from tests.snapshot import snapshot as snapshot
from tests.snapshot import unchanged

PACKAGES = (hooks_impl, patch_impl)
IS_5_2 = transformers.__version__.startswith("5.2.")
both = pytest.mark.parametrize("package", PACKAGES, ids=["hooks", "patches"])
"""For what may differ between the mechanisms; other tests take `package` from `fixtures.py`."""

REPLAYING = ["KVComposePress", "KVgradPress", "KVzipPress", "RestoreKVPress"]
replaying = pytest.mark.parametrize("name", REPLAYING)

PLAIN = os.environ | {"TORCHDYNAMO_DISABLE": "1"}
"""Of a process that compiles nothing: where hqq is installed, transformers loads the compiler."""

PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "default")
"""How many cases are drawn: of "short" fewer, of "long" many more."""

GREEDY = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}


def table_beside(path, name):
    """What `name.yaml` holds, in the folder of the file `path`."""
    return yaml.safe_load(Path(path).with_name(f"{name}.yaml").read_text("utf-8"))


def build(family, **options):
    """`experiments.testbed.families.build`: a copy, which takes less time than another model."""
    pickled, tensors = _built(family, **options)
    unpickler, memo = pickle.Unpickler(BytesIO(pickled)), {}
    unpickler.persistent_load = [copy.deepcopy(x, memo) for x in tensors].__getitem__
    return unpickler.load()


@lru_cache(maxsize=100)
@torch.inference_mode(False)  # whatever the first test that asks is in
def _built(family, **options):
    """A model, pickled without its tensors, and these: a sixth of the time of a deep copy."""
    file, tensors = BytesIO(), {}
    pickler = pickle.Pickler(file)
    pickler.persistent_id = lambda x: (
        tensors.setdefault(id(x), (len(tensors), x))[0] if isinstance(x, torch.Tensor) else None
    )
    pickler.dump(families.build(family, **options))
    return file.getvalue(), [x for _, x in tensors.values()]


def make(family="llama", **options):
    """A model in float64, in which no rounding error decides a top-k; eager attention in float32.

    (Masks of eager attention overflow in float64, as transformers makes them.)
    """
    eager = family in ("gemma2", "gpt_oss") or options.get("attn_implementation") == "eager"
    options.setdefault("attn_implementation", "eager" if eager else "sdpa")
    return build(family, **{"dtype": torch.float32 if eager else torch.float64, **options})


def rotating(model, rope_type, **parameters):
    """`model`, a Llama, with rotary embeddings of another type."""
    known = {"rope_type": rope_type, "rope_theta": 1e4, "factor": 4.0}
    model.config.rope_parameters = known | parameters
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    return model


def tolerance(model):
    return 1e-10 if model.dtype == torch.float64 else 2e-5


def token_ids(batch, length, seed=0):
    """`(batch, length)` random token ids without special tokens."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (batch, length), generator=generator)


def example_for(package, name, ratio, model):
    """The press `name` of a package, ready for `model` and for contexts of a few dozen tokens."""
    pair = fitted_pair(recipe_pair(name, ratio), model)
    return pair.patch if package is patch_impl else pair.hook


def assert_refused(press, model, error, match):
    """A press does not open, says why, and leaves the model as it was."""
    with unchanged(model), pytest.raises(error, match=match):
        press.register(model)


def context_for(name, length):
    """`(1, length)` token ids that the press `name` can prune."""
    ids = token_ids(1, length)
    if name == "FinchPress":  # which asks for a delimiter between context and question
        ids[:, -8] = DELIMITER
    return ids


def left_padded(batch, length, padding):
    """Input ids, attention mask and position ids of a left-padded batch, each `(batch, length)`."""
    ids, mask = token_ids(batch, length), torch.ones(batch, length, dtype=torch.long)
    for row, n in enumerate(padding):
        ids[row, :n], mask[row, :n] = 0, 0
    return ids, mask, (mask.cumsum(dim=-1) - 1).clamp(min=0)


def ran(model, press, given, cache=None, **inputs):
    """The cache that forwards over `given` leave in a scope of a press, and the logits of each.

    Without a press, of forwards outside of any scope.
    """
    cache = DynamicCache(config=model.config) if cache is None else cache
    with torch.no_grad(), nullcontext() if press is None else press(model):
        return cache, [model(ids, **with_cache(model, cache), **inputs).logits for ids in given]


def nested(*presses):
    """Opens the scopes of several presses, the first outermost."""

    def opened(model):
        scopes = ExitStack()
        for press in presses:
            scopes.enter_context(press(model))
        return scopes

    return opened


def in_parts(model, press, padded, bounds, rows=slice(None)):
    """What `ran` gives of forwards over a padded batch; `padded` is what `left_padded` gives.

    Args:
        bounds: where the forwards begin, and the last one ends; what stands before is left out.
        rows: those that are run.
    """
    (ids, mask, positions), cache, logits = padded, DynamicCache(config=model.config), []
    with torch.no_grad(), press(model):
        for start, end in itertools.pairwise(bounds):
            inputs = {"attention_mask": mask[rows, bounds[0] : end]}
            inputs["position_ids"] = positions[rows, start:end]
            output = model(ids[rows, start:end], **with_cache(model, cache), **inputs)
            logits.append(output.logits)
    return cache, logits


class Latest(hooks_impl.BasePress):
    """Keeps the latest eight tokens and, as a press of kvpress, does not say which those are."""

    def compress(self, module, hidden_states, keys, values, attentions, kwargs):
        return keys[:, :, -8:], values[:, :, -8:]


def filled(model, press, ids, cache=None, **inputs):
    """The cache that a press leaves of one forward; without a press the whole one."""
    return ran(model, press, [ids], cache, **inputs)[0]


def lengths(press, model=None):
    """How many of 40 tokens each head keeps, by layer."""
    cache = filled(model or build("llama"), press, token_ids(2, 40))
    return [layer[0].tolist() for layer in kept_lengths(cache)]


def held(cache):
    """Positions that a cache holds, by layer, row and head, whatever kind its layers are."""
    told = zip(kept_positions(cache), kept_lengths(cache), strict=True)
    return [
        [[[p for p in head if p >= 0] for head in row] for row in positions]
        for positions in (at.expand(*lengths.shape, -1).tolist() for at, lengths in told)
    ]


def forwards(lengths, batch=1):
    """Ids of forwards of these lengths, `(batch, length)` each."""
    return list(token_ids(batch, sum(lengths), seed=7).split(lengths, dim=1))


@contextmanager
def watched():
    """Per layer, the query and the keys of each call of sdpa, as the model itself made them."""
    seen = defaultdict(list)
    function = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def watch(module, query, key, *args, **kwargs):
        seen[module.layer_idx].append((query, key))
        return function(module, query, key, *args, **kwargs)

    ALL_ATTENTION_FUNCTIONS["sdpa"] = watch
    try:
        yield seen
    finally:
        del ALL_ATTENTION_FUNCTIONS["sdpa"]


def in_turn(names, *lists):
    """Every entry with every other, and as `package` hooks and patches like the squares of a board.

    For what is built upon presses, or holds of them as both leave the same bits: no case is run
    with both packages, and of several lists each entry meets both.
    """
    packages = tuple(zip(PACKAGES, ("hooks", "patches"), strict=True))
    cases = []
    for numbered in itertools.product(*map(enumerate, lists)):
        package, said = packages[sum(index for index, _ in numbered) % 2]
        entries = [entry for _, entry in numbered]
        label = "-".join([*map(str, entries), said])
        cases.append(pytest.param(package, *entries, id=label))
    return pytest.mark.parametrize(("package", *names.split(", ")), cases)


@contextmanager
def reading(layer):
    """Stands for a forward that reads `layer` with all the help it needs."""
    given = Arguments((), {}, ())
    current.forward = Forward(nn.Identity(), given, entered=[layer], reading=layer)
    try:
        yield
    finally:
        current.forward = None


def update(layer, *new):
    """Append `new` keys and values, as whoever attends over the layer does."""
    with reading(layer):
        return layer.update(*new)
