"""`vllm-compat rehearse`: a small model of the same kind through stock's generator."""
