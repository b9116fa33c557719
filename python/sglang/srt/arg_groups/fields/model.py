"""Declared fields of the model: which weights, read how, computed in which type.

Read through `get_model()`. Declarations only: name, type, default, help and what this build serves.
"""

from sglang.srt.arg_groups.arg_utils import NS, A, Arg, Namespace
from sglang.srt.arg_groups.fields import choices

_NO_DRAFT_FORMAT = "convert the checkpoint to safetensors or GGUF and use --load-format auto"
_LOCAL_ONLY = "download the revision you want and give its folder as --model-path"


class Model(Namespace, ns=NS("model")):
    model_path: A[
        str,
        Arg(
            help="Local folder, GGUF file or known alias of the weights. The only mandatory setting.",
            aliases=("--model",),
            served=True,
        ),
    ]
    load_format: A[
        str,
        Arg(
            help="Which loader reads the files; auto looks at what is there; dummy makes random weights.",
            served=choices.SERVED_LOAD_FORMATS,
            instead=_NO_DRAFT_FORMAT,
        ),
    ] = "auto"
    model_loader_extra_config: A[str, Arg(help="JSON handed to the chosen loader.")] = "{}"
    trust_remote_code: A[
        bool,
        Arg(
            help="Permit Python shipped inside the model folder.",
            instead="remove the flag: code from a model folder is never run",
        ),
    ] = False
    context_length: A[
        int | None,
        Arg(
            help="Longest sequence; default is what the model says.",
            resolvable=True,
            served=True,
            human_int=True,
            at_least=1,
        ),
    ] = None
    is_embedding: A[bool, Arg(help="Serve a causal model as an embedder.")] = False
    revision: A[str | None, Arg(help="Hub branch, tag or commit.", instead=_LOCAL_ONLY)] = None
    model_impl: A[
        str,
        Arg(
            help="Which implementation runs the model: auto, or this package's own (sglang).",
            served=("sglang",),
        ),
    ] = "auto"
    json_model_override_args: A[
        str,
        Arg(help="JSON merged over the model's config (rope changes, layer cuts for tests).", served=True),
    ] = "{}"
    dtype: A[
        str,
        Arg(
            help="Type of computation; auto on CPU: bfloat16 or float32, whichever is faster, measured once.",
            resolvable=True,
            choices=choices.DTYPES,
            served=("bfloat16", "float", "float32", "half", "float16"),
        ),
    ] = "auto"
    quantization: A[
        str | None,
        Arg(
            help="w8a8_int8 quantizes weights to int8 when they are loaded, and the inputs of each layer "
            "when they are multiplied. gguf computes with the blocks of a GGUF file as they are (compiled "
            "kernels, on a CPU); it is the default for such a file with --dtype auto. With another --dtype "
            "blocks are dequantized to it when they are loaded.",
            resolvable=True,
            served=("gguf", "w8a8_int8"),
            instead="leave the flag out, take w8a8_int8, or take gguf for a GGUF file",
        ),
    ] = None
    quantization_param_path: A[str | None, Arg(help="File with scale factors of an fp8 KV cache.")] = None
    kv_cache_dtype: A[
        str,
        Arg(
            help="Type of cached keys and values; auto follows --dtype, and a floating type must be it. "
            "int8 takes half the bytes of bfloat16, with a scale for each key and each value of a head "
            "(--attention-backend cpu).",
            choices=choices.KV_CACHE_DTYPES,
            served=choices.SERVED_KV_CACHE_DTYPES,
            instead="use auto or int8",
        ),
    ] = "auto"
    weight_loader_disable_mmap: A[bool, Arg(help="Read safetensors without mmap.")] = False
    weight_loader_prefetch_checkpoints: A[bool, Arg(help="Warm the page cache before loading.")] = False
    download_dir: A[str | None, Arg(help="Where downloaded weights are kept.", instead=_LOCAL_ONLY)] = None
    delete_ckpt_after_loading: A[bool, Arg(help="Remove the checkpoint once the server is ready.")] = False
    custom_weight_loader: A[
        list[str] | None, Arg(help="Import paths of user functions that weight updates may use.")
    ] = None
    checkpoint_engine_wait_weights_before_ready: A[
        bool, Arg(help="Hold readiness until an external pusher delivers the weights.")
    ] = False
    weight_update_root: A[
        str | None,
        Arg(help="Folder that bounds weight updates from disk; default is the parent of the model path."),
    ] = None
    remote_instance_weight_loader_backend: A[
        str,
        Arg(
            help="Transport when weights come from a running instance.",
            choices=choices.REMOTE_INSTANCE_BACKENDS,
        ),
    ] = "nccl"
    remote_instance_weight_loader_start_seed_via_transfer_engine: A[
        bool, Arg(help="Offer this instance's weights to others through the transfer engine.")
    ] = False
    modelexpress_config: A[str | None, Arg(help="JSON of the ModelExpress weight source.")] = None
