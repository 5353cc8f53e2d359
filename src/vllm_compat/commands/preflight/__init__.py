"""`vllm-compat preflight`: what a run will meet, without weights or a GPU."""
