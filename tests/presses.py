"""Presses that tests have listed in `presses.yaml`, and tables of single tests."""

from functools import partial

import pytest

from tests.support import nested, table_beside

_LISTED = table_beside(__file__, "presses")


def read_press(text, package, **given):
    """The press of a package that a text says, given what else it names."""
    return eval(text, {**package.PRESSES, "nested": nested, **given})


def listed(section):
    """What makes each press of a section, by its name, from a package, given what else it names."""
    return {name: partial(read_press, text) for name, text in _LISTED[section].items()}


def presses_of(section):
    """A test of each press of a section, by its name: `make_press` is what `listed` has."""
    makers = listed(section)
    return pytest.mark.parametrize("make_press", makers.values(), ids=makers)


TABLES = table_beside(__file__, "tables")
PIPELINE_PRESSES = listed("pipeline")
