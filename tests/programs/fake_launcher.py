"""A FAKE of stock's launcher of a vLLM server, of the same shape; it reads no model."""

from __future__ import annotations

import argparse
import json
import os
import sys


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--target-layer-ids", type=int, nargs="+", default=[2, 4, 5, 8])
    parser.add_argument("--hidden-states-path", default="/tmp/hidden_states")
    parser.add_argument("--dry-run", action="store_true")
    args, vllm_args = parser.parse_known_args()
    if "--" in vllm_args:
        vllm_args.remove("--")
    if args.model == "nowhere":
        raise OSError("nowhere is no model")
    speculative_config = {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": args.target_layer_ids}},
    }
    kv_transfer_config = {
        "kv_connector": "ExampleHiddenStatesConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": args.hidden_states_path},
    }
    cmd = [
        sys.executable,
        "-m",
        "vllm.entrypoints.cli.main",
        "serve",
        args.model,
        "--speculative_config",
        json.dumps(speculative_config),
        "--kv_transfer_config",
        json.dumps(kv_transfer_config),
        *vllm_args,
    ]
    print("Running command:")
    print(" ".join(cmd), flush=True)
    if not args.dry_run:
        os.execvp(cmd[0], cmd)


if __name__ == "__main__":
    main()
