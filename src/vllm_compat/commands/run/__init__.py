"""`vllm-compat run` and `status`: a supervised child, and what its processes say of themselves."""
