#!/usr/bin/env bash
# docs.promises: every test docs/PROMISES.md names exists, and every promise names at least one.
set -euo pipefail
cd "$1"
bad=0
for promise in P1 P2 P3 P4 P5 P6 P7 P8 P9 P10; do
	section=$(awk -v p="## $promise " 'index($0, p) == 1 {on = 1; next} /^## / {on = 0} on' docs/PROMISES.md)
	tests=$(printf '%s\n' "$section" | grep -oE '`p[0-9]+_[a-z0-9_]+`' | tr -d '`' | sort -u || true)
	if [ -z "$tests" ]; then
		echo "docs/PROMISES.md: $promise names no test"
		bad=1
	fi
	for name in $tests; do
		if ! grep -rqwE "(test_)?$name" tests connectors/vllm/tests --include='*.c' --include='*.sh' --include='*.py'; then
			echo "docs/PROMISES.md: $promise names $name, which no test defines"
			bad=1
		fi
	done
done
exit $bad
