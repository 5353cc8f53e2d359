"""Converting data between the flows: what needs no torch. Layers, headers, directions, words."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_compat.cli import main
from vllm_compat.commands.convert import (
    ConversionError,
    Flow,
    Head,
    Layers,
    Options,
    Origin,
    Report,
    UnknownError,
    convert,
    render,
)
from vllm_compat.commands.convert.layers import map_layers
from vllm_compat.errors import UsageError

N = 32
HEAD = Head("data_0.pt", 0, 100, 7, 5, 4, 8, "bfloat16", "int64", "int64", 320, None)


def config(*ids: int, model: str | None = None) -> dict[str, Any]:
    return {"hidden_states": {"layer_ids": list(ids)}, "model": {"target_model_path": model}}


def mapped(
    flow: Flow = Flow.IN_PROCESS,
    found: Mapping[str, Any] | None = None,
    *,
    head: Head = HEAD,
    given: tuple[int, ...] | None = None,
    num_layers: int | None = N,
    model: str | None = None,
) -> Layers:
    return map_layers(flow, [head], found or {}, given=given, num_layers=num_layers, model=model)


class TestLayers:
    def test_in_process_ids_are_one_higher_for_the_server(self) -> None:
        layers = mapped(found=config(2, 16, 29, 31))
        assert layers.target_ids == layers.vllm_ids == (3, 17, 30, 32)
        assert layers.order == (0, 1, 2, 3)

    def test_server_ids_are_one_lower_in_process(self) -> None:
        layers = mapped(Flow.SERVER, given=(2, 16, 29, 32))
        assert (layers.target_ids, layers.vllm_ids) == ((1, 15, 28, 31), (2, 16, 29, 32))

    def test_entries_are_put_in_the_order_that_vllm_writes(self) -> None:
        layers = mapped(found=config(16, 2, 29, 31), given=(16, 2, 29, 31))
        assert (layers.target_ids, layers.order) == ((3, 17, 30, 32), (1, 0, 2, 3))

    @given(st.sets(st.integers(0, N - 2), min_size=1).flatmap(lambda ids: st.permutations(sorted(ids))))
    def test_the_way_back_restores_ids_and_order(self, auxiliary: list[int]) -> None:
        ids = (*auxiliary, N - 1)
        head = replace(HEAD, layers=len(ids))
        there = mapped(found=config(*ids), given=ids, head=head)
        returned = replace(head, name="hs_0.safetensors", origin=head.origin_of_target(there))
        back = mapped(Flow.SERVER, head=returned, num_layers=None)
        assert back.target_ids == ids
        assert [there.order[place] for place in back.order] == list(range(len(ids)))

    @pytest.mark.parametrize(
        ("flow", "ids", "words"),
        [
            (Flow.IN_PROCESS, (2, 16, 29, 30), "the model's last, 31"),
            (Flow.IN_PROCESS, (3, 17, 30, 32), "Layer id 32 is not in 0 to 31"),
            (Flow.IN_PROCESS, (31, 2, 16, 29), "The last entry is layer 29"),
            (Flow.IN_PROCESS, (2, 2, 16, 31), "name one twice"),
            (Flow.IN_PROCESS, (2, 16, 31), "but the files have 4 layers"),
            (Flow.SERVER, (2, 16, 29, 31), "the model's last, 32"),
            (Flow.SERVER, (0, 16, 29, 32), "is the embeddings"),
            (Flow.SERVER, (2, 16, 29, 33), "Layer id 33 is not in 1 to 32"),
        ],
    )
    def test_layers_that_cannot_be_right_are_refused(
        self, flow: Flow, ids: tuple[int, ...], words: str
    ) -> None:
        with pytest.raises(ConversionError, match=words):
            mapped(flow, given=ids)

    def test_the_last_layer_alone_trains_no_draft(self) -> None:
        with pytest.raises(ConversionError, match="the last layer alone"):
            mapped(given=(31,), head=replace(HEAD, layers=1))

    def test_ids_that_nobody_tells_are_unknown(self) -> None:
        with pytest.raises(UnknownError, match=r"--layers, in-process .*: 2 16 29 31\)"):
            mapped()
        with pytest.raises(UnknownError, match="--layers 2 16 29 32"):
            mapped(Flow.SERVER)

    def test_the_order_of_entries_is_not_guessed(self) -> None:
        with pytest.raises(UnknownError, match="the files do not tell which"):
            mapped(found=config(16, 2, 29, 31))

    def test_vllm_writes_in_ascending_order_whatever_was_asked(self) -> None:
        with pytest.raises(UsageError, match="--layers 2 4 6 32"):
            mapped(Flow.SERVER, given=(6, 2, 4, 32))

    def test_ids_of_another_run_are_refused(self) -> None:
        with pytest.raises(UsageError, match="one of them is of another run"):
            mapped(found=config(2, 16, 29, 31), given=(1, 16, 29, 31))
        origin = HEAD.origin_of_target(mapped(found=config(2, 16, 29, 31)))
        with pytest.raises(UsageError, match="leave --layers out"):
            mapped(Flow.SERVER, head=replace(HEAD, origin=origin), given=(2, 16, 29, 32))


class TestNumberOfLayers:
    @pytest.fixture
    def model(self, tmp_path: Path) -> str:
        (tmp_path / "config.json").write_text('{"text_config": {"num_hidden_layers": 32}}')
        return str(tmp_path)

    def test_comes_from_the_model_that_data_config_names(self, model: str) -> None:
        assert mapped(found=config(2, 16, 29, 31, model=model), num_layers=None).num_layers == N

    def test_comes_from_the_model_that_is_given(self, model: str) -> None:
        assert mapped(found=config(2, 16, 29, 31), num_layers=None, model=model).num_layers == N

    def test_must_be_known(self) -> None:
        with pytest.raises(
            UnknownError, match=r"gone/model, which data_config\.json names, is not here"
        ):
            mapped(found=config(2, 16, 29, 31, model="gone/model"), num_layers=None)

    def test_must_be_told_the_same_by_all(self, model: str) -> None:
        with pytest.raises(UsageError, match="--num-layers says 30 and"):
            mapped(found=config(2, 16, 29, 31), num_layers=30, model=model)


@given(
    st.builds(
        Origin,
        st.sampled_from(Flow),
        st.lists(st.integers(0, 99)).map(tuple),
        st.integers(1, 99),
        st.text(),
        st.integers(0),
        st.integers(0),
        st.lists(st.integers(0, 99)).map(tuple),
        st.sampled_from(["int64", "int32"]),
        st.sampled_from(["bool", "int64"]),
        st.sampled_from(["bfloat16", "float8_e4m3fn"]),
    )
)
def test_a_header_says_what_its_origin_was(origin: Origin) -> None:
    header = json.loads(json.dumps(origin.as_header()))
    assert all(isinstance(value, str) for value in header.values())
    assert Origin.from_header(header) == origin


@pytest.mark.parametrize("header", [None, {}, {"layer_ids": "[1]"}, {"vllm_compat": "1", "flow": "x"}])
def test_a_header_of_somebody_else_says_nothing(header: Any) -> None:
    assert Origin.from_header(header) is None


class TestDirection:
    def folder(self, tmp_path: Path, *names: str) -> Path:
        folder = tmp_path / "from"
        for name in names:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).touch()
        folder.mkdir(exist_ok=True)
        return folder

    def refused(self, tmp_path: Path, *names: str, **options: Any) -> str:
        folder = self.folder(tmp_path, *names)
        with pytest.raises(UsageError) as caught:
            convert(Options(folder, tmp_path / "to", **options))
        assert not (tmp_path / "to").exists()
        return str(caught.value)

    def test_data_of_two_flows_are_refused(self, tmp_path: Path) -> None:
        said = self.refused(tmp_path, "data_0.pt", "hidden_states/hs_0.safetensors")
        assert "two different flows" in said

    def test_a_folder_without_data_is_refused(self, tmp_path: Path) -> None:
        assert "No data_<i>.pt or hs_<i>.safetensors" in self.refused(tmp_path, "notes.txt")
        with pytest.raises(UsageError, match="There is no folder"):
            convert(Options(tmp_path / "gone", tmp_path / "to"))

    def test_data_that_are_of_that_flow_are_refused(self, tmp_path: Path) -> None:
        said = self.refused(tmp_path, "data_0.pt", to=Flow.IN_PROCESS)
        assert "are of the in-process flow already" in said

    @pytest.mark.parametrize("release", ["0.4.0", "0.10.0", "1.0"])
    def test_releases_of_the_other_form_are_refused(self, tmp_path: Path, release: str) -> None:
        said = self.refused(tmp_path, "data_0.pt", speculators=release)
        assert f"known of speculators 0.5 to 0.9, not of {release}" in said

    def test_what_is_no_release_is_refused(self, tmp_path: Path) -> None:
        assert "is no release" in self.refused(tmp_path, "data_0.pt", speculators="newest")

    def test_no_jobs_make_no_sense(self, tmp_path: Path) -> None:
        assert "makes no sense" in self.refused(tmp_path, "data_0.pt", jobs=0)

    @pytest.mark.skipif(importlib.util.find_spec("torch") is not None, reason="torch is here")
    def test_a_library_that_lacks_is_named(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        folder = self.folder(tmp_path, "data_0.pt")
        assert main(["convert", str(folder), str(tmp_path / "to")]) == 2
        assert "pip install torch" in capsys.readouterr().err


def test_the_report_has_both_numberings_and_what_the_trainer_needs() -> None:
    layers = mapped(found=config(2, 16, 29, 31))
    report = Report(
        "data", "new", Flow.IN_PROCESS, layers, 3, 2, 1, 15, 8, ("bfloat16",), 999, 10**9,
        "new/token_freq.pt", False, "0.9.0", ("A note.",),
    )  # fmt: skip
    text = render(report)
    assert "    3             31       32  after layer 31, the verifier's last" in text
    assert "--data-path new --target-layer-ids 3 17 30 --on-missing raise" in text
    assert "2 samples written to new" in text
    assert "1 were there" in text
    back = replace(report, flow=Flow.SERVER, layers=mapped(Flow.SERVER, given=(2, 16, 29, 32)))
    assert "eagle_aux_hidden_state_layer_ids: [2, 16, 29]" in render(back)
    assert "would be written" in render(replace(report, dry_run=True))


def test_help_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["convert", "--help"])
    assert caught.value.code == 0
    assert "in-process k is vLLM's k+1" in capsys.readouterr().out.replace("\n", " ").replace("  ", " ")
