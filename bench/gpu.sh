#!/usr/bin/env bash
# All that is to be known of a GPU: first that it computes what the CPU computes, then how fast. 25 minutes on an H100.
#
#   bench/gpu.sh FOLDER          parity.log, a log and a row of each measurement, and the rows of docs/benchmarks.md
#   BUDGET=550 bench/gpu.sh FOLDER       in pieces: a call continues the former ones with this FOLDER. Rows that are there
#                                        are not measured again, and tests that have passed are not run again
#   ONLY=speed bench/gpu.sh FOLDER       or ONLY=parity
#   DEVICE=cpu SHAPES=tiny CHOICES= ROUNDS=1 PAGE=copy.md bench/gpu.sh FOLDER    the same program without a GPU
#
# Rows come in the order of their worth, each with a limit of its own. Rows for which BUDGET (seconds) has no room are
# named. They stand in PAGE between `<!-- gpu.sh -->` and `<!-- end -->`, as soon as each is found. On a CPU no page is
# written unless it is named. Exit status 1 if a number is wrong, or if a test or a row is left, 2 if packages are missing.
set -uo pipefail
folder=${1:?usage: bench/gpu.sh FOLDER}
device=${DEVICE:-cuda} rounds=${ROUNDS:-4} budget=${BUDGET:-1500} failed=0
shapes=${SHAPES:-"pythia-1.4b pythia-160m mamba2-370m rwkv7-70m pythia-410m mamba2-70m"}
choices=${CHOICES-"fp8 graphs varlen fa3"} chosen=${CHOICE_SHAPE:-pythia-160m}
declare -A samples=([pythia-160m]=16 [pythia-410m]=8 [pythia-1.4b]=4 [mamba2-70m]=8 [mamba2-370m]=4 [rwkv7-70m]=8)
declare -A kept=([mamba2-370m]=fla [rwkv7-70m]=fla) several=([pythia-1.4b]=4) # packages of kernels, micro-batches
documents=(data.synthetic=copy data.reset_attention_at_eod=true tokenizer.eod_id=0)
mkdir -p "$folder/rows" && folder=$(cd "$folder" && pwd)
page=$(realpath "${PAGE:-/dev/null}")
cd "$(dirname "$0")/.." || exit 2
name=$device
python3 -c 'import deepspeed, pydantic, pytest, safetensors, torch, transformers, xdist, yaml' || exit 2

within() { # LIMIT COMMAND...: at most LIMIT seconds, and no more than are left
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

parity() { # of every architecture and choice: the tests that no call with this folder has seen pass
    [[ ! -e $folder/parity.done ]] || return 0
    touch "$folder/parity.passed" && cp "$folder/parity.passed" "$folder/parity.before"
    # One thread each. Interrupted, not ended, pytest says what it has found.
    SIGNAL=INT OMP_NUM_THREADS=1 TORCHINDUCTOR_COMPILE_THREADS=1 PASSED_BEFORE=$folder/parity.before \
        PASSED=$folder/parity.passed within 480 python3 -m pytest -v -n 10 -p no:cacheprovider tests/gpu \
        >"$folder/parity.log" 2>&1
    local status=$?
    grep -E '^(FAILED|ERROR) ' "$folder/parity.log"
    echo "parity: $(wc -l <"$folder/parity.passed") passed in all calls; $(tail -n 1 "$folder/parity.log")"
    ((status == 0 || status == 5)) && touch "$folder/parity.done" # 5: no test is left
}

if [[ $device == cuda ]]; then
    [[ -n ${PAGE:-} ]] || page=$PWD/docs/benchmarks.md
    name=$(python3 -c 'import torch; print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")') || exit 2
    [[ ${ONLY:-parity} == parity ]] && { parity || failed=1; }
fi
if [[ ${ONLY:-speed} == speed ]]; then
    for shape in $shapes; do
        row "$shape" 300 "$shape" --contenders ours compiled
        [[ -z ${several[$shape]:-} ]] || # as a run has them: one update for several micro-batches
            row "$shape-accumulated" 200 "$shape" "training.accumulation=${several[$shape]}" --contenders ours ours-compiled
        [[ -z ${kept[$shape]:-} ]] || # by name: `auto` would take them for both
            row "$shape-${kept[$shape]}" 200 "$shape" "model.kernels=${kept[$shape]}" --contenders ours ours-torch
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
