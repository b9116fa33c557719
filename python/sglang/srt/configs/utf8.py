"""Text from outside that is not valid UTF-8: how it is refused and how an error shows it.

Python keeps such bytes of arguments, variables and file names as lone surrogates, which cannot be encoded
again. Read by whoever accepts a path or a name from the operator.
"""

import os


def check_utf8(path: str | os.PathLike[str], what: str) -> None:
    """Refuse a path that is not UTF-8; `what` names the setting it came from."""
    text = os.fspath(path)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{what} {escaped(text)} is not UTF-8; rename the file or folder, or give a link to it"
        ) from error


def escaped(text: str) -> str:
    r"""The text for a message, with bytes that are not UTF-8 written as \xe9."""
    try:
        raw = text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:  # a lone surrogate that stands for no byte
        raw = text.encode("utf-8", "backslashreplace")
    return raw.decode("utf-8", "backslashreplace")
