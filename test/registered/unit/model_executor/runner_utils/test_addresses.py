"""A graph reads weights where they lay at capture: whatever moved since is found, packed weights too."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=2, suite="unit-cpu")

import pytest
import torch

from sglang.srt.model_executor.runner_utils.addresses import AddressTable
from sglang.test.tiny_models import write_tiny_model
from sglang.test.worker_driver import driven_worker


@pytest.fixture
def model(tmp_path):
    with driven_worker(write_tiny_model(tmp_path, seed=3)) as driver:
        yield driver.worker.model_runner.model


def test_a_model_that_ran_lies_where_it_lay(model):
    table = AddressTable(model)
    with torch.inference_mode():
        model.model.norm.weight.mul_(2)
    table.check(model)


def test_a_weight_that_is_packed_again_is_named(model):
    """Its parameter is empty: what moves is the stored form."""
    table = AddressTable(model)
    layer = model.model.layers[1].mlp.gate_up_proj
    layer.stored = type(layer.stored)(layer.stored.unpack())
    with pytest.raises(RuntimeError, match=r"weight model\.layers\.1\.mlp\.gate_up_proj\.stored\.\w+ moved"):
        table.check(model)


def test_objects_that_hold_each_other_end(model):
    model.logits_processor.itself = model.logits_processor
    AddressTable(model).check(model)


def test_a_parameter_that_is_made_anew_is_named(model):
    table = AddressTable(model)
    model.model.norm.weight = torch.nn.Parameter(
        model.model.norm.weight.detach().clone(), requires_grad=False
    )
    with pytest.raises(RuntimeError, match=r"weight model\.norm\.weight moved"):
        table.check(model)
