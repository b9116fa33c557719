"""Questions about the machine: answered without torch, and from the right words."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=4, suite="unit-cpu")

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from sglang.srt import utils
from sglang.srt.platforms import base, cpu, cpu_count, cpu_has_bf16, device, is_cuda


def test_the_platform_is_asked_without_loading_torch():
    code = (
        "import sys; from sglang.srt.platforms import is_cuda, is_cpu_only, cpu_has_bf16;"
        "is_cuda(); is_cpu_only(); cpu_has_bf16(); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


MEMORY = """
import ctypes, sys
from sglang.srt.platforms import return_free_memory

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
pieces = [libc.malloc(60000) for _ in range(2000)]
for piece in pieces:
    ctypes.memset(piece, 1, 60000)
for piece in pieces[:-1]:  # the last one keeps the heap from shrinking by itself
    libc.free(piece)
before = resident()
if sys.argv[1] == "returned":
    return_free_memory()
print(before - resident())
"""


@pytest.mark.parametrize("is_returned", [True, False])
def test_freed_memory_is_returned_where_one_asks_for_it(is_returned):
    words = [sys.executable, "-c", MEMORY, "returned" if is_returned else "kept"]
    given_back = int(subprocess.run(words, check=True, capture_output=True, text=True).stdout)
    assert (given_back > 60_000_000) == is_returned


def test_the_utils_name_is_the_platform_question():
    assert utils.is_cuda is is_cuda


@pytest.mark.parametrize(
    ("text", "flag", "there"),
    [
        ("processor : 0\nflags\t\t: fpu avx2 avx512_bf16\n", "avx512_bf16", True),
        ("processor : 0\nFeatures\t: fp asimd bf16\n", "bf16", True),
        ("processor : 0\nflags : fpu avx2\n", "avx512_bf16", False),
        ("", "avx2", False),
    ],
)
def test_processor_features_are_read_from_either_word(text, flag, there):
    assert (flag in cpu.parse_cpu_flags(text)) is there


@pytest.mark.parametrize(("flags", "answer"), [({"amx_bf16"}, True), ({"bf16"}, True), ({"avx512f"}, False)])
def test_bf16_needs_an_instruction_that_multiplies_it(monkeypatch, flags, answer):
    monkeypatch.setattr(cpu, "cpu_flags", lambda: frozenset(flags))
    assert cpu_has_bf16() is answer


def test_cores_are_counted_by_affinity(monkeypatch):
    monkeypatch.setattr(cpu.os, "sched_getaffinity", lambda pid: {1, 5})
    assert cpu_count() == 2


@pytest.mark.parametrize(
    ("build", "card", "answer"), [("13.0", True, True), ("13.0", False, False), (None, True, False)]
)
def test_with_torch_loaded_it_is_torch_that_answers(monkeypatch, build, card, answer):
    torch = SimpleNamespace(
        version=SimpleNamespace(cuda=build), cuda=SimpleNamespace(is_available=lambda: card)
    )
    monkeypatch.setitem(sys.modules, "torch", torch)
    assert is_cuda() is answer


@pytest.mark.parametrize(
    ("suffix", "driver", "answer"),
    [
        ("cu130", True, True),
        ("", True, True),
        ("cpu", True, False),
        ("rocm7.1", True, False),
        ("cu130", False, False),
    ],
)
def test_without_torch_a_driver_and_a_build_are_needed(monkeypatch, tmp_path, suffix, driver, answer):
    path = tmp_path / "version"
    if driver:
        path.write_text("x")
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setattr(base, "_NVIDIA", path)
    monkeypatch.setattr(base, "_build_suffix", lambda: suffix)
    assert is_cuda() is answer


def test_a_model_lives_on_the_cpu_unless_a_device_is_published():
    assert device.model_device(None) == device.model_device("cpu") == torch.device("cpu")
    assert device.accelerator_device(1).index == 1 and device.accelerator_device(1).type != "cpu"
