"""FAKE KV cache layouts."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class KVCacheSpec:
    block_size: int = 16


@dataclass
class KVCacheGroupSpec:
    kv_cache_spec: KVCacheSpec = field(default_factory=KVCacheSpec)


@dataclass
class KVCacheConfig:
    num_blocks: int
    kv_cache_groups: list[KVCacheGroupSpec] = field(default_factory=list)
