"""Presses as text: `SnapKVPress`, `AdaKVPress(SnapKVPress(window_size=32))`, what `repr` gives.

The text is a Python expression of press names, keyword or positional fields, numbers, strings and
lists; nothing else is evaluated. The name `ratio` stands for the compression ratio of a cell where
a press takes it in another place than its `compression_ratio`:
`DuoAttentionPress(head_compression_ratio=ratio)`.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import hooks_impl
import patch_impl
from experiments import UserError
from press_core import HyperparameterError, Press

MECHANISMS: Mapping[str, Mapping[str, type[Press]]] = {
    "hook": hooks_impl.PRESSES,
    "patch": patch_impl.PRESSES,
}
"""Every press class by mechanism and name."""

RATIO = "ratio"


def make_press(text: str, mechanism: str, ratio: float | None, seed: int) -> Press:
    """The press that `text` describes.

    Args:
        mechanism: "hook" or "patch".
        ratio: where the text says `ratio`, or else the ratio that the press is told; None: its own.
        seed: of presses that draw at random, where the text gives none.

    Raises:
        UserError: if the text is no such expression.
        HyperparameterError: if a field is out of range, or if the press cannot be told a ratio.
    """
    expression = _parse(text)
    press = _Maker(text, MECHANISMS[mechanism], ratio, seed).value(expression)
    if not isinstance(press, Press):
        raise UserError(f"{text!r} is no press; write one such as SnapKVPress")
    if ratio is None or _mentions_ratio(expression):
        return press
    return press.with_ratio(ratio)


def takes_ratio(text: str, mechanism: str) -> bool:
    """Whether the press that `text` describes can be told a compression ratio.

    Raises:
        UserError: if it describes none.
    """
    if _mentions_ratio(_parse(text)):
        return True
    press = make_press(text, mechanism, None, 0)
    try:
        press.with_ratio(0.5)
    except HyperparameterError:
        return False
    return True


def _parse(text: str) -> ast.expr:
    try:
        return ast.parse(text.strip(), mode="eval").body
    except SyntaxError as error:
        raise UserError(
            f"cannot read the press {text!r}: {error.msg}; write one such as "
            "AdaKVPress(SnapKVPress(window_size=32))"
        ) from error


def _mentions_ratio(expression: ast.expr) -> bool:
    return any(isinstance(n, ast.Name) and n.id == RATIO for n in ast.walk(expression))


class _Maker:
    """Evaluates the expression of one press."""

    def __init__(
        self, text: str, presses: Mapping[str, type[Press]], ratio: float | None, seed: int
    ) -> None:
        self.text, self.presses, self.ratio, self.seed = text, presses, ratio, seed

    def value(self, node: ast.expr) -> Any:
        if isinstance(node, ast.Name) and node.id == RATIO:
            return 0.5 if self.ratio is None else self.ratio
        if isinstance(node, ast.Name):
            return self._make(node.id, [], {})
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            given = {k.arg: self.value(k.value) for k in node.keywords if k.arg is not None}
            return self._make(node.func.id, [self.value(arg) for arg in node.args], given)
        if isinstance(node, ast.List):
            return [self.value(item) for item in node.elts]
        try:
            return ast.literal_eval(node)
        except ValueError:
            raise UserError(
                f"{ast.unparse(node)} is not allowed in the press {self.text!r}; write presses, "
                "numbers, strings and lists only"
            ) from None

    def _make(self, name: str, args: list[Any], given: dict[str, Any]) -> Press:
        if name not in self.presses:
            raise UserError(
                f"there is no press {name!r} (in {self.text!r}); there are "
                f"{', '.join(sorted(self.presses))}"
            )
        press = self.presses[name]
        names = [field.name for field in fields(press)]
        given = dict(zip(names, args, strict=False)) | given
        unknown = sorted(set(given) - set(names))
        if unknown or len(args) > len(names):
            what = ", ".join(unknown) or f"{len(args)} fields"
            raise UserError(f"{name} has no {what}; its fields are {', '.join(names) or 'none'}")
        if "seed" in names and given.get("seed") is None:
            given["seed"] = self.seed
        try:
            return press(**given)
        except TypeError as error:  # a field without a default, or of another type
            raise UserError(f"cannot make {self.text!r}: {error}") from error
