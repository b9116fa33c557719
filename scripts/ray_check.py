"""Owns the proof of `--use-ray`: two nodes of a local Ray cluster against one rank, and a killed rank there.

Run by hand where ray is installed (`pip install 'sglang[ray]'`):
`RAY_USAGE_STATS_ENABLED=0 python scripts/ray_check.py --model-path MODEL`. It starts its own cluster on
loopback addresses and must leave nothing behind.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys

import ray
from ray.cluster_utils import Cluster

from sglang import Engine

PROMPTS = [[5], [7, 9, 11], [3, 30, 300, 17, 4], list(range(20, 60))]
GREEDY = {"temperature": 0.0, "max_new_tokens": 12, "ignore_eos": True}
#: 80 MB are enough: the cluster carries configurations and messages, no tensors.
OBJECT_STORE_BYTES = 80 << 20
#: Loopback addresses other than 127.0.0.1, which Ray would replace by an address of the network.
ADDRESSES = ("127.0.0.2", "127.0.0.3")


def answers(model: str, **layout: object) -> list[list[int]]:
    settings = {"dtype": "float32", "max_total_tokens": 1024, "log_level": "info", **layout}
    with Engine(model_path=model, **settings) as engine:
        replies = engine.generate(input_ids=PROMPTS, sampling_params=GREEDY)
        assert isinstance(replies, list)
        return [reply["output_ids"] for reply in replies]


def cause_of_a_killed_rank(model: str) -> str:
    with Engine(model_path=model, dtype="float32", max_total_tokens=1024, use_ray=True, nnodes=2, tp_size=2,
                log_level="info") as engine:  # fmt: skip
        os.kill(engine.get_all_child_pids()[1], signal.SIGKILL)
        try:
            while True:
                engine.generate(input_ids=PROMPTS, sampling_params=GREEDY)
        except RuntimeError as error:
            return str(error)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model-path", default="smollm2-135m-instruct")
    model = parser.parse_args().model_path
    expected = answers(model)
    node = {"num_cpus": 2, "object_store_memory": OBJECT_STORE_BYTES}
    cluster = Cluster(
        initialize_head=True,
        head_node_args={**node, "node_ip_address": ADDRESSES[0], "include_dashboard": False},
    )
    try:
        cluster.add_node(**node, node_ip_address=ADDRESSES[1])
        ray.init(address=cluster.address, _node_ip_address=ADDRESSES[0])
        same = True
        for layout in ({"tp_size": 2}, {"tp_size": 2, "attn_dp_size": 2}):
            got = answers(model, use_ray=True, nnodes=2, **layout)
            print(f"{layout} on two Ray nodes: {'equal' if got == expected else f'{got} != {expected}'}")
            same = same and got == expected
        cause = cause_of_a_killed_rank(model)
        print(f"rank 1 killed: {cause}")
        same = same and "machine 1: rank 1" in cause and "SIGKILL" in cause
    finally:
        ray.shutdown()
        cluster.shutdown()
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
