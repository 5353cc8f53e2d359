"""The engine that the downstream builds by hand, and one on vLLM's public interface in its place."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn

from vllm_compat.adapters.base import Adapter, Case, Need
from vllm_compat.analysis.drift import Finding, FindingKind
from vllm_compat.analysis.environment import PUBLIC

if TYPE_CHECKING:
    from vllm_compat.analysis.plan import Plan
    from vllm_compat.analysis.surface import Surface
    from vllm_compat.runtime.patching import Transaction

LLM = "vllm.entrypoints.llm.LLM"
ARGUMENTS = (
    "model",
    "tokenizer",
    "trust_remote_code",
    "dtype",
    "max_model_len",
    "enforce_eager",
    "gpu_memory_utilization",
    "enable_prefix_caching",
    "tensor_parallel_size",
    "max_num_seqs",
    "max_num_batched_tokens",
    "worker_extension_cls",
)
"""What the second engine gives ``vllm.LLM`` (`vllm_compat.engine.driver.arguments`)."""


class PublicEngine(Adapter):
    """Serve the generator from ``vllm.LLM`` instead of an engine that the downstream has built."""

    name = "engine.public"
    serves = PUBLIC
    order = 420
    targets = ("{generator}.__init__", "{generator}.generate")
    vllm = ">=0.11.0"
    downstream = "<0.5"
    decided_by = ("engine",)
    changed = (
        "Nothing: of vLLM's internals 94 uses by the downstream had 13 changes from 0.11.0 to 0.33.0,"
        " of these names none."
    )
    relies = "Builds configuration, executor, KV cache, scheduler and requests by hand, from internals."
    does = (
        "Answers constructor and generate() from vllm.LLM, LLM.generate and LLM.collective_rpc; rows are"
        " captured by the same hooks, through worker_extension_cls. Not the downstream's code, so it is"
        " there only where it is asked for, or where no adapter repairs what the downstream's needs."
    )
    until = "the downstream asks vLLM's public interface itself."
    processes = frozenset({"driver", "worker"})
    shown_in = ("tests/e2e/test_public_engine.py",)
    shown_by = "llama, speculators 0.4.0.1, vLLM 0.16.0 and 0.32.0: the same rows as by the first engine"

    def need(self, case: Case) -> Need | None:
        if case.engine != PUBLIC or not case.roles.generator or not offers(case.surface):
            return None
        answered = {case.roles.generator_module, case.roles.extension_module}
        return Need(
            _why(case.unmet),
            tuple(
                finding
                for finding in case.findings
                if finding.sites and {site.module for site in finding.sites} <= answered
            ),
        )

    def install(self, transaction: Transaction, plan: Plan) -> None:
        def build(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            from vllm_compat.engine import driver

            driver.build(instance, wrapped, args, kwargs)

        def generate(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            from vllm_compat.engine import driver

            return driver.generate(instance, *args, **kwargs)

        for target, wrapper in zip(self.targets_of(plan), (build, generate), strict=True):
            transaction.wrap(target, wrapper)


class StandIns(Adapter):
    """Let the downstream's module be imported although vLLM lacks names that it imports."""

    name = "engine.stand_ins"
    order = 430
    targets = ("{missing_module}:{missing_name}",)
    vllm = ">=0.11.0"
    downstream = "<0.5"
    decided_by = ("engine",)
    changed = "Whatever a release that no adapter knows has taken away."
    relies = "Imports 22 names of vLLM at the top of its generator's module."
    does = (
        "Supplies those that this vLLM lacks, and that have not just moved; each raises an error in"
        " words when it is called, which the second engine never does."
    )
    until = "the downstream asks vLLM's public interface itself."
    shown_in = ("tests/adapters/test_engine.py",)
    shown_by = (
        "llama, speculators 0.4.0.1, vLLM 0.32.0 without vllm.v1.request: No module named"
        " 'vllm.v1.request'"
    )

    def need(self, case: Case) -> Need | None:
        missing = _missing(case) if case.engine == PUBLIC else ()
        if not missing:
            return None
        return Need(f"this vLLM lacks {len(missing)} names, such as {missing[0]}", targets=missing)

    def install(self, transaction: Transaction, plan: Plan) -> None:
        for target in self.told(plan):
            module, _, name = target.partition(":")
            if name != "*":
                transaction.set(target, _from(f"{module}.{name}", plan.vllm))
                continue
            transaction.supply_module(module, _filler(module, plan.vllm))


def _why(unmet: Sequence[Finding]) -> str:
    """Return why the generator is served from vLLM's public interface."""
    served = "the generator is served from vLLM's public interface"
    if not unmet:
        return f"{served}, as was asked for"
    first = unmet[0]
    name = f" ({first.name})" if first.name else ""
    more = f" and {len(unmet) - 1} more findings" if len(unmet) > 1 else ""
    return f"{served}, since no adapter repairs {first.kind.value}: {first.symbol}{name}{more}"


def offers(surface: Surface) -> bool:
    """Tell whether this vLLM's public interface is what the second engine relies on."""
    construct, ask = surface.signature(LLM), surface.signature(f"{LLM}.collective_rpc")
    generate = surface.signature(f"{LLM}.generate")
    sampling = surface.signature("vllm.sampling_params.SamplingParams")
    return (
        all(surface.resolve(name) is not None for name in ("vllm.LLM", "vllm.SamplingParams"))
        and construct is not None
        and all(construct.accepts(name) for name in ARGUMENTS)
        and ask is not None
        and [p.name for p in ask.parameters][:3] == ["method", "timeout", "args"]
        and generate is not None
        and [p.name for p in generate.parameters][:2] == ["prompts", "sampling_params"]
        and generate.accepts("use_tqdm")
        and sampling is not None
        and all(sampling.accepts(name) for name in ("max_tokens", "temperature", "detokenize"))
    )


def _missing(case: Case) -> tuple[str, ...]:
    """Return what the generator's module imports and this vLLM lacks, ``module:name``.

    A module that is missing as a whole is ``module:*``, and so are those above it that are missing.
    """
    found: dict[str, None] = {}
    for finding in case.findings:
        if case.roles.generator_module not in {site.module for site in finding.sites}:
            continue
        if finding.kind is FindingKind.MODULE_MISSING:
            parts = finding.symbol.split(".")
            above = [".".join(parts[: end + 1]) for end in range(len(parts))]
            found.update((f"{name}:*", None) for name in above if not case.surface.has_module(name))
        elif finding.kind in (FindingKind.NAME_MISSING, FindingKind.NAME_MOVED):
            if finding.moved_to:
                continue
            module, _, name = finding.symbol.rpartition(".")
            if finding.name is not None and finding.name != name:
                module, name = finding.symbol, finding.name
            found[f"{module}:{name}"] = None
    return tuple(found)


def _from(path: str, version: str) -> Any:
    def get(module: ModuleType) -> Any:
        return _stand_in(path, version)

    return get


def _filler(module: str, version: str) -> Any:
    def fill(new: ModuleType) -> None:
        new.__path__ = []  # what lies below it is supplied as well

        def get(name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return _stand_in(f"{module}.{name}", version)

        new.__getattr__ = get  # type: ignore[method-assign]

    return fill


def _stand_in(path: str, version: str) -> Any:
    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(
            f"{path} is not in vLLM {version}; the second engine, which is in force, does without it."
        )

    return refuse
