"""An annotation's text or syntax is taken apart once, for all that ask what it means."""

from __future__ import annotations

import ast

import pytest

from vllm_compat.analysis.annotations import (
    Dots,
    Either,
    Form,
    Generic,
    Listed,
    Named,
    Nothing,
    Unreadable,
    expression,
    form_of,
    form_of_node,
)


def told(form: Form) -> object:
    """Return what can be compared of a form: nodes are not equal, their texts are."""
    if isinstance(form, Named):
        return form.dotted
    if isinstance(form, Either):
        return {"either": [told(part) for part in form.parts]}
    if isinstance(form, Generic):
        return {form.dotted: [told(part) for part in form.parts]}
    if isinstance(form, Listed):
        return [told(part) for part in form.parts]
    if isinstance(form, Unreadable):
        return ("unreadable", form.text)
    return type(form).__name__


@pytest.mark.parametrize(
    ("text", "form"),
    [
        ("int", "int"),
        ("torch.Tensor", "torch.Tensor"),
        ("'Later'", "Later"),
        ("None", "Nothing"),
        ("int | None", {"either": ["int", "Nothing"]}),
        ("Optional[int]", {"either": ["int", "Nothing"]}),
        ("typing.Union[int, 'Later']", {"either": ["int", "Later"]}),
        ("'int | Later'", {"either": ["int", "Later"]}),
        ("list['Later']", {"list": ["Later"]}),
        ("tuple[int, ...]", {"tuple": ["int", "Dots"]}),
        ("Callable[[int, str], None]", {"Callable": [["int", "str"], "Nothing"]}),
        ("3", ("unreadable", "3")),
        ("f(x)", ("unreadable", "f(x)")),
        ("a & b", ("unreadable", "a & b")),
        ("not valid", ("unreadable", "not valid")),
        ("list['not valid']", {"list": [("unreadable", "not valid")]}),
    ],
)
def test_a_text_has_a_form(text: str, form: object) -> None:
    assert told(form_of(text)) == form


@pytest.mark.parametrize("text", ["Optional[a.B]", "dict[str, 'C'] | None", "tuple[()]"])
def test_syntax_and_its_text_have_the_same_form(text: str) -> None:
    node = expression(text)
    assert node is not None
    assert told(form_of_node(node)) == told(form_of(ast.unparse(node)))


def test_the_last_part_of_a_dotted_name_is_what_readers_go_by() -> None:
    named, generic = form_of("torch.Tensor"), form_of("typing.List[int]")
    assert isinstance(named, Named)
    assert isinstance(generic, Generic)
    assert (named.last, generic.last) == ("Tensor", "List")


def test_a_literal_s_values_are_to_be_had_from_the_whole() -> None:
    form = form_of("Literal['a b', 1]")
    assert isinstance(form, Generic)
    assert ast.unparse(form.node) == "Literal['a b', 1]"


def test_what_is_none_and_what_are_dots_are_told_apart() -> None:
    assert isinstance(form_of("None"), Nothing)
    assert isinstance(form_of("..."), Dots)
