"""What is known to go wrong where speculators takes hidden states from a vLLM server (0.5 and later).

vllm_compat does not serve that flow: no adapter is put in force and no guard looks at its data. Until
it does, ``vllm-compat check`` says what is known of a pair, one row a hazard. Rows are data: pure,
dated by releases on both sides, each with the public place where it can be seen. A version counts by
its base, so that ``0.24.0+cpu`` is 0.24.0 and a nightly ``0.35.0.dev1`` is 0.35.0; a row without an
upper end holds for what comes until somebody has seen that it does not.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from packaging.version import Version

    from vllm_compat.analysis.contract import Contract

FIRST = "0.5"
"""The first speculators whose hidden states come from a server."""

IN_PROCESS = (
    "The in-process VllmHiddenStatesGenerator, which vllm_compat serves, is in speculators 0.3.0, 0.4.0"
    " and 0.4.0.1."
)
UNSERVED = "vllm_compat does not serve the server flow yet and does not guard its data"


class Harm(str, Enum):
    """What a hazard does, the worst first.

    ``wrong data``: files that look right are not, and nothing stops. ``lost data``: samples are
    missing or cut, at most with a warning. ``failure``: something does not start, ends with an error,
    or does not do what was asked.
    """

    WRONG = "wrong data"
    LOST = "lost data"
    FAILURE = "failure"


@dataclass(frozen=True)
class Hazard:
    """One thing that is known to go wrong on a range of vLLM with a range of the downstream.

    ``vllm`` and ``downstream`` are packaging specifiers of base versions; ``sentence`` says what
    happens, ``remedy`` what to do by hand; ``source`` names public threads or files.
    """

    key: str
    harm: Harm
    vllm: str
    downstream: str
    sentence: str
    remedy: str
    source: str

    @property
    def ranges(self) -> str:
        """Both ranges, for people; the downstream's where it is not the whole flow."""
        narrower = f", speculators {self.downstream}" if self.downstream != f">={FIRST}" else ""
        return f"vLLM {self.vllm}{narrower}"


_CONNECTOR = "vllm/distributed/kv_transfer/kv_connector/v1/example_hidden_states_connector.py"
_CHUNKS = ">=0.5,!=0.6.*,!=0.7.*"  # launchers that leave chunked prefill on
_NO_CHUNKS = (
    "put `--no-enable-chunked-prefill --max-num-batched-tokens N` after the launcher's `--`, with N at"
    " least --max-model-len"
)

# The worst first; of one harm, what few releases have before what all have.
HAZARDS = (
    Hazard(
        "chunked-prefill.rows",
        Harm.WRONG,
        ">=0.18,<0.22",
        _CHUNKS,
        "Chunked prefill is on, and what is written last may be an earlier chunk: prompts that are split"
        " get rows that are zero or stale, in the right shape and without an error.",
        _NO_CHUNKS,
        f"vllm#43805, vllm#39949; {_CONNECTOR} (0.20.2)",
    ),
    Hazard(
        "prefix-caching.rows",
        Harm.WRONG,
        ">=0.22,<0.24",
        ">=0.5",
        "Prefix caching is on, and the connector cuts rows out of what one step computed: prompts that"
        " share a beginning get too few rows, or rows of other requests in the right number, which no"
        " check of stock's sees.",
        "put `--no-enable-prefix-caching --no-enable-chunked-prefill` after the launcher's `--`, and"
        " throw away what was written without it",
        f"vllm#44485; {_CONNECTOR} (0.22.1)",
    ),
    Hazard(
        "hybrid.zero",
        Harm.WRONG,
        ">=0.24,<0.25",
        ">=0.5",
        "Hybrid models (Mamba or linear attention beside attention, such as Qwen3.5) get states that are"
        " all zero, without an error: training converges, and nothing of the draft is accepted.",
        "use vLLM 0.25 or later for them",
        "vllm#46301, speculators#613",
    ),
    Hazard(
        "hybrid.nan",
        Harm.WRONG,
        ">=0.22,<0.24",
        ">=0.5",
        "Hybrid models (Mamba or linear attention beside attention, such as Qwen3.5) get states that are"
        " NaN, without an error (`--validate-outputs` of speculators 0.7 and later sees it).",
        "use vLLM 0.25 or later for them (0.24 gives zeros)",
        "vllm#45734, vllm#45849, speculators#615",
    ),
    Hazard(
        "kimi-k3.last-layer",
        Harm.WRONG,
        ">=0.27",
        ">=0.5",
        "The state after Kimi-K3's last layer lacks what its attention residual adds: the draft is"
        " trained on a target that is not the model's (reported, open).",
        "none is known; do not plan a run on it before the fix is in a release",
        "vllm#50815",
    ),
    Hazard(
        "columns.order",
        Harm.WRONG,
        ">=0.17",
        ">=0.5",
        "The columns of the hidden states stand in ascending order of the layer ids, whatever the order"
        " that --target-layer-ids asks for.",
        "give the ids in ascending order, to the launcher and to the trainer",
        "vllm/model_executor/models/llama.py (0.32.0)",
    ),
    Hazard(
        "layer-ids.unchecked",
        Harm.WRONG,
        ">=0.17",
        ">=0.5",
        "Files do not say which layers, model or vLLM they come from: a server and a trainer with"
        " different --target-layer-ids go unnoticed as long as there are as many.",
        "give the same model and ids to both, and keep the files of each setting in a folder of their"
        " own",
        f"{_CONNECTOR} (0.32.0); speculators/train/data.py (0.9.0)",
    ),
    Hazard(
        "outputs.unchecked",
        Harm.LOST,
        ">=0.17",
        ">=0.5",
        "A sample that fails is skipped with a warning and exit status 0, and the files are looked at"
        " (ids and number of rows; finite from 0.7 on; neither zeros nor foreign rows) only where asked"
        " for.",
        "generate with `--validate-outputs`, from 0.8 on also `--fail-on-error`; count the files; run"
        " `vllm-compat verify` on the folder; empty the server's folder after each stop",
        "speculators/data_generation/vllm_client.py, speculators/cli/generate_offline_data.py (0.8.1)",
    ),
    Hazard(
        "writer.lock",
        Harm.LOST,
        ">=0.22",
        ">=0.5,<0.6",
        "This client does not wait for the server's writer, which is a thread from vLLM 0.22 on: files"
        " are not there yet (`Skipping sample … No such file or directory`) or cut short.",
        "use speculators 0.6 or later, whose client waits for the writer's lock",
        f"speculators/data_generation/vllm_client.py (0.5.0); {_CONNECTOR} (0.22.1)",
    ),
    Hazard(
        "render.truncation",
        Harm.LOST,
        ">=0.18,<0.22",
        ">=0.9",
        "prepare-data asks for cuts on the right, and vLLM before 0.22 takes no notice of"
        " truncation_side: conversations longer than --seq-length are cut on the left and dropped, with"
        " exit status 0.",
        "render on a server of vLLM 0.22 or later, or give a --seq-length that no conversation exceeds",
        "vllm/tokenizers/registry.py (0.20.2); speculators/data_generation/render_client.py (0.9.0)",
    ),
    Hazard(
        "length.one-more",
        Harm.LOST,
        ">=0.17",
        ">=0.5",
        "Each request asks for one token more, so a prompt of --max-model-len tokens is refused: the"
        " longest samples are skipped with a warning.",
        "give `--max-model-len` at least --seq-length + 1 after the launcher's `--`",
        "speculators/data_generation/vllm_client.py (0.9.0)",
    ),
    Hazard(
        "method.missing",
        Harm.FAILURE,
        "<0.17",
        ">=0.5",
        "This vLLM has neither the extract_hidden_states method nor a connector for hidden states: the"
        " server ends at its start with a validation error.",
        "serve with a later vLLM (docs/start.md counts what is known to go wrong with each), or extract"
        " in process with speculators 0.4.0.1",
        "vllm#33736; vllm/config/speculative.py (0.16.0)",
    ),
    Hazard(
        "last-layer.any-model",
        Harm.FAILURE,
        ">=0.17,<0.18",
        ">=0.5",
        "No model of vLLM 0.17 offers the state after its last layer, which the launcher asks for"
        " (--include-last-layer is its default): the engine dies after loading.",
        "serve with a later vLLM (docs/start.md counts what is known to go wrong with each)",
        "vllm/model_executor/models/llama.py, vllm/v1/spec_decode/extract_hidden_states.py (0.17.1)",
    ),
    Hazard(
        "last-layer.deepseek",
        Harm.FAILURE,
        ">=0.18,<0.25",
        ">=0.5",
        "DeepSeek-V2/V3, V3.2, Kimi-K2 and the GLM models that share their code offer no state after the"
        " last layer: after loading, the engine dies (`The expanded size of the tensor (4) must match"
        " the existing size (3)`).",
        "serve them with vLLM 0.25 or later",
        "vllm#48124, vllm#46973",
    ),
    Hazard(
        "last-layer.qwen3-next",
        Harm.FAILURE,
        ">=0.18,<0.24",
        ">=0.5",
        "Qwen3-Next does not implement SupportsEagle3, so that no state of it is offered, the one after"
        " its last layer as little as others: it is refused after loading.",
        "serve it with vLLM 0.25 or later",
        "vllm/model_executor/models/qwen3_next.py (0.23.0), which does from 0.24.0 on",
    ),
    Hazard(
        "last-layer.deepseek-v3.2",
        Harm.FAILURE,
        ">=0.29",
        ">=0.5",
        "DeepSeek-V3.2 and GLM-5 offer no state after their last layer on CUDA, where they have a class"
        " of their own (up to 0.34 at least): the engine dies after loading.",
        "serve them with vLLM 0.25 to 0.28, where they are of DeepSeek-V3's class",
        "vllm/model_executor/models/registry.py (0.28.0);"
        " vllm/models/deepseek_v32/nvidia/model.py (0.29.0, 0.34.0)",
    ),
    Hazard(
        "models.unsupported",
        Harm.FAILURE,
        ">=0.17",
        ">=0.5",
        "Models that do not implement SupportsEagle3 (never Gemma-3, Mixtral, Bamba) are refused after"
        " loading: `Model does not support EAGLE3 interface`.",
        "look for SupportsEagle3 in the model's source first; in process, speculators 0.4.0.1 with"
        " vllm_compat does not need it",
        "vllm#45538; vllm/v1/worker/gpu_model_runner.py (0.32.0)",
    ),
    Hazard(
        "hybrid.refused",
        Harm.FAILURE,
        ">=0.17,<0.22",
        ">=0.5",
        "Hybrid models (Mamba or linear attention beside attention, such as Qwen3.5) are refused at the"
        " server's start.",
        "use vLLM 0.25 or later for them (0.22 to 0.24 give NaN or zeros)",
        "vllm#36485, vllm#39949",
    ),
    Hazard(
        "chunked-prefill.assert",
        Harm.FAILURE,
        ">=0.17,<0.18",
        _CHUNKS,
        "Chunked prefill is on, and the first prompt that is split kills the engine with an assertion.",
        _NO_CHUNKS,
        f"{_CONNECTOR} (0.17.1)",
    ),
    Hazard(
        "chunked-prefill.refused",
        Harm.FAILURE,
        ">=0.22,<0.24",
        _CHUNKS,
        "The server refuses to start with chunked prefill, and the launcher does not switch it off.",
        "put `--no-enable-chunked-prefill --no-enable-prefix-caching --max-num-batched-tokens N` after"
        " the launcher's `--`, with N at least --max-model-len (prefix caching gives wrong rows here)",
        "vllm#37374, speculators#564; vllm/config/vllm.py (0.22.1)",
    ),
    Hazard(
        "batched-tokens",
        Harm.FAILURE,
        ">=0.17",
        ">=0.6,<0.8",
        "The launcher switches chunked prefill off, and the server then refuses a"
        " --max-num-batched-tokens below --max-model-len.",
        "give `--max-num-batched-tokens` at least --max-model-len after the launcher's `--`",
        "vllm/config/scheduler.py (0.20.2)",
    ),
    Hazard(
        "abort",
        Harm.FAILURE,
        ">=0.24,<0.31",
        ">=0.5",
        "A request that is aborted while it waits (the client's timeout is 15 s in speculators 0.5 and"
        " 120 s later) kills the engine with a KeyError, and every later request fails.",
        "use vLLM 0.31 or later, or a longer `--request-timeout` and a small `--concurrency`",
        f"vllm#56841; {_CONNECTOR} (0.30.0)",
    ),
    Hazard(
        "render.answer",
        Harm.FAILURE,
        "<0.18",
        ">=0.8",
        "/v1/chat/completions/render does not answer with the token_ids that prepare-data reads.",
        "render on a server of vLLM 0.22 or later",
        "speculators/data_generation/render_client.py (0.8.1)",
    ),
    Hazard(
        "render.scale-out",
        Harm.FAILURE,
        ">=0.30",
        ">=0.8",
        "/v1/chat/completions/render is only there with a flag that the launcher does not give:"
        " prepare-data gets 404 (403 from 0.32 on) and ends with `No samples remain after"
        " preprocessing`.",
        "put `--enable-scale-out` after the launcher's `--`",
        "vllm/entrypoints/scale_out/factories.py (0.32.0)",
    ),
    Hazard(
        "tensor-parallel.page-size",
        Harm.FAILURE,
        ">=0.25,<0.30",
        ">=0.5",
        "With tensor parallelism some large models end at the server's start with `assert"
        " page_size_padded >= real_page_size` (reported of 0.25.1 and 0.26.0).",
        "use vLLM 0.30 or later, or fewer ranks",
        "vllm#51016",
    ),
    Hazard(
        "deepseek-v4.memory",
        Harm.FAILURE,
        ">=0.26",
        ">=0.5",
        "DeepSeek-V4 asks for hundreds of GiB of KV cache, after loading (reported of 0.26, open).",
        "none is known; do not plan a run on it",
        "vllm#53243",
    ),
    Hazard(
        "kimi-k3.memory",
        Harm.FAILURE,
        ">=0.29",
        ">=0.5",
        "Models that mix Mamba and MLA (Kimi-K3) are charged many times the KV cache that hidden states"
        " need, and the start fails after loading (reported, open).",
        "give a smaller `--max-model-len`",
        "vllm#56774, vllm#56822",
    ),
    Hazard(
        "pipeline-parallel",
        Harm.FAILURE,
        ">=0.17",
        ">=0.5",
        "Hidden states cannot be extracted with pipeline parallelism.",
        "use tensor parallelism, or one rank",
        "vllm#53015",
    ),
    Hazard(
        "fp8.silent",
        Harm.FAILURE,
        ">=0.17,<0.22",
        ">=0.9",
        "The fp8 backend for hidden states has no effect before vLLM 0.22: files are bfloat16, twice as"
        " large, and nothing says so.",
        "reckon with bfloat16 files, or serve with vLLM 0.25 or later",
        f"hs-connectors 0.9.0; {_CONNECTOR} (0.20.2)",
    ),
)


def release_of(version: str) -> Version | None:
    """Return the release that a version belongs to; None where it says none.

    A build from source without tags calls itself 0.1.dev1+g<commit> or 0.0.0: it belongs to none.
    """
    from packaging.version import InvalidVersion, Version

    try:
        base = Version(Version(version).base_version)
    except InvalidVersion:
        return None
    return None if base.release[:2] in ((0, 0), (0, 1)) or base.release == (0,) else base


def in_server_flow(contract: Contract) -> bool:
    """Whether hidden states come from a server: speculators without an in-process generator.

    Releases before 0.3 have neither. A version of 0.3 or 0.4 without the generator is a wrong one:
    the source of some later releases calls itself so.
    """
    from packaging.version import InvalidVersion, Version

    from vllm_compat.analysis.planner import roles_of

    if contract.package != "speculators" or roles_of(contract).generator:
        return False
    try:
        return Version(contract.version) >= Version("0.3")
    except InvalidVersion:
        return True


def hazards_of(downstream: str, vllm: str) -> tuple[Hazard, ...]:
    """Return what is known of a pair of versions, the worst first.

    A version that says no release (``unknown``, an untagged build, a downstream before the server
    flow) is in every range.
    """
    from packaging.specifiers import SpecifierSet
    from packaging.version import Version

    here, there = release_of(vllm), release_of(downstream)
    if there is not None and there < Version(FIRST):
        there = None

    def within(version: Version | None, specifier: str) -> bool:
        return version is None or SpecifierSet(specifier).contains(version, prereleases=True)

    return tuple(h for h in HAZARDS if within(here, h.vllm) and within(there, h.downstream))
