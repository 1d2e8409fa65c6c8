# Build of the trainer; `make help` lists the targets.
#
#   DEVICE=cpu|cuda    which device to build for: into build/cpu or build/cuda, which live side by side
#   ARCH=90a           GPU architecture, if not that of this machine's GPU
#   WERROR=            do not fail on warnings (a compiler newer than the tested ones may know more of them)
#   CPPFLAGS, LDFLAGS  extra include and library folders
#   CCACHE=ccache      compile through a cache
#   UNITY=0            compile each file alone, see UNITED
#   VARIANT=asan|tsan  the same build under sanitizers, into build/cpu-asan ...

SHELL := /bin/bash
.DEFAULT_GOAL := all
.DELETE_ON_ERROR:
.SUFFIXES:

# Use all processors, unless the command line has -j.
ifeq ($(MAKELEVEL),0)
MAKEFLAGS += -j$(shell nproc) --no-print-directory
endif

CXX := $(if $(filter default,$(origin CXX)),g++,$(CXX))
WERROR ?= -Werror

# Targets that install packages and then call make again, or that compile nothing, skip the detection of the machine.
comma := ,
WRAPPERS := smoke test test-full test-ranks test-gpu drill cluster-test image-test bench cuda lint clean help
ifneq ($(filter-out $(WRAPPERS),$(or $(MAKECMDGOALS),all)),)
include dev/ci/detect.mk
BUILDING := 1
endif

# ---- flags -------------------------------------------------------------------------------------------------
SAN_asan := -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer -g
SAN_tsan := -fsanitize=thread -g
BUILD := build/$(DEVICE)$(addprefix -,$(VARIANT))
OBJ := $(BUILD)/obj
# Folders that do not depend on the device (dev/ci/lint.py sees to that) are compiled once for both.
NO_DEVICE := llmc/base/% llmc/config/% llmc/cpu/% llmc/data/% llmc/fault/%
HOST := build/host$(addprefix -,$(VARIANT))

WARNINGS := -Wall -Wextra $(WERROR)
# Fixed instruction set and no contraction: the CPU device gives the same bits on every machine. Nobody reads errno
# after a square root, and without errno loops with square roots are vectorized.
# The thread sanitizer does not know OpenMP's barriers, so that build runs without it.
CODEGEN := -march=x86-64-v3 -ffp-contract=off -fno-math-errno \
           $(if $(filter tsan,$(VARIANT)),-Wno-unknown-pragmas,-fopenmp)
DEFINES := -I. -DJSON_USE_IMPLICIT_CONVERSIONS=0 $(CPPFLAGS)
LIBS := $(LDFLAGS)
LLMC_CXX := $(filter-out llmc/cuda/%,$(wildcard llmc/*/*.cpp llmc/*/*/*.cpp))
LLMC_CUDA :=

ifeq ($(DEVICE),cuda)
LLMC_CUDA += $(wildcard llmc/cuda/*.cu llmc/cuda/*.cpp)
DEVICE_DEFINES := -DLLMC_CUDA $(if $(filter 90a,$(ARCH)),-DLLMC_SM90A)
# The system's own folder must keep its place in the order of search.
CUDA_INCLUDE := $(addprefix -isystem ,$(filter-out /usr/include,$(CUDA_INC)))
LIBS += -L$(CUDA_LIB) -Wl,-rpath,$(CUDA_LIB) -lcublasLt -lcudart_static -ldl -lrt
endif

# Several ranks are optional: without the library the files are left out. Only these sources ask for it, so that the
# others stay as they are if it is installed later.
MPI_USERS := llmc/parallel/comm/% llmc/parallel/all.cpp llmc/commands/main.cpp llmc/commands/all.cpp \
             llmc/commands/doctor/% tests/end_to_end/%
MPI_FLAGS := -DLLMC_MPI=0
MPI_LIBS :=
ifneq ($(MPI_VERSION),)
ifneq ($(wildcard llmc/parallel/comm/comm_mpi.cpp),)
MPI_FLAGS := -DLLMC_MPI=1 $(patsubst -I%,-isystem %,$(shell $(MPICXX) --showme:compile))
MPI_LIBS := $(shell $(MPICXX) --showme:link)
endif
endif
ifeq ($(MPI_LIBS),)
LLMC_CXX := $(filter-out llmc/parallel/comm/comm_mpi.cpp,$(LLMC_CXX))
endif

# Options, JSON, logs and tests run rarely and take long to optimise (-Og takes three quarters of the time of -O1); the
# operations are what a step on the CPU consists of. No result depends on the level.
RARELY_RUN := llmc/config/%.cpp llmc/checkpoint/%.cpp llmc/commands/%.cpp llmc/train/%.cpp llmc/fault/%.cpp \
              llmc/perf/%.cpp llmc/cpu/device.cpp tests/base/%.cpp tests/gpu/%.cpp tests/ops/%.cpp \
              tests/support/%.cpp
# Tests that compute next to nothing are not optimised at all.
NEVER_HOT := tests/config/%.cpp tests/checkpoint/%.cpp tests/commands/%.cpp tests/data/%.cpp tests/fault/%.cpp \
             tests/composition/%.cpp tests/model/%.cpp tests/parallel/%.cpp tests/perf/%.cpp tests/train/%.cpp
SOURCE = $(patsubst $(OBJ)/%,%,$(patsubst $(HOST)/%,%,$<))
OPTIMISE = $(or $(if $(filter asan tsan,$(VARIANT)),-O1),$(if $(filter $(NEVER_HOT),$(SOURCE)),-O0),\
                $(if $(filter $(RARELY_RUN),$(SOURCE)),-Og),\
                $(if $(filter llmc/cpu/%,$(SOURCE)),-O3),-O2)
# g++ collects its garbage at 1 GB instead of 128 MB, which takes a twelfth less time.
COLLECT := $(if $(findstring clang,$(CXX)),,--param ggc-min-heapsize=1000000)
CXX_FLAGS = -std=c++20 $(OPTIMISE) $(CODEGEN) $(COLLECT) -fmacro-prefix-map=./= \
            $(WARNINGS) $(DEFINES) $(if $(filter $(MPI_USERS),$(SOURCE)),$(MPI_FLAGS)) $(DEVICE_DEFINES) \
            $(CUDA_INCLUDE) $(SAN_$(VARIANT))
CODE ?= sm_$(ARCH)
# A build for compute_* (PTX alone) is never run: its purpose is what the compiler's front end reports.
NVCC_STAGE := $(if $(filter compute_%,$(CODE)),-ptx -Xcicc -O1,-c)
# Kernels are tuned so that the newest compiler spills no register; older ones spill a few.
SPILLS := $(if $(filter-out 12,$(CUDA_MAJOR)),-Xptxas --warn-on-spills)
NVCC_FLAGS := -std=c++20 -O3 -gencode=arch=compute_$(ARCH),code=$(CODE) -lineinfo -cudart static \
              $(DEFINES) $(DEVICE_DEFINES) \
              $(if $(filter 90a,$(ARCH)),$(SPILLS)) \
              -ccbin $(CXX) -Xcompiler $(subst $() ,$(comma),$(strip $(WARNINGS) $(CODEGEN))) \
              $(if $(WERROR),-Werror all-warnings)

# Fuzzers need libFuzzer, which comes with clang++.
FUZZ_CXX ?= clang++
FUZZ_SRC := $(LLMC_CXX)
FUZZ_OBJ := $(FUZZ_SRC:%.cpp=$(OBJ)/fuzz/%.o)
FUZZ_FLAGS := -std=c++20 -O1 -g -march=x86-64-v3 -ffp-contract=off -Wno-unknown-pragmas $(DEFINES) $(DEVICE_DEFINES) \
              -fno-sanitize-recover=all
FUZZ_COMPILE := $(FUZZ_CXX) $(FUZZ_FLAGS) -fsanitize=fuzzer-no-link,address,undefined

# A change in these texts, for example of ARCH, rebuilds everything.
FLAGS_TEXT := $(CXX) $(CXX_VERSION) $(CXX_FLAGS) $(NVCC) $(NVCC_VERSION) $(NVCC_FLAGS) $(LIBS) $(FUZZ_COMPILE)
HOST_FLAGS_TEXT := $(CXX) $(CXX_VERSION) $(RARELY_RUN) $(CODEGEN) $(WARNINGS) $(DEFINES) $(SAN_$(VARIANT))

# ---- files -------------------------------------------------------------------------------------------------
MAINS := $(basename $(wildcard train_*.cu))
# The files of each folder and its subfolders are compiled as one, since most of the time goes to the headers that they
# share. Their anonymous namespaces are then one, too. UNITY=0 compiles each file alone, which is faster if one changes
# often. Builds with sanitizers do so, too, since sanitizers slow the compiler down most in large files.
UNITY ?= $(if $(VARIANT),0,1)
TEST_CXX := $(wildcard tests/*/test_*.cpp)
GPU_TEST_CXX := $(wildcard tests/gpu/gpu_test_*.cpp)
# Tests replace the first two; the others include declarations of another library, and a model beside operations.
ALONE := llmc/cpu/stream.cpp llmc/ops/ops.cpp tests/gpu/gpu_test_nccl_api.cpp tests/gpu/gpu_test_fast_paths.cpp
SOURCES := $(LLMC_CXX) $(TEST_CXX) $(if $(filter cuda,$(DEVICE)),$(GPU_TEST_CXX))
folder = $(subst $() ,/,$(wordlist 1,2,$(subst /, ,$(1))))
UNITED := $(if $(filter-out 0,$(UNITY)),$(sort $(foreach f,$(SOURCES),$(call folder,$f))))
# g++ reports whatever uses an anonymous namespace of an included file.
UNITED_FLAGS := $(if $(findstring clang,$(CXX)),,-Wno-subobject-linkage)
# The folder as whose part a source is compiled, or nothing.
united = $(if $(filter $(ALONE),$(1)),,$(filter $(UNITED),$(call folder,$(1))))
object = $(if $(call united,$(1)),$(call united,$(1))/all.o,$(basename $(1)).o)
# $(call objects,ROOT,SOURCES): the objects of these sources in the folder ROOT.
objects = $(sort $(foreach f,$(2),$(1)/$(call object,$f)))
ONCE := $(filter-out $(ALONE),$(filter $(NO_DEVICE),$(LLMC_CXX)))
# If several objects have the same inline function, the first one's is linked, so the operations come first.
LLMC_OBJ := $(call objects,$(HOST),$(filter llmc/cpu/%,$(ONCE))) \
            $(call objects,$(OBJ),$(filter llmc/ops/%,$(LLMC_CXX))) \
            $(call objects,$(HOST),$(filter-out llmc/cpu/%,$(ONCE))) \
            $(call objects,$(OBJ),$(filter-out $(ONCE) llmc/ops/%,$(LLMC_CXX)) $(LLMC_CUDA)) \
            $(BUILD)/version.o $(BUILD)/hf_code.o
# What the compiler reads for them: a file for each united folder, and the other files.
LLMC_SYNTAX := $(foreach o,$(filter %/all.o,$(LLMC_OBJ)),$(o:.o=.cpp)) \
               $(foreach f,$(LLMC_CXX),$(if $(call united,$f),,$f))
TEST_OBJ := $(OBJ)/tests/support/main.o $(call objects,$(OBJ),$(TEST_CXX))
GPU_TEST_OBJ := $(OBJ)/tests/support/main.o $(call objects,$(OBJ),$(GPU_TEST_CXX))
# The objects of the trainer for tests, in which the CPU's streams defer their work.
TEST_LLMC_OBJ := $(filter-out $(OBJ)/llmc/cpu/stream.o $(OBJ)/llmc/ops/ops.o,$(LLMC_OBJ)) \
                 $(OBJ)/tests/support/deferred_stream.o
BENCHES := $(patsubst dev/bench/%.cu,$(BUILD)/%,$(wildcard dev/bench/bench_*.cu))
FUZZERS := $(patsubst tests/fuzz/%.cpp,%,$(wildcard tests/fuzz/fuzz_*.cpp))

.PHONY: all syntax $(MAINS) tests tests_gpu benches cuda_all cuda_kernels fuzzers $(WRAPPERS) force
all: $(MAINS)

# The executables at the top are links to those of the device built last.
$(MAINS): %: $(BUILD)/%
	@[ "$$(readlink $@)" = "$<" ] || ln -sfn $< $@

tests: $(BUILD)/tests
tests_gpu: $(BUILD)/tests_gpu
benches: $(BENCHES)
fuzzers: $(addprefix $(BUILD)/,$(FUZZERS))
# A library that replaces NVML in tests.
FAKE_NVML := $(BUILD)/fake/libnvidia-ml.so.1
# The executables in which tests inject faults (tests/support/faults.cpp).
FAULTY := $(addprefix $(BUILD)/faults/,$(MAINS))
# For tests of several ranks: the check of collectives, and on the CPU a library that replaces NCCL.
RANK_TESTS := $(BUILD)/comm_check $(if $(and $(MPI_LIBS),$(filter cpu,$(DEVICE))),$(BUILD)/fake/libnccl.so.2 \
	$(BUILD)/fake/no_threads.so $(BUILD)/fake/sleeping_yield.so)
cuda_kernels: $(patsubst %.cu,$(OBJ)/%.o,$(filter %.cu,$(LLMC_CUDA)))
cuda_all: $(BUILD)/comm_check $(addprefix $(BUILD)/,$(MAINS)) tests_gpu $(BENCHES)

# ---- rules -------------------------------------------------------------------------------------------------
define LINK
@echo "LINK $@"
@$(CXX) $(CODEGEN) $(SAN_$(VARIANT)) $(filter %.o %.a,$^) -o $@ $(LIBS) $(MPI_LIBS)
endef
$(addprefix $(BUILD)/,$(MAINS)): $(BUILD)/%: $(OBJ)/%.o $(LLMC_OBJ)
	$(LINK)
$(FAULTY): $(BUILD)/faults/%: $(OBJ)/%.o $(OBJ)/tests/support/faults.o $(LLMC_OBJ)
	@mkdir -p $(@D)
	$(LINK)
$(BUILD)/tests: $(TEST_LLMC_OBJ) $(TEST_OBJ) | $(FAKE_NVML)
	$(LINK)
$(BUILD)/tests_gpu: $(TEST_LLMC_OBJ) $(GPU_TEST_OBJ)
	$(LINK)
$(BUILD)/comm_check: $(OBJ)/tests/end_to_end/comm_check.o $(LLMC_OBJ)
	$(LINK)
$(BUILD)/fake/libnccl.so.2: tests/end_to_end/fake_nccl.cpp llmc/parallel/comm/comm_nccl_api.h $(BUILD)/flags
	@mkdir -p $(@D); echo "LINK $@"
	@$(CXX) $(CXX_FLAGS) -shared -fPIC $< -o $@ $(LIBS) $(MPI_LIBS)
$(FAKE_NVML): tests/support/fake_nvml.cpp $(BUILD)/flags
	@mkdir -p $(@D); echo "LINK $@"
	@$(CXX) $(CXX_FLAGS) -shared -fPIC $< -o $@
$(BUILD)/fake/%.so: tests/end_to_end/%.cpp $(BUILD)/flags
	@mkdir -p $(@D); echo "LINK $@"
	@$(CXX) $(CXX_FLAGS) -shared -fPIC $< -o $@
$(BENCHES): $(BUILD)/%: $(OBJ)/dev/bench/%.o $(LLMC_OBJ)
	$(LINK)

$(OBJ)/%.o: %.cpp $(BUILD)/flags
	@mkdir -p $(@D); echo "CXX $<"
	@$(CCACHE) $(CXX) $(CXX_FLAGS) -MMD -MP -c $< -o $@

$(OBJ)/%/all.o: $(OBJ)/%/all.cpp $(BUILD)/flags
	@echo "CXX $*/*.cpp"
	@$(CCACHE) $(CXX) $(CXX_FLAGS) $(UNITED_FLAGS) -MMD -MP -c $< -o $@

$(HOST)/%.o: DEVICE_DEFINES :=
$(HOST)/%.o: CUDA_INCLUDE :=
$(HOST)/%.o: %.cpp $(HOST)/flags
	@mkdir -p $(@D); echo "CXX $<"
	@$(CCACHE) $(CXX) $(CXX_FLAGS) -MMD -MP -c $< -o $@
$(HOST)/%/all.o: $(HOST)/%/all.cpp $(HOST)/flags
	@echo "CXX $*/*.cpp"
	@$(CCACHE) $(CXX) $(CXX_FLAGS) $(UNITED_FLAGS) -MMD -MP -c $< -o $@

ifeq ($(DEVICE),cuda)
# The assembler reports these losses of speed as notes, which no option turns into errors.
NVCC_LOSSES := Potential Performance Loss|wgmma.*serializ|setmaxnreg.*ignored
$(OBJ)/%.o: %.cu $(BUILD)/flags
	@mkdir -p $(@D); echo "NVCC $<"
	@$(CCACHE) $(NVCC) $(NVCC_FLAGS) -MMD -MP -MF $(@:.o=.d) -MT $@ $(NVCC_STAGE) $< -o $@ > $(@:.o=.log) 2>&1; \
	 status=$$?; cat $(@:.o=.log) >&2; [ $$status = 0 ] || exit $$status; \
	 if grep -qE '$(NVCC_LOSSES)' $(@:.o=.log); then echo "$<: a note above says that speed is lost" >&2; exit 1; fi
else
# The mains are plain C++ without CUDA.
$(OBJ)/%.o: %.cu $(BUILD)/flags
	@mkdir -p $(@D); echo "CXX $<"
	@$(CCACHE) $(CXX) $(CXX_FLAGS) -MMD -MP -x c++ -c $< -o $@
endif

# These are rewritten only when their content changes.
ifdef BUILDING
write_flags = $(shell mkdir -p $(dir $(1)); echo '$(subst ','\'',$(2))' | cmp -s - $(1) \
                      || echo '$(subst ','\'',$(2))' > $(1))
$(call write_flags,$(BUILD)/flags,$(FLAGS_TEXT))$(call write_flags,$(HOST)/flags,$(HOST_FLAGS_TEXT))
$(call write_flags,$(HOST)/mpi_flags,$(MPI_FLAGS) $(MPI_LIBS))
$(BUILD)/flags $(HOST)/flags $(HOST)/mpi_flags: ;
$(filter $(foreach source,$(MPI_USERS:.cpp=.o),$(OBJ)/$(source) $(HOST)/$(source)),$(LLMC_OBJ) $(TEST_OBJ)) \
$(OBJ)/tests/end_to_end/comm_check.o $(FAULTY) \
$(addprefix $(BUILD)/,$(MAINS) tests tests_gpu comm_check): $(HOST)/mpi_flags
INCLUDES := \#include "%s"\n
write_united = $(shell mkdir -p $(1); printf '$(INCLUDES)' $(2) | cmp -s - $(1)/all.cpp \
                       || printf '$(INCLUDES)' $(2) > $(1)/all.cpp)
$(foreach f,$(UNITED),$(call write_united,$(if $(filter $(NO_DEVICE),$f/),$(HOST),$(OBJ))/$f,$(strip \
    $(foreach source,$(SOURCES),$(if $(filter $f,$(call united,$(source))),$(source))))))
# The image has no .git: there the commit comes from LLMC_COMMIT (Dockerfile). The commit of a repository that encloses
# this folder says nothing.
COMMIT := $(or $(shell GIT_CEILING_DIRECTORIES='$(abspath ..)' git describe --always --abbrev=12 --dirty 2>/dev/null),\
            $(LLMC_COMMIT),unknown)
VERSION_TEXT := \#include "llmc/base/version.h"\nconst char* const kBuildCommit = "$(COMMIT)";\n
$(shell printf '$(VERSION_TEXT)' | cmp -s - $(BUILD)/version.cpp || printf '$(VERSION_TEXT)' > $(BUILD)/version.cpp)
HF_CODE := llmc/checkpoint/huggingface/hf_code
$(BUILD)/hf_code.cpp: $(HF_CODE)/configuration_llmfp8.py $(HF_CODE)/modeling_llmfp8.py
	@{ for name in configuration modeling; do \
	       echo "extern const char* const k$${name^}Llmfp8;"; printf 'const char* const k%sLlmfp8 = R"py(' "$${name^}"; \
	       cat $(HF_CODE)/$${name}_llmfp8.py; echo ')py";'; done; } > $@
$(BUILD)/version.o $(BUILD)/hf_code.o: %.o: %.cpp $(BUILD)/flags llmc/base/version.h
	@$(CXX) $(CXX_FLAGS) -c $< -o $@
endif

# Fuzzers are built apart, see FUZZ_COMPILE.
$(OBJ)/fuzz/%.o: %.cpp $(BUILD)/flags $(HOST)/mpi_flags
	@mkdir -p $(@D); echo "FUZZ $<"
	@$(CCACHE) $(FUZZ_COMPILE) $(MPI_FLAGS) -MMD -MP -c $< -o $@
# An archive: each fuzzer links only what it reaches.
$(BUILD)/fuzz.a: $(FUZZ_OBJ)
	@rm -f $@; ar rcs $@ $^
$(addprefix $(BUILD)/,$(FUZZERS)): $(BUILD)/%: $(OBJ)/fuzz/tests/fuzz/%.o $(BUILD)/fuzz.a
	@echo "LINK $@"
	@$(FUZZ_CXX) -fsanitize=fuzzer,address,undefined $^ -o $@ $(MPI_LIBS)

# Checks the host code with another compiler, without generating code: make CXX=clang++ syntax
syntax:
	@printf '%s\n' $(LLMC_SYNTAX) | xargs -P $(shell nproc) -n 1 $(CXX) $(CXX_FLAGS) $(MPI_FLAGS) \
		$(UNITED_FLAGS) -fsyntax-only
	@echo "$(words $(LLMC_CXX)) files compile with $(CXX)"

# ---- what people call --------------------------------------------------------------------------------------
smoke:
	@scripts/setup.sh smoke
	@$(MAKE) all
	@python3 scripts/smoke.py

test:
	@scripts/setup.sh test
	@$(MAKE) --keep-going run-test

# The executables come first: tests in Python run them while those in C++ are still being compiled.
run-test: run-test-python run-test-cpp $(if $(filter cuda,$(DEVICE)),run-test-gpu)
run-test-python: $(MAINS) $(FAULTY) $(RANK_TESTS)
	@echo "RUN tests/run.py"; LLMC_BUILD=$(CURDIR)/$(BUILD) python3 tests/run.py $(TEST_NAMES)
run-test-cpp: $(BUILD)/tests
	@echo "RUN $<"; dev/ci/cpp_tests.sh $<

# The tests of several ranks depend on the system's MPI more than others.
test-ranks:
	@scripts/setup.sh test
	@$(MAKE) run-test-python TEST_NAMES="test_ranks test_zero_ranks test_context_ranks test_comm end_to_end.test_watch \
	    test_doctor test_troubleshooting"

# As in dev/ci/detect.mk, a device file also counts.
test-gpu:
	@[ -e /dev/nvidia0 ] || nvidia-smi -L >/dev/null 2>&1 || { echo "make test-gpu: no GPU is found (nvidia-smi -L);" \
	    "\`make test\` tests the CPU, \`make cuda\` compiles the CUDA code without a GPU" >&2; exit 2; }
	@scripts/setup.sh test
	@$(MAKE) DEVICE=cuda run-test-gpu
run-test-gpu: $(BUILD)/tests_gpu
	@$(BUILD)/tests_gpu

cluster-test:
	+@dev/ci/cluster_test.sh

test-full:
	@scripts/setup.sh test
	@$(MAKE) --keep-going run-test
	+@dev/ci/test_full.sh

drill:
	@scripts/setup.sh test
	@$(MAKE) all $(FAULTY)
	@LLMC_BUILD=$(CURDIR)/$(BUILD) python3 tests/drill/run.py

image-test:
	+@dev/ci/image_test.sh $(SUITE)

bench:
	@$(MAKE) DEVICE=cuda train_gpt2 train_llama benches
	@dev/bench/bench.sh $(OUT)

# Other architectures have no special kernels, but their build must also give a program. Spilled registers are no error
# there, since kernels are tuned for sm_90a.
cuda:
	@$(MAKE) DEVICE=cuda ARCH=90a cuda_all
	@# PTX alone, in a tenth of the time: what an older GPU lacks is found before the assembler.
	@$(MAKE) DEVICE=cuda ARCH=80 CODE=compute_80 VARIANT=sm80 cuda_kernels

lint:
	@python3 dev/ci/lint.py

clean:
	rm -rf build train_gpt2 train_llama

help:
	@sed -n '/^#   /s/^#//p' Makefile; echo
	@echo "  make                  train_gpt2 and train_llama for this machine's device"
	@echo "  make smoke            install what is missing, build, train two small models on a made-up text"
	@echo "  make test             install what is missing, build, run the device's tests (5 to 8 minutes on two cores)"
	@echo "  make test-full        also sanitizers, fuzzing, the long tests, cluster-test and image-test"
	@echo "  make test-ranks       of the tests, those of several processes over this system's MPI"
	@echo "  make drill            2,600 random trials: kills, hostile input (up to an hour)"
	@echo "  make cluster-test     training on two hosts under Slurm and ssh (6 minutes); as root, installs them"
	@echo "  make image-test       the Dockerfile on a base of its own, and make smoke in it; needs root, no registry;"
	@echo "                        SUITE=jammy takes another Ubuntu than 24.04"
	@echo "  make test-gpu         the CUDA operations against the CPU ones; needs a GPU"
	@echo "  make cuda             compile all CUDA code for sm_90a, where spills are errors, and the kernels for sm_80;"
	@echo "                        needs the toolkit, no GPU"
	@echo "  make bench            every kernel and whole steps against this GPU's ceilings, into OUT=bench-DATE;"
	@echo "                        MODELS='gpt2 small 8b' RECIPES='bf16 delayed tensorwise 1F1L blockwise' choose"
	@echo "  make lint             the rules of the code's structure"
	@echo "  make clean            remove what was built"

ifdef BUILDING
-include $(shell find $(BUILD) $(HOST) -name '*.d')
endif
