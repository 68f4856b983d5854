"""A needle in a haystack of essays, at depths from the start to the end.

The haystack is any published collection of texts with a column `text`, or a local copy of one.
"""

from experiments import UserError
from experiments.answers.datasets.published import Published, rows_of
from experiments.answers.datasets.synthetic import most
from experiments.answers.sample import Sample, Wanted

ESSAYS = Published("sgoel9/paul_graham_essays", split="train", required={"text": ("text",)})
NEEDLE = "The keeper of the lighthouse hides the spare key under the blue flower pot."
QUESTION = "\n\nWhere does the keeper of the lighthouse hide the spare key?\n"
PREFIX = "The keeper of the lighthouse hides the spare key"
ANSWER = "under the blue flower pot"
_MAX_NEW_TOKENS = 16


def make(wanted: Wanted) -> list[Sample]:
    """A sample of the requested length for each depth of the settings; by default evenly spread.

    Raises:
        UserError: if the essays are shorter than the requested length, or the needle does not fit.
    """
    _, length, settings, tokenizer = wanted

    def n_tokens(text: str) -> int:
        return len(tokenizer(text, add_special_tokens=False)["input_ids"])

    room = length - _MAX_NEW_TOKENS - n_tokens(f" {NEEDLE} ") - n_tokens(QUESTION + PREFIX)
    essays = ""
    for row in rows_of(ESSAYS, "needle", wanted):
        if n_tokens(essays) > room:
            break
        essays += str(row["text"]) + "\n\n"
    if room < 1 or n_tokens(essays) < room:
        raise UserError(
            f"a needle in {length} tokens needs {max(room, 1)} tokens of essays, and there "
            f"are {n_tokens(essays)}; ask for another length"
        )
    haystack = essays[: most(lambda n: n < len(essays) and n_tokens(essays[:n]) <= room)]
    last = max(settings.samples - 1, 1)
    depths = settings.needle_depth or [number / last for number in range(settings.samples)]
    question = QUESTION, (ANSWER,), "match_all", _MAX_NEW_TOKENS, PREFIX
    return [Sample(_with_needle(haystack, depth), *question) for depth in depths]


def _with_needle(haystack: str, depth: float) -> str:
    """The haystack with the needle at the end of the sentence at `depth`, from 0 to 1."""
    place = round(depth * len(haystack))
    end = haystack.rfind(". ", 0, place)
    place = end + 2 if end > 0 and place < len(haystack) else place
    return " ".join((haystack[:place].rstrip(), NEEDLE, haystack[place:].lstrip())).strip()
