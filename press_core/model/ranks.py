"""The tensor-parallel ranks that share the heads of an attention module."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.nn.functional import all_gather


@dataclass(frozen=True, eq=False)
class HeadGroup:
    """The ranks that share the heads of an attention module: equal numbers, in rank order.

    Attributes:
        process_group: of torch.distributed; None: this process holds all heads.
        rank, size: rank of this process, and number of ranks.
    """

    process_group: Any = None
    rank: int = 0
    size: int = 1

    def gather(self, x: Tensor) -> Tensor:
        """`x` `(B, heads, ...)` with the heads of all ranks; gradients flow back."""
        if self.process_group is None:
            return x
        return torch.cat(all_gather(x.contiguous(), group=self.process_group), dim=1)

    def own(self, x: Tensor, n: int) -> Tensor:
        """A copy of this rank's `n` heads of `x`, which has the heads of all ranks."""
        if x.shape[1] == n:
            return x
        return x.chunk(self.size, dim=1)[self.rank].contiguous()

    def mean(self, value: float, device: torch.device) -> float:
        """The mean over the ranks, which exchange it on `device`, where their backend can."""
        if self.process_group is None:
            return value
        of_ranks = self.gather(torch.tensor([[value]], dtype=torch.float64, device=device))
        return float(of_ranks.mean())


def ranks_of(model: nn.Module) -> HeadGroup:
    """The tensor-parallel ranks of `model`, whether or not they share heads."""
    mesh: Any = getattr(model, "_device_mesh", None)
    if mesh is None:
        return HeadGroup()
    mesh = mesh["tp"] if "tp" in (mesh.mesh_dim_names or ()) else mesh
    return HeadGroup(mesh.get_group(), mesh.get_local_rank(), mesh.size())
