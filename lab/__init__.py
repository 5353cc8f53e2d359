"""The maintainers' lab, for a checkout only: real vLLM releases, cells, the matrix, the nightly job.

- `environments` makes virtual environments with a real CPU build of vLLM and unmodified speculators.
- `overlay` lays the sources of one vLLM over the kernels of another.
- `matrix` runs cells (`vllm_compat.trial.cell`) on releases, one record each; `nightly` on a vLLM that
  is not released yet; `record` makes the recorded surfaces.
"""
