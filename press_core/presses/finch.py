"""FINCH (Corallo and Papotti, TACL 2024): the question at the end of the prompt scores keys."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from press_core.attention import mean_attention
from press_core.budget import kept_of_chunks
from press_core.call import AttentionCall
from press_core.errors import UnsupportedInputError
from press_core.eviction import Eviction
from press_core.fields import count, require
from press_core.forward import Arguments, Forward
from press_core.press import RatioPress
from press_core.select import protect, top_positions, trailing
from press_core.traits import Needs, Phase


@dataclass
class Finch(RatioPress):
    """Keeps the keys that the question after a delimiter token attends to (FINCH, TACL 2024).

    The prompt is context, delimiter, question. The score is the mean attention of the question's
    queries, averaged over the GQA group; the question's own tokens rank above all others. The
    delimiter is removed before the decoder runs, so the model's vocabulary and embeddings need not
    contain it. Paper: Corallo and Papotti, https://doi.org/10.1162/tacl_a_00716.

    Attributes:
        compression_ratio: share of the tokens that each KV head evicts, in [0, 1), or the `Tokens`
            that it keeps.
        chunk_length: tokens per chunk; each chunk keeps the same share, its best tokens by the
            scores of the whole prompt. None: all tokens compete.
        normalize_scores: multiply the attention of each query by the number of keys before it.
        rerotate_keys: rotate kept keys to the positions `0 ... n - 1`.
        delimiter_token_id, delimiter_token: the delimiter; see `update_model_and_tokenizer`.
    """

    chunk_length: int | None = count(None, 1)
    normalize_scores: bool = True
    rerotate_keys: bool = True
    delimiter_token_id: int | None = None
    delimiter_token: str | None = None

    phases = Phase.PREFILL | Phase.BEFORE_DECODER
    row_by_row = True

    @property
    def needs(self) -> Needs:
        of_keys = Needs.ROPE | Needs.NEW_POSITIONS if self.rerotate_keys else Needs.NOTHING
        return Needs.QUERIES | of_keys

    def update_model_and_tokenizer(
        self, model: Any, tokenizer: Any, delimiter_token: str = "<|finch_sep|>"
    ) -> Any:
        """Add the delimiter to `tokenizer` and store it in this press; `model` is not changed.

        Args:
            model: not used; kvpress has the parameter.
            tokenizer: gets `delimiter_token` as an additional special token.

        Returns:
            The tokenizer.
        """
        if delimiter_token not in tokenizer.get_vocab():
            tokenizer.add_tokens([delimiter_token], special_tokens=True)
        self.delimiter_token = delimiter_token
        self.delimiter_token_id = tokenizer.convert_tokens_to_ids(delimiter_token)
        return tokenizer

    def prepare(self, model: Any) -> None:
        fits = self.delimiter_token_id is not None
        allowed = "a token id; update_model_and_tokenizer(model, tokenizer) chooses one"
        require(self, "delimiter_token_id", fits, allowed)

    def before_decoder(self, scope: Any, forward: Forward) -> Arguments:
        """The decoder's arguments with the delimiter removed.

        Raises:
            UnsupportedInputError: if a prompt does not hold the delimiter once, before a question,
                if the decoder was given embeddings, or a mask that is not 2-d, or if it cannot be
                told which column of a mask is the delimiter's.
        """
        given, cache = forward.given, forward.cache
        ids = forward.token_ids("Finch looks for its delimiter in the token ids")
        mask = given.get("attention_mask")
        if forward.is_context:
            if mask is not None and getattr(mask, "shape", None) != ids.shape:
                raise UnsupportedInputError(
                    "Finch takes its delimiter out of the tokens and of a 2-d mask; pass an "
                    f"attention_mask of the shape of input_ids, {tuple(ids.shape)}, and to "
                    "generate a DynamicCache: for a static cache it makes masks of another shape"
                )
            delimiters = self._delimiters(ids, mask)
            if any(x.traits.phases & Phase.BEFORE_DECODING for x in forward.entered):
                raise UnsupportedInputError(
                    "a scope around Finch's would prune by masks of later turns that still have a "
                    "column for the delimiter; open the scope of Finch outermost"
                )
            forward.notes["questions"] = ids.shape[1] - 1 - delimiters
            return _without_delimiter(given, delimiters, 0)
        layers = [x for x in cache.layers if hasattr(x, "get_seq_length")]
        seen = max(int(getattr(x, "n_seen", 0) or x.get_seq_length()) for x in layers)
        counted = seen + forward.n_tokens + 1
        ids = given.get("position_ids")
        if isinstance(mask, Tensor) and mask.dim() == 2:
            if mask.shape[1] > counted and not bool(mask[:, : counted - 1].all()):
                raise UnsupportedInputError(
                    f"an attention_mask of {mask.shape[1]} columns hides tokens, and Finch cannot "
                    f"tell its delimiter's; pass one of {counted} columns, none for tokens to come"
                )
            if mask.shape[1] == counted:
                # The caller's mask still has a column for the delimiter; drop any visible column.
                return _without_delimiter(given, mask.int().argmax(dim=-1), seen + 1)
        elif ids is not None:  # without padding
            return given.replace(position_ids=ids - (ids.max() == counted - 1).to(ids))
        return given

    def _delimiters(self, ids: Tensor, mask: Any) -> Tensor:
        """Index of the delimiter in each row, `(B,)`; delimiter ids in the padding do not count."""
        delimiter: Any = self.delimiter_token_id
        found = ids.eq(delimiter) & (True if mask is None else mask.bool())
        counts = found.sum(dim=-1)
        if bool((counts != 1).any()) or bool(found[:, -1].any()):
            raise UnsupportedInputError(
                f"each prompt must come in one forward, with the delimiter (token {delimiter}) "
                f"once and a question after it; found it {counts.tolist()} times per row"
            )
        return found.int().argmax(dim=-1)

    def compress(self, call: AttentionCall) -> Eviction:
        if self.ratio_of(call) == 0:
            return Eviction.nothing(call)
        row = call.when.batch_rows[0] if call.when.batch_rows else 0
        scores = self.scores(call, int(call.notes["questions"][row]))
        step = self.chunk_length or call.length
        numbers = kept_of_chunks(call.length, step, self.amount_of(call))
        chunks = zip(scores.split(step, dim=-1), numbers, strict=True)
        kept = [i * step + top_positions(chunk, n) for i, (chunk, n) in enumerate(chunks)]
        eviction = Eviction.keep(call, torch.cat(kept, dim=-1))
        return eviction.rerotated() if self.rerotate_keys else eviction

    def scores(self, call: AttentionCall, n_question: int) -> Tensor:
        """Mean attention of the question's `n_question` queries on each key, `(B, H_kv, S)`.

        The question itself is protected.
        """
        seen = torch.arange(call.length - n_question, call.length, device=call.keys.device)
        factors = seen if self.normalize_scores else None
        votes = mean_attention(call, call.queries(n_question), factors)
        return protect(votes, trailing(call.keys, n_question))


def _without_delimiter(given: Arguments, delimiters: Tensor, first: int) -> Arguments:
    """Arguments of a forward without the delimiter, with the positions after it reduced by one.

    Args:
        delimiters: `(B,)`, index of the delimiter in each row.
        first: index of the forward's first token.
    """
    changed, delimiters = {}, delimiters[:, None]
    for name in ("input_ids", "attention_mask", "position_ids", "cache_position"):
        value = given.get(name)
        if value is not None and value.dim() <= 2:
            start = 0 if name == "attention_mask" else first
            columns = torch.arange(start, start + value.shape[-1], device=value.device)
            after = columns > delimiters
            kept = value - after.to(value) if "position" in name else value.expand(after.shape)
            kept = kept[columns != delimiters].view(len(delimiters), -1)
            changed[name] = kept[0] if value.dim() == 1 else kept
    return given.replace(**changed)
