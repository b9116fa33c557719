"""Where a request ends with a draft: stops inside an accepted run, full pools, the end of a context."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=25, suite="unit-cpu")

import json
import pathlib
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from sglang.srt.environ import envs
from sglang.srt.messages.io_struct import TokenizedGenerateReqInput
from sglang.srt.speculative.base_spec_worker import Proposal
from sglang.srt.speculative.round_batch import Round
from sglang.srt.speculative.spec_worker import SpecWorker
from sglang.test.fakes.fake_channel import Answer
from sglang.test.fakes.scheduler_driver import make_request
from sglang.test.spec.cells import ALGORITHMS, PROMPTS, SHAPES, ask, differences
from sglang.test.spec.drafts import write_short_draft
from sglang.test.spec.lab import SpecLab, in_waves, write_target

#: Which token of the text ends it. The prompt gives token 0, and a round of an oracle with three steps gives
#: 1 to 4, the next one 5 to 8: so these are the first, a middle and the last draft of a round, and its bonus.
PLACES = (5, 6, 7, 8)


class NumberTokenizer:
    """Every token reads as its id in brackets, so a stop string can begin and end anywhere in a token."""

    eos_token_ids = (2,)
    all_special_ids = (2,)

    def context_of(self, ids: list[int], skip_special_tokens: bool = True) -> list[int]:
        return []

    def decode(
        self, ids: Sequence[int], skip_special_tokens: bool = True, spaces_between_special_tokens: bool = True
    ) -> str:
        return "".join(f"<{token_id}>" for token_id in ids)


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> SpecLab:
    return SpecLab(tmp_path_factory.mktemp("ends"), tokenizer=NumberTokenizer())


def both(
    lab: SpecLab,
    algorithm: str,
    draft: str,
    shape: str,
    *waves: Sequence[TokenizedGenerateReqInput],
    **fields: Any,
) -> tuple[dict[str, Answer], dict[str, Answer]]:
    """The answers without and with a draft; the pool is empty after both."""
    with lab.drafted(algorithm, draft, shape, **fields) as stage:
        drafted = in_waves(stage, *waves)
        stage.check_empty()
    return lab.without_draft(*waves, **fields), drafted


def _end(kind: str, text: list[int], place: int) -> dict[str, Any]:
    """What makes a request end with this token of its text."""
    assert text.index(text[place]) == place
    if kind == "stop id":
        return {"ignore_eos": False, "stop_token_ids": [text[place], 511]}
    if kind == "length":
        return {"max_new_tokens": place + 1}
    # From the middle of the token before: for the first token of a round, the round before.
    return {"stop": [f"{text[place - 1]}><{str(text[place])[0]}"]}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", ["stop id", "length", "stop string"])
@pytest.mark.parametrize("shape", SHAPES)
def test_an_end_inside_an_accepted_run_cuts_everything_there(
    lab: SpecLab, shape: str, kind: str, place: int
) -> None:
    """Ids, pieces, log-probabilities, usage, and what the prefix cache keeps."""
    fields = {"max_new_tokens": 20, **_end(kind, lab.texts["d"], place)}
    requests = [ask("d", logprob_start_len=0, stream=True, **fields), ask("h", 20)]
    # It goes on where the first has ended, or would go on.
    follower = make_request("d/again", PROMPTS["d"] + lab.texts["d"][:20], 4)
    plain, drafted = both(lab, "EAGLE", "oracle", shape, requests, [follower])
    assert list(differences(plain, drafted)) == []
    assert drafted["d"].ids == lab.texts["d"][: place + 1]
    assert drafted["d"].spec is not None and drafted["d"].spec.histogram == [0, 0, 0, 2]
    assert [len(piece) for piece in drafted["d"].events] == [1, 4, place - 4]
    # The newest token is never in the cache.
    assert plain["d/again"].cached_tokens == len(PROMPTS["d"]) + place


@pytest.mark.parametrize("place", PLACES)
def test_an_end_id_of_the_model_inside_an_accepted_run_ends_it(
    lab: SpecLab, tmp_path: pathlib.Path, place: int
) -> None:
    end_id = lab.texts["d"][place]
    model = write_target(tmp_path / "model", generation={"eos_token_id": [end_id]})
    for algorithm in ("STANDALONE", "EAGLE3"):
        fields = {"model_path": str(model)}
        plain, drafted = both(lab, algorithm, "oracle", "chain", [ask("d", 20, ignore_eos=False)], **fields)
        assert list(differences(plain, drafted)) == []
        assert drafted["d"].ids == lab.texts["d"][: place + 1]
        reason = drafted["d"].finish_reason
        assert reason is not None and (reason.type, reason.matched) == ("stop", end_id)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_stop_string_that_spans_two_rounds_cuts_ids_and_logprobs(lab: SpecLab, algorithm: str) -> None:
    """Case O11, with every algorithm and shape; text after the stop was accepted and is dropped."""
    text = lab.texts["f"]
    for place in (5, 7, 9):  # a round of a deep tree gives 1 to 8, others 1 to 4 and 5 to 8
        stop = [f"{text[place - 1]}><{text[place]}>"]
        for shape in SHAPES:
            request = ask("f", 20, stop=stop, top_logprobs_num=2, stream=place == 5)
            plain, drafted = both(lab, algorithm, "oracle", shape, [request])
            assert list(differences(plain, drafted)) == [], (shape, place)
            assert drafted["f"].ids == text[: place + 1]
            reason = drafted["f"].finish_reason
            assert reason is not None and (reason.type, reason.matched) == ("stop", stop[0])


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_logprobs_with_three_alternatives_are_those_of_plain_decoding(lab: SpecLab, algorithm: str) -> None:
    """Case O12: 20 tokens, number by number; sorted, and the best is the chosen one."""
    request = ask("h", 20, top_logprobs_num=3, token_ids_logprob=None)
    for draft in ("oracle", "random"):
        plain, drafted = both(lab, algorithm, draft, "tree", [request])
        assert list(differences(plain, drafted)) == []
        entries = drafted["h"].output_logprobs
        assert len(entries) == 20 and all(entry.logprob != 0.0 for entry in entries)
        for entry in entries:
            assert entry.top is not None and len(entry.top) == 3
            assert entry.top[0] == (entry.logprob, entry.token_id)
            assert entry.top == sorted(entry.top, reverse=True)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_text_longer_than_the_draft_reaches_stays_the_same(
    lab: SpecLab, tmp_path: pathlib.Path, shape: str
) -> None:
    """Case O14: a STANDALONE draft of 64 positions, prompts of 40 and 70 tokens, a model of 512."""
    draft = write_short_draft(tmp_path / "draft", lab.target, 64)
    requests = [ask("a", 100), ask("long", 40, logprob_start_len=0)]
    plain = lab.without_draft(requests)
    with envs.SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN.override(True):
        flags = {"speculative_draft_model_path": str(draft)}
        with lab.drafted("STANDALONE", "oracle", shape, **flags) as stage:
            drafted = stage.finish(*requests)
            stage.check_empty()
    assert list(differences(plain, drafted)) == []
    assert len(drafted["a"].ids) == 100 and len(PROMPTS["long"]) == 70
    # Within its reach the draft is the model itself.
    spec = drafted["a"].spec
    assert spec is not None and spec.histogram[3] >= (64 - len(PROMPTS["a"])) // 4 - 1


@pytest.mark.parametrize("algorithm", ["EAGLE", "EAGLE3"])
def test_a_head_that_says_it_reads_less_than_the_model_is_served_as_far_as_the_model(
    lab: SpecLab, tmp_path: pathlib.Path, algorithm: str
) -> None:
    """It has no table of positions of its own: what its config says of them is the model's business."""
    head = pathlib.Path(lab.drafts.fields(algorithm, "random")["speculative_draft_model_path"])
    flags = {"speculative_draft_model_path": str(write_short_draft(tmp_path / "draft", head, 64))}
    requests = [ask("a", 100), ask("long", 40, logprob_start_len=0)]
    with lab.drafted(algorithm, "random", "tree", **flags) as stage:
        drafted = stage.finish(*requests)
        stage.check_empty()
    assert list(differences(lab.without_draft(requests), drafted)) == []


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("shape", SHAPES)
def test_requests_for_one_token_all_end_and_a_later_one_is_served(
    lab: SpecLab, algorithm: str, shape: str
) -> None:
    """Case O15: 40 at once, four run at a time."""
    names = [f"{name}/{i}" for i in range(5) for name in PROMPTS][:40]
    with lab.drafted(algorithm, "random", shape, max_running_requests=4) as stage:
        answers = stage.finish(*(ask(name, 1) for name in names))
        answers = stage.finish(ask("h", 6))
        stage.check_empty()
    for name in names:
        assert answers[name].ids == lab.texts[name.partition("/")[0]][:1]
        spec = answers[name].spec
        assert spec is not None and spec.num_rounds == 0
    assert answers["h"].ids == lab.texts["h"][:6]


@pytest.mark.parametrize("draft", ["oracle", "random"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_last_request_that_fills_the_pool_ends_at_the_same_token(
    lab: SpecLab, algorithm: str, draft: str
) -> None:
    """It goes on in rounds of one node where a whole round finds no room."""
    requests = [ask("a", 60, logprob_start_len=0), ask("e", 60)]
    widths: set[int] = set()
    for shape in SHAPES:
        for page_size in (1, 16):
            fields = {"max_total_tokens": 48, "page_size": page_size}
            with lab.drafted(algorithm, draft, shape, **fields) as stage:
                drafted = stage.finish(*requests)
                stage.check_empty()
                widths.update(nodes for _, nodes in stage.verifies)
            plain = lab.without_draft(requests, **fields)
            assert list(differences(plain, drafted)) == [], (shape, page_size)
            assert max(len(PROMPTS[name]) + len(drafted[name].ids) for name in "ae") == 48 + 1
    assert 1 in widths and len(widths) == 3


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_end_of_the_context_is_the_same_token(lab: SpecLab, algorithm: str) -> None:
    for draft in ("oracle", "random"):
        for shape in SHAPES:
            requests = [ask("a", 1000), ask("e", 1000)]
            plain, drafted = both(lab, algorithm, draft, shape, requests, context_length=50)
            assert list(differences(plain, drafted)) == [], (draft, shape)
            assert [len(PROMPTS[name]) + len(drafted[name].ids) for name in "ae"] == [50, 50]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_proposal_that_is_not_finite_fails_nobody(lab: SpecLab, algorithm: str, shape: str) -> None:
    """No row that does not see it is spoilt; a request that has the token itself fails as it must."""
    broken = 401
    requests = [ask("d", 12), ask("f", 12, logprob_start_len=0), make_request("bad", [broken, 7], 12)]
    with lab.drafted(algorithm, "random", shape) as stage:
        worker = stage.scheduler.worker
        assert isinstance(worker, SpecWorker)
        with torch.inference_mode():
            worker.target.model_runner.model.model.embed_tokens.weight[broken] = float("nan")
        propose = worker.drafter.propose

        def propose_it(round: Round, num_nodes: int) -> Proposal:
            proposal = propose(round, num_nodes)
            proposal.tree.token_ids[:, num_nodes - 1] = broken
            return proposal

        worker.drafter.propose = propose_it  # type: ignore[method-assign]
        drafted = stage.finish(*requests)
        stage.check_empty()
    reason = drafted.pop("bad").finish_reason
    assert reason is not None and reason.status_code == 500
    assert list(differences(lab.without_draft(requests[:2]), drafted)) == []


def test_adaptive_steps_change_nothing_while_they_switch(lab: SpecLab, tmp_path: pathlib.Path) -> None:
    """Depths 0, 1 and 3: the draft knows the beginnings of the texts, and of one of them nothing."""
    config = {
        "1": {"candidate_steps": [0, 1, 3], "warmup_batches": 0, "update_interval": 2, "ema_alpha": 0.6}
    }
    (tmp_path / "steps.json").write_text(json.dumps(config))
    fields = {
        "speculative_adaptive": True,
        "speculative_adaptive_config": str(tmp_path / "steps.json"),
        "page_size": 16,
    }
    requests = [ask("d", 30, logprob_start_len=0), ask("f", 30), ask("h", 24)]
    plain = lab.without_draft(requests, page_size=16)
    for algorithm, draft in (("EAGLE", "trained"), ("EAGLE3", "random")):
        with lab.drafted(algorithm, draft, "chain", **fields) as stage:
            drafted = stage.finish(*requests)
            stage.check_empty()
            widths = [nodes for _, nodes in stage.verifies]
        assert list(differences(plain, drafted)) == []
        assert set(widths) == {1, 2, 4}, widths
