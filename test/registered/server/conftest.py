"""Owns the fixtures that several server tests share: a tiny model, and a client of a module's `server`."""

import pathlib

import httpx
import pytest

from sglang.test.server.server_fixture import RunningServer
from sglang.test.tiny_models import write_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def http(server: RunningServer) -> httpx.Client:
    return server.client
