"""A chat request goes forward through the files of its trace: from router to wire it seldom steps back."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=2, suite="unit-cpu")

import asyncio
import itertools
import pathlib
import re
import sys
from types import FrameType
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

import sglang
from sglang.srt.entrypoints.openai.router import build_openai_router
from sglang.srt.entrypoints.openai.serving_job import ServingSettings
from sglang.srt.managers.tokenizer_components import preparation
from sglang.srt.messages import io_struct
from sglang.srt.messages.generate_input import GenerateReqInput
from sglang.test.fakes.fake_manager import ByteTokenizer
from sglang.test.fakes.fake_scheduler import LENGTH, manager_over
from sglang.test.server.openai_calls import CHAT

SRT = pathlib.Path(sglang.__file__).parent / "srt"
PAGE = pathlib.Path(__file__).parents[4] / "docs" / "architecture.md"


class WholeTokenizer(ByteTokenizer):
    """Also answers what only the tokenizer manager asks."""

    def special_id(self, text: str) -> int | None:
        return None


def stages() -> list[str]:
    """The files of the way in, in the order of the page."""
    page = PAGE.read_text(encoding="utf-8")
    text = page.split("**In, on the server's side**")[1].split("**One step of the rank**")[0]
    names = dict.fromkeys(re.findall(r"`([\w/]+\.py)`", text))
    return [str(SRT / name if "/" in name else SRT / "entrypoints/openai" / name) for name in names]


def called_files() -> list[str]:
    """The stage of every call of one streamed chat, from the router until its message is on the wire."""
    known = set(stages())
    files: list[str] = []

    def note(frame: FrameType, event: str, _argument: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename in known and code.co_name[0] != "<":  # no comprehension
            files.append(code.co_filename)

    def answer(message: Any) -> io_struct.Message:
        sys.setprofile(None)
        output = io_struct.TokenOutput(
            rid=message.rid,
            new_ids=[65],
            finish_reason=LENGTH,
            prompt_tokens=3,
            completion_tokens=1,
            cached_tokens=0,
            num_retractions=0,
        )
        return io_struct.BatchTokenIDOutput(outputs=[output])

    async def main() -> None:
        async with manager_over(WholeTokenizer(), sampling_defaults="openai") as (manager, channel):  # type: ignore[arg-type]
            manager.model_config.end_sources = {}
            channel.answer = answer
            app = FastAPI()
            app.include_router(build_openai_router(manager, ServingSettings()))
            async with httpx.AsyncClient(
                transport=httpx.ASGITransport(app=app), base_url="http://t"
            ) as client:
                body = {"messages": [{"role": "user", "content": "hi"}], "stream": True, "stop": ["x"]}
                sys.setprofile(note)
                response = await client.post(CHAT, json=body)
            assert response.status_code == 200, response.text

    try:
        asyncio.run(main())
    finally:
        sys.setprofile(None)
    return files


def steps_back() -> int:
    """Calls of a file that the page names before the file of the call in front of them."""
    order = {file: place for place, file in enumerate(stages())}
    places = [order[file] for file in called_files()]
    return sum(later < earlier for earlier, later in itertools.pairwise(places))


def test_the_page_names_files_that_are_there_and_are_called() -> None:
    assert [file for file in stages() if not pathlib.Path(file).is_file()] == []
    assert len(set(called_files())) >= 10


def test_a_chat_steps_back_at_most_four_times_on_its_way_in() -> None:
    """It did ten times: a reader who follows a request had to turn back to files that he had left behind."""
    assert steps_back() <= 4


def test_one_more_visit_of_an_earlier_file_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The twin: a check that looks at the whole request again, as there used to be five."""
    before, finished = steps_back(), preparation.finished_message

    def looks_back(*args: Any) -> Any:
        assert not GenerateReqInput(text="a").is_batch
        return finished(*args)

    monkeypatch.setattr(preparation, "finished_message", looks_back)
    assert steps_back() == before + 1
