// Arguments of torchrun, deepspeed, accelerate launch and mpirun.
R"json([
  {"keys": "nproc_per_node", "when": "auto gpu cpu", "other": "one rank per GPU: scripts/launch/launch_mpi.sh -np N"},
  {"keys": "nproc_per_node num_gpus", "read": "integer", "keep": "per_node",
    "fact": "ranks per host: scripts/launch/launch_mpi.sh -np N"},
  {"keys": "nnodes num_nodes num_machines", "read": "integer", "keep": "nodes",
    "fact": "hosts: --hostfile of scripts/launch/launch_mpi.sh"},
  {"keys": "np n num_processes", "read": "integer", "keep": "ranks",
    "fact": "ranks: scripts/launch/launch_mpi.sh -np N"},
  {"keys": ["node_rank master_addr master_port rdzv* max_restarts local-ranks-filter tee redirects log_dir ",
            "main_process_ip main_process_port machine_rank include hostfile oversubscribe standalone"],
    "other": "ranks find each other through MPI: scripts/launch/launch_mpi.sh --hostfile, or Slurm"},
  {"keys": "config_file", "other": "a second file about the same run: import_config takes both in one call",
    "error": 7},
  {"keys": "mixed_precision use_deepspeed use_fsdp multi_gpu",
    "other": "the launcher's choice; precision is fp8-recipe and dtype, sharding is zero"},
  {"keys": "m", "other": "the program that is launched; here it is train_gpt2 or train_llama"}
])json"
