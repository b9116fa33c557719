"""Owns the one exception that turns into an HTTP status: a request that is refused or fails on its own.

Raised by the tokenizer manager and the doors, read by the error bodies. It must never carry a secret or a
traceback.
"""

from __future__ import annotations


class RequestRejected(Exception):
    """One request is refused (`status_code` 4xx) or failed (5xx); neighbours are not concerned."""

    def __init__(
        self,
        message: str,
        status_code: int = 400,
        param: str | None = None,
        err_type: str = "BadRequestError",
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status_code = status_code
        self.param = param
        self.err_type = err_type
