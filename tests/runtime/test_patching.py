"""Wrapping now and later, taking back, all or nothing: on small modules made here."""

from __future__ import annotations

import importlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import wrapt

from vllm_compat.errors import PatchError
from vllm_compat.runtime.patching import Transaction

MODULE = """
    def double(x):
        return 2 * x

    class Base:
        def method(self, x):
            return ("method", x)

        @classmethod
        def make(cls, x):
            return (cls.__name__, x)

        @staticmethod
        def plain(x):
            return ("plain", x)

        class Inner:
            def method(self, x):
                return ("inner", x)

    class Child(Base):
        pass
"""


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Write importable modules, which are forgotten after the test."""
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)

    def put(**sources: str) -> None:
        for name, source in sources.items():
            (tmp_path / f"{name}.py").write_text(dedent(source))
        importlib.invalidate_caches()

    yield put
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


@pytest.fixture
def module(write: Callable[..., None]) -> ModuleType:
    write(patched=MODULE)
    return importlib.import_module("patched")


def more(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A wrapper whose work can be seen."""
    return ("wrapped", wrapped(*args, **kwargs))


def states(transaction: Transaction) -> list[str]:
    return [patch.state for patch in transaction.patches]


@pytest.mark.parametrize(
    ("path", "call", "answer"),
    [
        ("double", lambda m: m.double(2), 4),
        ("Base.method", lambda m: m.Base().method(1), ("method", 1)),
        ("Base.make", lambda m: m.Base.make(1), ("Base", 1)),
        ("Base.make", lambda m: m.Child.make(1), ("Child", 1)),
        ("Base.plain", lambda m: m.Base.plain(1), ("plain", 1)),
        ("Base.plain", lambda m: m.Base().plain(1), ("plain", 1)),
        ("Base.Inner.method", lambda m: m.Base.Inner().method(1), ("inner", 1)),
    ],
)
def test_what_is_imported_is_wrapped_at_once_and_given_back_as_the_very_object(
    module: ModuleType,
    transaction: Transaction,
    path: str,
    call: Callable[[ModuleType], object],
    answer: object,
) -> None:
    *parents, name = path.split(".")
    parent: Any = module
    for part in parents:
        parent = getattr(parent, part)
    before = vars(parent)[name]
    transaction.wrap(f"patched:{path}", more)
    assert states(transaction) == ["in force"]
    assert call(module) == ("wrapped", answer)
    assert transaction.revert() == []
    assert vars(parent)[name] is before
    assert call(module) == answer
    assert states(transaction) == ["reverted"]


def test_an_inherited_method_is_wrapped_in_the_child_alone_and_leaves_no_trace(
    module: ModuleType, transaction: Transaction
) -> None:
    transaction.wrap("patched:Child.method", more)
    transaction.wrap("patched:Child.make", more)
    assert module.Child().method(1) == ("wrapped", ("method", 1))
    assert module.Child.make(1) == ("wrapped", ("Child", 1))
    assert module.Base().method(1) == ("method", 1)
    transaction.revert()
    assert not {"method", "make"} & set(vars(module.Child))
    assert module.Child().method(1) == ("method", 1)


def test_what_is_not_imported_is_wrapped_in_the_moment_its_import_ends(
    write: Callable[..., None], transaction: Transaction
) -> None:
    write(later=MODULE, user="from later import double\n\nresult = double(1)\n")
    transaction.wrap("later:double", more)
    assert states(transaction) == ["waiting"]
    assert "later" not in sys.modules
    assert importlib.import_module("user").result == ("wrapped", 2)
    assert states(transaction) == ["in force"]


def test_nothing_goes_in_after_a_revert(write: Callable[..., None], transaction: Transaction) -> None:
    write(later=MODULE)
    transaction.wrap("later:double", more)
    transaction.revert()
    assert importlib.import_module("later").double(1) == 2
    assert states(transaction) == ["reverted"]


def test_two_wrappers_of_one_target_run_last_in_first_out(
    module: ModuleType, transaction: Transaction
) -> None:
    before = module.double

    def tag(name: str) -> Any:
        return lambda wrapped, instance, args, kwargs: (name, wrapped(*args, **kwargs))

    transaction.wrap("patched:double", tag("first"))
    transaction.wrap("patched:double", tag("second"))
    assert module.double(1) == ("second", ("first", 2))
    transaction.revert()
    assert module.double is before


def test_a_wrapper_of_somebody_else_stays_and_ours_beneath_it_does_nothing_any_more(
    module: ModuleType, transaction: Transaction
) -> None:
    transaction.owned_by("ours").wrap("patched:Base.method", more)

    @wrapt.decorator
    def foreign(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        return ("foreign", wrapped(*args, **kwargs))

    module.Base.method = over = foreign(module.Base.method)
    assert module.Base().method(1) == ("foreign", ("wrapped", ("method", 1)))
    (left,) = transaction.revert()
    assert (left.owner, left.target, left.state) == ("ours", "patched:Base.method", "inert")
    assert vars(module.Base)["method"] is over
    assert module.Base().method(1) == ("foreign", ("method", 1))


def test_a_later_transaction_works_above_what_an_earlier_one_had_to_leave(
    module: ModuleType, transaction: Transaction
) -> None:
    transaction.wrap("patched:double", more)
    ours = module.double
    module.double = lambda x: ours(x)
    assert len(transaction.revert()) == 1
    again = Transaction()
    again.wrap("patched:double", more)
    assert module.double(1) == ("wrapped", 2)
    assert again.revert() == []
    assert module.double(1) == 2


@pytest.mark.parametrize("path", ["nothing", "Base.nothing", "Nothing.method", "Base.Inner.x"])
def test_a_target_that_is_not_there_is_named_and_everything_is_taken_back(
    module: ModuleType, transaction: Transaction, path: str
) -> None:
    before = module.double
    transaction.owned_by("one").wrap("patched:double", more)
    with pytest.raises(
        PatchError, match=rf"The patch of two .* taken back: patched:{path} is not there"
    ):
        transaction.owned_by("two").wrap(f"patched:{path}", more)
    assert module.double is before
    assert not transaction.active
    assert transaction.failure is not None
    assert transaction.failure.startswith("two: patched:")


def test_a_live_object_that_is_not_what_was_planned_is_refused(
    module: ModuleType, transaction: Transaction
) -> None:
    seen: list[object] = []

    def confirm(live: object) -> str:
        seen.append(live)
        return "it takes y, not x"

    with pytest.raises(
        PatchError, match="not what the plan read from source: it takes y, not x"
    ) as said:
        transaction.wrap("patched:double", more, confirm=confirm)
    line = module.double.__code__.co_firstlineno
    assert f"It stands in {module.__file__}:{line}; a wrapper of yours can be put on" in str(said.value)
    assert seen == [module.double]
    transaction.revert()


def test_a_patch_that_fails_later_fails_that_import_and_takes_everything_back(
    write: Callable[..., None], module: ModuleType
) -> None:
    told: list[str] = []
    transaction = Transaction(on_failure=lambda: told.append("failed"))
    before = module.double
    write(late="x = 1\n", latest=MODULE)
    transaction.owned_by("one").wrap("patched:double", more)
    transaction.owned_by("two").wrap("late:gone", more)
    transaction.owned_by("three").wrap("latest:double", more)
    assert transaction.active
    with pytest.raises(PatchError, match=r"The patch of two does not fit this process.*late:gone"):
        importlib.import_module("late")
    assert module.double is before
    assert states(transaction) == ["reverted"] * 3
    assert told == ["failed"]
    assert importlib.import_module("latest").double(1) == 2
    assert importlib.import_module("late").x == 1  # stock again


def test_a_module_gets_a_name_that_it_lacks_and_loses_it_again(
    module: ModuleType, transaction: Transaction
) -> None:
    transaction.set("patched:extra", lambda m: m.double(3))
    assert module.extra == 6
    assert transaction.revert() == []
    assert not hasattr(module, "extra")


def test_a_name_that_stands_in_for_another_gives_it_back(
    module: ModuleType, transaction: Transaction
) -> None:
    before = module.double
    transaction.set("patched:double", lambda m: None)
    assert module.double is None
    transaction.revert()
    assert module.double is before


def test_a_name_that_somebody_has_set_since_is_theirs(
    module: ModuleType, transaction: Transaction
) -> None:
    transaction.set("patched:extra", lambda m: 1)
    module.extra = 2
    assert [p.target for p in transaction.revert()] == ["patched:extra"]
    assert module.extra == 2


def test_a_variable_is_set_for_this_process_and_its_children_until_the_revert(
    transaction: Transaction, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("A_VARIABLE", raising=False)
    transaction.environ("A_VARIABLE", "1")
    assert os.environ["A_VARIABLE"] == "1"
    transaction.revert()
    assert "A_VARIABLE" not in os.environ


@pytest.mark.parametrize("given", ["0", ""])
def test_a_variable_that_the_user_has_set_is_left_alone(
    transaction: Transaction, monkeypatch: pytest.MonkeyPatch, given: str
) -> None:
    monkeypatch.setenv("A_VARIABLE", given)
    transaction.environ("A_VARIABLE", "1")
    assert os.environ["A_VARIABLE"] == given
    transaction.revert()
    assert os.environ["A_VARIABLE"] == given


def test_a_variable_that_the_user_changes_afterwards_stays_as_it_is(
    transaction: Transaction, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("A_VARIABLE", raising=False)
    transaction.environ("A_VARIABLE", "1")
    monkeypatch.setenv("A_VARIABLE", "2")
    transaction.revert()
    assert os.environ["A_VARIABLE"] == "2"


def test_a_missing_module_is_supplied_and_goes_again(
    write: Callable[..., None], transaction: Transaction
) -> None:
    write(user="from supplied import value\n")
    path = list(sys.meta_path)

    def fill(new: ModuleType) -> None:
        new.value = 7  # type: ignore[attr-defined]

    transaction.supply_module("supplied", fill)
    assert importlib.import_module("user").value == 7
    transaction.revert()
    assert "supplied" not in sys.modules
    assert sys.meta_path == path
    del sys.modules["user"]
    with pytest.raises(ModuleNotFoundError, match="supplied"):
        importlib.import_module("user")


def test_a_supplied_submodule_leaves_its_package_as_it_was(
    tmp_path: Path, write: Callable[..., None], transaction: Transaction
) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("")
    write()
    transaction.supply_module("package.sub", lambda new: None)
    package = importlib.import_module("package")
    assert importlib.import_module("package.sub") is package.sub
    transaction.revert()
    assert not hasattr(package, "sub")
    assert "package.sub" not in sys.modules


def test_a_module_that_is_there_is_not_supplied(
    write: Callable[..., None], transaction: Transaction
) -> None:
    write(supplied="value = 'real'\n")
    transaction.supply_module("supplied", lambda new: vars(new).update(value="ours"))
    assert importlib.import_module("supplied").value == "real"
    transaction.revert()
    assert sys.modules["supplied"].value == "real"


def test_reverting_twice_is_reverting_once(module: ModuleType, transaction: Transaction) -> None:
    before = module.double
    transaction.wrap("patched:double", more)
    transaction.revert()
    module.double = other = lambda x: x
    transaction.revert()
    assert module.double is other
    assert before is not other


def test_an_import_that_another_thread_has_under_way_is_waited_for(
    write: Callable[..., None], transaction: Transaction
) -> None:
    write(slow="import time\nstarted = 1\ntime.sleep(0.5)\ndef double(x): return 2 * x\n")
    importing = threading.Thread(target=importlib.import_module, args=("slow",))
    importing.start()
    while not hasattr(sys.modules.get("slow"), "started"):
        time.sleep(0.01)
    transaction.wrap("slow:double", more)
    importing.join()
    assert sys.modules["slow"].double(1) == ("wrapped", 2)


def test_a_target_in_a_half_imported_module_is_refused_in_words(
    write: Callable[..., None], transaction: Transaction, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(
        circular="""
            import sys
            sys.the_transaction.wrap("circular:double", None)
            def double(x): return 2 * x
        """
    )
    monkeypatch.setattr(sys, "the_transaction", transaction, raising=False)
    with pytest.raises(PatchError, match=r"circular is only half imported.*before that import"):
        importlib.import_module("circular")


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_target_is_wrapped_before_its_import_or_after_it(
    write: Callable[..., None], transaction: Transaction, when: str
) -> None:
    """What the refusal of a half imported module advises."""
    write(circular=MODULE)
    if when == "after":
        importlib.import_module("circular")
    transaction.wrap("circular:double", more)
    assert importlib.import_module("circular").double(1) == ("wrapped", 2)


def test_a_patch_that_imports_does_not_block_an_import_that_is_patched(
    write: Callable[..., None], transaction: Transaction
) -> None:
    """One thread's patch imports what another thread is importing, which waits to be patched."""
    write(
        first="value = 1\n",
        second="import time\nstarted = 1\ntime.sleep(0.5)\nimport third\n",
        third=MODULE,
    )
    entered = threading.Event()

    def make(module: ModuleType) -> ModuleType:
        entered.set()
        while not hasattr(sys.modules.get("second"), "started"):
            time.sleep(0.01)
        return importlib.import_module("second")

    transaction.set("first:other", make)
    transaction.wrap("third:double", more)
    threads = [threading.Thread(target=importlib.import_module, args=("first",), daemon=True)]
    threads[0].start()
    assert entered.wait(5)
    threads.append(threading.Thread(target=importlib.import_module, args=("second",), daemon=True))
    threads[1].start()
    for thread in threads:
        thread.join(5)
        assert not thread.is_alive(), "deadlock"
    assert sys.modules["third"].double(1) == ("wrapped", 2)
    assert sys.modules["first"].other is sys.modules["second"]


def test_a_patch_that_another_thread_is_putting_in_while_we_revert_goes_again(
    write: Callable[..., None], transaction: Transaction
) -> None:
    write(first="value = 1\n")
    entered, reverted = threading.Event(), threading.Event()

    def make(module: ModuleType) -> int:
        entered.set()
        assert reverted.wait(5)
        return 1

    transaction.set("first:other", make)
    importing = threading.Thread(target=importlib.import_module, args=("first",))
    importing.start()
    assert entered.wait(5)
    transaction.revert()
    reverted.set()
    importing.join()
    assert not hasattr(sys.modules["first"], "other")
    assert states(transaction) == ["reverted"]


def test_many_threads_that_import_get_one_wrapper(
    write: Callable[..., None], transaction: Transaction
) -> None:
    write(later=MODULE)
    transaction.wrap("later:double", more)
    together = threading.Barrier(8)
    answers: list[object] = []

    def use() -> None:
        together.wait()
        answers.append(importlib.import_module("later").double(1))

    threads = [threading.Thread(target=use) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [("wrapped", 2)] * 8


class Runner:
    """A live object, as a model runner is."""

    def step(self) -> str:
        return "stock"


def test_an_attribute_of_a_live_object_goes_as_it_came(transaction: Transaction) -> None:
    fresh, own = Runner(), Runner()
    vars(own)["step"] = mine = lambda: "its own"
    for runner in (fresh, own):
        transaction.owned_by("one").set_attribute(runner, "step", lambda: "ours")
        assert runner.step() == "ours"
    assert {(p.owner, p.target, p.state) for p in transaction.patches} == {
        ("one", f"{__name__}:Runner.step of one object", "in force")
    }
    assert transaction.revert() == []
    assert "step" not in vars(fresh)
    assert vars(own)["step"] is mine


def test_what_somebody_elses_code_does_to_a_live_object_goes_as_it_came(
    transaction: Transaction,
) -> None:
    live = SimpleNamespace()
    own, kept = vars(live).setdefault("own", object()), vars(live).setdefault("kept", object())
    before = dict(vars(live))
    with transaction.watched(live):
        live.own, live.new = "another", "new"
        del live.kept
    assert len(transaction.patches) == 3
    assert transaction.revert() == []
    assert (vars(live), live.own, live.kept) == (before, own, kept)


def test_what_somebody_has_put_over_a_live_attribute_stays_and_is_told(transaction: Transaction) -> None:
    runner = Runner()
    transaction.owned_by("one").set_attribute(runner, "step", lambda: "ours")
    vars(runner)["step"] = theirs = lambda: "theirs"
    (left,) = transaction.revert()
    assert (left.owner, left.state) == ("one", "inert")
    assert vars(runner)["step"] is theirs


class Hooked:
    """A FAKE module of torch: it knows its hooks."""

    def __init__(self) -> None:
        self.hooks: list[Any] = []

    def register_forward_hook(self, hook: Any) -> Any:
        self.hooks.append(hook)
        return type("Handle", (), {"remove": lambda handle: self.hooks.remove(hook)})()


def test_hooks_and_what_waits_for_the_end_go_too(
    transaction: Transaction, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting: list[Any] = []
    monkeypatch.setattr("atexit.register", waiting.append)
    monkeypatch.setattr("atexit.unregister", waiting.remove)
    module = Hooked()
    transaction.hook(module, print)
    transaction.at_exit(print, "the end")
    assert (module.hooks, waiting) == ([print], [print])
    transaction.revert()
    assert (module.hooks, waiting) == ([], [])


def test_what_is_changed_after_a_revert_is_taken_back_at_once(transaction: Transaction) -> None:
    transaction.revert()
    runner, module = Runner(), Hooked()
    transaction.set_attribute(runner, "step", lambda: "ours")
    transaction.hook(module, print)
    assert (vars(runner), module.hooks) == ({}, [])


def test_some_are_taken_back_and_the_others_stay(
    module: ModuleType, write: Callable[..., None], transaction: Transaction
) -> None:
    before = module.double
    write(later=MODULE)
    one, two = transaction.owned_by("one"), transaction.owned_by("two")
    one.wrap("patched:double", more)
    two.wrap("patched:Base.method", more)
    one.wrap("later:double", more)
    assert transaction.take_back([p for p in transaction.patches if p.owner == "one"]) == []
    assert transaction.active
    assert module.double is before
    assert module.Base().method(1)[0] == "wrapped"
    assert importlib.import_module("later").double(1) == 2, "nothing waits for it any more"
    assert [patch.owner for patch in transaction.patches] == ["two"]


def test_some_that_others_have_wrapped_over_do_nothing_any_more(
    module: ModuleType, transaction: Transaction
) -> None:
    transaction.wrap("patched:double", more)
    ours = module.double
    module.double = lambda x: ("theirs", ours(x))
    (left,) = transaction.take_back(list(transaction.patches))
    assert left.state == "inert"
    assert transaction.active
    assert module.double(1) == ("theirs", 2)


def test_something_lent_is_there_for_a_block(transaction: Transaction) -> None:
    runner = Runner()

    def use_and_fail() -> None:
        with transaction.lent(runner, "step", lambda: "lent"):
            assert runner.step() == "lent"
            raise ValueError("boom")

    with pytest.raises(ValueError, match="boom"):
        use_and_fail()
    assert (vars(runner), transaction.patches) == ({}, [])
