#!/usr/bin/env bash
# make test-engines: the promises to an engine, under a real vLLM. usage: scripts/test_engines.sh [short|full] [options of tests/engines/run.py]
# Exit 77: cannot run here, and why.
set -euo pipefail
cd "$(dirname "$0")/.."

form=${1:-full}
[ $# -eq 0 ] || shift
nixl=()
[ "$form" = short ] || nixl=(--nixl)
python=$(scripts/engines.sh "${nixl[@]}")
for unit in layout identity layers multi; do
	"$python" "connectors/vllm/tests/test_$unit.py"
done
exec "$python" tests/engines/run.py "--$form" "$@"
