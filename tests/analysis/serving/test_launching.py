"""A launcher's command is judged by what recorded vLLM servers offer, before anything loads."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace

import pytest
from packaging.version import Version

from vllm_compat.analysis.serving.launchers import launcher_of
from vllm_compat.analysis.serving.launching import (
    Judgement,
    ServeCommand,
    Served,
    command_from_arguments,
    command_from_output,
    judge_command,
)
from vllm_compat.analysis.serving.recorded import recorded_models, recorded_offer

CHUNKS, PREFIXES = "--no-enable-chunked-prefill", "--no-enable-prefix-caching"
SCALE_OUT = "--enable-scale-out"


def judged(vllm: str, given: str = "", *, launcher: str = "0.9.0", **traits: object) -> Judgement:
    """Judge the command ``vllm serve m GIVEN`` of a launcher on a recorded vLLM."""
    offered = recorded_offer(vllm)
    assert offered is not None
    ids = traits.pop("ids", ())
    command = ServeCommand(("m", *given.split()), ids)  # type: ignore[arg-type]
    served = replace(Served(offered, vllm), **traits)  # type: ignore[arg-type]
    return judge_command(command, launcher_of(Version(launcher)), served)


def model(vllm: str, name: str) -> dict[str, object]:
    models = recorded_models(vllm)
    assert models is not None
    return {"models": (models[name],), "layers": 8}


@pytest.mark.parametrize(
    ("vllm", "given", "added"),
    [
        ("0.18.0", "", [CHUNKS]),
        ("0.21.0", "", [CHUNKS]),
        ("0.22.1", "", [CHUNKS, PREFIXES]),
        ("0.23.0", CHUNKS, [PREFIXES]),
        ("0.23.0", f"{CHUNKS} {PREFIXES}", []),
        ("0.23.0", "--enable_prefix_caching=False --enable-chunked-prefill False", []),
        ("0.24.0", "", []),
        ("0.29.0", "", []),
        ("0.30.0", "", [SCALE_OUT]),
        ("0.34.0", "", [SCALE_OUT]),
        ("0.34.0", SCALE_OUT, []),
        ("0.34.0", "--enable_scale_out", []),
    ],
)
def test_flags_that_this_vllm_needs_are_added_once(vllm: str, given: str, added: list[str]) -> None:
    found = judged(vllm, given)
    assert list(found.add) == added
    assert found.refused == []
    assert all(why.endswith(".") for why in found.add.values())


def test_the_render_flag_is_for_clients_that_render() -> None:
    assert list(judged("0.34.0", client="0.7.0.2").add) == []
    assert list(judged("0.34.0", client="0.8.1").add) == [SCALE_OUT]


def test_a_launcher_that_switches_chunked_prefill_off_still_needs_the_other_flag() -> None:
    assert list(judged("0.22.1", CHUNKS, launcher="0.6.0").add) == [PREFIXES]


@pytest.mark.parametrize(
    ("vllm", "given", "says"),
    [
        ("0.16.0", "", "`vllm serve` knows no method extract_hidden_states"),
        ("0.20.2", "--enable-chunked-prefill", "zero or stale rows"),
        ("0.22.1", "--enable-prefix-caching", "rows of other requests"),
        ("0.23.0", "--enable_chunked_prefill=true", "does not start with chunked prefill"),
        ("0.32.0", "--pipeline-parallel-size 2", "pipeline parallelism"),
        ("0.32.0", "--kv-cache-dtype fp8", "give auto, bfloat16 or float16"),
        ("0.20.2", "--max-model-len 4096 --max-num-batched-tokens 2k", "give at least 4096"),
    ],
)
def test_what_cannot_go_well_is_refused_with_the_way_out(vllm: str, given: str, says: str) -> None:
    found = judged(vllm, given)
    assert says in " ".join(found.refused)
    assert all(reason.endswith(".") for reason in found.refused)


def test_the_way_out_of_a_vllm_without_the_method_is_named() -> None:
    assert "speculators 0.4.0.1" in judged("0.16.0").refused[0]


@pytest.mark.parametrize(
    ("vllm", "name", "ids", "refused"),
    [
        ("0.24.0", "DeepseekV3ForCausalLM", (2, 4, 5, 8), "no state after its last layer"),
        ("0.24.0", "DeepseekV3ForCausalLM", (2, 4, 5), ""),
        ("0.24.0", "DeepseekV3ForCausalLM", (), "no state after its last layer"),
        ("0.25.0", "DeepseekV3ForCausalLM", (2, 4, 5, 8), ""),
        ("0.17.1", "LlamaForCausalLM", (2, 4, 5, 8), "no state after its last layer"),
        ("0.18.0", "LlamaForCausalLM", (2, 4, 5, 8), ""),
        ("0.34.0", "MixtralForCausalLM", (2, 4, 5), "does not implement SupportsEagle3"),
        ("0.34.0", "LlamaForCausalLM", (2, 9), "Layer id 9 is not there"),
    ],
)
def test_a_model_is_refused_for_what_its_class_lacks(
    vllm: str, name: str, ids: tuple[int, ...], refused: str
) -> None:
    found = judged(vllm, ids=ids, **model(vllm, name))
    assert bool(found.refused) is bool(refused)
    assert refused in " ".join(found.refused)


@pytest.mark.parametrize(
    ("vllm", "says"), [("0.21.0", "refuses"), ("0.22.1", "NaN"), ("0.24.0", "zeros"), ("0.25.0", "")]
)
def test_hybrids_are_refused_before_0_25(vllm: str, says: str) -> None:
    found = judged(vllm, hybrid="Qwen3NextForCausalLM")
    assert bool(found.refused) is bool(says)
    assert says in " ".join(found.refused)


def test_what_only_the_user_can_decide_is_said() -> None:
    notes = " ".join(judged("0.32.0", "--max-model-len 2049 --config c.yaml", ids=(6, 2, 4)).notes)
    assert "--seq-length of at most 2048" in notes
    assert "ascending order of the ids, 2, 4, 6" in notes
    assert "--config" in notes
    assert "one token shorter" in judged("0.32.0").notes[0]


def test_a_vllm_that_says_no_release_is_judged_by_its_source_alone() -> None:
    offered = recorded_offer("0.22.1")
    assert offered is not None
    asks = launcher_of(Version("0.9.0"))
    found = judge_command(ServeCommand(("m",)), asks, Served(offered, "unknown"))
    assert list(found.add) == [CHUNKS]
    assert "does not say its release" in " ".join(found.notes)


def test_the_command_is_read_from_what_a_dry_run_prints() -> None:
    speculative = {
        "method": "extract_hidden_states",
        "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": [2, 4, 8]}},
    }
    words = ["m/x", "--speculative_config", json.dumps(speculative), "--max-model-len", "2048"]
    printed = "Running command:\npython -m vllm.entrypoints.cli.main serve " + " ".join(words) + "\n"
    command = command_from_output(printed)
    assert command == ServeCommand(tuple(words), (2, 4, 8))
    assert command.number("max_model_len") == 2048
    assert command_from_output("usage: x") is None
    assert command_from_output("python serve m {broken") is None


def test_the_command_is_read_from_arguments_where_there_is_no_dry_run() -> None:
    given = shlex.split("m --target-layer-ids 2 4 -- --max-model-len=4K --no-enable-prefix-caching")
    command = command_from_arguments(given)
    assert command.layer_ids == (2, 4)
    assert command.number("max_model_len") == 4096
    assert command.given("enable_prefix_caching") == "no"
    assert command.given("enable_chunked_prefill") is None
