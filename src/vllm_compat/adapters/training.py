"""The downstream's trainer: a nested verifier, remote code, and the layers that a draft must name."""

from __future__ import annotations

import inspect
import json
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from vllm_compat.adapters.base import Adapter, Case, Need
from vllm_compat.analysis.facts import trainer_of
from vllm_compat.errors import UsageError
from vllm_compat.runtime.context import current_build, is_making_draft, making_draft

if TYPE_CHECKING:
    from vllm_compat.analysis.plan import Plan
    from vllm_compat.runtime.patching import Transaction

logger = logging.getLogger("vllm_compat")

_NORM = "model.norm.weight"
_KEY = "_vllm_compat_verifier_norm"
_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
_SHIFTED = frozenset({"gemma", "gemma2", "gemma3", "recurrent_gemma", "vaultgemma", "qwen3_next"})
_LAYER_NORM = ("layer_norm_eps", "layer_norm_epsilon", "layernorm_epsilon", "norm_epsilon", "norm_eps")
_OTHER_NORM = (
    "{} has no last norm of the kind rms_norm (model.norm.weight and rms_norm_eps), and speculators 0.3"
    " and 0.4 know no other: a draft would be trained towards what are not this model's logits. Hidden"
    " states can be extracted; train on them with another trainer."
)


class _TrainerAdapter(Adapter):
    """An adapter about how the downstream makes a draft, needed wherever its source does that."""

    decided_by = ("trainer",)
    processes = frozenset({"driver", "worker"})  # ranks that torchrun starts take the plan over
    gap: ClassVar[str] = ""
    """Which of the trainer's ``gaps`` it fills; empty: it is needed with any trainer."""
    reason: ClassVar[str]
    """Why a plan has the adapter, one sentence; ``{site}`` is where the verifier is read."""

    def need(self, case: Case) -> Need | None:
        trainer = trainer_of(case.environment)
        if trainer is None or (self.gap and self.gap not in trainer.gaps):
            return None
        names = {"draft": trainer.draft, "setup": trainer.setup, "draft_module": trainer.module}
        told = tuple(target.format(**names) for target in self.targets if "{" in target)
        return Need(self.reason.format(site=trainer.site), targets=told)


class VerifierConfig(_TrainerAdapter):
    """Read the decoder's part of a nested configuration, without running remote code."""

    name = "training.verifier_config"
    order = 1010
    targets = (
        "transformers.models.auto.configuration_auto:AutoConfig.from_pretrained",
        "{draft}.{setup}",
    )
    vllm = ">=0.11.0"
    downstream = "<0.5"
    changed = (
        "Nothing in vLLM: Kimi-K2.5's configuration is remote code and nests the decoder's under"
        " text_config; transformers 5 knows the model, transformers 4 does not."
    )
    reason = "{site} reads the verifier's configuration without trust_remote_code"
    relies = (
        "Reads the verifier's configuration without trust_remote_code when a draft is made, and so does"
        " its training script; 0.3.0 looks for hidden_size at its top."
    )
    does = (
        "Gives the text_config of config.json as a plain configuration where transformers would ask for"
        " trust; no remote code runs. Calls that name trust_remote_code, and those of a generator, are"
        " left alone. Where the draft's class does not look for text_config, it is given that."
    )
    shown_in = ("tests/e2e/test_pipeline.py",)
    until = "the downstream reads nested configurations and asks for trust."
    shown_by = (
        "kimi_k25, speculators 0.3.0 and 0.4.0.1, vLLM 0.16.0: the trainer stops, the repository"
        " contains custom code"
    )

    def install(self, transaction: Transaction, plan: Plan) -> None:
        trainer = trainer_of(plan.environment)
        assert trainer is not None

        def making(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            with making_draft():
                return wrapped(*args, **kwargs)

        def read(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if current_build() is not None or "trust_remote_code" in kwargs:
                return wrapped(*args, **kwargs)
            path = args[0] if args else kwargs.get("pretrained_model_name_or_path")
            text = _text_config_of_remote_code(str(path))
            if text is not None:
                from transformers import PretrainedConfig

                return PretrainedConfig.from_dict(text)
            config = wrapped(*args, **kwargs)
            if is_making_draft() and "text_config" in trainer.gaps:
                return getattr(config, "text_config", config)
            return config

        config, *drafts = self.targets_of(plan)
        transaction.wrap(config, read)
        for target in drafts:
            transaction.wrap(target, making)


def _text_config_of_remote_code(path: str) -> dict[str, Any] | None:
    """Return ``text_config`` of a model whose configuration is remote code to this transformers."""
    from vllm_compat.analysis.layer_ids import read_config

    try:
        config = read_config(Path(path) if Path(path).exists() else path)
    except UsageError:
        return None  # transformers says it, or downloads the model
    text = config.get("text_config")
    if not isinstance(text, dict) or "AutoConfig" not in (config.get("auto_map") or {}):
        return None
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    known: bool = config.get("model_type") in CONFIG_MAPPING
    return None if known else json.loads(json.dumps(text))


class VerifierNorm(_TrainerAdapter):
    """Put the verifier's last norm between its last hidden state and its head."""

    name = "training.verifier_norm"
    order = 1020
    targets = ("{draft}.forward",)
    vllm = ">=0.11.0"
    downstream = "<0.4"
    changed = "Nothing: a fault of the downstream on every vLLM; 0.4.0 has the norm (verifier_norm)."
    gap = "norm"
    reason = "the draft of {site} has no norm in front of the verifier's head"
    relies = (
        "Takes the last entry of hidden_states, which is captured before the verifier's norm, to the"
        " verifier's head as it is: what the draft is trained towards are not the verifier's logits."
    )
    does = "Norms the last hidden states by the checkpoint's own weights before the draft sees them."
    shown_in = ("tests/e2e/test_pipeline.py",)
    until = "speculators 0.3.0 is out of use."
    shown_by = (
        "kimi_k25, speculators 0.3.0, vLLM 0.16.0: the first loss is another than with speculators"
        " 0.4.0.1, on the same data and seed"
    )

    def install(self, transaction: Transaction, plan: Plan) -> None:
        def norm(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            last = kwargs.get("verifier_last_hidden_states")
            if last is not None:
                # No parameter and no buffer: it must not be trained or saved.
                if _KEY not in instance.__dict__:
                    verifier = instance.config.speculators_config.verifier.name_or_path
                    instance.__dict__[_KEY] = _norm_of(str(verifier))
                weight, epsilon = instance.__dict__[_KEY]
                import torch

                normed = torch.nn.functional.rms_norm(
                    last.float(), (last.shape[-1],), weight.float().to(last.device), epsilon
                )
                kwargs["verifier_last_hidden_states"] = normed.to(last.dtype)
            return wrapped(*args, **kwargs)

        for target in self.targets_of(plan):
            transaction.wrap(target, norm)


def _norm_of(model_path: str) -> tuple[Any, float]:
    """Return the weight and the epsilon of the verifier's last norm.

    Raises:
        IncompatibleError: The checkpoint has no such norm.
    """
    from speculators.utils.loading import load_model_layers
    from transformers import AutoConfig

    from vllm_compat.errors import IncompatibleError

    found = load_by_ending(load_model_layers, [_NORM], model_path)
    with making_draft():
        config = AutoConfig.from_pretrained(model_path)
    config = getattr(config, "text_config", config)
    epsilon = getattr(config, "rms_norm_eps", None)
    if _NORM not in found or epsilon is None:
        raise IncompatibleError(_OTHER_NORM.format(model_path))
    return found[_NORM] + 1 if head_of(config).shifted else found[_NORM], float(epsilon)


class VerifierHead(_TrainerAdapter):
    """Make the targets the verifier's logits where its head is more than a matrix."""

    name = "training.verifier_head"
    order = 1015
    targets = ("{draft}.__init__",)
    vllm = ">=0.11.0"
    downstream = "<0.5"
    changed = (
        "Nothing in vLLM: Gemma's norm multiplies by 1 + weight, Granite divides its logits, Gemma-2"
        " caps them; the loss is taken against logits without that, and says nothing."
    )
    reason = "the draft of {site} takes the verifier's head for a norm and a matrix"
    relies = (
        "Makes its targets by rms_norm(x) * weight (0.3.0 without that) and a matrix, for any verifier."
    )
    does = (
        "Once the verifier's norm and head are loaded, adds one to the norm's weight where the family"
        " has it, and scales and caps what the head gives, by the verifier's configuration. Where the"
        " verifier's last norm is no rms_norm, it refuses."
    )
    shown_in = ("tests/e2e/test_verifier_head.py",)
    until = "speculators 0.4 is out of use."
    shown_by = (
        "gemma2 and granite, speculators 0.3.0 and 0.4.0.1, vLLM 0.16.0: the targets are not the logits"
        " that transformers computes"
    )

    def install(self, transaction: Transaction, plan: Plan) -> None:
        def make(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            verifier = _verifier_of(args[0] if args else kwargs.get("config"))
            _refuse_other_norms(verifier)
            result = wrapped(*args, **kwargs)
            head = head_of(_text_config(verifier))
            norm = getattr(instance, "verifier_norm", None)
            if head.shifted and norm is not None:
                norm.weight.data += 1
            if head.scale != 1 or head.cap:
                instance.verifier_lm_head.register_forward_hook(lambda module, given, out: head(out))
            return result

        for target in self.targets_of(plan):
            transaction.wrap(target, make)


@dataclass(frozen=True)
class Head:
    """What a verifier's logits are beyond rms_norm and a matrix.

    ``shifted``: the norm multiplies by 1 + weight. Logits are multiplied by ``scale``, then bounded by
    ``cap`` (``cap * tanh(logits / cap)``; 0: not at all).
    """

    shifted: bool = False
    scale: float = 1.0
    cap: float = 0.0

    def __call__(self, logits: Any) -> Any:
        """Return the verifier's logits from what its matrix gives."""
        logits = logits * self.scale
        return (logits / self.cap).tanh() * self.cap if self.cap else logits


def head_of(config: Any) -> Head:
    """Return what a verifier's head is, by its configuration (the decoder's part; mapping or object).

    As transformers 4.57 and 5 compute it (``models/<model_type>/modeling_*.py``): gemma, gemma2, gemma3,
    recurrent_gemma, vaultgemma and qwen3_next norm by 1 + weight; ``logits_scaling`` of granite divides,
    ``logit_scale`` of cohere and ``lm_head_multiplier`` of falcon_h1 multiply;
    ``final_logit_softcapping`` (``logits_soft_cap`` in recurrent_gemma) caps.
    """

    def of(key: str, otherwise: float) -> float:
        value = config.get(key) if isinstance(config, Mapping) else getattr(config, key, None)
        return float(value) if isinstance(value, int | float) else otherwise

    kind = config.get("model_type") if isinstance(config, Mapping) else getattr(config, "model_type", "")
    return Head(
        shifted=str(kind).removesuffix("_text") in _SHIFTED,
        scale=of("logit_scale", 1) * of("lm_head_multiplier", 1) / of("logits_scaling", 1),
        cap=of("final_logit_softcapping", 0) or of("logits_soft_cap", 0),
    )


def _verifier_of(config: Any) -> str:
    """Return the verifier's folder or name, from a draft's configuration."""
    verifier = getattr(getattr(config, "speculators_config", None), "verifier", config)
    return str(getattr(verifier, "name_or_path", ""))


def _text_config(path: str) -> Mapping[str, Any]:
    """Return the decoder's part of a verifier's ``config.json``; empty where it is not here."""
    from vllm_compat.analysis.layer_ids import read_config

    try:
        config = read_config(path)
    except UsageError:
        return {}
    text = config.get("text_config")
    return text if isinstance(text, dict) else config


def _refuse_other_norms(path: str) -> None:
    """Refuse a verifier that has LayerNorm: neither release knows another norm than rms_norm.

    Raises:
        IncompatibleError: Its configuration has an epsilon of a LayerNorm, and none of an rms_norm.
    """
    from vllm_compat.errors import IncompatibleError

    config = _text_config(path)
    if "rms_norm_eps" not in config and any(key in config for key in _LAYER_NORM):
        raise IncompatibleError(_OTHER_NORM.format(path))


class VerifierPrefix(_TrainerAdapter):
    """Find the verifier's embedding and head whatever stands in front of their names."""

    name = "training.verifier_prefix"
    order = 1030
    targets = ("{draft_module}:load_model_layers",)
    vllm = ">=0.11.0"
    downstream = "<0.4"
    changed = "Nothing in vLLM: Kimi-K2.5 names its weights language_model.model.embed_tokens.weight."
    gap = "prefix"
    reason = "the draft of {site} asks for the verifier's weights by their whole names"
    relies = "Asks for model.embed_tokens.weight and lm_head.weight by their whole names."
    does = "Where the checkpoint has no such name and just one that ends in it, that one is read."
    shown_in = ("tests/e2e/test_pipeline.py",)
    until = "speculators 0.3.0 is out of use; 0.4.0 looks for endings itself."
    shown_by = (
        "kimi_k25, speculators 0.3.0, vLLM 0.16.0: the trainer stops with KeyError:"
        " 'model.embed_tokens.weight'"
    )

    def install(self, transaction: Transaction, plan: Plan) -> None:
        def load(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return load_by_ending(wrapped, *args, **kwargs)

        for target in self.targets_of(plan):
            transaction.wrap(target, load)


def load_by_ending(load: Any, layer_names: list[str], model_path: str) -> Any:
    """Call the downstream's ``load_model_layers`` with the names that the checkpoint has."""
    there = _weight_names(model_path)
    names = {}
    for name in layer_names:
        ending = [key for key in there if key.endswith(f".{name}")]
        names[name] = ending[0] if name not in there and len(ending) == 1 else name
    found = load(list(names.values()), model_path)
    return {name: found[key] for name, key in names.items() if key in found}


def _weight_names(model_path: str) -> set[str]:
    """Return the names of a checkpoint's tensors, empty where they cannot be told without loading."""
    from safetensors import safe_open
    from transformers.utils import cached_file

    optional = {
        "_raise_exceptions_for_missing_entries": False,
        "_raise_exceptions_for_connection_errors": False,
    }
    index = cached_file(model_path, "model.safetensors.index.json", **optional)
    if index is not None:
        return set(json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"])
    single = cached_file(model_path, "model.safetensors", **optional)
    if single is None:
        return set()
    with safe_open(single, framework="pt") as file:
        return set(file.keys())


class LayerIds(_TrainerAdapter):
    """Let the draft's configuration name the layers that it was trained on."""

    name = "training.layer_ids"
    order = 1005
    targets = ("speculators.train.data:Eagle3SampleFileDataset.__init__", "{draft}.save_pretrained")
    vllm = ">=0.11.0"
    downstream = "<0.5"
    changed = (
        "Nothing: a draft that names no layers is served with the model's own choice, (2, n // 2, n - 3)"
        " in vLLM's numbering, which counts from the embedding (vllm#50170): each is one layer below"
        " what stock extracts."
    )
    pull_requests = ("vllm#50170",)
    reason = "the draft of {site} is saved without the layers that it was trained on"
    relies = (
        "Saves the draft without eagle_aux_hidden_state_layer_ids: its configuration is made without"
        " them, and data_config.json, which tells them, is not read."
    )
    does = (
        "While a draft that names none is saved, its configuration names the auxiliary layers of the"
        " data_config.json beside the files that it was trained on, in vLLM's numbering. Where these"
        " files tell no layers, or several, the draft is saved as ever, and a warning says so."
    )
    shown_in = ("tests/e2e/test_pipeline.py",)
    until = "speculators 0.4 is out of use; 0.5.0 writes them itself."
    shown_by = (
        "kimi_k25, speculators 0.3.0, vLLM 0.16.0: the saved config.json names no layers, and vLLM"
        " serves the draft with states of other layers (the demo's loss is higher with those)"
    )

    def install(self, transaction: Transaction, plan: Plan) -> None:
        opened: set[Path] = set()

        def open_files(
            wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> Any:
            opened.update(_folders(inspect.signature(wrapped).bind(*args, **kwargs).arguments))
            return wrapped(*args, **kwargs)

        def save(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            config = instance.config
            if getattr(config, _LAYER_IDS, None):
                return wrapped(*args, **kwargs)
            try:
                ids = extracted_layer_ids(opened)
            except UsageError as error:
                logger.warning(
                    "The draft is saved without %s: %s vLLM then serves it with layers of its own"
                    " choice: write into its config.json what `vllm-compat layers` prints.",
                    _LAYER_IDS,
                    error,
                )
                return wrapped(*args, **kwargs)
            setattr(config, _LAYER_IDS, [k + 1 for k in ids[:-1]])
            try:
                return wrapped(*args, **kwargs)
            finally:
                setattr(config, _LAYER_IDS, None)

        dataset, *drafts = self.targets_of(plan)
        transaction.wrap(dataset, open_files)
        for target in drafts:
            transaction.wrap(target, save)


def _folders(arguments: Mapping[str, Any]) -> set[Path]:
    """Return the folders of a dataset's files: what it was given, a folder or a list of files."""
    folder, files = arguments.get("datapath"), arguments.get("file_list") or ()
    return {Path(file).absolute().parent for file in files} | (
        {Path(folder).absolute()} if folder else set()
    )


def extracted_layer_ids(folders: Iterable[Path]) -> list[int]:
    """Return the layer ids of extracted files in these folders, as their data_config.json has them.

    In the in-process numbering; the last is the verifier's last.

    Raises:
        UsageError: No folder tells them, or they cannot be told.
    """
    found: dict[tuple[int, ...], Path] = {}
    for folder in sorted(folders):
        file = folder / "data_config.json"
        try:
            ids = json.loads(file.read_text(encoding="utf-8"))["hidden_states"]["layer_ids"]
        except (OSError, ValueError, KeyError, TypeError):
            raise UsageError(
                f"{file}, which would name the layers of the files there, cannot be read."
            ) from None
        if not isinstance(ids, list) or len(ids) < 2 or not all(type(k) is int for k in ids):
            raise UsageError(f"{file} has layer_ids that are no list of two numbers or more: {ids!r}.")
        if ids != sorted(ids):
            raise UsageError(
                f"{file} names the layers {ids}: the files have them in that order where vllm_compat"
                " was in force, and by rising number where stock ran alone."
            )
        found[tuple(ids)] = file
    if len(found) != 1:
        said = " and ".join(f"{file} says {list(ids)}" for ids, file in found.items())
        raise UsageError(f"{said}." if said else "No file that it was trained on is known.")
    return list(next(iter(found)))
