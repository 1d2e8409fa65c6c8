#include "llmc/gathered_state.h"

#include <cstring>
#include <map>

#include "llmc/check.h"

StateAccess gather_state(Comm& comm, const ParamTable& table, const StateAccess& access) {
    if (!access.held) return access;
    auto whole = std::make_shared<std::map<std::pair<StateKind, int>, std::string>>();
    auto bytes_of = [access](StateKind kind) {
        if (kind == StateKind::kMaster) return dtype_bytes(Dtype::kFp32);
        return dtype_bytes(kind == StateKind::kWeight ? access.weight_dtype : access.moment_dtype);
    };
    for (size_t i = 0; i < table.params.size(); i++) {
        const int index = static_cast<int>(i);
        const int64_t elems = table.params[i].elems();
        access.collect_weight(index);
        std::string& weight = (*whole)[{StateKind::kWeight, index}];
        weight.resize(static_cast<size_t>(elems * bytes_of(StateKind::kWeight)));
        access.read(StateKind::kWeight, index, 0, elems, weight.data());
        for (StateKind kind : {StateKind::kMaster, StateKind::kMomentM, StateKind::kMomentV}) {
            std::string mine;
            for (const ElementRange& range : access.held(index)) {
                mine.resize(static_cast<size_t>(range.count * bytes_of(kind)));
                access.read(kind, index, range.begin, range.count, mine.data());
            }
            std::string& all = (*whole)[{kind, index}];
            for (const std::string& part : comm.gather(mine)) all += part;   // ranks hold ascending ranges
            CHECK(all.size() == static_cast<size_t>(elems * bytes_of(kind)), "parameter %d is not held whole", index);
        }
    }
    StateAccess gathered;
    gathered.weight_dtype = access.weight_dtype;
    gathered.moment_dtype = access.moment_dtype;
    gathered.read = [whole, bytes_of](StateKind kind, int index, int64_t begin, int64_t count, void* host) {
        const std::string& bytes = whole->at({kind, index});
        std::memcpy(host, bytes.data() + begin * bytes_of(kind), static_cast<size_t>(count * bytes_of(kind)));
    };
    return gathered;
}
