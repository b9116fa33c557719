"""What the flags need to know about each speculative algorithm, in plain words.

Read by the declaration of `--speculative-algorithm`, by resolution and by the registry of workers, which must
serve the same names. Must not import a worker or a draft.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from sglang.srt.configs.draft_config import DraftKind


class DraftShape(NamedTuple):
    """How much is drafted in a round: depth, branches a step, tokens verified with the root."""

    num_steps: int
    topk: int
    num_draft_tokens: int


#: One branch of three drafts: what suits most models, and whatever verifies chains only.
CHAIN: Final = DraftShape(3, 1, 4)


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmFacts:
    """One algorithm. Its name is the value of `--speculative-algorithm`, in upper case."""

    name: str
    #: The kind of draft file it needs; None: it drafts without a model.
    draft: DraftKind | None
    #: Architecture of the target -> what is drafted where nobody says; others take `CHAIN`.
    shapes: Mapping[str, DraftShape] = field(default_factory=dict)
    #: Drafts may be accepted by rejection sampling and block verification.
    rejection_sampling: bool = False
    #: The depth may be chosen while running.
    adaptive: bool = False
    #: How the names of settings begin that nobody else reads.
    own_settings: str | None = None


_EAGLE_SHAPES: Final = {"LlamaForCausalLM": DraftShape(5, 4, 8)}

_ALL: Final = (
    AlgorithmFacts(name="EAGLE", draft="eagle", shapes=_EAGLE_SHAPES, rejection_sampling=True, adaptive=True),
    AlgorithmFacts(
        name="EAGLE3", draft="eagle3", shapes=_EAGLE_SHAPES, rejection_sampling=True, adaptive=True
    ),
    AlgorithmFacts(name="STANDALONE", draft="standalone"),
    AlgorithmFacts(name="NGRAM", draft=None, own_settings="speculative_ngram_"),
)

#: Name -> facts of every algorithm that this build serves.
ALGORITHMS: dict[str, AlgorithmFacts] = {facts.name: facts for facts in _ALL}
#: Another name -> the algorithm it means.
ALIASES: dict[str, str] = {"NEXTN": "EAGLE"}
#: Names that are known and come later.
LATER: tuple[str, ...] = ("DFLASH", "DSPARK")


def facts_of(name: str) -> AlgorithmFacts:
    """The facts behind a name or an alias, in any case; ValueError with the known names otherwise."""
    upper = name.upper()
    facts = ALGORITHMS.get(ALIASES.get(upper, upper))
    if facts is None:
        raise ValueError(
            f"Unknown speculative algorithm name {name!r}; known: {', '.join([*ALGORITHMS, *ALIASES])}"
        )
    return facts
