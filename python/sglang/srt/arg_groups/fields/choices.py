"""Names an operator may choose from, as plain tuples.

Read by the field declarations and by the registries that implement such names. Must not import an
implementation: parsing a command line stays free of the engine.
"""

from typing import Final

DTYPES: Final = ("auto", "half", "float16", "bfloat16", "float", "float32")
KV_CACHE_DTYPES: Final = (
    "auto", "float32", "bf16", "bfloat16", "int8", "fp8_e5m2", "fp8_e4m3", "mxfp8", "nvfp4", "fp4_mx_block16",
)  # fmt: skip
SERVED_KV_CACHE_DTYPES: Final = ("auto", "float32", "bf16", "bfloat16", "int8")
#: Ways to read weights that this build has.
SERVED_LOAD_FORMATS: Final = ("auto", "safetensors", "gguf", "dummy")
TOKENIZER_MODES: Final = ("auto", "slow")
SAMPLING_DEFAULTS: Final = ("openai", "model")
SCHEDULE_POLICIES: Final = (
    "fcfs", "lpm", "dfs-weight", "lof", "random", "priority", "routing-key", "hrrn", "shortest-prefill-first",
)  # fmt: skip
RETRACTION_POLICIES: Final = ("length", "priority")
RADIX_EVICTION_POLICIES: Final = ("lru", "lfu", "slru", "priority", "tlru")
HICACHE_WRITE_POLICIES: Final = ("write_back", "write_through", "write_through_selective")
LOAD_BALANCE_METHODS: Final = (
    "auto",
    "round_robin",
    "follow_bootstrap_room",
    "total_requests",
    "total_tokens",
)
GRAMMAR_BACKENDS: Final = ("xgrammar", "outlines", "llguidance", "none")
CUDA_GRAPH_BACKENDS: Final = ("full", "breakable", "disabled", "cpu")
MOE_A2A_BACKENDS: Final = (
    "none", "deepep", "mooncake", "nixl", "mori", "ascend_fuseep", "flashinfer", "megamoe", "deepep_v2",
    "ascend_tp", "pplx", "flashinfer_megamoe",
)  # fmt: skip
DEEPEP_MODES: Final = ("auto", "normal", "low_latency")
EXPERT_RECORDER_MODES: Final = ("stat", "stat_approx", "per_pass", "per_token")
ELASTIC_EP_BACKENDS: Final = ("mooncake", "nixl")
LORA_BACKENDS: Final = ("triton", "csgmv", "ascend", "torch_native", "triton_v2")
LORA_EVICTION_POLICIES: Final = ("lru", "fifo")
DISAGGREGATION_MODES: Final = ("null", "prefill", "decode")
REMOTE_INSTANCE_BACKENDS: Final = ("nccl", "transfer_engine", "modelexpress")
MAMBA_RADIX_CACHE_STRATEGIES: Final = ("auto", "no_buffer", "extra_buffer", "extra_buffer_lazy")
LOG_LEVELS: Final = ("debug", "info", "warning", "error", "critical")
LOG_REQUEST_FORMATS: Final = ("text", "json")
SPECULATIVE_ATTENTION_MODES: Final = ("prefill", "decode")
NGRAM_MATCH_TYPES: Final = ("BFS", "PROB")
