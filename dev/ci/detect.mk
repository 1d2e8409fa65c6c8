# What this machine has; included by the Makefile. Sets CXX_VERSION, HEADERS, NVCC, CUDA_{DIR,INC,LIB,USABLE},
# MPICXX, GPU, ARCH and DEVICE, and prints them as one table (TABLE=0: not).

CXX_VERSION := $(shell $(CXX) -dumpfullversion 2>/dev/null)

# One preprocessor run answers which headers exist, wherever CPPFLAGS or the system keeps them. (A variable, since make
# before 4.3 wants the # within a function escaped, and make from 4.3 on hands the escape to the shell.)
HASH := \#
HEADERS := $(shell printf '$(HASH)if __has_include(<%s>)\n%s\n$(HASH)endif\n' nlohmann/json.hpp nlohmann/json \
             xxhash.h xxhash doctest/doctest.h doctest \
             | $(CXX) $(CPPFLAGS) -E -P -x c++ - 2>/dev/null)

# The newest toolkit under /usr/local when PATH has none.
NVCC := $(or $(shell command -v nvcc 2>/dev/null),$(shell ls -d /usr/local/cuda*/bin/nvcc 2>/dev/null | sort -V \
          | tail -n 1))
ifneq ($(NVCC),)
LIB64 := /usr/lib/x86_64-linux-gnu
NVCC_VERSION := $(shell $(NVCC) --version | sed -n 's/.*release.*, V\([0-9.]*\).*/\1/p')
CUDA_DIR := $(patsubst %/bin/,%,$(dir $(realpath $(NVCC))))
CUDA_INC := $(patsubst %/cublasLt.h,%,$(firstword $(wildcard $(addsuffix /cublasLt.h,$(CUDA_DIR)/include \
              $(CUDA_DIR)/targets/x86_64-linux/include /usr/include))))
CUDA_LIB := $(patsubst %/libcublasLt.so,%,$(firstword $(wildcard $(addsuffix /libcublasLt.so,$(CUDA_DIR)/lib64 \
              $(CUDA_DIR)/targets/x86_64-linux/lib $(CUDA_DIR)/lib $(LIB64)))))
# sm_90a and C++20 need a toolkit of 12 or newer, the matmuls cuBLASLt.
CUDA_MAJOR := $(firstword $(subst ., ,$(NVCC_VERSION)) 0)
CUDA_USABLE := $(and $(CUDA_INC),$(CUDA_LIB),$(shell [ $(CUDA_MAJOR) -ge 12 ] && echo yes))
endif

# The folder in which the dynamic loader finds it, unless LD_LIBRARY_PATH says otherwise.
NCCL := $(or $(shell ldconfig -p 2>/dev/null | sed -n 's/.*libnccl\.so\.2 .*=> //p' | head -n 1),\
          $(wildcard $(CUDA_LIB)/libnccl.so.2))

# "NVIDIA H200, 9.0". The device file only shows that there is a GPU, not which one.
GPU_QUERY := $(shell nvidia-smi --query-gpu=name,compute_cap --format=csv,noheader 2>/dev/null | head -n 1 \
               | grep ', *[0-9]*\.[0-9]*$$')
GPU := $(or $(GPU_QUERY),$(wildcard /dev/nvidia0))
GPU_ARCH := $(shell echo '$(GPU_QUERY)' | sed -n 's/.*, *\([0-9]*\)\.\([0-9]\)$$/\1\2/p')
# From 9.0 on the suffix "a" lets kernels use instructions that only this architecture has.
ARCH ?= $(or $(if $(GPU_ARCH),$(GPU_ARCH)$(if $(filter 1,$(shell echo $$(($(GPU_ARCH) >= 90)))),a)),90a)

MPICXX := $(shell command -v mpicxx 2>/dev/null)
MPI_VERSION := $(if $(MPICXX),$(shell $(MPICXX) --showme:version 2>/dev/null \
                 | sed -n 's/.*Open MPI \([0-9.]*[0-9]\).*/\1/p'))

DEVICE_FOUND := $(if $(and $(GPU),$(CUDA_USABLE)),cuda,cpu)
DEVICE ?= $(DEVICE_FOUND)
ifeq ($(filter cpu cuda,$(DEVICE)),)
$(error DEVICE=$(DEVICE): choose cpu or cuda)
endif
ifeq ($(DEVICE)$(CUDA_USABLE),cuda)
$(error DEVICE=cuda needs nvcc 12 or newer and cuBLASLt, in PATH or /usr/local/cuda*; found nvcc \
        "$(NVCC)" $(NVCC_VERSION), cublasLt.h in "$(CUDA_INC)", libcublasLt.so in "$(CUDA_LIB)")
endif

found = $(if $(filter $(1),$(HEADERS)),yes,no)
DEVICE_WHY := $(if $(filter command% environment%,$(origin DEVICE)),asked for,$(if $(GPU),a GPU,no GPU)$(comma) \
                $(if $(CUDA_USABLE),a CUDA toolkit,no CUDA toolkit of version 12 or newer with cuBLASLt))
TABLE ?= 1
ifeq ($(TABLE),1)
$(info what the build found)
$(info $()  compiler       $(if $(CXX_VERSION),$(CXX) $(CXX_VERSION),no))
$(info $()  nvcc           $(if $(NVCC),$(NVCC_VERSION) $(NVCC),no))
$(info $()  CUDA           $(or $(CUDA_DIR),no))
$(info $()  GPU            $(or $(GPU),no))
$(info $()  architecture   sm_$(ARCH))
$(info $()  NCCL           $(or $(NCCL),no) (opened by several ranks on GPUs, not needed to build))
$(info $()  OpenMPI        $(if $(MPICXX),$(MPI_VERSION) $(MPICXX),no))
$(info $()  nlohmann/json  $(call found,nlohmann/json))
$(info $()  xxhash         $(call found,xxhash))
$(info $()  doctest        $(call found,doctest))
$(info $()  device         $(DEVICE) ($(DEVICE_WHY)))
endif

MISSING := $(filter-out $(HEADERS),nlohmann/json xxhash)
ifneq ($(MISSING),)
$(error missing: $(MISSING); install with scripts/setup.sh, or name their include folder in CPPFLAGS=-I...)
endif
