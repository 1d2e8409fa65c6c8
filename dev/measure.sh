#!/bin/bash
# Measures the published rows on so many GPUs of this machine: dev/measure.sh [GPUS [FOLDER]]; measure.py says more.
exec python3 "$(dirname "$0")/measure.py" "$@"
