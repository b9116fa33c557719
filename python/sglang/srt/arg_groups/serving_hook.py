"""Fills the names the server shows and checks what its start would trip over.

Reads the model path. Must not open a socket.
"""

from pathlib import Path

from sglang.srt.arg_groups.model_override_base import ResolvingView


def _check_tls(view: ResolvingView) -> None:
    key, certificate = view.ssl_keyfile, view.ssl_certfile
    if (key is None) != (certificate is None):
        given, missing = (
            ("--ssl-keyfile", "--ssl-certfile")
            if certificate is None
            else ("--ssl-certfile", "--ssl-keyfile")
        )
        raise ValueError(f"{given} is given without {missing}; TLS needs both")
    for flag, path in (("--ssl-keyfile", key), ("--ssl-certfile", certificate)):
        if path is not None and not Path(path).is_file():
            raise ValueError(f"{flag} {path} is not a file")


def _check_keys(view: ResolvingView) -> None:
    """An empty key would look like protection and ask for nothing."""
    for flag, key in (("--api-key", view.api_key), ("--admin-api-key", view.admin_api_key)):
        if key is not None and not key.strip():
            raise ValueError(f"{flag} is empty; give a key or leave the flag out")


def resolve_serving(view: ResolvingView) -> None:
    _check_tls(view)
    _check_keys(view)
    prefix = view.fastapi_root_path
    if prefix and not prefix.startswith("/"):
        raise ValueError(f"--fastapi-root-path must begin with /, got {prefix!r}")
    view.fill("serving_hook", served_model_name=view.model_path)
