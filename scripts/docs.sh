#!/usr/bin/env bash
# Write the documentation that is made from tables (requests, status codes, metrics, options). Tests fail when it is out of date.
# usage: scripts/docs.sh BUILD
set -euo pipefail
cd "$(dirname "$0")/.."
bin=${1:-build/release}/bin
for page in wire status metrics shm; do
	"$bin/kvd-docs" "$page" >"docs/$page.md"
done
"$bin/kvd" --options-page >docs/options.md
"$bin/kvd" --sample-config >conf/kvd.conf
"$bin/kvd-pd-proxy" --options-page >docs/pd-proxy.md
