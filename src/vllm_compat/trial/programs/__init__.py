"""Programs of the shape of speculators' own scripts, which have never heard of vllm_compat.

speculators ships its scripts in its repository only. These do what they do, one step each, are
written for this project, and run as they are under ``vllm-compat run``.
"""
