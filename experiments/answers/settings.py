"""Settings of a sweep: flags of the command line, or a YAML file with the same names.

A file cannot run code: only the arguments of `generate` and `from_pretrained` in `settings.yaml`
are allowed; `trust_remote_code` and presses of the user's own can only be given as flags.
"""

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import typer
import yaml
from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic.dataclasses import dataclass

from experiments import UserError, data_of, refusing
from experiments.answers.datasets import SOURCES
from experiments.framework.options import several
from experiments.framework.plots import is_own
from experiments.framework.wording import refused

SWEPT = ("press", "ratio", "budget", "mechanism", "dataset")
"""Settings that define cells; all others are the set-up that the cells of a folder share."""

STUDIED = (
    *("SnapKVPress", "AdaKVPress(SnapKVPress())", "ExpectedAttentionPress", "TOVAPress"),
    *("KeyDiffPress", "StreamingLLMPress", "RandomPress"),
)
"""The presses of the study."""

_GENERATION, _MODEL_KWARGS = (data_of(__file__)[name] for name in ("generation", "model_kwargs"))
"""The arguments of `generate` and of `from_pretrained` that a sweep may set."""


def _known(*names: str) -> AfterValidator:
    def check(given: Mapping[str, Any]) -> Mapping[str, Any]:
        unknown = sorted(set(map(str, given)) - set(names))
        if unknown:
            raise ValueError(f"{', '.join(unknown)} is not allowed; there are {', '.join(names)}")
        return given

    return AfterValidator(check)


def _listed(value: Any) -> Any:
    """Wrap a single value in a tuple, as for a flag that is given once."""
    return tuple(value) if isinstance(value, (list, tuple)) else (value,)


ValueT = TypeVar("ValueT")
Several = Annotated[tuple[ValueT, ...], BeforeValidator(_listed)]
AtLeastOne = Annotated[Several[ValueT], Field(min_length=1)]
Count = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(ge=0, lt=1)]


_STRICT = ConfigDict(extra="forbid", strict=True)


@dataclass(frozen=True, config=_STRICT)
class Grid:
    """The grid: every press at every ratio and budget with every mechanism on every dataset.

    By default it is the grid of the study: the tasks that the shipped model can answer.
    """

    model: Annotated[str, typer.Option(help="Shipped model, folder or hub id.")] = "facts-llama"
    press: Annotated[
        AtLeastOne[str],
        typer.Option(
            help="Press as text, such as AdaKVPress(SnapKVPress(window_size=32)); repeat it for "
            "several. `ratio` or `budget` in it is replaced by the amount. Or two classes of your "
            "own, the hook press first: my_module:MyHookPress,my_module:MyPatchPress."
        ),
    ] = STUDIED
    ratio: Annotated[
        AtLeastOne[Share],
        several(float, "Share of the tokens to evict; 0: no press. With a budget and no ratio: 0."),
    ] = (0.0, 0.5, 0.8)
    budget: Annotated[
        Several[Count],
        several(int, "Tokens of a context to keep, besides or instead of ratios."),
    ] = ()
    mechanism: Annotated[AtLeastOne[Literal["hook", "patch"]], several(str, "hook or patch.")] = (
        "hook",
        "patch",
    )
    dataset: Annotated[
        AtLeastOne[str],
        several(
            str,
            "NAME, NAME/TASK, NAME@LENGTH or NAME/TASK@LENGTH. NAME is one of "
            f"{', '.join(SOURCES)}.",
        ),
    ] = ("facts",)
    samples: Annotated[Count, typer.Option(help="Questions per task.")] = 48
    needle_depth: Annotated[
        Several[Annotated[float, Field(ge=0, le=1)]],
        several(
            float,
            "Depth of the needle, from 0 (start) to 1 (end), a question each; evenly spread by "
            "default.",
        ),
    ] = ()
    seed: Annotated[int, Field(ge=0, lt=2**32), typer.Option(help="Seed of all random draws.")] = 0


@dataclass(frozen=True, config=_STRICT)
class Settings(Grid):
    """A sweep: a grid and how to run it. The help of each flag describes its attribute.

    `generation` holds arguments of `model.generate`, `model_kwargs` those of `from_pretrained`;
    these two have no flags.
    """

    batch_size: Annotated[Count, typer.Option(help="Contexts per forward.")] = 8
    compress_questions: Annotated[
        bool, typer.Option(help="Compress context and question together.")
    ] = False
    max_context_length: Annotated[
        Annotated[int, Field(ge=2)] | None,
        typer.Option(help="Cut the middle out of contexts of more tokens."),
    ] = None
    max_new_tokens: Annotated[
        Count | None,
        typer.Option(help="Tokens of an answer, instead of the number that its task allows."),
    ] = None
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"], typer.Option(help="Dtype of the model.")
    ] = "float32"
    attn_implementation: Annotated[str | None, typer.Option(help="eager, sdpa and so on.")] = None
    device: Annotated[
        str, typer.Option(help="cpu, cuda, or auto to spread the model over devices.")
    ] = "cpu"
    threads: Annotated[
        Annotated[int, Field(ge=1, le=1024)] | None,
        typer.Option(help="CPU threads of torch, and CPUs of a Ray worker."),
    ] = None
    data: Annotated[
        str | None, typer.Option(help="Folder with local copies of published datasets.")
    ] = None
    trust_remote_code: Annotated[
        bool, typer.Option(help="Run code from the model's repository.")
    ] = False
    generation: Annotated[dict[str, Any], _known(*_GENERATION)] = Field(default_factory=dict)
    model_kwargs: Annotated[dict[str, Any], _known(*_MODEL_KWARGS)] = Field(default_factory=dict)

    def __hash__(self) -> int:
        return hash(repr(self))  # its dictionaries are not hashable


def settings_from(path: Path | None, flags: Mapping[str, Any]) -> Settings:
    """The settings in a YAML file, overridden by flags.

    Args:
        path: the file; None: flags only.
        flags: by name; None: the flag was not given.

    Raises:
        UserError: naming the invalid entry.
    """
    given = {} if path is None else _read(path)
    given |= {name: value for name, value in flags.items() if value is not None}
    if given.get("budget") and "ratio" not in given:
        given["ratio"] = 0.0
    try:
        return Settings(**given)
    except ValidationError as error:
        reasons = (refused(each, "settings") for each in error.errors())
        raise UserError("; ".join(reasons)) from error


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise UserError(f"{path} is a folder" if path.is_dir() else f"there is no file {path}")
    # yaml raises ValueError for dates that do not exist.
    with refusing(f"{path} is not YAML", OSError, ValueError, RecursionError, yaml.YAMLError):
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise UserError(f"{path} must be a YAML mapping of settings, such as `model: facts-llama`")
    known = [field.name for field in fields(Settings) if field.name != "trust_remote_code"]
    for name in content:
        if name == "trust_remote_code":
            raise UserError(f"{path} has {name}, which runs code; it is given by its flag alone")
        if name not in known:
            raise UserError(f"{path} has {name}, which is no setting; there are {', '.join(known)}")
    if own := [each for each in _listed(content.get("press")) if is_own(str(each))]:
        raise UserError(f"{path} has {own[0]}, which imports code; it is given by its flag alone")
    return content
