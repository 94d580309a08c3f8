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
for unit in layout identity pipeline layers multi; do
	"$python" "connectors/vllm/tests/test_$unit.py"
done
"$python" tests/engines/releases.py --installed
"$python" tests/engines/served.py --check
if [ "$form" = full ] || [ $# -gt 0 ] || [ "$(nproc)" -lt 2 ]; then
	exec "$python" tests/engines/run.py "--$form" "$@"
fi

# Two at a time, a core each: most of a test is the start of engines, which one thread does.
read -r core other < <("$python" -c 'import os; print(*sorted(os.sched_getaffinity(0))[:2])')
taskset -c "$other" "$python" tests/engines/run.py --short --share 2/2 >build/engines-2.log 2>&1 &
second=$!
trap 'kill $second 2>/dev/null || true' EXIT
status=0
taskset -c "$core" "$python" tests/engines/run.py --short --share 1/2 || status=$?
wait $second || status=$?
cat build/engines-2.log
exit $status
