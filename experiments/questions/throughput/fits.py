"""The longest context, and the largest batch, for which a limit of memory is enough."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from transformers import PreTrainedModel

from experiments.questions.throughput.cells import Condition, Shape, Subject, evicted
from experiments.questions.throughput.space import Run, peak_of

PRECISION = 1 / 16
"""Of what is found, as a share of it."""

MOST = 2**24
"""Beyond which nothing is tried."""

CONTEXT, BATCH = "context", "batch"


def largest(fits: Callable[[int], bool], guess: int, most: int = MOST) -> tuple[int, int]:
    """The largest number that fits, by bisection, if all smaller ones do.

    Args:
        guess: where to begin, at least 1.
        most: beyond which nothing is tried.

    Returns:
        The number, no more than `PRECISION` below the first that does not fit; 0: none does. And
        how often `fits` was called.
    """
    fitting, too_large, tried, n_tried = 0, most + 1, max(1, min(guess, most)), 0
    while tried is not None:
        n_tried += 1
        if fits(tried):
            fitting = tried
        else:
            too_large = tried
        tried = _between(fitting, too_large, most)  # type: ignore[assignment]
    return fitting, n_tried


def _between(fitting: int, too_large: int, most: int) -> int | None:
    """What to try next; None if both ends are close enough."""
    if too_large - fitting <= max(1, PRECISION * fitting):
        return None
    if too_large > most and fitting:
        return min(most, max(fitting + 1, int(1.25 * fitting)))
    return (fitting + too_large) // 2


class Budget(NamedTuple):
    """Arithmetic of what a model takes while it reads a context.

    Attributes:
        weights: bytes of the model.
        cache: of the whole cache, per token.
        layer: of one layer's share of it, which is there whole before it is pruned.
        working: of what a layer computes with, per token.
    """

    weights: int
    cache: float
    layer: float
    working: float

    @classmethod
    def of(cls, model: PreTrainedModel) -> Budget:
        """That of a model whose layers all attend to all tokens.

        Raises:
            UserError: if some layers keep a sliding window.
        """
        shape, config = Shape.of(model), model.config.get_text_config()
        weights = sum(p.nbytes for p in {id(p): p for p in model.parameters()}.values())
        width, inner = config.hidden_size, getattr(config, "intermediate_size", 0)
        heads = config.num_attention_heads * shape.head_dim
        keys = 2 * shape.kv_heads * shape.head_dim
        # In attention the stream, its norm, queries and keys before and after rotation, the output;
        # in the MLP the stream, its norm, and the gate, what it gates and their product.
        attention, mlp = 2 * width + 3 * heads + 2 * keys, 2 * width + 3 * inner
        working = shape.itemsize * max(attention, mlp)
        whole = shape.nbytes(1)
        return cls(weights, whole, whole / shape.layers, working)

    def tokens(self, limit: float, share_evicted: float) -> int:
        """How many tokens of context fit in `limit` bytes, in all rows together."""
        per_token = self.cache * (1 - share_evicted) + self.layer * share_evicted + self.working
        return max(0, int((limit - self.weights) / per_token))


def fitting_row(
    subject: Subject, budget: Budget, condition: Condition, limit: int, what: str, other: int
) -> dict[str, Any]:
    """The longest context at a batch of `other`, or the largest batch at a context of `other`."""
    peaks: dict[int, int | None] = {}

    def fits(n: int) -> bool:
        sizes = (n, other) if what == CONTEXT else (other, n)
        peaks[n] = peak_of(subject, Run(condition, *sizes, tokens=1))
        peak = peaks[n]
        return peak is not None and budget.weights + peak <= limit

    predicted = budget.tokens(limit, evicted(condition)) // other
    measured, n_tried = largest(fits, max(predicted, 16 if what == CONTEXT else 1))
    return {
        "what": what,
        "other": other,
        **condition._asdict(),
        "limit": limit,
        "measured": measured,
        "predicted": predicted,
        "peak": peaks.get(measured),
        "tried": n_tried,
    }
