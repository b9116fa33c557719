"""The page of the native routes names every route with its access, and every field."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=2, suite="unit-cpu")

import re
from pathlib import Path

from sglang.srt.entrypoints.http import auth as http_auth
from sglang.srt.messages.generate_input import GenerateReqInput
from sglang.srt.sampling.sampling_params import SamplingParams

PAGE = (Path(__file__).resolve().parents[4] / "docs" / "native_api.md").read_text(encoding="utf-8")


def access_of_routes(page: str) -> dict[str, str]:
    """Path -> access word, from the rows of the routes table."""
    found: dict[str, str] = {}
    for cells, access in re.findall(r"^\| ((?:GET|POST) [^|]+) \| (\w+) \|", page, re.MULTILINE):
        found |= dict.fromkeys(re.findall(r"`(/[^`]*)`", cells), access)
    return found


def declared_routes() -> dict[str, str]:
    return {
        path: level.value
        for level, paths in (
            (http_auth.Level.PUBLIC, http_auth._PUBLIC_PATHS),
            (http_auth.Level.NORMAL, http_auth._NORMAL_PATHS),
            (http_auth.Level.INFO, http_auth._INFO_PATHS),
            (http_auth.Level.CONTROL, http_auth._CONTROL_PATHS),
        )
        for path in paths
    }


def test_every_route_is_on_the_page_with_its_access():
    assert access_of_routes(PAGE) == declared_routes()


def test_a_route_with_the_wrong_access_is_noticed():
    planted = PAGE.replace("| GET `/health` | public |", "| GET `/health` | control |")
    assert access_of_routes(planted) != declared_routes()


def test_every_field_and_every_sampling_parameter_is_named():
    named = set(re.findall(r"`(\w+)`", PAGE))
    fields = {*GenerateReqInput.__struct_fields__, *SamplingParams.__struct_fields__}
    assert sorted(fields - named) == []
