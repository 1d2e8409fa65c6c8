// Before the first collective: GPU assignment, loading NCCL, slow links. comm_check.cpp tests the collectives.
#include "tests/support/doctest.h"


#include "llmc/parallel/comm/comm_benchmark.h"
#include "llmc/parallel/comm/comm_nccl_api.h"
#include "llmc/parallel/rank_place.h"

namespace {

bool has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

// Two hosts of two GPUs, a rank on each.
std::vector<RankPlace> four_places() {
    std::vector<RankPlace> places;
    for (int rank = 0; rank < 4; rank++) {
        RankPlace p;
        p.host = rank < 2 ? "north" : "south", p.local_rank = rank % 2, p.local_ranks = p.visible = 2;
        p.index = device_of_rank(p.local_rank, p.visible), p.name = "NVIDIA H200", p.id = "GPU-" + std::to_string(rank);
        p.bus = strf("0000:%02d:00.0", rank);
        places.push_back(p);
    }
    return places;
}

std::vector<std::vector<double>> even_rates(size_t ranks, double rate) {
    return std::vector<std::vector<double>>(ranks, std::vector<double>(ranks, rate));
}

void set_rate(std::vector<std::vector<double>>& rates, size_t a, size_t b, double rate) {
    rates[a][b] = rates[b][a] = rate;
}

}  // namespace

TEST_CASE("placement: a rank gets the GPU of its local rank, or the only visible one") {
    CHECK_EQ(device_of_rank(0, 8), 0);
    CHECK_EQ(device_of_rank(7, 8), 7);
    CHECK_EQ(device_of_rank(8, 8), -1);
    CHECK_EQ(device_of_rank(5, 1), 0);
    CHECK_EQ(device_of_rank(0, 0), -1);
}

TEST_CASE("placement: one note per host") {
    const auto places = four_places();
    CHECK_EQ(placement_error(places), "");
    const auto notes = placement_notes(places);
    REQUIRE_EQ(notes.size(), 2);
    CHECK_EQ(notes[0], "ranks of host north: 0 on 0000:00:00.0, 1 on 0000:01:00.0");
    CHECK_EQ(notes[1], "ranks of host south: 2 on 0000:02:00.0, 3 on 0000:03:00.0");
}

TEST_CASE("placement: an error names rank, host and visible GPUs") {
    auto places = four_places();
    places[3].visible = 0;
    places[3].index = -1;
    places[3].visible_devices = "-1";
    CHECK(has(placement_error(places), "rank 3: no usable GPU on host south (CUDA_VISIBLE_DEVICES=-1)"));

    places = four_places();
    places[3].local_rank = 2;
    places[3].local_ranks = 3;
    places[3].index = device_of_rank(2, 2);
    CHECK(has(placement_error(places), "3 ranks on host south, but rank 3 sees 2 GPUs there"));

    places = four_places();
    places[2].host = "a container of north";   // two hosts by name, one machine
    places[2].id = places[1].id;
    const std::string error = placement_error(places);
    CHECK(has(error, "ranks 1 (host north) and 2 (host a container of north) are on the same GPU, NVIDIA H200"));

    places = four_places();
    for (RankPlace& place : places) place.visible = 1, place.visible_devices = "0", place.index = 0;
    CHECK_EQ(placement_error(places), "");   // different GPUs with the same index
    places[1].id = places[0].id;
    CHECK(has(placement_error(places), "they see 1 GPU (CUDA_VISIBLE_DEVICES=0) and 1 GPU (CUDA_VISIBLE_DEVICES=0)"));
}

TEST_CASE("placement: GPUs of different kinds are a warning") {
    auto places = four_places();
    places[2].name = "NVIDIA H100 80GB HBM3";
    const auto notes = placement_notes(places);
    REQUIRE_EQ(notes.size(), 3);
    CHECK(has(notes[2], "WARNING: rank 2 has an NVIDIA H100 80GB HBM3 and rank 0 an NVIDIA H200"));
}

TEST_CASE("nccl: a library that is missing, or another one, is named with what to install") {
    nccl_api::Loaded loaded;
    const std::string missing = nccl_api::load("libno-such-nccl.so.2", loaded);
    CHECK(has(missing, "several ranks on GPUs need libno-such-nccl.so.2"));
    CHECK(has(missing, "install NCCL"));
    CHECK(has(nccl_api::load("libm.so.6", loaded), "libm.so.6 is not NCCL"));
    CHECK_EQ(nccl_api::version_text(nccl_api::kMinimumVersion), "2.16.2");
    CHECK_EQ(nccl_api::version_text(22809), "2.28.9");
    CHECK_EQ(nccl_api::version_text(2708), "2.7.8");
}

TEST_CASE("check-comm: slow links are named, and the rank that has most of them") {
    const std::vector<std::string> one_host(4, "north"), labels = {"A", "B", "C", "D"};
    auto rates = even_rates(4, 100);
    CHECK_EQ(slow_links(rates, one_host, labels), "");
    set_rate(rates, 1, 3, 71);
    CHECK_EQ(slow_links(rates, one_host, labels), "");
    set_rate(rates, 1, 3, 20);
    CHECK_EQ(slow_links(rates, one_host, labels),
             "WARNING: slow links, in GiB/s: 1-3 20.00 (usual 100.00); rank 1 (B) has 1 of them");
    set_rate(rates, 2, 3, 30);
    CHECK_EQ(slow_links(rates, one_host, labels), "WARNING: slow links, in GiB/s: 1-3 20.00 (usual 100.00), 2-3 30.00 "
             "(usual 100.00); rank 3 (D) has 2 of them");
}

TEST_CASE("check-comm: links between hosts are compared with each other") {
    const std::vector<std::string> hosts = {"a", "a", "b", "b"}, labels = hosts;
    auto rates = even_rates(4, 10);   // the network
    set_rate(rates, 0, 1, 100);
    set_rate(rates, 2, 3, 100);
    CHECK_EQ(slow_links(rates, hosts, labels), "");
    set_rate(rates, 0, 2, 5);
    CHECK_NE(slow_links(rates, hosts, labels).find("GiB/s: 0-2 5.00 (usual 10.00); rank 0"), std::string::npos);
    // Two ranks have one link and no other to compare it with.
    CHECK_EQ(slow_links(even_rates(2, 1), {"a", "a"}, {"A", "B"}), "");
}
