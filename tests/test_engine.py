"""Whose engine it is, and which call and which construction are under way."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace

import pytest

from vllm_compat import engine


class Extension:
    pass


@pytest.mark.parametrize(
    ("extension", "ours"),
    [
        ("speculators.data_generation.custom_worker.HiddenStatesWorkerExtension", True),
        (type("Extension", (), {"__module__": "speculators.worker"}), True),
        ("speculators_fork.worker.Extension", False),
        ("other.speculators.Extension", False),
        (Extension, False),
        ("", False),
        (None, False),
    ],
)
def test_an_engine_is_the_downstreams_by_its_worker_extension(extension: object, ours: bool) -> None:
    parallel = SimpleNamespace(worker_extension_cls=extension)
    assert engine.is_downstream(parallel, "speculators") is ours
    assert engine.belongs(SimpleNamespace(parallel_config=parallel), "speculators") is ours


@pytest.mark.parametrize("config", [None, object(), SimpleNamespace(parallel_config=None)])
def test_what_has_no_such_configuration_is_nobodys(config: object) -> None:
    assert not engine.belongs(config, "speculators")


def test_a_call_is_known_inside_of_it_and_forgotten_after_it() -> None:
    generator = object()
    assert engine.current_call() is None
    with engine.call_of(generator) as call:
        assert engine.current_call() is call
        assert call.generator is generator
        assert (call.prompts, call.over) == ({}, False)
    assert engine.current_call() is None


def test_a_call_inside_a_call_is_known_until_it_ends() -> None:
    with engine.call_of("outer") as outer:
        with engine.call_of("inner") as inner:
            assert engine.current_call() is inner
        assert engine.current_call() is outer


def test_an_exception_forgets_the_call() -> None:
    with pytest.raises(ValueError, match="boom"), engine.call_of("generator"):
        raise ValueError("boom")
    assert engine.current_call() is None


def test_calls_of_two_threads_do_not_meet() -> None:
    both = threading.Barrier(2)
    seen: dict[str, object] = {}

    def run(name: str) -> None:
        with engine.call_of(name) as call:
            both.wait()
            current = engine.current_call()
            both.wait()
            seen[name] = current is call

    threads = [threading.Thread(target=run, args=(name,)) for name in ("one", "two")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == {"one": True, "two": True}
    assert engine.current_call() is None


def test_a_call_that_is_handed_to_a_thread_by_asyncio_is_known_there() -> None:
    async def run() -> object:
        with engine.call_of("generator") as call:
            return await asyncio.to_thread(engine.current_call) is call

    assert asyncio.run(run()) is True


def test_a_construction_is_known_inside_of_it_with_its_model() -> None:
    assert engine.current_build() is None
    with engine.building("half built", "/models/kimi"):
        build = engine.current_build()
        assert build is not None
        assert (build.generator, build.model_path) == ("half built", "/models/kimi")
    assert engine.current_build() is None


def test_a_construction_that_fails_is_forgotten() -> None:
    with pytest.raises(ValueError, match="boom"), engine.building(None, ""):
        raise ValueError("boom")
    assert engine.current_build() is None
