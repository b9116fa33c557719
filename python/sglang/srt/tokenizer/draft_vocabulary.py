"""Whether a whole model may draft for another: the same ids must mean the same tokens in both.

Called before a process starts, for the STANDALONE algorithm. It must not read weights; the other fits of a
draft are checked in `configs/draft_config.py`.
"""

from __future__ import annotations

from sglang.srt.tokenizer.tokenizer import Tokenizer

_FLAG = "--speculative-draft-model-path"
_CURE = "use a draft with the tokenizer of the model"


def check_same_tokens(target: Tokenizer, draft: Tokenizer, *, head_rows: int) -> None:
    """ValueError where a token of the target means something else to the draft, or is out of its reach.

    `head_rows` is how many ids the draft scores. It may be more than there are tokens: heads are padded.
    """
    wanted, found = _texts(target), _texts(draft)
    if len(wanted) != len(found):
        raise ValueError(
            f"{_FLAG}: the tokenizer of the draft {draft.source} knows {len(found)} tokens, and that of the "
            f"model {target.source} knows {len(wanted)}; {_CURE}"
        )
    for index in sorted(wanted.keys() | found.keys()):
        if wanted.get(index) != found.get(index):
            raise ValueError(
                f"{_FLAG}: token {index} is {_shown(found, index)} for the draft {draft.source}, and "
                f"{_shown(wanted, index)} for the model {target.source}; {_CURE}"
            )
    if head_rows < target.num_ids:
        raise ValueError(
            f"{_FLAG}: the draft {draft.source} scores {head_rows} ids, and its tokenizer has "
            f"{target.num_ids}; the draft's config.json and tokenizer are not of one model"
        )


def _texts(tokenizer: Tokenizer) -> dict[int, str]:
    """Each id with its token as the files write it."""
    return {index: text for text, index in tokenizer.ids_of_tokens().items()}


def _shown(texts: dict[int, str], index: int) -> str:
    return repr(texts[index]) if index in texts else "not there"
