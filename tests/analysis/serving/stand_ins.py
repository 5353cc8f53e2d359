"""STAND-INS of vLLM's server side and of stock's launcher: just what the reading looks at.

The texts follow vLLM 0.16, 0.20, 0.22, 0.24 and 0.34 and the launchers of speculators 0.5 and 0.6.
"""

from __future__ import annotations

from pathlib import Path

LAUNCHER = """
import json, os, sys
def main():
    args, vllm_args = parse_args()
    speculative_config = {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": [1]}},
    }
    kv_transfer_config = {
        "kv_connector": "ExampleHiddenStatesConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": "x"},
    }
    cmd = [
        sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", args.model,
        "--speculative_config", json.dumps(speculative_config),
        "--kv_transfer_config", json.dumps(kv_transfer_config), *vllm_args,
    ]
    os.execvp(cmd[0], cmd)
"""

_RENDER = """
from fastapi import APIRouter
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest, Generated
router = APIRouter()
@router.post("/v1/chat/completions/render", response_model={answer})
async def render(request): ...
"""
_CHAT = """
from vllm.entrypoints.base import OpenAIBaseModel
from fastapi import APIRouter
class Generated(OpenAIBaseModel):
    token_ids: list[int]
class ChatCompletionRequest(OpenAIBaseModel):
    messages: list
    model: str
    max_tokens: int
    add_generation_prompt: bool
    continue_final_message: bool
    return_token_ids: bool
    tools: list
    chat_template_kwargs: dict
    truncate_prompt_tokens: int
    {side}
class ChatCompletionResponse(OpenAIBaseModel):
    prompt_token_ids: list
    kv_transfer_params: dict
"""
_COMPLETION = """
from vllm.entrypoints.base import OpenAIBaseModel
class CompletionRequest(OpenAIBaseModel):
    model: str
    prompt: list
    max_tokens: int
    return_token_ids: bool
class CompletionResponseChoice(OpenAIBaseModel):
    prompt_token_ids: list
class CompletionResponse(OpenAIBaseModel):
    kv_transfer_params: dict
"""
_ROUTES = """
from fastapi import APIRouter
router = APIRouter()
@router.post("/v1/completions")
async def completions(request): ...
@router.post("/v1/chat/completions")
async def chat(request): ...
"""
_FACTORY = """
class KVConnectorFactory: ...
KVConnectorFactory.register_connector("SharedStorageConnector", "x", "y")
"""
_HIDDEN = 'KVConnectorFactory.register_connector("ExampleHiddenStatesConnector", "x", "y")\n'
_REFUSED = """
class VllmConfig:
    def _post_init_kv_transfer_config(self):
        if (
            self.kv_transfer_config is not None
            and self.kv_transfer_config.kv_connector == "ExampleHiddenStatesConnector"
            and self.scheduler_config.enable_chunked_prefill
        ):
            raise ValueError("does not support chunked prefill")
"""
_SCALE_OUT = """
def register(app, supported_tasks):
    from .api_router import router as render_router
    args = getattr(app.state, "args", None)
    dedicated = "render" in supported_tasks or getattr(args, "tokens_only", False)
    enabled = dedicated or getattr(args, "enable_scale_out", False)
    if not enabled:
        return
    app.include_router(render_router)
"""


def stand_in_vllm(
    folder: Path,
    *,
    extracts: bool = True,
    refuses_chunks: bool = False,
    answer: str = "Generated",
    side: bool = True,
    scale_out: bool = False,
    extra: str = "allow",
) -> Path:
    """Write a STAND-IN of vLLM's server side, and return the folder that holds it."""
    method = ', "extract_hidden_states"' if extracts else ""
    base = f'class OpenAIBaseModel:\n    model_config = ConfigDict(extra="{extra}")\n'
    files = {
        "__init__": '__version__ = "0.99.0"',
        "engine/arg_utils": "class EngineArgs:\n    model: str\n    enable_chunked_prefill: bool\n"
        "    enable_prefix_caching: bool\n    max_model_len: int\n    speculative_config: dict\n"
        "    kv_transfer_config: dict\n",
        "entrypoints/common/cli_args": "class FrontendArgs:\n    tokens_only: bool\n"
        + ("    enable_scale_out: bool\n" if scale_out else ""),
        "entrypoints/base": base,
        "entrypoints/openai/completion/protocol": _COMPLETION,
        "entrypoints/openai/chat_completion/protocol": _CHAT.format(
            side="truncation_side: str" if side else "pass"
        ),
        "entrypoints/openai/api_router": _ROUTES,
        "entrypoints/render/api_router": _RENDER.format(answer=answer),
        "entrypoints/render/factories": _SCALE_OUT if scale_out else "",
        "config/vllm": _REFUSED if refuses_chunks else "",
        "config/speculative": f'Own = Literal["eagle"{method}]\n'
        'SpeculativeMethod = Literal["ngram", Own]\n'
        "class SpeculativeConfig:\n    method: str\n    num_speculative_tokens: int\n"
        "    draft_model_config: dict\n",
        "config/kv_transfer": "class KVTransferConfig:\n    kv_connector: str\n    kv_role: str\n"
        "    kv_connector_extra_config: dict\n",
        "distributed/kv_transfer/kv_connector/factory": _FACTORY + (_HIDDEN if extracts else ""),
    }
    for name, text in files.items():
        path = folder / "vllm" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for made in [p for p in (folder / "vllm").rglob("*") if p.is_dir()]:
        (made / "__init__.py").touch()
    return folder
