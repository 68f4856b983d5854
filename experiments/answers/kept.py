"""Compressed contexts in files, for later questions.

The file is written by `press_core.save_cache`. Its notes hold what a question needs besides the
cache: the chat template's text after it, and whether the press acts after the prefill.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from attention_patch import headwise
from experiments import UserError
from experiments.answers.compressed import Compressed, acts_later, needs_scope
from press_core import SavedCache, about_cache, load_cache, save_cache
from press_core.files.files import check_target
from press_core.presses.finch import Finch
from press_core.scope import InstalledPress


@dataclass(frozen=True)
class SavedContext:
    """One or several contexts that a `ContextAnswerer` has compressed and saved.

    Attributes:
        path: path of the file.
    """

    path: str | Path

    @property
    def about(self) -> SavedCache:
        """The description of the cache in the file.

        Raises:
            PressError: if the file is no compressed cache.
            UserError: if it was not saved by a `ContextAnswerer`.
        """
        about = about_cache(self.path)
        needed = {"tails", "is_one", "acts_later"}, {"input_ids", "attention_mask"}
        if needed[0] - about.notes.keys() or needed[1] - about.inputs.keys():
            raise UserError(
                f"{str(self.path)!r} is a compressed cache, and does not say of which texts; "
                "read it with press_core.load_cache, or make it with ContextAnswerer.save"
            )
        return about

    @property
    def is_one(self) -> bool:
        """Whether a single context was saved, not a list."""
        return bool(self.about.notes["is_one"])

    def heads_unless(self, given: Mapping[str, Any]) -> list[tuple[list[int], str]]:
        """Token ids of each context, and the chat template's text after the question.

        Raises:
            UserError: if `given` has options for reading or compressing contexts.
        """
        if useless := [name for name, value in given.items() if value not in (None, False)]:
            raise UserError(
                f"{', '.join(useless)} is of no use for a SavedContext, which is compressed "
                "already; leave it out"
            )
        about = self.about
        rows = zip(*(about.inputs[name] for name in ("input_ids", "attention_mask")), strict=True)
        tails = about.notes["tails"]
        return [(i[m.bool()].tolist(), tail) for (i, m), tail in zip(rows, tails, strict=True)]

    @contextmanager
    def opened(self, model: PreTrainedModel, press: InstalledPress | None) -> Iterator[Compressed]:
        """Load the contexts that `keep` has written, ready for questions.

        Raises:
            UserError: if the press that acts while decoding is missing, or a press is given that
                is not needed.
            PressError: if the file cannot be read, or does not fit the model.
        """
        about = self.about
        needs_press = bool(about.notes["acts_later"])
        if needs_press and not acts_later(press):
            raise UserError(
                f"{str(self.path)!r} was compressed by {about.press}, which also acts while "
                "decoding; give that press again"
            )
        if press is not None and not needs_press:
            raise UserError(
                f"{str(self.path)!r} is compressed already (by {about.press}); leave the press out"
            )
        cache = load_cache(self.path, model)
        device = torch.device("cpu") if model.device.type == "meta" else model.device
        ids, mask = (about.inputs[name].to(device) for name in ("input_ids", "attention_mask"))
        with ExitStack() as scope:
            if press is not None:
                scope.enter_context(press(model))
            elif any(map(needs_scope, cache.layers)):
                scope.enter_context(headwise(model))
            yield Compressed(model, ids, mask, cache, press is not None)


def check_savable(path: str | Path, press: InstalledPress | None) -> None:
    """Check before compressing that the result can be saved.

    Raises:
        UserError: if the press compresses contexts together with their questions.
        PressError: if the file exists already.
    """
    if isinstance(press, Finch):
        raise UserError(
            "a saved context is compressed before a question is known, and FinchPress needs the "
            "question; give another press"
        )
    check_target(Path(path), overwrite=False)


def keep(
    state: Compressed,
    path: str | Path,
    press: InstalledPress | None,
    tails: Sequence[str],
    is_one: bool,
) -> None:
    """Write a compressed batch to a new file.

    Args:
        tails: for each context, the chat template's text after the question.
        is_one: see `SavedContext`.

    Raises:
        UserError: if the press has state of the contexts outside of the cache.
        PressError: if the cache cannot be saved, or the file cannot be written.
    """
    memories = [m for x in state.cache.layers for m in getattr(x, "memories", {}).values()]
    if any(memory.slots or memory.steps for memory in memories):
        raise UserError(
            f"{type(press).__name__} remembers more of a context than its cache holds, and only "
            "the cache is saved; use another press"
        )
    notes = {"tails": list(tails), "is_one": is_one, "acts_later": state.acts_later}
    inputs: dict[str, Any] = {"input_ids": state.ids, "attention_mask": state.mask}
    save_cache(state.cache, path, state.model, press=press, notes=notes, **inputs)
