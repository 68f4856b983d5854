"""Where this repository keeps something else than kvpress on purpose."""

from tests.support import table_beside

NOT_IN_KVPRESS = {
    "DropKVPress": "proposed to it",
    "H2OPress": "heavy hitters while decoding",
    "RKVPress": "for reasoning models while decoding",
    "EveryTurnPress": "every turn of a conversation pruned again",
    "StreamingLLMDecodingPress": "a bounded cache for endless generation",
}
"""Presses without an oracle."""

DIFFERENCES = [
    difference for name in ("kept", "works") for difference in table_beside(__file__, name)
]
"""Deliberate differences, see `kept.yaml`."""
