"""What is declared, and that a declaration cannot contradict itself or another one."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="unit-cpu")

import inspect

import msgspec
import pytest

from sglang.srt.arg_groups.arg_utils import NS, A, Arg, Derived, Namespace, derived_of, leaves_of
from sglang.srt.arg_groups.fields import DERIVED, INPUTS, LEAVES, NAMESPACES, leaves_in
from sglang.srt.arg_groups.fields.exec_ import Exec
from sglang.srt.arg_groups.fields.parallel import Parallel
from sglang.srt.arg_groups.parsing.spellings import SPELLINGS
from sglang.srt.runtime_context import context
from sglang.srt.server_args import ServerArgs


def test_the_record_has_exactly_the_declared_fields():
    """A field that only the record had would be on no command line, in no namespace and on no page."""
    assert list(ServerArgs.__struct_fields__) == list(LEAVES)


def test_a_derived_name_is_no_field_of_the_record():
    for quotients in DERIVED.values():
        assert not set(quotients) & set(ServerArgs.__struct_fields__)


def test_a_derived_name_reads_only_declared_fields():
    for namespace, quotients in DERIVED.items():
        for name, quotient in quotients.items():
            assert set(quotient.inputs) <= set(LEAVES), f"{namespace}.{name}"


def test_every_leaf_belongs_to_one_declared_namespace():
    assert sum(len(leaves_in(namespace)) for namespace in NAMESPACES) == len(LEAVES)


def test_each_part_of_exec_is_published_under_its_own_name():
    """The type of `get_exec()` is written by hand; a wrong name there would type-check and fail when read."""
    parts = inspect.get_annotations(Exec)
    assert {name: cls.NAMESPACE for name, cls in parts.items()} == {name: f"exec.{name}" for name in parts}


def test_each_namespace_is_read_as_the_class_that_declares_it():
    declared = {path: cls.__name__ for path, cls in NAMESPACES.items() if "." not in path}
    declared |= {"exec": "Exec", "parallel": "ParallelContext"}
    read = {path: getattr(context, f"get_{path}").__annotations__["return"] for path in declared}
    assert read == declared


def test_every_default_has_its_declared_type():
    for leaf in LEAVES.values():
        if not leaf.required:
            assert msgspec.convert(msgspec.to_builtins(leaf.default), leaf.type) == leaf.default, leaf.name


def test_every_default_and_served_value_is_a_legal_choice():
    for leaf in LEAVES.values():
        if leaf.arg.choices is None:
            continue
        served = leaf.arg.served if isinstance(leaf.arg.served, tuple) else ()
        for value in (leaf.default, *served):
            assert value is None or value in leaf.arg.choices, f"{leaf.name}: {value}"


def test_only_the_model_must_be_given():
    assert [leaf.name for leaf in LEAVES.values() if leaf.required] == ["model_path"]


def test_help_is_a_sentence():
    for leaf in LEAVES.values():
        assert leaf.arg.help.endswith("."), leaf.name


def test_a_secret_field_is_marked():
    """Information routes leave out what is marked, so a key that loses its mark would be published."""
    assert {leaf.name for leaf in LEAVES.values() if leaf.arg.secret} == {"api_key", "admin_api_key"}
    unmarked = {name for name in LEAVES if "key" in name.split("_")} - {"api_key", "admin_api_key"}
    assert unmarked == set()


def test_every_spelling_leads_to_one_declaration():
    for flag, target in SPELLINGS.items():
        assert flag.startswith("--")
        assert flag in target.flags


def test_an_input_is_no_field():
    assert not set(INPUTS) & set(LEAVES)


def test_a_field_without_its_arg_is_refused():
    class Broken(Namespace, ns=NS("broken")):
        width: int = 1

    with pytest.raises(TypeError, match=r"Broken\.width must be declared"):
        leaves_of(Broken)


def test_a_foreign_record_may_name_the_place_in_each_annotation():
    class Foreign:
        page_size: A[int | None, Arg(help="p", resolvable=True), NS("exec.kernel")] = None
        twice = Derived("page_size * 2", ("page_size",))

    (leaf,) = leaves_of(Foreign).values()
    assert (leaf.name, leaf.namespace, leaf.type, leaf.arg.resolvable) == (
        "page_size",
        "exec.kernel",
        int | None,
        True,
    )
    assert list(derived_of(Foreign)) == ["twice"]


def test_the_quotients_stand_beside_the_widths_they_follow_from():
    assert list(derived_of(Parallel)) == [
        "attn_dp_size",
        "attn_tp_size",
        "moe_ep_size",
        "moe_tp_size",
        "dcp_enabled",
        "attn_dcp_size",
    ]


@pytest.mark.parametrize(
    ("name", "flags", "default", "namespace"),
    [
        ("tp_size", ("--tp-size", "--tensor-parallel-size", "--tp"), 1, "parallel"),
        ("pp_size", ("--pp-size", "--pipeline-parallel-size", "--pp"), 1, "parallel"),
        ("dp_size", ("--dp-size", "--data-parallel-size", "--dp"), 1, "parallel"),
        ("ep_size", ("--ep-size", "--expert-parallel-size", "--ep"), 1, "parallel"),
        ("port", ("--port",), 30000, "serving"),
        ("chunked_prefill_size", ("--chunked-prefill-size",), None, "schedule"),
        ("max_prefill_tokens", ("--max-prefill-tokens",), 16384, "schedule"),
        ("attention_backend", ("--attention-backend",), None, "exec.kernel"),
        ("moe_runner_backend", ("--moe-runner-backend",), "auto", "exec.moe"),
        ("enable_hierarchical_cache", ("--enable-hierarchical-cache", "--enable-hicache"), False, "memory"),
        ("dist_init_addr", ("--dist-init-addr", "--nccl-init-addr"), None, "parallel"),
        ("_speculative_draft_quantization_explicitly_set", (), None, "spec"),
        (
            "speculative_draft_model_path",
            ("--speculative-draft-model-path", "--speculative-draft-model"),
            None,
            "spec",
        ),
        ("speculative_ngram_capacity", ("--speculative-ngram-capacity",), 10_000_000, "spec"),
    ],
)
def test_names_people_know(name, flags, default, namespace):
    leaf = LEAVES[name]
    assert (leaf.flags, leaf.default, leaf.namespace) == (flags, default, namespace)
