"""``vllm-compat diff``: what changed between two surfaces, parameter by parameter."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator
from tests.downstreams import wheel

import vllm_compat
from vllm_compat import cli
from vllm_compat.analysis.surface import Parameter, ParameterKind, Signature, SymbolKind
from vllm_compat.commands.check import diff
from vllm_compat.commands.report.changes import ChangeKind, Difference
from vllm_compat.commands.report.difference import render_difference
from vllm_compat.commands.report.shapes import DetailKind, same_annotation, signature_changes

SCHEMAS = Path(vllm_compat.__file__).parent / "schemas"


@cache
def used(before: str, after: str) -> Difference:
    return diff(before, after, [wheel("0.4.0.1")])


@cache
def everything() -> Difference:
    return diff("0.32.0", "0.33.0", all_symbols=True)


# By use.


def test_a_parameter_that_went_is_told_with_its_call_site() -> None:
    (change,) = (c for c in used("0.16.0", "0.17.0").changes if c.symbol == "vllm.v1.request.Request")
    assert (change.kind, change.what) == (ChangeKind.CHANGED, SymbolKind.CLASS)
    (gone,) = (d for d in change.details if d.name == "eos_token_id")
    assert gone.kind is DetailKind.PARAMETER_REMOVED
    assert gone.concerns
    assert any(site.line for site in change.sites)


def test_names_that_moved_are_found_by_looking() -> None:
    moved = {c.symbol: c.moved_to for c in used("0.32.0", "0.33.0").of(ChangeKind.MOVED)}
    old, new = "vllm.v1.core.kv_cache_utils", "vllm.v1.core.kv_cache_planning"
    names = (
        "_get_kv_cache_groups_uniform_spec",
        "get_kv_cache_config_from_groups",
        "unify_hybrid_kv_cache_specs",
    )
    assert moved == {f"{old}.{name}": f"{new}.{name}" for name in names}


def test_the_way_back_is_the_way_there_reversed() -> None:
    there, back = used("0.11.0", "0.12.0"), used("0.12.0", "0.11.0")
    assert {c.symbol for c in there.of(ChangeKind.ADDED)} == {
        c.symbol for c in back.changes if c.kind in (ChangeKind.REMOVED, ChangeKind.MOVED)
    }
    assert {c.symbol for c in there.of(ChangeKind.CHANGED)} == {
        c.symbol for c in back.of(ChangeKind.CHANGED)
    }


def test_a_release_does_not_differ_from_itself() -> None:
    assert used("0.26.0", "0.26.0").changes == ()
    assert "none changed" in render_difference(used("0.26.0", "0.26.0"), "text")


# Everything.


def test_all_symbols_is_all_that_v1_and_config_define() -> None:
    changes = {c.symbol: c for c in everything().changes}
    assert everything().looked_at > 2000
    assert all(name.startswith(("vllm.v1.", "vllm.config")) for name in changes)
    moved = changes["vllm.v1.core.kv_cache_utils.get_kv_cache_config_from_groups"]
    assert moved.kind is ChangeKind.MOVED
    layout = changes["vllm.v1.executor.abstract.Executor.set_kv_cache_layout"]
    (detail,) = layout.details
    assert detail.name == "cp_kv_cache_interleave_size"
    assert detail.kind is DetailKind.PARAMETER_ADDED


def test_a_name_is_told_once() -> None:
    told = [(c.symbol, c.kind) for c in everything().changes]
    assert len(told) == len(set(told))


# Shapes.


def signature(*parameters: Parameter, returns: str | None = None) -> Signature:
    return Signature(parameters, returns)


def kinds(old: Signature, new: Signature) -> list[tuple[DetailKind, str | None]]:
    return [(d.kind, d.name) for d in signature_changes(old, new)]


A, B = Parameter("a", annotation="int"), Parameter("b", annotation="str")


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (signature(A), signature(A), []),
        (signature(A, B), signature(A), [(DetailKind.PARAMETER_REMOVED, "b")]),
        (signature(A), signature(A, B), [(DetailKind.PARAMETER_ADDED, "b")]),
        (signature(A, B), signature(B, A), [(DetailKind.PARAMETER_ORDER, None)]),
        (
            signature(A),
            signature(Parameter("c", annotation="int")),
            [(DetailKind.PARAMETER_RENAMED, "a")],
        ),
        (
            signature(A),
            signature(B),
            [(DetailKind.PARAMETER_REMOVED, "a"), (DetailKind.PARAMETER_ADDED, "b")],
        ),
        (
            signature(A),
            signature(Parameter("a", ParameterKind.KEYWORD_ONLY, annotation="int")),
            [(DetailKind.PARAMETER_CHANGED, "a")],
        ),
        (
            signature(A),
            signature(Parameter("a", default="1", annotation="int")),
            [(DetailKind.PARAMETER_CHANGED, "a")],
        ),
        (signature(returns="int"), signature(returns="None"), [(DetailKind.RETURNS, None)]),
    ],
)
def test_signatures_are_compared_parameter_by_parameter(
    old: Signature, new: Signature, expected: list[tuple[DetailKind, str | None]]
) -> None:
    assert kinds(old, new) == expected


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("Optional[int]", "int | None", True),
        ("Union[int, str, None]", "None | str | int", True),
        ("List[Dict[str, int]]", "list[dict[str, int]]", True),
        ("'Scheduler'", "Scheduler", True),
        ("torch.Tensor", "Tensor", True),
        ("int", "int | None", False),
        ("Literal['a']", "Literal['b']", False),
        ("list[int]", "list[str]", False),
        ("int", None, False),
        ("not an annotation", "not an annotation", True),
    ],
)
def test_annotations_are_compared_by_what_they_say(
    one: str | None, other: str | None, same: bool
) -> None:
    assert same_annotation(one, other) is same
    assert same_annotation(other, one) is same


# Output.


@pytest.mark.parametrize("form", ["text", "json", "markdown"])
def test_the_command_writes_every_format(
    form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["diff", "0.16.0", "0.17.0", "--downstream", str(wheel("0.4.0.1"))]
    assert cli.main([*arguments, "--format", form]) == 0
    printed = capsys.readouterr().out
    assert "eos_token_id" in printed
    assert cli.main([*arguments, "--format", form, "--output", str(tmp_path / "o")]) == 0
    assert (tmp_path / "o").read_text("utf-8") == printed


def test_text_marks_what_the_downstream_gives() -> None:
    shown = render_difference(used("0.16.0", "0.17.0"), "text")
    assert "- eos_token_id: int | None, given here" in shown


def test_json_is_as_the_published_schema_says() -> None:
    schema = json.loads((SCHEMAS / "diff.schema.json").read_text("utf-8"))
    Draft202012Validator.check_schema(schema)
    for difference in (used("0.11.0", "0.12.0"), everything()):
        Draft202012Validator(schema).validate(json.loads(render_difference(difference, "json")))
    change = schema["properties"]["changes"]["items"]["properties"]
    assert set(change["kind"]["enum"]) == {kind.value for kind in ChangeKind}
    detail = change["details"]["items"]["properties"]
    assert set(detail["kind"]["enum"]) == {kind.value for kind in DetailKind}


def test_what_cannot_be_read_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["diff", "0.16.0", "0.9.9", "--downstream", str(wheel("0.3.0"))]) == 2
    assert capsys.readouterr().err.startswith("vllm-compat: There is no record of vLLM 0.9.9")
