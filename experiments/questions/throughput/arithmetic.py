"""What arithmetic says of models that are too large to be run here."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd

from experiments.questions.throughput.cells import Shape

REAL: dict[str, Shape] = {
    "Llama-3.1-8B": Shape(32, 8, 128),
    "Llama-3.1-70B": Shape(80, 8, 128),
    "Qwen3-8B": Shape(36, 8, 128),
    "Qwen3-32B": Shape(64, 8, 128),
}
"""Published configurations, in bfloat16."""

CONTEXTS = (32 * 2**10, 128 * 2**10, 2**20)
RATIOS = (0.0, 0.5, 0.8)


def predicted_models(shapes: Mapping[str, Shape] = REAL) -> pd.DataFrame:
    """Bytes of the caches of `shapes`.

    Returns:
        Columns `model`, `layers`, `kv_heads`, `head_dim`, `context`, `ratio` and `bytes`.
    """
    rows = [
        {"model": name, "layers": shape.layers, "kv_heads": shape.kv_heads}
        | {"head_dim": shape.head_dim, "context": context, "ratio": ratio}
        | {"bytes": shape.nbytes(context, ratio)}
        for name, shape in shapes.items()
        for context in CONTEXTS
        for ratio in RATIOS
    ]
    return pd.DataFrame(rows)
