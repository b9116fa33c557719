"""A JSON file that must hold one object: the configs of a checkpoint and of its tokenizer."""

import json
import pathlib


def read_json_object(path: pathlib.Path) -> dict[str, object]:
    """The object in the file; ValueError names the file and what is wrong with it."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} cannot be read as JSON: {error}; correct it or fetch it again") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object, it holds a {type(content).__name__}")
    return content
