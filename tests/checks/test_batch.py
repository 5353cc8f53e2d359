"""What must hold of processes and data; the part that looks into tensors is in tests/with_torch."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_compat import checks, features
from vllm_compat.adapters import make_plan
from vllm_compat.adapters.base import Case
from vllm_compat.analysis.plan import Plan
from vllm_compat.checks import batch, ranks
from vllm_compat.checks.batch import (
    Rows,
    check_layers,
    check_prompts,
    check_requests,
    check_results,
    check_tokens,
)
from vllm_compat.entry import apply
from vllm_compat.errors import GuardError
from vllm_compat.features import clean_scheduler
from vllm_compat.runtime import context, run_record
from vllm_compat.runtime.patching import Transaction

MakeCase = Callable[..., Case]
GENERATOR = "speculators.data_generation.vllm_hidden_states_generator"
EXTENSION = "speculators.data_generation.custom_worker.HiddenStatesWorkerExtension"
GOOD = Rows((3, 8), "bfloat16")


def test_clean_layers_pass_and_tell_the_batchs_width_and_dtype() -> None:
    assert check_layers(0, [GOOD, GOOD], tokens=3, layers=2) == (8, "bfloat16")
    assert check_layers(1, [GOOD], 3, 1, (8, "bfloat16")) == (8, "bfloat16")
    assert check_layers(0, [], 3, 0) is None


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ([GOOD], "has 1 layers, 2 were asked for"),
        ([GOOD] * 3, "has 3 layers, 2 were asked for"),
        ([], "has 0 layers, 2 were asked for"),
        ([GOOD, Rows((2, 8), "bfloat16")], r"layer number 1: shape \[2, 8\] for 3 tokens"),
        ([Rows((4, 8), "bfloat16"), GOOD], r"layer number 0: shape \[4, 8\] for 3 tokens"),
        ([GOOD, Rows((3,), "bfloat16")], r"layer number 1: shape \[3\] for 3 tokens"),
        ([GOOD, Rows((), "bfloat16")], r"layer number 1: shape \[\] for 3 tokens"),
        ([GOOD, Rows((1, 3, 8), "bfloat16")], r"layer number 1: shape \[1, 3, 8\] for 3 tokens"),
        ([GOOD, Rows((3, 9), "bfloat16")], r"layer number 1: width and dtype \(9, 'bfloat16'\)"),
        ([GOOD, Rows((3, 8), "float32")], r"layer number 1: width and dtype \(8, 'float32'\)"),
        (
            [GOOD, replace(GOOD, not_finite=(2, 1))],
            "1: 2 of 3 rows are not finite, the first is row 1",
        ),
        ([replace(GOOD, zero=(1, 2)), GOOD], "0: 1 of 3 rows are all zero, the first is row 2"),
    ],
)
def test_what_is_wrong_is_told_with_its_sample_and_layer(found: list[Rows], words: str) -> None:
    with pytest.raises(GuardError, match=rf"^Sample 7.*{words}"):
        check_layers(7, found, tokens=3, layers=2)


@pytest.mark.parametrize("other", [Rows((3, 9), "bfloat16"), Rows((3, 8), "float16")])
def test_samples_of_one_batch_have_one_width_and_dtype(other: Rows) -> None:
    with pytest.raises(GuardError, match="Sample 1, layer number 0: width and dtype"):
        check_layers(1, [other], 3, 1, expected=GOOD.kind)


class Tensor:
    """A FAKE of the one method that token ids are asked for."""

    def __init__(self, ids: list[int]) -> None:
        self.ids = ids

    def tolist(self) -> list[int]:
        return self.ids


@pytest.mark.parametrize("kind", [list, tuple, Tensor])
def test_token_ids_may_be_a_list_or_a_tensor(kind: Callable[[list[int]], Any]) -> None:
    check_tokens(0, kind([1, 2, 3]), [1, 2, 3])
    for wrong in ([1, 2], [1, 2, 4], [1, 2, 3, 3], []):
        with pytest.raises(GuardError, match=r"^Result 4 belongs to another prompt: its \d token"):
            check_tokens(4, kind(wrong), [1, 2, 3])


def result(*ids: int) -> dict[str, Any]:
    return {"input_ids": list(ids), "hidden_states": []}


def test_results_in_the_order_of_the_prompts_pass() -> None:
    check_results([result(1), result(2, 3), result(1)], [[1], [2, 3], [1]], layers=0)
    check_results([], [], layers=4)


@pytest.mark.parametrize(
    ("results", "words"),
    [
        ([result(2, 3), result(1), result(4)], "Result 0 belongs to another prompt"),
        ([result(1), result(4), result(2, 3)], "Result 1 belongs to another prompt"),
        ([result(1), result(2), result(4)], "Result 1 belongs to another prompt: its 1 token ids"),
        ([result(1), result(2, 3)], "3 prompts gave 2 results"),
        ([result(1), result(2, 3), result(4), result(4)], "3 prompts gave 4 results"),
        ([], "3 prompts gave 0 results"),
    ],
    ids=["swapped", "swapped later", "cut", "one is missing", "one too many", "none"],
)
def test_results_in_another_order_or_number_are_refused(
    results: list[dict[str, Any]], words: str
) -> None:
    with pytest.raises(GuardError, match=words):
        check_results(results, [[1], [2, 3], [4]], layers=0)


def test_every_given_prompt_is_one_request_possibly_cut_at_its_end() -> None:
    check_requests([[1, 2, 3], Tensor([4, 5])], [[1, 2], [4, 5]])
    check_requests(Tensor([[1, 2], [3, 4]]).tolist(), [[1, 2], [3, 4]])
    check_requests([], [])


@pytest.mark.parametrize(
    ("prompts", "words"),
    [
        ([[1, 2]], "2 prompts became 1 requests"),
        ([[1, 2], [3], [3]], "2 prompts became 3 requests"),
        ([[3], [1, 2]], "The request for prompt 0 holds other tokens"),
        ([[1, 2], [4]], "The request for prompt 1 holds other tokens"),
        ([[2], [3]], "The request for prompt 0 holds other tokens"),
        ([[1, 2], [3, 4]], "The request for prompt 1 holds other tokens"),
    ],
    ids=["one is missing", "one too many", "swapped", "another", "cut in front", "longer"],
)
def test_requests_that_are_not_the_prompts_are_refused(prompts: list[list[int]], words: str) -> None:
    with pytest.raises(GuardError, match=words):
        check_requests([[1, 2], [3]], prompts)


@pytest.mark.parametrize("kind", [list, tuple, Tensor])
@pytest.mark.parametrize("vocabulary", [1024, None])
def test_ids_that_the_model_has_pass(kind: Callable[[list[int]], Any], vocabulary: int | None) -> None:
    check_prompts([kind([0, 1023]), kind([0]), kind([1, 1])], vocabulary)
    check_prompts(Tensor([[0, 1023], [1, 1]]), vocabulary)  # type: ignore[list-item]
    check_prompts([[Index(0), Index(1023), 5]], vocabulary)
    check_prompts([], vocabulary)


class Index:
    """A FAKE of one element of a tensor or an array, which vLLM takes for its number."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __index__(self) -> int:
        return self.number

    def __lt__(self, other: Any) -> bool:
        return self.number < int(other)

    def __gt__(self, other: Any) -> bool:
        return self.number > int(other)

    def __le__(self, other: Any) -> bool:
        return self.number <= int(other)

    def __int__(self) -> int:
        return self.number

    def tolist(self) -> int:
        return self.number


HAS = r"the model has 1024 \(ids 0 to 1023\)\. It comes from another tokenizer.*tokenize with.*own"


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ([7, 7, 7, 1030, 1031], f"1, token 3: id 1030, {HAS}"),
        ([1024], f"1, token 0: id 1024, {HAS}"),
        ([7, 2**40], f"1, token 1: id {2**40}, {HAS}"),
        ([7, 2**70], f"1, token 1: id {2**70}, {HAS}"),
        ([7, -1], f"1, token 1: id -1, {HAS}"),
        ([-100, 7], f"1, token 0: id -100, {HAS}"),
        ([7, Index(1030)], f"1, token 1: id 1030, {HAS}"),
        ([7, 2.0], r"1, token 1: 2\.0 is no token id \(it is of type float\); give whole numbers"),
        ([7, None], "1, token 1: None is no token id"),
        ([7, "8"], "1, token 1: '8' is no token id"),
        ([[7, 8]], r"1, token 0: \[7, 8\] is no token id \(it is of type list\)"),
        ([True, False, True], r"1, token 0: True is no token id \(it is of type bool\)"),
        ([], "1 has no tokens; leave empty prompts out"),
        ("text", r"1 is no list of token ids \(it is of type str\); generate\(\) takes a list"),
        (b"text", "1 is no list of token ids"),
        ({"input_ids": [7]}, r"1 is no list of token ids \(it is of type dict\)"),
        (7, r"1 is no list of token ids \(it is of type int\)"),
        (None, r"1 is no list of token ids \(it is of type NoneType\)"),
    ],
    ids=repr,
)
def test_what_is_no_id_of_the_model_is_told_with_prompt_and_token(prompt: Any, words: str) -> None:
    forms = [prompt, Tensor(prompt)] if isinstance(prompt, list) else [prompt]
    for form in forms:
        with pytest.raises(GuardError, match=f"^Prompt {words}"):
            check_prompts([[5, 6], form, [2000]], 1024)


@pytest.mark.parametrize("token", [-1, 2**32, 1.5])
def test_what_no_model_has_is_told_where_the_vocabulary_is_not_known(token: Any) -> None:
    with pytest.raises(GuardError, match=r"^Prompt 0, token 1: .*no (model has such an|token) id"):
        check_prompts([[5, token]])


def report(rank: int | None = 0, **changed: Any) -> dict[str, Any]:
    return {"rank": rank, "pid": 100, "digest": "d", "patches": [], "error": None, **changed}


def test_ranks_that_hold_the_drivers_plan_pass() -> None:
    ranks.compare_ranks([report(0), report(1)], "d", {})


@pytest.mark.parametrize(
    ("wrong", "environ", "words"),
    [
        (
            {"digest": None},
            {},
            "runs without the plan: its vllm_compat plugin did not load; install",
        ),
        (
            {"digest": None},
            {"VLLM_PLUGINS": "vllm_compat"},
            "runs without the plan: its vllm_compat plugin did not load; install",
        ),
        (
            {"digest": None},
            {"VLLM_PLUGINS": "another"},
            'runs without the plan: VLLM_PLUGINS="another" does not name vllm_compat.*set',
        ),
        ({"digest": None}, {"VLLM_PLUGINS": ""}, 'runs.*VLLM_PLUGINS="" is set but empty'),
        ({"digest": "e"}, {}, "holds plan e, the driver d: the processes see different"),
        ({"digest": None, "error": "it broke"}, {}, "could not patch: it broke"),
        ({"error": "it broke"}, {}, "could not patch: it broke"),
    ],
)
def test_the_rank_that_does_not_is_named_with_the_cause(
    wrong: dict[str, Any], environ: dict[str, str], words: str
) -> None:
    with pytest.raises(GuardError, match=rf"^Rank 1 \(pid 100\) {words}"):
        ranks.compare_ranks([report(0), report(1, **wrong), report(2, **wrong)], "d", environ)


def test_a_rank_that_does_not_know_its_number_is_named_by_its_place() -> None:
    with pytest.raises(GuardError, match=r"^Rank 1 \(pid 100\) runs without"):
        ranks.compare_ranks([report(None), report(None, digest=None)], "d", {})


def test_no_answer_is_no_agreement() -> None:
    with pytest.raises(GuardError, match="No rank has answered"):
        ranks.compare_ranks([], "d", {})


def test_a_rank_without_anything_in_force_reports_so() -> None:
    found = apply.report_rank(SimpleNamespace(rank=3))
    assert (found["rank"], found["digest"], found["patches"], found["error"]) == (3, None, [], None)
    assert apply.report_rank(object())["rank"] is None


@pytest.fixture
def make_generator(
    fake_modules: Callable[..., None], make_case: MakeCase, transaction: Transaction
) -> Callable[..., Any]:
    """Put the guards of a FAKE pair in force; return how to make a generator of no layers."""

    def make(generate: Callable[..., Any], *, device: str = "cpu") -> Any:
        fake_modules("vllm", "speculators_0_4", "transformers_4", "torch")
        case = make_case("speculators_0_4", device=device)
        plan = make_plan(case.contract, case.surface, case.environment)
        module = importlib.import_module(GENERATOR)
        module.VllmHiddenStatesGenerator.generate = generate
        features.install(transaction, plan, "driver", beneath_checks=True)
        checks.install(transaction, plan, apply.report_rank)
        features.install(transaction, plan, "driver", beneath_checks=False)
        generator = object.__new__(module.VllmHiddenStatesGenerator)
        generator.layer_ids = []
        generator.executor = None
        generator.scheduler = make_scheduler()
        return generator

    return make


def make_scheduler() -> Any:
    module = importlib.import_module("vllm.v1.core.sched.scheduler")
    interface = importlib.import_module("vllm.v1.kv_cache_interface")
    config = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=8, max_num_batched_tokens=64))
    return module.Scheduler(config, interface.KVCacheConfig(9), None, 16)


def make_request(name: str, ids: list[int]) -> Any:
    return importlib.import_module("vllm.v1.request").Request(name, ids, None, None, None)


def add_and_answer(self: Any, token_ids: Any) -> list[dict[str, Any]]:
    """Do what a right generator does, but for the forward."""
    for i, ids in enumerate(token_ids):
        self.scheduler.add_request(make_request(f"r{i}", ids))
    return [result(*ids) for ids in token_ids]


def test_a_right_call_passes_and_leaves_nothing_behind(make_generator: Callable[..., Any]) -> None:
    generator = make_generator(add_and_answer)
    assert generator.generate([[1], [2, 3]]) == [result(1), result(2, 3)]
    assert generator.generate(token_ids=[[4]]) == [result(4)]
    assert generator.scheduler.requests == {}
    assert context.current_call() is None


def test_an_empty_prompt_is_refused_before_anything_starts(
    make_generator: Callable[..., Any],
) -> None:
    generator = make_generator(lambda self, token_ids: 1 / 0)
    with pytest.raises(GuardError, match="Prompt 1 has no tokens"):
        generator.generate([[1], []])


def test_an_id_that_the_model_does_not_have_is_refused_before_anything_is_scheduled(
    make_generator: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def generate(self: Any, token_ids: Any) -> Any:
        asked.append(token_ids)
        return add_and_answer(self, token_ids)

    generator = make_generator(generate)
    monkeypatch.setattr(batch, "model_kind", lambda _generator: None)
    generator.vllm_config = SimpleNamespace(model_config=SimpleNamespace(get_vocab_size=lambda: 1024))
    for call in (
        lambda: generator.generate([[1], [2, 3, 4, 1030]]),
        lambda: generator.generate(token_ids=[[1], [2, 3, 4, 1030]]),
    ):
        with pytest.raises(GuardError, match=r"^Prompt 1, token 3: id 1030, the model has 1024"):
            call()
    assert asked == []
    assert generator.scheduler.requests == {}
    generator.generate([[1], [2, 3, 4, 1023]])
    assert asked == [[[1], [2, 3, 4, 1023]]]


def test_the_canarys_own_prompts_are_checked_too(
    make_generator: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    checked: list[Any] = []
    monkeypatch.setattr(batch, "check_prompts", lambda given, vocabulary: checked.append(given))
    monkeypatch.setattr(batch, "check_canary", lambda again, prompts, results, routed: again([[2]]))
    generator = make_generator(add_and_answer)
    wrapper = batch.checked_generate(everything=True, canary=True)

    def beneath(ids: Any) -> Any:
        return clean_scheduler._generate(lambda: add_and_answer(generator, ids), generator, (), {})

    wrapper(beneath, generator, ([[1], [2, 3]],), {})
    assert checked == [[[1], [2, 3]], [[2]]]


def test_what_the_downstream_says_of_its_own_inputs_comes_through(
    make_generator: Callable[..., Any],
) -> None:
    def refuse(self: Any, token_ids: Any = None) -> None:
        raise ValueError("token_ids cannot be empty")

    generator = make_generator(refuse)
    for call in (lambda: generator.generate([]), lambda: generator.generate()):
        with pytest.raises(ValueError, match="cannot be empty"):
            call()


@pytest.mark.parametrize(
    ("generate", "words"),
    [
        (lambda self, ids: add_and_answer(self, ids)[::-1], "Result 0 belongs to another prompt"),
        (lambda self, ids: add_and_answer(self, ids)[1:], "2 prompts gave 1 results"),
        (lambda self, ids: add_and_answer(self, ids[1:]), "2 prompts became 1 requests"),
        (lambda self, ids: add_and_answer(self, ids[::-1]), "prompt 0 holds other tokens"),
        (
            lambda self, ids: [{**r, "hidden_states": [0]} for r in add_and_answer(self, ids)],
            "Sample 0 has 1 layers, 0 were asked for",
        ),
    ],
    ids=["swapped", "one is missing", "one never asked", "asked in another order", "a layer more"],
)
def test_a_wrong_call_is_refused_and_leaves_nothing_behind(
    make_generator: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    generate: Callable[..., Any],
    words: str,
) -> None:
    generator = make_generator(generate)
    monkeypatch.setattr(batch, "look_at", lambda *a, **k: Rows((1, 1), "rows"))
    with pytest.raises(GuardError, match=words):
        generator.generate([[1], [2, 3]])
    assert generator.scheduler.requests == {}
    assert context.current_call() is None


@pytest.mark.parametrize(
    "text",
    ["request r1: 3 rows of layer 2 are not finite.", "Sample 1, layer number 0: 2 of 2 rows are zero"],
)
def test_one_bad_sample_is_named_by_its_prompt_and_its_place_in_the_run(
    make_generator: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    def fail(self: Any, token_ids: Any) -> None:
        add_and_answer(self, token_ids)
        raise RuntimeError(text)

    monkeypatch.setattr(run_record, "samples_so_far", lambda: 16)
    generator = make_generator(fail)
    with pytest.raises(GuardError) as caught:
        generator.generate([[1], list(range(20, 40))])
    said = str(caught.value)
    assert said.startswith(text.rstrip("."))
    assert "prompt 1 of this generate() call (20 tokens: 20, 21, 22, 23, 24, 25, 26, 27, …)" in said
    assert "sample 17 of this run" in said
    assert "take that conversation out of the data" in said


def test_an_error_of_no_sample_is_left_as_it_is() -> None:
    prompts = {"req_1": [1], "req_10": [2]}
    assert batch.name_prompt("the device is gone", prompts) == ""
    assert batch.name_prompt("request req_100 is unknown", prompts) == ""
    assert "prompt 1 of" in batch.name_prompt("rows of req_10", prompts)


def test_a_call_that_fails_is_over_and_taken_out_of_the_scheduler(
    make_generator: Callable[..., Any],
) -> None:
    calls: list[Any] = []

    def fail(self: Any, token_ids: Any) -> None:
        add_and_answer(self, token_ids)
        calls.append(context.current_call())
        assert not calls[0].over
        raise RuntimeError("the device is gone")

    generator = make_generator(fail)
    with pytest.raises(RuntimeError, match="the device is gone"):
        generator.generate([[1], [2, 3]])
    assert calls[0].over
    assert calls[0].prompts == {"r0": [1], "r1": [2, 3]}
    assert generator.scheduler.requests == {}


def test_only_requests_of_the_generators_own_scheduler_are_booked(
    make_generator: Callable[..., Any],
) -> None:
    def generate(self: Any, token_ids: Any) -> Any:
        self.other.add_request(make_request("other", [9]))
        return add_and_answer(self, token_ids)

    generator = make_generator(generate)
    generator.other = make_scheduler()
    generator.generate([[1]])
    assert list(generator.other.requests) == ["other"]


def test_a_request_outside_of_a_call_is_nobodys(make_generator: Callable[..., Any]) -> None:
    generator = make_generator(add_and_answer)
    generator.scheduler.add_request(make_request("r", [1]))
    assert list(generator.scheduler.requests) == ["r"]


@pytest.mark.parametrize(
    ("args", "kwargs"), [(("/m",), {}), ((), {"model_path": "/m", "layer_ids": [1]})]
)
def test_the_model_of_a_generator_is_known_while_it_is_built(
    make_generator: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    make_generator(add_and_answer)
    cls = importlib.import_module(GENERATOR).VllmHiddenStatesGenerator
    seen: list[Any] = []
    # Beneath the wrapper of the guards: what the downstream's own __init__ would see.
    original = vars(cls)["__init__"].__wrapped__
    assert original.__name__ == "__init__"
    monkeypatch.setattr(
        importlib.import_module(GENERATOR).AutoTokenizer,
        "from_pretrained",
        lambda path: seen.append((path, context.current_build())) or 1 / 0,
    )
    kwargs.setdefault("layer_ids", [])
    with pytest.raises(ZeroDivisionError):
        cls(*args, **kwargs)
    ((path, build),) = seen
    assert (path, build.model_path, type(build.generator)) == ("/m", "/m", cls)
    assert context.current_build() is None


@pytest.fixture
def make_executor(make_generator: Callable[..., Any]) -> Callable[..., Any]:
    """Make FAKE executors that start no workers but answer for them."""

    def make(extension: str = EXTENSION, *, device: str = "cpu", **report: Any) -> Any:
        make_generator(add_and_answer, device=device)
        module = importlib.import_module("vllm.v1.executor.multiproc_executor")
        stopped: list[bool] = []

        class Executor(module.MultiprocExecutor):  # type: ignore[misc, name-defined]
            def _init_executor(self) -> None:
                self.asked: list[Any] = []

            def collective_rpc(self, method: Any, *args: Any, **kwargs: Any) -> Any:
                self.asked.append(method)
                if report.get("fails"):
                    raise RuntimeError("a worker is gone")
                return [{"rank": 0, "pid": 1, "error": None, **report}]

            def shutdown(self) -> None:
                stopped.append(True)

        parallel = SimpleNamespace(worker_extension_cls=extension)
        Executor.stopped = stopped
        return Executor, SimpleNamespace(parallel_config=parallel)

    return make


def test_ranks_are_compared_when_the_executor_is_there(
    make_executor: Callable[..., Any], plan_of: Plan
) -> None:
    cls, config = make_executor(digest=plan_of.digest)
    assert cls(config).asked == [apply.report_rank]
    assert cls(vllm_config=config, monitor_workers=False).asked == [apply.report_rank]
    assert cls.stopped == []


@pytest.fixture
def plan_of(make_case: MakeCase) -> Plan:
    case = make_case("speculators_0_4", device="cpu")
    return make_plan(case.contract, case.surface, case.environment)


@pytest.mark.parametrize(
    ("report", "error"),
    [
        ({"digest": None}, GuardError),
        ({"digest": "other"}, GuardError),
        ({"fails": True}, RuntimeError),
    ],
)
def test_workers_that_cannot_be_used_are_stopped(
    make_executor: Callable[..., Any], report: dict[str, Any], error: type[Exception]
) -> None:
    cls, config = make_executor(**report)
    with pytest.raises(error):
        cls(config)
    assert cls.stopped == [True]


def test_the_executor_of_another_engine_is_not_asked(make_executor: Callable[..., Any]) -> None:
    cls, config = make_executor("another.Extension", digest=None)
    assert cls(config).asked == []


@pytest.mark.parametrize(
    ("device", "extension", "checks"),
    [("cuda", EXTENSION, 1), ("cpu", EXTENSION, 0), ("cuda", "another.Extension", 0)],
)
def test_the_start_method_is_checked_before_a_model_is_loaded_on_a_gpu(
    make_executor: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    make_case: MakeCase,
    device: str,
    extension: str,
    checks: int,
) -> None:
    case = make_case("speculators_0_4", device=device)
    plan = make_plan(case.contract, case.surface, case.environment)
    cls, config = make_executor(extension, device=device, digest=plan.digest)
    seen: list[bool] = []
    monkeypatch.setattr(ranks, "check_fork", lambda: seen.append(True))
    cls(config)
    assert len(seen) == checks


@pytest.mark.parametrize("given", [None, "GrammarOutput"])
def test_a_grammar_or_nothing_may_be_sampled_with(
    make_executor: Callable[..., Any], plan_of: Plan, given: str | None
) -> None:
    cls, config = make_executor(digest=plan_of.digest)
    output = importlib.import_module("vllm.v1.core.sched.output")
    grammar = getattr(output, given)() if given else None
    executor = cls(config)
    executor.sample_tokens(grammar)
    executor.sample_tokens(grammar_output=grammar)
    assert executor.asked[1:] == ["sample_tokens"] * 2


def test_a_model_output_is_no_grammar(make_executor: Callable[..., Any], plan_of: Plan) -> None:
    cls, config = make_executor(digest=plan_of.digest)
    executor = cls(config)
    with pytest.raises(GuardError, match="called with a dict, it takes a GrammarOutput or None"):
        executor.sample_tokens({})
    assert executor.asked[1:] == []


class Executor:
    """A FAKE executor that counts how often it is shut down."""

    def __init__(self) -> None:
        self.ended = 0

    def shutdown(self) -> None:
        self.ended += 1


class Built:
    """A FAKE generator."""

    layer_ids = (1, 2)

    def __init__(self, executor: Executor) -> None:
        self.executor = executor


def test_a_generator_that_cannot_be_built_is_the_first_cause(
    monkeypatch: pytest.MonkeyPatch, plan_of: Plan
) -> None:
    causes: list[str] = []
    monkeypatch.setattr("vllm_compat.runtime.run_record.fail", causes.append)

    def build(*args: Any) -> None:
        raise ValueError("no\nsuch model")

    with pytest.raises(ValueError, match="no"):
        batch.while_building(plan_of)(build, Built(Executor()), ("model",), {})
    assert causes == ["Building the generator: ValueError: no such model"]
