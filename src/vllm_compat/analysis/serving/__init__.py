"""The contract across the process boundary: what a client of ``vllm serve`` asks, and what it offers.

:mod:`asked` reads the downstream's side from its launcher and its HTTP clients, :mod:`offered` vLLM's
from its source, :mod:`comparing` makes findings of both. ``models`` reads what a model class hands out.
All is read by AST; neither side is imported.
"""
