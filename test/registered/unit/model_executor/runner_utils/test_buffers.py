"""Static buffers are written in place, and nothing of a larger batch stays behind a smaller one."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=1, suite="unit-cpu")

import pytest
import torch

from sglang.srt.model_executor.runner_utils.buffers import BufferSpec, StaticBuffers

SPECS = [
    BufferSpec("ids", rows=2),
    BufferSpec("seq_lens", padding=7),
    BufferSpec("mask", dtype=torch.bool, shape=(2, 3), padding=True),
    BufferSpec("hidden", dtype=torch.float32, rows=2, shape=(4,)),
]


def buffers():
    return StaticBuffers(SPECS, 5, torch.device("cpu"))


def values(count, number=1):
    return {spec.name: torch.full((count * spec.rows, *spec.shape), number).to(spec.dtype) for spec in SPECS}


def test_every_buffer_is_written_in_place_and_padded_up_to_the_size():
    static = buffers()
    before = {name: view.data_ptr() for name, view in static.views(5).items()}
    for count, size in ((5, 5), (3, 4), (1, 2), (0, 5), (4, 4)):
        static.write(values(count, 3), count, size)
        for spec in SPECS:
            view = static.views(size)[spec.name]
            assert view.data_ptr() == before[spec.name]
            assert view.shape == (size * spec.rows, *spec.shape)
            assert torch.equal(view[: count * spec.rows], values(count, 3)[spec.name])
            assert (view[count * spec.rows :] == spec.padding).all(), spec.name


def test_a_size_that_is_reset_holds_padding_only():
    static = buffers()
    static.write(values(5), 5, 5)
    static.reset(4)
    for spec in SPECS:
        assert (static.views(4)[spec.name] == spec.padding).all()
        assert (static.views(5)[spec.name][4 * spec.rows :] == 1).all()


@pytest.mark.parametrize("change", ["missing", "unknown", "shape"])
def test_a_value_for_each_buffer_is_needed_and_nothing_is_written_without(change):
    static = buffers()
    given = values(3)
    if change == "missing":
        del given["hidden"]
    elif change == "unknown":
        given["hiden"] = given["hidden"]
    else:
        given["ids"] = given["ids"][:-1]
    with pytest.raises(RuntimeError, match=r"static buffers of 3 requests take .* and were given"):
        static.write(given, 3, 4)
    assert not static.views(5)["ids"].any()


def test_two_buffers_of_one_name_are_refused():
    with pytest.raises(ValueError, match=r"\['ids', 'ids'\]"):
        StaticBuffers([SPECS[0], SPECS[0]], 2, torch.device("cpu"))
