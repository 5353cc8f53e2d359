"""FAKE configuration classes."""

from __future__ import annotations

from dataclasses import InitVar, dataclass, field


@dataclass
class CacheConfig:
    block_size: int = 16
    gpu_memory_utilization: float = 0.9
    enable_prefix_caching: bool = True
    num_gpu_blocks: int | None = None


@dataclass
class DeviceConfig:
    device: str = "auto"


@dataclass
class LoadConfig:
    load_format: str = "auto"


@dataclass
class ModelConfig:
    model: str = ""
    tokenizer: str | None = None
    trust_remote_code: bool = False
    dtype: str = "auto"
    max_model_len: int = 2048
    enforce_eager: bool = False


@dataclass
class ParallelConfig:
    tensor_parallel_size: int = 1
    worker_extension_cls: str = ""


@dataclass
class SchedulerConfig:
    max_model_len: InitVar[int]
    is_encoder_decoder: InitVar[bool]
    max_num_seqs: int = 128
    max_num_batched_tokens: int = 2048

    def __post_init__(self, max_model_len: int, is_encoder_decoder: bool) -> None:
        self.chunked = not is_encoder_decoder


@dataclass
class VllmConfig:
    model_config: ModelConfig = field(default_factory=ModelConfig)
    cache_config: CacheConfig = field(default_factory=CacheConfig)
    parallel_config: ParallelConfig = field(default_factory=ParallelConfig)
    scheduler_config: SchedulerConfig | None = None
    device_config: DeviceConfig = field(default_factory=DeviceConfig)
    load_config: LoadConfig = field(default_factory=LoadConfig)

    def __post_init__(self) -> None:
        pass
