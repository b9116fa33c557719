"""What `python -m sglang.placement` prints: tables, JSON and refusals, against lists written out by hand."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=6, suite="unit-cpu")

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang.placement import main
from sglang.srt.placement.plan import MOST_RANKS, plan_from_flags
from sglang.srt.placement.table import as_json

WORKED = "--tp-size 8 --pp-size 2 --attn-dp-size 2 --attn-cp-size 2 --ep-size 4 --moe-dp-size 2"

TWO_RANKS = """\
2 ranks: pp 1 x tp 2
tp 2 = attn_dp 2 x attn_cp 1 x attn_tp 1 = moe_dp 1 x moe_ep 1 x moe_tp 2

seats (* leads its attention-TP group)
  rank  tp  attn_dp  moe_tp
*    0   0        0       0
*    1   1        1       1
one wide, so every rank is rank 0 there: pp, attn_cp, attn_tp, dcp, moe_dp,
                                         moe_ep

groups (world ranks)
  kind         width  ranks
  tp = moe_tp      2  [0,1]
  attn_dp          2  0=[0] 1=[1]
  (attn_dp is an index and no group: N=[ranks that hold replica N's requests])
one rank a group: pp, attn_cp, attn_tp, dcp, moe_dp, moe_ep, self_pp
"""

SIXTEEN_RANKS = """\
16 ranks: pp 2 x tp 8
tp 8 = attn_dp 2 x attn_cp 2 x attn_tp 2 = moe_dp 2 x moe_ep 4 x moe_tp 1

seats (* leads its attention-TP group)
  rank  pp  tp  attn_dp  attn_cp  attn_tp  moe_dp  moe_ep
*    0   0   0        0        0        0       0       0
     1   0   1        0        0        1       0       1
*    2   0   2        0        1        0       0       2
     3   0   3        0        1        1       0       3
*    4   0   4        1        0        0       1       0
     5   0   5        1        0        1       1       1
*    6   0   6        1        1        0       1       2
     7   0   7        1        1        1       1       3
*    8   1   0        0        0        0       0       0
     9   1   1        0        0        1       0       1
*   10   1   2        0        1        0       0       2
    11   1   3        0        1        1       0       3
*   12   1   4        1        0        0       1       0
    13   1   5        1        0        1       1       1
*   14   1   6        1        1        0       1       2
    15   1   7        1        1        1       1       3
one wide, so every rank is rank 0 there: dcp, moe_tp

groups (world ranks)
  kind     width  ranks
  pp           2  [0,8] [1,9] [2,10] [3,11] [4,12] [5,13] [6,14] [7,15]
  tp           8  [0..7] [8..15]
  attn_dp      2  0=[0,1,2,3,8,9,10,11] 1=[4,5,6,7,12,13,14,15]
  attn_cp      2  [0,2] [1,3] [4,6] [5,7] [8,10] [9,11] [12,14] [13,15]
  attn_tp      2  [0,1] [2,3] [4,5] [6,7] [8,9] [10,11] [12,13] [14,15]
  moe_dp       2  [0,4] [1,5] [2,6] [3,7] [8,12] [9,13] [10,14] [11,15]
  moe_ep       4  [0,1,2,3] [4,5,6,7] [8,9,10,11] [12,13,14,15]
  (attn_dp is an index and no group: N=[ranks that hold replica N's requests])
one rank a group: dcp, moe_tp, self_pp
"""

TWO_REPLICAS = """\
2 replicas of 2 ranks: pp 1 x tp 2, each a world of its own
tp 2 = attn_dp 1 x attn_cp 1 x attn_tp 2 = moe_dp 1 x moe_ep 1 x moe_tp 2

seats (* leads its attention-TP group)
  rank  dp_rank  tp  attn_tp  moe_tp
*    0        0   0        0       0
     1        0   1        1       1
*    0        1   0        0       0
     1        1   1        1       1
one wide, so every rank is rank 0 there: pp, attn_dp, attn_cp, dcp, moe_dp,
                                         moe_ep

groups (world ranks, the same in each replica)
  kind                   width  ranks
  tp = attn_tp = moe_tp      2  [0,1]
one rank a group: pp, attn_dp, attn_cp, dcp, moe_dp, moe_ep, self_pp
"""

ONE_RANK = """\
1 rank: pp 1 x tp 1
tp 1 = attn_dp 1 x attn_cp 1 x attn_tp 1 = moe_dp 1 x moe_ep 1 x moe_tp 1

seats (* leads its attention-TP group)
  rank
*    0
one wide, so every rank is rank 0 there: pp, tp, attn_dp, attn_cp, attn_tp, dcp,
                                         moe_dp, moe_ep, moe_tp

groups: every rank is alone in each of its groups
"""


def _run(flags: str) -> int:
    return main(flags.split())


@pytest.mark.parametrize(
    "flags, shown",
    [
        ("--tp-size 2 --attn-dp-size 2", TWO_RANKS),
        (WORKED, SIXTEEN_RANKS),
        ("--tp 2 --dp-size 2 --model-path no-such-model --port 1", TWO_REPLICAS),
        ("", ONE_RANK),
    ],
    ids=["attention dp", "sixteen ranks", "replicas", "one rank"],
)
def test_seats_and_groups_are_shown_as_written_out(flags: str, shown: str, capsys: Any) -> None:
    assert _run(flags) == 0
    assert capsys.readouterr() == (shown, "")


@pytest.mark.parametrize("flags", [WORKED, f"{WORKED} --nnodes 2", "--tp-size 16 --ep 4"])
def test_sixteen_ranks_fit_eighty_columns(flags: str, capsys: Any) -> None:
    assert _run(flags) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80


def test_the_widest_table_there_is_fits_eighty_columns(capsys: Any) -> None:
    """Every column at once: no layout has more."""
    flags = "--pp 2 --tp 32 --attn-dp-size 2 --attn-cp-size 2 --dcp-size 2 --moe-dp-size 2 --ep 4 --nnodes 2"
    assert _run(flags) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "moe_tp" in lines[4] and "node" in lines[4] and "dcp" in lines[4]
    assert max(map(len, lines)) <= 80


def test_long_groups_are_broken_between_ranks_and_lose_none(capsys: Any) -> None:
    assert _run("--tp-size 128 --ep-size 64") == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    text = "".join(line.strip() for line in lines[lines.index("groups (world ranks)") :])
    for start in (0, 1):
        assert f"[{','.join(map(str, range(start, 128, 2)))}]" in text


def test_machines_hold_consecutive_ranks(capsys: Any) -> None:
    assert _run("--tp-size 4 --pp-size 2 --nnodes 4 --json") == 0
    ranks = json.loads(capsys.readouterr().out)["ranks"]
    assert [rank["node"] for rank in ranks] == [0, 0, 1, 1, 2, 2, 3, 3]


def test_json_says_the_same_with_the_names_of_the_context(capsys: Any) -> None:
    assert main(["--tp-size", "2", "--attn-dp-size", "2", "--json"]) == 0
    shared = {"node": 0, "dp_rank": None, "pp_rank": 0, "attn_cp_rank": 0, "attn_tp_rank": 0, "dcp_rank": 0}
    experts = {"moe_dp_rank": 0, "moe_ep_rank": 0}
    one = {"collective": True, "width": 1, "ranks": [[0], [1]]}
    assert json.loads(capsys.readouterr().out) == {
        "flags": "--tp-size 2 --attn-dp-size 2",
        "replicas": 1,
        "nnodes": 1,
        "world_size": 2,
        "widths": {
            "pp_size": 1, "tp_size": 2, "dcp_size": 1, "attn_dp_size": 2, "attn_cp_size": 1,
            "attn_tp_size": 1, "moe_dp_size": 1, "moe_ep_size": 1, "moe_tp_size": 2,
        },
        "ranks": [
            {**shared, **experts, "leader": True}
            | dict.fromkeys(("world_rank", "tp_rank", "attn_dp_rank", "moe_tp_rank"), rank)
            for rank in (0, 1)
        ],
        "groups": [
            {**one, "kind": "pp"},
            {"kind": "tp", "width": 2, "collective": True, "ranks": [[0, 1]]},
            {"kind": "attn_dp", "width": 2, "collective": False, "ranks": [[0], [1]]},
            *({**one, "kind": kind} for kind in ("attn_cp", "attn_tp", "dcp", "moe_dp", "moe_ep")),
            {"kind": "moe_tp", "width": 2, "collective": True, "ranks": [[0, 1]]},
            {**one, "kind": "self_pp"},
        ],
    }  # fmt: skip


def test_the_shown_flags_describe_the_layout_again(capsys: Any) -> None:
    """They are the picture's caption: pasted back, they must give the same plan."""
    flags = f"{WORKED} --dcp-size 2 --ep-join-rank-offset 16"
    assert main([*flags.split(), "--json"]) == 0
    first = json.loads(capsys.readouterr().out)
    assert main([*first["flags"].split(), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == first
    assert first["ranks"][0]["world_rank"] == 16 and first["groups"][1]["ranks"][0][0] == 16


def test_replicas_say_their_number_and_a_lone_world_has_none(capsys: Any) -> None:
    assert _run("--dp-size 3 --json") == 0
    assert [rank["dp_rank"] for rank in json.loads(capsys.readouterr().out)["ranks"]] == [0, 1, 2]
    assert main(["--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ranks"][0]["dp_rank"] is None


def test_a_configuration_file_counts_like_flags(tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "layout.yaml"
    file.write_text("tp-size: 2\nattn-dp-size: 2\n", encoding="utf-8")
    assert main(["--config", str(file)]) == 0
    assert capsys.readouterr().out == TWO_RANKS


def test_the_older_spelling_is_told_about_the_newer(capsys: Any) -> None:
    assert _run("--tp-size 2 --dp-size 2 --enable-dp-attention") == 0
    shown = capsys.readouterr()
    assert shown.out == TWO_RANKS and "placement: warning: " in shown.err and "--attn-dp-size N" in shown.err


#: What cannot be, the words that say why, and the nearest thing that can.
IMPOSSIBLE = [
    ("--tp 6 --attn-dp 4", ["tp_size % (attn_dp_size * attn_cp_size)", "6", "4"], "--tp 8 --attn-dp 4"),
    ("--tp 8 --attn-dp 2 --attn-cp 3", ["tp_size %", "8", "3"], "--tp 12 --attn-dp 2 --attn-cp 3"),
    ("--tp 2 --attn-dp 4", ["attn_dp_size", "2", "4"], "--tp 4 --attn-dp 4"),
    ("--tp 0", ["--tp-size must be at least 1", "got 0"], "--tp 1"),
    ("--pp-size -1", ["--pp-size must be at least 1", "got -1"], "--pp-size 1"),
    ("--dp-size 0", ["--dp-size must be at least 1", "got 0"], "--dp-size 1"),
    ("--attn-dp 0", ["--attn-dp-size must be at least 1", "got 0"], "--attn-dp 1"),
    ("--attn-dp -2", ["--attn-dp-size must be at least 1", "got -2"], "--attn-dp 1"),
    ("--tp 4 --ep 8", ["ep_size * moe_dp_size <= tp_size", "8", "4"], "--tp 4 --ep 4"),
    ("--tp 4 --ep 4 --moe-dp 2", ["ep_size * moe_dp_size <= tp_size", "4", "2"], "--tp 4 --ep 2 --moe-dp 2"),
    ("--tp 8 --ep 3", ["tp_size % (ep_size * moe_dp_size)", "8", "3"], "--tp 9 --ep 3"),
    ("--tp 8 --moe-dp 3", ["tp_size % moe_dp_size", "8", "3"], "--tp 9 --moe-dp 3"),
    ("--tp 8 --attn-dp 4 --dcp 4", ["attn_tp_size % dcp_size", "2", "4"], "--tp 8 --attn-dp 2 --dcp 4"),
    (
        "--tp 3 --nnodes 2",
        ["% nnodes", "3", "2"],
        "--tp 4 --nnodes 2",
    ),
    (
        "--tp 2 --nnodes 4",
        ["nnodes", "2", "4"],
        "--tp 2 --pp-size 2 --nnodes 4",
    ),
    ("--dp-size 2 --nnodes 2", ["dp_size == 1 or nnodes == 1", "--dp-size 2", "--nnodes 2"], "--dp-size 2"),
    ("--nnodes 0", ["--nnodes must be at least 1", "got 0"], "--nnodes 1"),
    ("--node-rank 1", ["node_rank < nnodes", "1"], "--node-rank 0"),
    ("--tp 4 --attn-dp 2 --dp-size 2", ["--attn-dp-size 2", "--dp-size 2"], "--tp 4 --attn-dp 2 --dp-size 1"),
    (
        "--tp 4 --attn-dp 2 --enable-dp-attention",
        ["--attn-dp-size 2", "--enable-dp-attention"],
        "--tp 4 --attn-dp 2",
    ),
    ("--tp two", ["--tp-size", "two"], "--tp 2"),
    ("--tp-sise 2", ["--tp-sise", "--tp-size"], "--tp 2"),
    (f"--tp {MOST_RANKS + 1}", [str(MOST_RANKS), str(MOST_RANKS + 1)], "--tp 64"),
]


@pytest.mark.parametrize("flags, words, possible", IMPOSSIBLE, ids=[case[0] for case in IMPOSSIBLE])
def test_what_cannot_be_is_refused_with_the_rule_and_the_numbers(
    flags: str, words: list[str], possible: str, tmp_path: Path, capsys: Any
) -> None:
    picture = tmp_path / "layout.svg"
    command = [*flags.split(), "--svg", str(picture)]
    try:
        code: Any = main(command)
    except SystemExit as leave:  # argparse's own way out
        code = leave.code
    shown = capsys.readouterr()
    assert code == 2 and shown.out == "" and not picture.exists()
    notes, _, errors = shown.err.partition("python -m sglang.placement: error: ")
    assert errors and all("is deprecated" in line for line in notes.splitlines())
    for word in words:
        assert word in shown.err
    assert _run(possible) == 0


_WIDTHS = ("tp", "pp", "attn_dp", "dp", "attn_cp", "dcp", "ep", "moe_dp", "nnodes")
_DIGIT = st.sampled_from([1, 1, 1, 2, 2, 4, 3, 0, -1])


def _fits(
    tp: int, pp: int, attn_dp: int, dp: int, attn_cp: int, dcp: int, ep: int, moe_dp: int, nnodes: int
) -> bool:
    """The rules once more, as the design writes them."""
    if min(tp, pp, attn_dp, dp, attn_cp, dcp, ep, moe_dp, nnodes) < 1 or (attn_dp > 1 and dp > 1):
        return False
    if tp % (attn_dp * attn_cp) or tp % (ep * moe_dp) or (tp // (attn_dp * attn_cp)) % dcp:
        return False
    return nnodes == 1 or (dp == 1 and (tp * pp) % nnodes == 0)


@settings(max_examples=150)
@given(
    st.fixed_dictionaries(dict.fromkeys(_WIDTHS, _DIGIT) | {"tp": st.sampled_from([1, 2, 4, 8, 6, 12, 0])})
)
def test_whatever_the_widths_they_are_shown_whole_or_refused(widths: dict[str, int]) -> None:
    flags = []
    for name, width in widths.items():
        flag = "--nnodes" if name == "nnodes" else f"--{name.replace('_', '-')}-size"
        flags += [flag, str(width)]
    try:
        shown = as_json(plan_from_flags(flags, prog="test"))
    except ValueError as error:
        assert not _fits(**widths), error
        assert "got" in str(error) or "must hold" in str(error)
        return
    except SystemExit as leave:  # the command line itself refuses both spellings of dp
        assert not _fits(**widths) and leave.code == 2
        return
    assert _fits(**widths)
    world = list(range(shown["world_size"]))
    assert shown["world_size"] == widths["tp"] * widths["pp"]
    assert [rank["world_rank"] for rank in shown["ranks"]] == world * widths["dp"]
    assert {rank["node"] for rank in shown["ranks"]} == set(range(widths["nnodes"]))
    for group in shown["groups"]:
        assert sorted(rank for ranks in group["ranks"] for rank in ranks) == world, group["kind"]


def test_piped_text_is_plain_and_a_reader_may_leave_early() -> None:
    command = f"{sys.executable} -m sglang.placement --tp-size 1024 | head -1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("1024 ranks: pp 1 x tp 1024\n", "")


def test_help_names_the_own_flags_and_those_of_the_server(capsys: Any) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    for flag in ("--svg FILE", "--json", "--attn-dp-size", "--model-path", "--moe-dp-size"):
        assert flag in text
