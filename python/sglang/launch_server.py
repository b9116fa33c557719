"""Owns `python -m sglang.launch_server`, the older way to start the server; `sglang serve` is the newer one.

Kept because scripts and containers use it. It must not do anything that `sglang serve` does not.
"""

from __future__ import annotations

import sys

from sglang.srt.entrypoints.process_start import serve
from sglang.srt.utils.standard_streams import bear_lost_error_output

PROG = "python -m sglang.launch_server"


def main() -> int:
    bear_lost_error_output()
    print(f"{PROG}: warning: this works; `sglang serve` is the newer spelling", file=sys.stderr)
    return serve(sys.argv[1:], prog=PROG)


if __name__ == "__main__":
    sys.exit(main())
