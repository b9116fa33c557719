"""The kernels' own threads: bits of one thread, errors, several callers, forks, threads that stand still."""

import contextlib
import ctypes
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
from test_attention import make_case, with_out
from test_linear import BlockForm, block_weight
from test_linear_int8 import weight_of

from sgl_kernel import fused_add_rmsnorm, rmsnorm, rmsnorm_heads
from sgl_kernel.argmax import argmax_rows
from sgl_kernel.attention import kv_shape, paged_attention, read_kv, store_kv
from sgl_kernel.elementwise import rotary_cos_sin, rotate_heads, silu_and_mul
from sgl_kernel.embedding import embed_panels, embed_rows
from sgl_kernel.linear import linear_blocks, linear_packed, pack_blocks, pack_panels
from sgl_kernel.linear_int8 import linear_int8, pack_int8
from sgl_kernel.record import CallList
from sgl_kernel.team import team_counts

PTRACE_SEIZE, PTRACE_INTERRUPT = 0x4206, 0x4207
PR_SET_PTRACER, PR_SET_PTRACER_ANY = 0x59616D61, -1


@contextlib.contextmanager
def torch_threads(count):
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def draw(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def linear_cases(rows):
    weight, blocks = draw(3000, 416), block_weight(BlockForm.Q4_MIN, 3000, 416)
    x = draw(rows, 416)
    return {
        "linear_packed": lambda: linear_packed(x, pack_panels(weight), None, torch.empty(rows, 3000)),
        "linear_packed bfloat16": lambda: linear_packed(
            x.bfloat16(), pack_panels(weight.bfloat16()), None, torch.empty(rows, 3000).bfloat16()
        ),
        "linear_blocks": lambda: linear_blocks(
            x, pack_blocks(blocks), None, torch.empty(rows, 3000), blocks.form
        ),
        "linear_int8": lambda: linear_int8(
            x, pack_int8(*weight_of(3000, 416)), None, torch.empty(rows, 3000)
        ),
    }


def row_cases(rows):
    x, table = draw(rows, 8, 64), draw(500, 512)
    numbers = torch.arange(rows) % 500
    cos, sin = torch.empty(2, rows, 64)

    def add_norm():
        residual = draw(rows, 512)
        fused_add_rmsnorm(x := table[numbers], residual, table[0], 1e-5)
        return x, residual

    def turn():
        rotary_cos_sin(numbers, draw(32).abs(), cos, sin)
        heads = x.clone()
        rotate_heads(heads, cos, sin)
        return heads, cos.clone(), sin.clone()

    def store():
        store_kv(x, x.neg(), cache := torch.zeros(kv_shape(8, rows, 64)), torch.arange(rows).flip(0))
        return cache

    def norm_heads():
        rmsnorm_heads(heads := x.clone(), table[0, :64].clone(), 1e-5)
        return heads

    return {
        "rmsnorm": lambda: rmsnorm(table[numbers], table[0], torch.empty(rows, 512), 1e-5),
        "fused_add_rmsnorm": add_norm,
        "rmsnorm_heads": norm_heads,
        "rotate": turn,
        "silu_and_mul": lambda: silu_and_mul(table[numbers], torch.empty(rows, 256)),
        "embed_rows": lambda: embed_rows(numbers, table, torch.empty(rows, 512)),
        "embed_panels": lambda: embed_panels(numbers, pack_panels(table), torch.empty(rows, 512), 500),
        "store_kv": store,
        "argmax_rows": lambda: argmax_rows(table[numbers]),
    }


def attention_cases():
    cases = {
        "a prompt": make_case((9, 3, 64), [(300, 300)], "float32"),
        "steps": make_case((9, 3, 64), [(500, 1)] * 9, "bfloat16"),
        "drafts": make_case((4, 2, 64), [(400, 12), (512, 12)], "float32", tail=12),
    }
    return {name: lambda case=case: paged_attention(*with_out(case)) for name, case in cases.items()}


FAMILIES = {
    "one row": lambda: linear_cases(1),
    "some rows": lambda: linear_cases(20),
    "many rows": lambda: linear_cases(301),
    "rows": lambda: row_cases(1001),
    "attention": attention_cases,
}


def answers_of_a_team(run):
    """Answers of `run` until one of them was given to the team.

    Where a worker has lost its core, the calls of the next tenth of a second are the caller's alone.
    """
    before, deadline = team_counts().calls, time.monotonic() + 60
    while team_counts().calls == before:
        assert time.monotonic() < deadline, "no call was given to the team"
        answer = run()
        yield [answer] if isinstance(answer, torch.Tensor) else answer


@pytest.mark.parametrize("family", FAMILIES)
def test_any_number_of_threads_gives_the_bits_of_one(family):
    for name, run in FAMILIES[family]().items():
        with torch_threads(1):
            before = team_counts()
            answer = run()
            wanted = [answer] if isinstance(answer, torch.Tensor) else answer
            assert team_counts() == before, name
        for threads in (2, 3, 4):
            with torch_threads(threads):
                for found in answers_of_a_team(run):
                    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True)), (
                        name
                    )


@pytest.mark.parametrize("at", [0, 1500, 2999])
def test_an_error_in_any_share_reaches_the_caller_and_the_next_call_is_sound(at):
    k, cache, slots = draw(3000, 4, 64), torch.zeros(kv_shape(4, 3000, 64)), torch.arange(3000)
    with torch_threads(3):
        slots[at] = 3008
        with pytest.raises(RuntimeError, match="slot 3008 of 3008"):
            store_kv(k, k, cache, slots)
        slots[at] = at
        store_kv(k, k, cache, slots)
    assert torch.equal(read_kv(cache, slots, 64)[:4], k.transpose(0, 1))


def test_callers_in_several_threads_have_their_own_answers():
    """One of them has the team at a time; the others compute alone."""
    weight = pack_panels(draw(600, 600))
    inputs = [draw(rows, 600) for rows in (1, 7, 150, 400)]
    with torch_threads(1):
        wanted = [linear_packed(x, weight, None, torch.empty(len(x), 600)) for x in inputs]
    wrong = []

    def call(number):
        torch.set_num_threads(3)
        for _ in range(60):
            out = linear_packed(inputs[number], weight, None, torch.empty(len(inputs[number]), 600))
            if not torch.equal(out, wanted[number]):
                wrong.append(number)

    with torch_threads(3):
        callers = [threading.Thread(target=call, args=(number,)) for number in range(4)]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join()
    assert wrong == []


def test_a_recorded_list_uses_as_many_threads_as_torch_has_when_it_plays():
    weight, x = pack_panels(draw(2000, 600)), draw(4, 600)
    outs = [torch.empty(4, 2000) for _ in range(50)]
    calls = CallList()
    with torch_threads(1), calls.recording():
        for out in outs:
            linear_packed(x, weight, None, out)

    def play():
        for out in outs:
            out.zero_()
        calls.play()
        return outs

    with torch_threads(1):
        before = team_counts()
        wanted = play()[0].clone()
        assert team_counts() == before
    with torch_threads(3):
        for _ in range(5):
            for found in answers_of_a_team(play):
                assert all(torch.equal(out, wanted) for out in found)


def workers():
    """Thread ids of the team's workers in this process."""
    found = []
    for task in pathlib.Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError):
            if (task / "comm").read_text() == "sgl_team\n":
                found.append(int(task.name))
    return found


def workers_asleep():
    """The same, when all of them sleep."""
    deadline = time.monotonic() + 60
    threads = workers()
    while any(
        pathlib.Path(f"/proc/self/task/{thread}/stat").read_text().split()[2] != "S" for thread in threads
    ):
        assert time.monotonic() < deadline, "a worker without work does not go to sleep"
    return threads


X, WEIGHT = draw(200, 600), pack_panels(draw(600, 600))


def product(threads):
    """An answer of a call that is worth a team."""
    out = torch.empty(200, 600)
    with torch_threads(threads):
        return linear_packed(X, WEIGHT, None, out)


def use_team(threads):
    """Whether such a call gives the bits of one thread."""
    return torch.equal(product(threads), product(1))


def test_one_thread_starts_none_and_a_team_is_made_at_the_first_need():
    script = (
        "import test_team as t\n"
        "counts = [len(t.workers())]\n"
        "for threads in (1, 3, 2): assert t.use_team(threads); counts.append(len(t.workers()))\n"
        "print(*counts, t.team_counts().workers)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=pathlib.Path(__file__).parent,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stdout.split() == ["0", "0", "2", "2", "2"]


def test_a_child_process_makes_a_team_of_its_own():
    wanted = product(3)
    assert len(workers()) >= 2
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        counts = [len(workers())]
        torch.set_num_threads(1)  # torch's own threads are not there either, and it would wait for them
        is_right = torch.equal(product(3), wanted)
        os.write(write, f"{is_right} {counts[0]} {len(workers())}".encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        assert pipe.read() == b"True 0 2"
    assert os.waitpid(child, 0)[1] == 0
    assert torch.equal(product(3), wanted)


def seconds_used(thread):
    return int(pathlib.Path(f"/proc/self/task/{thread}/schedstat").read_text().split()[0]) / 1e9


def test_workers_without_work_use_no_processor_time():
    assert use_team(4)
    weight, x, out = pack_panels(draw(600, 600)), draw(8, 600), torch.empty(8, 600)
    calls = CallList()
    with torch_threads(4):
        with calls.recording():
            linear_packed(x, weight, None, out)
        calls.play()
    before = {thread: seconds_used(thread) for thread in workers_asleep()}
    assert len(before) >= 3
    own = time.thread_time()
    while time.thread_time() - own < 0.3:
        product(1)
    assert all(seconds_used(thread) - used < 0.05 for thread, used in before.items())


STOPPER = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
threads = [int(one) for one in sys.argv[1:]]
for thread in threads:
    for request in (SEIZE, INTERRUPT):
        if libc.ptrace(request, thread, None, None) != 0:
            print("refused:", os.strerror(ctypes.get_errno()), flush=True)
            sys.exit()
    os.waitpid(thread, 0x40000000)
print("stopped", flush=True)
sys.stdin.read()
"""


def test_a_worker_that_stands_still_without_a_share_holds_nobody():
    """Its core may be somebody else's. Here a tracer holds all workers while they sleep."""
    assert use_team(3)
    ctypes.CDLL(None).prctl(PR_SET_PTRACER, ctypes.c_long(PR_SET_PTRACER_ANY), 0, 0, 0)
    script = STOPPER.replace("SEIZE", str(PTRACE_SEIZE)).replace("INTERRUPT", str(PTRACE_INTERRUPT))
    tracer = subprocess.Popen(
        [sys.executable, "-c", script, *map(str, workers_asleep())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        said = tracer.stdout.readline()
        if not said.startswith("stopped"):
            pytest.skip(f"this system lets nobody stop a thread: {said}")
        before = team_counts()
        with torch_threads(3):
            for run in (*linear_cases(20).values(), *attention_cases().values()):
                list(answers_of_a_team(run))
        assert team_counts().worker_shares == before.worker_shares
    finally:
        tracer.communicate()
    assert use_team(3)
