"""Adapters of vllm.v1.request, on FAKE requests."""

from __future__ import annotations

import importlib
from collections.abc import Callable

import pytest

from vllm_compat.adapters import by_name
from vllm_compat.adapters.base import Case
from vllm_compat.analysis.drift import FindingKind
from vllm_compat.analysis.plan import Plan
from vllm_compat.runtime.context import call_of

MakeCase = Callable[..., Case]
REMOVED = ("vllm/v1/request.py", "        eos_token_id: int | None,\n", "")


@pytest.mark.parametrize("downstream", ["speculators_0_3", "speculators_0_4"])
def test_eos_token_id_is_dropped_where_requests_do_not_take_it(
    make_case: MakeCase, downstream: str
) -> None:
    adapter = by_name("request.eos_token_id")
    assert adapter.need(make_case(downstream)) is None
    need = adapter.need(make_case(downstream, REMOVED))
    assert need is not None
    (finding,) = need.findings
    assert (finding.kind, finding.name) == (FindingKind.PARAMETER_REMOVED, "eos_token_id")
    assert "dropped" in need.reason


def test_a_request_is_built_without_it_and_with_all_the_rest(
    fake_modules: Callable[..., None],
    make_case: MakeCase,
    install: Callable[[str, Case], Plan],
) -> None:
    fake_modules("vllm")
    request = importlib.import_module("vllm.v1.request")

    def later(
        self: object,
        request_id: str,
        prompt_token_ids: list[int],
        pooling_params: object = None,
        new: int = 0,
    ) -> None:
        self.__dict__.update(request_id=request_id, tokens=prompt_token_ids, new=new)

    request.Request.__init__ = later
    install("request.eos_token_id", make_case("speculators_0_3", REMOVED))
    with call_of(object()):
        made = request.Request("r", prompt_token_ids=[1], eos_token_id=2, pooling_params=None, new=3)
    assert (made.request_id, made.tokens, made.new) == ("r", [1], 3)
    assert request.Request("r", [1]).request_id == "r"
    # A request for an engine that is not ours is none of ours.
    with pytest.raises(TypeError, match="eos_token_id"):
        request.Request("r", [1], eos_token_id=2)
