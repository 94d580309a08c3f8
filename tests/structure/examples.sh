#!/usr/bin/env bash
# docs.examples: the C listings of docs/client.md and docs/handover.md are programs in examples.
set -euo pipefail
cd "$1"
diff <(sed -n '/^```c$/,/^```$/p' docs/client.md | sed '/^```/d') examples/prefix.c
diff <(sed -n '/^```c$/,/^```$/p' docs/handover.md | sed '/^```/d') examples/handover.c
