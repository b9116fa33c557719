"""The check of torch-free modules refuses a module that imports torch."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=15, suite="unit-cpu")

import check_torch_free as check


def test_the_server_side_imports_without_torch():
    assert check.find_offenders() == []


def test_a_module_that_needs_torch_is_refused_with_the_chain_of_imports():
    (offender,) = check.find_offenders(("sglang.srt.batch.forward_batch",))
    assert offender.startswith("sglang.srt.batch.forward_batch imports torch: ")
    assert "forward_batch.py:" in offender


def test_a_module_that_is_not_there_is_refused():
    """A renamed module must not pass as torch-free."""
    (offender,) = check.find_offenders(("sglang.srt.no_such_module",))
    assert "does not import" in offender
