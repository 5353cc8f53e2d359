"""The adapters, one module per area of vLLM, found by looking at the modules of this package."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Collection
from functools import lru_cache

from vllm_compat.adapters.base import Adapter
from vllm_compat.analysis import planner
from vllm_compat.analysis.contract import Contract
from vllm_compat.analysis.environment import Environment
from vllm_compat.analysis.plan import Plan
from vllm_compat.analysis.surface.model import Surface
from vllm_compat.errors import UsageError


@lru_cache(maxsize=1)
def registry() -> tuple[Adapter, ...]:
    """Return one instance of every adapter, by its ``order``."""
    found: list[Adapter] = []
    for info in pkgutil.iter_modules(__path__):
        if info.name == "base" or info.name.startswith("_"):
            continue
        module = importlib.import_module(f"{__name__}.{info.name}")
        found.extend(
            value()
            for value in vars(module).values()
            if isinstance(value, type)
            and issubclass(value, Adapter)
            and value.__module__ == module.__name__
            and not value.__abstractmethods__
        )
    return tuple(sorted(found, key=lambda adapter: adapter.order))


def by_name(name: str) -> Adapter:
    """Return the adapter of that name.

    Raises:
        UsageError: There is none: the plan comes from another vllm_compat.
    """
    for adapter in registry():
        if adapter.name == name:
            return adapter
    raise UsageError(
        f"This vllm_compat has no adapter {name!r}: driver and worker must run the same vllm_compat."
    )


def make_plan(
    contract: Contract,
    surface: Surface,
    environment: Environment,
    *,
    switched_off: Collection[str] = (),
    features: Collection[str] = (),
) -> Plan:
    """Return the plan of one (contract, surface, environment) from all adapters of this release.

    ``switched_off`` names adapters that are left out although needed, and any of ``features``.
    """
    return planner.make_plan(
        contract, surface, environment, registry(), switched_off=switched_off, features=features
    )
