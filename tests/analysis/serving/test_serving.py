"""The contract across the process boundary: real clients of released wheels, STAND-INS of vLLM.

The launcher of a release is in no wheel: a STAND-IN of the same shape is read where its text matters.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version
from tests.analysis.serving.stand_ins import LAUNCHER, stand_in_vllm
from tests.downstreams import wheel

from vllm_compat.analysis.drift import Finding, FindingKind
from vllm_compat.analysis.serving.asked import find_launcher, read_clients, read_launcher
from vllm_compat.analysis.serving.comparing import find_across
from vllm_compat.analysis.serving.launchers import launcher_of
from vllm_compat.analysis.serving.model import Ask, AskKind, Offered
from vllm_compat.analysis.serving.offered import read_offered
from vllm_compat.analysis.surface.files import package_at
from vllm_compat.errors import UsageError

CHUNKS = (FindingKind.PARAMETER_REQUIRED, "--no-enable-chunked-prefill", False)
SCALE_OUT = (FindingKind.PARAMETER_REQUIRED, "--enable-scale-out", False)
ANSWER = (FindingKind.RETURN_SHAPE, "token_ids", True)
SIDE = (FindingKind.BEHAVIOUR, "truncation_side", False)
MISSING = (FindingKind.NAME_MISSING, None, True)


def asks_of(version: str) -> tuple[Ask, ...]:
    return (*launcher_of(Version(version)), *read_clients(package_at(wheel(version), "speculators")))


def offered_by(folder: Path, **traits: Any) -> Offered:
    return read_offered(package_at(stand_in_vllm(folder, **traits), "vllm"))


def short(findings: tuple[Finding, ...]) -> list[tuple[FindingKind, str | None, bool]]:
    return [(f.kind, f.name, f.fatal) for f in findings]


@pytest.mark.parametrize(
    ("version", "traits", "found"),
    [
        ("0.5.0", {}, []),
        ("0.9.0", {}, []),
        # A: neither method nor connector.
        ("0.5.0", {"extracts": False}, [MISSING, MISSING]),
        ("0.9.0", {"extracts": False}, [MISSING, MISSING]),
        # F: chunked prefill is refused; the launchers of 0.6 and 0.7 switch it off.
        ("0.5.0", {"refuses_chunks": True}, [CHUNKS]),
        ("0.6.0.2", {"refuses_chunks": True}, []),
        ("0.7.0.2", {"refuses_chunks": True}, []),
        ("0.8.1", {"refuses_chunks": True}, [CHUNKS]),
        # J: a list, where the client reads token_ids.
        ("0.7.0.2", {"answer": "list"}, []),
        ("0.8.1", {"answer": "list"}, [ANSWER]),
        ("0.8.1", {"answer": "list[Generated]"}, [ANSWER]),
        # K: the route is behind a switch.
        ("0.7.0.2", {"scale_out": True}, []),
        ("0.8.1", {"scale_out": True}, [SCALE_OUT]),
        ("0.9.0", {"scale_out": True}, [SCALE_OUT]),
        # L: a field that is swallowed, or refused where extra fields are.
        ("0.8.1", {"side": False}, []),
        ("0.9.0", {"side": False}, [SIDE]),
        (
            "0.9.0",
            {"side": False, "extra": "forbid"},
            [(FindingKind.PARAMETER_REMOVED, "truncation_side", True)],
        ),
    ],
)
def test_what_released_clients_miss(
    tmp_path: Path,
    version: str,
    traits: dict[str, Any],
    found: list[tuple[FindingKind, str | None, bool]],
) -> None:
    findings = find_across(asks_of(version), offered_by(tmp_path, **traits))
    assert short(findings) == found
    for finding in findings:
        assert finding.sites[0].line > 0
        assert finding.detail.endswith(".")
        assert finding.sites[0].file.endswith(".py")


def test_flags_that_are_given_settle_what_needs_them(tmp_path: Path) -> None:
    offered = offered_by(tmp_path, refuses_chunks=True, scale_out=True)
    asks = asks_of("0.9.0")
    assert short(find_across(asks, offered)) == [CHUNKS, SCALE_OUT]
    assert short(find_across(asks, offered, ["--enable-scale-out"])) == [CHUNKS]
    assert find_across(asks, offered, ["--enable-scale-out", "--no-enable-chunked-prefill"]) == ()


def test_a_stand_in_launcher_is_read_as_the_table_of_0_5_says() -> None:
    read = {(a.kind, a.name, a.owner) for a in read_launcher(LAUNCHER)}
    assert read == {(a.kind, a.name, a.owner) for a in launcher_of(Version("0.5.0"))}
    assert all(ask.site.file == "scripts/launch_vllm.py" for ask in read_launcher(LAUNCHER))


def test_a_connector_from_a_module_of_its_own_need_not_be_registered() -> None:
    own = LAUNCHER.replace('"kv_role"', '"kv_connector_module_path": "mine",\n        "kv_role"')
    assert AskKind.CONNECTOR not in {ask.kind for ask in read_launcher(own)}
    assert "kv_connector_module_path" in {ask.name for ask in read_launcher(own)}


def test_flags_and_keys_that_are_not_there_are_found(tmp_path: Path) -> None:
    text = LAUNCHER.replace('"--speculative_config"', '"--turbo", "--speculative_config"')
    text = text.replace('"kv_role": "kv_producer"', '"kv_rank": 0')
    findings = find_across(read_launcher(text), offered_by(tmp_path))
    assert [(f.kind, f.name, f.fatal) for f in findings] == [
        (FindingKind.PARAMETER_REMOVED, "--turbo", True),
        (FindingKind.PARAMETER_REMOVED, "kv_rank", True),
    ]


@pytest.mark.parametrize("text", ["def broken(:", "print('no server')"])
def test_what_is_no_launcher_is_said_in_a_sentence(text: str) -> None:
    with pytest.raises(UsageError, match=r"launch_vllm.py .*\.$"):
        read_launcher(text)


def test_a_checkouts_launcher_is_found_and_a_wheels_is_not(tmp_path: Path) -> None:
    package = tmp_path / "src" / "speculators"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "launch_vllm.py").write_text(LAUNCHER)
    found = find_launcher(package_at(tmp_path, "speculators"))
    assert found is not None
    assert found[1].decode() == LAUNCHER
    assert find_launcher(package_at(wheel("0.9.0"), "speculators")) is None
