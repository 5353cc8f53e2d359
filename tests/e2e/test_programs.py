"""Programs that people run: unmodified under the launcher, and with apply() in every place."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from lab.environments import EnvironmentPaths

pytestmark = pytest.mark.e2e
PROGRAMS = Path(__file__).parent.parent / "programs"
LIMIT = 400
Environment = Callable[[str, str], EnvironmentPaths]
Models = Callable[..., Path]

CHATS = [
    [
        {"role": "user", "content": f"What is {n} times {n}? 你好 🙂 " + "more " * (n % 5)},
        {"role": "assistant", "content": f"It is {n * n}.\n```python\nprint({n} * {n})\n```"},
    ]
    for n in range(14)
]

CHECK = """
import json, sys
from pathlib import Path
import torch
from vllm_compat.trial.reference import compare, reference_hidden_states
model, folder = sys.argv[1:]
files = sorted(Path(folder).glob("data_*.pt"), key=lambda p: int(p.stem[5:]))
data = [torch.load(f, weights_only=True) for f in files]
ids = [d["input_ids"].tolist() for d in data]
reference = reference_hidden_states(model, ids, [1, 3])
# Stock runs a float32 checkpoint in bfloat16. Layer 0 of the tiny Kimi has no router.
first = reference_hidden_states(model, ids, [0])
worst = compare([[d["hidden_states"][0]] for d in data], first).worst
sizes = [f.stat().st_size for f in files]
print(json.dumps({"files": len(files), "worst": worst, "largest": max(sizes),
                  "masks": all(len(d["loss_mask"]) == len(d["input_ids"]) for d in data)}))
"""


@pytest.mark.parametrize("speculators", ["0.3.0", "0.4.0.1"])
def test_the_offline_script_unmodified_under_the_launcher(
    environment: Environment, models: Models, tmp_path: Path, speculators: str
) -> None:
    paths = environment("0.16.0", speculators)
    model = models("kimi_k25")
    chats = tmp_path / "chats.jsonl"
    chats.write_text("\n".join(json.dumps({"conversations": chat}) for chat in CHATS))
    out = tmp_path / "out"
    done = paths.run(
        ["-m", "vllm_compat", "run", PROGRAMS / "extract.py", "--target-model-path", model,
         "--train-data-path", chats, "--output-dir", out, "--layer-ids", "0", "1", "3",
         "--batch-size", "12"],
        timeout=LIMIT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert "saved 14 samples" in done.stdout
    verdict = done.stderr.strip().splitlines()[-1]
    assert verdict.startswith("vllm-compat: run finished, exit status 0")
    assert "14 samples" in verdict
    check = paths.run(["-c", CHECK, model, out], timeout=LIMIT)
    assert check.returncode == 0, check.stderr
    found = json.loads(check.stdout.strip().splitlines()[-1])
    assert found["files"] == 14
    assert found["masks"]
    assert found["worst"] < 0.05  # bfloat16; a row of another request is off by 1.4
    assert found["largest"] < 2**20  # each file holds its own rows, not the buffer they came from


TOP = "import vllm_compat\nvllm_compat.apply()\n"
IMPORT = (
    "from speculators.data_generation.vllm_hidden_states_generator import VllmHiddenStatesGenerator\n"
)
MAIN = """
if __name__ == "__main__":
    import sys
{inside}
    generator = VllmHiddenStatesGenerator(sys.argv[1], layer_ids=[0, 3], max_model_len=128)
    results = generator.generate([[5] * n for n in range(1, 13)])
    print("LENGTHS", *[len(r["hidden_states"][0]) for r in results])
    generator.executor.shutdown()
"""
SHAPES = {
    "apply at the top, before the imports": TOP + IMPORT + MAIN.format(inside=""),
    "apply at the top, after the imports": IMPORT + TOP + MAIN.format(inside=""),
    "apply inside main": IMPORT + MAIN.format(inside="    import vllm_compat\n    vllm_compat.apply()"),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_apply_in_every_place_of_a_program(
    environment: Environment, models: Models, tmp_path: Path, shape: str
) -> None:
    program = tmp_path / "program.py"
    program.write_text(SHAPES[shape])
    paths = environment("0.16.0", "0.4.0.1")
    done = paths.run([program, models("llama")], timeout=LIMIT)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "LENGTHS " + " ".join(map(str, range(1, 13))) in done.stdout


IDS = (
    IMPORT
    + """
if __name__ == "__main__":
    import sys
    import torch
    generator = VllmHiddenStatesGenerator(
        sys.argv[1], layer_ids=[0, 3], max_model_len=128, tensor_parallel_size=2
    )
    good = [[5, 767, 0], [6, 7, 8]]
    for batch in (good, torch.tensor(good), [torch.tensor(ids) for ids in good]):
        print("LENGTHS", *[len(r["hidden_states"][0]) for r in generator.generate(batch)])
    generator.generate([[5, 6], [7, 8, 9, 770, 10]])
"""
)


def test_an_id_that_the_model_does_not_have_ends_the_run_with_prompt_and_token(
    environment: Environment, models: Models, tmp_path: Path
) -> None:
    program = tmp_path / "program.py"
    program.write_text(IDS)
    paths = environment("0.16.0", "0.4.0.1")
    done = paths.run(
        ["-m", "vllm_compat", "run", program, models("llama")], tensor_parallel_size=2, timeout=LIMIT
    )
    assert done.stdout.count("LENGTHS 3 3") == 3, done.stderr[-3000:]
    assert done.returncode != 0
    verdict = done.stderr[done.stderr.rindex("vllm-compat: run") :]
    assert "Prompt 1, token 3: id 770, the model has 768 (ids 0 to 767)" in verdict
    assert "6 samples" in verdict


def test_an_allow_list_that_shuts_us_out_is_named(
    environment: Environment, models: Models, tmp_path: Path
) -> None:
    program = tmp_path / "program.py"
    program.write_text(SHAPES["apply inside main"])
    paths = environment("0.16.0", "0.4.0.1")
    done = paths.run([program, models("llama")], environment={"VLLM_PLUGINS": "another"}, timeout=LIMIT)
    assert done.returncode != 0
    assert "VLLM_PLUGINS" in done.stderr
    assert "vllm_compat" in done.stderr


def test_a_killed_worker_ends_the_run_with_its_cause(
    environment: Environment, models: Models, tmp_path: Path
) -> None:
    paths = environment("0.16.0", "0.4.0.1")
    script = Path(__file__).parent.parent.parent / "scripts" / "gpu" / "kill_worker.py"
    out = tmp_path / "killed.json"
    try:
        done = paths.run([script, models("llama"), out, "2"], tensor_parallel_size=2, timeout=LIMIT)
    except subprocess.TimeoutExpired as error:
        raise AssertionError("the run went on after its worker was killed") from error
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads(out.read_text())
    assert "rank 1" in record["verdict"]
    assert "killed by signal 9" in record["verdict"]
    assert record["processes_left"] == record["shared_memory_left"] == []
    assert record["processes_with_slabs_before"] > 0
    assert record["processes_with_slabs_left"] == 0


def test_a_killed_driver_leaves_nothing(
    environment: Environment, models: Models, tmp_path: Path
) -> None:
    paths = environment("0.16.0", "0.4.0.1")
    script = Path(__file__).parent.parent.parent / "scripts" / "gpu" / "kill_worker.py"
    out = tmp_path / "killed.json"
    done = paths.run([script, models("llama"), out, "1", "driver"], timeout=LIMIT)
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads(out.read_text())
    assert "run killed by SIGKILL" in record["verdict"]
    assert record["processes_left"] == []
    assert record["processes_with_slabs_before"] == 2
    assert record["processes_with_slabs_left"] == 0
