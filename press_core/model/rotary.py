"""Rotary position embeddings of any model family, through the model's own function.

Families differ in how they pair channels (halves or neighbours), which channels they rotate and in
which precision. Calling the function of the modeling module reproduces the model bit for bit. The
function is linear in the cosines and sines, which gives the inverse and the average of rotations.
"""

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
        function: rotates `(B, H, q, d)` by cosines and sines, as the modeling module does.
        n_channels: how many leading channels the attention module passes to `function`.
        embedding: the model's rotary embedding module, for cosines and sines at any positions.
        layer_type: the `layer_type` argument of `embedding`, where it serves several layer types.
        in_3d: whether `embedding` takes positions in three dimensions (images, videos).
        first_position: the model's position of the first token.
    """

    function: Callable[..., Tensor]
    n_channels: int
    embedding: nn.Module | None = None
    layer_type: str | None = None
    in_3d: bool = False
    first_position: int = 0

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate `x` `(B, H, q, d)` by `cos`, `sin` `(1 or B, q, rotary channels)`.

        The result is bit-identical to the model's. Where heads have positions of their own, cosines
        and sines are `(1 or B, 1 or H, q, rotary channels)`.
        """
        return _in_parts(self._rotated, x, cos, sin)

    def _rotated(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        if not self.n_channels:
            return x
        rotated, untouched = x[..., : self.n_channels], x[..., self.n_channels :]
        rotated = self.function(rotated, cos, sin)
        return torch.cat((rotated, untouched), dim=-1) if untouched.shape[-1] else rotated

    def unrotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Undo `rotate`, in float32 or better; also exact for scaled embeddings (YaRN)."""
        cos, sin = upcast(cos), upcast(sin)
        norm = cos.square() + sin.square()
        return _in_parts(
            lambda part, cos, sin: self._rotated(upcast(part), cos, sin), x, cos / norm, -sin / norm
        )

    def rotate_to(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotate `x` `(B, H, n, d)`, states before RoPE, to `positions`, in float32 or better.

        Args:
            positions: `(1 or B, 1 or H, n)` int64; heads may have different positions.
        """
        x = upcast(x)
        return self.rotate(x, *self._at(x, positions))

    def rotate_from(self, x: Tensor, positions: Tensor) -> Tensor:
        """Undo `rotate_to`."""
        x = upcast(x)
        return self.unrotate(x, *self._at(x, positions))

    def find(self, cos: Tensor, sin: Tensor, limit: int) -> Tensor:
        """The position with these cosines and sines, `(B,)` int64.

        Args:
            cos, sin: `(B, 1, rotary channels)`.
            limit: search the positions `0 ... limit - 1`.

        Returns:
            -1 where no position has them in all dimensions, as for most tokens of an image.
        """
        known_cos, known_sin = self.embeddings(cos, torch.arange(limit, device=cos.device)[None])
        same = alike(known_cos, cos) & alike(known_sin, sin)
        return torch.where(same.any(dim=-1), same.long().argmax(dim=-1), -1)

    def _at(self, like: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """`embeddings` at `positions` `(1 or B, 1 or H, n)`, in this shape."""
        cos, sin = self.embeddings(like, positions.flatten(0, 1))
        return cos.unflatten(0, positions.shape[:2]), sin.unflatten(0, positions.shape[:2])

    def average(self, like: Tensor, start: Tensor, n_positions: int) -> Tensor:
        """Mean rotation over the positions `start ... start + n_positions - 1`.

        Args:
            like: any state `(..., d)`, for its device, dtype and head_dim.
            start: `(1 or B, 1)` int64.

        Returns:
            Matrices `R`, `(1 or B, 1, d, d)`, in the dtype of `like`; `x @ R.mT` rotates a state
            `x`.
        """
        positions = start + torch.arange(n_positions, device=like.device)
        cos, sin = self.embeddings(like, positions)
        if not torch.equal(cos[:, :1], self.embeddings(like, positions[:, :1])[0]):
            # The largest position sets the frequencies: each would be alone in a forward.
            alone = [self.embeddings(like, position) for position in positions.split(1, dim=1)]
            cos, sin = (torch.cat(parts, dim=1) for parts in zip(*alone, strict=True))
        cos, sin = cos.mean(dim=1, keepdim=True), sin.mean(dim=1, keepdim=True)
        d = like.shape[-1]
        identity = torch.eye(d, device=like.device, dtype=like.dtype).expand(len(start), 1, d, d)
        return self._rotated(identity, cos, sin).mT

    def embeddings(self, like: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines at `positions` `(1 or B, n)`, in the dtype of `like`.

        A copy of the model's module computes them, because some rotary modules adapt their
        frequencies to the largest position so far, and a press must not change the model.

        Raises:
            UnsupportedModelError: if the model's rotary module is unknown.
        """
        if self.embedding is None:
            raise UnsupportedModelError(
                "keys are to be rotated to other positions, but the module of the model that "
                "computes cosines and sines is unknown"
            )
        extra = {"layer_type": self.layer_type} if self.layer_type is not None else {}
        if self.in_3d:  # text has the same position in all three dimensions
            positions = positions.expand(3, *positions.shape)
        cos, sin = _twin(self.embedding)(like, positions, **extra)
        return cos, sin

    def of_this_layer(self) -> nn.Module:
        """A copy of `embedding` for this layer's type: call it without `layer_type`.

        Attributes per layer type, such as `full_attention_inv_freq`, are also set without prefix.
        """
        assert self.embedding is not None
        own = copy.deepcopy(self.embedding)
        if self.layer_type is not None:  # attributes are prefixed with the layer type
            vars(own)["forward"] = partial(own.forward, layer_type=self.layer_type)
            prefix = f"{self.layer_type}_"
            for name, of_type in {**vars(own), **own._buffers}.items():
                if name.startswith(prefix):
                    setattr(own, name.removeprefix(prefix), of_type)
        return own


def _in_parts(rotate: Callable[..., Tensor], x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`rotate(x, cos, sin)` for `x` `(B, H, q, d)`, in chunks of tokens; see `press_core.tiles`."""
    if cos.dim() == 4 and cos.shape[1] > 1:  # every head is a row of a batch
        cos, sin = (c.expand(*x.shape[:3], -1).flatten(0, 1) for c in (cos, sin))
        return _in_parts(rotate, x.flatten(0, 1).unsqueeze(1), cos, sin).view(x.shape)
    cos, sin = (c.flatten(0, -3) for c in (cos, sin))  # one for all heads
    step = rows_at_once(x, 4 * x[:, :, :1].numel())  # the model's function makes 4 copies
    if x.shape[2] <= step:
        return rotate(x, cos, sin)
    first = rotate(x[:, :, :step], cos[:, :step], sin[:, :step])
    rotated = first.new_empty(x.shape)
    rotated[:, :, :step] = first
    for start in range(step, x.shape[2], step):
        rows = slice(start, start + step)
        rotated[:, :, rows] = rotate(x[:, :, rows], cos[:, rows], sin[:, rows])
    return rotated


def alike(made: Tensor, given: Tensor) -> Tensor:
    """Whether cosines (or sines) `(..., channels)` are equal within rounding, `(...)` bool."""
    return ((made - given).abs() <= 2 * torch.finfo(given.dtype).eps).all(dim=-1)


def _twin(module: nn.Module) -> nn.Module:
    """A copy with the same parameters, whose buffers can change without those of `module`."""
    if next(module.children(), None) is not None:
        return copy.deepcopy(module)
    twin = object.__new__(type(module))  # deepcopy would also copy its config
    own = vars(module).items()
    vars(twin).update({k: v.copy() if isinstance(v, (dict, set)) else v for k, v in own})
    if "_hf_hook" in vars(twin):  # accelerate's `forward` would run the other module
        vars(twin).pop("forward", None)
    buffers = twin._buffers.items()
    twin._buffers = {k: None if v is None else v.clone() for k, v in buffers}
    return twin


class NoRotation(Rotary):
    """The identity, for a layer without RoPE in a model whose other layers rotate (NoPE).

    States are the same at all positions.
    """

    def __init__(self) -> None:
        super().__init__(lambda x, *_: x, n_channels=0)

    def embeddings(self, like: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        nothing = like.new_empty(*positions.shape, 0)
        return nothing, nothing
