"""How many tokens stay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real

from press_core.errors import HyperparameterError


@dataclass(frozen=True)
class Tokens:
    """A number of tokens to keep, where otherwise a share to evict is said.

    Contexts of no more tokens are left whole.

    Attributes:
        n: tokens that each KV head keeps, on average where heads differ.
        progress: how far a press goes towards `n`, where others go on from there: of `S` tokens it
            keeps `S**(1 - progress) * n**progress`.
    """

    n: int
    progress: float = 1.0

    def __post_init__(self) -> None:
        if not (isinstance(self.n, int) and self.n >= 1 and 0 <= self.progress <= 1):
            raise HyperparameterError(f"{self}: a budget must be a number of tokens, 1 or more")

    def __repr__(self) -> str:
        return f"Tokens({self.n})" if self.progress == 1 else f"Tokens({self.n}, {self.progress})"

    def of(self, length: int) -> int:
        """How many of `length` tokens are kept."""
        if length <= self.n:
            return length
        return max(self.n, round(length * (self.n / length) ** self.progress))


Amount = float | Tokens
"""A compression ratio in [0, 1), or the number of tokens that are left."""


def is_amount(value: object) -> bool:
    """Whether `value` is a compression ratio in its range, or a number of tokens."""
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    return isinstance(value, Tokens) or (is_number and 0 <= float(value) < 1)  # type: ignore[arg-type]


def n_kept(length: int, amount: Amount) -> int:
    """Number of tokens that each KV head keeps of `length`; never zero."""
    if isinstance(amount, Tokens):
        return amount.of(length)
    return max(1, int(length * (1 - amount)))


def ratio_of(length: int, amount: Amount) -> float:
    """Share of `length` tokens that `amount` says to evict."""
    return 1 - amount.of(length) / length if isinstance(amount, Tokens) else amount


def kept_of_chunks(length: int, step: int, amount: Amount) -> list[int]:
    """Numbers of tokens to keep of each `step` of `length`, where each is pruned by itself."""
    starts = range(0, length, step)
    if not isinstance(amount, Tokens):
        return [n_kept(min(step, length - start), amount) for start in starts]
    ends = [amount.of(length) * min(start + step, length) // length for start in starts]
    return [max(1, end - before) for before, end in zip([0, *ends], ends, strict=False)]


def n_together(lengths: Sequence[int], amount: Amount, n_joining: int = 0) -> int:
    """How many tokens heads of these `lengths` keep that share a budget.

    Args:
        n_joining: tokens beside them in every head, which have to fit, too.
    """
    if isinstance(amount, Tokens):
        return sum(max(0, amount.of(length) - n_joining) for length in lengths)
    size = sum(lengths)
    return size - int(size * min(1.0, amount + n_joining * len(lengths) / size))
