"""`python -m sglang.launch_server`: the older way to start the server; `sglang serve` is the newer one.

Kept because scripts and containers use it. It must not do anything that `sglang serve` does not.
"""

from __future__ import annotations

import sys
import warnings

from sglang.srt.entrypoints.server_main import run_server
from sglang.srt.server_args import prepare_server_args


def main() -> int:
    message = "python -m sglang.launch_server works; `sglang serve` is the newer spelling"
    warnings.warn(message, UserWarning, stacklevel=2)
    return run_server(prepare_server_args(sys.argv[1:], prog="python -m sglang.launch_server"))


if __name__ == "__main__":
    sys.exit(main())
