"""What a run of a press came to."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Tally:
    """What a scope counts while it is open.

    Attributes:
        n_sites: how many attention modules there are.
        layers: per layer, how many tokens it had seen when it was pruned last, and how many of them
            each KV head kept, on average.
        compressions: per layer, how often it was pruned.
        n_forwards: forwards of the decoder that the scope took part in.
        n_contexts: those that brought (part of) a context.
        longest_whole: length of the longest layer that was found filled, and not pruned.
        missed: depths of attention modules that were not told of a forward that others were.
        has_lost: whether somebody had put back what was installed on some of them.
    """

    n_sites: int = 0
    layers: dict[int, tuple[float, float]] = field(default_factory=dict)
    compressions: dict[int, int] = field(default_factory=dict)
    n_forwards: int = 0
    n_contexts: int = 0
    longest_whole: int = 0
    missed: set[int] = field(default_factory=set)
    has_lost: bool = False

    def record(self, layer_idx: int, seen: float, kept: float) -> None:
        """Note that a layer was pruned: of `seen` tokens each KV head keeps `kept` on average."""
        self.layers[layer_idx] = seen, kept
        self.compressions[layer_idx] = self.compressions.get(layer_idx, 0) + 1

    @property
    def compression_count(self) -> int:
        """How often a layer was pruned, the most of all layers."""
        return max(self.compressions.values(), default=0)

    @property
    def compression_ratio(self) -> float:
        """Share of the tokens that was evicted, over all layers."""
        seen = self.n_sites * max((seen for seen, _ in self.layers.values()), default=0)
        evicted = sum(seen - kept for seen, kept in self.layers.values())
        return evicted / seen if seen else 0.0
