"""Owns at which instruction sets the kernel tests run: the processor's own, and emulated those that it lacks.

Called by `make kernel-tests` and `make kernel-tests-qemu`. What the processor lacks is built once more as
plain C over the headers of SIMDe, into the environment's folder, and the same tests run on it; where SIMDe
lacks an instruction, the tests of that level are skipped and name it. It must not touch the installed
package.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TESTS = ROOT / "sgl-kernel/tests"
PACKAGE = ROOT / "sgl-kernel/python/sgl_kernel"
PYTEST = (sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider")
_FAILED = re.compile(r"^FAILED: .*kernels_(\w+)\.dir/")
_NO_INSTRUCTION = re.compile(
    r"error: (?:there are no arguments to )?\W(_mm\w+)\W (?:was not declared|that depend)"
)
#: It is there, as a macro: commas of a template cut what it was given into too many arguments.
_MISUSED = re.compile(r'error: macro "(_mm\w+)" passed')


def _isa_levels():
    """The tests' own word on levels, which lies outside of any package."""
    spec = importlib.util.spec_from_file_location("isa_levels", TESTS / "isa_levels.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def tool(name: str) -> str:
    """The program of the environment, or else of the system; exits with a sentence where there is none."""
    found = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    if found is None:
        sys.exit(f"{name} was not found, which builds the kernels: pip install -r requirements/build.txt")
    return found


def lacking_instructions(log: str) -> dict[str, list[str]]:
    """Of a failed build, for each level that failed the intrinsics that its compiler did not know."""
    found: dict[str, set[str]] = {}
    held = set(_MISUSED.findall(log))
    level = ""
    for line in log.splitlines():
        if failed := _FAILED.match(line):
            level = failed[1]
            found.setdefault(level, set())
        elif level and (unknown := _NO_INSTRUCTION.search(line)) and unknown[1] not in held:
            found[level].add(unknown[1])
    return {level: sorted(names) for level, names in found.items()}


@dataclass
class Emulation:
    """A package `sgl_kernel` that has some levels as plain C, in `folder`; what is built is built once."""

    folder: Path

    def build(self, levels: list[str]) -> dict[str, list[str]]:
        """Builds the package, and returns for each level that had to be left out what SIMDe lacks for it."""
        lacking: dict[str, list[str]] = {}
        if (log := self._compile(levels)) is not None:
            lacking = {level: names for level, names in lacking_instructions(log).items() if names}
            levels = [level for level in levels if level not in lacking]
            if not lacking or (levels and self._compile(levels) is not None):
                sys.exit(f"{log}\nThe emulated kernels could not be built.")
        package = self.folder / "sgl_kernel"
        package.mkdir(exist_ok=True)
        for file in (*PACKAGE.glob("*.py"), *(self.folder / "build").glob("_C*.so")):
            shutil.copy2(file, package)
        says = {"emulated": levels, "lacking": lacking}
        (self.folder / "levels.json").write_text(json.dumps(says), encoding="utf-8")
        return lacking

    def _compile(self, levels: list[str]) -> str | None:
        """The compiler's words where it fails."""
        import simde_py

        build, ninja = self.folder / "build", tool("ninja")
        build.mkdir(parents=True, exist_ok=True)
        configure = [
            tool("cmake"),
            "-G",
            "Ninja",
            f"-DCMAKE_MAKE_PROGRAM={ninja}",
            "-S",
            str(ROOT / "sgl-kernel"),
        ]
        values = {
            "Python_EXECUTABLE": sys.executable,
            "SGL_EMULATED": ";".join(levels),
            "SGL_SIMDE": simde_py.get_include(),
        }
        configure += ["-B", str(build), *(f"-D{name}={value}" for name, value in values.items())]
        for command in (configure, [ninja, "-C", str(build), "-k", "0"]):
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode != 0:
                return done.stdout + done.stderr
        return None


def emulated(levels: list[str], folder: Path) -> dict[str, str]:
    """The environment of tests that find these levels emulated."""
    start = time.monotonic()
    lacking = Emulation(folder).build(levels)
    built = [level for level in levels if level not in lacking]
    line = f"{' and '.join(built) or 'nothing'} emulated with SIMDe (build: {time.monotonic() - start:.0f} s)"
    for level, names in lacking.items():
        line += f"; {level} is left out, SIMDe lacks {', '.join(names)}"
    print(f"Kernel tests: {line}", flush=True)
    return {"SGL_KERNEL_EMULATED": str(folder)}


def under_qemu(path: str | None) -> dict[str, str]:
    """The environment of tests that run each level on a processor of qemu-user that has no better one."""
    found = path or shutil.which("qemu-x86_64") or shutil.which("qemu-x86_64-static")
    if found is None:
        sys.exit("qemu-x86_64 was not found: install qemu-user, or name the program with --qemu-path")
    return {"SGL_KERNEL_QEMU": found}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    words = _isa_levels()
    parser.add_argument(
        "--emulate", nargs="+", choices=words.LEVELS, help="levels; default: what the processor lacks"
    )
    parser.add_argument("--folder", type=Path, default=Path(sys.prefix) / "kernel-emulated")
    parser.add_argument(
        "--qemu", action="store_true", help="base and avx2 under qemu-user instead, and no other tests"
    )
    parser.add_argument("--qemu-path", help="where qemu-x86_64 lies; default: on the PATH")
    options, for_pytest = parser.parse_known_args()
    has = words.supported_levels()
    chosen = options.emulate or [level for level in words.LEVELS if level not in has]
    added: dict[str, str] = {}
    if options.qemu:
        added = under_qemu(options.qemu_path)
        for_pytest = ["-k", " or ".join(words.QEMU_PROCESSORS), *for_pytest]
    elif chosen:
        added = emulated(chosen, options.folder.resolve())
    else:
        print(
            f"Kernel tests: this processor has every level ({', '.join(has)}), so none is emulated",
            flush=True,
        )
    places = (
        []
        if any(not word.startswith("-") and Path(word.split("::")[0]).exists() for word in for_pytest)
        else [str(TESTS)]
    )
    return subprocess.run(
        [*PYTEST, *places, *for_pytest], env={**os.environ, **added}, check=False
    ).returncode


if __name__ == "__main__":
    sys.exit(main())
