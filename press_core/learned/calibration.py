"""Calibrations: what presses measure or train on a model beforehand, save, and load when they open.

A press that needs a calibration has a field for a `Calibration`, for its path or hub id, or for
None: it is then looked for beside the model, or on the hub.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import lru_cache, partial
from itertools import product
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import huggingface_hub
import numpy as np
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from torch import Tensor

from press_core.errors import PressError, UnsupportedModelError, first_line
from press_core.files.files import check_version, floats, path_of, read, refused, require, write
from press_core.model.decoder import device_of
from press_core.model.sites import AttentionSite, n_layers_of
from press_core.probe import attention_sites
from press_core.scope import InstalledPress

FORMAT_VERSION = 1
"""Version of the files that `Calibration.save` writes."""

SIZES = "layers", "heads", "kv_heads", "head_dim", "hidden_size"
"""Sizes of a model that a calibration must match."""

_LARGEST = torch.finfo(torch.float32).max
_HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")

F = TypeVar("F", bound="Calibration")


class CalibrationError(PressError, ValueError):
    """A calibration is missing, cannot be read, or has the wrong tensors."""


def sized(dims: str, published: str = "", **default: Any) -> Any:
    """A dataclass field for a tensor.

    Args:
        dims: the names or sizes of its dimensions, such as `"99 layers kv_heads"`.
        published: its name in files that others publish, if not the field's; a `*` stands for the
            layer index if each layer has a separate tensor.
        default: `default=...` of the field.
    """
    return field(metadata={"dims": dims, "published": published}, **default)


@dataclass(frozen=True, eq=False, repr=False)
class Calibration:
    """What was learned about one model: tensors, each stacked over all layers of the model.

    Entries of layers that presses do not work on (sliding windows) are never read. Fields are made
    by `sized`; dimensions named `layers`, `heads`, `kv_heads`, `head_dim` and `hidden_size` must
    match the model.

    Attributes:
        kind: class attribute; the kind of calibration, as stored in the file.
        made_by: class attribute; the call of a press that makes one.
        file_names: class attribute; names of the file in a folder, the preferred one first.
        published_files: class attribute; names of the files that others publish on the hub.
        within: class attribute; smallest and largest number allowed, by default any finite one.
    """

    kind: ClassVar[str] = ""
    made_by: ClassVar[str] = "fit(model, token_batches)"
    file_names: ClassVar[tuple[str, ...]] = ()
    published_files: ClassVar[tuple[str, ...]] = ("model.safetensors",)
    within: ClassVar[tuple[float, float]] = (-_LARGEST, _LARGEST)

    def dims(self) -> dict[str, str]:
        """Names of the dimensions of each tensor, separated by spaces, by field."""
        return {field.name: field.metadata["dims"] for field in fields(self)}

    def __post_init__(self) -> None:
        """Check the tensors' names, shapes and ranges.

        Raises:
            CalibrationError: with the shapes of all tensors, if they are not those of `dims`,
                disagree about a size, are empty, or hold numbers not `within` the limits.
        """
        (low, high), dims, sizes, tensors = self.within, self.dims(), self._sizes(), self.tensors
        shapes = {name: tuple(x.shape) for name, x in tensors.items()}
        fits = shapes == {name: tuple(map(sizes.get, dims[name].split())) for name in dims}
        within = (x.numel() and bool(((x >= low) & (x <= high)).all()) for x in tensors.values())
        if not fits or not all(within):
            raise CalibrationError(
                f"{self.kind} of {shapes!s:.300}: it must have {dims!s:.300}, of numbers from "
                f"{low:g} to {high:g}"
            )

    def _sizes(self) -> dict[str, int]:
        """Size of each dimension by its name, for one of the tensors that have it."""
        dims, tensors = self.dims(), self.tensors.items()
        named = [zip(dims.get(name, "").split(), x.shape, strict=False) for name, x in tensors]
        return {n: int(n) if n.isdigit() else size for pairs in named for n, size in pairs}

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes of the model that this belongs to, by name, as in `model_sizes`."""
        found = self._sizes()
        return {name: found[name] for name in SIZES if name in found}

    @property
    def file_name(self) -> str:
        """Name of the file that `save` writes into a folder."""
        return self.file_names[0]

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors by field; fields that are None are left out."""
        return {name: tensor for name, tensor in vars(self).items() if tensor is not None}

    @torch.inference_mode(False)  # autograd cannot use inference tensors, also those of its cache
    def to(self: F, device: torch.device | str) -> F:
        """This calibration on `device`."""
        return self.of({name: x.to(device) for name, x in self.tensors.items()})

    @classmethod
    def of(cls: type[F], tensors: Mapping[str, Tensor]) -> F:
        """The calibration made of `tensors`, by field; the inverse of `tensors`.

        Raises:
            CalibrationError: if the tensors are not valid.
        """
        return cls(**tensors)

    def save(self, path: str | Path) -> Path:
        """Write a safetensors file.

        Args:
            path: a file name that ends in `.safetensors`, or a folder, where the file gets the name
                that presses look for. In the model's folder, presses find it without being given
                its path.

        Returns:
            Path of the file.

        Raises:
            CalibrationError: if it cannot be written, or if another kind of file is there.
        """
        path = path_of(path)
        path = path if path.suffix == ".safetensors" else path / self.file_name
        about = {"kind": self.kind, "version": FORMAT_VERSION, "model": self.sizes}
        tensors = {name: x.cpu().contiguous().clone() for name, x in self.tensors.items()}
        with refused(path, "cannot be written", CalibrationError):
            path.parent.mkdir(parents=True, exist_ok=True)
            fits = not path.exists() or read(path)[0].get("kind") == self.kind
            require(fits, f"another file is there, not {self.kind}; give another name")
            write(path, tensors, about, overwrite=True)
        return path

    @classmethod
    def load(cls: type[F], source: str | Path, file_names: tuple[str, ...] = ()) -> F:
        """Read a file written by `save`, or published for kvpress.

        Args:
            source: a file, a folder, or (as a `str`) the id of a hub repository, which is
                downloaded if it is not in the local cache.
            file_names: names to look for in a folder or repository, instead of `cls.file_names`.

        Raises:
            CalibrationError: if there is no such file, or if it cannot be read as this kind.
        """
        names = dict.fromkeys((*(file_names or cls.file_names), cls.published_files[0]))
        path = _found(cls, source, tuple(names))
        read_too = (path, *map(path.with_name, cls.published_files))
        modified = tuple(x.stat().st_mtime_ns for x in read_too if x.is_file())
        return _loaded(cls, path.absolute(), modified)  # type: ignore[arg-type]

    @classmethod
    def published(cls, tensors: dict[str, Tensor], folder: Path) -> dict[str, Tensor]:
        """The tensors of published files, by field.

        Args:
            tensors: those of the first of `published_files`, by their published names; they are
                read when they are used.
            folder: where the other published files are.

        Raises:
            KeyError: if a tensor is missing.
        """
        if [*tensors] == [""]:  # a single array without a name (.tsv, .npy)
            return {fields(cls)[0].name: tensors[""]}
        return {x.name: called(tensors, x.metadata["published"] or x.name) for x in fields(cls)}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({_in_words(self.sizes)})"


def _in_words(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{name}={size}" for name, size in sizes.items())


# ---- files and repositories ----------------------------------------------------------------------


def _found(kind: type[Calibration], source: str | Path, names: tuple[str, ...]) -> Path:
    """The file at `source`, or the first of `names` found in that folder or hub repository."""
    path, wanted = path_of(source), " and no ".join(names)
    for candidate in (path, *(path / name for name in names)):
        if candidate.is_file():
            return candidate
    is_text = isinstance(source, str) and not path.is_dir() and path.suffix != ".safetensors"
    is_hub_id = is_text and _HUB_ID.fullmatch(str(source))
    cause: Exception | None = None
    on_hub = ""
    # Cached files are used without contacting the hub: presses open often, and may be offline.
    for offline, name in product((True, False), names if is_hub_id else ()):
        parts = kind.published_files if name == kind.published_files[0] else (name,)
        download = partial(huggingface_hub.hf_hub_download, source, local_files_only=offline)
        try:
            paths = [download(part) for part in parts]
            return Path(paths[0])
        except (OSError, ValueError, RuntimeError) as error:
            cause = error
            on_hub = f" or on the hub (no network, no such id, no permission): {first_line(error)}"
        if not offline and isinstance(cause, LocalEntryNotFoundError):
            break  # no connection: do not wait for the next name to time out
    raise CalibrationError(
        f"there is no file {str(source)!r}, and no {wanted} in it{on_hub}; give a {kind.__name__}, "
        "a file that its save wrote, a folder that holds one, or a hub id such as owner/name"
    ) from cause


_ARRAYS: dict[str, Any] = {".npy": np.load, ".tsv": partial(np.loadtxt, dtype="f4", ndmin=2)}
"""Readers of files with one unnamed array, which some authors publish, by suffix."""


@lru_cache(maxsize=4)
@torch.inference_mode(False)
def _loaded(kind: type[Calibration], path: Path, _modified: tuple[int, ...]) -> Any:
    """The calibration in the file at `path`; cached, as presses open often.

    Args:
        _modified: modification times in ns of what is read, a part of the cache key only.

    Raises:
        CalibrationError: if the file cannot be read as this kind, or is of another version.
    """
    if path.suffix in (".pt", ".pth", ".bin"):
        raise CalibrationError(
            f"{str(path)!r} is a pickle, which can run code when it is loaded; if you trust it, "
            "convert it to safetensors as docs/learned.md shows"
        )
    with refused(path, "cannot be read", CalibrationError):
        array = _ARRAYS.get(path.suffix)
        about, tensors = read(path) if array is None else ({}, {"": torch.as_tensor(array(path))})
        holds = about["kind"] if about else ""  # nothing about published files
        if holds == kind.kind:  # other kinds, which are refused, have versions of their own
            check_version(about, FORMAT_VERSION)
    if holds not in (kind.kind, ""):
        raise CalibrationError(f"{str(path)!r} holds {holds!r:.80}, not {kind.kind}")
    names = ", ".join(f"{name!r:.80}" for name in sorted(tensors)[:8])
    what = f"holds no {kind.kind.removeprefix('a ')}; it holds {names}"
    with refused(path, what, CalibrationError):
        return kind.of(floats(tensors if holds else kind.published(tensors, path.parent)))


def called(tensors: Mapping[str, Tensor], name: str) -> Tensor:
    """The tensor called `name`; with a `*` for the layer index, those of all layers, stacked."""
    if "*" not in name:
        return tensors[name]
    n_layers = len({key.split(".")[1] for key in tensors})
    return torch.stack([tensors[name.replace("*", str(i))] for i in range(n_layers)])


# ---- presses with a calibration ------------------------------------------------------------------


def learned(kind: type[Calibration]) -> Any:
    """A press field for a calibration of `kind`, its path or hub id, or None (looked for)."""
    fits = (kind, str, Path, type(None))
    allowed = f"{kind.__name__}, a path, a hub id or None"
    metadata = {"holds": lambda x: isinstance(x, fits), "allowed": allowed, "learned": kind}
    return field(default=None, metadata=metadata)


@dataclass
class LearnedPress(InstalledPress):
    """A press that needs a calibration of the model, made by `learned` as one of its fields."""

    def prepare(self, model: Any) -> Any:
        """The calibration for `model`, on the model's device.

        Raises:
            CalibrationError: if none is found.
            UnsupportedModelError: if it belongs to a model of other sizes.
        """
        found = self.find(model).to(device_of(model))
        for site in attention_sites(model):
            check_fits(found, site)
        return found

    def find(self, model: Any) -> Calibration:
        """The calibration in the field, beside the model, or published for it on the hub.

        Raises:
            CalibrationError: if there is none; the message says how to make one.
        """
        (declared,) = (x for x in fields(self) if "learned" in x.metadata)
        kind, given = declared.metadata["learned"], getattr(self, declared.name)
        if given is not None:
            return given if isinstance(given, kind) else kind.load(given, self.file_names())
        fit = f"{type(self).__name__}.{kind.made_by}"
        name = str(getattr(getattr(model, "config", None), "name_or_path", None) or "")
        source, published, advice = "", "", f"pass what {fit} returns"
        if name and Path(name).is_dir():
            source = str(Path(name) / (self.file_names() or kind.file_names)[0])
            advice = f"make it once, {fit}.save({name!r}), or {advice}"
            published = self.hub_id(Path(name).resolve().name)
        elif _HUB_ID.fullmatch(name):
            source = published = self.hub_id(name)
        if published:
            advice += f" or a hub id, such as {published!r} if it is published"
        try:
            require(bool(source), "no calibration is given, and there is no place to look for one")
            return kind.load(source, kind.published_files[:1])
        except ValueError as error:
            about = name or f"this {type(model).__name__}"
            raise CalibrationError(f"{error}. For {about}, {advice}") from error

    def file_names(self) -> tuple[str, ...]:
        """Names of the file in a folder; empty: those of the calibration's class."""
        return ()

    def hub_id(self, model_name: str) -> str:
        """The hub repository published for a model, by the model's name; empty: none is known."""
        return ""


def model_sizes(site: AttentionSite) -> dict[str, int]:
    """Sizes of the model that `site` belongs to, by the names in `SIZES`."""
    config: Any = site.module.config
    heads = site.num_heads, site.num_kv_heads, site.head_dim
    return dict(zip(SIZES, (n_layers_of(site), *heads, config.hidden_size), strict=True))


def check_fits(fitted: Calibration, site: AttentionSite) -> None:
    """Raise unless the model of `site` has the sizes of the one that `fitted` was learned on.

    Raises:
        UnsupportedModelError: naming the sizes of both.
    """
    sizes = model_sizes(site)
    model = {name: sizes[name] for name in fitted.sizes}
    if model != fitted.sizes:
        raise UnsupportedModelError(
            f"{type(fitted).__name__} of a model with {_in_words(fitted.sizes)} cannot be used on "
            f"one with {_in_words(model)} ({site.name}); fit it to this model"
        )
