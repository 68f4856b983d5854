"""FINCH (Corallo and Papotti, TACL 2024): the question at the end decides what is kept."""

from __future__ import annotations

from dataclasses import dataclass, replace
from threading import local
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn.functional import pad

from press_core.attention import window_attention
from press_core.call import AttentionCall
from press_core.errors import UnsupportedInputError
from press_core.model.decoder import decoder_argument, token_ids
from press_core.scope import Compression, Press, require
from press_core.select import n_kept, protect, top_positions, trailing


@dataclass
class Finch(Compression):
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

    uses_queries = True
    decides_per_row = True

    def validate(self) -> None:
        super().validate()
        fits = self.chunk_length is None or self.chunk_length >= 1
        require(self, "chunk_length", fits, "None or a number of tokens, 1 or more")

    @property
    def uses_rope(self) -> bool:  # type: ignore[override]
        return self.rerotate_keys and self.compression_ratio > 0

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

    def resolve(self, model: Any) -> Press:
        fits = self.delimiter_token_id is not None
        allowed = "a token id; update_model_and_tokenizer(model, tokenizer) chooses one"
        require(self, "delimiter_token_id", fits, allowed)
        resolved = replace(self)
        resolved._questions = _Questions()  # type: ignore[misc]
        return resolved

    _questions: ClassVar[Any] = None  # those of one scope; no field

    def without_delimiter(
        self, body: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a forward of the whole model without the delimiter."""
        ids = token_ids(body, args, kwargs, "Finch finds its delimiter among the tokens")
        cache = decoder_argument(body, "past_key_values", args, kwargs)
        kwargs = {**kwargs, "input_ids": ids}
        args = args[1:] if args and args[0] is ids else args
        if cache is not None and cache.get_seq_length() > 0:
            return args, self._later(kwargs, cache)
        places = self._places(ids)
        self._questions.lengths.now = ids.shape[1] - 1 - places
        if cache is not None:
            self._questions.places[cache] = places
        return args, _dropped(kwargs, places)

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

    def _later(self, kwargs: dict[str, Any], cache: Any) -> dict[str, Any]:
        """Arguments of a later forward, whose mask may count the delimiter still."""
        places, mask = self._questions.places.get(cache), kwargs.get("attention_mask")
        q = kwargs["input_ids"].shape[1]
        layers = [layer for layer in cache.layers if layer.get_seq_length()]
        seen = max(layer.get_seq_length() + getattr(layer, "forgotten", 0) for layer in layers)
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

    def question_length(self, call: AttentionCall) -> int:
        """How many tokens the question of the row of `call` has."""
        row = call.batch_rows[0] if call.batch_rows else 0
        return int(self._questions.lengths.now[row])

    def keep(self, call: AttentionCall) -> tuple[Tensor, Tensor]:
        """Keep the question and what it attends to most."""
        if self.compression_ratio == 0:
            return call.keys, call.values
        scores = finch_scores(call, self.question_length(call), self.normalize_scores)
        kept, step = [], self.chunk_length or call.length
        for start in range(0, call.length, step):
            chunk = scores[..., start : start + step]
            n = n_kept(chunk.shape[-1], self.compression_ratio)
            kept.append(start + top_positions(chunk, n))
        positions = torch.cat(kept, dim=-1)
        keys, values = call.keep(positions)
        return (call.turn(keys) if self.rerotate_keys else keys), values


class _Questions:
    """What a scope knows of the prompts it sees.

    Attributes:
        lengths: per thread, the lengths of the questions of the batch that is running, `(B,)`.
        places: by cache, where each row's delimiter was.
    """

    def __init__(self) -> None:
        self.lengths = local()
        self.places: WeakKeyDictionary[Any, Tensor] = WeakKeyDictionary()


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
    weights = window_attention(call, window_size)[..., :before]
    if normalize:
        seen = torch.arange(before, call.length, device=weights.device)
        weights = weights * seen.view(-1, 1)
    votes = pad(weights.mean(dim=(2, 3)), (0, window_size))
    return protect(votes, trailing(call.keys, window_size))
