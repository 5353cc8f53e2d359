"""Adapters of the scheduler, on a FAKE one that admits, cuts and preempts as vLLM's does.

The two FAKE generators drive it by the loops of the two in-process generations. Their worker lives
in this process; a row is ``(request id, position)``, so that every row tells where it belongs.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vllm_compat import checks
from vllm_compat.adapters import by_name, make_plan
from vllm_compat.adapters.base import Case
from vllm_compat.analysis.plan import Plan
from vllm_compat.capture.rows import RowStore, spans_of
from vllm_compat.checks import batch
from vllm_compat.errors import CapacityError, GuardError
from vllm_compat.features.clean_scheduler import CleanScheduler
from vllm_compat.runtime.context import call_of, current_call
from vllm_compat.runtime.patching import Transaction

MakeCase = Callable[..., Case]
Install = Callable[[str, Case], Plan]

GENERATOR = "speculators.data_generation.vllm_hidden_states_generator"
FILE = f"{GENERATOR.replace('.', '/')}.py"
EXTENSION = "speculators.data_generation.custom_worker.HiddenStatesWorkerExtension"
DOWNSTREAMS = ("speculators_0_3", "speculators_0_4")
BLOCK = 4


class Worker:
    """What a worker keeps of requests: it is told of new and of finished ones, once each."""

    def __init__(self) -> None:
        self.known: set[str] = set()
        self.told: list[str] = []
        self.steps: list[dict[str, int]] = []
        self.store = RowStore(1)
        self.fail_at: int | None = None
        self.has_failed = False  # it may then be told of the end of what it has never met

    def step(self, output: Any) -> None:
        if len(self.steps) == self.fail_at:
            self.fail_at, self.has_failed = None, True
            raise RuntimeError("the device is gone")
        assert not output.finished_req_ids & set(self.told), "told twice that a request is over"
        assert self.has_failed or output.finished_req_ids <= self.known
        self.known -= output.finished_req_ids
        self.told += output.finished_req_ids
        for new in output.scheduled_new_reqs:
            assert new.req_id not in self.known
            self.known.add(new.req_id)
        cached = output.scheduled_cached_reqs
        assert set(cached.req_ids) <= self.known
        computed = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        order = sorted(output.num_scheduled_tokens, reverse=True)  # the batch has its own order
        spans = spans_of(order, output.num_scheduled_tokens, computed)
        rows = [(span.request_id, span.start + i) for span in spans for i in range(span.count)]
        self.store.add(spans, [rows])
        self.steps.append(output.num_scheduled_tokens)


class Executor:
    """A FAKE executor over one worker in this process."""

    def __init__(self, worker: Worker, *, by_offset: bool) -> None:
        self.worker = worker
        self.by_offset = by_offset

    def execute_model(self, output: Any) -> None:
        self.worker.step(output)

    def sample_tokens(self, grammar_output: Any) -> None:
        return None

    def collective_rpc(self, method: str, args: Any = (), unique_reply_rank: Any = None) -> Any:
        if method == "_reset_capture":
            self.worker.store.clear()
        if method != "_get_captured_states":
            return None
        states = self.worker.store.collect(lambda parts: [row for part in parts for row in part])
        if not self.by_offset:
            return states
        call = current_call()
        assert call is not None
        return [[[row for r in call.prompts for row in states.get(r, [[]])[0]]]]


class Engine:
    """A FAKE generator with its scheduler, executor and worker."""

    def __init__(
        self,
        downstream: str,
        *,
        blocks: int = 1000,
        budget: int = 8192,
        running: int = 32,
        groups: int = 1,
        extension: str = EXTENSION,
    ) -> None:
        scheduler_module = importlib.import_module("vllm.v1.core.sched.scheduler")
        interface = importlib.import_module("vllm.v1.kv_cache_interface")
        module = importlib.import_module(GENERATOR)
        group = interface.KVCacheGroupSpec(interface.KVCacheSpec(BLOCK))
        self.worker = Worker()
        self.scheduler = scheduler_module.Scheduler(
            vllm_config=SimpleNamespace(
                parallel_config=SimpleNamespace(worker_extension_cls=extension),
                cache_config=SimpleNamespace(block_size=BLOCK),
                scheduler_config=SimpleNamespace(max_num_seqs=running, max_num_batched_tokens=budget),
            ),
            kv_cache_config=interface.KVCacheConfig(blocks + 1, [group] * groups),
            structured_output_manager=None,
            block_size=BLOCK,
        )
        self.generator = object.__new__(module.VllmHiddenStatesGenerator)
        self.generator.__dict__.update(
            layer_ids=[0],
            _request_counter=0,
            tokenizer=SimpleNamespace(eos_token_id=2),
            block_hasher=None,
            scheduler=self.scheduler,
            executor=Executor(self.worker, by_offset=downstream == "speculators_0_3"),
        )

    def generate(self, lengths: list[int]) -> list[Any]:
        """Return the rows of each prompt."""
        results = self.generator.generate([list(range(n)) for n in lengths])
        return [result["hidden_states"][0] for result in results]

    def check(self, lengths: list[int]) -> None:
        """Run a batch; every prompt must have its own rows, in order, and nothing be left."""
        prefix = f"req_{self.generator._request_counter}_"
        rows = self.generate(lengths)
        assert rows == [
            [(f"{prefix}{i}", position) for position in range(n)] for i, n in enumerate(lengths)
        ]
        assert self.is_idle()

    def is_idle(self) -> bool:
        scheduler = self.scheduler
        return (
            not scheduler.requests
            and not scheduler.waiting
            and not scheduler.running
            and (scheduler.free == scheduler.kv_cache_config.num_blocks - 1)
        )


@pytest.fixture
def make_engine(
    fake_modules: Callable[..., None],
    make_case: MakeCase,
    transaction: Transaction,
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[..., Callable[..., Engine]]:
    """Put a downstream's scheduler adapters (unless ``without``) and the guards in force."""

    def prepare(downstream: str, *, without: bool = False, clean: bool = True) -> Callable[..., Engine]:
        fake_modules("vllm", downstream, "transformers_4", "torch")
        importlib.import_module(GENERATOR)
        rows = batch.Rows  # a row here is no tensor: what the guards look at is its shape alone
        monkeypatch.setattr(batch, "look_at", lambda t, *a, **k: rows((len(t), 1), "rows"))
        case = make_case(downstream)
        plan = make_plan(case.contract, case.surface, case.environment)
        for name in ("generator.input_order", "scheduler.whole_prompts"):
            if name in plan.adapters and not (without and name == "scheduler.whole_prompts"):
                by_name(name).install(transaction.owned_by(name), plan)
        if clean:
            CleanScheduler().install(transaction, plan, "driver")
        checks.install(transaction, plan, lambda worker: {})
        return lambda **limits: Engine(downstream, **limits)

    return prepare


each = pytest.mark.parametrize("downstream", DOWNSTREAMS)


@each
def test_whole_prompts_are_needed_where_nothing_else_drives_them_to_their_end(
    make_case: MakeCase, downstream: str
) -> None:
    adapter = by_name("scheduler.whole_prompts")
    assert adapter.need(make_case(downstream)) is not None
    driven = (
        FILE,
        "self.executor.execute_model(output)",
        "self.scheduler.update_from_output(output, self.executor.execute_model(output))",
    )
    assert adapter.need(make_case(downstream, driven)) is None
    assert adapter.need(make_case("speculators_0_5")) is None


@each
@pytest.mark.parametrize(
    ("lengths", "limits"),
    [
        ([1], {}),
        (list(range(1, 14)), {}),
        ([70, 5, 30, 100, 1], {"budget": 48}),
        ([63, 120, 31, 90], {"blocks": 31}),
        ([1 + n % 7 for n in range(40)], {}),
        ([9, 9, 4, 9], {}),
        ([40, 1, 1], {"blocks": 10}),
        ([100], {"budget": 1}),
        ([8] * 5, {"running": 1}),
        ([30, 30], {"blocks": 16, "groups": 2}),
    ],
    ids=[
        "one token",
        "13 prompts",
        "chunked prefill",
        "few blocks",
        "40 prompts",
        "duplicates",
        "exactly all blocks",
        "one token a step",
        "one request at a time",
        "two groups of layers",
    ],
)
def test_every_prompt_has_its_rows(
    make_engine: Callable[..., Any], downstream: str, lengths: list[int], limits: dict[str, int]
) -> None:
    engine = make_engine(downstream)(**limits)
    engine.check(lengths)
    engine.check(lengths)
    assert engine.scheduler.preemptions == 0


@pytest.mark.parametrize(
    ("downstream", "lengths", "limits", "error"),
    [
        ("speculators_0_3", [70, 5], {"budget": 48}, "one row a token is needed"),
        ("speculators_0_4", [1] * 40, {}, "req_0_32"),
        ("speculators_0_4", [31, 32], {"blocks": 15, "budget": 32}, "one row a token is needed"),
    ],
    ids=["a cut prompt ends after its first chunk", "request 33 never starts", "preempted"],
)
def test_without_the_adapter_these_go_wrong_and_the_guards_say_so(
    make_engine: Callable[..., Any],
    downstream: str,
    lengths: list[int],
    limits: dict[str, int],
    error: str,
) -> None:
    engine = make_engine(downstream, without=True)(**limits)
    with pytest.raises((GuardError, KeyError), match=error):
        engine.generate(lengths)
    assert engine.is_idle(), "even then nothing is left behind"


batches = st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=40), min_size=1, max_size=3)


@each
def test_whatever_the_limits_every_prompt_has_its_rows_and_none_is_preempted(
    make_engine: Callable[..., Any], downstream: str
) -> None:
    build = make_engine(downstream)

    @settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
    @given(
        batches=batches,
        blocks=st.integers(10, 40),  # 10 blocks hold the longest prompt
        budget=st.integers(1, 200),
        running=st.integers(1, 32),
        groups=st.integers(1, 2),
    )
    def check(batches: list[list[int]], blocks: int, budget: int, running: int, groups: int) -> None:
        engine = build(blocks=blocks * groups, budget=budget, running=running, groups=groups)
        for lengths in batches:
            engine.check(lengths)
        assert engine.scheduler.preemptions == 0
        steps = engine.worker.steps
        assert all(sum(step.values()) <= budget and len(step) <= running for step in steps)
        # Every token once: nothing is computed twice, nothing is decoded.
        assert sum(sum(step.values()) for step in steps) == sum(map(sum, batches))

    check()


@each
def test_prompts_start_in_the_order_of_the_inputs(
    make_engine: Callable[..., Any], downstream: str
) -> None:
    engine = make_engine(downstream)(blocks=10)
    engine.generate([4, 40, 4, 4, 36])
    first: dict[str, int] = {}
    for number, step in enumerate(engine.worker.steps):
        for request_id in step:
            first.setdefault(request_id, number)
    assert sorted(first, key=lambda r: (first[r], r)) == [f"req_0_{i}" for i in range(5)]


@each
def test_workers_are_told_of_every_finished_request_with_the_next_step(
    make_engine: Callable[..., Any], downstream: str
) -> None:
    engine = make_engine(downstream)()
    engine.generate([3, 5])
    engine.generate([2])
    assert sorted(engine.worker.told) == ["req_0_0", "req_0_1"]
    assert engine.worker.known == {"req_1_0"}
    engine.generate([2])
    assert sorted(engine.worker.told) == ["req_0_0", "req_0_1", "req_1_0"]


@each
def test_a_place_is_given_to_the_next_as_soon_as_a_prompt_is_computed(
    make_engine: Callable[..., Any], downstream: str
) -> None:
    engine = make_engine(downstream)(running=4)
    engine.generate([4] * 12)
    assert [len(step) for step in engine.worker.steps] == [4, 4, 4]


@each
@pytest.mark.parametrize("groups", [1, 2])
def test_a_prompt_that_can_never_fit_is_an_error_before_the_batch_starts(
    make_engine: Callable[..., Any], downstream: str, groups: int
) -> None:
    engine = make_engine(downstream)(blocks=10 * groups, groups=groups)
    with pytest.raises(CapacityError) as caught:
        engine.generate([4, 41, 4])
    assert str(caught.value).partition(" That is prompt")[0] == (
        f"Request req_0_1 has 41 tokens and needs {11 * groups} KV cache blocks, but this run has"
        f" only {10 * groups}: raise gpu_memory_utilization or the number of GPUs, or shorten the"
        " sequences."
    )
    assert engine.worker.steps == []
    assert engine.is_idle()
    engine.check([40, 4])


@each
@pytest.mark.parametrize("step", [0, 1, 3])
def test_a_call_that_fails_leaves_nothing_for_the_next(
    make_engine: Callable[..., Any], downstream: str, step: int
) -> None:
    engine = make_engine(downstream)(blocks=10, budget=8)
    engine.check([5])
    engine.worker.fail_at = len(engine.worker.steps) + step
    with pytest.raises(RuntimeError, match="the device is gone"):
        engine.generate([40, 12, 12, 7])
    assert engine.is_idle()
    assert current_call() is None
    engine.check([40, 12, 12, 7])


@each
def test_without_clean_scheduler_the_batch_after_a_failed_one_is_lost(
    make_engine: Callable[..., Any], downstream: str
) -> None:
    engine = make_engine(downstream, clean=False)(blocks=10, budget=8)
    engine.worker.fail_at = 1
    with pytest.raises(RuntimeError, match="the device is gone"):
        engine.generate([40, 12, 12, 7])
    assert not engine.is_idle(), "a check changes nothing"
    with pytest.raises((GuardError, KeyError)):
        engine.generate([5])


@each
def test_an_interrupted_call_leaves_nothing_for_the_next(
    make_engine: Callable[..., Any], downstream: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(downstream)(blocks=10)

    def stop(output: Any) -> None:
        engine.worker.has_failed = True
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(engine.worker, "step", stop)
        with pytest.raises(KeyboardInterrupt):
            engine.generate([40, 12, 12, 7])
    engine.check([40, 12, 12, 7])


def requests(lengths: list[int]) -> Iterator[Any]:
    module = importlib.import_module("vllm.v1.request")
    for i, n in enumerate(lengths):
        yield module.Request(f"r{i}", list(range(n)), None, None, None)


def test_the_scheduler_of_another_engine_works_as_ever(make_engine: Callable[..., Any]) -> None:
    engine = make_engine("speculators_0_4")(blocks=10, extension="another.Extension")
    scheduler = engine.scheduler
    for request in requests([44, 4]):
        scheduler.add_request(request)
    assert len(scheduler.waiting) == 2, "not held back, not refused"
    assert scheduler.schedule().total_num_scheduled_tokens == 0, "44 tokens never fit"
    scheduler.finish_requests("r0", 4)
    assert scheduler.schedule().num_scheduled_tokens == {"r1": 4}


def test_outside_of_a_call_requests_can_be_taken_out_at_any_time(
    make_engine: Callable[..., Any],
) -> None:
    engine = make_engine("speculators_0_4")(blocks=10, budget=4)
    scheduler = engine.scheduler
    for request in requests([12, 40, 8]):
        scheduler.add_request(request)
    assert scheduler.schedule().num_scheduled_tokens == {"r0": 4}
    scheduler.finish_requests(request_ids=["r0", "r1"], finished_status=4)
    assert scheduler.schedule().num_scheduled_tokens == {"r2": 4}
    scheduler.finish_requests("r2", 4)
    assert engine.is_idle()
    assert scheduler.schedule().total_num_scheduled_tokens == 0


def test_inside_a_call_a_prompt_is_not_finished_before_it_is_computed(
    make_engine: Callable[..., Any],
) -> None:
    engine = make_engine("speculators_0_3")(blocks=10, budget=4)
    scheduler = engine.scheduler
    with call_of(engine.generator) as call:
        for request in requests([6, 40]):
            scheduler.add_request(request)
        assert list(call.prompts) == ["r0", "r1"]
        assert scheduler.schedule().num_scheduled_tokens == {"r0": 4}
        scheduler.finish_requests(["r0"], 4)
        scheduler.finish_requests(["r1"], 4)
        assert scheduler.schedule().num_scheduled_tokens == {"r0": 2}
        scheduler.finish_requests(["r0"], 4)
        assert scheduler.schedule().num_scheduled_tokens == {"r1": 4}
        call.over = True
        scheduler.finish_requests(list(call.prompts), 4)
    assert engine.is_idle()


def test_schedulers_are_not_kept_alive(make_engine: Callable[..., Any]) -> None:
    import gc
    import weakref

    engine = make_engine("speculators_0_4")()
    engine.check([3])
    seen = weakref.ref(engine.scheduler)
    del engine
    gc.collect()
    assert seen() is None


RESOLVED = (
    "vllm/config.py",
    "    num_gpu_blocks: int | None = None\n",
    "    num_gpu_blocks: int | None = None\n\n"
    "    def get_resolved_kv_cache_layout(self) -> str:\n        return 'NHD'\n",
)


@pytest.mark.parametrize(
    ("downstream", "edits", "words"),
    [
        ("speculators_0_3", (), "requires block_size, which is not given"),
        ("speculators_0_3", (RESOLVED,), "requires block_size, which is not given"),
        ("speculators_0_4", (RESOLVED,), "gives a constant, the backends settle the block size"),
        ("speculators_0_4", (), None),
        (
            "speculators_0_3",
            (("vllm/v1/core/sched/scheduler.py", "        block_size: int,\n", ""),),
            None,
        ),
    ],
)
def test_the_block_size_is_given_where_it_is_missing_or_another(
    make_case: MakeCase, downstream: str, edits: tuple[Any, ...], words: str | None
) -> None:
    need = by_name("scheduler.block_size").need(make_case(downstream, *edits))
    if words is None:
        assert need is None
    else:
        assert need is not None
        assert words in need.reason


@pytest.mark.parametrize(
    ("extension", "given", "size"),
    [
        (EXTENSION, {}, 32),
        (EXTENSION, {"block_size": 16}, 32),
        ("another.Extension", {"block_size": 16}, 16),
    ],
)
def test_the_block_size_is_the_one_that_the_cache_has(
    fake_modules: Callable[..., None],
    make_case: MakeCase,
    install: Install,
    extension: str,
    given: dict[str, int],
    size: int,
) -> None:
    fake_modules("vllm")
    module = importlib.import_module("vllm.v1.core.sched.scheduler")
    install("scheduler.block_size", make_case())
    scheduler = module.Scheduler(
        vllm_config=SimpleNamespace(
            parallel_config=SimpleNamespace(worker_extension_cls=extension),
            cache_config=SimpleNamespace(block_size=32),
            scheduler_config=SimpleNamespace(max_num_seqs=1, max_num_batched_tokens=1),
        ),
        kv_cache_config=None,
        structured_output_manager=None,
        **given,
    )
    assert scheduler.block_size == size


@pytest.mark.parametrize(
    ("groups", "extension", "expected"),
    [
        (2, EXTENSION, {"block_size": 96, "hash_block_size": 32}),
        (1, EXTENSION, {"block_size": 32}),
        (2, "another.Extension", {"block_size": 16}),
    ],
)
def test_with_several_groups_of_layers_the_engine_core_resolves_the_block_sizes(
    fake_modules: Callable[..., None],
    make_case: MakeCase,
    install: Install,
    monkeypatch: pytest.MonkeyPatch,
    groups: int,
    extension: str,
    expected: dict[str, int],
) -> None:
    fake_modules("vllm")
    module = importlib.import_module("vllm.v1.core.sched.scheduler")
    core = importlib.import_module("vllm.v1.engine.core")
    resolve = lambda planned, config: (96, 32)  # noqa: E731
    monkeypatch.setattr(core, "resolve_kv_cache_block_sizes", resolve, raising=False)
    given: list[dict[str, int]] = []

    def init(self: Any, *, block_size: int, hash_block_size: int | None = None, **_: Any) -> None:
        sizes = {"block_size": block_size, "hash_block_size": hash_block_size}
        given.append({name: size for name, size in sizes.items() if size is not None})

    monkeypatch.setattr(module.Scheduler, "__init__", init)
    install("scheduler.block_size", make_case())
    module.Scheduler(
        vllm_config=SimpleNamespace(
            parallel_config=SimpleNamespace(worker_extension_cls=extension),
            cache_config=SimpleNamespace(block_size=32),
        ),
        kv_cache_config=SimpleNamespace(kv_cache_groups=[object()] * groups),
        block_size=16,
    )
    assert given == [expected]


def test_a_constant_block_size_is_replaced_where_layers_are_grouped(make_case: MakeCase) -> None:
    grouped = (
        "vllm/v1/core/kv_cache_utils.py",
        "def unify_hybrid_kv_cache_specs",
        "def get_kv_cache_groups() -> None: ...\n\n\ndef unify_hybrid_kv_cache_specs",
    )
    adapter = by_name("scheduler.block_size")
    need = adapter.need(make_case("speculators_0_4", grouped, device="cuda"))
    assert need is not None
    assert "sizes of their own" in need.reason
    assert adapter.need(make_case("speculators_0_4", grouped, device="cpu")) is None
    assert adapter.need(make_case("speculators_0_4", device="cuda")) is None
