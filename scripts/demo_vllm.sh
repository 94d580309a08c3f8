#!/usr/bin/env bash
# make demo-vllm: a real vLLM (CPU, a small random model) that finds its prompts again: after a kill -9 of the engine, and after a restart of the daemon,
# from disk. About a minute, and three more the first time (scripts/engines.sh makes the environment). SEED=1: of the prompts.
# Everything lives in a temporary directory and is gone afterwards. Exit 1: an answer differs from vLLM's without kvd, or nothing was found.
set -euo pipefail
cd "$(dirname "$0")/.."

python=$(scripts/engines.sh)
began=$SECONDS
"$python" tests/engines/demo.py
printf '\nThe demo took %d s. Every answer, with its logprobs, was that of vLLM without kvd.\n' "$((SECONDS - began))"
