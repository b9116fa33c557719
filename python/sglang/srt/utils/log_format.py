"""The shape of a log line: `[YYYY-mm-dd HH:MM:SS TPi] message`, with only the ranks that exist.

Set up once by the entry of each process (server, rank, Engine). Text from users must not be able to fake a
line, so line breaks inside a message are escaped; only tracebacks, which logging appends itself, take several
lines.
"""

from __future__ import annotations

import json
import logging
import logging.config
import pathlib
import sys
from collections.abc import Iterable, Mapping

from sglang.srt.environ import envs

_ESCAPES = {
    ord("\n"): "\\n",
    ord("\r"): "\\r",
    ord("\x1b"): "\\x1b",
    ord("\x85"): "\\x85",
    0x2028: "\\u2028",
    0x2029: "\\u2029",
}


def escape_line_breaks(text: str) -> str:
    """The text on one line, whatever a user sent."""
    return text.translate(_ESCAPES)


class LineFormatter(logging.Formatter):
    """Formats a log record as one line; an attached traceback follows on its own lines."""

    def __init__(self, ranks: str = "", *, milliseconds: bool = False) -> None:
        fraction = ".%(msecs)03d" if milliseconds else ""
        suffix = f" {ranks}" if ranks else ""
        super().__init__(f"[%(asctime)s{fraction}{suffix}] %(message)s", datefmt="%Y-%m-%d %H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:
        if not getattr(record, "many_lines", False):
            record.message = escape_line_breaks(record.message.rstrip())
        return super().formatMessage(record)


def rank_suffix(ranks: Iterable[tuple[str, int, int]]) -> str:
    """`(("TP", 1, 2), ("PP", 0, 1))` -> `TP1`: name, rank and width; a width of one is left out."""
    return " ".join(f"{name}{rank}" for name, rank, size in ranks if size > 1)


def configure_logging(level: str, *, ranks: str = "", logger_name: str | None = None) -> None:
    """Send this process's log to standard error in our format.

    `logger_name` limits it to one logger: the Engine runs in a process whose root logger is the user's.
    `SGLANG_LOGGING_CONFIG_PATH` names a JSON file that is used in place of all this.
    """
    config_path = envs.SGLANG_LOGGING_CONFIG_PATH.get()
    if config_path:
        try:
            logging.config.dictConfig(dict(_read_config(pathlib.Path(config_path))))
        except (ValueError, TypeError, AttributeError, ImportError) as error:
            raise ValueError(f"SGLANG_LOGGING_CONFIG_PATH={config_path}: {error}") from error
        return
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LineFormatter(ranks, milliseconds=envs.SGLANG_LOG_MS.get()))
    logger = logging.getLogger(logger_name)
    for old in [h for h in logger.handlers if isinstance(h.formatter, LineFormatter)]:
        logger.removeHandler(old)
    if logger_name is not None:
        logger.propagate = False
    logger.addHandler(handler)
    logger.setLevel(level.upper())


def _read_config(path: pathlib.Path) -> Mapping[str, object]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"not a readable JSON file ({error})") from error
    if not isinstance(config, dict):
        raise ValueError("must hold one JSON object for logging.config.dictConfig")
    return config
