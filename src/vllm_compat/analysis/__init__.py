"""What only reads source: contract, surface, environment, drift, plan. Nothing here changes a process.

Imports neither vLLM, torch nor a downstream, and nothing of vllm_compat but `errors` and itself.
"""
