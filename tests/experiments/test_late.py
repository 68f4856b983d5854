"""hqq is imported when something uses it, and then does what it always does."""

import subprocess
import sys

CODE = """
import sys
from experiments.late import import_hqq_late

import_hqq_late()
import torch
from transformers import QuantizedCache

print("hqq.core.optimize" in sys.modules)
from experiments.testbed.families import build

model = build("llama")
cache = QuantizedCache(backend="hqq", config=model.config, q_group_size=16, residual_length=16)
with torch.no_grad():
    print(model(torch.arange(3, 67)[None], past_key_values=cache).logits.isfinite().all().item())
print("hqq.core.optimize" in sys.modules)
from hqq.core.quantize import HQQLinear, Quantizer

print(HQQLinear.__module__, Quantizer.__module__)
"""


def test_hqq_is_imported_when_it_is_used():
    run = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=False)
    assert run.stdout.splitlines() == [
        *("False", "True", "True"),
        "hqq.core.quantize hqq.core.quantize",
    ], run.stderr
