#include "llmc/parallel/rank_place.h"

#include <cstdlib>
#include <map>
#include <nlohmann/json.hpp>

#include "llmc/base/check.h"
#include "llmc/base/system/host.h"

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(RankPlace, host, local_rank, local_ranks, visible, visible_devices, index, name, id,
                                   bus)

namespace {

using Json = nlohmann::json;

// " (CUDA_VISIBLE_DEVICES=0,1)", or "" if it is not set.
std::string restriction(const RankPlace& place) {
    return place.visible_devices.empty() ? "" : " (CUDA_VISIBLE_DEVICES=" + place.visible_devices + ")";
}

std::string seen(const RankPlace& place) { return count_text(place.visible, "GPU") + restriction(place); }

RankPlace own_place(const World& world) {
    const char* visible = std::getenv("CUDA_VISIBLE_DEVICES");
    RankPlace place{.host = host_name(), .local_rank = world.local_rank, .local_ranks = world.local_ranks,
                    .visible = device::device_count(), .visible_devices = visible ? visible : ""};
    place.index = device_of_rank(place.local_rank, place.visible);
    const DeviceInfo info = device::device_info(place.index);
    if (place.index >= 0) place.name = info.name, place.id = info.id, place.bus = info.bus;
    return place;
}

}  // namespace

int device_of_rank(int local_rank, int visible) {
    if (visible == 1) return 0;
    return local_rank < visible ? local_rank : -1;
}

std::string placement_error(const std::vector<RankPlace>& places) {
    std::map<std::string, size_t> user;   // rank by GPU id
    for (size_t rank = 0; rank < places.size(); rank++) {
        const RankPlace& place = places[rank];
        const char* host = place.host.c_str();
        if (place.visible == 0)
            return strf("rank %zu: no usable GPU on host %s%s; this executable was built for CUDA, `make DEVICE=cpu` "
                        "builds the CPU one", rank, host, restriction(place).c_str());
        if (place.index < 0)
            return strf("%d ranks on host %s, but rank %zu sees %s there: start at most one rank per GPU",
                        place.local_ranks, host, rank, seen(place).c_str());
        const auto [other, first] = user.emplace(place.id, rank);
        if (first) continue;
        const RankPlace& theirs = places[other->second];
        return strf("ranks %zu (host %s) and %zu (host %s) are on the same GPU, %s %s: they see %s and %s; start one "
                    "rank per GPU, and let the launcher show all GPUs to every rank of a host or to each its own",
                    other->second, theirs.host.c_str(), rank, host, place.name.c_str(), place.bus.c_str(),
                    seen(theirs).c_str(), seen(place).c_str());
    }
    return "";
}

std::vector<std::string> placement_notes(const std::vector<RankPlace>& places) {
    std::vector<std::string> notes, order;
    std::map<std::string, std::string> hosts;
    for (size_t rank = 0; rank < places.size(); rank++) {
        std::string& text = hosts[places[rank].host];
        if (text.empty()) order.push_back(places[rank].host);
        text += strf("%s%zu on %s", text.empty() ? "" : ", ", rank, places[rank].bus.c_str());
    }
    for (const std::string& host : order) notes.push_back("ranks of host " + host + ": " + hosts[host]);
    for (size_t rank = 1; rank < places.size(); rank++) {
        if (places[rank].name == places[0].name) continue;
        notes.push_back(strf("WARNING: rank %zu has an %s and rank 0 an %s: every step takes as long as the slowest",
                             rank, places[rank].name.c_str(), places[0].name.c_str()));
        break;
    }
    return notes;
}

int place_rank(Comm& comm, std::vector<std::string>& notes) {
    if (device::device_info(-1).toolkit.empty()) return 0;   // all ranks share the CPU
    const RankPlace mine = own_place(comm.world());
    std::vector<RankPlace> places;
    for (const std::string& text : comm.gather(Json(mine).dump())) places.push_back(Json::parse(text).get<RankPlace>());
    const std::string error = placement_error(places);
    REQUIRE(error.empty(), "%s", error.c_str());
    if (places.size() > 1)
        for (std::string& note : placement_notes(places)) notes.push_back(std::move(note));
    return mine.index;
}
