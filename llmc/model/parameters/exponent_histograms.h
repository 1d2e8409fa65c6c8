// Histograms of the binary exponents of x, weight and dy of linears before the cast to FP8 (--fp8-stats histograms or
// shadow). They are collected in the last micro-batch of the steps that --fp8-stats-interval selects.
//
// Tensors are numbered: x of every linear in the order of the model, then dy of each, then the weights.
#pragma once
#include <string>
#include <vector>

#include "llmc/model/parameters/fp8_recipe.h"
#include "llmc/ops/arena.h"
#include "llmc/ops/ops.h"

struct ExponentHistogram {
    std::string name;   // "3.down.dy"
    Fp8Role role;
    uint32_t amax_bits = 0;
    std::vector<uint64_t> bins;   // see CountExponentsArgs
    uint64_t values() const;      // number of values in all bins
};

class ExponentHistograms {
public:
    // Takes memory from the arena for the linears in FP8 (histograms), for all linears but the head (shadow), or none.
    ExponentHistograms(const Config& config, const Fp8Plan& plan, Arena& arena);

    bool on() const { return !tensors_.empty(); }
    int number(int linear) const { return on() ? by_plan_[static_cast<size_t>(linear)] : -1; }   // -1: not collected

    // Clears the histograms if this step `collects`.
    void begin_step(Ctx& ctx, bool collects);
    // Whether the next micro-batch is the last one of a training step; add() does nothing in others.
    void set_last_micro_batch(bool last) { last_ = last; }
    bool collects(int number) const { return collects_ && last_ && number >= 0; }
    // Adds the x or dy of a linear, in bf16 or fp32.
    void add(Ctx& ctx, int number, Fp8Role role, const Tensor& in);
    // Adds elements of a parameter, if it is the weight of a linear that has a number.
    void add_weight(Ctx& ctx, int param, const Tensor& in);

    // ---- reports, in pinned host memory
    int64_t report_bytes() const { return memory_.bytes(); }
    void copy_report(Ctx& ctx, void* host) const;              // enqueues the copy if this step collects
    void merge_report(void* host, const void* other) const;    // adds another rank's counts, takes the larger amaxes
    std::vector<ExponentHistogram> read_report(const void* host) const;

private:
    struct Tensors {
        std::string name;
        Fp8Role role;
    };
    void count(Ctx& ctx, int tensor, const Tensor& in);

    std::vector<int> by_plan_;   // by linear of the plan: its number, -1: none
    std::vector<int> weights_;   // by number: the parameter
    std::vector<Tensors> tensors_;
    Tensor memory_;              // uint64 (tensors, kExponentBins), then uint32 (tensors): amaxes
    bool collects_ = false, last_ = false;
};
