// Exchanges heads between the ranks that share sequences (context parallelism). Each sequence is split into equal
// parts, in the order of these ranks. A null pointer to a HeadExchange means that a rank has whole sequences.
#pragma once
#include "llmc/ops/device.h"

class HeadExchange {
public:
    virtual ~HeadExchange() = default;
    int64_t ranks() const { return ranks_; }
    int64_t rank() const { return rank_; }

    // out, in: (sequences, ranks, ...) of any dtype. Block r of a sequence of out = block rank() of the same sequence
    // of rank r's in. layer: for hang reports.
    virtual void all_to_all(Ctx& ctx, int layer, int64_t sequences, Tensor out, Tensor in) = 0;

protected:
    HeadExchange(int64_t ranks, int64_t rank) : ranks_(ranks), rank_(rank) {}

private:
    const int64_t ranks_, rank_;
};
