"""The judgement of a rehearsal tells right rows from wrong ones; no vLLM here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from vllm_compat.commands.rehearse import program  # noqa: E402
from vllm_compat.commands.rehearse.rehearse import shrink  # noqa: E402
from vllm_compat.trial.checkpoint import NoReferenceError, make_checkpoint  # noqa: E402
from vllm_compat.trial.reference import reference_hidden_states  # noqa: E402

MODELS = Path(__file__).parents[1] / "models"
LAYERS = [0, 1, 2, 3]


@pytest.fixture(scope="module", params=["qwen3-8b", "deepseek-v3"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function that judges rows after `change(results)` has been at them."""
    work = tmp_path_factory.mktemp(request.param)
    folder = work / "model"
    folder.mkdir()
    own = json.loads((MODELS / request.param / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(shrink(own, None, vocabulary=768).config))
    program._stand_in_files(folder, {"own_tokenizer": False}, {"notes": []})
    make_checkpoint(folder, work / "reference")
    text = json.loads((folder / "config.json").read_text())
    prompts = program.prompts_of(768, 6, 2048)
    reference = reference_hidden_states(work / "reference", prompts, LAYERS)

    def judge(change: Any) -> dict[str, Any]:
        batches = [prompts, prompts[::-1]]
        results = []
        for batch, layers in zip(batches, [reference, reference[::-1]], strict=True):
            rows = [[h.to(torch.bfloat16) for h in sample] for sample in layers]
            found = [
                {"input_ids": torch.tensor(ids), "hidden_states": states}
                for ids, states in zip(batch, rows, strict=True)
            ]
            change(found)
            results.append(found)
        result: dict[str, Any] = {"samples": 12}
        program._judge({}, result, text, work / "reference", batches, results, LAYERS)
        return result

    return judge


def test_right_rows_are_right(case: Any) -> None:
    result = case(lambda found: None)
    assert result["outcome"] == "right", result.get("error")
    assert "compared with transformers in float32" in result["compared"]


def swap_two_samples(found: list[dict[str, Any]]) -> None:
    a, b = (next(f for f in found if len(f["input_ids"]) == n) for n in (200, 64))
    a["hidden_states"][3][:64], b["hidden_states"][3][:] = (
        b["hidden_states"][3].clone(),
        a["hidden_states"][3][:64].clone(),
    )


def swap_two_rows(found: list[dict[str, Any]]) -> None:
    rows = next(f for f in found if len(f["input_ids"]) == 33)["hidden_states"][2]
    rows[[4, 20]] = rows[[20, 4]]


def take_the_layer_before(found: list[dict[str, Any]]) -> None:
    for sample in found:
        sample["hidden_states"] = [sample["hidden_states"][max(0, k - 1)] for k in range(4)]


def lose_a_scale(found: list[dict[str, Any]]) -> None:
    for sample in found:
        sample["hidden_states"] = [h * 1.2 for h in sample["hidden_states"]]


@pytest.mark.parametrize(
    "change", [swap_two_samples, swap_two_rows, take_the_layer_before, lose_a_scale]
)
def test_wrong_rows_are_wrong(case: Any, change: Any) -> None:
    result = case(change)
    assert result["outcome"] == "wrong"
    assert "compared" not in result


def test_prompts_differ_from_the_first_token_on() -> None:
    prompts = program.prompts_of(768, 40, 64)
    assert len({tuple(prompt[:1]) for prompt in prompts}) == 40
    assert {len(prompt) for prompt in prompts} >= {1, 2, 63}
    assert all(0 <= token < 768 for prompt in prompts for token in prompt)


def test_an_architecture_that_transformers_lacks_has_no_reference(tmp_path: Path) -> None:
    config = {"architectures": ["NoSuchForCausalLM"], "model_type": "no_such", "num_hidden_layers": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(NoReferenceError, match="no_such"):
        make_checkpoint(tmp_path, tmp_path / "reference")
