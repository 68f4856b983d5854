"""Budgets: how many tokens to keep."""

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral, Real

from press_core.errors import HyperparameterError


@dataclass(frozen=True)
class Tokens:
    """A number of tokens to keep, used in place of a compression ratio.

    Contexts no longer than that are not pruned.

    Attributes:
        n: tokens that each KV head keeps, on average where heads differ.
        progress: how far this press prunes towards `n`, if further presses prune the rest: of `S`
            tokens it keeps `S**(1 - progress) * n**progress`.
    """

    n: int
    progress: float = 1.0

    def __post_init__(self) -> None:
        covers = isinstance(self.progress, Real) and 0 <= self.progress <= 1
        if not (is_whole_number(self.n, 1) and covers):
            raise HyperparameterError(
                f"Tokens({self.n!r}, {self.progress!r}): n must be a number of tokens, 1 or more, "
                "and progress a number in [0, 1]"
            )
        vars(self).update(n=int(self.n), progress=float(self.progress))

    def __repr__(self) -> str:
        return f"Tokens({self.n})" if self.progress == 1 else f"Tokens({self.n}, {self.progress})"

    def of(self, length: int) -> int:
        """Number of tokens kept of `length`."""
        if length <= self.n:
            return length
        return max(self.n, round(length * (self.n / length) ** self.progress))


Amount = float | Tokens
"""A compression ratio in [0, 1), or the number of tokens to keep."""


def is_whole_number(value: object, at_least: int) -> bool:
    """Whether `value` is a whole number, `at_least` or more."""
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= at_least


def is_amount(value: object) -> bool:
    """Whether `value` is a compression ratio in [0, 1), or `Tokens`."""
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    return isinstance(value, Tokens) or (is_number and 0 <= float(value) < 1)  # type: ignore[arg-type]


def n_kept(length: int, amount: Amount) -> int:
    """Number of tokens that each KV head keeps of `length`; at least one."""
    if isinstance(amount, Tokens):
        return amount.of(length)
    return max(1, int(length * (1 - amount)))


def ratio_of(length: int, amount: Amount) -> float:
    """Share of `length` tokens that `amount` evicts."""
    return 1 - amount.of(length) / length if isinstance(amount, Tokens) else amount


def kept_of_chunks(length: int, step: int, amount: Amount) -> list[int]:
    """Number of tokens to keep of each chunk of `step` tokens, if chunks are pruned separately."""
    starts = range(0, length, step)
    if not isinstance(amount, Tokens):
        return [n_kept(min(step, length - start), amount) for start in starts]
    ends = [amount.of(length) * min(start + step, length) // length for start in starts]
    return [max(1, end - before) for before, end in zip([0, *ends], ends, strict=False)]


def n_together(lengths: Sequence[int], amount: Amount, n_joining: int = 0) -> int:
    """How many tokens heads of these `lengths` keep in total, if they share a budget.

    Args:
        n_joining: additional tokens that each head stores within the budget.
    """
    if isinstance(amount, Tokens):
        return sum(max(0, amount.of(length) - n_joining) for length in lengths)
    size = sum(lengths)
    return size - int(size * min(1.0, amount + n_joining * len(lengths) / size))
