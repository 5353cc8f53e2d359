"""What `rehearse`, `bench` and `demo` run on: tiny models without any hub, a reference, programs.

- `models` and `families` write tiny random models, their tokenizers included.
- `checkpoint` writes random weights for a configuration, quantised schemes too.
- `reference` computes hidden states with transformers' own classes and compares.
- `cell` runs stock's generator through a set of scenarios; `pipeline` runs all four steps.

Nothing here is used when a program runs through the library. Importing these modules imports
neither torch nor transformers; the functions that need them do.
"""
