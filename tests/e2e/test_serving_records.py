"""What is recorded of a release's server and models is what its installed source says, row by row."""

from __future__ import annotations

import json
import sys

import pytest

from lab import environments
from vllm_compat.analysis.serving.models import architectures_in, read_model
from vllm_compat.analysis.serving.modules import Modules
from vllm_compat.analysis.serving.offered import read_offered
from vllm_compat.analysis.serving.recorded import rows_of_release
from vllm_compat.analysis.serving.rows import rows_of
from vllm_compat.analysis.surface.files import package_at

pytestmark = pytest.mark.e2e


@pytest.mark.parametrize("version", ["0.16.0", pytest.param("0.32.0", marks=pytest.mark.beyond)])
def test_a_recorded_server_is_that_of_its_source(version: str) -> None:
    paths = environments.ensure(version, progress=lambda told: print(told, file=sys.stderr))
    files = package_at(paths.site_packages / "vllm", "vllm")
    modules = Modules(files)
    models = [read_model(modules, name) for name in architectures_in(modules)]
    read = {json.dumps(row) for row in rows_of(read_offered(files), models)}
    recorded = rows_of_release(version)
    assert recorded is not None
    assert {json.dumps(row) for row in recorded} == read
    assert len(read) > 500
