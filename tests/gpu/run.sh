#!/usr/bin/env bash
# Everything that needs an NVIDIA GPU, on a machine where nothing can be installed from a network:
#
#   tests/gpu/run.sh [tests|sanitize|bench|all] [WHEELS] [TESTS]
#
# WHEELS is a folder of wheels to use beside what the machine's python3 has (nvCOMP, zstandard, xxhash, …); TESTS is
# what pytest is given (default: tests). Results go to $OUT, or to bench/results.
set -euo pipefail
cd "$(dirname "$0")/../.."
what=${1:-all}
wheels=${2:-}
tests=${3:-}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

mkdir -p "$work/path/tidegate"
for file in engine/*; do ln -s "$PWD/$file" "$work/path/tidegate/"; done
ln -s "$PWD/codec" "$PWD/storage" "$work/path/tidegate/"
export PYTHONPATH="$work/path:$PWD" PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
if [ -n "$wheels" ]; then
  python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target "$work/site" "$wheels"/*.whl
  PYTHONPATH="$PYTHONPATH:$work/site"
fi
out=${OUT:-bench/results}

if [ "$what" = tests ] || [ "$what" = all ]; then
  python3 -m pytest -m gpu -q --maxfail 20 --timeout 240 --durations 5 --tb short -p no:cacheprovider \
    --junitxml="$out/gpu-tests.xml" "${tests:-tests}"
fi
if [ "$what" = sanitize ] || [ "$what" = all ]; then
  PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 9 --target-processes all \
    python3 -m pytest -m gpu -q --timeout 500 -p no:cacheprovider "${tests:-tests/gpu}" -k small
fi
if [ "$what" = bench ] || [ "$what" = all ]; then
  python3 -m bench.gpu_save --folder "$work"
fi
