"""The manifest of a study's folder, `run.json`: what was run, and which files came of it.

A study removes and replaces the files that its manifest names, and no others. So names are checked
when it is read: a table or figure of `quality` is called `quality` or `quality_...`, and nothing in
a manifest leads out of its folder.
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
"""What is written of all experiments together."""

UNFINISHED = "it was interrupted before everything was written"
"""The error of an experiment whose files are being written."""

Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$", max_length=100)]


class Entry(BaseModel, frozen=True, strict=True):
    """One experiment.

    Attributes:
        seconds: that it ran.
        error: why it failed, in one line, or None.
        tables: names of its CSV files.
        figures: what each of its SVG files shows, in words, by name.
        commit: of the code that ran it, or None if that is not known.
        versions: of the libraries that it ran with.
        repeat: the command that runs it again; empty: the experiment's own.
        options: that it ran with, as text.
        note: what a reader has to know besides, a sentence; empty: nothing.
    """

    seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    error: str | None = None
    tables: list[Name] = []
    figures: dict[Name, str] = {}
    commit: str | None = None
    versions: dict[str, str] = {}
    repeat: str = ""
    options: str = ""
    note: str = ""

    @property
    def files(self) -> list[str]:
        return [*(f"{name}.csv" for name in self.tables), *(f"{n}.svg" for n in self.figures)]


class Manifest(BaseModel, frozen=True, strict=True):
    """A study: when, with what and on what it was begun, and what came of it.

    Attributes:
        model: of the user's own, as it was given; None: the study of this project.
        quick: whether grids are small.
        left_out: why an experiment is not run on that model, by its name.
        waiting: names of the experiments that were asked for and are not finished.
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
        """Names of those of its experiments."""
        return {file for entry in self.experiments.values() for file in entry.files}

    def noting(self, name: str, entry: Entry, order: Sequence[str]) -> Manifest:
        """The manifest with what came of one experiment; all of them in `order`."""
        entries = {**self.experiments, name: entry}
        known = {each: entries[each] for each in order if each in entries}
        left = [each for each in self.waiting if each != name or entry.error == UNFINISHED]
        return self.model_copy(update={"experiments": known, "waiting": left})


def check_names(experiment: str, names: Iterable[str]) -> None:
    """Check what tables or figures of an experiment are called.

    Raises:
        ValueError: if one is not called as the experiment is, alone or before an underscore.
    """
    for name in names:
        if name != experiment and not name.startswith(f"{experiment}_"):
            raise ValueError(
                f"{name!r} is no name for a table or figure of {experiment}: call it "
                f"{experiment!r} or {f'{experiment}_...'!r}"
            )


def read_manifest(folder: Path) -> Manifest:
    """The manifest of the study in `folder`.

    Raises:
        UserError: if there is none, or it is not one.
    """
    path = folder / MANIFEST
    try:
        return Manifest.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        raise UserError(
            f"there is no {MANIFEST} in {folder}, so it holds no study; make one with "
            f"`python -m experiments study --output {folder}`"
        ) from None
    except ValidationError as error:
        first = refused(error.errors()[0], "all of it")
        raise UserError(f"{path} is no manifest of a study: {first}") from None


def write_manifest(manifest: Manifest, folder: Path) -> None:
    """Write the manifest of a study into its `folder`: at once, or not at all."""
    write_at_once(folder / MANIFEST, f"{manifest.model_dump_json(indent=2)}\n".encode())


def write_at_once(path: Path, content: bytes) -> None:
    """Write a file at once or not at all, with the permissions that the umask says."""
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    try:
        part.write_bytes(content)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


# ---- one run -----------------------------------------------------------------------------------


def check_one_run(folder: Path, manifest: Manifest, options: Mapping[str, str]) -> None:
    """See that the results in `folder` are those of one run of one commit.

    Args:
        options: with which each experiment is to run, as text, by name.

    Raises:
        UserError: if they are not, saying why.
    """
    if told := list(_disagreements(folder, manifest, options)):
        raise UserError(f"{folder} is not from one run: {'; '.join(told)}; run `make results`")


def _disagreements(folder: Path, manifest: Manifest, options: Mapping[str, str]) -> Iterator[str]:
    if manifest.commit and manifest.commit.endswith("+changes"):
        yield f"{manifest.commit[:7]} had changes that were not committed"
    yield from (f"{name} is not finished" for name in manifest.waiting)
    yield from (f"{name} is missing" for name in options.keys() - manifest.experiments.keys())
    alike = {"error": None, "commit": manifest.commit, "versions": manifest.versions, "note": ""}
    for name, entry in manifest.experiments.items():
        for what, wanted in (alike | {"options": options.get(name)}).items():
            if (found := getattr(entry, what)) != wanted:
                yield f"the {what} of {name} is {found!r}, not {wanted!r}"
    there = {path.name for path in folder.iterdir() if path.is_file()}
    yield from (f"{name} is missing" for name in sorted(manifest.tables_and_figures - there))
    yield from (f"{name} belongs to no experiment" for name in sorted(there - manifest.files))


# ---- whose files ---------------------------------------------------------------------------------


def former_study(
    output: Path, model: str | None, names: Collection[str], *, overwrite: bool = False
) -> Manifest | None:
    """What an earlier study has left in the folder, once it is sure that one can be written there.

    The folder is made if it is not there.

    Args:
        model: that will be studied; None: the study of this project.
        names: of the experiments that will write.
        overwrite: whether files that no study has written there may be replaced.

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
            f"{model or 'those'}; give another --output"
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
    """Make the folder if it is not there.

    Raises:
        UserError: if it cannot be made, or not be written to.
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
