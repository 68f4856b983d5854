"""A needle in a haystack of essays, at depths from the start to the end.

The haystack is any published collection of texts with a column `text`, or a local copy of one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from experiments import UserError
from experiments.answers.datasets.published import Published, rows_of
from experiments.answers.datasets.synthetic import most
from experiments.answers.sample import Sample

if TYPE_CHECKING:
    from experiments.answers.datasets import Request

ESSAYS = Published("sgoel9/paul_graham_essays", split="train", required={"text": ("text",)})
NEEDLE = "The keeper of the lighthouse hides the spare key under the blue flower pot."
QUESTION = "\n\nWhere does the keeper of the lighthouse hide the spare key?\n"
PREFIX = "The keeper of the lighthouse hides the spare key"
ANSWER = "under the blue flower pot"
_MAX_NEW_TOKENS = 16


def make(request: Request) -> list[Sample]:
    """A sample per depth, as asked for or evenly spread, each as long as asked for.

    Raises:
        UserError: if the essays are shorter than that.
    """

    def length(text: str) -> int:
        return len(request.tokenizer(text, add_special_tokens=False)["input_ids"])

    room = request.length - _MAX_NEW_TOKENS - length(f" {NEEDLE} ") - length(QUESTION + PREFIX)
    essays = ""
    for row in rows_of(ESSAYS, "needle", "essays", request.length, request.data):
        if length(essays) > room:
            break
        essays += str(row["text"]) + "\n\n"
    if room < 1 or length(essays) < room:
        raise UserError(
            f"a needle in {request.length} tokens needs {max(room, 1)} tokens of essays, and there "
            f"are {length(essays)}; ask for another length"
        )
    haystack = essays[: most(lambda n: n < len(essays) and length(essays[:n]) <= room)]
    last = max(request.samples - 1, 1)
    depths = request.depths or [number / last for number in range(request.samples)]
    return [
        Sample(
            request.task,
            _with_needle(haystack, depth),
            QUESTION,
            (ANSWER,),
            "match_all",
            _MAX_NEW_TOKENS,
            PREFIX,
        )
        for depth in depths
    ]


def _with_needle(haystack: str, depth: float) -> str:
    """The haystack with the needle at the end of the sentence at `depth`, from 0 to 1."""
    place = round(depth * len(haystack))
    end = haystack.rfind(". ", 0, place)
    place = end + 2 if end > 0 and place < len(haystack) else place
    return " ".join((haystack[:place].rstrip(), NEEDLE, haystack[place:].lstrip())).strip()
