"""Owns how the tests of the benchmarks find the scripts: as a script finds its neighbours."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[4] / "benchmark"))
