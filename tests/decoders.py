"""Tiny random decoders of every type that transformers has."""

from dataclasses import replace

import pytest

from experiments.questions.architectures.decoders import build, decoders


def tiny_decoder(name, **changed):
    """One of a type, built with other fields where they are told."""
    if name not in decoders():
        pytest.skip(f"the installed transformers has no {name}")
    return build(replace(decoders()[name], **changed))
