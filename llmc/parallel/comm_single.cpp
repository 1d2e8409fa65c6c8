// A group of one rank: nothing is exchanged.
#include <cstdlib>

#include "llmc/parallel/comm.h"

namespace {

class SingleComm : public Comm {
public:
    SingleComm() : Comm({}) {}
    std::vector<std::string> gather(const std::string& mine) override { return {mine}; }
    void sum(Ctx&, Tensor) override {}
    void max(Ctx&, uint32_t*, int64_t) override {}
    void reduce_scatter(Ctx&, Tensor) override {}
    void all_gather(Ctx&, Tensor) override {}
    void all_to_all(Ctx& ctx, Tensor out, Tensor in) override {
        device::copy_on_device(ctx, out.data, in.data, in.bytes());
    }
    [[noreturn]] void abort(int exit_code) override { std::exit(exit_code); }
};

}  // namespace

std::unique_ptr<Comm> open_single() { return std::make_unique<SingleComm>(); }
