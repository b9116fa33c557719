"""Owns one rule: the modules that the server process imports do without torch, so that it starts at once.

Run by `make lint` and its own test, in the environment where the package is installed: it imports each module
in a process in which torch cannot be imported, and prints the chain of imports that asked for it.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys

from source_tree import report

TORCH_FREE = (
    "sglang",
    "sglang.srt.environ",
    "sglang.srt.arg_groups",
    "sglang.srt.server_args",
    "sglang.srt.configs.model_config",
    "sglang.srt.configs.model_path",
    "sglang.srt.messages.io_struct",
    "sglang.srt.messages.generate_input",
    "sglang.srt.sampling.sampling_params",
    "sglang.srt.tokenizer.tokenizer",
    "sglang.srt.runtime_context",
    "sglang.srt.managers.tokenizer_manager",
    "sglang.srt.managers.detokenizer_manager",
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.entrypoints.engine",
    "sglang.srt.entrypoints.openai",
    "sglang.launch_server",
    "sglang.placement",
    "sglang.cli",
)

# Runs in the child. A finder before all others refuses torch and names the importers, innermost first.
_PROBE = """
import importlib, sys, traceback

class Refused(ImportError):
    pass

class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name != "torch":
            return None
        chain = [f"{f.filename.rpartition('site-packages/')[2]}:{f.lineno}" for f in traceback.extract_stack()
                 if "importlib" not in f.filename and f.filename != "<string>"]
        raise Refused("imports torch: " + " <- ".join(reversed(chain[-6:])))

sys.meta_path.insert(0, NoTorch())
try:
    importlib.import_module(sys.argv[1])
except Refused as error:
    sys.exit(str(error))
except ImportError as error:
    sys.exit(f"does not import: {error}")
if "torch" in sys.modules:
    sys.exit("imports torch in a way that the finder did not see")
"""


def find_offenders(modules: tuple[str, ...] = TORCH_FREE) -> list[str]:
    """Each module gets a fresh interpreter, so that no import of one hides an import of the next."""
    offenders = []
    for module in modules:
        command = [sys.executable, "-P", "-c", _PROBE, module]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        if done.returncode:
            said = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
            offenders.append(f"{module} {said[-1]}")
    return offenders


def main() -> int:
    if importlib.util.find_spec("sglang") is None:
        print("torch-free modules: sglang is not installed here; run `make setup` and use .venv/bin/python")
        return 2
    return report("torch-free modules", find_offenders())


if __name__ == "__main__":
    sys.exit(main())
