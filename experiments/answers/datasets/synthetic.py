"""Generated long-context tasks modelled on RULER (Hsieh et al., arXiv 2404.06654).

Every task can be drawn from a seed at any length for any tokenizer. The words and sentences are
this project's own, so scores cannot be compared with those published for RULER; the dataset `ruler`
loads the published samples.
"""

import random
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import count, pairwise
from typing import NamedTuple

from experiments import UserError, data_of
from experiments.answers.sample import Sample, Wanted
from experiments.testbed.facts import FILLER, KEYS, VALUES

Draft = tuple[str, str, str, tuple[str, ...]]
"""Context, question, answer prefix and answers of a sample."""


class Task(NamedTuple):
    """How a task is drawn.

    Attributes:
        draw: draws a draft, given a generator and the amount of text around the answer.
        max_new_tokens, metric: see `Sample`.
    """

    draw: Callable[[random.Random, int], Draft]
    max_new_tokens: int
    metric: str = "match_all"


def make(wanted: Wanted) -> list[Sample]:
    """Samples whose context, question and answer take at most `length` tokens.

    Raises:
        UserError: if the task does not fit into so few.
    """
    name, length, settings, tokenizer = wanted
    task = TASKS[name]
    room = length - task.max_new_tokens

    def drawn(number: int, amount: int) -> tuple[Draft, int]:
        draft = task.draw(random.Random(f"{settings.seed} {name} {number}"), amount)
        return draft, len(tokenizer("".join(draft[:3]))["input_ids"])

    amount = most(lambda n: drawn(0, n)[1] <= room)
    if amount < 1:
        raise UserError(
            f"synthetic/{name} does not fit into {length} tokens, of which "
            f"{task.max_new_tokens} are for the answer; ask for a length of about "
            f"{drawn(0, 1)[1] + task.max_new_tokens + 50} or more"
        )
    samples = []
    for number in range(settings.samples):
        own = amount
        while (draft := drawn(number, own))[1] > room and own > 1:  # its words take more tokens
            own -= max(1, own // 50)
        context, question, prefix, answers = draft[0]
        samples.append(Sample(context, question, answers, task.metric, task.max_new_tokens, prefix))
    return samples


def most(fits: Callable[[int], bool]) -> int:
    """The largest amount that fits, found by doubling and bisection; 0 if not even 1 fits."""
    high = next(n for n in (2**power for power in count()) if not fits(n))
    return bisect_left(range(high), True, lo=max(1, high // 2), key=lambda n: not fits(n)) - 1


# ---- words and sentences -------------------------------------------------------------------------


def _names(rng: random.Random, n: int) -> list[str]:
    """`n` different names such as `brave-walnut`, with a number if there are not enough pairs."""
    pairs = len(FILLER) * len(VALUES)
    names = []
    for place in rng.sample(range(pairs * -(-n // pairs)), n):
        number, pair = divmod(place, pairs)
        name = f"{FILLER[pair // len(VALUES)]}-{VALUES[pair % len(VALUES)]}"
        names.append(f"{name}-{number}" if number else name)
    return names


def _made_up(rng: random.Random, n: int, parts: Sequence[str], length: int) -> list[str]:
    """`n` different words of `length` parts each."""
    words: dict[str, None] = {}
    while len(words) < n:
        words["".join(rng.choices(parts, k=length))] = None
    return list(words)


_SENTENCES, _HABITS, _TEXTS = map(data_of(__file__).get, ("sentences", "habits", "texts"))
"""Filler sentences; pairs of what people do and the question about it; the texts of each task."""


def _hidden(rng: random.Random, needles: list[str], n: int) -> str:
    """Insert the needles at random positions into `n` filler sentences, in their order."""
    sentences = [rng.choice(_SENTENCES).format(*rng.sample(VALUES, 2)) for _ in range(n)]
    indices = sorted(rng.randrange(n + 1) for _ in needles)
    for index, sentence in reversed(list(zip(indices, needles, strict=True))):
        sentences.insert(index, sentence)
    return " ".join(sentences)


def _listed(words: list[str]) -> str:
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " and " + words[-1]


# ---- tasks ---------------------------------------------------------------------------------------


def _draft(task: str, answers: Iterable[str], **said: object) -> Draft:
    """The texts of a task, with what is `said` in them, and its answers."""
    context, question, prefix = (text.format(**said) for text in _TEXTS[task])
    return context, question, prefix, tuple(answers)


def _needles(rng: random.Random, amount: int, keys: int, values: int, asked: int) -> Draft:
    """Secret numbers hidden in noise: `keys` names with `values` numbers each; `asked` are asked.

    The question asks for all numbers of `asked` names.
    """
    names = _names(rng, keys)
    numbers = {name: [str(rng.randrange(10**6, 10**7)) for _ in range(values)] for name in names}
    needles = [f"One secret number of {name} is {n}." for name in names for n in numbers[name]]
    rng.shuffle(needles)
    wanted = rng.sample(names, asked)
    what = f"secret {'number' if values * asked == 1 else 'numbers'} of {_listed(wanted)}"
    are = "is" if values * asked == 1 else "are"
    answers = (number for name in wanted for number in numbers[name])
    text = _hidden(rng, needles, amount)
    return _draft("needles", answers, text=text, what=what, are=are)


def _variables(rng: random.Random, amount: int, hops: int = 4) -> Draft:
    """Variable tracking: a chain of assignments of one number, hidden in noise."""
    names = _made_up(rng, hops + 1, "ABCDEFGHIJKLMNOPQRSTUVWXYZ", 5)
    number = str(rng.randrange(10**4, 10**5))
    steps = [f"VAR {names[0]} = {number}."]
    steps += [f"VAR {to} = VAR {of}." for of, to in pairwise(names)]
    text = _hidden(rng, steps, amount)
    return _draft("variables", names, text=text, n=hops + 1, number=number)


def _common_words(rng: random.Random, amount: int, common: int = 10) -> Draft:
    """Common words: a list in which a few words occur 10 times each, all others once."""
    names = _names(rng, common + amount)
    words = names[:common] * 10 + names[common:]
    rng.shuffle(words)
    numbered = " ".join(f"{place}. {word}" for place, word in enumerate(words, 1))
    return _draft("common_words", names[:common], text=numbered, n=common)


def _frequent_words(rng: random.Random, amount: int, wanted: int = 3) -> Draft:
    """Frequent words: made-up words whose frequencies fall as in Zipf's law (exponent 2)."""
    syllables = [a + b for a in "bdfgklmnprstvz" for b in "aeiou"]
    words = _made_up(rng, 50, syllables, 3)
    # Exact counts instead of random draws, so that the answer is certain.
    total = sum(rank**-2.0 for rank in range(1, len(words) + 1))
    counts = [round(10 * amount * rank**-2.0 / total) for rank in range(1, len(words) + 1)]
    text = [w for w, n in zip(words, counts, strict=True) for _ in range(max(n, 1))]
    text += words[:wanted] * 2  # breaks ties that rounding may cause
    rng.shuffle(text)
    return _draft("frequent_words", words[:wanted], text=" ".join(text), n=wanted)


def _questions(rng: random.Random, amount: int) -> Draft:
    """Question answering: short portraits of people, and one question about one of them."""
    places = rng.sample(range(len(KEYS) * len(FILLER)), amount + 1)
    people = [f"{KEYS[p // len(FILLER)]} {FILLER[p % len(FILLER)]}".title() for p in places]
    things = [rng.sample(VALUES, len(_HABITS)) for _ in people]
    portraits = []
    for number, (person, own) in enumerate(zip(people, things, strict=True), 1):
        habits = [habit.format(thing) for (habit, _), thing in zip(_HABITS, own, strict=True)]
        first, rest = " and ".join(habits[:2]), " and ".join(habits[2:])
        portraits.append(f"Portrait {number}: {person} {first}. {person} {rest}.")
    about, habit = rng.randrange(len(people)), rng.randrange(len(_HABITS))
    question = _HABITS[habit][1].format(people[about])
    return _draft("qa", [things[about][habit]], text="\n".join(portraits), question=question)


TASKS: dict[str, Task] = {
    "niah_single": Task(partial(_needles, keys=1, values=1, asked=1), 32),
    "niah_multikey": Task(partial(_needles, keys=4, values=1, asked=1), 32),
    "niah_multivalue": Task(partial(_needles, keys=1, values=4, asked=1), 96),
    "niah_multiquery": Task(partial(_needles, keys=4, values=1, asked=4), 96),
    "variable_tracking": Task(_variables, 48),
    "common_words": Task(_common_words, 128),
    "frequent_words": Task(_frequent_words, 48),
    "qa": Task(_questions, 16, "match_any"),
}
"""Every task by its name; the numbers of needles and hops are RULER's defaults."""
