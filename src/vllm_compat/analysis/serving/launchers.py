"""What stock's launcher asks in each release: no wheel has ``scripts/launch_vllm.py``.

Read with :func:`vllm_compat.analysis.serving.asked.read_launcher` from the tags v0.5.0, v0.6.0.1 and
v0.7.0.1 of speculators' repository, and from its last text before 0.8 (August 2026), which is *inferred*
to be that of 0.8 and later.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_compat.analysis.contract import CallSite, SiteKind
from vllm_compat.analysis.serving.asked import LAUNCHER
from vllm_compat.analysis.serving.model import Ask, AskKind

if TYPE_CHECKING:
    from packaging.version import Version

_SPECULATIVE, _TRANSFER = "speculative_config", "kv_transfer_config"
_ROWS = (
    (AskKind.FLAG, "--speculative_config", ""),
    (AskKind.FLAG, "--kv_transfer_config", ""),
    (AskKind.KEY, "method", _SPECULATIVE),
    (AskKind.METHOD, "extract_hidden_states", ""),
    (AskKind.KEY, "num_speculative_tokens", _SPECULATIVE),
    (AskKind.KEY, "draft_model_config", _SPECULATIVE),
    (AskKind.KEY, "kv_connector", _TRANSFER),
    (AskKind.CONNECTOR, "ExampleHiddenStatesConnector", ""),
    (AskKind.KEY, "kv_role", _TRANSFER),
    (AskKind.KEY, "kv_connector_extra_config", _TRANSFER),
    (AskKind.FLAG, "--no-enable-chunked-prefill", ""),
)
# Lines of the rows, in their order; 0 where the launcher does not ask it.
_LINES = (
    (">=0.5,<0.6", (100, 102, 82, 82, 83, 84, 89, 89, 90, 91, 0)),
    (">=0.6,<0.7", (100, 102, 82, 82, 83, 84, 89, 89, 90, 91, 107)),
    (">=0.7,<0.8", (141, 143, 126, 126, 127, 128, 35, 35, 36, 37, 148)),
    (">=0.8", (152, 154, 137, 137, 138, 139, 35, 35, 36, 37, 0)),
)


def launcher_of(release: Version) -> tuple[Ask, ...]:
    """Return what the launcher of a speculators release asks; nothing before 0.5."""
    from packaging.specifiers import SpecifierSet

    for specifier, lines in _LINES:
        if SpecifierSet(specifier).contains(release, prereleases=True):
            return tuple(
                Ask(kind, name, CallSite(SiteKind.CALL, "vllm serve", LAUNCHER, LAUNCHER, line), owner)
                for (kind, name, owner), line in zip(_ROWS, lines, strict=True)
                if line
            )
    return ()
