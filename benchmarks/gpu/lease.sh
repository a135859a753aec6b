#!/usr/bin/env bash
# Two calls of at most eight minutes each on a GPU that is lent for a quarter of an hour: bash benchmarks/gpu/lease.sh 1 (then 2).
# docs/gpu.md says what to carry there. Results are in $OUT (runs/gpu where it is not set), a page (gpu.md) beside them. A call goes
# on where an earlier one ended if its files are carried along as runs/gpu (results.jsonl, stages-N.zip).
# The start of the machine and what travels take two or three of fifteen minutes: --minutes 4 fits call 2 into what is left.
set -eu
cd "$(dirname "$0")/../.."
out=${OUT:-runs/gpu}
python=${GPU_PYTHON:-python3}
mkdir -p "$out"
for file in runs/gpu/results.jsonl runs/gpu/stages-*.zip; do
  if [ -f "$file" ] && [ ! -f "$out/${file##*/}" ]; then
    cp "$file" "$out"
  fi
done
packages=()
if [ -d runs/gpu-packages ]; then
  packages=(--packages runs/gpu-packages)
fi
case "${1:-}" in
  1) # most valuable first: is it right, then the recipe that ships, then speed beside others, then evaluation
    only=(machine proof/devices proof/packing proof/resume shipped proof "train/8B full" "train/8B QLoRA" eval
      attention "train/1B full" options)
    minutes=7.5 ;;
  2) # a real model reads the company's documents: as many trainings of recipes/studies/real.yaml as there is time for
    only=(machine real)
    minutes=7.5 ;;
  *)
    echo "usage: bash benchmarks/gpu/lease.sh 1|2 [further options of benchmarks/gpu/run.py, as --tiny]" >&2
    exit 2 ;;
esac
shift
exec "$python" benchmarks/gpu/run.py --results "$out" --page "$out/gpu.md" --minutes "$minutes" "${packages[@]}" --only "${only[@]}" "$@"
