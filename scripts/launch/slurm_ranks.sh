# Read by train.sbatch and train_mpirun.sbatch: ranks and GPUs of a job, by the options of sbatch.

# Values are checked before any arithmetic, in which bash would run the $(commands) of a value like a[$(command)].
# count_of VARIABLE VALUE: VALUE, if it is a count from 1.
count_of() {
    [[ $2 =~ ^[1-9][0-9]{0,5}$ ]] && echo "$2" && return
    echo "error: $1=${2@Q}: not a count from 1; unset $1, or let Slurm set it" >&2
    exit 2
}
# The sum of counts like 8, h200:8, gpu (that is one) or a100:4,h200:4.
count_gpus() {
    local part parts sum=0
    IFS=, read -ra parts <<< "${1//$'\n'/,}"
    for part in "${parts[@]}"; do
        part=${part##*:}
        [[ $part =~ ^[0-9]{1,6}$ ]] || part=1
        sum=$((sum + 10#$part))
    done
    echo "$sum"
}

nodes=$(count_of SLURM_NNODES "${SLURM_NNODES:-}") || exit 2
# GPUs of a node are those that --gpus-per-node, --gres or --gpus asks for, or else all that the job has there. No
# variable has what --gres asks for.
gpus=$(count_gpus "${SLURM_GPUS_PER_NODE:-$(scontrol show job "$SLURM_JOB_ID" | grep -o 'TresPerNode=[^ ]*' |
                                            grep -o 'gpu[^, ]*')}")
if [ "$gpus" = 0 ] && [ -n "${SLURM_GPUS:-}" ]; then
    gpus=$(($(count_gpus "$SLURM_GPUS") / nodes))
    if [ $((gpus * nodes)) != "$(count_gpus "$SLURM_GPUS")" ]; then
        echo "error: --gpus $SLURM_GPUS on $nodes nodes: give sbatch --gpus-per-node N instead" >&2
        exit 2
    fi
elif [ "$gpus" = 0 ] && [ -z "${SLURM_GPUS_PER_TASK:-}" ] && [ "${SLURM_GPUS_ON_NODE:-0}" != 0 ]; then
    gpus=$(count_of SLURM_GPUS_ON_NODE "$SLURM_GPUS_ON_NODE") || exit 2
    export SLURM_GPUS_PER_NODE=$gpus   # srun's option: a step has only GPUs that were asked for
fi

# Ranks are those of --ntasks-per-node or --ntasks, or else one for each GPU.
if [ -z "${SLURM_NTASKS:-}" ]; then
    if [ "$gpus" = 0 ]; then
        echo "error: the job has no GPUs: give sbatch --gpus-per-node N, or --ntasks-per-node N for ranks on CPUs" >&2
        exit 2
    fi
    export SLURM_NTASKS_PER_NODE=$gpus SLURM_NTASKS=$((gpus * nodes))   # srun's options
    export SLURM_TASKS_PER_NODE="$gpus(x$nodes)"                        # mpirun's slots
fi
