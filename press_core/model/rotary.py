"""Rotary position embeddings of any family, through the model's own function.

Families differ in how they pair channels (halves or neighbours), in which channels they rotate and
in the precision they do it in. Calling the function of the model's own modeling module gives the
model's own bits; the inverse and the average of rotations follow from its being linear in the
cosines and sines.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from press_core.errors import UnsupportedModelError
from press_core.select import upcast
from press_core.tiles import rows_at_once


@dataclass(frozen=True)
class Rotary:
    """The rotation that one attention module applies to its queries and keys.

    Attributes:
        function: `apply_rotary_pos_emb(q, k, cos, sin)` of the modeling module.
        n_channels: how many leading channels the attention module hands to `function`.
        embedding: the model's rotary embedding module, called for positions of one's own.
        layer_type: what `embedding` wants to know of the layer, where it serves several kinds.
        in_3d: whether `embedding` wants a position in each of three dimensions (images, videos).
        first_position: where the model counts its positions from.
    """

    function: Callable[..., tuple[Tensor, Tensor]]
    n_channels: int
    embedding: nn.Module | None = None
    layer_type: str | None = None
    in_3d: bool = False
    first_position: int = 0

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate `x` `(B, H, q, d)` by `cos`, `sin` `(1 or B, q, rotary channels)`.

        The result has the bits that the model itself computes for these states.
        """
        return _in_parts(self._rotated, x, cos, sin)

    def _rotated(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        if not self.n_channels:
            return x
        rotated, untouched = x[..., : self.n_channels], x[..., self.n_channels :]
        rotated = self.function(rotated, rotated[:, :0], cos, sin)[0]
        return torch.cat((rotated, untouched), dim=-1) if untouched.shape[-1] else rotated

    def unrotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Undo `rotate`, in float32 or better; scaled embeddings (YaRN) are undone exactly too."""
        cos, sin = upcast(cos), upcast(sin)
        norm = cos.square() + sin.square()
        return _in_parts(
            lambda part, cos, sin: self._rotated(upcast(part), cos, sin), x, cos / norm, -sin / norm
        )

    def rotate_to(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotate `x` `(B, H, n, d)` from before RoPE to `positions`, in float32 or better.

        Args:
            positions: `(1 or B, 1 or H, n)` int64: heads may differ in theirs.
        """
        return self._each_head(self.rotate, x, positions)

    def rotate_from(self, x: Tensor, positions: Tensor) -> Tensor:
        """Undo `rotate_to`."""
        return self._each_head(self.unrotate, x, positions)

    def unrotate_heads(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Undo `rotate` of `x` `(B, H, n, d)` by `cos`, `sin` `(1 or B, 1 or H, n, channels)`."""
        if cos.shape[1] == 1:
            return self.unrotate(x, cos[:, 0], sin[:, 0])
        cos, sin = (c.expand(*x.shape[:3], -1).flatten(0, 1) for c in (cos, sin))
        return self.unrotate(x.flatten(0, 1).unsqueeze(1), cos, sin).view(x.shape)

    def find(self, cos: Tensor, sin: Tensor, limit: int) -> Tensor:
        """The position that has these cosines and sines, in all dimensions, `(B,)` int64.

        Args:
            cos, sin: `(B, 1, rotary channels)`.
            limit: look among `0 ... limit - 1`.

        Returns:
            -1 where there is none, as of most tokens of an image.
        """
        known_cos, known_sin = self.embeddings(cos, torch.arange(limit, device=cos.device)[None])
        same = alike(known_cos, cos) & alike(known_sin, sin)
        return torch.where(same.any(dim=-1), same.long().argmax(dim=-1), -1)

    def _each_head(self, function: Callable[..., Tensor], x: Tensor, positions: Tensor) -> Tensor:
        x = upcast(x)
        cos, sin = self.embeddings(x, positions.expand(x.shape[:3]).flatten(0, 1))
        return function(x.flatten(0, 1).unsqueeze(1), cos, sin).view(x.shape)

    def average(self, like: Tensor, start: Tensor, n_positions: int) -> Tensor:
        """Mean rotation over the positions `start ... start + n_positions - 1`.

        Args:
            like: any state `(..., d)`: gives device, dtype and head_dim.
            start: `(1 or B, 1)` int64.

        Returns:
            Matrices `R`, `(1 or B, 1, d, d)`, in the dtype of `like`; a state `x` is rotated by
            `x @ R.mT`.
        """
        positions = start + torch.arange(n_positions, device=like.device)
        cos, sin = self.embeddings(like, positions)
        cos, sin = cos.mean(dim=1, keepdim=True), sin.mean(dim=1, keepdim=True)
        d = like.shape[-1]
        identity = torch.eye(d, device=like.device, dtype=like.dtype).expand(len(start), 1, d, d)
        return self._rotated(identity, cos, sin).mT

    def embeddings(self, like: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines at `positions` `(1 or B, n)`, in the dtype of `like`.

        A twin of the model's module computes them: some rotary modules adapt their frequencies to
        the largest position they were asked for, and a press must not leave a trace.

        Raises:
            UnsupportedModelError: if it is not known which that is.
        """
        if self.embedding is None:
            raise UnsupportedModelError(
                "keys are to be rotated to other positions, and no rotary module of the model is "
                "known to make the cosines and sines for them"
            )
        extra = {"layer_type": self.layer_type} if self.layer_type is not None else {}
        if self.in_3d:  # of text, the same in all of them
            positions = positions.expand(3, *positions.shape)
        cos, sin = _twin(self.embedding)(like, positions, **extra)
        return cos, sin

    def of_this_layer(self) -> nn.Module:
        """A copy of `embedding`, to be called without a layer type, and with its attributes."""
        assert self.embedding is not None
        own = copy.deepcopy(self.embedding)
        if self.layer_type is not None:  # it serves several, each by names of its own
            vars(own)["forward"] = partial(own.forward, layer_type=self.layer_type)
            prefix = f"{self.layer_type}_"
            for name, of_type in {**vars(own), **own._buffers}.items():
                if name.startswith(prefix):  # such as full_attention_inv_freq
                    setattr(own, name.removeprefix(prefix), of_type)
        return own


def _in_parts(turn: Callable[..., Tensor], x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`turn(x, cos, sin)` of `x` `(B, H, q, d)`, some tokens at a time."""
    step = rows_at_once(x, 4 * x[:, :, :1].numel())  # the model's function makes so many
    if x.shape[2] <= step:
        return turn(x, cos, sin)
    first = turn(x[:, :, :step], cos[:, :step], sin[:, :step])
    turned = first.new_empty(x.shape)
    turned[:, :, :step] = first
    for start in range(step, x.shape[2], step):
        rows = slice(start, start + step)
        turned[:, :, rows] = turn(x[:, :, rows], cos[:, rows], sin[:, rows])
    return turned


def alike(made: Tensor, given: Tensor) -> Tensor:
    """Whether cosines (or sines) `(..., channels)` are the same but for rounding, `(...)` bool."""
    return ((made - given).abs() <= 2 * torch.finfo(given.dtype).eps).all(dim=-1)


def _twin(module: nn.Module) -> nn.Module:
    """A module with the same tensors that can replace its own without the other's knowledge."""
    if next(module.children(), None) is not None:
        return copy.deepcopy(module)
    twin = copy.copy(module)  # deeply, its config would be copied too
    containers = {k: copy.copy(v) for k, v in vars(module).items() if isinstance(v, (dict, set))}
    vars(twin).update(containers)
    return twin


class NoRotation(Rotary):
    """Of a layer without positions, in a model whose other layers rotate: states stay as they are.

    What a press does at other positions is then the same as at any.
    """

    def __init__(self) -> None:
        super().__init__(lambda q, k, *_: (q, k), n_channels=0)

    def embeddings(self, like: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        nothing = like.new_empty(*positions.shape, 0)
        return nothing, nothing
