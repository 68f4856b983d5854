"""Reading pruned layers: the masks and positions that a forward over them needs."""

from typing import Any

import torch
from torch import Tensor

from press_core.cache import caches, masks
from press_core.cache.pruned import PrunedLayer
from press_core.cache.slots import MASKED, Masked, filled_columns, has_own_positions
from press_core.cache.tokens import ReadingNeeds
from press_core.errors import UnsupportedInputError
from press_core.forward import Arguments, Forward
from press_core.model.rotary import alike
from press_core.model.sites import AttentionSite

BUILT_FOR_SLOTS, HIDDEN_CONTEXT = "built for slots", "hidden context"

# ---- once per forward ----------------------------------------------------------------------------


def needs_help(forward: Forward, layers: list[PrunedLayer]) -> bool:
    """Whether this forward has to read one of the pruned `layers` with its own mask or positions.

    Also where the caller passes an attention mask or positions that do not fit the stored slots.
    """
    mask = forward.given.get("attention_mask")
    needs = [layer.needs for layer in layers if layer.needs is not ReadingNeeds.NOTHING]
    if any([need is not ReadingNeeds.MASK_OF_MANY for need in needs]):
        return True
    # Up to transformers 5.2 a compiled model also makes a mask for a single token.
    single = forward.n_tokens == 1 and not torch.compiler.is_compiling()
    if needs and (not single or _masks_one(forward)):
        return True
    # The model would count padding after rerotated keys; position_ids of a caller count all tokens.
    rerotated = any([layer.is_rerotated for layer in layers])
    if rerotated and forward.given.get("position_ids") is not None:
        return True
    if (needs or rerotated) and masks.hides(mask):
        return True
    if not layers or mask is None:
        return False
    if hidden_context(forward) is not None:
        return True
    is_2d, mask = isinstance(mask, Tensor) and mask.dim() == 2, masks.for_full_attention(mask)
    if is_2d or mask is None:
        return False
    n, first = forward.n_tokens, layers[0]
    return mask.shape[-1] != first.columns(n) or is_of_tokens(forward, first)


def _masks_one(forward: Forward) -> bool:
    """Whether the model's attention, which may have been set since, takes a mask for one token."""
    config = getattr(forward.decoder, "config", None)
    implementation = getattr(config, "_attn_implementation", None) or "sdpa"
    return masks.masks_one(implementation)


def is_built_for_slots(forward: Forward) -> bool:
    """Whether the 4-d mask that the decoder was given has a column for each slot of the cache.

    `generate` asks the cache for its sizes to build one. A caller's own has one for each token, and
    may be as wide. To be asked before the layers run.
    """

    def is_built() -> bool:
        pruned, first = caches.pruned_layers(forward.cache), caches.mask_layer(forward.cache)
        return any([layer is first and layer.has_sized_mask for layer in pruned])

    return forward.noted(BUILT_FOR_SLOTS, is_built)


def is_of_tokens(forward: Forward, layer: PrunedLayer) -> bool:
    """Whether the decoder was given a 4-d mask with a column for each token that `layer` has seen.

    Those of this forward included; see `PrunedLayer.has_column_for_each_token`.
    """
    mask = masks.for_full_attention(forward.given.get("attention_mask"))
    if not isinstance(mask, Tensor) or mask.dim() != 4 or is_built_for_slots(forward):
        return False
    return layer.has_column_for_each_token(mask, forward.n_tokens)


def with_counted_columns(forward: Forward, layers: list[PrunedLayer]) -> Arguments:
    """The decoder's arguments, the 2-d mask cut to the model's token count after rerotation.

    After rerotation the model counts fewer tokens than a mask over all tokens has columns, and
    would take its first columns. The last columns are right: they end with the tokens appended
    after pruning. The columns before those are all visible, or the layer gets its own mask.

    Raises:
        UnsupportedInputError: if the mask hides tokens of a pruned context without padding.
    """
    given, mask = forward.given, forward.given.get("attention_mask")
    rerotated = [layer for layer in layers if layer.kept.shift]
    if rerotated and forward.n_tokens > 1 and given.get("cache_position") is not None:
        given = given.replace(cache_position=None)  # transformers 5.2 builds its mask with it
    if not rerotated or not isinstance(mask, Tensor) or mask.dim() != 2:
        return given
    layer, is_compiling = rerotated[0], torch.compiler.is_compiling()
    if not is_compiling:
        mask = mask[:, : layer.n_seen + forward.n_tokens]  # without tokens that are to come
    n_before: Any = layer.kept.n_seen + layer.n_counted
    most = mask.shape[1] - forward.n_tokens
    n_before = n_before.clamp(max=most) if isinstance(n_before, Tensor) else min(n_before, most)
    n_removed, n_context = n_before - forward.cache.get_seq_length(), n_before - layer.n_counted
    if is_compiling and not layer.kept.is_padded:
        masks.assert_whole(mask, n_context * (n_removed > 0))
    if is_compiling and layer.room is not None:  # both are values of tensors
        return given.replace(attention_mask=masks.without_first(mask, n_removed))
    n_removed = int(n_removed)
    if n_removed <= 0:
        return given
    if not (is_compiling or layer.kept.is_padded or bool(mask[:, :n_context].all())):
        raise UnsupportedInputError(
            f"the attention_mask hides some of the {layer.kept.n_seen} tokens before the pruning, "
            "which had no padding, and it is not known which keys they became; let it hide padding "
            "among the tokens after the pruning only"
        )
    return given.replace(attention_mask=mask[:, n_removed:])


def hidden_context(forward: Forward) -> Tensor | None:
    """Which tokens seen before pruning are visible by the mask that the decoder was given.

    Returns:
        `(1 or B, 1 or H, 1 or q, n_seen)` bool; None: all except padding.
    """
    # Found before any layer gets tokens, by which it counts.
    return forward.noted(HIDDEN_CONTEXT, lambda: _hidden_context(forward))


def _hidden_context(forward: Forward) -> Tensor | None:
    mask = masks.for_full_attention(forward.given.get("attention_mask"))
    layers = caches.pruned_layers(forward.cache)
    if not layers or not isinstance(mask, Tensor):
        return None
    if not is_built_for_slots(forward):
        masks.refuse_bias(mask)
    first, latest = layers[0], max([layer.kept.n_seen for layer in layers])
    kept = next(layer.kept for layer in layers if layer.kept.n_seen == latest)
    if mask.dim() == 2:  # with a shift, it is cut to the tokens that the model counts
        n_later = mask.shape[-1] - first.n_seen - forward.n_tokens  # columns for tokens to come
        of_tokens = n_later >= 0 and not first.kept.shift
    else:
        of_tokens = is_of_tokens(forward, first)
    if not of_tokens:
        return None
    if not torch.compiler.is_compiling() and mask.dim() == 2 and bool(mask.all()):
        return None
    seen = masks.is_visible(mask[..., : kept.n_seen])
    seen = seen[:, None, None] if mask.dim() == 2 else seen
    if torch.compiler.is_compiling():  # values are not known here
        return seen
    hides = ~seen if kept.real is None else ~seen & kept.real.to(seen.device)[:, None, None]
    return seen if bool(hides.any()) else None


def filled_mask(forward: Forward, first: PrunedLayer) -> Any:
    """The decoder's mask for full attention, whose last column is that of the last token.

    The decoder may have been given more columns, for empty slots of `first` or for later tokens.
    """
    mask, n = masks.for_full_attention(forward.given.get("attention_mask")), forward.n_tokens
    if isinstance(mask, Tensor) and (mask.dim() == 2 or is_of_tokens(forward, first)):
        return mask[..., : first.n_seen + n]
    return filled_columns(mask, first, n)


def with_newest_columns(forward: Forward, n_filled: int) -> Arguments:
    """The decoder's arguments, with the columns of a mask built for slots that layers still need.

    For a cache that was pruned since it was built: those of the tokens that a layer has appended
    after its pruning, and of new ones.

    Args:
        n_filled: number of slots that were filled then.
    """
    forward.notes[BUILT_FOR_SLOTS] = False
    given = forward.given.get("attention_mask")
    mask = masks.for_full_attention(given)
    if isinstance(mask, Tensor) and mask.dim() == 2:
        return forward.given
    n = max([layer.n_recent for layer in caches.pruned_layers(forward.cache)], default=0)
    wanted = n + forward.n_tokens
    # A buffer that was full has no column for a token, which sees itself as it does the one before.
    is_full = wanted == 1 and mask is not None and mask.shape[-1] == n_filled
    mask = masks.part_of(mask, n_filled - n - is_full, wanted)
    mask = {**given, "full_attention": mask} if isinstance(given, dict) else mask
    return forward.given.replace(attention_mask=mask)


# ---- layer by layer ------------------------------------------------------------------------------


def helped(
    forward: Forward, site: AttentionSite, given: Arguments, layer: Any, attends: bool = False
) -> Arguments:
    """The arguments of an attention module, with a mask and positions that fit its layer.

    Args:
        layer: the cache layer that the module reads.
        attends: whether an attention function of this library reads the layer.
    """
    if not isinstance(layer, PrunedLayer) or not layer.is_pruned:
        return given
    if layer.needs & ReadingNeeds.ATTENTION and not attends:
        return given
    if forward.reading is layer:  # another scope has prepared this call
        return given
    forward.reading = layer
    masked: Masked | None = forward.notes.get(MASKED)
    if layer.is_rerotated or has_own_positions(layer, masked.shift if masked else 0, site):
        given = _with_positions(forward, site, given, layer)
    mask, columns = given.get("attention_mask"), layer.columns(forward.n_tokens)
    fitting = forward.once(
        lambda: _mask(forward, site, mask, layer),
        *("mask", mask, columns, layer.n_old, layer.kept.n_seen, layer.kept.rows or ()),
        *(attends, hidden_context(forward) is not None and layer),
    )
    return given if fitting is mask else given.replace(attention_mask=fitting)


def _mask(forward: Forward, site: AttentionSite, mask: Any, layer: PrunedLayer) -> Any:
    """The mask for a layer, in the form that its attention takes.

    The model builds one mask for all layers from the sizes of the first one, which does not fit
    rows or layers of different lengths. Its last columns are the tokens appended after pruning.

    Returns:
        For an attention function of this library, `(1 or B, 1 or H, q, n)` bool over all tokens;
        over the tokens appended after pruning if the whole pruned part is visible; None if those
        are all visible, too.
    """
    q, columns = forward.n_tokens, layer.columns(forward.n_tokens)
    old = layer.old_seen(hidden_context(forward))
    own = layer.needs & ReadingNeeds.ATTENTION
    fits = mask is None or mask.shape[-1] == columns
    # `generate` of transformers 5.2 counts other tokens than a cache of rerotated keys, and would
    # let them see slots of a buffer that are still empty.
    masked: Masked | None = forward.notes.get(MASKED)
    when = layer.n_old, layer.kept.n_seen
    shifted = layer.is_rerotated or (masked is not None and masked[:2] != when)
    fits = fits and (layer.room is None or not shifted)
    sees_all = mask is None and q == 1 and layer.room is None
    if fits and (sees_all or not own) and old is None and not is_of_tokens(forward, layer):
        return mask
    recent = _recent(forward, mask, layer, columns - layer.n_old)
    if own and old is None:
        known = q == 1 and not torch.compiler.is_compiling()
        return None if known and bool(recent.all()) else recent
    old = recent.new_ones(1, 1, 1, layer.n_old) if old is None else old.to(recent.device)
    batch, heads = max(len(old), len(recent)), max(old.shape[1], recent.shape[1])
    # `heads` is 1, H or H_kv.
    old, recent = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (old, recent))
    seen = torch.cat([part.expand(batch, heads, q, -1) for part in (old, recent)], dim=-1)
    implementation, dtype = site.attn_implementation, layer.keys.dtype
    return seen if own else masks.in_form(seen, implementation, dtype, site.num_heads)


def _recent(forward: Forward, mask: Any, layer: PrunedLayer, n: int) -> Tensor:
    """Visibility of the `n` columns after the pruned part, `(1 or B, 1 or H, q, n)` bool."""
    q, device = forward.n_tokens, layer.device
    if layer.room is None:
        return masks.columns_seen(mask, q, n, device).to(device)
    slots, queries = torch.arange(n, device=device), torch.arange(q, device=device)
    filled = slots <= layer.n_counted + queries[:, None]  # up to the query's own slot
    if mask is None:
        return filled[None, None]
    return masks.columns_from(mask, q, _n_before(forward, mask, layer), n) & filled


def _n_before(forward: Forward, mask: Any, layer: PrunedLayer) -> Any:
    """Columns of a mask before those of the tokens appended to a buffer, a number or a tensor.

    A mask built by the model has columns for the slots of one layer. Any other mask has columns for
    all tokens, possibly up to the end of a buffer, or only for the last ones.
    """
    masked: Masked | None = forward.notes.get(MASKED)
    if masked is None or mask.shape[-1] != masked.columns or is_of_tokens(forward, layer):
        return min(layer.kept.n_seen, mask.shape[-1] - layer.n_recent - forward.n_tokens)
    n_counted = torch.as_tensor(masked.n_counted, device=layer.device)
    return masked.n_old + n_counted - layer.n_counted


def _with_positions(
    forward: Forward, site: AttentionSite, given: Arguments, layer: PrunedLayer
) -> Arguments:
    """The arguments with positions that continue after the keys of `layer`."""
    mask = given.get("attention_mask")
    positions = forward.once(
        lambda: _positions(forward, mask, layer),
        *("positions", mask, layer.kept.n_seen, layer.kept.following or ()),
    )
    rotary, n = site.rotation, forward.n_tokens
    if rotary.in_3d and n > 1 and given.get("position_embeddings") is not None:
        real = _real(forward, mask, layer, layer.n_recent + n)
        _require_text(site, given, real[:, -n:], layer.n_seen + n)
    embeddings = forward.once(
        lambda: rotary.embeddings(given.get("hidden_states"), positions),
        *("embeddings", positions, rotary.embedding, rotary.layer_type or ""),
    )
    given, ids = given.replace(position_embeddings=embeddings), given.get("position_ids")
    if ids is None:
        return given
    in_all = positions if ids.dim() == 2 else positions.expand(len(ids), *positions.shape)
    return given.replace(position_ids=in_all)


def _positions(forward: Forward, mask: Any, layer: PrunedLayer) -> Tensor:
    """Positions of the forward's tokens, `(B, q)` int64."""
    q = forward.n_tokens
    # Of a buffer also the slots of tokens that it refuses later, because it is full.
    n = (layer.n_recent if layer.room is None else layer.room) + q
    real = _real(forward, mask, layer, n)
    slots = layer.n_counted + torch.arange(q, device=layer.device)
    return layer.following_positions(n, real).index_select(1, slots)


def _real(forward: Forward, mask: Any, layer: PrunedLayer, n: int) -> Tensor:
    """Which of the `n` columns after the pruned part are not padding, `(1 or B, n)` bool."""
    return masks.one_for_all_heads(_recent(forward, mask, layer, n)[:, :, -1:])[:, 0, 0]


def _require_text(site: AttentionSite, given: Arguments, real: Tensor, n_seen: int) -> None:
    """Raise if new tokens have 3-d positions that are not text, after rerotated keys.

    Args:
        real: which of the new tokens are not padding, `(1 or B, n)` bool.
        n_seen: tokens seen, the new ones included.

    Raises:
        UnsupportedInputError: if there are such tokens (an image).
    """
    rotary, (cos, sin) = site.rotation, given.get("position_embeddings")
    real = real.to(cos.device)
    last = rotary.find(cos[:, -1:], sin[:, -1:], n_seen)
    n_after = real.flip(-1).long().cumsum(dim=-1).flip(-1) - 1
    made = rotary.embeddings(cos, (last[:, None] - n_after).clamp(min=0))
    is_text = alike(made[0], cos) & alike(made[1], sin) & (last[:, None] >= 0)
    if not bool((is_text | ~real).all()):
        raise UnsupportedInputError(
            f"an image came to {site.name} behind keys that were rotated to other positions, where "
            "images have none; put it into the context, or use a press that does not rotate keys"
        )
