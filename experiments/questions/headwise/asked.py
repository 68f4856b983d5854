"""What is asked about compressed contexts: the facts task, as token ids or in words."""

from __future__ import annotations

from contextlib import nullcontext
from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel, PreTrainedTokenizerBase

from experiments import UserError
from experiments.testbed.asking import UNSEEN, Task, answer_unseen, check_vocabulary
from experiments.testbed.facts import FactBatch
from press_core.scope import InstalledPress


class Asked:
    """The facts task as token ids, for models that speak its language."""

    def __init__(self, task: Task) -> None:
        self.task, self.batches = task, task.batches(UNSEEN)
        self.length = self.contexts(self.batches[0])[0].shape[1]

    def others(self) -> list[FactBatch]:
        """Contexts that are drawn in the same way, and never asked about."""
        return replace(self.task, samples=8, seed=self.task.seed + 1).batches(UNSEEN)

    def contexts(self, batch: FactBatch) -> list[Tensor]:
        """Token ids of the contexts of a batch, `(rows, S)`, those of one length together."""
        return [batch.context_ids]

    def right(
        self, model: PreTrainedModel, press: InstalledPress | None, batch: FactBatch
    ) -> Tensor:
        """Which questions are answered rightly after `press`: `(rows, facts)` bool."""
        return answer_unseen(model, press, batch) == batch.answer_ids


class AskedInWords(Asked):
    """The facts task in words, for models with a tokenizer of their own.

    An answer is right if each of its tokens is the likeliest after the ones before.
    """

    def __init__(self, task: Task, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        super().__init__(task)

    def contexts(self, batch: FactBatch) -> list[Tensor]:
        return [
            self._ids(batch.text(row).context, start=True) for row in range(len(batch.context_ids))
        ]

    def _ids(self, words: str, start: bool = False) -> Tensor:
        """`(1, n)`; what continues a text begins without special tokens."""
        encoded: Any = self.tokenizer(words, add_special_tokens=start, return_tensors="pt")
        return encoded.input_ids

    @torch.inference_mode()
    def right(
        self, model: PreTrainedModel, press: InstalledPress | None, batch: FactBatch
    ) -> Tensor:
        rows = []
        for row, context in enumerate(self.contexts(batch)):
            text = batch.text(row)
            with nullcontext() if press is None else press(model):
                cache = prefill_only(model, context)
                rows.append(
                    [
                        self._is_right(model, deepcopy(cache), f" {question}", f" {answer}")
                        for question, answer in zip(text.questions, text.answers, strict=True)
                    ]
                )
        return torch.tensor(rows)

    def _is_right(self, model: PreTrainedModel, cache: Any, question: str, answer: str) -> bool:
        wanted = self._ids(answer)
        ids = torch.cat((self._ids(question), wanted), dim=1)[:, :-1].to(model.device)
        logits = model(input_ids=ids, past_key_values=cache, logits_to_keep=wanted.shape[1]).logits
        return torch.equal(logits.argmax(dim=-1).cpu(), wanted)


def asked(tokenizer: PreTrainedTokenizerBase, task: Task) -> Asked:
    """The task for a model: as token ids where it was trained on them, else in words."""
    try:
        check_vocabulary(tokenizer, "the model")
    except UserError:
        return AskedInWords(task, tokenizer)
    return Asked(task)


def prefill_only(model: PreTrainedModel, context: Tensor) -> Cache:
    """The cache of a context, whose logits nobody reads."""
    return model.base_model(input_ids=context.to(model.device), use_cache=True).past_key_values
