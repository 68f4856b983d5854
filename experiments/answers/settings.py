"""What a sweep is asked to do: flags of the command line, or a YAML file with the same names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import yaml

from experiments import UserError
from experiments.answers.presses import MECHANISMS

SWEPT = ("press", "ratio", "mechanism", "dataset")
"""Settings that make cells; all others are the set-up that cells of one folder share."""


@dataclass(frozen=True)
class Settings:
    """A sweep: every press at every ratio with every mechanism on every dataset.

    Attributes:
        model: shipped model, folder or hub id.
        press: presses as text, see `presses`.
        ratio: shares of the tokens to evict; 0 is run once, without a press.
        mechanism: "hook", "patch" or both.
        dataset: as `NAME/TASK@LENGTH`, see `datasets`.
        samples: questions per task.
        seed: of generated samples, of the choice among published ones, of presses that draw at
            random, and of sampled answers.
        batch_size: contexts per forward.
        compress_questions: compress context and question together.
        max_context_length: tokens of a context; longer ones lose their middle.
        dtype, attn_implementation, device: how the model is loaded; "auto" spreads it over devices.
        threads: of torch, in each process; None: torch's own choice.
        data: folder with local copies of published datasets.
        generation: arguments of `model.generate`.
    """

    model: str = "facts-llama"
    press: tuple[str, ...] = ("SnapKVPress",)
    ratio: tuple[float, ...] = (0.0, 0.5, 0.8)
    mechanism: tuple[str, ...] = ("hook", "patch")
    dataset: tuple[str, ...] = ("facts",)
    samples: int = 64
    seed: int = 0
    batch_size: int = 8
    compress_questions: bool = False
    max_context_length: int | None = None
    dtype: str = "float32"
    attn_implementation: str = "sdpa"
    device: str = "cpu"
    threads: int | None = None
    data: str | None = None
    generation: tuple[tuple[str, Any], ...] = (("do_sample", False),)

    def __post_init__(self) -> None:
        for name, low in (("samples", 1), ("batch_size", 1), ("threads", 1), ("seed", 0)):
            value = getattr(self, name)
            if value is not None and value < low:
                raise UserError(f"{name} is {value}; it must be {low} or more")
        _require_known("mechanism", self.mechanism, tuple(MECHANISMS))
        _require_known("dtype", (self.dtype,), ("float32", "bfloat16", "float16"))
        outside = [ratio for ratio in self.ratio if not 0 <= ratio < 1]
        if outside:
            raise UserError(f"ratio is {outside[0]}; it must be a number in [0, 1)")


def _require_known(name: str, values: tuple[str, ...], known: tuple[str, ...]) -> None:
    wrong = [value for value in values if value not in known]
    if wrong:
        raise UserError(f"{name} is {wrong[0]!r}; it must be one of {', '.join(known)}")


def settings_from(path: Path | None, flags: Mapping[str, Any]) -> Settings:
    """The settings in a YAML file, where flags do not say otherwise.

    Args:
        path: of the file; None: there is none.
        flags: by name; those that are None were not given.

    Raises:
        UserError: naming the entry that is wrong.
    """
    known = {field.name: field for field in fields(Settings)}
    given = {} if path is None else _read(path)
    unknown = sorted(set(given) - set(known))
    if unknown:
        raise UserError(
            f"{path} has {', '.join(unknown)}, which is no setting; there are {', '.join(known)}"
        )
    given |= {name: value for name, value in flags.items() if value is not None}
    return Settings(**{name: _converted(name, value, known[name]) for name, value in given.items()})


def _read(path: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"there is no file {path}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not YAML: {error}") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} must be a YAML mapping of settings, such as `model: facts-llama`")
    return content


_TYPES: dict[str, tuple[type, ...]] = {
    "str": (str,),
    "int": (int,),
    "bool": (bool,),
    "float": (int, float),
}


def _converted(name: str, value: Any, field: Any) -> Any:
    """`value` as the type of `field`, a text such as `tuple[str, ...]` or `int | None`."""
    wanted = str(field.type)
    if name == "generation":
        if not isinstance(value, Mapping):
            raise UserError(f"generation is {value!r}; it must be a mapping of arguments")
        return tuple(sorted({**dict(Settings.generation), **value}.items()))
    if value is None and wanted.endswith("None"):
        return None
    if wanted.startswith("tuple"):
        kind = wanted[len("tuple[") :].split(",")[0]
        values = value if isinstance(value, (list, tuple)) else [value]
        if values:
            return tuple(_typed(name, item, kind) for item in values)
        raise UserError(f"{name} is empty; give at least one")
    return _typed(name, value, wanted.split(" ")[0])


def _typed(name: str, value: Any, kind: str) -> Any:
    fits = isinstance(value, _TYPES[kind]) and (kind == "bool") == isinstance(value, bool)
    if not fits:
        raise UserError(
            f"{name} is {value!r}; it must be {'a number' if kind == 'float' else kind}"
        )
    return float(value) if kind == "float" else value
