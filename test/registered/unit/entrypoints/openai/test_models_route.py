"""`/v1/models` and one model by its id."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=1, suite="unit-cpu")

import pytest

from sglang.test.fakes.fake_manager import FakeManager
from sglang.test.server.openai_calls import request


def test_the_list_holds_the_served_model():
    body = request(FakeManager(), "GET", "/v1/models").json()
    created = body["data"][0].pop("created")
    assert isinstance(created, int)
    assert body == {
        "object": "list",
        "data": [
            {
                "id": "org/tiny-model",
                "object": "model",
                "owned_by": "sglang",
                "root": "org/tiny-model",
                "parent": None,
                "max_model_len": 512,
            }
        ],
    }


@pytest.mark.parametrize("spelled", ["org/tiny-model", "org%2Ftiny-model", "org%2ftiny%2Dmodel"])
def test_a_model_is_found_by_its_percent_encoded_id(spelled):
    response = request(FakeManager(), "GET", f"/v1/models/{spelled}")
    assert response.status_code == 200 and response.json()["id"] == "org/tiny-model"


def test_a_name_with_a_colon_and_a_space_is_found():
    manager = FakeManager()
    manager.served_model_name = "smol: 135m"
    assert request(manager, "GET", "/v1/models/smol%3A%20135m").json()["id"] == "smol: 135m"


def test_a_head_request_has_the_status_and_no_body():
    for path, status in (("/v1/models", 200), ("/v1/models/org/tiny-model", 200), ("/v1/models/x", 404)):
        response = request(FakeManager(), "HEAD", path)
        assert response.status_code == status


def test_an_unknown_model_is_404_with_the_code_clients_look_for():
    response = request(FakeManager(), "GET", "/v1/models/gpt-4")
    assert response.status_code == 404
    error = response.json()["error"]
    assert error["code"] == "model_not_found" and error["param"] == "model"
    assert "gpt-4" in error["message"]
