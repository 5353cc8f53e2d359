"""Adapters of vllm.config, on FAKE configuration classes."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_compat.adapters import by_name
from vllm_compat.adapters.base import Case
from vllm_compat.analysis.drift import FindingKind
from vllm_compat.analysis.plan import Plan
from vllm_compat.runtime.context import building

MakeCase = Callable[..., Case]
Install = Callable[[str, Case], Plan]

EXTENSION = "speculators.data_generation.custom_worker.HiddenStatesWorkerExtension"
RESOLVED = (
    "vllm/config.py",
    "    num_gpu_blocks: int | None = None\n",
    "    num_gpu_blocks: int | None = None\n\n"
    "    def get_resolved_kv_cache_layout(self) -> str:\n        return 'NHD'\n",
)
GENERATOR = "speculators/data_generation/vllm_hidden_states_generator.py"


@pytest.fixture
def config(fake_modules: Callable[..., None]) -> Any:
    """The FAKE vllm.config, imported."""
    fake_modules("vllm")
    return importlib.import_module("vllm.config")


def needs(name: str, case: Case) -> bool:
    return by_name(name).need(case) is not None


def test_is_encoder_decoder_is_needed_where_it_is_required_and_not_given(
    make_case: MakeCase,
) -> None:
    need = by_name("config.is_encoder_decoder").need(make_case())
    assert need is not None
    (finding,) = need.findings
    assert (finding.kind, finding.name) == (FindingKind.PARAMETER_REQUIRED, "is_encoder_decoder")
    assert finding.sites[0].file == GENERATOR


@pytest.mark.parametrize(
    ("downstream", "edits"),
    [
        ("speculators_0_4", ()),
        (
            "speculators_0_3",
            (
                (
                    "vllm/config.py",
                    "is_encoder_decoder: InitVar[bool]\n",
                    "is_encoder_decoder: InitVar[bool] = False\n",
                ),
            ),
        ),
    ],
    ids=["given", "has a default"],
)
def test_is_encoder_decoder_is_not_needed_where_it_is_given_or_has_a_default(
    make_case: MakeCase, downstream: str, edits: tuple[Any, ...]
) -> None:
    assert not needs("config.is_encoder_decoder", make_case(downstream, *edits))


def test_is_encoder_decoder_is_false_unless_the_caller_says_otherwise(
    config: Any, make_case: MakeCase, install: Install
) -> None:
    with pytest.raises(TypeError, match="is_encoder_decoder"):
        config.SchedulerConfig(max_model_len=8)
    install("config.is_encoder_decoder", make_case())
    with building(object(), "model"):
        assert config.SchedulerConfig(max_model_len=8).chunked is True
        assert config.SchedulerConfig(max_model_len=8, is_encoder_decoder=True).chunked is False
        assert config.SchedulerConfig(8, max_num_seqs=3).max_num_seqs == 3
    # An engine that is not ours is none of ours.
    with pytest.raises(TypeError, match="is_encoder_decoder"):
        config.SchedulerConfig(max_model_len=8)


def test_the_block_size_is_left_open_only_where_backends_settle_it(make_case: MakeCase) -> None:
    for downstream in ("speculators_0_3", "speculators_0_4"):
        assert not needs("config.block_size", make_case(downstream))
        need = by_name("config.block_size").need(make_case(downstream, RESOLVED))
        assert need is not None
        assert f"{GENERATOR}:" in need.reason


def test_the_block_size_is_not_left_open_where_none_is_given(make_case: MakeCase) -> None:
    case = make_case("speculators_0_3", RESOLVED, (GENERATOR, "block_size=16, ", ""))
    assert not needs("config.block_size", case)


def test_the_block_size_is_dropped_while_a_generator_is_built_and_at_no_other_time(
    config: Any, make_case: MakeCase, install: Install
) -> None:
    install("config.block_size", make_case("speculators_0_4", RESOLVED))
    assert config.CacheConfig(block_size=128).block_size == 128
    with building(object(), "model"):
        assert config.CacheConfig(block_size=128).block_size == 16, "the default: left open"
    assert config.CacheConfig(block_size=128).block_size == 128


def test_prefix_caching_goes_where_it_is_on_by_default_and_nobody_hashes_blocks(
    make_case: MakeCase,
) -> None:
    assert needs("config.prefix_caching", make_case())


@pytest.mark.parametrize(
    ("downstream", "edits"),
    [
        ("speculators_0_4", ()),
        (
            "speculators_0_3",
            (
                (
                    "vllm/config.py",
                    "enable_prefix_caching: bool = True",
                    "enable_prefix_caching: bool | None = None",
                ),
            ),
        ),
        ("speculators_0_3", (("vllm/config.py", "    enable_prefix_caching: bool = True\n", ""),)),
        ("speculators_0_3", ((GENERATOR, "block_size=16, ", "enable_prefix_caching=True, "),)),
        ("speculators_0_3", ((GENERATOR, "arrival_time=0.0,", "block_hasher=None,"),)),
    ],
    ids=["switched off", "off by default", "no such thing", "given", "requests hash blocks"],
)
def test_prefix_caching_stays_where_it_does_no_harm(
    make_case: MakeCase, downstream: str, edits: tuple[Any, ...]
) -> None:
    assert not needs("config.prefix_caching", make_case(downstream, *edits))


def test_prefix_caching_is_off_in_the_downstreams_engine_and_in_no_other(
    config: Any, make_case: MakeCase, install: Install
) -> None:
    install("config.prefix_caching", make_case())

    def engine(extension: str) -> Any:
        return config.VllmConfig(
            cache_config=config.CacheConfig(),
            parallel_config=config.ParallelConfig(worker_extension_cls=extension),
        )

    assert engine(EXTENSION).cache_config.enable_prefix_caching is False
    assert engine("another.Extension").cache_config.enable_prefix_caching is True
    assert engine("").cache_config.enable_prefix_caching is True
    assert config.VllmConfig().cache_config.enable_prefix_caching is True


WINDOW = (
    "vllm/config.py",
    "    num_gpu_blocks: int | None = None\n",
    "    num_gpu_blocks: int | None = None\n    sliding_window: int | None = None\n",
)


@pytest.mark.parametrize("downstream", ["speculators_0_3", "speculators_0_4"])
def test_the_window_is_told_where_the_cache_has_one_and_is_not_told(
    make_case: MakeCase, downstream: str
) -> None:
    assert not needs("config.sliding_window", make_case(downstream))
    assert needs("config.sliding_window", make_case(downstream, WINDOW))
    given = (GENERATOR, "block_size=16, ", "sliding_window=8, ")
    assert needs("config.sliding_window", make_case("speculators_0_3", WINDOW, given)) is False


@pytest.mark.parametrize(
    ("extension", "kinds", "before", "after"),
    [
        (EXTENSION, None, None, 32),
        (EXTENSION, ["sliding_attention"] * 4, None, 32),
        (EXTENSION, ["sliding_attention", "full_attention"], None, None),
        (EXTENSION, ["full_attention"] * 4, None, None),
        (EXTENSION, None, 8, 8),
        ("another.Extension", None, None, None),
    ],
    ids=["no kinds", "every layer slides", "some do", "none does", "told already", "another engine"],
)
def test_the_window_is_the_models(
    config: Any,
    make_case: MakeCase,
    install: Install,
    extension: str,
    kinds: list[str] | None,
    before: int | None,
    after: int | None,
) -> None:
    install("config.sliding_window", make_case("speculators_0_4", WINDOW))
    text_config = SimpleNamespace() if kinds is None else SimpleNamespace(layer_types=kinds)
    model_config = SimpleNamespace(hf_text_config=text_config, get_sliding_window=lambda: 32)
    cache_config = config.CacheConfig()
    cache_config.sliding_window = before
    config.VllmConfig(
        model_config=model_config,
        cache_config=cache_config,
        parallel_config=config.ParallelConfig(worker_extension_cls=extension),
    )
    assert cache_config.sliding_window == after
