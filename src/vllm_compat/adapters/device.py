"""A machine without CUDA: the same downstream code on vLLM's CPU build."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from vllm_compat.adapters.base import Adapter, Case, Need, NotOn
from vllm_compat.adapters.kv_cache import resolves_layout

if TYPE_CHECKING:
    from vllm_compat.analysis.contract import CallSite
    from vllm_compat.analysis.plan import Plan
    from vllm_compat.runtime.patching import Transaction


class AcceleratorName(Adapter):
    """Name no accelerator where vLLM computes on the CPU."""

    name = "device.accelerator_name"
    order = 210
    targets = ("{caller}:get_device_name",)
    vllm = ">=0.11.0"
    downstream = ">=0.4,<0.5"
    not_on = (NotOn("cuda"),)
    changed = "Nothing: vLLM's CPU builds stand on a torch that is built for CUDA."
    relies = (
        "Asks torch for the accelerator's name when it describes the extracted data, which is after the"
        " last batch; torch names CUDA by its build and then finds no driver. 0.3.0 asks whether it is"
        " there first."
    )
    does = (
        "Answers what that function itself answers where there is none. In force only where vLLM is a"
        " CPU build, and only where torch raises."
    )
    until = "the downstream asks whether the accelerator is there."
    shown_in = ("tests/adapters/test_device.py",)
    shown_by = (
        "kimi_k25, speculators 0.4.0.1, vLLM 0.16.0 CPU build: Found no NVIDIA driver, after the last"
        " batch, and there is no data_config.json"
    )

    def need(self, case: Case) -> Need | None:
        if case.environment.device != "cpu":
            return None
        sites = [
            site
            for site in case.contract.other_calls
            if site.symbol.startswith(f"{case.roles.package}.")
            and site.symbol.rpartition(".")[2] == "get_device_name"
        ]
        if not sites:
            return None
        return Need(
            f"{sites[0].where} asks for the accelerator's name, and this vLLM computes on the CPU",
            targets=tuple(sorted({f"{site.module}:get_device_name" for site in sites})),
        )

    def install(self, transaction: Transaction, plan: Plan) -> None:
        def none(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            try:
                return wrapped(*args, **kwargs)
            except (RuntimeError, AssertionError):  # torch: no driver, or not built for CUDA
                return "NO ACCELERATOR"

        for target in self.targets_of(plan):
            transaction.wrap(target, none)


class ForkAfterImport(Adapter):
    """Keep forked workers able to use CUDA although the downstream asked for it while imported."""

    name = "device.fork"
    order = 220
    targets = ("environment variable PYTORCH_NVML_BASED_CUDA_CHECK",)
    vllm = ">=0.11.0"
    downstream = "<0.5"
    not_on = (NotOn("cpu"),)
    changed = (
        "Nothing: vLLM's workers are forked by default, and vLLM sets the variable when it is"
        " imported (vllm#8893, vllm#12754)."
    )
    pull_requests = ("vllm#8893", "vllm#12754", "speculators#223")
    relies = (
        "Importing speculators asks torch for CUDA before vLLM is imported (0.4.x in"
        " models/eagle3/core.py, 0.3.0 in what it imports); that initialises the driver in the parent"
        " (speculators#223)."
    )
    does = "Sets the variable before: torch then asks NVML, which leaves the driver alone."
    until = "the downstream does not ask for CUDA while it is imported."
    processes = frozenset({"driver", "worker"})  # children inherit it
    shown_by = (
        "llama, speculators 0.4.0.1, vLLM 0.26.0 on a GPU, fork: Cannot re-initialize CUDA in forked"
        " subprocess"
    )

    def need(self, case: Case) -> Need | None:
        if case.environment.device != "cuda" or not case.roles.generator:
            return None
        return Need("importing the downstream asks torch for CUDA, and vLLM's workers are forked")

    def install(self, transaction: Transaction, plan: Plan) -> None:
        transaction.environ("PYTORCH_NVML_BASED_CUDA_CHECK", "1")


class MemoryOfTheHost(Adapter):
    """Answer ``mem_get_info`` from the host's memory where vLLM computes on the CPU."""

    name = "device.mem_get_info"
    order = 230
    targets = ("{torch_cuda_or_generator_module}:mem_get_info",)
    vllm = ">=0.11.0"
    downstream = "<0.5"
    not_on = (NotOn("cuda"),)
    excluded_by = ("engine.public",)
    changed = "Nothing: vLLM's CPU platform has no CUDA memory to ask for."
    relies = (
        "Sizes the KV cache by torch.cuda.mem_get_info (0.3.0) or by its own mem_get_info (0.4.x),"
        " which raises or answers (0, 0)."
    )
    does = (
        "Answers with VLLM_CPU_KVCACHE_SPACE (GiB) where it is set, else with the host's free and"
        " total memory. In force only where vLLM is a CPU build, and not for 0.4.x where torch is one"
        " too and the engine core plans the cache (0.29+): there (0, 0) is as good."
    )
    until = "the downstream asks vLLM's platform."
    shown_by = "llama, speculators 0.3.0 and 0.4.0.1, vLLM 0.16.0 CPU build: no KV cache can be sized"

    def need(self, case: Case) -> Need | None:
        if case.environment.device != "cpu":
            return None
        sites = self._sites(case)
        if not sites:
            return None
        # Its own function is patched under the name that the generator binds, CUDA's in place.
        own = sites[0].symbol.partition(".")[0] == case.roles.package
        module = case.roles.generator_module if own else sites[0].symbol.rpartition(".")[0]
        torch = case.environment.version("torch") or ""
        if own and torch.endswith("+cpu") and resolves_layout(case):
            return None  # it answers (0, 0), and the engine core takes that for "find out yourself"
        return Need(
            f"{sites[0].where} asks CUDA for free memory, and this vLLM computes on the CPU",
            targets=(f"{module}:mem_get_info",),
        )

    @staticmethod
    def _sites(case: Case) -> list[CallSite]:
        module = case.roles.generator_module
        return [
            site
            for site in case.contract.other_calls
            if site.module == module and site.symbol.rpartition(".")[2] == "mem_get_info"
        ]

    def install(self, transaction: Transaction, plan: Plan) -> None:
        def host(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return _host_memory()

        for target in self.targets_of(plan):
            transaction.wrap(target, host)


def _host_memory() -> tuple[int, int]:
    """Return (free, total) in bytes, like ``torch.cuda.mem_get_info``."""
    asked = os.environ.get("VLLM_CPU_KVCACHE_SPACE")
    if asked and float(asked) > 0:
        space = int(float(asked) * 2**30)
        return space, space
    import psutil

    memory = psutil.virtual_memory()
    return memory.available, memory.total
