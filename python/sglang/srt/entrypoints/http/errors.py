"""Owns the body of an error answer, which OpenAI's and SGLang's clients both understand.

Used by every route and by the authentication. It must not carry a traceback, a secret or a path of this
machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.responses import Response

from sglang.srt.messages.errors import RequestRejected

#: The default of `type`, by status.
ERROR_TYPES: dict[int, str] = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    413: "RequestTooLargeError",
    500: "InternalServerError",
    503: "ServiceUnavailableError",
}
#: Seconds after which a client may try again when the server is starting, draining or full.
RETRY_AFTER_S = 1


def error_body(
    message: str, err_type: str | None = None, code: int | str = 400, param: str | None = None
) -> dict[str, Any]:
    """Both forms in one object: OpenAI's nested `error` and SGLang's flat keys."""
    if err_type is None:
        err_type = ERROR_TYPES.get(code, "Error") if isinstance(code, int) else "Error"
    flat = {"message": message, "type": err_type, "param": param, "code": code}
    return {"object": "error", **flat, "error": dict(flat)}


def json_response(
    value: object, status_code: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """A JSON answer; msgspec writes it several times faster than the standard library."""
    return Response(
        msgspec.json.encode(value), status_code=status_code, headers=headers, media_type="application/json"
    )


def error_response(
    message: str,
    status_code: int = 400,
    *,
    err_type: str | None = None,
    param: str | None = None,
    code: int | str | None = None,
) -> Response:
    """An error answer; status 503 comes with a Retry-After header."""
    body = error_body(
        message, err_type or ERROR_TYPES.get(status_code), status_code if code is None else code, param
    )
    headers = {"Retry-After": str(RETRY_AFTER_S)} if status_code == 503 else None
    return json_response(body, status_code, headers)


def rejected_response(error: Exception) -> Response:
    """A refused or failed request (`RequestRejected`), or a `ValueError`, which is the caller's mistake."""
    if isinstance(error, RequestRejected):
        return error_response(error.message, error.status_code, err_type=_type_of(error), param=error.param)
    return error_response(str(error), 400)


def stream_error(error: Exception) -> dict[str, object]:
    """The event that ends a native stream which failed after it had begun."""
    rejected = error if isinstance(error, RequestRejected) else None
    code = rejected.status_code if rejected else 400
    return {
        "error": {
            "message": rejected.message if rejected else str(error),
            "type": "invalid_request_error" if code < 500 else ERROR_TYPES.get(code, "InternalServerError"),
            "code": code,
            "retryable": False,
        }
    }


def _type_of(error: RequestRejected) -> str:
    """The error's own type, but for its default BadRequestError where the status is another one."""
    if error.err_type == "BadRequestError":
        return ERROR_TYPES.get(error.status_code, "Error")
    return error.err_type
