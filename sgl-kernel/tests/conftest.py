"""Lets the tests import the modules beside them, wherever pytest is started, and gives them the levels."""

import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))

from isa_levels import LEVELS, why_untested


@pytest.fixture(params=LEVELS)
def level(request):
    """Each instruction set, also where a test must be skipped because it cannot run here."""
    if why := why_untested(request.param):
        pytest.skip(why)
    return request.param
