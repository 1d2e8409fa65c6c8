# The trainer on NVIDIA's CUDA image. Without a GPU it builds and runs on the CPU.
#
#   docker build -t llm.fp8 --build-arg COMMIT=$(git describe --always --abbrev=12 --dirty) .
#   docker run --rm --gpus all llm.fp8                  make smoke
#   docker run --rm --gpus all llm.fp8 make test
FROM nvidia/cuda:13.0.1-devel-ubuntu24.04

# In a container one is root, which mpirun refuses unless both of these are set.
ENV DEBIAN_FRONTEND=noninteractive OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
WORKDIR /llm.fp8

# Packages first: this layer stays while the sources change.
COPY scripts/setup.sh scripts/
RUN scripts/setup.sh test && apt-get update && apt-get install -y --no-install-recommends make git \
    && rm -rf /var/lib/apt/lists/*

# .git stays outside, so the executables learn from this what they were built from.
ARG COMMIT=unknown
ENV LLMC_COMMIT=$COMMIT
COPY . .
CMD ["make", "smoke"]
