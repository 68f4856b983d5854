"""FINCH (Corallo and Papotti, TACL 2024): the question at the end decides what is kept."""

from __future__ import annotations

from dataclasses import dataclass, replace
from threading import local
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from press_core.attention import mean_attention
from press_core.cache.storing import n_seen
from press_core.call import AttentionCall
from press_core.errors import UnsupportedInputError
from press_core.eviction import Eviction
from press_core.model.forward import DecoderForward
from press_core.model.generation import require_whole
from press_core.press import Needs, Phase, Press, RatioPress, require
from press_core.scope import ScopeState
from press_core.select import kept_of_chunks, protect, top_positions, trailing


@dataclass
class Finch(RatioPress):
    """Keeps what the question after a delimiter token attends to (FINCH, TACL 2024).

    The prompt is context, delimiter, question. The delimiter is taken out before the model sees it,
    so that neither its vocabulary nor its embeddings have to know it.

    Attributes:
        compression_ratio: share of the tokens that each KV head evicts, in [0, 1).
        chunk_length: prune each chunk of this many tokens by itself, by the one score; None: all
            tokens together.
        normalize_scores: weight each query by the number of keys that it sees.
        rerotate_keys: turn kept keys to the positions `0 ... n - 1`.
        delimiter_token_id: id of the delimiter; see `update_model_and_tokenizer`.
    """

    chunk_length: int | None = None
    normalize_scores: bool = True
    rerotate_keys: bool = True
    delimiter_token_id: int | None = None

    phases = Phase.PREFILL | Phase.DECODER
    row_by_row = True

    def validate(self) -> None:
        super().validate()
        fits = self.chunk_length is None or self.chunk_length >= 1
        require(self, "chunk_length", fits, "None or a number of tokens, 1 or more")

    @property
    def rerotates(self) -> bool:  # type: ignore[override]
        return self.rerotate_keys and self.compression_ratio != 0

    @property
    def needs(self) -> Needs:  # type: ignore[override]
        return Needs.QUERIES | (Needs.ROPE if self.rerotates else Needs.NOTHING)

    def update_model_and_tokenizer(
        self, model: Any, tokenizer: Any, delimiter_token: str = "<|finch_sep|>"
    ) -> Any:
        """Let `tokenizer` know the delimiter, and this press its id; the model stays as it is.

        Returns:
            The tokenizer.
        """
        tokenizer.add_special_tokens({"additional_special_tokens": [delimiter_token]})
        self.delimiter_token_id = tokenizer.convert_tokens_to_ids(delimiter_token)
        return tokenizer

    def bind(self, model: Any) -> Press:
        fits = self.delimiter_token_id is not None
        allowed = "a token id; update_model_and_tokenizer(model, tokenizer) chooses one"
        require(self, "delimiter_token_id", fits, allowed)
        return self

    def before_decoder(self, scope: ScopeState, forward: DecoderForward) -> DecoderForward:
        """The forward without the delimiter."""
        require_whole(scope.sites[0], type(self).__name__)
        ids = forward.token_ids("Finch finds its delimiter among the tokens")
        forward = DecoderForward(
            forward.args[1:] if forward.args and forward.args[0] is ids else forward.args,
            {**forward.kwargs, "input_ids": ids},
            forward.decoder,
        )
        cache, questions = forward.cache, scope.memory(_Questions)
        if cache is not None and cache.get_seq_length() > 0:
            return replace(forward, kwargs=_later(dict(forward.kwargs), cache, questions))
        places = self._places(ids)
        questions.lengths.now = ids.shape[1] - 1 - places
        if cache is not None:
            questions.places[cache] = places
        return replace(forward, kwargs=_dropped(dict(forward.kwargs), places))

    def _places(self, ids: Tensor) -> Tensor:
        """Where the delimiter is in each row, `(B,)`."""
        assert self.delimiter_token_id is not None
        found = ids.eq(self.delimiter_token_id)
        if bool((found.sum(dim=-1) != 1).any()) or bool(found[:, -1].any()):
            counts = found.sum(dim=-1).tolist()
            raise UnsupportedInputError(
                f"each prompt must hold the delimiter (token {self.delimiter_token_id}) once, with "
                f"a question after it; found it {counts} times per row"
            )
        return found.int().argmax(dim=-1)

    def decide(self, call: AttentionCall) -> Eviction:
        if self.ratio_of(call.length) == 0:
            return Eviction.nothing(call)
        scores = finch_scores(call, _question_length(call), self.normalize_scores)
        kept, step = [], self.chunk_length or call.length
        numbers = kept_of_chunks(call.length, step, self.amount)
        for start, n in zip(range(0, call.length, step), numbers, strict=True):
            kept.append(start + top_positions(scores[..., start : start + step], n))
        eviction = Eviction.keep(call, torch.cat(kept, dim=-1))
        return eviction.rerotated() if self.rerotate_keys else eviction


class _Questions:
    """What a scope knows of the prompts it sees.

    Attributes:
        lengths: per thread, the lengths of the questions of the batch that is running, `(B,)`.
        places: by cache, where each row's delimiter was.
    """

    def __init__(self) -> None:
        self.lengths = local()
        self.places: WeakKeyDictionary[Any, Tensor] = WeakKeyDictionary()


def _question_length(call: AttentionCall) -> int:
    """How many tokens the question of the row of `call` has."""
    assert call.scope is not None
    row = call.batch_rows[0] if call.batch_rows else 0
    return int(call.scope.memory(_Questions).lengths.now[row])


def _later(kwargs: dict[str, Any], cache: Any, questions: _Questions) -> dict[str, Any]:
    """Arguments of a later forward, whose mask may count the delimiter still."""
    places, mask = questions.places.get(cache), kwargs.get("attention_mask")
    q = kwargs["input_ids"].shape[1]
    seen = max(n_seen(layer) for layer in cache.layers if layer.get_seq_length())
    if places is None or mask is None or mask.dim() != 2 or mask.shape[1] != seen + q + 1:
        return kwargs
    changed = {"attention_mask": _without(mask, places)}
    if kwargs.get("position_ids") is not None:
        positions = changed["attention_mask"].cumsum(dim=-1) - 1
        changed["position_ids"] = positions[:, -q:].clamp(min=0)
    if kwargs.get("cache_position") is not None:
        steps = torch.arange(q, device=mask.device)
        changed["cache_position"] = steps + cache.get_seq_length()
    return {**kwargs, **changed}


def _dropped(kwargs: dict[str, Any], places: Tensor) -> dict[str, Any]:
    """Arguments of a prefill without the column of each row's delimiter."""
    changed = {}
    for name in ("input_ids", "attention_mask", "position_ids"):
        given = kwargs.get(name)
        if given is not None and given.dim() == 2:
            given = given.expand(len(places), -1)
            after = torch.arange(given.shape[1], device=given.device) > places[:, None]
            shifted = given - after.to(given) if name == "position_ids" else given
            changed[name] = _without(shifted, places)
    if kwargs.get("cache_position") is not None:
        changed["cache_position"] = kwargs["cache_position"][:-1]
    return {**kwargs, **changed}


def _without(x: Tensor, places: Tensor) -> Tensor:
    """`x` `(B, n)` without one column per row."""
    columns = torch.arange(x.shape[1], device=x.device)
    return x[columns != places[:, None]].view(len(places), -1)


def finch_scores(call: AttentionCall, window_size: int, normalize: bool) -> Tensor:
    """Mean attention of the question's queries on each key before it.

    Args:
        window_size: tokens of the question.
        normalize: weight each query by the number of keys that it sees before itself.

    Returns:
        `(B, H_kv, S)`, float32; the question itself is protected.
    """
    before = call.length - window_size
    seen = torch.arange(before, call.length, device=call.keys.device)
    votes = mean_attention(call, call.queries(window_size), seen if normalize else None)
    return protect(votes, trailing(call.keys, window_size))
