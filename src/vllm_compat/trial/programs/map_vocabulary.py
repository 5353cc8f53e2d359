"""Step 3: the draft's smaller vocabulary, from the frequencies that step 1 has counted."""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from speculators.train.vocab_mapping import build_vocab_mappings_from_distribution


def main() -> None:
    """Write ``d2t.npy`` and ``t2d.npy``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--token-freq-path", required=True)
    parser.add_argument("--draft-vocab-size", type=int, required=True)
    parser.add_argument("--target-vocab-size", type=int, required=True)
    parser.add_argument("--output-path", required=True)
    args = parser.parse_args()

    frequencies = torch.load(args.token_freq_path, weights_only=True)
    d2t, t2d = build_vocab_mappings_from_distribution(
        frequencies, args.draft_vocab_size, args.target_vocab_size
    )
    folder = Path(args.output_path)
    folder.mkdir(parents=True, exist_ok=True)
    np.save(folder / "d2t.npy", d2t.numpy())
    np.save(folder / "t2d.npy", t2d.numpy())
    kept = sum(n for token, n in frequencies.items() if t2d[token])
    print(
        f"mapped {len(d2t)} of {len(t2d)} tokens, {kept / sum(frequencies.values()):.1%} of those that"
        " are trained on",
        flush=True,
    )


if __name__ == "__main__":
    main()
