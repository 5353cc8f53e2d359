"""What is known of the server flow: rows that are sound, and the right ones for a pair of versions."""

from __future__ import annotations

import re

import pytest
from packaging.specifiers import SpecifierSet

from vllm_compat.analysis.server_flow import HAZARDS, Harm, hazards_of, release_of


def keys(downstream: str, vllm: str) -> set[str]:
    return {hazard.key for hazard in hazards_of(downstream, vllm)}


def test_every_row_is_whole_and_can_be_looked_up() -> None:
    assert len({hazard.key for hazard in HAZARDS}) == len(HAZARDS)
    for hazard in HAZARDS:
        assert str(SpecifierSet(hazard.vllm))
        assert SpecifierSet(hazard.downstream).contains("0.10") or "<" in hazard.downstream
        assert not SpecifierSet(hazard.downstream).contains("0.4.0.1")
        assert hazard.sentence.endswith(".")
        assert hazard.remedy[-1] not in ".;"
        assert re.search(
            r"\b(vllm|speculators)#\d+|\.py(, [\w/]+\.py)* \(\d+\.\d+\.\d+\)", hazard.source
        )


def test_the_worst_come_first() -> None:
    order = [list(Harm).index(hazard.harm) for hazard in HAZARDS]
    assert order == sorted(order)


def test_of_one_harm_what_few_releases_have_comes_before_what_all_have_where_data_is_wrong() -> None:
    ends = ["<" in hazard.vllm for hazard in HAZARDS if hazard.harm is Harm.WRONG]
    assert ends == sorted(ends, reverse=True)


@pytest.mark.parametrize(
    ("downstream", "vllm", "there", "not_there"),
    [
        ("0.5.0", "0.16.0", "method.missing", "columns.order"),
        ("0.9.0", "0.16.0", "render.answer", "render.truncation"),
        ("0.6.0.2", "0.17.1", "last-layer.any-model", "chunked-prefill.assert"),
        ("0.5.0", "0.17.1", "chunked-prefill.assert", "chunked-prefill.rows"),
        ("0.8.1", "0.20.2", "chunked-prefill.rows", "render.truncation"),
        ("0.9.0", "0.20.2", "render.truncation", "render.answer"),
        ("0.7.0.2", "0.20.2", "batched-tokens", "chunked-prefill.rows"),
        ("0.6.0.2", "0.22.0", "prefix-caching.rows", "chunked-prefill.refused"),
        ("0.7.0.2", "0.23.0", "hybrid.nan", "hybrid.zero"),
        # Whoever switches chunked prefill off by hand meets prefix caching next.
        ("0.9.0", "0.22.1", "prefix-caching.rows", "chunked-prefill.rows"),
        ("0.5.0", "0.23.0", "chunked-prefill.refused", "abort"),
        ("0.5.0", "0.21.0", "hybrid.refused", "writer.lock"),
        ("0.5.0", "0.22.0", "writer.lock", "hybrid.refused"),
        ("0.6.0.2", "0.24.0", "hybrid.zero", "writer.lock"),
        ("0.8.1", "0.24.0", "last-layer.deepseek", "prefix-caching.rows"),
        ("0.8.1", "0.25.0", "abort", "last-layer.deepseek"),
        ("0.8.1", "0.19.1", "last-layer.qwen3-next", "last-layer.deepseek-v3.2"),
        # Qwen3-Next's class is no SupportsEagle3 until 0.23.0, and is one in 0.24.0.
        ("0.8.1", "0.23.0", "last-layer.qwen3-next", "last-layer.deepseek-v3.2"),
        ("0.8.1", "0.24.0", "last-layer.deepseek", "last-layer.qwen3-next"),
        # DeepSeek-V3.2 is of DeepSeek-V3's class until 0.28.0, and then one of its own on CUDA.
        ("0.8.1", "0.28.0", "abort", "last-layer.deepseek-v3.2"),
        ("0.8.1", "0.29.0", "last-layer.deepseek-v3.2", "last-layer.deepseek"),
        ("0.8.1", "0.29.0", "abort", "render.scale-out"),
        ("0.8.1", "0.30.0", "render.scale-out", "tensor-parallel.page-size"),
        ("0.7.0.2", "0.31.0", "models.unsupported", "render.scale-out"),
        ("0.9.0", "0.31.0", "render.scale-out", "abort"),
        ("0.9.0", "0.34.0", "last-layer.deepseek-v3.2", "last-layer.deepseek"),
        # Versions that are none of the index.
        ("0.9.0", "0.35.0.dev1+g0123456", "render.scale-out", "abort"),
        ("0.9.0", "0.30.0.dev7", "render.scale-out", "render.truncation"),
        ("0.9.0", "0.24.0+cpu", "hybrid.zero", "hybrid.nan"),
        ("0.9.0", "0.22.0rc1", "prefix-caching.rows", "chunked-prefill.rows"),
        ("0.10.0.dev2", "0.20.2", "chunked-prefill.rows", "batched-tokens"),
        ("0.6.0.dev9", "0.32.0", "batched-tokens", "writer.lock"),
    ],
)
def test_a_pair_has_its_hazards(downstream: str, vllm: str, there: str, not_there: str) -> None:
    found = keys(downstream, vllm)
    assert there in found
    assert not_there not in found
    assert {there, not_there} <= {hazard.key for hazard in HAZARDS}


@pytest.mark.parametrize("version", ["unknown", "", "0.1.dev1+g0123456", "0.0.0"])
def test_a_version_that_says_no_release_is_in_every_range(version: str) -> None:
    assert release_of(version) is None
    assert {h.key for h in HAZARDS} == keys(version, version)
    assert keys(version, "0.32.0") >= keys("0.9.0", "0.32.0") | keys("0.5.0", "0.32.0")
    assert "writer.lock" in keys("0.4.0", "0.32.0"), "what calls itself older is not believed"
