"""Declared fields of logs, metrics and traces.

Read through `get_observability()`. Declarations only: name, type, default, help and what this build serves.
"""

from sglang.srt.arg_groups.arg_utils import NS, A, Arg, Namespace
from sglang.srt.arg_groups.fields import choices

_NO_METRICS = "leave it out and read the log lines: metrics come later"
_NO_TRACE = "leave it out: traces come later"


class Observability(Namespace, ns=NS("observability")):
    log_level: A[str, Arg(help="Level of the log.", choices=choices.LOG_LEVELS, served=True)] = "info"
    log_level_http: A[
        str | None, Arg(help="Level of the HTTP server's log.", choices=choices.LOG_LEVELS, served=True)
    ] = None
    log_requests: A[bool, Arg(help="Log each request and its result.", served=True)] = False
    log_requests_level: A[
        int, Arg(help="How much of a request is logged, 0 to 3.", choices=(0, 1, 2, 3), served=True)
    ] = 2
    log_requests_format: A[
        str, Arg(help="Text or JSON lines.", choices=choices.LOG_REQUEST_FORMATS, served=True)
    ] = "text"
    log_requests_target: A[
        list[str] | None,
        Arg(help="Where request logs go.", served=("stdout",), instead="use stdout and redirect it"),
    ] = None
    uvicorn_access_log_exclude_prefixes: A[
        list[str], Arg(help="Paths that the access log leaves out.", served=True)
    ] = []
    crash_dump_folder: A[str | None, Arg(help="Folder for recent requests when crashing.")] = None
    enable_metrics: A[bool, Arg(help="Serve Prometheus metrics at /metrics.", instead=_NO_METRICS)] = False
    enable_metrics_for_all_schedulers: A[
        bool, Arg(help="Every rank reports metrics.", instead=_NO_METRICS)
    ] = False
    bucket_time_to_first_token: A[
        list[float] | None, Arg(help="Histogram buckets of the first token.", instead=_NO_METRICS)
    ] = None
    bucket_inter_token_latency: A[
        list[float] | None, Arg(help="Histogram buckets between tokens.", instead=_NO_METRICS)
    ] = None
    bucket_e2e_request_latency: A[
        list[float] | None, Arg(help="Histogram buckets of whole requests.", instead=_NO_METRICS)
    ] = None
    decode_log_interval: A[int, Arg(help="Decode steps between two log lines.", served=True, at_least=1)] = 40
    enable_request_time_stats_logging: A[bool, Arg(help="Log a timing line for each request.")] = False
    kv_events_config: A[str | None, Arg(help="JSON of the publisher of cache events.")] = None
    enable_trace: A[bool, Arg(help="OpenTelemetry traces.", instead=_NO_TRACE)] = False
    otlp_traces_endpoint: A[str, Arg(help="Collector of the traces.", instead=_NO_TRACE)] = "localhost:4317"
