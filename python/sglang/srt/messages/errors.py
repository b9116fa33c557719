"""Owns the one exception that becomes an HTTP status: a request that is refused, or that fails by itself.

Raised by the tokenizer manager and the doors, read by the error bodies. It must never carry a secret or a
traceback.
"""

from __future__ import annotations


class RequestRejected(Exception):
    """One request is refused (`status_code` 4xx) or has failed (5xx); the others go on."""

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


def refused(field: str, rule: str) -> RequestRejected:
    """The refusal of one field, with `param` set for clients that read it.

    `field` may name a place inside the field, as in `logit_bias[5]`.
    """
    return RequestRejected(f"{field}: {rule}", param=field.partition("[")[0])
