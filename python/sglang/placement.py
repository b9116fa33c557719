"""Owns `python -m sglang.placement FLAGS`: it shows where a server with these flags would put its ranks.

Run by an operator before a start; `GET /placement` shows the same of a running server. It must not start
anything, open a model or import torch. It also shows layouts that the server does not serve yet.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from sglang.srt.arg_groups.parsing.cli import build_parser
from sglang.srt.placement.picture import draw
from sglang.srt.placement.plan import plan_from_flags
from sglang.srt.placement.table import as_json, as_text
from sglang.srt.utils.standard_streams import answered, bear_lost_error_output

PROG = "python -m sglang.placement"
_DESCRIPTION = (
    "Show each rank's seat and every group of a layout, before anything starts. Takes every flag of the "
    "server; those that place no rank change nothing, and the model may be left out."
)


def _add_own(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("placement")
    group.add_argument("--json", action="store_true", help="Print JSON in place of tables.")
    group.add_argument("--svg", metavar="FILE", type=Path, help="Draw the layout into this file as well.")


def _help() -> str:
    whole = build_parser(PROG)
    whole.description = _DESCRIPTION
    _add_own(whole)
    return whole.format_help()


def main(argv: Sequence[str] | None = None) -> int:
    """0 after the plan is shown, 1 where it cannot be written, 2 for unknown flags or no possible layout."""
    bear_lost_error_output()
    own = argparse.ArgumentParser(prog=PROG, add_help=False, allow_abbrev=False)
    own.add_argument("-h", "--help", action="store_true")
    _add_own(own)
    options, flags = own.parse_known_args(sys.argv[1:] if argv is None else list(argv))
    if options.help:
        return answered(PROG, _help())
    try:
        plan = plan_from_flags(flags, prog=PROG)
        picture = draw(plan) if options.svg is not None else None
        if picture is not None:
            _write(options.svg, picture)
    except ValueError as error:
        print(f"{PROG}: error: {error}", file=sys.stderr)
        return 2
    return answered(PROG, json.dumps(as_json(plan), indent=2) + "\n" if options.json else as_text(plan))


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ValueError(f"--svg {path} cannot be written: {error.strerror or error}") from error


if __name__ == "__main__":
    # A reader that has seen enough (`| head`) ends this quietly.
    with contextlib.suppress(ValueError):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    sys.exit(main())
