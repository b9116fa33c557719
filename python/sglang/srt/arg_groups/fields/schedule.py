"""Declared fields of scheduling: limits, budgets, queue order, page size.

Read through `get_schedule()`. Declarations only: name, type, default, help and what this build serves.
"""

from sglang.srt.arg_groups.arg_utils import NS, A, Arg, Namespace
from sglang.srt.arg_groups.fields import choices

_NO_PRIORITY = "leave it out: requests are taken in the order of --schedule-policy"


class Schedule(Namespace, ns=NS("schedule")):
    mem_fraction_static: A[
        float | None,
        Arg(
            help="Share of memory for weights and the KV pool; computed when not given.",
            served=True,
            at_least=0,
            at_most=1,
        ),
    ] = None
    max_running_requests: A[
        int | None,
        Arg(
            help="Most requests decoded at once; attention-DP replicas share it, at least 1 each.",
            resolvable=True,
            served=True,
            at_least=1,
        ),
    ] = None
    max_queued_requests: A[
        int | None,
        Arg(help="Most requests waiting in one replica; one more is answered 503.", served=True, at_least=0),
    ] = None
    max_total_tokens: A[
        int | None, Arg(help="Size of the KV pool in tokens.", served=True, human_int=True, at_least=1)
    ] = None
    chunked_prefill_size: A[
        int | None,
        Arg(
            help="Longest piece of a prompt in one forward; -1: whole prompts.",
            resolvable=True,
            served=True,
            at_least=1,
            or_exactly=-1,
        ),
    ] = None
    max_prefill_tokens: A[
        int, Arg(help="Token budget of one prefill batch.", served=True, human_int=True, at_least=1)
    ] = 16384
    prefill_max_requests: A[
        int | None, Arg(help="Request budget of one prefill batch.", served=True, at_least=1)
    ] = None
    enable_dynamic_chunking: A[
        bool,
        Arg(
            help="While streams run, prompts go in pieces of about a quarter of a second, as measured, up to "
            "--chunked-prefill-size; on a CPU by default, where that is not given.",
            resolvable=True,
            served=True,
        ),
    ] = False
    schedule_policy: A[
        str,
        Arg(
            help="Queue order: fcfs, or lpm for the longest cached prefix first.",
            choices=choices.SCHEDULE_POLICIES,
            served=("fcfs", "lpm"),
            instead="use fcfs or lpm",
        ),
    ] = "fcfs"
    enable_priority_scheduling: A[bool, Arg(help="Honour request priorities.", instead=_NO_PRIORITY)] = False
    schedule_low_priority_values_first: A[
        bool, Arg(help="Smaller priority numbers go first.", instead=_NO_PRIORITY)
    ] = False
    priority_scheduling_preemption_threshold: A[
        int, Arg(help="Priority gap that preempts a running request.", instead=_NO_PRIORITY)
    ] = 10
    default_priority_value: A[
        int | None, Arg(help="Priority of requests that state none.", instead=_NO_PRIORITY)
    ] = None
    abort_on_priority_when_disabled: A[
        bool,
        Arg(help="Answer 503 to a request with a priority while priorities are off.", instead=_NO_PRIORITY),
    ] = False
    schedule_conservativeness: A[
        float,
        Arg(help="Scales the guess of future output length used for admission.", served=True, at_least=0),
    ] = 1.0
    page_size: A[int | None, Arg(help="Tokens of one KV page.", resolvable=True, served=True, at_least=1)] = (
        None
    )
    disable_overlap_schedule: A[
        bool, Arg(help="Do not overlap scheduling with the forward.", resolvable=True, served=(True,))
    ] = False
    num_continuous_decode_steps: A[
        int, Arg(help="Decode steps run before the scheduler looks for new work.", at_least=1)
    ] = 1
    scheduler_recv_interval: A[int, Arg(help="Look for new requests every N steps.", at_least=1)] = 1
    enable_mixed_chunk: A[
        bool,
        Arg(
            help="Put decoding requests into prefill batches, without speculative decoding; on a CPU by "
            "default, where --chunked-prefill-size is not given.",
            resolvable=True,
            served=True,
        ),
    ] = False
    prefill_decode_interval: A[int | None, Arg(help="Decode rounds between two prefill batches.")] = None
    enable_prefill_delayer: A[
        bool,
        Arg(
            help="With attention data parallelism: start prompts when all replicas can start one.",
            served=True,
        ),
    ] = False
    prefill_delayer_max_delay_passes: A[
        int, Arg(help="Most scheduler steps for which prompts are held back.", served=True, at_least=0)
    ] = 30
    prefill_delayer_token_usage_low_watermark: A[
        float | None,
        Arg(
            help="A replica that waits and uses less than this share of its KV pool is not held back.",
            served=True,
            at_least=0,
            at_most=1,
        ),
    ] = None
    retraction_policy: A[
        str,
        Arg(help="Who goes back to the queue when the pool runs out.", choices=choices.RETRACTION_POLICIES),
    ] = "length"
