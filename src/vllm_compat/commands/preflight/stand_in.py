"""Ask the installed vLLM what it would choose for a model, on a device that need not be there.

Runs in a process of its own (``python -m vllm_compat.commands.preflight.stand_in REQUEST RESULT``, both
JSON files), since
it changes what vLLM believes about its platform. vLLM's own code builds the model's modules, all layers
of one rank, on torch's ``meta`` device: no weights, no memory, no GPU. What it has put into them is then
read off: the attention backend of each layer, the method of each linear layer and of the experts, the
bytes of the parameters, the bytes of the KV cache per token.

With a compute capability given, ``vllm.platforms.current_platform`` is a CUDA platform whose answers
about the device are the given ones; everything that it decides with them is vLLM's code. Two things a
CPU build lacks, and they are named in the result under ``assumed``: compiled modules, of which the CUDA
wheels are known to have what is asked for, and the answers of compiled predicates such as
``cutlass_scaled_mm_supports_fp8`` (:data:`PREDICATES`). What cannot be answered is an error in the
result, never a guess.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

PREDICATES: dict[str, Callable[[int], bool]] = {
    "cutlass_scaled_mm_supports_fp8": lambda capability: capability >= 89,
    "cutlass_scaled_mm_supports_block_fp8": lambda capability: capability >= 90,
    "cutlass_scaled_mm_supports_fp4": lambda capability: capability >= 100,
    "cutlass_group_gemm_supported": lambda capability: capability in (90, 100, 103),
    "cutlass_sparse_scaled_mm_supported": lambda capability: capability == 90,
}
"""What vLLM's compiled predicates answer in its CUDA 12.8 and later wheels, by capability times ten
(``csrc/quantization/w8a8/cutlass/scaled_mm_entry.cu`` and ``csrc/quantization/fp4``)."""

COMPILED = re.compile(r"vllm\.(vllm_flash_attn(\..*)?|third_party\.flashmla\..+|_(\w+_)?C(_\w+)?)")
"""Modules of vLLM that only a compilation makes, or brings along."""

BUILDING = "building the model's modules"


class _Compiled(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Stands in for compiled modules that this build lacks; nothing in them can be called."""

    def __init__(self, capability: tuple[int, int]) -> None:
        self.major, self.minor = capability
        self.supplied: list[str] = []

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not COMPILED.fullmatch(fullname):
            return None
        found = importlib.machinery.PathFinder.find_spec(fullname, path)
        if found is not None and found.origin is not None:
            return None  # built, and no mere folder
        return importlib.util.spec_from_loader(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        self.supplied.append(module.__name__)
        module.__dict__["__getattr__"] = _uncallable
        if "flash_attn" in module.__name__:
            module.__dict__["is_fa_version_supported"] = self._supported
            module.__dict__["fa_version_unsupported_reason"] = self._reason

    def _supported(self, version: int, device: Any = None) -> bool:
        # FlashAttention 2 from 8.0 on, 3 on 9.x (Hopper), 4 on 9.x and 10.x, as its releases say.
        supported = {2: self.major >= 8, 3: self.major == 9, 4: self.major in (9, 10)}
        return supported.get(version, False)

    def _reason(self, version: int, device: Any = None) -> str | None:
        if self._supported(version):
            return None
        return f"FlashAttention {version} is not for {self.major}.{self.minor}"


def _uncallable(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)

    if name[0].isupper():  # a class, which annotations may name
        return type(name, (), {})

    def stand_in(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(f"{name} is compiled code, which this build lacks")

    stand_in.default = stand_in  # type: ignore[attr-defined]  # an operator's overload, held by passes
    return stand_in


class _Quiet:
    """A stream or an event of a device that is not there."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **kwargs: None


def main(arguments: Sequence[str] | None = None) -> int:
    """Answer one request; the result says in ``error`` and ``stage`` how far it got."""
    request_path, result_path = arguments or sys.argv[1:]
    request = json.loads(Path(request_path).read_text(encoding="utf-8"))
    result: dict[str, Any] = {
        "stage": "importing vLLM", "assumed": [], "seconds": {}, "rejected": {},
    }  # fmt: skip
    try:
        _answer(request, result)
    except BaseException as error:
        result["error"] = f"{type(error).__name__}: {error}"
        result["raised_in"] = _raised_in(error)
        if request.get("traceback"):
            import traceback

            result["traceback"] = traceback.format_exc()
    Path(result_path).write_text(json.dumps(result), encoding="utf-8")
    return 1 if "error" in result else 0


def _raised_in(error: BaseException) -> str:
    """Return the module that has raised an error, ``vllm.…`` where vLLM itself has; empty if unknown."""
    while error.__cause__ is not None:
        error = error.__cause__
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return str(trace.tb_frame.f_globals.get("__name__", "")) if trace is not None else ""


def _answer(request: dict[str, Any], result: dict[str, Any]) -> None:
    begin = time.perf_counter()

    def reached(stage: str) -> None:
        result["seconds"][result["stage"]] = round(time.perf_counter() - begin, 2)
        result["stage"] = stage

    capability = request.get("capability")
    standing_in = capability is not None
    result["standing_in"] = standing_in
    if capability is None:
        from vllm.platforms import current_platform

        result["platform"] = type(current_platform).__name__
        if current_platform.is_cuda():
            seen = current_platform.get_device_capability()
            capability = result["capability"] = [seen.major, seen.minor]
            result["device"] = current_platform.get_device_name()
            memory = int(current_platform.get_device_total_memory())
            request["memory"] = result["device_memory"] = memory
    if capability is not None:
        # The machine's own device too: nothing may be put on it.
        _stand_in((capability[0], capability[1]), request, result)
    import vllm

    result["vllm"] = vllm.__version__
    from vllm import envs

    for name in ("VLLM_ENGINE_READY_TIMEOUT_S", "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS"):
        with suppress(AttributeError):
            result.setdefault("timeouts", {})[name] = int(getattr(envs, name))
    _inspect_here()
    reached("reading the model's configuration")
    config = _configuration(request, standing_in)
    model_config = config.model_config
    text = model_config.hf_text_config
    result.update(
        architecture=list(getattr(model_config, "architectures", None) or []),
        layers=int(text.num_hidden_layers),
        hidden_size=int(model_config.get_hidden_size()),
        vocabulary=int(model_config.get_vocab_size()),
        dtype=str(model_config.dtype).removeprefix("torch."),
        quantization=model_config.quantization,
        use_mla=bool(getattr(model_config, "use_mla", False)),
    )
    reached(BUILDING)
    _one_rank_of(int(request["devices"]))
    model = _build(config)
    reached("reading them")
    _read(model, config, result)
    reached("done")


def _stand_in(capability: tuple[int, int], request: dict[str, Any], result: dict[str, Any]) -> None:
    """Make vLLM's platform a CUDA device of that capability."""
    memory, devices = int(request["memory"]), int(request["devices"])
    compiled = _Compiled(capability)
    sys.meta_path.insert(0, compiled)
    result["assumed"] = compiled.supplied
    _stand_in_torch(capability, memory, devices)
    _take_the_place_of_the_platform(_platform(capability, memory, devices, result["rejected"]))
    if result["standing_in"]:
        result["platform"] = "CUDA, stand-in device"
    with suppress(ImportError, AttributeError):
        from vllm.utils import torch_utils

        if hasattr(torch_utils, "_cuda_device_count_stateless"):
            torch_utils._cuda_device_count_stateless = lambda *_: devices
    with suppress(ImportError):
        import vllm._custom_ops  # noqa: F401
    _answer_for_operators(10 * capability[0] + capability[1], result)


def _stand_in_torch(capability: tuple[int, int], memory: int, devices: int) -> None:
    """Make torch say that there are CUDA devices of that capability."""
    import torch

    major, minor = capability
    torch.cuda.current_device = lambda: 0
    torch.cuda.device_count = lambda: devices
    torch.cuda.is_available = lambda: True
    torch.cuda.get_device_capability = lambda *_: capability
    torch.cuda.get_device_name = lambda *_: "stand-in"
    properties = SimpleNamespace(
        name="stand-in", major=major, minor=minor, total_memory=memory, multi_processor_count=132,
        shared_memory_per_block_optin=232448,
    )  # fmt: skip
    torch.cuda.get_device_properties = lambda *_: properties
    torch.cuda.Stream = torch.cuda.Event = _Quiet


def _platform(
    capability: tuple[int, int], memory: int, devices: int, rejected: dict[str, list[str]]
) -> Any:
    """Return a CUDA platform of vLLM's that answers for the device; ``rejected`` collects backends."""
    import torch
    from vllm.platforms import cuda
    from vllm.platforms.interface import DeviceCapability

    class StandIn(cuda.CudaPlatformBase):  # type: ignore[misc]
        device_name = "stand-in"

        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> Any:
            return DeviceCapability(*capability)

        @classmethod
        def get_device_name(cls, device_id: int = 0) -> str:
            return "stand-in"

        @classmethod
        def get_device_total_memory(cls, device_id: int = 0) -> int:
            return memory

        @classmethod
        def get_device_uuid(cls, device_id: int = 0) -> str:
            return "stand-in"

        @classmethod
        def is_fully_connected(cls, physical_device_ids: list[int]) -> bool:
            return False

        @classmethod
        def device_count(cls) -> int:
            return devices

        @classmethod
        def current_device(cls) -> Any:
            return torch.device("meta")

        @classmethod
        def num_compute_units(cls, device_id: int = 0) -> int:
            return 132

        @classmethod
        def get_valid_backends(cls, *args: Any, **kwargs: Any) -> Any:
            valid, invalid = super().get_valid_backends(*args, **kwargs)
            for backend, reasons in invalid.items():
                # Newer releases put a rank beside the reasons.
                words = reasons[1] if isinstance(reasons, tuple) else reasons
                rejected[backend.name] = [str(word) for word in words]
            return valid, invalid

    return StandIn()


def _take_the_place_of_the_platform(platform: Any) -> None:
    """Make it vLLM's current platform, in modules too that have bound the other one already."""
    import vllm.platforms as platforms

    platforms._current_platform = platform
    # The import of the CUDA platform has brought some along.
    for module in list(sys.modules.values()):
        ours = getattr(module, "__name__", "").startswith("vllm.") and module is not platforms
        if ours and "current_platform" in vars(module):
            vars(module)["current_platform"] = platform


def _answer_for_operators(capability: int, result: dict[str, Any]) -> None:
    """Answer for compiled operators that this build lacks; ``capability`` is that of 9.0 as 90."""
    import torch._ops

    original = torch._ops._OpNamespace.__getattr__

    def attribute(self: Any, name: str) -> Any:
        try:
            return original(self, name)
        except AttributeError:
            if name in PREDICATES:
                said = PREDICATES[name](capability)
                result["assumed"].append(f"{name}({capability}) is {said}")
                return PREDICATES[name]
            # Layers take hold of their kernels while they are built, and call them later.
            if result["stage"] == BUILDING and self.name.startswith("_"):
                return _uncallable(name)
            raise

    torch._ops._OpNamespace.__getattr__ = attribute


def _inspect_here() -> None:
    """Let vLLM look at model classes in this process: a subprocess would not know the stand-in."""
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = lambda function: function()


def _configuration(request: dict[str, Any], standing_in: bool) -> Any:
    """Return the configuration that stock's generator builds for these options."""
    from vllm.config import (
        CacheConfig,
        DeviceConfig,
        LoadConfig,
        ModelConfig,
        ParallelConfig,
        SchedulerConfig,
        VllmConfig,
    )

    def accepted(cls: Any, **fields: Any) -> dict[str, Any]:
        known = getattr(cls, "__dataclass_fields__", {})
        return {name: value for name, value in fields.items() if name in known}

    length = int(request["max_model_len"])
    model = ModelConfig(
        model=request["model"],
        tokenizer=request["model"],
        trust_remote_code=bool(request.get("remote_code", True)),
        dtype="auto",
        max_model_len=length,
        enforce_eager=True,
        skip_tokenizer_init=True,
    )
    # The memory of this host says nothing about the host of a stand-in device.
    extra = accepted(CacheConfig, swap_space=0) if standing_in else {}
    return VllmConfig(
        model_config=model,
        cache_config=CacheConfig(
            gpu_memory_utilization=float(request["gpu_memory_utilization"]),
            enable_prefix_caching=False,
            **extra,
        ),
        parallel_config=ParallelConfig(tensor_parallel_size=int(request["devices"])),
        scheduler_config=SchedulerConfig(
            max_num_seqs=32,
            max_model_len=length,
            max_num_batched_tokens=int(request["max_num_batched_tokens"]),
            is_encoder_decoder=False,
        ),
        device_config=DeviceConfig(),
        load_config=LoadConfig(),
    )


def _one_rank_of(count: int) -> None:
    """Make this process rank 0 of that many tensor-parallel ranks, without the others."""
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from vllm.distributed import parallel_state

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=count)

    def group(size: int, name: str) -> Any:
        made = parallel_state.GroupCoordinator.__new__(parallel_state.GroupCoordinator)
        world = dist.group.WORLD
        for field, value in {
            "ranks": list(range(size)), "rank": 0, "local_rank": 0, "rank_in_group": 0,
            "world_size": size, "cpu_group": world, "device_group": world, "unique_name": name,
            "device": torch.device("meta"), "device_communicator": None, "mq_broadcaster": None,
            "use_device_communicator": False, "use_custom_op_call": False,
            "use_cpu_custom_send_recv": False,
        }.items():  # fmt: skip
            setattr(made, field, value)
        return made

    for name, value in list(vars(parallel_state).items()):
        if re.fullmatch(r"_[A-Z]+", name) and value is None:
            size = count if name in ("_TP", "_WORLD", "_EP", "_EPLB") else 1
            setattr(parallel_state, name, group(size, name.lower()))


def _build(config: Any) -> Any:
    """Return one rank's modules, on the meta device."""
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.utils import initialize_model

    before = torch.get_default_dtype()
    torch.set_default_dtype(config.model_config.dtype)
    try:
        with set_current_vllm_config(config), torch.device("meta"), _nothing_on_a_device():
            return initialize_model(config)
    finally:
        torch.set_default_dtype(before)


def _nothing_on_a_device() -> Any:
    """Return a context in which tensors that are asked for on a device by its name are on ``meta`` too.

    Constructors name the platform's device (``device=current_platform.device_type``); there is none, and
    torch would look for a driver.
    """
    import torch
    from torch.overrides import TorchFunctionMode

    def elsewhere(value: Any) -> bool:
        if isinstance(value, torch.device):
            return value.type not in ("meta", "cpu")
        return isinstance(value, str) and value.partition(":")[0] in ("cuda", "xpu", "hpu")

    class OnMeta(TorchFunctionMode):  # type: ignore[misc]
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = dict(kwargs or {})
            if elsewhere(kwargs.get("device")):
                kwargs["device"] = "meta"
            if func is torch.Tensor.cuda:
                return args[0].to("meta")
            if func is torch.Tensor.to:
                args = tuple("meta" if elsewhere(value) else value for value in args)
            return func(*args, **kwargs)

    return OnMeta()


def _read(model: Any, config: Any, result: dict[str, Any]) -> None:
    """Read the choices and the sizes off the modules."""
    bytes_of: Counter[str] = Counter()
    for tensor in (*model.parameters(), *model.buffers()):
        bytes_of[str(tensor.dtype).removeprefix("torch.")] += tensor.numel() * tensor.element_size()
    methods: Counter[str] = Counter()
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if method is not None:
            methods[f"{type(module).__name__}: {type(method).__name__}"] += 1
    backends: Counter[str] = Counter()
    per_token = 0.0
    specs: Counter[str] = Counter()
    # What captures in a run, the layers behind a pipeline, is not here: one stage has all.
    for module in config.compilation_config.static_forward_context.values():
        backend = getattr(module, "attn_backend", None)
        if backend is not None:
            backends[backend.get_name()] += 1
        if hasattr(module, "get_kv_cache_spec"):
            spec = module.get_kv_cache_spec(config)
            if spec is not None:
                specs[type(spec).__name__] += 1
                per_token += spec.page_size_bytes / spec.block_size
    result.update(
        weights=dict(bytes_of),
        weight_bytes=sum(bytes_of.values()),
        methods=dict(methods),
        moe_methods=sorted(
            {
                method
                for module, _, method in (name.partition(": ") for name in methods)
                if "MoE" in module or "Experts" in module
            }
        ),
        attention=dict(backends),
        kv_specs=dict(specs),
        kv_bytes_per_token=per_token,
        block_size=config.cache_config.block_size,
        supports_layers=_layer_lists(model, int(config.model_config.hf_text_config.num_hidden_layers)),
    )


def _layer_lists(model: Any, count: int) -> list[str]:
    """Return the module lists that hold as many modules as the model has layers."""
    from torch import nn

    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == count and "vision" not in name
    ]


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # nothing here is worth an orderly end, and fake groups cannot have one
