"""What :mod:`vllm_compat.commands.check` is made of.

``downstream`` reads a library's source, or remembers it; ``surroundings`` reads the environment;
``judging`` makes one verdict of findings and plan; ``dating`` says since which release each finding is
there.
"""
