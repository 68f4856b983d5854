"""Presses as text: `SnapKVPress`, `AdaKVPress(SnapKVPress(window_size=32))`, or a press's `repr`.

The text is a Python expression of press names, keyword or positional fields, numbers, strings and
lists; nothing else is evaluated. A field for a share of the tokens also takes a number of tokens:
`SnapKVPress(Tokens(64))`. Two classes of the user's own, with their default fields, are written
`my_module:MyHookPress,my_module:MyPatchPress`; their modules are imported.

A cell sets the amount of a press with its `with_ratio` or `with_budget`. If another field takes the
amount, write the name `ratio` or `budget` for it:
`DuoAttentionPress(head_compression_ratio=ratio)`, `SimLayerKVPress(n_recent=budget)`.
"""

import ast
from contextlib import suppress
from inspect import signature
from typing import Any, NamedTuple

from experiments import UserError, refusing
from experiments.framework.plots import is_own
from experiments.testbed.recipes import MECHANISMS, Presses, class_of, press_name
from press_core import HyperparameterError, Tokens
from press_core.budget import Amount
from press_core.scope import InstalledPress

_NAMES = ("ratio", "budget")
"""Names in a text that are replaced by the cell's amount."""


def make_press(text: str, mechanism: str, amount: Amount | None, seed: int) -> InstalledPress:
    """The press that `text` describes.

    Args:
        mechanism: "hook" or "patch".
        amount: the ratio to evict, or the `Tokens` to keep; it replaces `ratio` or `budget` in the
            text, if the text has one of them. None: the fields in the text set the amount.
        seed: seed of presses that draw at random, if the text gives none.

    Raises:
        UserError: if the text is no such expression, or names `ratio` or `budget` and `amount` is
            not of that kind.
        HyperparameterError: if a field is out of range, or the press does not take `amount`.
    """
    expression = _parse(text)
    given: dict[str, float] = {}
    if amount is not None:
        given = {"budget": amount.n} if isinstance(amount, Tokens) else {"ratio": amount}
    press = _Maker(text, MECHANISMS[mechanism], given, seed).value(expression)
    if not isinstance(press, InstalledPress):
        raise UserError(f"{text!r} is no press; write one such as SnapKVPress")
    if amount is None or _names_in(expression):
        return press
    return _with_amount(press, amount)


def takes(text: str, mechanism: str) -> set[str]:
    """The kinds of amounts that the press described by `text` takes: "ratio", "budget", or both.

    Raises:
        UserError: if it describes no press.
    """
    if named := _names_in(_parse(text)):
        return named
    press, kinds = make_press(text, mechanism, None, 0), set()
    for kind, amount in (("ratio", 0.5), ("budget", Tokens(64))):
        with suppress(HyperparameterError):
            _with_amount(press, amount)
            kinds.add(kind)
    return kinds


def _with_amount(press: Any, amount: Amount) -> InstalledPress:
    return press.with_budget(amount.n) if isinstance(amount, Tokens) else press.with_ratio(amount)


def _parse(text: str) -> ast.expr:
    if is_own(text):
        return ast.Name(press_name(text))
    try:
        return ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        reason = getattr(error, "msg", None) or error or type(error).__name__
        raise UserError(
            f"cannot read the press {text!r:.200}: {reason}; write one such as "
            "AdaKVPress(SnapKVPress(window_size=32))"
        ) from error


def _names_in(expression: ast.expr) -> set[str]:
    """The names among `_NAMES` that an expression contains."""
    return {n.id for n in ast.walk(expression) if isinstance(n, ast.Name)} & set(_NAMES)


class _Maker(NamedTuple):
    """Evaluates the expression of one press."""

    text: str
    presses: Presses
    given: dict[str, float]
    seed: int

    def value(self, node: ast.expr) -> Any:
        match node:
            case ast.Name(id=name) if name in _NAMES:
                if name not in self.given:
                    raise UserError(f"{self.text!r} says `{name}`, and no {name} is given")
                return self.given[name]
            case ast.Name(id=name):
                return self.made(name, [], {})
            case ast.Call(func=ast.Name(id=name)) if all(k.arg for k in node.keywords):
                given = {str(k.arg): self.value(k.value) for k in node.keywords}
                return self.made(name, [self.value(arg) for arg in node.args], given)
            case ast.List(elts=items):
                return [self.value(item) for item in items]
            case ast.Tuple(elts=items):
                return tuple(self.value(item) for item in items)
        try:
            return ast.literal_eval(node)
        except (ValueError, TypeError, RecursionError):
            raise UserError(
                f"{ast.get_source_segment(self.text.strip(), node)!s:.60} is not allowed in the "
                f"press {self.text!r:.200}; write presses, numbers, strings and lists only"
            ) from None

    def made(self, name: str, args: list[Any], given: dict[str, Any]) -> Any:
        """Build the press, or the `Tokens`, with that name and those fields."""
        if name not in (*self.presses, Tokens.__name__) and not is_own(name):
            raise UserError(
                f"there is no press {name!r} (in {self.text!r}); there are "
                f"{', '.join(sorted(self.presses))}"
            )
        made = Tokens if name == Tokens.__name__ else class_of(self.presses, name)
        fields = ", ".join(signature(made).parameters) or "none"
        advice = f"; the fields of {name} are {fields}"
        with refusing(f"cannot make {self.text!r}", TypeError, advice=advice):
            values = signature(made).bind(*args, **given).arguments
            if "seed" in signature(made).parameters and values.get("seed") is None:
                values["seed"] = self.seed
            return made(**values)
