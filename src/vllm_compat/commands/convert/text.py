"""A conversion in words."""

from __future__ import annotations

from pathlib import Path

from vllm_compat.commands.convert.model import Flow, Report


def render(report: Report) -> str:
    """Return what was done, or would be, for people."""
    layers, to = report.layers, report.flow.other
    would = "would be " if report.dry_run else ""
    size = report.bytes_needed
    lines = [
        f"{report.source}: {report.samples:,} samples of the {report.flow.value} flow,"
        f" {report.tokens:,} tokens, {len(layers.source_ids)} layers of {report.hidden_size} in"
        f" {' and '.join(report.dtypes)}",
        "",
        "entry  in-process id  vLLM id  residual stream",
        *_table(report),
        "",
        f"{report.written:,} samples {would}written to {report.target} ({size:,} bytes;"
        f" {report.bytes_free:,} were free)" + (f", {report.kept:,} were there" if report.kept else ""),
        f"token frequencies, counted anew from the loss masks: {report.token_freq}",
        *report.notes,
        "",
        *_next_steps(report, to),
    ]
    return "\n".join(lines) + "\n"


def _table(report: Report) -> list[str]:
    ids = report.layers.vllm_ids
    role = {len(ids) - 1: ", the verifier's last"}
    return [
        f"{entry:5}  {k - 1:13}  {k:7}  after layer {k - 1}{role.get(entry, '')}"
        for entry, k in enumerate(ids)
    ]


def _next_steps(report: Report, to: Flow) -> list[str]:
    auxiliary = report.layers.vllm_ids[:-1]
    ids = " ".join(map(str, auxiliary))
    if to is Flow.SERVER:
        return [
            f"Train with speculators {report.speculators}: give its trainer",
            f"    --data-path {report.target} --target-layer-ids {ids} --on-missing raise",
            "Without --target-layer-ids it takes the draft to be trained on its own choice of layers,"
            " and vLLM would serve it with those.",
        ]
    return [
        f"Train with speculators {report.speculators}: --data-path {report.target}",
        "The draft's config.json then needs, because that trainer does not write it:",
        f"    eagle_aux_hidden_state_layer_ids: {sorted(auxiliary)}",
        f"Keep {Path(report.token_freq).name} out of the folder: the trainer takes every file that ends"
        ' in "pt" for a sample.',
    ]
