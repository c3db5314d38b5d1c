#!/usr/bin/env bash
# All that is to be known of a GPU: first that it computes what the CPU computes, then how fast. 25 minutes on an H100.
#
#   tools/bench/gpu.sh FOLDER          parity.log, speed.md, written as rows are found, and the rows of docs/performance.md
#   DEVICE=cpu SHAPES=tiny ROUNDS=1 PAGE=copy.md tools/bench/gpu.sh FOLDER     the same program without a GPU
#
# The rows stand in PAGE between `<!-- gpu.sh -->` and `<!-- end -->`; on a CPU no page is written unless it is named.
# Exit status 1 if a number is wrong or a row could not be measured.
set -uo pipefail
folder=${1:?usage: tools/bench/gpu.sh FOLDER}
device=${DEVICE:-cuda} rounds=${ROUNDS:-4} failed=0
shapes=${SHAPES:-"pythia-160m pythia-410m pythia-1.4b mamba2-70m"}
declare -A samples=([pythia-160m]=16 [pythia-410m]=8 [pythia-1.4b]=4 [mamba2-70m]=8)  # 80 GB hold three contenders
mkdir -p "$folder" && folder=$(cd "$folder" && pwd)
page=$(realpath "${PAGE:-/dev/null}")
cd "$(dirname "$0")/../.."
name=$device

if [[ $device == cuda ]]; then
    [[ -n ${PAGE:-} ]] || page=docs/performance.md
    name=$(python3 -c 'import torch; print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")')
    timeout 600 python3 -m pytest -n 10 -p no:cacheprovider tests/gpu >"$folder/parity.log" 2>&1 || failed=1
    tail -n 1 "$folder/parity.log"
fi
: >"$folder/speed.md"
for shape in $shapes; do
    log="$folder/$shape.log"
    timeout 300 python3 tools/bench/train_step.py --device "$device" --shapes "$shape" --sequence "${SEQUENCE:-2048}" \
        --micro-batch "${samples[$shape]:-2}" --steps 5 --rounds "$rounds" --contenders ours compiled >"$log" 2>&1 ||
        { failed=1 && echo "$shape: see $log" >&2; }
    grep '^|' "$log" | if [[ -s $folder/speed.md ]]; then tail -n 1; else cat; fi >>"$folder/speed.md"
done
cat "$folder/speed.md"
if [[ -f $page && -s $folder/speed.md ]]; then
    awk -v rows="$folder/speed.md" -v name="$name" '
        $0 == "<!-- gpu.sh -->" { print; while ((getline row < rows) > 0) print row; print "\n" name "."; inside = 1; next }
        $0 == "<!-- end -->" { inside = 0 }
        !inside' "$page" >"$folder/page.md" && cp "$folder/page.md" "$page"
fi
exit $failed
