"""What vLLM would choose, asked from its own code on a machine without a GPU."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lab.environments import EnvironmentPaths

pytestmark = pytest.mark.e2e
MODELS = Path(__file__).parent.parent / "models"
Environment = Callable[[str, str], EnvironmentPaths]


def ask(environment: Environment, model: str, *arguments: str) -> dict[str, Any]:
    done = environment("0.16.0", "0.3.0").run(
        ["-m", "vllm_compat", "preflight", MODELS / model, "--json", *arguments],
        environment={"VLLM_MLA_DISABLE": "0"},  # which the CPU runs need
        timeout=400,
    )
    assert done.stdout, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    assert report["exit_status"] == done.returncode
    return report


def test_kimi_int4_on_eight_devices_of_capability_12(environment: Environment) -> None:
    report = ask(
        environment, "kimi-k2.5", "--device-capability", "12.0", "--devices", "8",
        "--device-memory", "96GiB", "--layer-ids", "2", "30", "58", "60",
    )  # fmt: skip
    asked = report["asked"]
    assert asked["attention"] == {"TRITON_MLA": 61}, asked
    assert asked["moe_methods"] == ["CompressedTensorsWNA16MarlinMoEMethod"]
    assert asked["standing_in"]
    assert 70 < asked["weight_bytes"] / 2**30 < 75
    assert report["exit_status"] == 0


def test_another_capability_gets_another_answer(environment: Environment) -> None:
    asked = ask(environment, "deepseek-v3", "--device-capability", "9.0", "--devices", "8",
                "--device-memory", "80GiB")["asked"]  # fmt: skip
    assert set(asked["attention"]) != {"TRITON_MLA"}, asked
    assert asked["moe_methods"] == ["Fp8MoEMethod"]
