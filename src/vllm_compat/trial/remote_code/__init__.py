"""Files that are copied as they are into a tiny Kimi-K2.5 folder, as that model's remote code.

They stand in for the files of the same names in the real model's repository, are written for this
project, and are never imported from here: transformers and vLLM load them from the model folder.
"""
