"""What presses learn about a model beforehand: measured or trained once, saved, and found again.

A press whose scores need something learned holds a `Calibration`, the place where one lies, or
nothing; then it is looked for beside the model, and on the hub.
"""

from __future__ import annotations

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
from press_core.files.files import check_version, floats, read, refused, require, write
from press_core.model.decoder import device_of
from press_core.model.sites import AttentionSite, n_layers_of
from press_core.probe import attention_sites
from press_core.scope import InstalledPress

FORMAT_VERSION = 1
"""Of the files that `Calibration.save` writes."""

SIZES = "layers", "heads", "kv_heads", "head_dim", "hidden_size"
"""Dimensions by which models are told apart."""

_LARGEST = torch.finfo(torch.float32).max
_HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")

F = TypeVar("F", bound="Calibration")


class CalibrationError(PressError, ValueError):
    """What a press has to learn about a model is missing, or is not what it should be."""


def sized(dims: str, published: str = "", **default: Any) -> Any:
    """A field for a tensor.

    Args:
        dims: the names of its dimensions, or their sizes, such as `"99 layers kv_heads"`.
        published: what others call it, if not as the field is called; with a `*` for the layer
            where each has a tensor of its own.
    """
    return field(metadata={"dims": dims, "published": published}, **default)


@dataclass(frozen=True, eq=False, repr=False)
class Calibration:
    """What was learned about one model: tensors, each stacked over all layers of the model.

    Layers that no press works on (sliding windows) have entries that nobody reads. Fields are made
    by `sized`; the sizes of a model are `layers`, `heads`, `kv_heads`, `head_dim`, `hidden_size`.

    Attributes:
        kind: class attribute; what the file says it holds.
        made_by: class attribute; the call of a press that makes one.
        file_names: class attribute; what the file is called in a folder, first the preferred name.
        published_files: class attribute; what the files are called that others publish on the hub.
        within: class attribute; the least and the largest number: by default any finite one.
    """

    kind: ClassVar[str] = ""
    made_by: ClassVar[str] = "fit(model, token_batches)"
    file_names: ClassVar[tuple[str, ...]] = ()
    published_files: ClassVar[tuple[str, ...]] = ("model.safetensors",)
    within: ClassVar[tuple[float, float]] = (-_LARGEST, _LARGEST)

    def dims(self) -> dict[str, str]:
        """The names of the dimensions of each tensor."""
        return {field.name: field.metadata["dims"] for field in fields(self)}

    def __post_init__(self) -> None:
        """Check that the tensors are those of `dims`, fit each other, and hold what they may.

        Raises:
            CalibrationError: naming the tensors.
        """
        sizes, named = self._sizes(), f"{', '.join(self.tensors)} of {self.kind}"
        if 0 in sizes.values():
            raise CalibrationError(f"{named}: one is empty")
        low, high = self.within
        if not all(bool(((x >= low) & (x <= high)).all()) for x in self.tensors.values()):
            raise CalibrationError(f"{named} must be numbers from {low:g} to {high:g}")

    def _sizes(self) -> dict[str, int]:
        """The sizes of all dimensions by their names; equal names have to have equal sizes."""
        tensors, dims = self.tensors, self.dims()
        sizes = {n: int(n) for names in dims.values() for n in names.split() if n.isdigit()}
        named = [(dims.get(name, "").split(), x.shape) for name, x in tensors.items()]
        fits = dims.keys() == tensors.keys() and all(
            len(names) == len(shape)
            and all(sizes.setdefault(n, size) == size for n, size in zip(names, shape, strict=True))
            for names, shape in named
        )
        if not fits:
            found = ", ".join(f"{n} {tuple(x.shape)}" for n, x in tensors.items())
            wanted = ", ".join(f"{n} ({dims[n]})" for n in dims)
            raise CalibrationError(f"{self.kind} of {found:.300}: it must have {wanted:.300}")
        return sizes

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes of a model that this belongs to, by the names that `model_sizes` has."""
        found = self._sizes()
        return {name: found[name] for name in SIZES if name in found}

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
        write(path, tensors, about, overwrite=True)
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
        tensors, holds = _read(path.resolve(), path.stat().st_mtime_ns)
        if holds not in (cls.kind, ""):
            raise CalibrationError(f"{str(path)!r} holds {holds!r:.80}, not {cls.kind}")
        names_found = ", ".join(f"{name!r:.80}" for name in sorted(tensors)[:8])
        what = f"holds no {cls.kind.removeprefix('a ')}; it holds {names_found}"
        with refused(path, what, CalibrationError):
            return cls.of(tensors if holds else cls.published(tensors, path.parent))

    @classmethod
    def published(cls, tensors: dict[str, Tensor], folder: Path) -> dict[str, Tensor]:
        """What others publish, by field.

        Args:
            tensors: of the first of `published_files`.
            folder: where the others lie.

        Raises:
            KeyError: if one is missing.
        """
        if [*tensors] == [""]:  # an array
            return {fields(cls)[0].name: tensors[""]}
        return {x.name: called(tensors, x.metadata["published"] or x.name) for x in fields(cls)}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({_in_words(self.sizes)})"


def _in_words(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{name}={size}" for name, size in sizes.items())


# ---- files and repositories ----------------------------------------------------------------------


def _found(kind: type[Calibration], source: str | Path, names: tuple[str, ...]) -> Path:
    """The file at `source`, or the first of `names` in that folder or repository on the hub."""
    path, wanted = Path(source).expanduser(), " and no ".join(names)
    for place in (path, *(path / name for name in names)):
        if place.is_file():
            return place
    is_hub_id = isinstance(source, str) and _HUB_ID.fullmatch(source) and not path.is_dir()
    if not is_hub_id or str(source).endswith(".safetensors"):
        raise CalibrationError(
            f"there is no {wanted} at {str(source)!r}; give a {kind.__name__}, a file that its "
            "save wrote, a folder that holds one, or a hub id such as owner/name"
        )
    cause: Exception = LookupError()
    # What is on this machine is taken as it is: presses are opened often, and may be so offline.
    for offline, name in product((True, False), names):
        parts = kind.published_files if name == kind.published_files[0] else (name,)
        download = partial(huggingface_hub.hf_hub_download, source, local_files_only=offline)
        try:
            paths = [download(part) for part in parts]
            return Path(paths[0])
        except (OSError, ValueError, RuntimeError) as error:
            cause = error
        if not offline and isinstance(cause, LocalEntryNotFoundError):
            break  # nobody answered: do not wait for that again
    raise CalibrationError(
        f"there is no file or folder {source!r}, and the hub gave no {wanted} of that id (no "
        f"network, no such id, or no permission); the cause was: {first_line(cause)}"
    ) from cause


@lru_cache(maxsize=4)
def _read(path: Path, _modified: int) -> tuple[dict[str, Tensor], str]:
    """The tensors in the file at `path` and what it says they are, remembered: presses open often.

    Raises:
        CalibrationError: if the file cannot be read, or if a later release wrote it.
    """
    if path.suffix in (".pt", ".pth", ".bin"):
        raise CalibrationError(
            f"{str(path)!r} is a pickle, which may run code as it is read; turn it into "
            "safetensors once, if you trust it, as docs/learned.md says"
        )
    with refused(path, "cannot be read", CalibrationError):
        if path.suffix == ".tsv":  # in such formats authors of papers publish one nameless array
            return floats({"": torch.as_tensor(np.loadtxt(path, dtype=np.float32, ndmin=2))}), ""
        if path.suffix == ".npy":
            return floats({"": torch.as_tensor(np.load(path, allow_pickle=False))}), ""
        about, tensors = read(path)
        if about:
            check_version(about, FORMAT_VERSION)
        return floats(tensors), about["kind"] if about else ""


def called(tensors: Mapping[str, Tensor], name: str) -> Tensor:
    """The tensor of a `name`; those of all layers, stacked, where it has a `*` for the layer."""
    if "*" not in name:
        return tensors[name]
    n_layers = len({key.split(".")[1] for key in tensors})
    return torch.stack([tensors[name.replace("*", str(i))] for i in range(n_layers)])


# ---- presses that have learned -------------------------------------------------------------------


def learned(kind: type[Calibration]) -> Any:
    """A field for a `kind`, for where one lies, or for None: it is looked for then."""
    fits = (kind, str, Path, type(None))
    allowed = f"{kind.__name__}, a path, a hub id or None"
    metadata = {"holds": lambda x: isinstance(x, fits), "allowed": allowed, "learned": kind}
    return field(default=None, metadata=metadata)


@dataclass
class LearnedPress(InstalledPress):
    """A press that has learned something of a model beforehand, and holds it in a field."""

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
        (declared,) = (x for x in fields(self) if "learned" in x.metadata)
        kind, given = declared.metadata["learned"], getattr(self, declared.name)
        if given is not None:
            return given if isinstance(given, kind) else kind.load(given, self.file_names())
        fit = f"{type(self).__name__}.{kind.made_by}"
        name = str(getattr(getattr(model, "config", None), "name_or_path", None) or "")
        source, published, advice = "", "", f"hand over what {fit} returns"
        if name and Path(name).is_dir():
            source = str(Path(name) / (self.file_names() or kind.file_names)[0])
            advice = f"make it once, {fit}.save({name!r}), or {advice}"
            published = self.hub_id(Path(name).resolve().name)
        elif _HUB_ID.fullmatch(name):
            source = published = self.hub_id(name)
        if published:
            advice += f" or a hub id, such as {published!r} if it is published"
        try:
            require(bool(source), "nothing was learned that could be found by itself")
            return kind.load(source, kind.published_files[:1])
        except ValueError as error:
            about = name or f"this {type(model).__name__}"
            raise CalibrationError(f"{error}. For {about}, {advice}") from error

    def file_names(self) -> tuple[str, ...]:
        """What the file is called in a folder; empty: as its kind has it."""
        return ()

    def hub_id(self, model_name: str) -> str:
        """The repository on the hub that belongs to a model there; empty: nobody publishes such."""
        return ""


def model_sizes(site: AttentionSite) -> dict[str, int]:
    """The sizes of the model that `site` belongs to."""
    config: Any = site.module.config
    heads = site.num_heads, site.num_kv_heads, site.head_dim
    return dict(zip(SIZES, (n_layers_of(site), *heads, config.hidden_size), strict=True))


def check_fits(fitted: Calibration, site: AttentionSite) -> None:
    """Refuse a model other than the one that `fitted` was learned about.

    Raises:
        UnsupportedModelError: naming the sizes of both.
    """
    sizes = model_sizes(site)
    model = {name: sizes[name] for name in fitted.sizes}
    if model != fitted.sizes:
        raise UnsupportedModelError(
            f"{type(fitted).__name__} of a model with {_in_words(fitted.sizes)} cannot serve one "
            f"with {_in_words(model)} ({site.name}); fit it to this model"
        )
