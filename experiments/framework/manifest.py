"""The manifest of a study's folder, `run.json`: what was run, and which files it wrote.

A study removes and replaces only the files that its manifest names. The names are therefore checked
when the manifest is read: a table or figure of `quality` is called `quality` or `quality_...`, and
no name leads out of the folder.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import Annotated

from pydantic import BaseModel, Field, StringConstraints, ValidationError, model_validator

from experiments import UserError, refusing
from experiments.framework.wording import refused

MANIFEST = "run.json"
REPORTS = ("report.md", "report.html", "overview.svg")
"""Files about all experiments together."""

_ADVICE = "; what is finished is kept, so fix that and repeat the command, or give another --output"

UNFINISHED = "it was interrupted before everything was written"
"""Error of an entry while its files are being written."""

Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$", max_length=100)]


class Entry(BaseModel, frozen=True, strict=True):
    """One experiment in a manifest.

    Attributes:
        seconds: how long it ran.
        error: why it failed, in one line; None if it did not.
        tables: names of its CSV files, without suffix.
        figures: by name of an SVG file, without suffix, what it shows, in words.
        commit: commit of the code that ran it; None in manifests of older versions.
        date: when it began; empty in manifests of older versions.
        versions: versions of the libraries that it ran with.
        repeat: the command that repeats it; empty: the experiment's own.
        options: `repr` of its options.
        note: a further sentence for readers; may be empty.
    """

    seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    error: str | None = None
    tables: list[Name] = []
    figures: dict[Name, str] = {}
    commit: str | None = None
    date: str = ""
    versions: dict[str, str] = {}
    repeat: str = ""
    options: str = ""
    note: str = ""

    @property
    def files(self) -> list[str]:
        return [*(f"{name}.csv" for name in self.tables), *(f"{n}.svg" for n in self.figures)]


class Manifest(BaseModel, frozen=True, strict=True):
    """A study: its date, code, versions and machine, and its experiments.

    Attributes:
        model: the user's own model, as it was given; None: the shipped models.
        quick: whether grids are small.
        left_out: by experiment, why it does not run on the user's model.
        waiting: names of the experiments that are planned and not finished.
        experiments: entries by name, in the order of the report.
    """

    date: str
    commit: str | None
    seed: int
    versions: dict[str, str]
    machine: dict[str, str | int | None]
    model: str | None = None
    quick: bool = False
    left_out: dict[Name, str] = {}
    waiting: list[Name] = []
    experiments: dict[Name, Entry]

    @model_validator(mode="after")
    def _check_names(self) -> Manifest:
        for name, entry in self.experiments.items():
            check_names(name, [*entry.tables, *entry.figures])
        return self

    @property
    def files(self) -> set[str]:
        """Names of all files that the study has written."""
        return self.tables_and_figures | {MANIFEST, *REPORTS}

    @property
    def tables_and_figures(self) -> set[str]:
        """Names of the tables' and figures' files."""
        return {file for entry in self.experiments.values() for file in entry.files}

    def noting(self, name: str, entry: Entry, order: Sequence[str]) -> Manifest:
        """A copy with the entry of one experiment added or replaced; entries are in `order`."""
        entries = {**self.experiments, name: entry}
        known = {each: entries[each] for each in order if each in entries}
        waiting = [each for each in self.waiting if each != name or entry.error == UNFINISHED]
        return self.model_copy(update={"experiments": known, "waiting": waiting})


def check_names(experiment: str, names: Iterable[str]) -> None:
    """Check the names of tables or figures of an experiment.

    Raises:
        ValueError: if a name is neither the experiment's nor starts with it and an underscore.
    """
    for name in names:
        if name != experiment and not name.startswith(f"{experiment}_"):
            raise ValueError(
                f"{name!r} is no name for a table or figure of {experiment}: call it "
                f"{experiment!r} or {f'{experiment}_...'!r}"
            )


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of the study in `folder`.

    Raises:
        UserError: if there is no manifest, or the file is not valid.
    """
    path = folder / MANIFEST
    try:
        return Manifest.model_validate_json(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(
            f"there is no {MANIFEST} in {folder}, so it holds no study; give one that does, or "
            f"make one with `python -m experiments study --output {folder}`"
        ) from None
    except ValidationError as error:
        first = refused(error.errors()[0], "all of it")
        raise UserError(f"{path} is no manifest of a study: {first}") from None


def write_manifest(manifest: Manifest, folder: Path, after: Manifest | None = None) -> None:
    """Write the manifest of a study into its `folder`, atomically.

    Args:
        after: the manifest that this process wrote there before; None: it has written none.

    Raises:
        UserError: if another study has written one since, or if it cannot be written.
    """
    if after is not None and read_manifest(folder) != after:
        raise overtaken("study", folder)
    write_at_once(folder / MANIFEST, f"{manifest.model_dump_json(indent=2)}\n".encode())


def overtaken(what: str, folder: Path) -> UserError:
    """The error of a study or a sweep in whose folder another one is writing."""
    return UserError(
        f"another {what} is writing to {folder}; wait for it to finish and give the same command "
        "again, or give another --output"
    )


def write_at_once(path: Path, content: bytes) -> None:
    """Write a file atomically, in a folder that is created if it does not exist.

    Its permissions follow the umask.

    Raises:
        UserError: if it cannot be written.
    """
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    with refusing(f"cannot write {path}", OSError, advice=_ADVICE):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            part.write_bytes(content)
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)


# ---- one run -----------------------------------------------------------------------------------


def check_one_run(folder: Path, manifest: Manifest, options: Mapping[str, str]) -> None:
    """Check that the results in `folder` are from one run of one commit.

    Args:
        options: by experiment, the `repr` of the options that it should have run with.

    Raises:
        UserError: if they are not; the message says why.
    """
    if reasons := list(_disagreements(folder, manifest, options)):
        raise UserError(f"{folder} is not from one run: {'; '.join(reasons)}; run `make results`")


def _disagreements(folder: Path, manifest: Manifest, options: Mapping[str, str]) -> Iterator[str]:
    if manifest.commit and "+changes" in manifest.commit:
        yield f"{manifest.commit[:7]} had changes that were not committed"
    yield from (f"{name} is not finished" for name in manifest.waiting)
    yield from (f"{name} is missing" for name in options.keys() - manifest.experiments.keys())
    same = {"error": None, "commit": manifest.commit, "versions": manifest.versions, "note": ""}
    for name, entry in manifest.experiments.items():
        for what, wanted in (same | {"options": options.get(name)}).items():
            if (found := getattr(entry, what)) != wanted:
                yield f"the {what} of {name} is {found!r}, not {wanted!r}"
    files = {path.name for path in folder.iterdir() if path.is_file()}
    yield from (f"{name} is missing" for name in sorted(manifest.tables_and_figures - files))
    yield from (f"{name} belongs to no experiment" for name in sorted(files - manifest.files))


# ---- whose files ---------------------------------------------------------------------------------


def former_study(
    output: Path, model: str | None, names: Collection[str], *, overwrite: bool = False
) -> Manifest | None:
    """Check that a study can be written to a folder, and return the manifest of a former study.

    The folder is created if it does not exist.

    Args:
        model: the user's own model that will be studied; None: the shipped models.
        names: names of the experiments that will run.
        overwrite: whether files that no study has written may be replaced.

    Returns:
        The manifest in the folder; None if there is none.

    Raises:
        UserError: if the folder cannot be written to, or holds a study of another model, or files
            that would be lost.
    """
    former = None
    with suppress(UserError) if overwrite else nullcontext():
        former = read_manifest(output) if (output / MANIFEST).exists() else None
    if former and former.model != model:
        raise UserError(
            f"{output} holds a study of {former.model or 'the shipped models'}, not of "
            f"{model or 'the shipped models'}; give another --output"
        )
    replaceable = former.files if former else ()
    for path in sorted(output.iterdir()) if output.is_dir() else ():
        if not _is_of_study(path.name, names):
            continue
        if path.is_symlink() or not path.is_file():
            raise UserError(
                f"{path} is no plain file, so no study writes it; give another --output"
            )
        if path.name not in replaceable and not overwrite:
            raise UserError(
                f"{path} was not written by the study in that folder, and would be lost; give "
                "another --output, move it away, or replace it with --overwrite"
            )
    check_writable(output)
    return former


def check_writable(folder: Path) -> None:
    """Create the folder if it does not exist, and check that files can be written to it.

    Raises:
        UserError: if it cannot be created, or cannot be written to.
    """
    with refusing(
        f"cannot write to the folder {folder}", OSError, advice="; give another --output"
    ):
        folder.mkdir(parents=True, exist_ok=True)
        TemporaryFile(dir=folder).close()


def _is_of_study(name: str, experiments: Collection[str]) -> bool:
    path = Path(name)
    of_one = any(path.stem == each or path.stem.startswith(f"{each}_") for each in experiments)
    return name in (MANIFEST, *REPORTS) or (of_one and path.suffix in (".csv", ".svg"))
