"""Prompts of a `ContextAnswerer`, and checks of its arguments before a model runs."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from experiments import UserError, refusing
from press_core.scope import InstalledPress

GREEDY = {
    **{"do_sample": False, "temperature": None, "top_p": None, "top_k": None},
    **{"num_beams": 1, "num_return_sequences": 1},
    **{"repetition_penalty": 1.0, "no_repeat_ngram_size": 0},
}
"""Arguments of `generate` unless others are given, whatever the model's own configuration says."""

OWN = {"attention_mask", "input_ids", "inputs", "inputs_embeds", "past_key_values", "position_ids"}
"""Arguments of `generate` that say what it reads."""


class Prompt(NamedTuple):
    """Token ids of context, question, and the text after the question."""

    context: list[int]
    question: list[int]
    tail: list[int]


class Reading(NamedTuple):
    """How contexts become tokens; see `ContextAnswerer.answered`."""

    max_context_length: int | None = None
    chat_template: bool | None = None
    enable_thinking: bool = False
    template_options: Mapping[str, Any] | None = None


Head = tuple[list[int], str]
"""Token ids of a context, and the chat template's text after the question."""
Questions = Sequence[str] | Sequence[Sequence[str]] | None


def texts_of(what: str, given: Any) -> list[str]:
    """One text or several as a list of at least one; `what` names them in the error message.

    Raises:
        UserError: if `given` is neither a text nor a non-empty list of texts.
    """
    texts = [given] if isinstance(given, str) else given
    texts = list(texts) if isinstance(texts, Iterable) else []
    if not texts or not all(isinstance(text, str) for text in texts):
        raise UserError(f"{what} is {given!r:.60}; give a text, or a list of at least one")
    with refusing(f"{what} is no text that UTF-8 can write", UnicodeEncodeError):
        "".join(texts).encode()
    return texts


def generation_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of `generate`: greedy and at most 50 tokens, unless something else is given."""
    for name in OWN & given.keys():
        raise UserError(f"{name} is made here, of the texts; give an empty cache as cache=")
    config = given.get("generation_config")
    wanted = given.get("max_new_tokens", getattr(config, "max_new_tokens", None) or 50)
    check_limit("max_new_tokens", wanted, 1)
    if not given.get("do_sample", getattr(config, "do_sample", None)):
        given = {n: v for n, v in GREEDY.items() if getattr(config, n, None) is None} | {**given}
    return {**given, "max_new_tokens": wanted}


def chosen(name: str, options: Mapping[str, Any], default: Any) -> Any:
    """An argument of `generate`, or else a setting of its `generation_config` or of `default`."""
    given = getattr(options.get("generation_config"), name, None)
    return options.get(name, getattr(default, name) if given is None else given)


def check_limit(name: str, given: Any, least: int) -> None:
    """Raise if a limit is neither None nor an integer of at least `least`."""
    if given is not None and not (isinstance(given, int) and given >= least):
        raise UserError(f"{name} is {given!r:.60}; give an integer of {least} or more")


def check_length(prompt: Prompt, limit: int | None) -> None:
    """Raise if a prompt takes more positions than the model's `limit`; None: there is no limit."""
    n_question = len(prompt.question) + len(prompt.tail)
    if limit is None or len(prompt.context) + n_question <= limit:
        return
    if n_question >= limit:
        raise UserError(
            f"the question takes {n_question} tokens, which leaves no room for a context in the "
            f"{limit} positions of the model; ask a shorter one"
        )
    raise UserError(
        f"context and question take {len(prompt.context)} and {n_question} tokens, more than the "
        f"{limit} positions of the model; cut the context with max_context_length="
        f"{limit - n_question} or less, or set max_position_embeddings if the model can go further"
    )


def questions_of(n_contexts: int, questions: Any) -> list[list[str]]:
    """The checked questions about each context; an empty question if there are none."""
    questions = [""] if questions is None else questions
    if isinstance(questions, str) or not isinstance(questions, Sequence):
        raise UserError(f"questions is {questions!r:.60}; give a list of at least one")
    nested = any(isinstance(each, (list, tuple)) for each in questions)
    if nested and len(questions) != n_contexts:
        raise UserError(
            f"there are questions for {len(questions)} contexts, and {n_contexts} contexts; "
            "give a list of questions for each, or one list of texts for all"
        )
    per_context = questions if nested else [questions] * n_contexts
    return [texts_of("questions", each) for each in per_context]


def check_press(press: Any) -> None:
    """Raise if `press` is neither a press nor None."""
    if press is not None and not isinstance(press, InstalledPress):
        raise UserError(f"press is {press!r:.60}; give a press of hooks_impl or patch_impl")
