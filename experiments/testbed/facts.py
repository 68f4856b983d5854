"""The facts task: key-value pairs of words hidden in filler, asked for at the end.

A context is a run of filler words in which ``facts`` pairs such as ``alice tea`` stand at random
places; a question is ``? alice`` and its answer, one token, ``tea``. Words are readable and each
is one token, so a sample can be used as tensors (`draw`) or as text (`FactBatch.text`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import Tensor
from transformers import PreTrainedTokenizerFast

_KEYS = """
    aaron abigail adam adele agnes albert alfred alice alma amanda amelia andrew angela anna
    anthony arthur audrey barbara beatrice benjamin bernard bertha boris bridget bruno caleb
    camilla carlos caroline catherine cecilia charles charlotte christine claire clara claudia
    conrad cynthia daniel david deborah denise derek diana dominic donald doris dorothy duncan
    edgar edith edward eleanor elena elizabeth emily emma eric ernest esther ethan eugene eva
    felix fiona florence frances frederick gabriel george gerald gloria gordon gregory hannah
    harold harriet hector helen henry hugo ingrid irene isaac isabel ivan jacob james jane
    jennifer jessica joan joseph judith julia karen katherine kenneth laura leonard lewis linda
    louise lucas lucy lydia marcus margaret maria martha martin matthew michael miriam monica
    nathan nicholas nora oliver oscar pamela patricia paul peter philip rachel robert
"""
KEYS: tuple[str, ...] = tuple(_KEYS.split())
"""The 128 words that a fact can be about: first names."""

_VALUES = """
    almond anchor apple apricot arrow axe bacon badger banana barrel basket bean bear beaver
    bell blanket bottle bowl bread broom bucket butter button cabbage cake camel candle carpet
    carrot celery chair cheese cherry clock coat coconut coffee comb compass cow crab crow crown
    cucumber cup deer desk dog donkey dove drum duck eagle egg elephant envelope feather fig
    flute fork fox frog garlic ginger giraffe glove goat goose grape guitar hammer hat hedgehog
    helmet honey horse jacket jar kettle kite knife ladder lamp lemon lion lizard mango mirror
    monkey mouse mushroom needle onion otter owl oyster parrot peach peanut pear pencil pepper
    piano pigeon pillow potato pumpkin rabbit ribbon rice rope saddle salmon scarf shovel spider
    spoon squirrel sugar sword table tea tiger tomato turtle umbrella violin walnut
"""
VALUES: tuple[str, ...] = tuple(_VALUES.split())
"""The 128 words that can be an answer: food, animals and things."""

_FILLER = """
    able above across act add afraid after again against age ago agree ahead air all almost
    alone along already also although among and another answer any appear area around arrive ask
    at aware away back balance be beach beautiful because become before begin behind believe
    below beside best better between beyond big black blue bold both brave break bridge bright
    bring broad brown build busy but buy by call calm came can care careful carry catch cause
    change children choose city clean clear clever climb close cloud coast cold color come
    common cool corner count country course cover cross crowd curious cut dance dark dawn day
    decide deep delay describe desert different direct distant divide down draw dream drift
    drive dry during each early earth east easy edge eight empty end enjoy enough enter even
    evening every exact explain fair faith fall familiar family famous far farm fast father fear
    feel few field fill final find fine finish fire first five flat float floor flow follow for
    forest forget forward found four free fresh friend from front full future garden gate gather
    gave gentle give glad go gold gone good grand grass gray great green ground group grow half
    hall happy harbor hard harvest have hear heart heavy help here hidden high hill hold hollow
    home hope hot hour house how huge hundred hungry idea if important in inside into island
    journey joy jump just keep kind know lake land large last late laugh law lazy lead learn
    leave left less let level life light like line listen little live long look lost loud love
    low make many march market may meadow meet memory middle might mild mind minute moment month
    moon more morning most mother mountain move much music must name near never new next night
    nine none noon north not nothing now number ocean of often old on once one only open or
    order other our out outside over own part pass past path patient peace people perfect
    perhaps place plain plan play please point poor power prepare pretty promise proud pull pure
    push quick quiet rain raise rare reach read ready real remember rest return rich right rise
    river road rough round run safe same
"""
FILLER: tuple[str, ...] = tuple(_FILLER.split())
"""The 368 words between the facts."""

PAD, BOS, UNKNOWN, QUESTION = "<pad>", "<bos>", "<unk>", "?"

VOCABULARY: tuple[str, ...] = (PAD, BOS, UNKNOWN, QUESTION, *KEYS, *VALUES, *FILLER)
"""Every token; a token's id is its place here."""

_BOS_ID = VOCABULARY.index(BOS)
_QUESTION_ID = VOCABULARY.index(QUESTION)
_FIRST_KEY = VOCABULARY.index(KEYS[0])
_FIRST_VALUE = VOCABULARY.index(VALUES[0])
_FIRST_FILLER = VOCABULARY.index(FILLER[0])


def build_tokenizer() -> PreTrainedTokenizerFast:
    """The word-level tokenizer of `VOCABULARY`, which starts a text with ``<bos>``.

    With ``add_special_tokens=False`` it does not. A question mark is a token of its own, also
    when no space separates it from a word. There is no end-of-sequence token: an answer is one
    token long, so generation ends with ``max_new_tokens=1``.
    """
    tokenizer = Tokenizer(
        models.WordLevel({word: index for index, word in enumerate(VOCABULARY)}, unk_token=UNKNOWN)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, _BOS_ID)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BOS,
        unk_token=UNKNOWN,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


class FactText(NamedTuple):
    """One sample in words: ``answers[i]`` is the word that follows ``context + questions[i]``."""

    context: str
    questions: tuple[str, ...]
    answers: tuple[str, ...]


@dataclass(frozen=True)
class FactBatch:
    """A batch of contexts, each with the questions about its facts, as int64 tensors.

    Attributes:
        context_ids: ``(batch, 1 + context)``, ``<bos>`` and then the words of the context.
        question_ids: ``(batch, facts, 2)``, the question mark and the key of each fact.
        answer_ids: ``(batch, facts)``, the value of each fact.
        positions: ``(batch, facts)``, the place of each fact's key in ``context_ids``; its value
            stands one further on.
    """

    context_ids: Tensor
    question_ids: Tensor
    answer_ids: Tensor
    positions: Tensor

    def text(self, index: int) -> FactText:
        """Sample ``index`` of the batch in words, for `build_tokenizer` to read.

        The context does not spell out ``<bos>``, which the tokenizer adds. Questions continue the
        context: tokenize them with ``add_special_tokens=False``.
        """
        return FactText(
            context=_words(self.context_ids[index, 1:]),
            questions=tuple(_words(question) for question in self.question_ids[index]),
            answers=tuple(_words(answer) for answer in self.answer_ids[index, :, None]),
        )


def draw(
    batch_size: int,
    context: int,
    facts: int,
    generator: torch.Generator,
    *,
    depths: Sequence[float] = (),
) -> FactBatch:
    """Draw ``batch_size`` contexts of ``context`` words with ``facts`` facts in each.

    Facts start at even places, counted from the first word, and never share a key within one
    sample. They are listed, and so asked for, in an order unrelated to their places.

    Args:
        batch_size: Number of samples, at least 1.
        context: Words in a context, facts included and ``<bos>`` not counted.
        facts: Facts in a context: at least 1, at most 128 and at most ``context // 2``.
        generator: The only source of randomness; a CPU generator.
        depths: Where the first facts stand, from 0.0 (start of the context) to 1.0 (its end), in
            every sample. Facts beyond these depths stand at random places.

    Raises:
        ValueError: A number is out of range, or two depths mean the same place.
    """
    _check_sizes(batch_size, context, facts)
    slots = context // 2
    keys = _distinct(batch_size, len(KEYS), facts, generator) + _FIRST_KEY
    values = torch.randint(len(VALUES), (batch_size, facts), generator=generator) + _FIRST_VALUE
    filler = torch.randint(len(FILLER), (batch_size, context), generator=generator) + _FIRST_FILLER
    fixed = _slots_of_depths(depths, slots, facts)
    positions = 1 + 2 * _distinct(batch_size, slots, facts, generator, first=fixed)
    context_ids = torch.cat([torch.full((batch_size, 1), _BOS_ID), filler], dim=1)
    context_ids.scatter_(1, positions, keys).scatter_(1, positions + 1, values)
    question_ids = torch.stack([torch.full_like(keys, _QUESTION_ID), keys], dim=-1)
    return FactBatch(context_ids, question_ids, values, positions)


def _check_sizes(batch_size: int, context: int, facts: int) -> None:
    if batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}; it must be at least 1")
    if not 1 <= facts <= len(KEYS):
        raise ValueError(f"facts is {facts}; it must be from 1 to {len(KEYS)}, one key each")
    if facts > context // 2:
        raise ValueError(
            f"facts is {facts}, which does not fit in a context of {context} words; "
            f"at most {max(context // 2, 0)} do, two words each"
        )


def _slots_of_depths(depths: Sequence[float], slots: int, facts: int) -> list[int]:
    if len(depths) > facts:
        raise ValueError(
            f"depths names {len(depths)} places; at most one for each of {facts} facts"
        )
    for depth in depths:
        if not 0.0 <= depth <= 1.0:
            raise ValueError(f"depths contains {depth}; a depth must be from 0.0 to 1.0")
    fixed = [round(depth * (slots - 1)) for depth in depths]
    if len(set(fixed)) < len(fixed):
        raise ValueError(
            f"depths is {tuple(depths)}, in which two facts share one place; "
            f"depths must differ by at least {1 / max(slots - 1, 1):.4f} in this context"
        )
    return fixed


def _distinct(
    rows: int, below: int, count: int, generator: torch.Generator, first: Sequence[int] = ()
) -> Tensor:
    """``(rows, count)`` int64: in each row, distinct numbers below ``below``, ``first`` leading."""
    scores = torch.rand(rows, below, generator=generator)
    # Random scores are at least 0, so negative ones sort the chosen numbers to the front.
    scores[:, list(first)] = torch.arange(-len(first), 0, dtype=scores.dtype)
    return scores.argsort(dim=1)[:, :count]


def _words(ids: Tensor) -> str:
    return " ".join(VOCABULARY[index] for index in ids.tolist())
