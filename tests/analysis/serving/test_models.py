"""Which states a model class offers: STAND-INS of vLLM's model files, one for each shape seen."""

from __future__ import annotations

from pathlib import Path

import pytest

from vllm_compat.analysis.serving.models import ModelOffer, read_model
from vllm_compat.analysis.serving.modules import Modules
from vllm_compat.analysis.surface.files import package_at

BEFORE = """
        for idx, layer in enumerate(self.layers):
            if idx in self.aux_hidden_state_layers:
                aux.append(hidden + residual)
            hidden, residual = layer(hidden, residual)
"""
BEHIND = (
    BEFORE
    + """
        if self.end_layer in self.aux_hidden_state_layers:
            aux.append(hidden + residual)
"""
)
WITHIN = """
        self._maybe_add_hidden_state(aux, 0, hidden, residual)
        for idx, layer in enumerate(self.layers):
            hidden, residual = layer(hidden, residual)
            self._maybe_add_hidden_state(aux, idx + 1, hidden, residual)
"""
BEGUN = """
        for idx, layer in enumerate(self.layers):
            self._maybe_add_hidden_state(aux, idx, hidden, residual)
            hidden, residual = layer(hidden, residual)
"""
NONE = """
        for layer in self.layers:
            hidden, residual = layer(hidden, residual)
"""
MODEL = """
from .interfaces import SupportsEagle3
class TinyModel:
    def forward(self, hidden, residual, aux):
{loop}
class TinyForCausalLM({bases}):
    def __init__(self):
        self.model = TinyModel()
    def forward(self, ids):
        return self.model(ids)
"""
REGISTRY = """
_MODELS = {
    "TinyForCausalLM": ("tiny", "TinyForCausalLM"),
    "ChildForCausalLM": ("child", "ChildForCausalLM"),
    "TwoForCausalLM": ("vllm.models.two", "TwoForCausalLM"),
    "WrapsForConditionalGeneration": ("wraps", "Wraps"),
    "LostForCausalLM": ("lost", "LostForCausalLM"),
}
"""


def modules_of(folder: Path, loop: str = WITHIN, bases: str = "SupportsEagle3") -> Modules:
    """Write STAND-INS of vLLM's registry and of one model in all the places where one can be."""
    texts = {
        "model_executor/models/registry": REGISTRY,
        "model_executor/models/interfaces": "class SupportsEagle3: ...\n",
        "model_executor/models/tiny": MODEL.format(loop=loop, bases=bases),
        "model_executor/models/child": "from .tiny import TinyForCausalLM\n"
        "class ChildForCausalLM(TinyForCausalLM): ...\n",
        "model_executor/models/wraps": "from .interfaces import SupportsEagle3\n"
        "from .utils import init_vllm_registered_model\n"
        "class Wraps(SupportsEagle3):\n    def __init__(self):\n"
        "        self.language_model = init_vllm_registered_model()\n",
        "models/two/__init__": "if current_platform.is_cuda():\n"
        "    from .nvidia.model import Own as TwoForCausalLM\n"
        "else:\n    from vllm.model_executor.models.tiny import TinyForCausalLM as TwoForCausalLM\n",
        "models/two/nvidia/model": MODEL.format(loop=BEFORE, bases="").replace("TinyForCausalLM", "Own"),
    }
    for name, text in texts.items():
        path = folder / "vllm" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for made in [folder / "vllm", *(p for p in (folder / "vllm").rglob("*") if p.is_dir())]:
        (made / "__init__.py").touch()
    return Modules(package_at(folder, "vllm"))


@pytest.mark.parametrize(
    ("loop", "ids", "last"),
    [
        (BEFORE, True, False),
        (BEHIND, True, True),
        (WITHIN, True, True),
        (BEGUN, True, False),
        (NONE, False, False),
    ],
)
@pytest.mark.parametrize("architecture", ["TinyForCausalLM", "ChildForCausalLM"])
def test_ids_and_the_last_layer_are_read_from_the_loop(
    tmp_path: Path, loop: str, ids: bool, last: bool, architecture: str
) -> None:
    offer = read_model(modules_of(tmp_path, loop), architecture)
    assert (offer.known, offer.interface, offer.ids, offer.last) == (True, True, ids, last)
    assert bool(offer.lacks) is not last
    assert offer.sentence.startswith(f"{architecture} offers ")
    own = "tiny" if ids or architecture == "TinyForCausalLM" else "child"
    assert offer.where.startswith(f"vllm/model_executor/models/{own}.py:")


def test_a_class_without_the_interface_is_told_from_one_with_it(tmp_path: Path) -> None:
    assert read_model(modules_of(tmp_path, bases=""), "ChildForCausalLM").interface is False


def test_of_classes_by_platform_cudas_is_read(tmp_path: Path) -> None:
    offer = read_model(modules_of(tmp_path), "TwoForCausalLM")
    assert (offer.interface, offer.ids, offer.last) == (False, True, False)
    assert offer.where.startswith("vllm/models/two/nvidia/model.py:")


def test_a_model_inside_another_is_not_guessed(tmp_path: Path) -> None:
    offer = read_model(modules_of(tmp_path), "WrapsForConditionalGeneration")
    assert (offer.known, offer.interface, offer.ids, offer.last) == (True, True, None, None)
    assert offer.sentence.endswith("whose class decides: nothing can be said of its layers.")


def test_what_has_no_source_is_unknown(tmp_path: Path) -> None:
    modules = modules_of(tmp_path)
    assert read_model(modules, "NeverForCausalLM") == ModelOffer("NeverForCausalLM")
    assert read_model(modules, "LostForCausalLM") == ModelOffer("LostForCausalLM", known=True)
