"""Lets the tests here import the modules beside them, whatever folder pytest is started in."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent))
