"""What kind of evidence a finding rests on, and what that kind does not show."""

from __future__ import annotations

from enum import Enum
from pathlib import Path

import yaml


class Evidence(str, Enum):
    """A kind of evidence; its value is what findings are labelled with."""

    BITS = "bit equality"
    STATE = "state compared"
    REFERENCE = "checked against a reference"
    TIME = "timing on one machine"
    BYTES = "bytes counted"
    MODEL = "one small model"
    EVENTS = "one forward observed"

    @property
    def threat(self) -> str:
        """What it shows and what it does not, in a sentence or two."""
        return str(_THREATS[self.value])


_THREATS = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
