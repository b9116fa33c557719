"""Owns what a request asks about log-probabilities in one forward.

Held by a request, read by the logits processor and the sampler. The answer is `TokenLogprob`, a message: it
leaves the process as it is.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class LogprobRequest:
    """What one request of a batch asks for besides its next token.

    Output side: `top_num` alternatives and the log-probabilities of `token_ids` for the token drawn now.
    Prompt side (`targets` not empty): the row `first_row + i` of this request's new tokens predicts the
    prompt token `targets[i]`.
    """

    top_num: int = 0
    token_ids: list[int] | None = None
    first_row: int = 0
    targets: list[int] = field(default_factory=list)
