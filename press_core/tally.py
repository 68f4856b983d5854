"""Counts of what a press did in a run."""

from dataclasses import dataclass, field


@dataclass
class Tally:
    """What a scope counts while it is open.

    Attributes:
        n_sites: number of attention modules.
        layers: per layer, how many tokens it had seen when it was last pruned, and how many of them
            each KV head kept, on average.
        compressions: per layer, how often it was pruned.
        n_forwards: forwards of the decoder while the scope was open.
        n_before: those of them before the ratio was set for the last time.
        n_contexts: those of them that were (a chunk of) a prefill.
        longest_whole: length of the longest layer that was filled before the scope opened, and not
            pruned.
        missed: depths of attention modules whose forward bypassed the scope, unlike other ones.
        ran_outside: whether some filled a cache outside of the forwards of the decoder.
    """

    n_sites: int = 0
    layers: dict[int, tuple[float, float]] = field(default_factory=dict)
    compressions: dict[int, int] = field(default_factory=dict)
    n_forwards: int = 0
    n_before: int = 0
    n_contexts: int = 0
    longest_whole: int = 0
    missed: set[int] = field(default_factory=set)
    ran_outside: bool = False

    def record(self, layer_idx: int, seen: float, kept: float) -> None:
        """Note that a layer was pruned: of `seen` tokens each KV head keeps `kept` on average."""
        self.layers[layer_idx] = seen, kept
        self.compressions[layer_idx] = self.compressions.get(layer_idx, 0) + 1

    @property
    def compression_ratio(self) -> float:
        """Share of the tokens that was evicted, over all layers."""
        longest = max((seen for seen, _ in self.layers.values()), default=0)
        whole = (self.n_sites - len(self.layers)) * longest  # of layers that were never pruned
        seen = sum(seen for seen, _ in self.layers.values()) + whole
        evicted = sum(seen - kept for seen, kept in self.layers.values())
        return evicted / seen if seen else 0.0
