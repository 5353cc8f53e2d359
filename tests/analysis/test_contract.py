"""Call sites are read from source: of speculators as published, and of small packages made here."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

import pytest
from tests.downstreams import VERSIONS, contract, wheel

from vllm_compat.analysis.contract import CallSite, Contract, SiteKind, Use
from vllm_compat.analysis.downstream import read_contract, read_installed
from vllm_compat.errors import UsageError

EXECUTOR = "vllm.v1.executor.multiproc_executor.MultiprocExecutor"
SCHEDULER = "vllm.v1.core.sched.scheduler.Scheduler"
WORKER = "vllm.v1.worker.gpu_worker.Worker"


@pytest.fixture(params=VERSIONS)
def speculators(request: pytest.FixtureRequest) -> Contract:
    """Each speculators release with an in-process generator."""
    return contract(request.param)


def read(tmp_path: Path, source: str, **others: str) -> Contract:
    """Read the contract of a package ``down`` whose module ``down.use`` has this source."""
    package = tmp_path / "down"
    package.mkdir()
    (package / "__init__.py").write_text("")
    for name, text in {"use": source, **others}.items():
        (package / f"{name}.py").write_text(textwrap.dedent(text))
    return read_contract(tmp_path / "down")


def symbols(found: Contract, kind: SiteKind) -> list[str]:
    return [s.symbol for s in found.sites if s.kind is kind]


def only(sites: tuple[CallSite, ...]) -> CallSite:
    (site,) = sites
    return site


class TestSpeculators:
    def test_every_import_is_a_site_with_its_file_and_line(self, speculators: Contract) -> None:
        wanted = {
            "vllm.config.CacheConfig",
            "vllm.config.SchedulerConfig",
            "vllm.config.VllmConfig",
            "vllm.sampling_params.SamplingParams",
            "vllm.v1.core.kv_cache_utils._get_kv_cache_groups_uniform_spec",
            "vllm.v1.core.kv_cache_utils.get_kv_cache_config_from_groups",
            "vllm.v1.core.kv_cache_utils.unify_hybrid_kv_cache_specs",
            SCHEDULER,
            EXECUTOR,
            "vllm.v1.request.Request",
            "vllm.v1.request.RequestStatus",
            "vllm.v1.structured_output.StructuredOutputManager",
            "vllm.distributed.get_pp_group",
            "vllm.distributed.get_tp_group",
            "vllm.sequence.IntermediateTensors",
        }
        assert wanted <= set(symbols(speculators, SiteKind.IMPORT))
        for site in speculators.sites:
            assert site.file.startswith("speculators/data_generation/")
            assert site.line > 0

    @pytest.mark.parametrize(
        ("version", "name", "there"),
        [
            ("0.3.0", "vllm.model_executor.models.interfaces.supports_eagle3", True),
            ("0.4.0", "vllm.model_executor.models.interfaces.supports_eagle3", False),
            ("0.3.0", "vllm.utils.hashing.get_hash_fn_by_name", False),
            ("0.4.0", "vllm.utils.hashing.get_hash_fn_by_name", True),
            ("0.4.0.1", "vllm.v1.core.kv_cache_utils.init_none_hash", True),
        ],
    )
    def test_the_generations_import_different_names(self, version: str, name: str, there: bool) -> None:
        assert (name in symbols(contract(version), SiteKind.IMPORT)) is there

    def test_arguments_are_kept_as_written(self) -> None:
        request = only(contract("0.4.0.1").calls("vllm.v1.request.Request"))
        assert request.keyword("eos_token_id") == "self.tokenizer.eos_token_id"
        assert request.keyword("block_hasher") == "self.block_hasher"
        assert request.within == "VllmHiddenStatesGenerator.generate"
        hasher = only(contract("0.4.0.1").calls("vllm.v1.core.kv_cache_utils.get_request_block_hasher"))
        assert hasher.positional == (
            "self.vllm_config.cache_config.block_size",
            "caching_hash_fn",
        )
        old = only(contract("0.3.0").calls(SCHEDULER))
        assert old.keyword("block_size") is None
        assert only(contract("0.4.0").calls(SCHEDULER)).keyword("block_size") == "VLLM_BLOCK_SIZE"

    def test_methods_of_attributes_are_sites_of_their_class(self, speculators: Contract) -> None:
        called = set(symbols(speculators, SiteKind.CALL))
        assert {
            f"{EXECUTOR}.collective_rpc",
            f"{EXECUTOR}.execute_model",
            f"{EXECUTOR}.initialize_from_config",
            f"{EXECUTOR}.shutdown",
            f"{SCHEDULER}.add_request",
            f"{SCHEDULER}.schedule",
            f"{SCHEDULER}.finish_requests",
        } <= called
        assert (f"{EXECUTOR}.sample_tokens" in called) is (speculators.version != "0.3.0")

    def test_results_are_followed(self) -> None:
        (captured,) = (
            s
            for s in contract("0.3.0").calls(f"{EXECUTOR}.collective_rpc")
            if s.keyword("unique_reply_rank") == "0"
        )
        assert Use("assigned", "captured_states_list") in captured.uses
        assert Use("subscript", "0") in captured.uses
        (captured,) = (
            s
            for s in contract("0.4.0").calls(f"{EXECUTOR}.collective_rpc")
            if s.keyword("unique_reply_rank") == "0"
        )
        assert {
            Use("truth"),
            Use("contains"),
            Use("subscript", "req_id"),
            Use("attribute", "keys"),
        } <= set(captured.uses)
        step = only(contract("0.4.0").calls(f"{EXECUTOR}.execute_model"))
        assert Use("argument", f"{EXECUTOR}.sample_tokens[0]") in step.uses
        assert Use("ignored") in only(contract("0.3.0").calls(f"{EXECUTOR}.execute_model")).uses

    def test_walrus_results_are_followed(self, speculators: Contract) -> None:
        step = only(speculators.calls(f"{SCHEDULER}.schedule"))
        assert Use("attribute", "total_num_scheduled_tokens") in step.uses
        assert f"{SCHEDULER}.schedule().total_num_scheduled_tokens" in symbols(
            speculators, SiteKind.ATTRIBUTE
        )

    def test_attributes_are_sites(self, speculators: Contract) -> None:
        read = set(symbols(speculators, SiteKind.ATTRIBUTE))
        assert {
            "vllm.v1.request.RequestStatus.FINISHED_ABORTED",
            "vllm.distributed.get_pp_group().is_first_rank",
            "vllm.config.VllmConfig.cache_config",
            "vllm.config.VllmConfig.model_config.max_model_len",
            "vllm.__version__",
        } <= read

    def test_the_worker_extension_is_found_by_its_name(self, speculators: Contract) -> None:
        hooks = set(symbols(speculators, SiteKind.HOOK))
        assert f"{WORKER}._get_captured_states" in hooks
        assert f"{WORKER}.model_runner.model" in symbols(speculators, SiteKind.ATTRIBUTE)
        # Called by name in the workers, and defined by no extension.
        assert f"{WORKER}.get_kv_cache_spec" in symbols(speculators, SiteKind.CALL)
        assert f"{WORKER}._get_captured_states" not in symbols(speculators, SiteKind.CALL)
        batch = f"{WORKER}.model_runner.input_batch.req_id_to_index"
        newer = speculators.version != "0.3.0"
        assert (batch in symbols(speculators, SiteKind.ATTRIBUTE)) is newer

    def test_what_the_downstream_copes_with_is_optional(self, speculators: Contract) -> None:
        assert only(speculators.calls(f"{EXECUTOR}.shutdown")).optional

    @pytest.mark.parametrize(
        ("version", "callee"),
        [
            ("0.3.0", "torch.cuda.mem_get_info"),
            ("0.3.0", "torch.cuda.empty_cache"),
            ("0.3.0", "self.get_input_embeddings"),
            ("0.4.0", "speculators.utils.util.mem_get_info"),
            ("0.4.0", "self.embed_input_ids"),
            ("0.4.0.1", "transformers.AutoTokenizer.from_pretrained"),
            ("0.4.0.1", "types.MethodType"),
        ],
    )
    def test_calls_of_others_are_kept(self, version: str, callee: str) -> None:
        assert contract(version).others(callee)

    def test_the_order_of_results_can_be_seen(self) -> None:
        sites = contract("0.4.0.1").others("sorted")
        assert any(s.positional == ("request_id_to_idx.keys()",) for s in sites)
        assert not contract("0.3.0").others("sorted")

    def test_modules_are_followed_inside_the_package(self, speculators: Contract) -> None:
        generator = "speculators.data_generation.vllm_hidden_states_generator"
        assert "speculators.data_generation.logging_utils" in speculators.modules[generator]
        assert "speculators" in speculators.modules[generator]
        assert "speculators" in speculators.modules

    def test_name_and_version(self, speculators: Contract) -> None:
        assert speculators.name == speculators.package == "speculators"
        assert speculators.version in ("0.3.0", "0.4.0", "0.4.0.1")

    def test_folder_and_wheel_give_the_same(self, tmp_path: Path) -> None:
        with zipfile.ZipFile(wheel("0.4.0.1")) as packed:
            packed.extractall(tmp_path)
        read_from_wheel = contract("0.4.0.1")
        for folder in (tmp_path, tmp_path / "speculators"):
            found = read_contract(folder)
            assert found.sites == read_from_wheel.sites
            assert found.other_calls == read_from_wheel.other_calls
            assert (found.name, found.version) == ("speculators", "0.4.0.1")
        assert read_installed("speculators", tmp_path).sites == read_from_wheel.sites


class TestNames:
    def test_aliases_and_modules(self, tmp_path: Path) -> None:
        found = read(
            tmp_path,
            """
            import vllm.config as vc
            import vllm
            from vllm.v1 import request as r
            vc.CacheConfig(block_size=16)
            vllm.LLM("model")
            r.Request("id")
            """,
        )
        assert symbols(found, SiteKind.CALL) == [
            "vllm.config.CacheConfig",
            "vllm.LLM",
            "vllm.v1.request.Request",
        ]

    def test_names_that_the_package_hands_on(self, tmp_path: Path) -> None:
        found = read(
            tmp_path,
            "from .compat import Request\nfrom . import compat\nRequest('a')\ncompat.Request('b')\n"
            "from vllm import LLM\n",
            compat="from vllm.v1.request import Request\n",
        )
        assert len(found.calls("vllm.v1.request.Request")) == 2

    def test_import_module(self, tmp_path: Path) -> None:
        found = read(
            tmp_path,
            """
            import importlib
            m = importlib.import_module("vllm.v1.request")
            m.Request("a")
            """,
        )
        assert symbols(found, SiteKind.IMPORT) == ["vllm.v1.request"]
        assert found.calls("vllm.v1.request.Request")

    def test_star_import(self, tmp_path: Path) -> None:
        found = read(tmp_path, "from vllm.v1.request import *\n")
        assert symbols(found, SiteKind.IMPORT) == ["vllm.v1.request"]

    def test_a_module_that_only_names_vllm_is_none(self, tmp_path: Path) -> None:
        assert read(tmp_path, "x = 'vllm'\nprint(x)\n").sites == ()

    def test_starred_arguments_are_marked(self, tmp_path: Path) -> None:
        found = read(tmp_path, "from vllm import LLM\nLLM(*a, b, **c)\n")
        site = only(found.calls("vllm.LLM"))
        assert site.star
        assert site.positional == ("b",)


class TestObjects:
    def test_annotations_carry(self, tmp_path: Path) -> None:
        found = read(
            tmp_path,
            """
            from __future__ import annotations
            from vllm.config import VllmConfig
            class A:
                config: VllmConfig
                def make(self) -> "VllmConfig": ...
                def use(self, given: VllmConfig | None, many: list[VllmConfig]):
                    given.one
                    self.config.two
                    self.make().three
                    for item in many:
                        item.four
                    many[0].five
            """,
        )
        assert symbols(found, SiteKind.ATTRIBUTE) == [
            f"vllm.config.VllmConfig.{name}" for name in ("one", "two", "three", "four", "five")
        ]

    def test_attributes_set_by_later_methods_are_known(self, tmp_path: Path) -> None:
        found = read(
            tmp_path,
            """
            from vllm import LLM
            class A:
                def use(self):
                    self.llm.generate("x")
                def start(self):
                    self.llm = LLM("m")
            """,
        )
        assert found.calls("vllm.LLM.generate")

    def test_branches_are_joined(self, tmp_path: Path) -> None:
        found = read(
            tmp_path,
            """
            from vllm import LLM
            from vllm.v1.engine.async_llm import AsyncLLM
            def f(flag):
                if flag:
                    x = LLM("m")
                else:
                    x = AsyncLLM("m")
                x.start()
            """,
        )
        started = [s for s in found.sites if s.symbol.endswith(".start")]
        assert {s.symbol for s in started} == {
            "vllm.LLM.start",
            "vllm.v1.engine.async_llm.AsyncLLM.start",
        }
        assert all(len(s.any_of) == 1 for s in started)

    def test_isinstance_narrows(self, tmp_path: Path) -> None:
        found = read(
            tmp_path,
            """
            from vllm.config import VllmConfig, ModelConfig
            class Own:
                pass
            def f(x: VllmConfig, y: VllmConfig):
                if isinstance(x, ModelConfig):
                    x.a
                if isinstance(y, Own):
                    y.b
                y.c
            """,
        )
        assert symbols(found, SiteKind.ATTRIBUTE) == [
            "vllm.config.ModelConfig.a",
            "vllm.config.VllmConfig.c",
        ]

    def test_subclasses(self, tmp_path: Path) -> None:
        found = read(
            tmp_path,
            """
            from vllm.v1.core.sched.scheduler import Scheduler
            class Mine(Scheduler):
                own = 1
                def schedule(self):
                    self.mine = self.own
                    self.mine, self.running
                    return super().schedule(1)
            """,
        )
        assert symbols(found, SiteKind.SUBCLASS) == [SCHEDULER]
        assert symbols(found, SiteKind.ATTRIBUTE) == [f"{SCHEDULER}.running"]
        assert only(found.calls(f"{SCHEDULER}.schedule")).positional == ("1",)

    def test_other_bases_hide_what_is_vllms(self, tmp_path: Path) -> None:
        found = read(
            tmp_path,
            """
            import torch
            from vllm.v1.core.sched.scheduler import Scheduler
            class Mine(Scheduler, torch.nn.Module):
                def f(self):
                    self.anything
            """,
        )
        assert symbols(found, SiteKind.ATTRIBUTE) == []

    def test_a_method_called_on_its_class_is_unbound(self, tmp_path: Path) -> None:
        found = read(
            tmp_path,
            """
            from vllm import LLM
            original = LLM.generate
            def patched(self, x):
                return original(self, x)
            LLM.generate = patched
            LLM("m").generate("x")
            """,
        )
        first, second = found.calls("vllm.LLM.generate")
        assert (first.unbound, second.unbound) == (True, False)
        (written,) = (s for s in found.sites if s.store)
        assert written.symbol == "vllm.LLM.generate"

    def test_an_instance_is_called_as_such(self, tmp_path: Path) -> None:
        found = read(
            tmp_path,
            """
            from vllm.v1.sample.sampler import Sampler
            s = Sampler()
            s(1)
            """,
        )
        assert symbols(found, SiteKind.CALL) == [
            "vllm.v1.sample.sampler.Sampler",
            "vllm.v1.sample.sampler.Sampler.__call__",
        ]

    @pytest.mark.parametrize(
        "line",
        [
            "ParallelConfig(worker_extension_cls='down.use.Ext')",
            "dict(worker_extension_cls='down.use.Ext')",
            "{'worker_extension_cls': 'down.use.Ext'}",
            "kwargs.setdefault('worker_extension_cls', 'down.use.Ext')",
            "kwargs['worker_extension_cls'] = 'down.use.Ext'",
            "dict(worker_extension_cls=f'{Ext.__module__}.{Ext.__qualname__}')",
        ],
    )
    def test_worker_extensions(self, tmp_path: Path, line: str) -> None:
        source = """
            from vllm.config import ParallelConfig
            class Ext:
                def mine(self):
                    self.model_runner
            kwargs = {}
            """
        found = read(tmp_path, textwrap.dedent(source) + line + "\n")
        assert symbols(found, SiteKind.HOOK) == [f"{WORKER}.mine"]
        assert symbols(found, SiteKind.ATTRIBUTE) == [f"{WORKER}.model_runner"]


class TestCoping:
    def test_type_checking_imports_are_optional(self, tmp_path: Path) -> None:
        found = read(
            tmp_path,
            """
            from typing import TYPE_CHECKING
            if TYPE_CHECKING:
                from vllm.config import VllmConfig
            def f(x: "VllmConfig"):
                x.a
            """,
        )
        imported, read_ = found.sites
        assert imported.optional
        assert read_.symbol == "vllm.config.VllmConfig.a"

    def test_a_fallback_runs_only_without_what_was_tried(self, tmp_path: Path) -> None:
        found = read(
            tmp_path,
            """
            try:
                from vllm.new import Thing
            except ImportError:
                from vllm.old import Thing
            """,
        )
        tried, fallback = found.sites
        assert tried.optional
        assert not fallback.optional
        assert fallback.unless == ("vllm.new.Thing",)

    def test_a_caught_error_that_is_raised_again_is_none(self, tmp_path: Path) -> None:
        found = read(
            tmp_path,
            """
            try:
                from vllm.new import Thing
            except ImportError as error:
                raise ImportError("install vLLM") from error
            """,
        )
        assert not only(found.sites).optional

    def test_hasattr_and_getattr(self, tmp_path: Path) -> None:
        found = read(
            tmp_path,
            """
            from vllm.config import VllmConfig
            def f(x: VllmConfig):
                if hasattr(x, "new"):
                    x.new
                elif getattr(x, "older", None):
                    x.older_too
                y = getattr(x, "maybe", 0)
                getattr(x, "must")
            """,
        )
        by_name = {s.symbol.rsplit(".", 1)[-1]: s for s in found.sites if "." in s.symbol}
        assert by_name["new"].optional
        assert by_name["maybe"].optional
        assert by_name["older_too"].needs == ("vllm.config.VllmConfig.older",)
        assert not by_name["must"].optional

    @pytest.mark.parametrize(
        "test",
        [
            "Version(vllm.__version__) >= Version('0.12')",
            "vllm_version_is('0.12.0')",
            "'block_size' in inspect.signature(Scheduler).parameters",
            "NEW",
        ],
    )
    def test_version_tests_guard(self, tmp_path: Path, test: str) -> None:
        found = read(
            tmp_path,
            f"""
            import inspect, vllm
            from vllm.v1.core.sched.scheduler import Scheduler
            NEW = Version(vllm.__version__) > Version('1')
            if {test}:
                Scheduler(block_size=16)
            else:
                Scheduler()
            """,
        )
        assert [s.optional for s in found.calls(SCHEDULER)] == [True, True]
        assert all(s.guard for s in found.calls(SCHEDULER))

    def test_an_early_return_guards_the_rest(self, tmp_path: Path) -> None:
        found = read(
            tmp_path,
            """
            import vllm
            def f():
                if vllm.__version__ != "0.7.3":
                    return
                from vllm.core.scheduler import Scheduler
            """,
        )
        (site,) = (s for s in found.sites if s.symbol.endswith("Scheduler"))
        assert site.optional


class TestBadInput:
    def test_a_missing_distribution(self) -> None:
        with pytest.raises(UsageError, match=r"^no-such-downstream is not installed\.$"):
            read_contract("no-such-downstream")

    def test_a_path_that_is_none(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match="There is no file or folder"):
            read_contract(tmp_path / "nothing")

    def test_a_folder_without_a_package(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match="no Python package"):
            read_contract(tmp_path)

    def test_a_corrupt_wheel(self, tmp_path: Path) -> None:
        path = tmp_path / "speculators-0.4.0-py3-none-any.whl"
        path.write_bytes(b"PK\x03\x04 nothing of the kind")
        with pytest.raises(UsageError, match="no readable wheel"):
            read_contract(path)

    def test_a_syntax_error(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match=r"down/use\.py, line 2 in .* is not valid Python"):
            read(tmp_path, "import vllm\ndef (:\n")

    def test_errors_are_one_line(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError) as caught:
            read_contract(tmp_path)
        assert "\n" not in str(caught.value)


def test_nothing_is_imported() -> None:
    program = (
        "import sys; from vllm_compat.analysis.downstream import read_contract;"
        f"read_contract({str(wheel('0.4.0.1'))!r});"
        "print(sorted({'vllm', 'torch', 'transformers', 'speculators'} & set(sys.modules)))"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"
