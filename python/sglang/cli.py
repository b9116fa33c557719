"""Owns the `sglang` command: `sglang serve MODEL [flags]`, `sglang version`, `sglang help`.

Installed as a console script. It must not import the engine before it has read the command.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from sglang.srt.utils.standard_streams import answered, bear_lost_error_output
from sglang.version import __version__

HELP = """usage: sglang COMMAND [arguments]

commands:
  serve MODEL [flags]   start the server; MODEL is a folder, a .gguf file or an alias (also --model-path)
                        `sglang serve --help` lists all flags
  version               print the version
  help                  print this
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; an unknown command is 2, as for an unknown flag."""
    bear_lost_error_output()
    arguments = list(sys.argv[1:] if argv is None else argv)
    command = arguments.pop(0) if arguments else ""
    match command:
        case "serve":
            from sglang.srt.entrypoints.process_start import serve

            return serve(arguments, positional_model=True, prog="sglang serve")
        case "version" | "--version":
            return answered("sglang", f"{__version__}\n")
        case "help" | "--help" | "-h":
            return answered("sglang", HELP)
        case "":
            print(HELP, end="", file=sys.stderr)
            return 2
        case _:
            print(f"sglang: there is no command {command!r}; `sglang help` lists them", file=sys.stderr)
            return 2


if __name__ == "__main__":
    sys.exit(main())
