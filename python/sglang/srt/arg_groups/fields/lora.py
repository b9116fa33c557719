"""Declared fields of low-rank adapters.

Read through `get_lora()`. Declarations only: name, type, default, help and what this build serves.
"""

from sglang.srt.arg_groups.arg_utils import NS, A, Arg, Namespace
from sglang.srt.arg_groups.fields import choices

_NO_LORA = "merge the adapter into the weights and serve those: adapters come later"


class Lora(Namespace, ns=NS("lora")):
    enable_lora: A[
        bool | None, Arg(help="Turn adapters on; implied by --lora-paths.", served=(False,), instead=_NO_LORA)
    ] = None
    lora_paths: A[
        list[str] | None, Arg(help="Adapters at start: path, name=path or JSON.", instead=_NO_LORA)
    ] = None
    max_loras_per_batch: A[
        int, Arg(help="Distinct adapters in a batch, the base model counted.", at_least=1, instead=_NO_LORA)
    ] = 8
    max_loaded_loras: A[int | None, Arg(help="Adapters kept in host memory.", instead=_NO_LORA)] = None
    max_lora_rank: A[int | None, Arg(help="Largest rank of adapters loaded later.", instead=_NO_LORA)] = None
    lora_target_modules: A[list[str] | None, Arg(help="Modules adapters may change.", instead=_NO_LORA)] = (
        None
    )
    lora_backend: A[str, Arg(help="Adapter kernels.", choices=choices.LORA_BACKENDS, instead=_NO_LORA)] = (
        "csgmv"
    )
    lora_eviction_policy: A[
        str,
        Arg(
            help="Which adapter leaves the pool first.",
            choices=choices.LORA_EVICTION_POLICIES,
            instead=_NO_LORA,
        ),
    ] = "lru"
