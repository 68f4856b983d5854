"""What presses learn about a model beforehand: measured or trained once, saved, and found again.

A press whose scores need something learned holds a `Calibration`, the place where one lies, or
nothing; then it is looked for beside the model, and on the hub.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import huggingface_hub
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors.torch import save
from torch import Tensor

from press_core.errors import PressError, UnsupportedModelError, first_line
from press_core.fields import limited
from press_core.files.tensors import METADATA, UNREADABLE, named_sizes, read
from press_core.model.decoder import device_of
from press_core.model.sites import AttentionSite, n_layers_of
from press_core.press import Press
from press_core.probe import attention_sites
from press_core.scope import InstalledPress
from press_core.select import upcast

FORMAT_VERSION = 1
"""Of the files that `Calibration.save` writes."""

_HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")

F = TypeVar("F", bound="Calibration")


class CalibrationError(PressError, ValueError):
    """What a press has to learn about a model is missing, or is not what it should be."""


def sized(dims: str, **default: Any) -> Any:
    """A field for a tensor; `dims` names its dimensions, such as `"layers heads head_dim"`."""
    return field(metadata={"dims": dims}, **default)


@dataclass(frozen=True, eq=False, repr=False)
class Calibration:
    """What was learned about one model: tensors, each stacked over all layers of the model.

    Layers that no press works on (sliding windows) have entries that nobody reads. Fields are made
    by `sized`; the sizes of a model are `layers`, `heads`, `kv_heads`, `head_dim`, `hidden_size`.

    Attributes:
        kind: class attribute; what the file says it holds.
        file_names: class attribute; what the file is called in a folder, first the preferred name.
        published_files: class attribute; what the files are called that others publish on the hub.
        readers: class attribute; by suffix, what reads other files than safetensors.
    """

    kind: ClassVar[str] = ""
    file_names: ClassVar[tuple[str, ...]] = ()
    published_files: ClassVar[tuple[str, ...]] = ("model.safetensors",)
    readers: ClassVar[Mapping[str, Callable[[Path], dict[str, Tensor]]]] = {}

    def __post_init__(self) -> None:
        self.check()

    def dims(self) -> dict[str, str]:
        """The names of the dimensions of each tensor."""
        return {field.name: field.metadata["dims"] for field in fields(self)}

    def check(self) -> None:
        """Check that the tensors fit each other.

        Raises:
            CalibrationError: naming the shapes that do not.
        """
        try:
            sizes = named_sizes(self.tensors, self.dims())
        except ValueError as error:
            raise CalibrationError(f"{self.kind} {error}") from error
        if 0 in sizes.values():
            raise CalibrationError(f"{', '.join(self.tensors)} of {self.kind}: one is empty")

    def check_numbers(self) -> None:
        """Check what was read from a file: numbers that are none decide nothing.

        Raises:
            CalibrationError: naming the tensor.
        """
        for name, tensor in self.tensors.items():
            if not bool(tensor.isfinite().all()):
                raise CalibrationError(f"{name} of {self.kind} is not finite everywhere")

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes of a model that this belongs to, by the names that `model_sizes` has."""
        known = "layers", "heads", "kv_heads", "head_dim", "hidden_size"
        found = named_sizes(self.tensors, self.dims())
        return {name: found[name] for name in known if name in found}

    @property
    def file_name(self) -> str:
        """What the file is called in a folder."""
        return self.file_names[0]

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors by field; fields that are None are left out."""
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    def to(self: F, device: torch.device | str) -> F:
        """The same on `device`."""
        return self.of({name: x.to(device) for name, x in self.tensors.items()})

    @classmethod
    def of(cls: type[F], tensors: Mapping[str, Tensor]) -> F:
        """What `tensors` are the tensors of.

        Raises:
            CalibrationError: if they do not fit each other.
        """
        return cls(**tensors)

    def save(self, path: str | Path) -> Path:
        """Write a safetensors file.

        Args:
            path: a name that ends in `.safetensors`, or a folder, in which the file gets the name
                by which presses find it; beside a model they find it by themselves.

        Returns:
            The file that was written.
        """
        path = Path(path)
        path = path if path.suffix == ".safetensors" else path / self.file_name
        path.parent.mkdir(parents=True, exist_ok=True)
        about = {"kind": self.kind, "version": FORMAT_VERSION, "model": self.sizes}
        tensors = {name: tensor.cpu().contiguous() for name, tensor in self.tensors.items()}
        # One entry, for safetensors writes several in any order: equal things, equal files.
        path.write_bytes(save(tensors, {METADATA: json.dumps(about)}))
        return path

    @classmethod
    def load(cls: type[F], source: str | Path, file_names: tuple[str, ...] = ()) -> F:
        """Read what `save` wrote, or what kvpress publishes on the hub.

        Args:
            source: a file, a folder, or (a `str` only) the id of a repository on the hub, which is
                downloaded if it is not in the local cache.
            file_names: what the file may be called in a folder or repository, instead of
                `cls.file_names`.

        Raises:
            CalibrationError: if there is no such file, or if it holds something else.
        """
        names = dict.fromkeys((*(file_names or cls.file_names), cls.published_files[0]))
        path = _found(cls, source, tuple(names))
        tensors, holds = _read(
            path.resolve(), path.stat().st_mtime_ns, cls.readers.get(path.suffix)
        )
        if holds not in (cls.kind, ""):
            raise CalibrationError(f"{str(path)!r} holds {holds!r:.80}, not {cls.kind}")
        try:
            fitted = cls.of(tensors if holds else cls.published(tensors, path.parent))
        except CalibrationError:
            raise
        except UNREADABLE as error:
            names_found = ", ".join(f"{name!r:.80}" for name in sorted(tensors)[:8]) or "nothing"
            raise CalibrationError(
                f"{str(path)!r} holds no {cls.kind.removeprefix('a ')}, neither as "
                f"{cls.__name__}.save writes them nor as they are published on the hub; it holds "
                f"{names_found}"
            ) from error
        fitted.check_numbers()
        return fitted

    @classmethod
    def published(cls, tensors: dict[str, Tensor], folder: Path) -> dict[str, Tensor]:
        """What others publish, by field.

        Args:
            tensors: of the first of `published_files`.
            folder: where the others lie.

        Raises:
            KeyError: if one is missing.
        """
        return tensors

    def __repr__(self) -> str:
        sizes = ", ".join(f"{name}={size}" for name, size in self.sizes.items())
        return f"{type(self).__name__}({sizes})"


# ---- files and repositories ----------------------------------------------------------------------


def _found(kind: type[Calibration], source: str | Path, names: tuple[str, ...]) -> Path:
    """The file at `source`, or the first of `names` in that folder or repository on the hub."""
    path = Path(source).expanduser()
    if path.is_file():
        return path
    called = " and no ".join(names)
    if path.is_dir():
        for name in names:
            if (path / name).is_file():
                return path / name
        raise CalibrationError(
            f"there is no {called} in the folder {str(path)!r}; {kind.__name__}.save writes the "
            "first"
        )
    if isinstance(source, Path) or not _HUB_ID.fullmatch(source) or source.endswith(".safetensors"):
        raise CalibrationError(
            f"there is no file or folder {str(source)!r}; give a {kind.__name__}, a file that its "
            "save wrote, a folder that holds one, or a hub id such as owner/name"
        )
    cause: Exception = LookupError()
    # What is on this machine is taken as it is: presses are opened often, and may be so offline.
    for offline, name in product((True, False), names):
        wanted = kind.published_files if name == kind.published_files[0] else (name,)
        try:
            paths = [
                huggingface_hub.hf_hub_download(source, part, local_files_only=offline)
                for part in wanted
            ]
            return Path(paths[0])
        except (OSError, ValueError, RuntimeError) as error:
            cause = error
        if not offline and isinstance(cause, LocalEntryNotFoundError):
            break  # nobody answered: do not wait for that again
    raise CalibrationError(
        f"there is no file or folder {source!r}, and the hub gave no {called} of that id (no "
        f"network, no such id, or no permission); the cause was: {first_line(cause)}"
    ) from cause


@lru_cache(maxsize=4)
def _read(
    path: Path, _modified: int, reader: Callable[[Path], dict[str, Tensor]] | None
) -> tuple[dict[str, Tensor], str]:
    """The tensors in the file at `path` and what it says they are, remembered: presses open often.

    Raises:
        CalibrationError: if the file cannot be read, or if a later release wrote it.
    """
    if path.suffix in (".pt", ".pth", ".bin"):
        raise CalibrationError(
            f"{str(path)!r} is a pickle, which may run code as it is read; turn it into "
            "safetensors once, if you trust it, as docs/learned.md says"
        )
    try:
        about, tensors = read(path) if reader is None else ({}, reader(path))
    except UNREADABLE as error:
        raise CalibrationError(f"cannot read {str(path)!r}: {first_line(error)}") from error
    if not isinstance(about, dict) or not isinstance(about.get("kind", ""), str):
        raise CalibrationError(f"{str(path)!r} does not say in its metadata what it holds")
    if about and about.get("version") != FORMAT_VERSION:
        raise CalibrationError(
            f"{str(path)!r} has version {about.get('version')!r:.40} of the format; this release "
            f"reads {FORMAT_VERSION}"
        )
    return floats(tensors, path), about.get("kind", "")


def floats(tensors: Mapping[str, Tensor], path: Path) -> dict[str, Tensor]:
    """The `tensors` read at `path` in float32 or better.

    Raises:
        CalibrationError: if some are no floating-point numbers.
    """
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            raise CalibrationError(
                f"{str(path)!r} holds {name!r:.80} as {tensor.dtype}, not as floats"
            )
    return {name: upcast(x) for name, x in tensors.items()}


def of_layers(tensors: Mapping[str, Tensor], name: str) -> Tensor:
    """What published files hold layer by layer as `layers.0.{name}` and so on, stacked."""
    n_layers = len({key.split(".")[1] for key in tensors})
    return torch.stack([tensors[f"layers.{i}.{name}"] for i in range(n_layers)])


# ---- presses that have learned -------------------------------------------------------------------


def learned(kind: type[Calibration]) -> Any:
    """A field for a `kind`, for where one lies, or for None: it is looked for then."""
    fits = (kind, str, Path, type(None))
    allowed = f"{kind.__name__}, a path, a hub id or None"
    return limited(None, lambda x: isinstance(x, fits), allowed)


@dataclass
class LearnedPress(Press):
    """A press that has learned something of a model beforehand.

    Attributes:
        learns: class attribute; the field that holds it, what it is, and Python that makes it, for
            error messages, where `{press}` stands for the press.
    """

    learns: ClassVar[tuple[str, type[Calibration], str]]
    collector: ClassVar[Callable[..., InstalledPress]]

    def prepare(self, model: Any) -> Any:
        """What it has learned about `model`, on the model's device.

        Raises:
            CalibrationError: if there is none.
            UnsupportedModelError: if it was learned about another model.
        """
        found = self.find(model).to(device_of(model))
        for site in attention_sites(model):
            check_fits(found, site)
        return found

    def find(self, model: Any) -> Calibration:
        """What was given, or what lies beside the model or is published for it."""
        field, kind, _ = self.learns
        given = getattr(self, field)
        if given is None:
            return self._search(model)
        return given if isinstance(given, kind) else kind.load(given, self.file_names())

    def file_names(self) -> tuple[str, ...]:
        """What the file is called in a folder; empty: as its kind has it."""
        return ()

    def hub_id(self, model_name: str) -> str:
        """The repository on the hub that belongs to a model there; empty: nobody publishes such."""
        return ""

    def _search(self, model: Any) -> Calibration:
        _, kind, fit = self.learns
        fit = fit.format(press=type(self).__name__)
        name = str(getattr(getattr(model, "config", None), "name_or_path", None) or "")
        advice = f"hand over what {fit} returns"
        source: str | Path = self.hub_id(name)
        names = kind.published_files[:1]
        if name and Path(name).is_dir():
            file_name = (self.file_names() or kind.file_names)[0]
            published = self.hub_id(Path(name).resolve().name)
            advice = f"make it once, {fit}.save({name!r}), or {advice}"
            if published:
                advice += f" or a hub id, such as {published!r} if it is published"
            source = Path(name) / file_name
        elif not source or not _HUB_ID.fullmatch(name):
            raise CalibrationError(
                f"nothing was learned about this {type(model).__name__} that could be found by "
                f"itself; {advice}"
            )
        try:
            return kind.load(source, names)
        except CalibrationError as error:
            raise CalibrationError(f"{error}. For {name}, {advice}") from error


def model_sizes(site: AttentionSite) -> dict[str, int]:
    """The sizes of the model that `site` belongs to."""
    config: Any = site.module.config
    return {
        "layers": n_layers_of(site),
        "heads": site.num_heads,
        "kv_heads": site.num_kv_heads,
        "head_dim": site.head_dim,
        "hidden_size": config.hidden_size,
    }


def check_fits(fitted: Calibration, site: AttentionSite) -> None:
    """Refuse a model other than the one that `fitted` was learned about.

    Raises:
        UnsupportedModelError: naming the sizes of both.
    """
    sizes = model_sizes(site)
    model = {name: sizes[name] for name in fitted.sizes}
    if model != fitted.sizes:
        described = [
            ", ".join(f"{name}={n}" for name, n in x.items()) for x in (fitted.sizes, model)
        ]
        raise UnsupportedModelError(
            f"{type(fitted).__name__} of a model with {described[0]} cannot serve one with "
            f"{described[1]} ({site.name}); fit it to this model"
        )
