#!/usr/bin/env bash
# docs.examples: the C listing of docs/client.md is examples/prefix.c.
set -euo pipefail
cd "$1"
diff <(sed -n '/^```c$/,/^```$/p' docs/client.md | sed '/^```/d') examples/prefix.c
