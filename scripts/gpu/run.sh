#!/usr/bin/env bash
# Run one GPU suite on a machine with a CUDA build of vLLM: run.sh SUITE.json OUT.json DOWNSTREAMS
# Needs: python3 with vllm, torch, transformers and vllm_compat; DOWNSTREAMS holds one folder per speculators release.
set -euo pipefail
suite=$1 out=$2 downstreams=$3
work=$(mktemp -d)
for model in llama deepseek_v3 kimi_k25 kimi_k25_int4; do
  python3 -c "from vllm_compat.lab.models import make_model; make_model('$model', '$work/$model', dtype='bfloat16')"
done
nvidia-smi --query-gpu=name,driver_version,memory.total,compute_cap --format=csv,noheader
python3 -m vllm_compat.lab.suite "$suite" --out "$out" --models "$work" --downstreams "$downstreams" \
  --jobs "${JOBS:-6}" --limit "${LIMIT:-150}" --deadline "${DEADLINE:-420}"
