"""What kind of evidence a finding rests on, and what that kind does not show."""

from __future__ import annotations

from enum import Enum


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
        return _THREATS[self]


_THREATS = {
    Evidence.BITS: (
        "Outputs are equal bit for bit in every combination that was tried, on this processor and "
        "these versions. Other kernels may round differently, for hooks and patches alike."
    ),
    Evidence.STATE: (
        "Modules, classes, registries and globals are compared before, while and after a scope is "
        "open. State in native code, or out of reach of the model, is not seen."
    ),
    Evidence.REFERENCE: (
        "Logits agree within rounding with a reference that shares no code with the presses, on "
        "tiny models with random weights. Trained weights may be more sensitive to rounding."
    ),
    Evidence.TIME: (
        "Ratios of times taken in turn on one machine, with bootstrap intervals over rounds. They "
        "hold for small models on this machine; kernels, and so ratios, differ elsewhere."
    ),
    Evidence.BYTES: (
        "Bytes are counted, so they do not vary by machine. What share of a process they are "
        "depends on the model."
    ),
    Evidence.MODEL: (
        "Answers or losses of one small model. The models of this repository have about a million "
        "parameters and are trained for their tasks: whether mechanisms agree carries over to "
        "large models; how presses rank may not. With contexts drawn from "
        "other seeds, what head-wise budgets cost stayed within the interval of the committed "
        "study, shares of error moved by two points, and one in five shares of right answers of a "
        "press and ratio left its interval."
    ),
    Evidence.EVENTS: "An example, not a measurement: one forward of one model.",
}
