"""Where a model keeps its decoder layers, and what one of them hands back."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterable
from typing import Any

from vllm_compat.analysis.misread import of_layer
from vllm_compat.errors import GuardError

_OTHER_TOWERS = ("vision", "visual", "audio", "mtp", "draft")
"""What the parts of multimodal and speculative models that are no text decoder are called."""


def decoder(model: Any, count: int) -> tuple[str, Any]:
    """Return the dotted name of the text model's decoder layers, and the list that holds them.

    Found by looking, not by the model's name: the one ``ModuleList`` of exactly ``count`` entries (the
    configuration's ``num_hidden_layers``) that does not lie inside such a list itself. Where there are
    several, those of vision and audio towers and those outside the language model are left out, then
    those that are not called ``layers``. vLLM 0.15 keeps Kimi-K2.5's at ``language_model.layers``, 0.16
    and later at ``language_model.model.layers``, Falcon's are at ``transformer.h``: all are found.

    Raises:
        GuardError: There is no such list, or more than one is left.
    """
    from torch import nn

    found: dict[str, Any] = {}
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer in found)
        if isinstance(module, nn.ModuleList) and len(module) == count and not inside:
            found[name] = module
    for narrower in (_of_no_other_tower, _of_the_language_model, _called_layers):
        if len(found) > 1:
            found = {name: found[name] for name in found if narrower(name.split("."))} or found
    if len(found) != 1:
        raise GuardError(
            f"Cannot tell the decoder layers of {type(model).__name__}: looked for one list of"
            f" {count} layers, found {list(found) or 'none'}."
        )
    return next(iter(found.items()))


def _of_no_other_tower(parts: list[str]) -> bool:
    return not any(part.startswith(_OTHER_TOWERS) for part in parts)


def _of_the_language_model(parts: list[str]) -> bool:
    return "language_model" in parts


def _called_layers(parts: list[str]) -> bool:
    return parts[-1] == "layers"


def refuse_misread(model: Any, ranks: int, vllm: str = "") -> None:
    """Refuse a model with layers that are known to be read wrongly (`vllm_compat.analysis.misread`).

    ``ranks`` is the tensor parallel size, ``vllm`` the release, for the message.

    Raises:
        GuardError: Names the layer's class and file, why, and what to do.
    """
    for module in model.modules():
        if sentence := of_layer(module, ranks, vllm):
            raise GuardError(sentence)


def stream_reader(layer: Any, name: str) -> Callable[[Any], Any]:
    """Return a function from what a layer returned to the residual stream after it.

    The stream is ``[tokens, hidden]``, a new tensor that later layers do not write to. A layer that
    returns one tensor, alone or in a tuple, returns the stream. Of those that return
    ``(hidden_states, residual)`` most leave the sum to the next layer, which reads ``residual``; others
    (Command-R, StableLM, EXAONE-4 in vLLM) have added it already, and their next layer assigns
    ``residual`` anew without reading it. Which of the two it is, is told from the source of the layer's
    ``forward`` (`leaves_the_sum`).

    Of a longer tuple the first two are the pair. With None as the second nothing may stand behind it:
    Kimi-Linear hands on its residual as the third there.

    Raises:
        GuardError: By the function returned: the output is neither, or the source does not tell.
    """
    import torch

    sums = leaves_the_sum(type(layer))

    def read(output: Any) -> Any:
        return _by_token(_read(output))

    def _read(output: Any) -> Any:
        if isinstance(output, tuple) and len(output) == 1:
            (output,) = output
        if isinstance(output, torch.Tensor):
            return output.clone()
        if isinstance(output, tuple) and (len(output) == 2 or (len(output) > 2 and sums)):
            hidden, residual, *more = output
            if isinstance(hidden, torch.Tensor) and residual is None:
                if any(element is not None for element in more):
                    raise GuardError(
                        f"Decoder layer {name}, {where(layer)}, returned None as its residual and"
                        " something behind it: whether that belongs to the residual stream cannot be"
                        " told; use a vLLM release whose layer returns a pair, or wait for a"
                        " vllm_compat that reads this layer."
                    )
                return hidden.clone()
            if isinstance(hidden, torch.Tensor) and isinstance(residual, torch.Tensor):
                if sums and hidden.shape != residual.shape:
                    raise GuardError(
                        f"Decoder layer {name}, {where(layer)}, returned tensors of the shapes"
                        f" {list(hidden.shape)} and {list(residual.shape)}, which are no hidden states"
                        " and residual: its residual stream cannot be told."
                    )
                if sums is None:
                    raise GuardError(
                        f"Decoder layer {name}, {where(layer)}, returned a pair of tensors, and"
                        " the source of its forward does not tell whether their sum or the first is the"
                        " residual stream."
                    )
                return hidden + residual if sums else hidden.clone()
        raise GuardError(
            f"Decoder layer {name}, {where(layer)}, returned {type(output).__name__}, which is neither"
            " one tensor nor a pair of hidden states and residual: its residual stream cannot be told."
        )

    return read


def where(layer: Any) -> str:
    """Return a layer's class with file and line, for messages."""
    cls = type(layer)
    try:
        return f"{cls.__name__} ({inspect.getsourcefile(cls)}:{inspect.getsourcelines(cls)[1]})"
    except (OSError, TypeError):
        return f"{cls.__name__} ({cls.__module__})"


def _by_token(stream: Any) -> Any:
    """Return a stream as ``[tokens, hidden]``: layers of vLLM's Transformers backend say ``[1, …]``."""
    return stream.squeeze(0) if stream.dim() == 3 and stream.shape[0] == 1 else stream


def leaves_the_sum(layer: type) -> bool | None:
    """Whether the stream after a layer is the sum of the pair that its ``forward`` returns.

    True where ``forward`` reads, on every way through it, the parameter that comes back as the pair's
    second element before it assigns it: what one layer returns there, the next one adds. False where
    it assigns the name first, or has no such parameter: what is returned there, nobody reads, so the
    first element is complete. None where the source is not to be had or does not tell. Elements behind
    the pair (HunYuan hands on keys and values there) do not matter.
    """
    function, names = _forward(layer)
    if function is None or len(names) != 1:
        return None
    name = next(iter(names))
    if not name.isidentifier():
        return None
    arguments = function.args
    parameters = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    if name not in [parameter.arg for parameter in parameters]:
        return False
    first = _first_uses(function.body, name)
    if first <= {"store", "none"}:
        return False
    return True if first <= {"load", "none"} else None


def is_ambiguous(layer: type) -> bool:
    """Whether a layer's ``forward`` returns a pair whose meaning its source does not tell."""
    return bool(_forward(layer)[1]) and leaves_the_sum(layer) is None


def _forward(layer: type) -> tuple[ast.FunctionDef | None, set[str]]:
    """Return a class's ``forward`` and the names that it returns as the second of a pair.

    A ``forward`` that only hands on to its base class is followed there.
    """
    for cls in layer.__mro__:
        if "forward" not in vars(cls):
            continue
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(vars(cls)["forward"])))
        except (OSError, TypeError, SyntaxError):
            return None, set()
        function = tree.body[0]
        if not isinstance(function, ast.FunctionDef):
            return None, set()
        returned = [node.value for node in ast.walk(function) if isinstance(node, ast.Return)]
        if all(map(_hands_on, returned)):
            continue
        pairs = [value for value in returned if isinstance(value, ast.Tuple) and len(value.elts) > 1]
        seconds = [pair.elts[1] for pair in pairs if ast.unparse(pair.elts[1]) != "None"]
        return function, {ast.unparse(second) for second in seconds}
    return None, set()


def _hands_on(value: ast.expr | None) -> bool:
    return value is not None and ast.unparse(value).startswith("super().forward(")


def _first_uses(statements: Iterable[ast.stmt], name: str) -> set[str]:
    """Return how a name may be used first: ``load``, ``store``, or ``none`` where it may not be."""
    found: set[str] = set()
    for statement in statements:
        here = _uses(statement, name)
        found |= here - {"none"}
        if "none" not in here:
            return found
    return found | {"none"}


def _uses(node: ast.AST, name: str) -> set[str]:
    """Return how one statement or expression may use a name first, in the order of evaluation."""
    if isinstance(node, ast.Name):
        if node.id != name:
            return {"none"}
        return {"load" if isinstance(node.ctx, ast.Load) else "store"}
    if isinstance(node, (ast.If, ast.While, ast.IfExp)):
        test = _uses(node.test, name)
        if "none" not in test:
            return test
        body = node.body if isinstance(node.body, list) else [node.body]
        other = node.orelse if isinstance(node.orelse, list) else [node.orelse]
        return (test - {"none"}) | _in_order(body, name) | _in_order(other, name)
    if isinstance(node, ast.Assign):
        return _in_order([node.value, *node.targets], name)
    if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
        return {"load"} if node.target.id == name else _uses(node.value, name)
    return _in_order(list(ast.iter_child_nodes(node)), name)


def _in_order(nodes: Iterable[ast.AST], name: str) -> set[str]:
    return _first_uses(nodes, name)  # type: ignore[arg-type]
