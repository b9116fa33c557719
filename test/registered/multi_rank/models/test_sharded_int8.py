"""A model in int8 over two ranks: the weights of one rank, and inputs that each rank rounds for itself."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=10, suite="multi-rank-cpu")

import torch

from sglang.test.multi_rank import run_ranks
from sglang.test.tiny_models import write_tiny_model
from sglang.test.worker_driver import WorkerDriver, driven_worker


def last_logits(driver: WorkerDriver) -> torch.Tensor:
    """Of a prompt and a decode step."""
    seq = driver.add(list(range(30, 60)))
    parts = [driver.logits([(seq, 30)])]
    seq.ids.append(40)
    return torch.cat([*parts, driver.logits([(seq, 1)], decode=True)])


def of_a_rank(rank: int, folder: str, width: int) -> list[list[float]]:
    with driven_worker(folder, rank=rank, tp_size=width, quantization="w8a8_int8") as driver:
        return last_logits(driver).tolist()


def test_two_ranks_differ_from_one_by_the_rounding_of_inputs_alone(tmp_path):
    """The scale of a row is that of a rank's share of it where inputs are cut, so bits are not equal."""
    folder = str(
        write_tiny_model(
            tmp_path / "model",
            hidden_size=64,
            num_heads=9,
            num_kv_heads=3,
            intermediate_size=45,
            vocab_size=509,
        )
    )
    with driven_worker(folder, quantization="w8a8_int8") as driver:
        one = last_logits(driver)
    with driven_worker(folder) as driver:
        plain = last_logits(driver)
    first, second = (
        torch.tensor(found) for found in run_ranks(of_a_rank, world_size=2, folder=folder, width=2)
    )
    assert torch.equal(first, second)
    assert (first - one).norm() < 0.05 * one.norm()
    assert (first - one).norm() < 1.5 * (one - plain).norm(), "no more than what int8 costs on one rank"
