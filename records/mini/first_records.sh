#!/bin/bash
# Makes and files the first two records of mini: ten runs of each of two recipes, in turns. About 25 minutes on
# two quiet cores. If it is interrupted, the same command goes on. Words that follow are options of every run.
set -e
cd "$(dirname "$0")/../.."
may="--muon_beta2 0 --xsa false --smear false --relu_slope 0 --num_iterations 408 --val_loss_every 51"
mini="--val_loss_every 45"
logs=logs/first_records

train() { # side, seed, options
    [ -d "$logs/$1/$2" ] && return
    rm -rf $logs/part
    started=$(date -u "+%F %T.%6N")
    ./run.sh --track mini --seed "$2" --log_dir $logs/part "${@:3}"
    echo "started: $started" >> $logs/part/*.txt # so that submit sees that they took turns
    mkdir -p "$logs/$1"
    mv $logs/part "$logs/$1/$2"
}

for seed in $(seq 0 2 8); do
    train may "$seed" $may "$@"
    train mini "$seed" $mini "$@"
    train mini $((seed + 1)) $mini "$@"
    train may $((seed + 1)) $may "$@"
done
./run.sh submit --track mini --name "May 2025 in miniature" $logs/may/* \
    --what "The recipe of \`fineweb\` in miniature: record 23 of the NanoGPT speedrun, with four layers of width 64."
./run.sh submit --track mini --name "NorMuon, smear, XSA, leaky ReLU" $logs/mini/* \
    --what "Four later ideas: NorMuon (record 41), smear (34), XSA (82), and a leaky ReLU squared."
