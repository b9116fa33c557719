"""Fills in the served model name and checks keys, certificates and paths before the server starts.

Must not open a socket.
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
    if key is not None and certificate is not None:
        _check_pair(key, certificate)


def _check_pair(key: str, certificate: str) -> None:
    import ssl  # kept out of start-up: most servers have no certificate

    try:
        # Without a password given here, an encrypted key would be asked about on the terminal.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password="")
    except OSError as error:
        raise ValueError(
            f"--ssl-certfile {certificate} and --ssl-keyfile {key} cannot be used together: {error}; both "
            "must be PEM files, the key without a password and of that certificate"
        ) from error


def _check_keys(view: ResolvingView) -> None:
    """Refuse an empty key: it would look like protection and protect nothing."""
    for flag, key in (("--api-key", view.api_key), ("--admin-api-key", view.admin_api_key)):
        if key is not None and not key.strip():
            raise ValueError(f"{flag} is empty; give a key or leave the flag out")


def resolve_serving(view: ResolvingView) -> None:
    _check_tls(view)
    _check_keys(view)
    prefix = view.fastapi_root_path
    if prefix and not prefix.startswith("/"):
        raise ValueError(f"--fastapi-root-path must begin with /, got {prefix!r}")
    if view.served_model_name == "":
        raise ValueError("--served-model-name is empty; give a name or leave the flag out")
    view.fill("serving_hook", served_model_name=view.model_path)
