"""Hidden states as transformers computes them, and how far other rows are from them.

Layer id *k* means the residual stream after decoder layer *k*, counted from 0: what stock
speculators captures for id *k*, and what vLLM's auxiliary hidden states call *k + 1*.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_compat.checks.canary import difference
from vllm_compat.errors import UsageError
from vllm_compat.trial.families import minicpm_as_granite
from vllm_compat.trial.models import dequantise_int4

if TYPE_CHECKING:
    from torch import Tensor

_KIMI_PREFIX = "language_model."


@dataclass(frozen=True)
class Reference:
    """What the reference model computes for some prompts, on the CPU.

    ``hidden_states[prompt][position in layer_ids]`` is a tensor ``[tokens, hidden_size]``;
    ``logits[prompt]`` is one ``[tokens, vocabulary]``.
    """

    hidden_states: list[list[Tensor]]
    logits: list[Tensor]


@dataclass(frozen=True)
class Deviation:
    """How far rows are from a reference: per token ``|row - reference| / |reference|`` (L2 norms).

    ``rows`` counts the rows compared, over all prompts and layers; ``worst_prompt``,
    ``worst_layer`` and ``worst_token`` are the indices of the worst row.
    """

    worst: float
    median: float
    quantile_99: float
    rows: int
    worst_prompt: int
    worst_layer: int
    worst_token: int

    def __str__(self) -> str:
        """Return one line for people."""
        return (
            f"worst {self.worst:.2e} (prompt {self.worst_prompt}, layer entry {self.worst_layer}, "
            f"token {self.worst_token}), 99 % {self.quantile_99:.2e}, "
            f"median {self.median:.2e}, {self.rows} rows"
        )


def reference_hidden_states(
    model_dir: str | Path,
    token_ids: Sequence[Sequence[int]],
    layer_ids: Sequence[int],
    dtype: str = "float32",
) -> list[list[Tensor]]:
    """Return for each prompt, for each layer id, a tensor ``[tokens, hidden_size]``.

    Each prompt runs alone, without a cache and with eager attention, through transformers' own
    class. Of Kimi-K2.5 and of vision models the text path is used. Needs torch and transformers.
    """
    return reference_run(model_dir, token_ids, layer_ids, dtype).hidden_states


def reference_run(
    model_dir: str | Path,
    token_ids: Sequence[Sequence[int]],
    layer_ids: Sequence[int],
    dtype: str = "float32",
) -> Reference:
    """Return hidden states as `reference_hidden_states` does, and the logits."""
    import torch
    import transformers

    with _text_model(Path(model_dir)) as (folder, config):
        count = config.get("text_config", config)["num_hidden_layers"]
        for layer in layer_ids:
            if not 0 <= layer < count:
                raise UsageError(
                    f"Layer id {layer} does not exist: this model has the layers 0 to {count - 1}."
                )
        # By the model type where the architecture is one that only vLLM and remote code name so.
        model_class = getattr(
            transformers, config["architectures"][0], transformers.AutoModelForCausalLM
        )
        model = model_class.from_pretrained(
            folder, dtype=getattr(torch, dtype), attn_implementation="eager"
        ).eval()

        captured: dict[int, Tensor] = {}

        def keep(layer: int) -> Any:
            # A hook, not output_hidden_states: its last entry has gone through the final norm.
            def hook(_module: object, _inputs: object, output: Any) -> None:
                rows = output[0] if isinstance(output, tuple) else output
                captured[layer] = rows[0].detach().clone()

            return hook

        layers = _decoder_layers(model, count)
        for layer in set(layer_ids):
            layers[layer].register_forward_hook(keep(layer))
        hidden_states: list[list[Tensor]] = []
        logits: list[Tensor] = []
        with torch.inference_mode():
            for prompt in token_ids:
                captured.clear()
                output = model(input_ids=torch.tensor([list(prompt)]), use_cache=False)
                hidden_states.append([captured[layer] for layer in layer_ids])
                logits.append(output.logits[0])
    return Reference(hidden_states, logits)


def _decoder_layers(model: Any, count: int) -> Any:
    """Return the list of a model's decoder layers, found by its length.

    Lists inside a layer (a mixture's experts) and those of a vision tower don't count.
    """
    from torch import nn

    found: dict[str, Any] = {}
    for name, module in model.named_modules():
        if (
            isinstance(module, nn.ModuleList)
            and len(module) == count
            and not {"visual", "vision_tower"} & set(name.split("."))
            and not any(name.startswith(f"{outer}.") for outer in found)
        ):
            found[name] = module
    if len(found) != 1:
        raise UsageError(
            f"Cannot tell the {count} decoder layers of {type(model).__name__}: {sorted(found)}."
        )
    return next(iter(found.values()))


@contextmanager
def _text_model(model_dir: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield a folder that transformers' own class loads, and its configuration.

    That is the model's own folder, except for models that transformers lacks. Of Kimi-K2.5 the text
    model is written into a temporary folder under the names and the model type that
    ``DeepseekV3ForCausalLM`` has, with 4-bit experts as the float32 weights that they stand for;
    MiniCPM is given Granite's configuration.
    """
    config = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
    if config["model_type"] == "minicpm":
        granite = minicpm_as_granite(config)
        with tempfile.TemporaryDirectory(prefix="vllm-compat-reference-") as temporary:
            folder = Path(temporary)
            for file in model_dir.glob("*.safetensors"):
                (folder / file.name).symlink_to(file.absolute())
            (folder / "config.json").write_text(json.dumps(granite), encoding="utf-8")
            yield folder, granite
        return
    if config["model_type"] != "kimi_k25":
        yield model_dir, config
        return

    from safetensors import safe_open
    from safetensors.torch import save_file

    text = {**config["text_config"], "model_type": "deepseek_v3"}
    text.pop("quantization_config", None)
    with tempfile.TemporaryDirectory(prefix="vllm-compat-reference-") as temporary:
        weights = {}
        for file in sorted(model_dir.glob("*.safetensors")):
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 (not a mapping)
                    if name.startswith(_KIMI_PREFIX):
                        weights[name.removeprefix(_KIMI_PREFIX)] = tensors.get_tensor(name)
        for packed in [name for name in weights if name.endswith(".weight_packed")]:
            name = packed.removesuffix("_packed")
            del weights[f"{name}_shape"]
            weights[name] = dequantise_int4(weights.pop(packed), weights.pop(f"{name}_scale"))
        folder = Path(temporary)
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "config.json").write_text(json.dumps(text), encoding="utf-8")
        yield folder, text


def compare(results: Sequence[Any], reference: Sequence[Sequence[Tensor]]) -> Deviation:
    """Return how far results are from the reference, row by row.

    `results` has one entry a prompt: a sequence of tensors ``[tokens, hidden_size]``, one a layer,
    or a mapping that holds it under ``hidden_states``, as speculators' generator returns it. Both
    must have the same prompts, layers and shapes and be finite, else the comparison makes no sense
    and `UsageError` says where.
    """
    import torch

    if len(results) != len(reference):
        raise UsageError(f"There are {len(results)} results for {len(reference)} prompts.")
    errors = []
    places = []
    for prompt, (result, expected) in enumerate(zip(results, reference, strict=True)):
        layers = result["hidden_states"] if isinstance(result, Mapping) else result
        if len(layers) != len(expected):
            raise UsageError(f"Result {prompt} has {len(layers)} layers, the reference {len(expected)}.")
        for layer, (rows, right) in enumerate(zip(layers, expected, strict=True)):
            if tuple(rows.shape) != tuple(right.shape):
                raise UsageError(
                    f"Result {prompt}, layer entry {layer} has the shape {tuple(rows.shape)}, "
                    f"the reference {tuple(right.shape)}."
                )
            errors.append(difference(rows.detach().cpu(), right.detach().cpu()))
            places.append((prompt, layer))
    if not errors:
        raise UsageError("There is nothing to compare: no prompt has a layer.")
    every = torch.cat(errors)
    if not bool(torch.isfinite(every).all()):
        bad = next(
            place for place, error in zip(places, errors, strict=True) if not error.isfinite().all()
        )
        raise UsageError(
            f"Result {bad[0]}, layer entry {bad[1]} is not finite or its reference is zero."
        )
    worst = max(range(len(errors)), key=lambda index: float(errors[index].max()))
    prompt, layer = places[worst]
    return Deviation(
        worst=float(every.max()),
        median=float(every.median()),
        quantile_99=float(torch.quantile(every, 0.99)),
        rows=every.numel(),
        worst_prompt=prompt,
        worst_layer=layer,
        worst_token=int(errors[worst].argmax()),
    )
