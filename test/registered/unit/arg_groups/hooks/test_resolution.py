"""The resolution pass: what it decides, who is named for it, what it refuses; it never writes the record."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=4, suite="unit-cpu")

import contextlib
import json
import logging

import msgspec
import pytest

from sglang.kernels import compiled
from sglang.srt.arg_groups.arg_utils import Leaf
from sglang.srt.arg_groups.fields import LEAVES
from sglang.srt.arg_groups.hooks import device as device_hook
from sglang.srt.arg_groups.hooks import dtype as dtype_hook
from sglang.srt.arg_groups.hooks import pipeline
from sglang.srt.arg_groups.hooks import values as values_hook
from sglang.srt.arg_groups.hooks.pipeline import resolve
from sglang.srt.arg_groups.hooks.schedule import default_max_running_requests
from sglang.srt.arg_groups.overrides import (
    declare,
    declared_provenance,
    is_resolved,
    resolution_result,
)
from sglang.srt.arg_groups.supported import refuse_unserved
from sglang.srt.server_args import ServerArgs, pack_server_args, unpack_server_args
from sglang.test.tiny_models import write_tiny_gguf, write_tiny_model


def decided(record):
    """What was decided beside the record: name -> value."""
    return {item.name: item.value for item in declared_provenance(record)}


def decided_by(record, name):
    """Who decided a field; None where nobody did, so that the record's own value stands."""
    return {item.name: item.source for item in declared_provenance(record)}.get(name)


def result(record, name):
    return resolution_result(record, name)


def test_what_nobody_said_is_decided_and_signed(resolved, model_folder, monkeypatch):
    monkeypatch.setattr(compiled, "are_there", lambda: False)
    record = resolved()
    expected = {
        "device": "cpu",
        "context_length": 512,
        "tokenizer_path": str(model_folder),
        "attention_backend": "torch_native",
        "sampling_backend": "pytorch",
        "grammar_backend": "none",
        "chunked_prefill_size": 4096,
        "enable_dynamic_chunking": True,
        "enable_mixed_chunk": True,
        "page_size": 1,
        "max_running_requests": 256,
        "disable_overlap_schedule": True,
        "sleep_on_idle": True,
        "disable_custom_all_reduce": True,
        "served_model_name": str(model_folder),
        "cuda_graph_backend_decode": "disabled",
    }
    assert {name: result(record, name) for name in expected} == expected
    assert decided_by(record, "page_size") == "schedule_hook"
    assert decided_by(record, "context_length") == "model_hook"
    assert all(item.source.endswith("_hook") for item in declared_provenance(record))


def test_who_says_how_large_a_piece_of_a_prompt_is_gets_pieces_of_that_size(resolved):
    assert result(resolved(chunked_prefill_size=512), "enable_dynamic_chunking") is False
    both = resolved(chunked_prefill_size=512, enable_dynamic_chunking=True)
    assert result(both, "enable_dynamic_chunking") is True
    assert result(both, "enable_mixed_chunk") is False
    with pytest.raises(ValueError, match="--chunked-prefill-size -1"):
        resolved(chunked_prefill_size=-1, enable_dynamic_chunking=True)


@pytest.mark.parametrize(
    ("said", "attention", "graphs"),
    [
        ({}, "cpu", "cpu"),
        ({"dtype": "float16"}, "torch_native", "disabled"),
        ({"attention_backend": "torch_native"}, "torch_native", "disabled"),
        ({"decode_attention_backend": "torch_native"}, "torch_native", "disabled"),
        ({"prefill_attention_backend": "torch_native"}, "torch_native", "disabled"),
        ({"cuda_graph_backend_decode": "disabled"}, "cpu", "disabled"),
        ({"attention_backend": "torch_native", "cuda_graph_backend_decode": "cpu"}, "torch_native", "cpu"),
    ],
)
def test_with_compiled_kernels_they_attend_and_decode_steps_are_recorded(
    resolved, monkeypatch, said, attention, graphs
):
    monkeypatch.setattr(compiled, "are_there", lambda: True)
    record = resolved(**said)
    assert result(record, "attention_backend") == attention
    assert result(record, "cuda_graph_backend_decode") == graphs
    assert result(record, "cuda_graph_backend_prefill") == "disabled"


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"cuda_graph_bs_decode": [1, 2], "cuda_graph_max_bs_decode": 2}, "leave one of them out"),
        (
            {"cuda_graph_bs_decode": [1, 2], "cuda_graph_backend_decode": "disabled"},
            "--cuda-graph-bs-decode is given, and no decode step is recorded",
        ),
        (
            {"cuda_graph_max_bs_decode": 2, "attention_backend": "torch_native"},
            "--cuda-graph-max-bs-decode is given, and no decode step is recorded",
        ),
    ],
)
def test_sizes_of_recorded_steps_that_would_have_no_effect_are_refused(resolved, monkeypatch, fields, said):
    monkeypatch.setattr(compiled, "are_there", lambda: True)
    with pytest.raises(ValueError, match=said):
        resolved(**fields)


def test_a_gguf_file_is_computed_from_its_blocks_unless_a_type_is_asked_for(resolved, tmp_path, monkeypatch):
    monkeypatch.setattr(compiled, "are_there", lambda: True)
    file = write_tiny_gguf(write_tiny_model(tmp_path / "tiny"))
    record = resolved(model_path=file)
    assert (result(record, "quantization"), decided_by(record, "quantization")) == ("gguf", "model_hook")
    for other in (
        {"dtype": "float32"},
        {"dtype": "bfloat16"},
        {"load_format": "dummy"},
        {"enable_deterministic_inference": True},
    ):
        assert result(resolved(model_path=file, **other), "quantization") is None
    assert result(resolved(model_path=file, quantization="w8a8_int8"), "quantization") == "w8a8_int8"
    assert result(resolved(), "quantization") is None  # a folder
    monkeypatch.setattr(compiled, "are_there", lambda: False)
    assert result(resolved(model_path=file), "quantization") is None


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (
            {"attention_backend": "torch_native"},
            r"int8 needs --attention-backend cpu .* are torch_native",
        ),
        ({"dtype": "float16"}, r"int8 needs .* --dtype float32 or bfloat16, and these are torch_native and"),
        ({"dtype": "float16", "attention_backend": "cpu"}, r"these are cpu and float16; change them"),
    ],
)
def test_an_int8_cache_is_refused_where_no_kernel_reads_it(resolved, monkeypatch, fields, said):
    monkeypatch.setattr(compiled, "are_there", lambda: True)
    with pytest.raises(ValueError, match=said):
        resolved(kv_cache_dtype="int8", **fields)


@pytest.mark.parametrize(
    ("name", "dtype", "is_served"),
    [
        ("auto", "float16", True),
        ("int8", "float32", True),
        ("int8", "bfloat16", True),
        ("float32", "float32", True),
        ("bf16", "bfloat16", True),
        ("bfloat16", "float32", False),
        ("float32", "bfloat16", False),
    ],
)
def test_a_cache_has_the_type_of_computation_or_int8(resolved, monkeypatch, name, dtype, is_served):
    monkeypatch.setattr(compiled, "are_there", lambda: True)
    if is_served:
        assert result(resolved(kv_cache_dtype=name, dtype=dtype), "kv_cache_dtype") == name
        return
    with pytest.raises(ValueError, match=rf"{name} is not --dtype {dtype}.*use auto or int8"):
        resolved(kv_cache_dtype=name, dtype=dtype)


def test_a_cache_in_fp8_is_not_served(resolved):
    with pytest.raises(ValueError, match=r"--kv-cache-dtype fp8_e4m3 is not served yet; use auto or int8"):
        refuse_unserved(resolved(kv_cache_dtype="fp8_e4m3"))


def test_recorded_steps_need_the_compiled_kernels(resolved, monkeypatch):
    monkeypatch.setattr(compiled, "are_there", lambda: False)
    with pytest.raises(ValueError, match=r"--cuda-graph-backend-decode cpu needs the compiled kernels"):
        resolved(cuda_graph_backend_decode="cpu")


@pytest.mark.parametrize("name", ["attention_backend", "decode_attention_backend"])
def test_attention_by_the_compiled_kernel_needs_it(resolved, monkeypatch, name):
    monkeypatch.setattr(compiled, "are_there", lambda: True)
    assert result(resolved(**{name: "cpu"}), name) == "cpu"
    monkeypatch.setattr(compiled, "are_there", lambda: False)
    with pytest.raises(ValueError, match=r"--attention-backend cpu needs the compiled kernels.*make kernels"):
        resolved(**{name: "cpu"})
    assert result(resolved(), "attention_backend") == "torch_native"


def test_every_resolved_field_still_holds_what_the_operator_said(model_folder):
    """The record is what was said; a resolution that wrote it would make the two indistinguishable."""
    record = ServerArgs(model_path=str(model_folder), dtype="half", enable_dp_attention=True)
    said = {name: getattr(record, name) for name in LEAVES}
    resolve(record)
    results = decided(record)
    assert set(results) >= {"dtype", "enable_dp_attention", "device", "random_seed"}
    for name in LEAVES:
        assert getattr(record, name) is said[name], name
    assert all(value != said[name] for name, value in results.items())


def test_only_resolvable_fields_are_decided(resolved):
    assert all(LEAVES[name].arg.resolvable for name in decided(resolved()))


def test_what_the_operator_said_stays(resolved):
    said = {
        "context_length": 128,
        "page_size": 16,
        "chunked_prefill_size": -1,
        "max_running_requests": 3,
        "served_model_name": "name",
        "random_seed": 11,
        "nccl_port": 29500,
        "dtype": "bfloat16",
        "device": "cpu",
    }
    record = resolved(**said)
    assert {name: result(record, name) for name in said} == said
    assert {decided_by(record, name) for name in said} == {None}


def test_a_record_is_resolved_once(resolved):
    record = resolved()
    with pytest.raises(RuntimeError, match="resolved already"):
        resolve(record)


def test_the_seed_is_drawn_once_for_all_processes(resolved):
    record = resolved()
    child = unpack_server_args(pack_server_args(record))
    assert is_resolved(child)
    assert result(child, "random_seed") == result(record, "random_seed")
    assert len({result(resolved(), "random_seed") for _ in range(5)}) > 1


def test_a_refused_record_keeps_the_declarations_it_came_with(model_folder):
    record = ServerArgs(model_path=str(model_folder), tp_size=4, ep_size=8)
    declare(record, "caller", page_size=2)
    with pytest.raises(ValueError, match="ep_size"):
        resolve(record)
    assert [(item.source, item.name) for item in declared_provenance(record)] == [("caller", "page_size")]
    assert not is_resolved(record)


def test_the_earlier_hook_is_seen_by_the_later(resolved, monkeypatch):
    seen = []
    monkeypatch.setattr(pipeline, "HOOKS", (*pipeline.HOOKS, lambda view: seen.append(view.device)))
    resolved()
    assert seen == ["cpu"]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_auto_dtype_is_the_faster_one_of_the_processor(resolved, monkeypatch, dtype):
    monkeypatch.setattr(dtype_hook, "fastest_dtype", lambda: dtype)
    record = resolved()
    assert result(record, "dtype") == dtype
    # Exact repetition is promised in float32, so there the switch shows as on.
    assert result(record, "enable_deterministic_inference") is (dtype == "float32")


@pytest.mark.parametrize(
    ("said", "dtype"), [("half", "float16"), ("float", "float32"), ("bfloat16", "bfloat16")]
)
def test_dtype_spellings_mean_one_thing(resolved, said, dtype):
    assert result(resolved(dtype=said), "dtype") == dtype


def test_exact_repetition_chooses_float32_and_refuses_another_type(resolved, monkeypatch):
    monkeypatch.setattr(dtype_hook, "fastest_dtype", lambda: "bfloat16")
    assert result(resolved(enable_deterministic_inference=True), "dtype") == "float32"
    with pytest.raises(ValueError, match="--dtype is bfloat16"):
        resolved(enable_deterministic_inference=True, dtype="bfloat16")


def test_a_device_that_is_not_served_is_never_chosen(monkeypatch):
    monkeypatch.setattr(device_hook, "is_cuda", lambda: True)
    assert device_hook.best_served_device() == "cpu"


def test_a_served_gpu_is_chosen_where_there_is_one(monkeypatch):
    """The twin: the choice does follow the declaration, so serving cuda later needs no second edit."""
    leaf = LEAVES["device"]
    arg = type(leaf.arg)(help="d", served=("cpu", "cuda"), resolvable=True)
    monkeypatch.setitem(device_hook.LEAVES, "device", Leaf("device", "device", leaf.type, None, arg, "str"))
    monkeypatch.setattr(device_hook, "is_cuda", lambda: True)
    assert device_hook.best_served_device() == "cuda"
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "1")
    assert device_hook.best_served_device() == "cpu"


def test_default_max_running_requests_are_bounded_by_slot_table_and_pool():
    assert default_max_running_requests(512, None) == 256
    assert default_max_running_requests(131072, None) == 64
    assert default_max_running_requests(1 << 30, None) == 16
    assert default_max_running_requests(512, 10) == 10


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"tp_size": 4, "attn_dp_size": 3},
            r"tp_size % \(attn_dp_size \* attn_cp_size\) == 0.*--attn-dp-size 3",
        ),
        ({"tp_size": 4, "attn_cp_size": 8}, r"--tp-size 4, --attn-dp-size 1, --attn-cp-size 8"),
        ({"tp_size": 4, "moe_dp_size": 3}, r"tp_size % moe_dp_size == 0.*--tp-size 4, --moe-dp-size 3"),
        ({"tp_size": 4, "ep_size": 4, "moe_dp_size": 2}, r"ep_size \* moe_dp_size <= tp_size.*4.*2.*4"),
        ({"tp_size": 6, "ep_size": 4}, r"tp_size % \(ep_size \* moe_dp_size\) == 0"),
        ({"tp_size": 4, "dcp_size": 3}, r"attn_tp_size % dcp_size == 0.*width 4, --dcp-size 3"),
        ({"node_rank": 1}, r"0 <= node_rank < nnodes.*--node-rank 1, --nnodes 1"),
    ],
)
def test_a_wrong_layout_is_refused_before_the_model_is_opened(settings, words):
    record = ServerArgs.from_kwargs(model_path="/no/such/folder", **settings)
    with pytest.raises(ValueError, match=words):
        resolve(record)


def test_a_right_layout_resolves(resolved):
    record = resolved(tp_size=8, attn_dp_size=2, attn_cp_size=2, ep_size=4, moe_dp_size=2, dcp_size=2)
    assert result(record, "dp_size") == 2


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_attention_dp_over_one_replica_warns_and_does_nothing(resolved, caplog):
    with caplog.at_level(logging.WARNING):
        record = resolved(enable_dp_attention=True)
    assert "--enable-dp-attention has no effect" in caplog.text
    assert result(record, "enable_dp_attention") is False


def test_a_head_of_its_own_replica_needs_replicas(resolved, caplog):
    with caplog.at_level(logging.WARNING):
        record = resolved(enable_dp_lm_head=True)
    assert "--enable-dp-lm-head has no effect without attention data parallelism" in caplog.text
    assert result(record, "enable_dp_lm_head") is False
    caplog.clear()
    record = resolved(tp_size=2, attn_dp_size=2, enable_dp_lm_head=True)
    assert "dp-lm-head" not in caplog.text
    assert result(record, "enable_dp_lm_head") is True


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"page_size": 0}, "--page-size must be at least 1, got 0"),
        ({"chunked_prefill_size": 0}, "--chunked-prefill-size must be at least 1, or -1, got 0"),
        ({"port": 70000}, "--port must be at least 0 and at most 65535, got 70000"),
        ({"tp_size": -1}, "--tp-size must be at least 1, got -1"),
        ({"mem_fraction_static": 1.5}, "--mem-fraction-static must be at least 0 and at most 1"),
        ({"mem_fraction_static": float("nan")}, "--mem-fraction-static must be a number"),
        ({"schedule_policy": "fifo"}, "--schedule-policy 'fifo' is not one of fcfs, lpm"),
        ({"max_total_tokens": 0}, "--max-total-tokens must be at least 1"),
    ],
)
def test_a_value_outside_its_limits_is_refused(settings, words):
    with pytest.raises(ValueError, match=words):
        resolve(ServerArgs(model_path="/no/such/folder", **settings))


def test_all_wrong_values_are_named_at_once():
    with pytest.raises(ValueError, match=r"(?s)--port.*--page-size|--page-size.*--port"):
        resolve(ServerArgs(model_path="m", page_size=0, port=-1))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"context_length": 1024}, "context_length 1024 is above max_position_embeddings 512"),
        ({"quantization": "gguf"}, "--quantization gguf needs a GGUF file"),
        ({"quantization": "awq"}, "--quantization awq is not served yet"),
        ({"revision": "main"}, "--revision main is not served yet; download the revision"),
        ({"load_format": "pt"}, "--load-format pt is not served yet; convert the checkpoint"),
        ({"ssl_keyfile": "k.pem"}, "--ssl-keyfile is given without --ssl-certfile"),
        ({"ssl_keyfile": "k.pem", "ssl_certfile": "c.pem"}, "--ssl-keyfile k.pem is not a file"),
        ({"api_key": " "}, "--api-key is empty"),
        ({"served_model_name": ""}, "--served-model-name is empty"),
        ({"fastapi_root_path": "x"}, "--fastapi-root-path must begin with /"),
        ({"json_model_override_args": "[1]"}, "json_model_override_args must be a JSON object"),
    ],
)
def test_what_a_start_would_trip_over_is_refused(resolved, settings, words):
    with pytest.raises(ValueError, match=words):
        resolved(**settings)


def test_a_certificate_that_cannot_be_used_is_refused_before_anything_starts(resolved, tmp_path):
    """It was told by the web server, without the flags, after the ranks had started."""
    broken = tmp_path / "broken.pem"
    broken.write_text("no certificate")
    with pytest.raises(
        ValueError, match=f"--ssl-certfile {broken} and --ssl-keyfile {broken} cannot be used"
    ):
        resolved(ssl_keyfile=str(broken), ssl_certfile=str(broken))


def test_without_a_tokenizer_none_is_looked_for(resolved):
    assert result(resolved(skip_tokenizer_init=True), "tokenizer_path") is None


@pytest.mark.parametrize("wrong", [{"top_p": 0}, {"temperature": "hot"}, {"repetition_penalty": -1}])
def test_wrong_defaults_of_the_model_refuse_the_start_and_not_every_request(resolved, model_folder, wrong):
    (model_folder / "generation_config.json").write_text(json.dumps(wrong))
    with pytest.raises(ValueError, match=f"generation_config.json: {next(iter(wrong))}.*--sampling-defaults"):
        resolved()
    assert result(resolved(sampling_defaults="openai"), "sampling_defaults") == "openai"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"tp_size": "2"}, "--tp-size got '2'"),
        ({"tp_size": None}, "got None"),
        ({"api_key": 7}, "--api-key got 7"),
        ({"context_length": [1]}, r"--context-length got \[1\]"),
    ],
)
def test_a_record_that_a_program_built_itself_is_checked_for_types(settings, words):
    """`ServerArgs(...)` takes what it is given; the door does not."""
    with pytest.raises(ValueError, match=words):
        resolve(ServerArgs(model_path="m", **settings))


TORN = "/data/caf\udce9"  # what Python makes of an argument whose bytes are no UTF-8


def text_settings():
    """Every field that takes text, alone or in a list or an object, with such a text in it."""
    shapes = {"str": ("text", TORN), "list": (["text"], [TORN]), "object": ({"key": "text"}, {"key": TORN})}
    for leaf in LEAVES.values():
        for shape, (plain, torn) in shapes.items():
            with contextlib.suppress(msgspec.ValidationError):
                msgspec.convert(plain, leaf.type)
                yield pytest.param(leaf, torn, id=f"{leaf.name}-{shape}")


@pytest.mark.parametrize(("leaf", "value"), list(text_settings()))
def test_bytes_that_are_no_utf8_are_refused_with_their_flag(leaf, value):
    """The message to the ranks cannot carry them, and its error would name neither flag nor cure."""
    with pytest.raises(ValueError, match="is not UTF-8; write it in UTF-8") as caught:
        resolve(ServerArgs(**{"model_path": "m", leaf.name: value}))
    (sentence,) = [line for line in str(caught.value).splitlines() if "UTF-8" in line]
    said = "" if leaf.arg.secret else r" '/data/caf\xe9'"
    assert sentence.startswith(f"{leaf.label}{said} is not") and sentence.isprintable()


def test_text_that_no_message_carries_would_pass_without_that_check(resolved, monkeypatch):
    """The twin: the record resolves, and a rank cannot be told."""
    monkeypatch.setattr(values_hook, "_not_utf8", lambda leaf, value: None)
    record = resolved(served_model_name=TORN)
    with pytest.raises(UnicodeEncodeError):
        pack_server_args(record)


@pytest.mark.parametrize("name", ["model_path", "tp_size", "default_chat_template_kwargs", "lora_paths"])
def test_keywords_that_are_no_utf8_are_refused_by_name_whatever_they_should_be(name):
    """Their conversion fails before the record is there to be checked."""
    with pytest.raises(ValueError, match=r"(?i)utf-?8") as caught:
        resolve(ServerArgs.from_kwargs(**{"model_path": "m", name: TORN}))
    assert LEAVES[name].label in str(caught.value) and not isinstance(caught.value, UnicodeError)


@pytest.mark.parametrize("half", ["\ud83d", "\udce9\ud83d"])
def test_half_a_surrogate_pair_is_shown_too(half):
    with pytest.raises(ValueError, match=r"--host '.*\\ud83d' is not UTF-8"):
        resolve(ServerArgs(model_path="m", host=half))


@pytest.mark.parametrize("number", [2**63, -(2**70), 10**400])
def test_a_number_that_no_message_carries_is_refused_and_not_shown_whole(number):
    with pytest.raises(ValueError, match="--max-total-tokens must") as caught:
        resolve(ServerArgs(model_path="m", max_total_tokens=number))
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("number", [float("inf"), float("-inf"), float("nan")])
def test_a_number_that_json_cannot_show_is_refused(number):
    with pytest.raises(ValueError, match="--watchdog-timeout must be a number that is finite"):
        resolve(ServerArgs(model_path="m", watchdog_timeout=number))


def test_more_attention_ranks_than_query_heads_are_refused_with_the_numbers(resolved):
    """The model has 4 query heads: what does not divide is padded, what can only be padding is refused."""
    for width in (2, 3, 4):
        resolved(tp_size=width)
    resolved(tp_size=8, dp_size=2, enable_dp_attention=True)
    with pytest.raises(
        ValueError, match=r"5 ranks \(--tp-size 5, .* 4 query heads .* at least 1 .* at most 4"
    ):
        resolved(tp_size=5)
    with pytest.raises(ValueError, match=r"8 ranks .*--attn-dp-size 2.* at most 8, or raise --attn-dp-size"):
        resolved(tp_size=16, dp_size=2, enable_dp_attention=True)
