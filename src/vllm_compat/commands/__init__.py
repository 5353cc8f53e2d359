"""The commands of `vllm-compat`, one module or folder each."""
