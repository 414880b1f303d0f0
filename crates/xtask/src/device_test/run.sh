#!/usr/bin/env bash
# Runs the tests and benchmarks of the CUDA back end and writes RESULTS/report.md and its parts.
# Needs what this folder holds, the NVIDIA driver and cuBLASLt; no Rust, no network.
#
#   ./run.sh [RESULTS]        environment: ONLY="tests sanitize generate bench" picks parts,
#                             RUNS is the number of timed runs of a benchmark (default 3)
set -u
here=$(cd "$(dirname "$0")" && pwd)
results=${1:-$here/results}
only=${ONLY:-tests sanitize generate bench}
mkdir -p "$results"
results=$(cd "$results" && pwd)
export XDG_CACHE_HOME=$results/cache ENGINE_HOST_KERNELS=$here/kernels
model=$(ls "$here"/*.gguf 2>/dev/null | head -1)
[ -n "$model" ] && export ENGINE_HOST_MODEL=$model
report=$results/report.md
failures=0

say() { echo "$@" | tee -a "$report"; }

config() { # FILE DEVICE MAX_BATCH MAX_TOKENS PAGES MAX_LEN [MORE]
    cat > "$1" <<EOF
[engine]
${7:-}
device = "$2"
plugin_dirs = ["$here/plugins"]
max_batch = $3
max_batch_tokens = $4
max_model_len = $6
[model]
path = "$model"
[resources.main_kv]
kind = "kv"
nodes = ["decoder"]
page_size = 16
pages = $5
[resources.attn]
kind = "attention"
nodes = ["decoder"]
kv_cache = "main_kv"
[resources.pos]
kind = "positions"
nodes = ["decoder"]
kv_cache = "main_kv"
[resources.sampler]
kind = "sampler"
nodes = ["decoder"]
EOF
}

: > "$report"
say "# $(nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null | head -1 || echo 'no GPU'), $(date -u +%F)"
say
say "Driver $(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -1)," \
    "engine-host $("$here/engine-host" --version 2>/dev/null | cut -d' ' -f2), commit $(cat "$here/commit")."

if [[ " $only " == *" tests "* ]]; then
    say; say "## Tests"; say; say "| test | passed | failed | seconds |"; say "|---|---|---|---|"
    for test in "$here"/tests/*; do
        name=$(basename "$test"); start=$SECONDS
        timeout 240 "$test" --ignored --test-threads=1 --nocapture --skip llama_cpp > "$results/$name.log" 2>&1
        code=$?
        [ $code -eq 0 ] || failures=$((failures + 1))
        counts=$(grep -o '[0-9]* passed; [0-9]* failed' "$results/$name.log" | tail -1)
        passed=${counts%% passed*}; failed=${counts##*; }
        say "| $name | ${passed:-?} | ${failed%% failed} $([ $code -eq 0 ] || echo "(exit $code)") | $((SECONDS - start)) |"
    done
    say; say "Pages to the host and back:"; say; sed -n 's/.*\( \|^\)\([0-9]* pages of.*GB\/s.*\)/- \2/p' "$results"/*cuda_tiers.log | tee -a "$report"
fi

if [[ " $only " == *" sanitize "* ]] && command -v compute-sanitizer > /dev/null; then
    say; say "## compute-sanitizer"; say; say "| tool | of | result |"; say "|---|---|---|"
    check() { # TOOL EXECUTABLE TEST...
        local log=$results/$1-$2.log
        # racecheck warns of reads behind a barrier that counts bytes, which it does not follow.
        # It takes the copies of a ring that fills again once its readers have arrived at a barrier for races.
        local race="--racecheck-detect-level error --kernel-name-exclude kns=decode_step"
        timeout 150 compute-sanitizer --tool "$1" $([ "$1" = racecheck ] && echo $race) \
            --error-exitcode 9 "$here/tests/$2" --ignored --test-threads=1 "${@:3}" > "$log" 2>&1
        local code=$?
        [ $code -eq 0 ] || failures=$((failures + 1))
        say "| $1 | $2 ${*:3} | $(grep -o 'ERROR SUMMARY.*\|RACECHECK SUMMARY.*' "$log" | tail -1) $([ $code -eq 0 ] || echo "(exit $code)") |"
    }
    check memcheck model-decoder a_replayed_step batch_invariant_logits a_step_of_few
    check memcheck device-cuda_attention columns_that
    check memcheck device-cuda_products products_of_few
    check memcheck device-cuda_attention divided
    check memcheck resource-kv-cuda requests_leave handed_over
    check memcheck resource-kv-cuda_reuse a_thousand
    check memcheck engine-host-cuda_engine leaving_the
    check racecheck model-decoder a_replayed_step
fi

if [[ " $only " == *" generate "* && -n "$model" ]]; then
    config "$results/cuda.toml" cuda:0 64 2048 4096 2048
    config "$results/cpu.toml" cpu 64 512 4096 2048
    for i in 1 2 3 4; do
        prompt=$(sed -n "${i}p" "$here/prompts.txt")
        echo "{\"id\": \"$i\", \"prompt\": \"$prompt\", \"max_tokens\": 32, \"temperature\": 0, \"logprobs\": 2}"
    done > "$results/requests.jsonl"
    for device in cpu cuda; do
        timeout 180 "$here/engine-host" generate --config "$results/$device.toml" \
            --prompts "$results/requests.jsonl" --output "$results/$device.jsonl" > "$results/generate-$device.log" 2>&1 \
            || { failures=$((failures + 1)); say; say "generate on $device failed: $(tail -1 "$results/generate-$device.log")"; }
    done
    say; say "## Greedy text, CPU and CUDA"; say; say '```'
    for device in cpu cuda; do
        sed -n 's/.*"id":"\([^"]*\)".*"text":"\(\([^"\\]\|\\.\)*\)".*/'$device' \1: \2/p' "$results/$device.jsonl" | tee -a "$report"
    done
    say '```'

    # Alone and launch by launch what was together and replayed.
    config "$results/together.toml" cuda:0 64 2048 4096 2048 "batch_invariant = true"
    config "$results/alone.toml" cuda:0 64 7 4096 2048 $'batch_invariant = true\ncuda_graphs = false'
    ids() { sed -n 's/.*"id":"\([^"]*\)".*"ids":\(\[[0-9,]*\]\).*/\1 \2/p' "$1"; }
    timeout 180 "$here/engine-host" generate --config "$results/together.toml" --prompts "$results/requests.jsonl" \
        --output "$results/together.jsonl" > "$results/together.log" 2>&1
    : > "$results/alone.jsonl"
    while read -r request; do
        echo "$request" > "$results/one.jsonl"
        timeout 60 "$here/engine-host" generate --config "$results/alone.toml" --prompts "$results/one.jsonl" \
            --output "$results/one.out" >> "$results/alone.log" 2>&1 && cat "$results/one.out" >> "$results/alone.jsonl"
    done < "$results/requests.jsonl"
    lines=$(ids "$results/together.jsonl" | wc -l)
    say
    if [ "$lines" -eq 4 ] && [ "$(ids "$results/together.jsonl")" = "$(ids "$results/alone.jsonl")" ]; then
        say "batch_invariant: the tokens of 4 requests together, replayed, are those of each alone, launch by launch, its prompt divided otherwise."
    else
        failures=$((failures + 1)); say "batch_invariant: FAILED, see together.jsonl and alone.jsonl."
    fi
fi

if [[ " $only " == *" bench "* && -n "$model" ]]; then
    say; say "## Tokens per second"; say; say '```'
    config "$results/bench.toml" cuda:0 256 4096 16384 8000
    for what in "" "--random-weights qwen3-0.6b" "--random-weights llama-3.1-8b"; do
        timeout 240 "$here/engine-host" bench model --config "$results/bench.toml" --runs "${RUNS:-3}" $what \
            > "$results/bench.log" 2>&1 || failures=$((failures + 1))
        cat "$results/bench.log" | tee -a "$report"
        say
    done
    say '```'
fi
exit $((failures > 0))
