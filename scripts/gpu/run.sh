#!/usr/bin/env bash
# Run one GPU suite on a machine with a CUDA build of vLLM: run.sh SUITE.json OUT.json DOWNSTREAMS
# Needs: python3 with vllm, torch, transformers and vllm_compat; DOWNSTREAMS holds one folder per speculators release.
set -euo pipefail
suite=$1 out=$2 downstreams=$3
work=$(mktemp -d)
python3 - "$suite" "$work" <<'EOF'
import json, sys
from vllm_compat.trial.families import make_tiny
suite, work = sys.argv[1:]
for model in sorted({cell["model"] for cell in json.load(open(suite))}):
    make_tiny(model, f"{work}/{model}", dtype="bfloat16")
EOF
nvidia-smi --query-gpu=name,driver_version,memory.total,compute_cap --format=csv,noheader
python3 -m lab.suite "$suite" --out "$out" --models "$work" --downstreams "$downstreams" \
  --jobs "${JOBS:-6}" --limit "${LIMIT:-150}" --deadline "${DEADLINE:-420}"
