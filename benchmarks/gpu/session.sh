#!/usr/bin/env bash
# The first minutes on a machine with a GPU: correctness first (before all, whether a captured graph
# and the host can hand over), then speed, everything written down.
#
#   benchmarks/gpu/session.sh OUT [build|smoke|tests|bench|accelerate|llama]...     (default: all, in this order)
#
# Needs python3 with torch (CUDA), transformers, triton and the build tools; no network. Each part
# has a limit of its own, and what it prints is in OUT as it comes. A part that fails does not keep
# the next from running, except the build; within smoke the first failing stage ends it.
set -u
out=${1:?say where the results go}; shift
parts=${*:-build smoke tests bench accelerate llama}
python=${PYTHON:-python3}
shape=${SHAPE:-qwen3-30b-a3b}
mkdir -p "$out"
failed=0
export PYTHONUNBUFFERED=1 TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-$PWD/build/triton}

run() { # name, limit in seconds, command...
    local name=$1 limit=$2; shift 2
    echo "== $name ($(date +%T), at most $limit s)"
    timeout "$limit" "$@" >"$out/$name.log" 2>&1
    local code=$?
    tail -n 15 "$out/$name.log"
    echo "== $name: exit code $code"
    [ $code = 0 ] || failed=1
    return $code
}

for part in $parts; do
    case $part in
        build) run build 200 "$python" -m pip install -q --no-build-isolation --no-deps --no-index -e . || exit 1 ;;
        smoke) run smoke 360 "$python" -m benchmarks.gpu.smoke ;;
        tests) run tests 400 "$python" -m pytest tests/gpu -q --timeout=120 ;;
        bench) run bench 470 "$python" -m benchmarks.gpu --shape "$shape" --out "$out/$shape.json" ${BENCH_OPTIONS:-} ;;
        accelerate) run accelerate 120 "$python" -m benchmarks.gpu.accelerate_offload --shape "$shape" ;;
        llama) run llama 300 "$python" -m benchmarks.gpu.llama_cpp --shape "$shape" ;;
        *) echo "unknown part: $part (build, smoke, tests, bench, accelerate, llama)"; exit 2 ;;
    esac
done
exit $failed
