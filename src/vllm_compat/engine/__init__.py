"""The second engine: the downstream's generator served from vLLM's public interface.

The downstream builds scheduler, executor and KV cache by hand, out of vLLM's internals. Here the same
calls are answered from ``vllm.LLM`` and its ``collective_rpc``: ``driver`` is what stands behind the
generator, ``worker`` what vLLM adds to its workers. What the rows are captured with, and what is checked
of them, is the same for both engines.
"""
