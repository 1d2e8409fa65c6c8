#include "llmc/checkpoint/state_access.h"

#include <algorithm>

std::vector<ElementRange> held_within(const StateAccess& access, int index, const ElementRange& all) {
    if (all.count == 0) return {};
    if (!access.held) return {all};
    std::vector<ElementRange> parts;
    for (const ElementRange& held : access.held(index)) {
        const int64_t begin = std::max(held.begin, all.begin);
        const int64_t end = std::min(held.begin + held.count, all.begin + all.count);
        if (begin < end) parts.push_back({begin, end - begin});
    }
    return parts;
}
