"""Presses as text: `SnapKVPress`, `AdaKVPress(SnapKVPress(window_size=32))`, what `repr` gives.

The text is a Python expression of press names, keyword or positional fields, numbers, strings and
lists; nothing else is evaluated. The name `ratio` stands for the compression ratio of a cell where
a press takes it in another place than its `compression_ratio`:
`DuoAttentionPress(head_compression_ratio=ratio)`.
"""

from __future__ import annotations

import ast
from dataclasses import fields
from typing import Any, NamedTuple

from experiments import UserError
from experiments.testbed.recipes import MECHANISMS, Presses
from press_core import HyperparameterError, Press


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
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        reason = getattr(error, "msg", None) or error or type(error).__name__
        raise UserError(
            f"cannot read the press {text!r:.200}: {reason}; write one such as "
            "AdaKVPress(SnapKVPress(window_size=32))"
        ) from error


def _mentions_ratio(expression: ast.expr) -> bool:
    return any(isinstance(n, ast.Name) and n.id == "ratio" for n in ast.walk(expression))


class _Maker(NamedTuple):
    """Evaluates the expression of one press."""

    text: str
    presses: Presses
    ratio: float | None
    seed: int

    def value(self, node: ast.expr) -> Any:
        match node:
            case ast.Name(id="ratio"):
                return self.told_ratio()
            case ast.Name(id=name):
                return self.made(name, [], {})
            case ast.Call(func=ast.Name(id=name)) if all(k.arg for k in node.keywords):
                given = {str(k.arg): self.value(k.value) for k in node.keywords}
                return self.made(name, [self.value(arg) for arg in node.args], given)
            case ast.List(elts=items):
                return [self.value(item) for item in items]
        try:
            return ast.literal_eval(node)
        except (ValueError, TypeError, RecursionError):
            raise UserError(
                f"{ast.get_source_segment(self.text.strip(), node)!s:.60} is not allowed in the "
                f"press {self.text!r:.200}; write presses, numbers, strings and lists only"
            ) from None

    def told_ratio(self) -> float:
        if self.ratio is None:
            raise UserError(f"{self.text!r} says `ratio`, and no ratio is given")
        return self.ratio

    def made(self, name: str, args: list[Any], given: dict[str, Any]) -> Press:
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
