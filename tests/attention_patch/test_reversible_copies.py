"""Copies of patched modules are clean, patches that somebody takes away say so; threads."""

import copy
import functools
import io
import pickle
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from operator import neg

import pytest
import torch
from torch import nn
from torch.fx import symbolic_trace

from attention_patch import wrap
from tests.attention_patch.test_reversible import _same


class Doubling(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(2.0), requires_grad=False)

    def forward(self, x):
        return x * self.weight


# ---- copies --------------------------------------------------------------------------------------


def _tenfold(call_next, x):
    return 10 * call_next(x)


def _pickled(module, protocol=None):
    return pickle.loads(pickle.dumps(module, protocol=protocol))


def _saved(module):
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


DEEP_COPIES = [copy.deepcopy, _pickled, lambda module: _pickled(module, 2), _saved]
COPIES = [copy.copy, *DEEP_COPIES]
by_every_copy = pytest.mark.parametrize("make_copy", COPIES)


@by_every_copy
def test_a_copy_of_a_model_with_a_patched_part_is_clean(make_copy):
    part = Doubling()
    part.weight.fill_(3.0)
    model = nn.Sequential(Doubling(), part)
    patch = wrap(part, "forward", _tenfold)
    other = make_copy(model)
    assert float(model(torch.tensor(1.0))) == 60
    expected = 60 if make_copy is copy.copy else 6  # a shallow copy shares its parts
    assert float(other(torch.tensor(1.0))) == expected
    patch.remove()
    assert float(other(torch.tensor(1.0))) == 6


@by_every_copy
def test_a_forward_of_the_modules_own_goes_along(make_copy):
    module = Doubling()
    module.forward = neg
    patch = wrap(module, "forward", _tenfold)
    other = make_copy(module)
    assert vars(other)["forward"] is neg
    assert (other(3), module(3)) == (-3, -30)
    patch.remove()
    assert vars(module)["forward"] is neg


def test_a_copy_may_be_patched_by_itself():
    module = Doubling()
    patch = wrap(module, "forward", _tenfold)
    other = copy.deepcopy(module)
    patch_of_copy = wrap(other, "forward", _tenfold)
    patch.remove()
    assert (float(module(3)), float(other(3))) == (6, 60)
    patch_of_copy.remove()
    assert float(other(3)) == 6


class Rebuilt(Doubling):
    def __reduce__(self):
        return Rebuilt, ()


@by_every_copy
@pytest.mark.parametrize("make", [Rebuilt, lambda: symbolic_trace(Doubling())], ids=["own", "fx"])
def test_a_module_that_is_made_anew_is_copied(make, make_copy):
    module = make()
    patch = wrap(module, "forward", _tenfold)
    assert (float(make_copy(module)(3)), float(module(3))) == (6, 60)
    patch.remove()


def test_a_way_of_copying_that_the_module_had_is_left_alone():
    module = Doubling()
    module.__reduce_ex__ = own = lambda protocol: (Doubling, ())
    patch = wrap(module, "forward", _tenfold)
    assert vars(module)["__reduce_ex__"] is own
    patch.remove()
    assert vars(module)["__reduce_ex__"] is own


@pytest.mark.parametrize("make_copy", DEEP_COPIES)
def test_a_copy_under_a_foreign_wrapper_runs_the_foreign_one_alone(make_copy):
    module = Doubling()
    patch = wrap(module, "forward", _tenfold)
    module._old_forward = module.forward  # as accelerate hooks a module
    wrapper = functools.partial(_plus_one, module)
    module.forward = functools.update_wrapper(wrapper, module._old_forward)
    other = make_copy(module)
    other.weight.fill_(7.0)
    assert float(module(3)) == 61
    assert float(other(3)) == 22  # its own weight, and no layer of ours
    module.forward = module._old_forward
    del module._old_forward
    patch.remove()
    assert "forward" not in vars(module)
    assert "__reduce_ex__" not in vars(module)


def _plus_one(module, x):
    return module._old_forward(x) + 1


def _put_back(module, former):
    module.forward = former


def _delete(module, _):
    del module.forward


@pytest.mark.parametrize("take", [_put_back, _delete])
def test_a_patch_that_somebody_took_away_says_so(take):
    module = Doubling()
    former = module.forward
    patches = [wrap(module, "forward", _tenfold)]
    assert not patches[0].is_lost
    take(module, former)
    assert patches[0].is_lost
    assert float(module(3)) == 6
    patches.append(wrap(module, "forward", _tenfold))
    assert [patch.is_lost for patch in patches] == [True, False]
    for patch in patches:
        patch.remove()
        assert not patch.is_lost
    vars(module).pop("forward", None)  # what was put back is somebody else's
    assert float(module(3)) == 6


# ---- threads -------------------------------------------------------------------------------------


def test_threads_that_patch_at_once_end_clean():
    module, start = Doubling(), threading.Barrier(3)
    before = dict(vars(module))

    def patching(first):
        start.wait(20)
        for _ in range(300):
            patches = [wrap(module, "forward", _tenfold) for _ in range(2)]
            module(3)
            patches[first].remove()
            patches[1 - first].remove()

    def calling():
        start.wait(20)
        for _ in range(900):
            assert float(module(3)) in {6 * 10**n for n in range(5)}

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(3) as pool:
            jobs = [pool.submit(patching, 0), pool.submit(patching, 1), pool.submit(calling)]
            for job in jobs:
                job.result()
    finally:
        sys.setswitchinterval(interval)
    assert float(module(3)) == 6
    assert _same(module, before)
