"""Lets the tests import the modules beside them, wherever pytest is started, and gives them the levels."""

import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))

from isa_levels import LEVELS, supported_levels


@pytest.fixture(params=LEVELS)
def level(request):
    """Each instruction set, also where a test must be skipped because the processor lacks it."""
    if request.param not in supported_levels():
        pytest.skip(f"this processor has no {request.param}")
    return request.param
