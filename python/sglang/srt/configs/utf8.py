"""Text that came from bytes which are no UTF-8: how it is refused and shown.

Python keeps such bytes of arguments, variables and file names as halves of surrogate pairs, which no message
and hardly a library takes. Read by whoever accepts a path or a name from outside.
"""

import os


def check_utf8(path: str | os.PathLike[str], what: str) -> None:
    """Refuse a path that cannot be written down; `what` is the setting or the thing that has it."""
    text = os.fspath(path)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{what} {escaped(text)} is not UTF-8; rename the file or folder, or give a link to it"
        ) from error


def escaped(text: str) -> str:
    r"""The text for a message: bytes that are no UTF-8 as \xe9."""
    try:
        raw = text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:  # half a pair that stood for no byte
        raw = text.encode("utf-8", "backslashreplace")
    return raw.decode("utf-8", "backslashreplace")
