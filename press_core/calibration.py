"""What presses learn about a model beforehand: measured or trained once, saved, and found again.

A press whose scores need something learned holds a `Calibration`, the place where one lies, or
nothing; then `find` looks beside the model, and on the hub.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import huggingface_hub
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from press_core.call import AttentionCall
from press_core.errors import PressError, UnsupportedModelError, first_line
from press_core.model.decoder import device_of
from press_core.model.sites import AttentionSite
from press_core.press import Press, require
from press_core.select import upcast

FORMAT_VERSION = 1
"""Of the files that `Calibration.save` writes."""

METADATA = "hook-or-patch"
"""Entry of a file's metadata that says, as JSON, what it holds, of which model."""

PUBLISHED_FILE = "model.safetensors"
"""What the file is called in the repositories on the hub that kvpress reads."""

_HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")

F = TypeVar("F", bound="Calibration")
Batch = Tensor | Mapping[str, Tensor]
"""Token ids `(B, S)` int64, or `input_ids` and `attention_mask` of a left-padded batch."""


class CalibrationError(PressError, ValueError):
    """What a press has to learn about a model is missing, or is not what it should be."""


@dataclass(frozen=True, eq=False, repr=False)
class Calibration:
    """What was learned about one model: tensors, each stacked over all layers of the model.

    Layers that no press works on (sliding windows) have entries that nobody reads.

    Attributes:
        kind: class attribute; what the file says it holds.
        file_names: class attribute; what the file is called in a folder, first the preferred name.
    """

    kind: ClassVar[str] = ""
    file_names: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        """Check that the tensors fit each other.

        Raises:
            CalibrationError: naming the shapes that do not.
        """
        raise NotImplementedError

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
        raise NotImplementedError

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
        names = tuple(dict.fromkeys((*(file_names or cls.file_names), PUBLISHED_FILE)))
        path = Path(source).expanduser()
        if path.is_dir():
            path = _first_file(cls, path, names)
        elif not path.is_file():
            path = _download(cls, source, names)
        tensors, holds = _read(str(path.resolve()), path.stat().st_mtime_ns)
        if holds not in (cls.kind, ""):
            raise CalibrationError(f"{str(path)!r} holds {holds!r:.80}, not {cls.kind}")
        try:
            fitted = cls.of(tensors if holds else cls.published(tensors))
        except (LookupError, TypeError, RuntimeError) as error:
            names_found = ", ".join(f"{name!r:.80}" for name in sorted(tensors)[:8]) or "nothing"
            raise CalibrationError(
                f"{str(path)!r} holds no {cls.kind.removeprefix('a ')}, neither as "
                f"{cls.__name__}.save writes them nor as they are published on the hub; it holds "
                f"{names_found}"
            ) from error
        fitted.check_numbers()
        return fitted

    @classmethod
    def published(cls, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """The tensors of a file of `PUBLISHED_FILE`'s layout by field.

        Raises:
            KeyError: if one is missing.
        """
        raise NotImplementedError

    def __repr__(self) -> str:
        sizes = ", ".join(f"{name}={size}" for name, size in self.sizes.items())
        return f"{type(self).__name__}({sizes})"


# ---- files and repositories ----------------------------------------------------------------------


def _first_file(kind: type[Calibration], folder: Path, names: tuple[str, ...]) -> Path:
    found = [folder / name for name in names if (folder / name).is_file()]
    if not found:
        raise CalibrationError(
            f"there is no {' and no '.join(names)} in the folder {str(folder)!r}; "
            f"{kind.__name__}.save writes the first"
        )
    return found[0]


def _download(kind: type[Calibration], source: str | Path, names: tuple[str, ...]) -> Path:
    if isinstance(source, Path) or not _HUB_ID.fullmatch(source) or source.endswith(".safetensors"):
        raise CalibrationError(
            f"there is no file or folder {str(source)!r}; give a {kind.__name__}, a file that its "
            "save wrote, a folder that holds one, or a hub id such as owner/name"
        )
    causes: list[Exception] = []
    # What is on this machine is taken as it is: presses are opened often, and may be so offline.
    for offline in (True, False):
        for name in names:
            try:
                path = huggingface_hub.hf_hub_download(source, name, local_files_only=offline)
            except (OSError, ValueError, RuntimeError) as error:
                causes.append(error)
            else:
                return Path(path)
            if not offline and isinstance(causes[-1], LocalEntryNotFoundError):
                break  # nobody answered: do not wait for that again
    raise CalibrationError(
        f"there is no file or folder {source!r}, and the hub gave no {' and no '.join(names)} of "
        "that id (no network, no such id, or no permission); the cause was: "
        f"{first_line(causes[-1])}"
    ) from causes[-1]


@lru_cache(maxsize=4)
def _read(path: str, _modified: int) -> tuple[dict[str, Tensor], str]:
    """The tensors in the file at `path` and what it says they are, remembered: presses open often.

    Raises:
        CalibrationError: if the file cannot be read, or if a later release wrote it.
    """
    try:
        with safe_open(path, framework="pt") as file:
            about = json.loads((file.metadata() or {}).get(METADATA, "{}"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError, RecursionError, TypeError) as error:
        raise CalibrationError(f"cannot read {path!r}: {first_line(error)}") from error
    if not isinstance(about, dict) or not isinstance(about.get("kind", ""), str):
        raise CalibrationError(f"{path!r} does not say in its metadata what it holds")
    if about and about.get("version") != FORMAT_VERSION:
        raise CalibrationError(
            f"{path!r} has version {about.get('version')!r:.40} of the format; this release reads "
            f"{FORMAT_VERSION}"
        )
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            raise CalibrationError(f"{path!r} holds {name!r:.80} as {tensor.dtype}, not as floats")
    return {name: upcast(x) for name, x in tensors.items()}, about.get("kind", "")


# ---- what belongs to a model ---------------------------------------------------------------------


def require_given(press: Press, field: str, kind: type[Calibration]) -> None:
    """Raise a `HyperparameterError` unless `field` holds a `kind`, where one lies, or nothing."""
    given = getattr(press, field)
    fits = given is None or isinstance(given, (kind, str, Path))
    require(press, field, fits, f"{kind.__name__}, a path, a hub id or None")


def find(
    kind: type[F],
    given: F | str | Path | None,
    model: Any,
    *,
    fit: str,
    hub_id: Callable[[str], str] | None = None,
    file_name: str | None = None,
) -> F:
    """What a press knows about `model`, on the model's device.

    Args:
        given: itself, or where it lies. None: the file of its name in the folder that the model was
            loaded from, or the repository on the hub if the model itself comes from there.
        fit: Python that makes one, for the error message; `model` and `token_batches` in it.
        hub_id: from the name of a model on the hub to the repository that belongs to it; None:
            nobody publishes such.
        file_name: what the file is called in a folder; None: `kind.file_names`.

    Raises:
        CalibrationError: if there is none.
    """
    if given is None:
        given = _search(kind, model, fit, hub_id, file_name or kind.file_names[0])
    elif not isinstance(given, kind):
        assert isinstance(given, str | Path)
        given = kind.load(given, (file_name,) if file_name else ())
    return given.to(device_of(model))


def _search(
    kind: type[F], model: Any, fit: str, hub_id: Callable[[str], str] | None, file_name: str
) -> F:
    name = str(getattr(getattr(model, "config", None), "name_or_path", None) or "")
    if name and Path(name).is_dir():
        path = Path(name) / file_name
        if path.is_file():
            return kind.load(path)
        published = "" if hub_id is None else hub_id(Path(name).resolve().name)
        such_as = f", such as the hub id {published!r} if it is published" if published else ""
        raise CalibrationError(
            f"there is no {path}; make it once, {fit}.save({name!r}), or hand over where one lies"
            f"{such_as}"
        )
    if hub_id is None or not _HUB_ID.fullmatch(name):
        raise CalibrationError(
            f"nothing was learned about this {type(model).__name__} that could be found by itself; "
            f"hand over what {fit} returns"
        )
    try:
        return kind.load(hub_id(name), (PUBLISHED_FILE,))
    except CalibrationError as error:
        raise CalibrationError(f"{error}. For {name}, hand over what {fit} returns") from error


def model_sizes(site: AttentionSite) -> dict[str, int]:
    """The sizes of the model that `site` belongs to."""
    config: Any = site.module.config
    return {
        "layers": config.num_hidden_layers,
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


# ---- running a model to learn about it -----------------------------------------------------------


def run(model: nn.Module, token_batches: Iterable[Batch], collector: Press) -> None:
    """Run `model` on all batches inside the scope of `collector`, without the head on top.

    Rows of a padded batch get the positions that they have by themselves.
    """
    body = getattr(model, "base_model", model)
    with collector(model), torch.no_grad():
        for batch in token_batches:
            inputs = batch if isinstance(batch, Mapping) else {"input_ids": batch}
            mask = inputs.get("attention_mask")
            if mask is not None and "position_ids" not in inputs:
                positions = (mask.cumsum(dim=-1) - 1).clamp(min=0)
                inputs = {**inputs, "position_ids": positions}
            device = device_of(model)
            body(**{name: x.to(device) for name, x in inputs.items()}, use_cache=True)


def rows_alone(token_batches: Iterable[Batch]) -> Iterator[Tensor]:
    """Token ids `(b, S)` without padding: batches that have none, and else row by row."""
    for batch in token_batches:
        if not isinstance(batch, Mapping):
            yield batch
            continue
        ids, mask = batch["input_ids"], batch.get("attention_mask")
        if mask is None or bool(mask.all()):
            yield ids
        else:
            yield from (row[keep.bool()][None] for row, keep in zip(ids, mask, strict=True))


class QueryMoments:
    """Number, sum and sum of outer products of queries, per layer and head.

    They are kept in float64 where the layer is, and no query outlives the call it is added by.
    """

    def __init__(self) -> None:
        self.n_layers = 0
        self._count: dict[int, int] = {}
        self._sums: dict[int, tuple[Tensor, Tensor]] = {}

    def add(self, call: AttentionCall, queries: Tensor) -> None:
        """Take in `queries` `(B, H, n, d)` of the layer of `call`."""
        layer = call.site.layer_idx
        self.n_layers = model_sizes(call.site)["layers"]
        of_head = queries.double().transpose(0, 1).flatten(1, 2)  # (H, B * n, d)
        first, second = of_head.sum(dim=1), of_head.mT @ of_head
        if layer in self._sums:
            first, second = first + self._sums[layer][0], second + self._sums[layer][1]
        self._sums[layer] = first, second
        self._count[layer] = self._count.get(layer, 0) + of_head.shape[1]

    def stacked(self) -> tuple[Tensor, Tensor]:
        """First and second moment, `(L, H, d)` and `(L, H, d, d)` float64 on the CPU.

        Zero for layers of which no query was seen.

        Raises:
            CalibrationError: if there was no query at all.
        """
        if not any(self._count.values()):
            raise CalibrationError("token_batches holds no token to learn from")
        shapes = [moment.shape for moment in next(iter(self._sums.values()))]
        stacked = [torch.zeros(self.n_layers, *shape, dtype=torch.float64) for shape in shapes]
        for layer, count in self._count.items():
            for moment, total in zip(stacked, self._sums[layer], strict=True):
                moment[layer] = total.cpu() / max(1, count)
        return stacked[0], stacked[1]
