"""The check of sizes refuses what is too long, and exceptions that are not needed."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="unit-cpu")

import pytest

import check_file_size as check

NONE: dict[str, tuple[int, str]] = {}


def function_of(lines: int) -> str:
    return "def f():\n" + "    x = 1\n" * (lines - 1)


def class_of(lines: int) -> str:
    return "class C:\n" + "".join(f"    a{i} = {i}\n" for i in range(lines - 1))


def test_this_tree_fits():
    assert check.find_offenders(check.ROOT) == []


@pytest.mark.parametrize(
    "tree", ["python/sglang/srt", "scripts", "test", "benchmark", "examples", "sgl-kernel/tests"]
)
def test_a_long_file_is_refused_in_every_tree_and_one_at_the_cap_is_not(plant, tree):
    plant(f"{tree}/long.py", "x = 1\n" * (check.FILE_CAP + 1))
    plant(f"{tree}/fits.py", "x = 1\n" * check.FILE_CAP)
    (offender,) = check.find_offenders(plant.root, NONE)
    assert f"{tree}/long.py: file of 601 lines, cap 600" in offender


def test_a_long_function_is_refused_and_one_at_the_cap_is_not(plant):
    plant("scripts/a.py", function_of(check.FUNCTION_CAP + 1))
    plant("scripts/b.py", function_of(check.FUNCTION_CAP))
    (offender,) = check.find_offenders(plant.root, NONE)
    assert "scripts/a.py::f: function of 81 lines, cap 80" in offender


def test_a_long_method_and_a_long_nested_function_are_found(plant):
    body = "".join("        x = 1\n" for _ in range(90))
    plant("scripts/a.py", f"class C:\n    async def f(self):\n{body}")
    plant("scripts/b.py", f"if True:\n    def g():\n{body}")
    offenders = check.find_offenders(plant.root, NONE)
    assert [o.partition(":")[2].partition(": ")[0] for o in offenders] == [":C.f", ":g"]


def test_a_long_class_is_refused_and_one_at_the_cap_is_not(plant):
    plant("scripts/a.py", class_of(check.CLASS_CAP + 1))
    plant("scripts/b.py", class_of(check.CLASS_CAP))
    (offender,) = check.find_offenders(plant.root, NONE)
    assert "scripts/a.py::C: class of 301 lines" in offender


def test_a_long_kernel_source_is_refused(plant):
    plant("sgl-kernel/csrc/cpu/norm.cpp", "int x;\n" * (check.CPP_FILE_CAP + 1))
    (offender,) = check.find_offenders(plant.root, NONE)
    assert "norm.cpp: C++ file of 501 lines, cap 500" in offender


def test_an_exception_has_a_cap_of_its_own(plant):
    plant("scripts/a.py", "x = 1\n" * 650)
    reason = "holds all getters by agreement"
    assert check.find_offenders(plant.root, {"scripts/a.py": (700, reason)}) == []
    (offender,) = check.find_offenders(plant.root, {"scripts/a.py": (640, reason)})
    assert "cap 640" in offender


def test_an_exception_that_is_not_needed_any_more_is_refused(plant):
    plant("scripts/a.py", "x = 1\n" * 20)
    (offender,) = check.find_offenders(plant.root, {"scripts/a.py": (700, "holds all getters by agreement")})
    assert "delete its exception" in offender


def test_an_exception_for_what_is_not_there_is_refused(plant):
    (offender,) = check.find_offenders(
        plant.root, {"scripts/gone.py": (700, "holds all getters by agreement")}
    )
    assert "not there" in offender


def test_an_exception_without_a_reason_is_refused(plant):
    plant("scripts/a.py", "x = 1\n" * 650)
    (offender,) = check.find_offenders(plant.root, {"scripts/a.py": (700, "")})
    assert "gives no reason" in offender
