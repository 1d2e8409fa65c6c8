# Read by train.sbatch and train_mpirun.sbatch: ranks and GPUs of a job, by the options of sbatch.

# The sum of counts like 8, h200:8, gpu (that is one) or a100:4,h200:4.
count_gpus() {
    local part sum=0
    for part in ${1//,/ }; do
        part=${part##*:}
        case $part in *[!0-9]*) part=1 ;; esac
        sum=$((sum + part))
    done
    echo "$sum"
}

# GPUs of a node are those that --gpus-per-node, --gres or --gpus asks for, or else all that the job has there. No
# variable has what --gres asks for.
gpus=$(count_gpus "${SLURM_GPUS_PER_NODE:-$(scontrol show job "$SLURM_JOB_ID" | grep -o 'TresPerNode=[^ ]*' |
                                            grep -o 'gpu[^, ]*')}")
if [ "$gpus" = 0 ] && [ -n "${SLURM_GPUS:-}" ]; then
    gpus=$(($(count_gpus "$SLURM_GPUS") / SLURM_NNODES))
    if [ $((gpus * SLURM_NNODES)) != "$(count_gpus "$SLURM_GPUS")" ]; then
        echo "error: --gpus $SLURM_GPUS on $SLURM_NNODES nodes: give sbatch --gpus-per-node N instead" >&2
        exit 2
    fi
elif [ "$gpus" = 0 ] && [ -z "${SLURM_GPUS_PER_TASK:-}" ] && [ -n "${SLURM_GPUS_ON_NODE:-}" ]; then
    gpus=$SLURM_GPUS_ON_NODE
    export SLURM_GPUS_PER_NODE=$gpus   # srun's option: a step has only GPUs that were asked for
fi

# Ranks are those of --ntasks-per-node or --ntasks, or else one for each GPU.
if [ -z "${SLURM_NTASKS:-}" ]; then
    if [ "$gpus" = 0 ]; then
        echo "error: the job has no GPUs: give sbatch --gpus-per-node N, or --ntasks-per-node N for ranks on CPUs" >&2
        exit 2
    fi
    export SLURM_NTASKS_PER_NODE=$gpus SLURM_NTASKS=$((gpus * SLURM_NNODES))   # srun's options
    export SLURM_TASKS_PER_NODE="$gpus(x$SLURM_NNODES)"                        # mpirun's slots
fi
