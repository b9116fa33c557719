"""Owns what the tests of the check scripts share: importing the scripts, and planting small trees."""

import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[4]
sys.path.insert(0, str(ROOT / "scripts"))


@pytest.fixture
def plant(tmp_path: Path) -> Callable[[str, str], Path]:
    """Writes one file below a fresh root (`plant.root`), with its folders and their `__init__.py`."""

    def write(name: str, text: str) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if name.startswith("python/sglang/"):
            for folder in path.relative_to(tmp_path / "python").parents:
                init = tmp_path / "python" / folder / "__init__.py"
                if folder.parts and not init.exists():
                    init.write_text("", encoding="utf-8")
        path.write_text(textwrap.dedent(text), encoding="utf-8")
        return path

    write.root = tmp_path
    return write
