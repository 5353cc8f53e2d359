"""Where a record holds only names, ``check`` says so: neither "fits", nor a date that nobody knows."""

from __future__ import annotations

from pathlib import Path

import pytest
from lab.record import record_releases
from tests.analysis.surface import packages
from tests.downstreams import VERSIONS, contract

from vllm_compat.analysis.drift import untold
from vllm_compat.analysis.surface.recorded import RecordedSurface, recorded_versions
from vllm_compat.commands.check import check, diff
from vllm_compat.commands.report.difference import render_difference
from vllm_compat.commands.report.model import Pair, Verdict

SERVER = "from vllm.entrypoints.openai.api_server import init_app_state\n"
USES = {
    "a call": f"{SERVER}async def serve(a, b, c, d):\n    await init_app_state(a, b, c, d)\n",
    "a module": "import vllm.entrypoints.openai.no_such_module_at_all\n",
    "a name": "from vllm.entrypoints.openai.api_server import there_is_no_such_name\n",
}
FITS = "from vllm.v1.request import Request\ndef f():\n    return Request\n"


def judged(folder: Path, source: str, vllm: str | Path) -> Pair:
    package = folder / "pkg"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(source)
    return check([package], [str(vllm)]).pairs[0]


@pytest.mark.parametrize("use", ["a call", "a module", "a name"])
def test_a_site_of_which_only_the_name_is_recorded_is_unknown(tmp_path: Path, use: str) -> None:
    pair = judged(tmp_path, USES[use], "0.12.0")
    assert pair.verdict is Verdict.UNKNOWN
    assert "of which the record can't tell" in pair.reason


def test_a_source_tree_that_is_asked_instead_tells(tmp_path: Path) -> None:
    pair = judged(tmp_path, USES["a call"], "0.12.0")
    assert "Ask an installed vLLM, a wheel or a source tree" in pair.reason
    body = "async def init_app_state(a, b, c, d): ...\n"
    files = {"__init__.py": "", "entrypoints/openai/api_server.py": body}
    tree = packages.write(tmp_path / "vllm-source", files, "0.12.0+cpu")
    assert "can't tell" not in judged(tmp_path / "again", USES["a call"], tree).reason


def test_a_name_that_is_there_is_known(tmp_path: Path) -> None:
    assert judged(tmp_path, SERVER, "0.16.0").verdict is Verdict.USABLE
    assert judged(tmp_path / "other", FITS, "0.16.0").verdict is Verdict.USABLE


def test_no_date_where_older_records_hold_names_only(tmp_path: Path) -> None:
    body = "async def init_app_state(client, state, args): ...\n"
    files = {"__init__.py": "", "entrypoints/openai/api_server.py": body}
    vllm = packages.write(tmp_path / "vllm-source", files, "0.16.0+cpu")
    (finding,) = judged(tmp_path, USES["a call"], vllm).findings
    assert (finding.dating.since, finding.dating.fitted_last) == (None, None)


def test_diff_does_not_say_that_nothing_changed_where_it_can_not_tell(tmp_path: Path) -> None:
    package = tmp_path / "pkg"
    package.mkdir()
    (package / "__init__.py").write_text(USES["a call"])
    found = diff("0.12.0", "0.16.0", [package])
    assert not found.changes
    assert found.unknown == ("vllm.entrypoints.openai.api_server.init_app_state",)
    told = render_difference(found, "text")
    assert "none known to have changed; of 1 a record has only the name" in " ".join(told.split())


def test_an_import_into_a_module_recorded_in_full_is_followed(tmp_path: Path) -> None:
    files = {
        "__init__.py": "from vllm.lora.layers import apply\n",
        "lora/layers.py": "def apply(x): ...\n",
        "utils.py": "def g(x): ...\n",
    }
    record_releases([packages.write(tmp_path / "one", files, "1.0.0")], data=tmp_path / "data")
    surface = RecordedSurface("1.0.0", tmp_path / "data")
    assert surface.tells("vllm.utils.g")
    assert surface.tells("vllm.utils.nothing")
    assert surface.tells("vllm.apply", by_name=True)
    assert not surface.tells("vllm.apply")
    assert not surface.tells("vllm.lora.layers.apply.x", by_name=True)


@pytest.mark.parametrize("version", VERSIONS)
def test_all_that_speculators_uses_is_told(version: str) -> None:
    for release in recorded_versions():
        assert untold(contract(version), RecordedSurface(release)) == ()
