"""What tests and the demo run on: environments with a real vLLM, tiny models, a reference.

- `vllm_compat.lab.environments` makes virtual environments with a real CPU build of vLLM and
  unmodified speculators releases beside it.
- `vllm_compat.lab.models` writes tiny random models, their tokenizers included, without any hub.
- `vllm_compat.lab.reference` computes hidden states with transformers' own classes and compares.

Nothing here is used when a program runs through the library. Importing these modules imports
neither torch nor transformers; the functions that need them do.
"""
