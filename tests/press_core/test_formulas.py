"""The formulas of single presses against slow references."""

from dataclasses import replace
from itertools import product

import pytest
import torch

from press_core import formulas
from press_core.model.sites import Softmax
from press_core.observed import Query
from tests.press_core import slowly
from tests.press_core.drawn import FITS, KV, SITES, Prepared, drawn_call
from tests.support import table_beside

LENGTH = 23
CLOSE = {"rtol": 1e-5, "atol": 1e-6}


def cases():
    """Of each entry of the table, each press of each kind that has learned each thing."""
    for name, entry in table_beside(__file__, "references").items():
        options = entry.get("with", {})
        several = entry["presses"], entry.get("kinds", ["plain"]), entry.get("learned", [None])
        for text, kind, learned, values in product(*several, [*product(*options.values())]):
            fields = dict(zip(options, values, strict=True))
            press = replace(eval(text, vars(formulas)), **fields)
            yield pytest.param(name, entry, press, kind, learned, id=f"{press}, {kind}")


@pytest.mark.parametrize(("name", "entry", "press", "kind", "learned"), cases())
def test_against_the_slow_reference(name, entry, press, kind, learned):
    """Protected tokens are above all others."""
    call = drawn_call(LENGTH, site=SITES[kind](), scope=Prepared(FITS.get(learned)))
    slow, close = getattr(slowly, entry.get("slow", name)), entry.get("close", CLOSE)
    protected = [*eval(entry.get("protected", "()"), {"press": press, "LENGTH": LENGTH})]
    scores, judged = press.score(call), [j for j in range(LENGTH) if j not in protected]
    for row, head in KV:
        of_head = scores[row, head]
        if len(judged) > 1:
            wanted = slow(call, press, row, head)[judged].to(scores.dtype)
            torch.testing.assert_close(of_head[judged], wanted, **close)
        if protected:
            assert of_head[protected].min() > of_head[judged].max()


def test_dropkv_of_queries_that_see_almost_one_key_alone():
    """Their outputs are almost its value: only float32's rounding of an output is between them.

    An output is off by no more than that, and what it is off by is divided by epsilon and squared.
    """
    call = drawn_call(LENGTH, site=replace(SITES["plain"](), softmax=Softmax(8.0)))
    press, query = formulas.DropKV(0.5, 4, 1), Query(call.queries().float(), is_rotated=True)
    rounded = call.replace(keys=call.keys.float(), values=call.values.float(), query=query)
    found, wanted = press.score(rounded)[..., :-4], press.score(call)[..., :-4]
    rounding = torch.finfo(torch.float32).eps * call.values.norm(dim=-1).max() / press.epsilon
    torch.testing.assert_close(found, wanted.float(), rtol=0.2, atol=rounding.square().item())
