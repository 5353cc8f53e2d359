"""``transformers`` 5, which newer vLLM demands and older downstreams were not written for."""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn

from vllm_compat.adapters.base import Adapter, Case, Need
from vllm_compat.analysis.facts import missing_names, names_torch_for_typing

if TYPE_CHECKING:
    from vllm_compat.analysis.plan import Plan
    from vllm_compat.runtime.patching import Transaction


class TorchAnnotation(Adapter):
    """Give ``transformers.configuration_utils`` the ``torch`` that its annotations name."""

    name = "transformers.torch_annotation"
    order = 1110
    targets = ("transformers.configuration_utils:torch",)
    vllm = ">=0.19.0"
    downstream = "<0.5"
    changed = (
        "transformers 5 annotates PreTrainedConfig.dtype with torch.dtype and imports torch for type"
        " checking only; vLLM accepts transformers 5 from 0.19.0 and demands it from 0.24.0."
    )
    relies = "Its configuration classes are pydantic models, which evaluate inherited annotations."
    does = "Imports torch into that module when it is imported."
    decided_by = ("transformers",)
    until = "the downstream keeps pydantic away from PreTrainedConfig's annotations."
    processes = frozenset({"driver", "worker"})
    shown_by = (
        "llama, speculators 0.4.0.1, vLLM 0.26.0: PydanticUndefinedAnnotation: name 'torch' is not"
        " defined, while speculators is imported"
    )

    def need(self, case: Case) -> Need | None:
        if not names_torch_for_typing(case.environment):
            return None
        return Need(
            f"transformers {case.environment.version('transformers')} imports torch for type checking"
            " only, and pydantic evaluates the annotation"
        )

    def install(self, transaction: Transaction, plan: Plan) -> None:
        def torch(module: ModuleType) -> Any:
            import torch

            return torch

        (target,) = self.targets
        transaction.set(target, torch)


class MissingModules(Adapter):
    """Supply modules that ``transformers`` has removed and the downstream imports at its top."""

    name = "transformers.missing_modules"
    order = 1120
    targets = ("{missing_module}:*",)
    vllm = ">=0.19.0"
    downstream = "<0.5"
    changed = "transformers 5 has removed modeling_attn_mask_utils."
    relies = "Its EAGLE-1 model imports it at the top, and importing speculators imports that model."
    does = (
        "Supplies the module; each name in it raises an error in words when it is called, which no"
        " extraction does."
    )
    decided_by = ("transformers",)
    until = "the downstream no longer imports it."
    processes = frozenset({"driver", "worker"})
    shown_by = (
        "llama, speculators 0.4.0.1, vLLM 0.26.0 with transformers 5.24: No module named"
        " 'transformers.modeling_attn_mask_utils'"
    )

    def need(self, case: Case) -> Need | None:
        missing = missing_names(case.environment)
        if not missing:
            return None
        return Need(
            f"transformers {case.environment.version('transformers')} has no {', '.join(missing)}"
        )

    def told(self, plan: Plan) -> tuple[str, ...]:
        return tuple(f"{module}:*" for module in missing_names(plan.environment))

    def install(self, transaction: Transaction, plan: Plan) -> None:
        version = plan.environment.version("transformers")
        for module, names in missing_names(plan.environment).items():

            def fill(new: ModuleType, module: str = module, names: tuple[str, ...] = names) -> None:
                for name in names:
                    setattr(new, name, _refusing(f"{module}.{name}", version))

            transaction.supply_module(module, fill)


def _refusing(path: str, version: str | None) -> Any:
    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(
            f"{path} is not in transformers {version}; what calls it needs an older transformers."
        )

    return refuse
