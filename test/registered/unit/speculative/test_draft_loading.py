"""How a draft's tensors are told apart: its own, the target's, those that only training reads."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=6, suite="unit-cpu")

import json
import pathlib
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from sglang.test.tiny_drafts import write_random_draft
from sglang.test.tiny_models import write_tiny_model
from sglang.test.worker_driver import driven_worker

CHAIN = {"speculative_num_steps": 2, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 3}
PROMPT = [5, 9, 200, 31, 77]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return write_tiny_model(tmp_path_factory.mktemp("target"), num_layers=3)


def proposals(
    target: pathlib.Path, folder: pathlib.Path, algorithm: str = "EAGLE3", **settings: Any
) -> list[Any]:
    """What the draft in a folder proposes over some rounds, as ids: its weights decide."""
    seen: list[Any] = []
    fields = {
        "speculative_algorithm": algorithm,
        "speculative_draft_model_path": str(folder),
        **CHAIN,
        **settings,
    }
    with driven_worker(target, **fields) as driver:
        drafter = driver.worker.drafter  # type: ignore[union-attr]
        propose = drafter.propose
        drafter.propose = lambda *args: seen.append(propose(*args)) or seen[-1]
        driver.speculate([driver.add(PROMPT)], 12)
    return [proposal.tree.token_ids.tolist() for proposal in seen]


def rewritten(folder: pathlib.Path, to: pathlib.Path, rename: Any, **extra: torch.Tensor) -> pathlib.Path:
    """The same draft under other names of its tensors."""
    to.mkdir()
    (to / "config.json").write_text((folder / "config.json").read_text())
    tensors = {rename(name): tensor for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file({**tensors, **extra}, to / "model.safetensors")
    return to


def test_names_with_and_without_prefix_are_one_draft(target: pathlib.Path, tmp_path: pathlib.Path) -> None:
    draft = write_random_draft(tmp_path / "draft", target, "eagle3", draft_vocab_size=80)
    expected = proposals(target, draft)
    assert len(set(map(str, expected))) > 3
    prefixed = rewritten(draft, tmp_path / "prefixed", lambda name: f"model.{name}")
    numbered = rewritten(draft, tmp_path / "numbered", lambda name: name.replace("midlayer.", "layers.0."))
    assert proposals(target, prefixed) == proposals(target, numbered) == expected


def test_an_embedding_in_the_file_is_the_targets_all_the_same(
    target: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    draft = write_random_draft(tmp_path / "draft", target, "eagle3", draft_vocab_size=80)
    other = torch.randn(512, 64)
    bundled = rewritten(draft, tmp_path / "bundled", str, **{"embed_tokens.weight": other})
    assert proposals(target, bundled) == proposals(target, draft)


def test_an_eagle_head_scores_with_the_targets_head_whatever_its_file_holds(
    target: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    draft = write_random_draft(tmp_path / "draft", target, "eagle")
    bundled = rewritten(draft, tmp_path / "bundled", str, **{"lm_head.weight": torch.randn(512, 64)})
    assert proposals(target, bundled, "EAGLE") == proposals(target, draft, "EAGLE")


def test_the_map_to_the_targets_ids_holds_offsets(target: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Absolute ids in it, as some exporters write, would propose nothing that is right for ever."""
    draft = write_random_draft(tmp_path / "draft", target, "eagle3", draft_vocab_size=80)
    known = set((load_file(draft / "model.safetensors")["d2t"] + torch.arange(80)).tolist())
    proposed = {token for tree in proposals(target, draft) for token in tree[0][1:]}
    assert proposed <= known
    absolute = load_file(draft / "model.safetensors")
    absolute["d2t"] += torch.arange(80)
    save_file(absolute, draft / "model.safetensors")
    with pytest.raises(ValueError, match=r"d2t leads to the tokens 0 to 590, .*it must hold offsets"):
        proposals(target, draft)


def test_a_tensor_that_no_part_is_made_of_is_refused(target: pathlib.Path, tmp_path: pathlib.Path) -> None:
    draft = write_random_draft(tmp_path / "draft", target, "eagle3", draft_vocab_size=80)
    strange = rewritten(draft, tmp_path / "strange", str, **{"midlayer.extra.weight": torch.zeros(4)})
    with pytest.raises(ValueError, match=r"layers\.0\.extra\.weight .*the model has no place for it"):
        proposals(target, strange)


@pytest.mark.parametrize(
    "options",
    [{"norm_before_fc": True}, {"fc_norm": True}, {"norm_output": True}, {"num_hidden_layers": 36}],
    ids=lambda options: next(iter(options)),
)
def test_options_of_published_configs_are_read(
    target: pathlib.Path, tmp_path: pathlib.Path, options: dict[str, Any]
) -> None:
    """Each changes what is proposed, but for a wrong number of layers, which the tensors correct."""
    plain = write_random_draft(tmp_path / "plain", target, "eagle3", draft_vocab_size=80)
    norms = {}
    if "norm_before_fc" in options:
        norms = {"norm_before_fc.weight": torch.rand(192)}
    if "fc_norm" in options:
        norms = {f"aux_norm_{place}.weight": torch.rand(64) for place in ("low", "mid", "high")}
    draft = rewritten(plain, tmp_path / "draft", str, **norms)
    config = json.loads((plain / "config.json").read_text()) | options
    (draft / "config.json").write_text(json.dumps(config))
    assert (proposals(target, draft) == proposals(target, plain)) == ("num_hidden_layers" in options)


def test_tokens_that_only_round_the_targets_head_up_are_never_proposed(
    target: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    """The head has 512 rows, the tokenizer 300 ids; under thresholds such a proposal had no probability."""
    for size in (80, 512):
        draft = write_random_draft(tmp_path / f"draft{size}", target, "eagle3", draft_vocab_size=size)
        lowered = {"num_ids": 300, "speculative_accept_threshold_acc": 0.5}
        proposed = {token for tree in proposals(target, draft, **lowered) for token in tree[0][1:]}
        assert len(proposed) > 5 and max(proposed) < 300


def test_a_draft_of_the_whole_vocabulary_needs_no_map(target: pathlib.Path, tmp_path: pathlib.Path) -> None:
    draft = write_random_draft(tmp_path / "draft", target, "eagle3", draft_vocab_size=512)
    expected = proposals(target, draft)
    tensors = load_file(draft / "model.safetensors")
    assert not tensors.pop("d2t").any()
    save_file(tensors, draft / "model.safetensors")
    assert proposals(target, draft) == expected
    save_file({**tensors, "d2t": torch.arange(512).flip(0)}, draft / "model.safetensors")
    with pytest.raises(ValueError, match=r"d2t .* gives the tokens other ids"):
        proposals(target, draft)


def test_a_draft_that_captures_one_row_has_nothing_to_fuse(
    target: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    layers = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1]}}
    draft = write_random_draft(tmp_path / "draft", target, "eagle3", draft_vocab_size=80, **layers)
    with pytest.raises(ValueError, match=r"holds fc\.weight, and its config captures one row as wide"):
        proposals(target, draft)
    tensors = load_file(draft / "model.safetensors")
    del tensors["fc.weight"]
    save_file(tensors, draft / "model.safetensors")
    assert len(set(map(str, proposals(target, draft)))) > 3


@pytest.mark.parametrize(("algorithm", "size"), [("EAGLE3", 80), ("EAGLE", None), ("STANDALONE", None)])
def test_more_branches_than_tokens_are_refused_when_the_draft_is_loaded(
    target: pathlib.Path, tmp_path: pathlib.Path, algorithm: str, size: int | None
) -> None:
    draft = target
    if algorithm != "STANDALONE":
        draft = write_random_draft(tmp_path / "draft", target, algorithm.lower(), draft_vocab_size=size)  # type: ignore[arg-type]
    wide = {"speculative_num_steps": 2, "speculative_eagle_topk": 400, "speculative_num_draft_tokens": 8}
    fields = {"speculative_algorithm": algorithm, "speculative_draft_model_path": str(draft), **wide}
    with (
        pytest.raises(ValueError, match=r"--speculative-eagle-topk 400 is more than the \d+ tokens"),
        driven_worker(target, num_ids=300, **fields),
    ):
        pass


def test_a_round_that_no_pool_of_this_size_can_hold_is_refused(target: pathlib.Path) -> None:
    wide = {"speculative_num_steps": 40, "speculative_eagle_topk": 20, "speculative_num_draft_tokens": 64}
    fields = {"speculative_algorithm": "STANDALONE", "speculative_draft_model_path": str(target), **wide}
    with (
        pytest.raises(
            ValueError, match=r"takes up to 781 slots of a request, and the KV pool has 512 tokens"
        ),
        driven_worker(target, max_total_tokens=512, **fields),
    ):
        pass
