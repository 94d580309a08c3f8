#!/usr/bin/env bash
# vLLM with kvd, with other caches and with none, on one GPU or two: bench/gpu/vllm/run.sh PART [bench.py's options]
# README.md has the parts; anything else: names of configurations (bench.py --help).
# Where a machine has no vLLM: .vllm[1-9]/site.tar.xz.* (or .vllm0/) are unpacked to ~/v/site; where kvd is not built: a bundle (scripts/offline-bundle) named in BUNDLE,
# or .gpu/kvd-*.tar.xz. Results: $OUT (default bench-out): results.json, table.md, log.txt.
set -euo pipefail
cd "$(dirname "$0")/../../.."

site=$HOME/v/site
shopt -s nullglob
parts=(.vllm0/site.tar.xz.*) # without LMCache
[ ${#parts[@]} -gt 0 ] || parts=(.vllm[1-9]/site.tar.xz.*)
shopt -u nullglob
if [ ${#parts[@]} -gt 0 ] && [ ! -e "$HOME/v/done" ]; then
	mkdir -p "$site"
	cat "${parts[@]}" | xz -dc | tar -xf - -C "$site"
	touch "$HOME/v/done"
fi
if [ -d "$site" ]; then
	export PYTHONPATH="$site:${PYTHONPATH:-}"
fi

kvd=build/release
bundle=${BUNDLE:-$(compgen -G '.gpu/kvd-*.tar.xz' | sed -n 1p || true)}
if [ -n "$bundle" ]; then
	kvd=$HOME/k/kvd
	if [ "$(cat "$kvd/done" 2>/dev/null)" != "$(cksum <"$bundle")" ]; then
		rm -rf "$HOME/k"
		mkdir -p "$kvd" "$HOME/k/site"
		tar -xf "$bundle" -C "$kvd" --strip-components=1
		python3 -m zipfile -e "$kvd"/wheels/kvd_vllm-*.whl "$HOME/k/site"
		cksum <"$bundle" >"$kvd/done"
	fi
	export PYTHONPATH="$HOME/k/site:${PYTHONPATH:-}"
fi
case " $* " in
*" --dry-run "*) ;;
*) python3 -c 'import kvd_vllm._kvd as k; print(k.version, k.__file__)' ;;
esac

part=${1:?a part: check, check-async, check-failed, check-failed-sync, check-failed-async, check-failed-hbm, check-weights, weights, part1, part2, pd, pd-hbm, push-hbm, peers-hbm, steps-hbm, check-pd, check-pd-hbm, check-peers-hbm, check-pd-tp, full, or names of configurations}
shift
case $part in
check) set -- check-v2 check-v1 "$@" ;;
check-async) set -- check-v2-async check-v1-async "$@" ;;
check-failed) set -- --engine-seconds 230 --shape llama1b failed-v{1,2}{,-plain}{,-graph} "$@" ;;
check-failed-sync) set -- --engine-seconds 230 --shape llama1b failed-v{1,2}{,-plain}{,-graph}-sync "$@" ;;
check-failed-async) set -- --engine-seconds 230 --shape llama1b failed-v{1,2}{,-plain}{,-graph}-async "$@" ;;
check-failed-hbm) set -- --engine-seconds 280 --prompts 12 --shape llama1b failed-v{1,2}{,-graph}{,-async}-hbm "$@" ;;
check-weights) set -- check-v2-weights check-v1-weights "$@" ;;
weights) set -- --models "$HOME/kvd-bench-models" --sizes '{"1030": 1}' weights-v2 "$@" ;;
part1) set -- --graph --rounds 3 kvd-v2 native-v2 ring-v2 lmcache-v2 "$@" ;;
part2) set -- --graph --rounds 3 kvd-v1 native-v1 ring-v1 disk-v1 disk-v2 "$@" ;;
full) set -- full-v1 full-v2 "$@" ;;
pd) set -- --graph pd-v2 pd-v1 "$@" ;;
pd-hbm) set -- --graph pd-v2-hbm pd-v1-hbm "$@" ;;
push-hbm) set -- --graph push-v2-hbm push-v1-hbm "$@" ;;
peers-hbm) set -- --graph peers-v2-hbm peers-v1-hbm "$@" ;;
steps-hbm) set -- --graph steps-v2-hbm steps-v1-hbm "$@" ;;
check-peers-hbm) set -- --shape llama1b check-v2-peers-hbm check-v1-peers-hbm "$@" ;;
check-pd-hbm) set -- --shape llama1b check-v2-pd-hbm check-v1-pd-hbm "$@" ;;
check-pd) set -- --shape llama1b check-v2-pd check-v1-pd "$@" ;;
check-pd-tp) set -- --shape llama1b check-v2-pd-tp2to1 check-v2-pd-tp1to2 "$@" ;;
*) set -- "$part" "$@" ;;
esac
exec python3 bench/gpu/vllm/bench.py --kvd "$kvd" --out "${OUT:-bench-out}" "$@"
