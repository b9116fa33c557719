"""Which levels run here and how: a level that is left out by mistake would be tested nowhere."""

import pathlib
import re
import sys

import isa_levels
import pytest

PACKAGE = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(PACKAGE.parent / "scripts"))

import run_kernel_tests

AVX2 = ["sse2", "avx", "avx2", "fma", "f16c"]
AVX512 = [*AVX2, "avx512f", "avx512bw", "avx512dq", "avx512vl"]


@pytest.mark.parametrize(
    ("flags", "best"),
    [
        ([], "base"),
        ([flag for flag in AVX2 if flag != "f16c"], "base"),
        (AVX2, "avx2"),
        ([flag for flag in AVX512 if flag != "avx512vl"], "avx2"),
        ([*AVX512, "avx512_vnni"], "avx512"),
        ([*AVX512, "avx512_vnni", "avx512_bf16"], "avx512_vnni_bf16"),
    ],
)
def test_the_flags_of_a_processor_say_its_levels(flags, best):
    assert isa_levels.levels_of(flags)[-1] == best


def test_a_level_is_tested_where_it_runs_and_else_a_sentence_says_why_not(monkeypatch):
    monkeypatch.delenv("SGL_KERNEL_QEMU", raising=False)
    monkeypatch.setattr(isa_levels, "supported_levels", lambda: ["base", "avx2"])
    monkeypatch.setattr(isa_levels, "emulation", lambda: {"emulated": [], "lacking": {}})
    assert isa_levels.levels_to_test() == ["base", "avx2"]
    assert "no avx512; `make kernel-tests` emulates it" in isa_levels.why_untested("avx512")
    says = {"emulated": ["avx512"], "lacking": {"avx512_vnni_bf16": ["_mm512_dpbusd_epi32"]}}
    monkeypatch.setattr(isa_levels, "emulation", lambda: says)
    assert isa_levels.levels_to_test() == ["base", "avx2", "avx512"]
    assert "lacks _mm512_dpbusd_epi32, which avx512_vnni_bf16" in isa_levels.why_untested("avx512_vnni_bf16")
    monkeypatch.setenv("SGL_KERNEL_QEMU", "/usr/bin/qemu-x86_64")
    assert isa_levels.levels_to_test() == ["base", "avx2"] == list(isa_levels.QEMU_PROCESSORS)


LOG = """\
[1/3] Building CXX object CMakeFiles/kernels_avx2.dir/csrc/cpu/norm.cpp.o
FAILED: [code=1] CMakeFiles/kernels_avx512.dir/csrc/cpu/norm.cpp.o
g++ -DSGL_ISA=avx512 norm.cpp
vec_avx512.h:41:96: error: \u2018_mm512_roundscale_ps\u2019 was not declared in this scope; did you mean
vec_avx512.h:43:10: error: there are no arguments to '_mm512_scalef_ps' that depend on a template parameter
FAILED: CMakeFiles/kernels_base.dir/csrc/cpu/norm.cpp.o
norm.cpp:3:1: error: expected ';' before 'Vec'
dot_avx512.h:86:82: error: macro "_mm512_add_epi32" passed 4 arguments, but takes just 2
dot_avx512.h:86:19: error: \u2018_mm512_add_epi32\u2019 was not declared in this scope
"""


def test_what_the_emulation_lacks_is_read_from_the_compilers_words_and_no_other_mistake_is():
    found = run_kernel_tests.lacking_instructions(LOG)
    assert found == {"avx512": ["_mm512_roundscale_ps", "_mm512_scalef_ps"], "base": []}


def sources():
    """What is compiled once for each level, by name: the sources that the build lists, and the headers."""
    listed = re.search(r"set\(ISA_SOURCES (.*?)\)", (PACKAGE / "CMakeLists.txt").read_text(), re.DOTALL)
    files = [*(PACKAGE / name for name in listed[1].split()), *(PACKAGE / "csrc/cpu").glob("*.h")]
    return {file.name: file.read_text(encoding="utf-8") for file in files}


def spelt_outside(texts):
    """Files that hold instructions, or vector registers, which an emulated build could not have."""
    one = re.compile(r'\basm\b(?!\("" : "\+r"\()|immintrin|__builtin_ia32')
    return [name for name, text in texts.items() if one.search(text)]


def test_what_only_a_processor_can_do_is_spelt_in_one_file():
    texts = sources()
    assert (
        spelt_outside(texts) == ["x86.h"] and {"x86_emulated.h", "attention.cpp", "norm.cpp"} <= texts.keys()
    )
    assert texts["x86.h"].count("  asm(") == texts["x86.h"].count("defined(SGL_EMULATED)") - 1


def test_an_instruction_that_is_spelt_elsewhere_is_noticed():
    planted = {"x86.h": "", "norm.cpp": 'asm("vaddps %0, %0, %0" : "+v"(x));', "reduce.cpp": "a + b"}
    planted |= {"linear.h": 'asm("" : "+r"(weight));', "moe.cpp": 'asm("" : "+v"(keys));'}
    assert spelt_outside(planted) == ["norm.cpp", "moe.cpp"]


def test_without_qemu_its_target_is_refused_with_a_sentence(monkeypatch):
    monkeypatch.setattr(run_kernel_tests.shutil, "which", lambda name: None)
    with pytest.raises(SystemExit, match="qemu-x86_64 was not found: install qemu-user"):
        run_kernel_tests.under_qemu(None)
