"""RestoreKV (arXiv 2608.01247): a few learned tokens hold what is about to be evicted."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from press_core.adapter import (
    N_TOKENS,
    RestoreAdapter,
    adapted,
    check_layers,
    first_adapter,
    learning,
)
from press_core.cache.ragged import RaggedLayer
from press_core.cache.storing import mean_kept
from press_core.calibration import (
    Batch,
    CalibrationError,
    find,
    require_given,
    rows_alone,
)
from press_core.errors import UnsupportedModelError
from press_core.model.decoder import device_of
from press_core.model.probe import verified_sites
from press_core.model.sites import AttentionSite
from press_core.press import Press
from press_core.presses.kvzip import KVzip, RepeatPrompts
from press_core.replay import Judged, Row
from press_core.scope import ScopeState
from press_core.select import Tokens


@dataclass
class RestoreKV(KVzip):
    """KVzip, and a few learned tokens that hold what is evicted (arXiv 2608.01247).

    Before KVzip evicts, eight learned embeddings are run after the context. They attend to all of
    it, with a low-rank adapter (LoRA) added to the linear layers for that one pass. Their keys and
    values join the cache, and KVzip evicts as many tokens more. The tokens that come later have the
    positions that they would have without them. Contexts of no more tokens than that are left
    whole.

    Attributes:
        compression_ratio: share of the tokens of all heads that is evicted, in [0, 1).
        layerwise: share one budget over the heads of each layer, rather than of the model.
        n_sink: first tokens, kept as long as there is room.
        kvzip_plus_normalization: weight attention as KVzip+ does.
        chunk_size: tokens to be repeated at a time.
        prompts: what asks the model to repeat; None: in the words of the tokenizer that lies beside
            the model.
        adapter: embeddings and adapter of the model (see `fit`), or a file, a folder or a hub id.
            None: the file `restorekv.safetensors` beside the model, or what is published for it on
            the hub.
    """

    adapter: RestoreAdapter | str | Path | None = None

    at_least = 0  # there are those that restore

    def validate(self) -> None:
        super().validate()
        require_given(self, "adapter", RestoreAdapter)

    def bind(self, model: Any) -> Press:
        suffix = "_plus" if self.kvzip_plus_normalization else ""
        adapter = find(
            RestoreAdapter,
            self.adapter,
            model,
            fit=f"{type(self).__name__}.fit(model, token_batches)",
            hub_id=lambda name: f"higokri/RestoreKV-{name.split('/')[-1]}{suffix}",
        )
        self._refuse_ranks(verified_sites(model)[0])
        check_layers(model, adapter)
        return replace(self, adapter=adapter)._with_prompts(model)

    def _with_prompts(self, model: Any) -> Press:
        return super().bind(model)

    def _refuse_ranks(self, site: AttentionSite) -> None:
        if site.heads.size > 1:
            raise UnsupportedModelError(
                f"{type(self).__name__} adds an adapter to whole linear layers, and ranks share "
                f"those of {site.name} (tensor parallelism); use KVzipPress"
            )

    # ---- rows ------------------------------------------------------------------------------------

    @property
    def learned(self) -> RestoreAdapter:
        """The adapter, once the press is bound to a model."""
        assert isinstance(self.adapter, RestoreAdapter)
        return self.adapter

    @property
    def n_restoring(self) -> int:
        """How many tokens restore."""
        return len(self.learned.embeddings)

    def judge(self, row: Row) -> Judged:
        if row.length <= max(self.n_restoring, self._whole_up_to):
            n_heads = [site.num_kv_heads for site in row.scope.sites]
            ones = partial(torch.ones, dtype=torch.bool, device=row.tokens.device)
            everything = [ones(n, row.length) for n in n_heads]
            layers = (site.layer_idx for site in row.scope.sites)
            return Judged(row.slots, dict(zip(layers, everything, strict=True)))
        return super().judge(row)._replace(joining=self.restored(row))

    @property
    def _whole_up_to(self) -> int:
        """Contexts of no more tokens are within the budget."""
        return self.compression_ratio.n if isinstance(self.compression_ratio, Tokens) else 0

    def n_chosen(self, n_heads: int, length: int) -> int:
        if isinstance(self.compression_ratio, Tokens):
            return max(0, super().n_chosen(n_heads, length) - n_heads * self.n_restoring)
        size = n_heads * length
        return size - int(size * min(1.0, self.compression_ratio + self.n_restoring / length))

    def restored(self, row: Row) -> dict[int, tuple[Tensor, Tensor]]:
        """Keys and values of the tokens that restore `row`, `(1, H_kv, n, d)` each, by layer."""
        scope, adapter = row.scope, self.learned
        assert scope.model is not None
        embedding = scope.model.get_input_embeddings()  # type: ignore[operator]
        with learning(adapter), adapted(self, scope.model, scope.sites, adapter):
            cache = row.alone()
            row.run(cache, inputs_embeds=adapter.embeddings[None].to(embedding.weight.dtype))
            layers = {site.layer_idx: cache.layers[site.layer_idx] for site in scope.sites}
            n = self.n_restoring
            return {i: (x.keys[:, :, -n:], x.values[:, :, -n:]) for i, x in layers.items()}

    def store(self, scope: ScopeState, cache: Any, judged: list[Judged]) -> None:
        with learning(self.learned):
            for site in scope.sites:
                self._store_layer(scope, cache, site, judged)

    def _store_layer(
        self, scope: ScopeState, cache: Any, site: AttentionSite, judged: list[Judged]
    ) -> None:
        layer = cache.layers[site.layer_idx]
        batch, n_heads, length = layer.keys.shape[:3]
        kept = torch.zeros(batch, n_heads, length + self.n_restoring, dtype=torch.bool)
        kept = kept.to(layer.keys.device)
        joining = [
            x.new_zeros(batch, n_heads, self.n_restoring, x.shape[-1])
            for x in (layer.keys, layer.values)
        ]
        for index, (slots, chosen, restoring) in enumerate(judged):
            places = slice(length) if slots is None else slots
            kept[index, :, places] = chosen[site.layer_idx]
            if restoring is not None:
                kept[index, :, length:] = True
                # In place of an assignment, for gradients flow through what joins.
                joining = [
                    x.index_copy(0, torch.tensor([index], device=x.device), new.to(x))
                    for x, new in zip(joining, restoring[site.layer_idx], strict=True)
                ]
        # Those that restore count as the last token: it is no padding, and later ones see it.
        positions = torch.arange(length + self.n_restoring, device=kept.device).clamp(
            max=length - 1
        )
        ragged = RaggedLayer.of(
            torch.cat((layer.keys, joining[0]), dim=2),
            torch.cat((layer.values, joining[1]), dim=2),
            kept,
            positions.view(1, 1, -1),
            length,
        )
        seen = sum(length if j.slots is None else len(j.slots) for j in judged) / batch
        ragged.mean_padding = length - seen
        cache.layers[site.layer_idx] = ragged
        scope.record(site.layer_idx, seen, mean_kept(site, ragged))

    # ---- learning --------------------------------------------------------------------------------

    @classmethod
    def fit(
        cls,
        model: Any,
        token_batches: Iterable[Batch],
        *,
        compression_ratios: tuple[float, ...] = (0.75, 0.9, 0.95),
        n_following: int = 32,
        rank: int = 8,
        learning_rate: float = 5e-3,
        n_batches: int | None = None,
        prompts: RepeatPrompts | None = None,
        seed: int = 0,
        **fields: Any,
    ) -> RestoreAdapter:
        """Learn to answer from what is left as the model answers from all (self-distillation).

        Each row is a context and what follows it. What follows is predicted over the whole context,
        and over what the press leaves of that, at ratios in turn; the divergence of the second
        prediction from the first is what is made small. One step per row; the model is left as it
        was.

        Args:
            model: as it is, in eval mode.
            token_batches: token ids `(B, S)`, or dicts with `input_ids` and `attention_mask` where
                rows are padded on the left.
            compression_ratios: to learn at, in turn.
            n_following: tokens at the end of each row that follow its context.
            rank: of the adapter on the linear layers of the attention modules.
            learning_rate: of AdamW.
            n_batches: how many batches there are; the rate then falls to zero along a cosine.
            prompts: see the press.
            seed: of the first numbers.
            fields: others of the press.

        Returns:
            Embeddings and adapter, float32: to hand over as `adapter`, or to save beside the model.

        Raises:
            CalibrationError: if there is no row with a context.
        """
        with torch.inference_mode(False), torch.enable_grad():
            started = first_adapter(model, rank, seed)
            learned = {name: x.requires_grad_() for name, x in started.tensors.items()}
            press: Any = cls(prompts=prompts, adapter=RestoreAdapter.of(learned), **fields)
            press = press._with_prompts(model)
            # Each number is normalised, so that one rate serves embeddings and layers.
            optimizer = torch.optim.AdamW(learned.values(), lr=learning_rate, weight_decay=0.0)
            n_rows = 0
            for done, row in _rows(token_batches, n_batches, n_following + N_TOKENS):
                optimizer.param_groups[0]["lr"] = learning_rate * (1 + math.cos(math.pi * done)) / 2
                told = press.with_ratio(compression_ratios[n_rows % len(compression_ratios)])
                _step(optimizer, model, told, row.to(device_of(model)), n_following)
                n_rows += 1
            if not n_rows:
                raise CalibrationError(
                    f"token_batches holds no row of more than {n_following + N_TOKENS} tokens "
                    f"(n_following={n_following} and a context)"
                )
            return RestoreAdapter.of({name: x.detach() for name, x in learned.items()})


def _rows(
    token_batches: Iterable[Batch], n_batches: int | None, longer_than: int
) -> Iterator[tuple[float, Tensor]]:
    """How far through the batches, where their number is known, and rows `(1, S)` long enough."""
    for index, batch in enumerate(token_batches):
        for ids in rows_alone([batch]):
            if ids.shape[1] > longer_than:
                done = 0.0 if n_batches is None else index / n_batches
                yield from ((done, row[None].clone()) for row in ids)  # made outside of inference


def _step(
    optimizer: torch.optim.Optimizer, model: Any, press: Press, row: Tensor, n_following: int
) -> None:
    """Learn from one row, `(1, S)`."""
    (group,) = optimizer.param_groups
    parts = row.split([row.shape[1] - n_following, n_following], dim=1)
    loss = distillation_loss(model, press, *parts)
    gradients = torch.autograd.grad(loss, group["params"], allow_unused=True)
    for parameter, gradient in zip(group["params"], gradients, strict=True):
        parameter.grad = gradient  # None: of the queries of the last layer, say
    optimizer.step()


def distillation_loss(model: Any, press: Press, context: Tensor, following: Tensor) -> Tensor:
    """How far predictions over what `press` leaves of a context diverge from those over all of it.

    Args:
        context, following: token ids, `(1, S)` and `(1, m)`.

    Returns:
        The Kullback-Leibler divergence in nats, mean over the tokens of `following`.
    """
    with torch.no_grad():
        cache = model(context, use_cache=True).past_key_values
        teacher = model(following, past_key_values=cache).logits[0].log_softmax(dim=-1)
    with press(model):
        with torch.no_grad():
            cache = model(context, use_cache=True).past_key_values
        student = model(following, past_key_values=cache).logits[0].log_softmax(dim=-1)
    return torch.nn.functional.kl_div(student, teacher, log_target=True, reduction="batchmean")
