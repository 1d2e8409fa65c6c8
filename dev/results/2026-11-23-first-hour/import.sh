torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 \
    --num-attention-heads 32 --group-query-attention --num-query-groups 8 --seq-length 8192 \
    --max-position-embeddings 8192 --micro-batch-size 1 --global-batch-size 128 --train-iters 5000 --lr 3e-4 \
    --lr-decay-style cosine --bf16 --fp8-format hybrid --fp8-recipe delayed --swiglu --normalization RMSNorm \
    --position-embedding-type rope --use-distributed-optimizer --tensor-model-parallel-size 2 --sequence-parallel \
    --use-mcore-models --tensorboard-dir tb
