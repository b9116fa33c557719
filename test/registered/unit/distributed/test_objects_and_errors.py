"""What ranks say to each other as bytes, what a failed collective says to a person, and what is refused
before anything is sent."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=2, suite="unit-cpu")

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch

import pytest
import torch

from sglang.srt.distributed import communicators, frames, parallel_state
from sglang.srt.distributed.device_communicators.gloo_exchange import combine
from sglang.srt.distributed.errors import CollectiveError, TransportError
from sglang.srt.distributed.group_coordinator import GroupCoordinator


@pytest.mark.parametrize("size", [0, 1, 4000, 4083, 4084, 4085, 4086, 4087, 4088, 4089, 5000, 1_000_000])
def test_bytes_survive_at_every_edge_of_the_first_frame(size: int) -> None:
    value = {"b": bytes(range(256)) * (size // 256) + b"\xff" * (size % 256)}
    payload = frames.encode(value)
    first = frames.first_frame(payload)
    assert first.dtype == torch.uint8 and first.numel() == frames.FRAME_BYTES
    rest = frames.rest_frame(payload)
    assert rest.numel() == frames.rest_bytes(first) == max(0, len(payload) - frames.FRAME_BYTES + 8)
    assert frames.decode(first, rest if rest.numel() else None) == value


def test_plain_values_arrive_as_they_left_and_others_are_refused() -> None:
    value = {
        "a": [1, -1, 2**63 - 1, 1.5, None, True, "ü"],
        "nested": {"bytes": b"\0", "empty": [{}, []]},
        3: 4,
    }
    assert frames.decode(frames.first_frame(frames.encode(value)), None) == value
    for odd in (object(), torch.ones(1), {"f": len}):
        with pytest.raises(TypeError):
            frames.encode(odd)


def test_a_dict_of_tensors_is_described_in_plain_values() -> None:
    sent = {"t": torch.ones(2, 3, dtype=torch.bfloat16), "none": torch.empty(0, 4), "plain": {"step": 1}}
    table = frames.decode(frames.first_frame(frames.encode(frames.describe(sent))), None)
    assert table["t"] == ["tensor", [2, 3], "bfloat16", True]
    found = frames.unfold(table, lambda shape, dtype, on_cpu: torch.zeros(shape, dtype=dtype))
    assert found is not None and list(found) == list(sent) and found["plain"] == {"step": 1}
    assert found["t"].shape == (2, 3) and found["t"].dtype == torch.bfloat16
    assert found["none"].shape == (0, 4)
    assert [tensor.shape for tensor in frames.tensors_of(found)] == [(2, 3)], "an empty one does not travel"
    assert frames.describe(None) is None and frames.unfold(None, torch.zeros) is None
    with pytest.raises(ValueError, match="'float3', which torch does not have"):
        frames.unfold({"t": ["tensor", [1], "float3", True]}, lambda shape, dtype, on_cpu: torch.zeros(shape))


def test_half_precision_is_summed_wide_and_rounded_once() -> None:
    """1 + 2^-8 + 2^-8 is 1 in bf16 when each step rounds, and 1 + 2^-7 when only the sum does."""
    tiny = 2.0**-8
    pieces = [torch.tensor([value], dtype=torch.bfloat16) for value in (1.0, tiny, tiny)]
    assert combine(pieces, "sum").item() == 1.0 + 2 * tiny
    assert pieces[0].item() == 1.0, "what came in is not written"
    assert combine(pieces, "max").item() == 1.0 and combine(pieces, "min").item() == tiny
    whole = [torch.tensor([2**60 + 1]), torch.tensor([1]), torch.tensor([-1])]
    assert combine(whole, "sum").item() == 2**60 + 1, "integers stay integers"


def _error(cause: str, timeout_s: float | None = 7.5) -> CollectiveError:
    return CollectiveError(
        "all_reduce", group_name="tp", ranks=(2, 3), rank=3, timeout_s=timeout_s, cause=cause
    )


def test_a_failed_collective_names_who_what_where_and_the_flag() -> None:
    text = (
        "[/build/x/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:40651. This is "
        "typically caused by\nframe #0"
    )
    error = _error(text)
    assert str(error) == (
        "all_reduce over group 'tp' of world ranks [2, 3] failed on world rank 3: Connection closed by peer "
        "[127.0.0.1]:40651. A rank of this group died, hangs or takes other steps than the rest; if all are "
        "alive and merely slow, raise --dist-timeout (now 7.5 s)"
    )
    assert isinstance(error, RuntimeError)
    assert (error.operation, error.group_name, error.ranks, error.rank) == ("all_reduce", "tp", [2, 3], 3)
    assert "failed on world rank 3: no reason given. A rank" in str(_error("  \n"))
    assert str(_error("x", None)).endswith("raise --dist-timeout")


@pytest.fixture
def one_of_three() -> Any:
    """Rank 1 of 3 whose communicators must not be reached."""
    group = GroupCoordinator.__new__(GroupCoordinator)
    group.world_size, group.rank_in_group, group.group_name, group.ranks = 3, 1, "tp", [4, 5, 6]
    return group


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda g: g.all_reduce(torch.ones(2), "mean"), "one of sum, max, min, got 'mean'"),
        (
            lambda g: g.reduce_scatter(torch.ones(4, 3)),
            r"over 3 ranks.*dim 0 of \[4, 3\]; use reduce_scatterv",
        ),
        (lambda g: g.all_gatherv(torch.ones(2, 3), [2, 3, 1]), r"rank 1\): sizes \[2, 3, 1\].*of 2 rows"),
        (lambda g: g.all_gatherv(torch.ones(2, 3), [2, 2]), r"sizes \[2, 2\]"),
        (lambda g: g.reduce_scatterv(torch.ones(5, 3), [2, 2, 2]), r"sizes \[2, 2, 2\].*5 rows"),
        (lambda g: g.all_to_all(torch.ones(4)), "rows that the ranks divide; got 4"),
        (lambda g: g.all_to_all(torch.ones(3), [1, 1, 1]), "both out_sizes and in_sizes, or neither"),
        (lambda g: g.all_to_all(torch.ones(3), [1, 1], [1, 1, 1]), r"needs 3 out_sizes, got \[1, 1\]"),
        (lambda g: g.broadcast(torch.ones(3), 3), "src must be a rank of group 'tp', 0..2, got 3"),
        (lambda g: g.broadcast_object("x", -1), "src must be a rank of group 'tp', 0..2, got -1"),
        (lambda g: g.send_object("x", 1), "send_object: rank 1 is no other rank of group 'tp'"),
        (lambda g: g.recv_object(3), "recv_object: rank 3 is no other rank"),
        (lambda g: g.send_tensor_dict({}, -1), "send_tensor_dict: rank -1 is no other rank"),
        (lambda g: g.recv_tensor_dict(1), "recv_tensor_dict: rank 1 is no other rank"),
    ],
)
def test_a_callers_own_mistake_is_a_value_error_before_anything_is_sent(
    one_of_three: Any, call: Any, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        call(one_of_three)


def test_a_group_without_communicators_does_not_answer_unreduced(one_of_three: Any) -> None:
    """The wrong answer would be the tensor itself."""
    tensor = torch.ones(3)
    for call in (
        lambda: one_of_three.all_reduce(tensor),
        lambda: one_of_three.all_gather(tensor),
        lambda: one_of_three.reduce_scatter(tensor),
        lambda: one_of_three.broadcast(tensor),
        lambda: one_of_three.broadcast_object("x"),
        lambda: one_of_three.all_gather_object("x"),
    ):
        with pytest.raises(RuntimeError, match="over 3 ranks: this group has no communicator"):
            call()


def test_the_limit_of_a_group_reaches_its_communicator() -> None:
    made: list[dict[str, Any]] = []

    def new_group(ranks: list[int], **named: Any) -> object:
        made.append(
            {"ranks": ranks, "seconds": named["timeout"].total_seconds(), "backend": named["backend"]}
        )
        return SimpleNamespace()

    with (
        patch("torch.distributed.get_rank", return_value=2),
        patch("torch.distributed.new_group", side_effect=new_group),
        patch.object(communicators.MarkedBarrier, "wait"),
        patch.object(communicators, "cpu_transport"),
    ):
        on_cpu = GroupCoordinator([[0, 1], [2, 3]], 0, "gloo", group_name="tp", timeout_s=9)
        assert made == [{"ranks": r, "seconds": 9.0, "backend": "gloo"} for r in ([0, 1], [2, 3])]
        assert on_cpu.device_group is on_cpu.cpu_group, "one communicator where one is enough"
        made.clear()
        apart = GroupCoordinator([[2, 3]], 0, "nccl", group_name="tp", timeout_s=9)
        assert [entry["backend"] for entry in made] == ["gloo", "nccl"]
        assert apart.device_group is not apart.cpu_group
        made.clear()
        GroupCoordinator([[0], [1], [2], [3]], 0, "gloo", group_name="moe_tp")
        assert made == []


@pytest.fixture
def pretended_groups() -> Iterator[list[Any]]:
    """torch makes and destroys groups that are only said to be there, on rank 0; what stands is listed."""
    standing: list[Any] = []

    def new_group(ranks: list[int], **named: Any) -> Any:
        if ranks == [4, 5]:
            raise RuntimeError("nobody is there")
        standing.append(MagicMock(ranks=ranks))
        return standing[-1]

    def destroy(group: Any = None) -> None:
        standing.remove(group) if group is not None else standing.clear()

    with (
        patch("torch.distributed.get_rank", return_value=0),
        patch("torch.distributed.is_initialized", return_value=True),
        patch("torch.distributed.new_group", side_effect=new_group),
        patch.object(communicators.MarkedBarrier, "wait"),
        patch.object(communicators, "cpu_transport"),
        patch("torch.distributed.destroy_process_group", side_effect=destroy),
    ):
        yield standing
        communicators.forget_all()


def _coordinator(*groups: list[int], timeout_s: float = 9) -> GroupCoordinator:
    return GroupCoordinator(groups, 0, "gloo", group_name="tp", timeout_s=timeout_s)


def test_a_communicator_goes_with_the_last_group_that_uses_it(pretended_groups: list[Any]) -> None:
    first, second = _coordinator([0, 1], [2, 3]), _coordinator([0, 1], [2, 3])
    mine, other = pretended_groups
    assert first.cpu_group is second.cpu_group is mine
    first.destroy()
    first.destroy()
    assert pretended_groups == [mine, other] and second.cpu_group is mine and first.cpu_group is None
    second.destroy()
    # One that this rank is no member of is not its to destroy; the next build makes it again, on all ranks.
    assert pretended_groups == [other]
    _coordinator([0, 1], [2, 3])
    assert [group.ranks for group in pretended_groups] == [[2, 3], [0, 1], [2, 3]]


def test_groups_of_other_limits_share_nothing(pretended_groups: list[Any]) -> None:
    """A shared limit would be that of whoever came first."""
    first, patient, again = _coordinator([0, 1]), _coordinator([0, 1], timeout_s=50), _coordinator([0, 1])
    assert [first.cpu_group, patient.cpu_group] == pretended_groups and again.cpu_group is first.cpu_group


def test_a_group_that_could_not_be_built_keeps_nothing(pretended_groups: list[Any]) -> None:
    for _ in range(2):
        with pytest.raises(CollectiveError, match="nobody is there"):
            _coordinator([0, 1], [4, 5])
        assert pretended_groups == []


def test_a_new_world_finds_no_communicator_of_the_old_one(pretended_groups: list[Any]) -> None:
    """A group that outlived its world, and is given back late, must not take down one of the new world."""
    stale = _coordinator([0, 1])
    parallel_state.destroy_distributed_environment()
    fresh = _coordinator([0, 1])
    assert fresh.cpu_group is not stale.cpu_group
    stale.destroy()
    assert fresh.cpu_group in pretended_groups


REFUSAL = "sgl_kernel has interface 1 and this engine needs 2"


@pytest.mark.parametrize("is_marked", [False, True])
def test_only_what_the_transport_says_while_a_group_is_built_is_told_as_a_lost_peer(
    pretended_groups: list[Any], is_marked: bool
) -> None:
    """Kernels of another interface, say, are this rank's own failure: no peer died, no limit is too short."""
    error = TransportError("Connection closed by peer") if is_marked else RuntimeError(REFUSAL)
    with (
        patch.object(communicators, "cpu_transport", side_effect=error),
        pytest.raises(RuntimeError) as caught,
    ):
        _coordinator([0, 1])
    assert isinstance(caught.value, CollectiveError) is is_marked
    assert ("A rank of this group died" in str(caught.value)) is is_marked
    assert is_marked or str(caught.value) == REFUSAL


@pytest.mark.parametrize("place", ["new_group", "barrier"])
def test_each_call_of_the_transport_while_a_group_is_built_is_marked(
    pretended_groups: list[Any], place: str
) -> None:
    failing = (
        patch("torch.distributed.new_group", side_effect=RuntimeError("nobody is there"))
        if place == "new_group"
        else patch.object(communicators.MarkedBarrier, "wait", side_effect=RuntimeError("nobody is there"))
    )
    with (
        failing,
        pytest.raises(CollectiveError, match=r"building the group over group 'tp'.*nobody is there"),
    ):
        _coordinator([0, 1])
