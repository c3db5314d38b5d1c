#!/usr/bin/env bash
# All that is to be known of a GPU: first that it computes what the CPU computes, then how fast. 25 minutes on an H100.
#
#   bench/gpu.sh FOLDER          parity.log, a log and a row of each measurement, and the rows of docs/benchmarks.md
#   BUDGET=550 bench/gpu.sh FOLDER       in pieces: what a former call with this FOLDER has found is not measured again
#   ONLY=speed bench/gpu.sh FOLDER       or ONLY=parity
#   DEVICE=cpu SHAPES=tiny CHOICES= ROUNDS=1 PAGE=copy.md bench/gpu.sh FOLDER    the same program without a GPU
#
# Rows come in the order of their worth, each with a limit of its own; those for which BUDGET (seconds) has no room are
# named. They stand in PAGE between `<!-- gpu.sh -->` and `<!-- end -->`, as soon as each is found; on a CPU no page is
# written unless it is named. Exit status 1 if a number is wrong or a row could not be measured, 2 if packages are missing.
set -uo pipefail
folder=${1:?usage: bench/gpu.sh FOLDER}
device=${DEVICE:-cuda} rounds=${ROUNDS:-4} budget=${BUDGET:-1500} failed=0
shapes=${SHAPES:-"pythia-160m pythia-1.4b pythia-410m mamba2-70m"}
choices=${CHOICES-"fp8 graphs varlen fa3"} chosen=${CHOICE_SHAPE:-pythia-160m}
declare -A samples=([pythia-160m]=16 [pythia-410m]=8 [pythia-1.4b]=4 [mamba2-70m]=8) # 80 GB hold three contenders
documents=(data.synthetic=copy data.reset_attention_at_eod=true tokenizer.eod_id=0)
mkdir -p "$folder/rows" && folder=$(cd "$folder" && pwd)
page=$(realpath "${PAGE:-/dev/null}")
cd "$(dirname "$0")/.." || exit 2
name=$device
python3 -c 'import deepspeed, pydantic, pytest, safetensors, torch, transformers, xdist, yaml' || exit 2

within() { # LIMIT COMMAND...: at most so many seconds, and no more than are left
    local left=$((budget - SECONDS))
    ((left > 20)) || return 125
    timeout --signal="${SIGNAL:-TERM}" --kill-after=15 "$(($1 < left ? $1 : left))" "${@:2}"
}

write_page() {
    python3 -m bench gpu-rows "$folder/rows" >"$folder/speed.md"
    [[ -f $page && -s $folder/speed.md ]] || return 0
    awk -v rows="$folder/speed.md" -v name="$name" '
        $0 == "<!-- gpu.sh -->" { print; while ((getline row < rows) > 0) print row; print "\n" name "."; inside = 1; next }
        $0 == "<!-- end -->" { inside = 0 }
        !inside' "$page" >"$folder/page.md" && cp "$folder/page.md" "$page"
}

row() { # NAME LIMIT SHAPE WORDS...: unless there is one
    local found="$folder/rows/$1.json" log="$folder/$1.log"
    [[ ! -s $found ]] || return 0
    within "$2" python3 -m bench train-step "${@:4}" --device "$device" --shapes "$3" --steps 5 \
        --rounds "$rounds" --sequence "${SEQUENCE:-2048}" --micro-batch "${samples[$3]:-2}" --json >"$found.part" 2>"$log"
    case $? in
        0) tail -n 1 "$found.part" >"$found" && write_page ;;
        124 | 137) failed=1 && echo "$1: not done in time, see $log" >&2 ;;
        125) failed=1 && echo "$1: no time is left" >&2 ;;
        *) failed=1 && echo "$1: see $log" >&2 ;;
    esac
    rm -f "$found.part"
}

if [[ $device == cuda ]]; then
    [[ -n ${PAGE:-} ]] || page=$PWD/docs/benchmarks.md
    name=$(python3 -c 'import torch; print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")') || exit 2
    if [[ ${ONLY:-parity} == parity && ! -e $folder/parity.passed ]]; then
        # One thread each. Interrupted, not ended, pytest says what it has found.
        SIGNAL=INT OMP_NUM_THREADS=1 TORCHINDUCTOR_COMPILE_THREADS=1 within 480 python3 -m pytest -v -n 10 \
            -p no:cacheprovider tests/gpu >"$folder/parity.log" 2>&1 && touch "$folder/parity.passed" || failed=1
        grep -E '^(FAILED|ERROR) ' "$folder/parity.log"
        echo "parity: $(grep -c ' PASSED ' "$folder/parity.log") passed, $(grep -c ' FAILED ' "$folder/parity.log") failed;" \
            "$(tail -n 1 "$folder/parity.log")"
    fi
fi
if [[ ${ONLY:-speed} == speed ]]; then
    for shape in $shapes; do
        row "$shape" 300 "$shape" --contenders ours compiled
        [[ $shape == "$chosen" ]] || continue
        for choice in $choices; do
            if [[ $choice == fa3 ]] && ! python3 -c 'import flash_attn_interface' 2>/dev/null; then
                echo "$chosen-fa3: not measured, FlashAttention 3 (flash_attn_interface) is not installed"
                continue
            fi
            more=() && [[ $choice == varlen ]] && more=("${documents[@]}")
            row "$chosen-$choice" 150 "$chosen" "${more[@]}" --contenders ours "ours-$choice"
        done
    done
    write_page
    cat "$folder/speed.md"
fi
exit $failed
