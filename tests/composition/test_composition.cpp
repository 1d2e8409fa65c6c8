// Options that do not break each other: random legal sets of them give what the plainest equivalent run gives. What an
// option may change stands in its row (MayChange in llmc/config/config_table.h).
//
// LLMC_SETS is the number of sets (60), LLMC_SEED their seed, and LLMC_SET the number of a single one. One of the two
// streams of each run is as late as the events allow.
#include "tests/composition/composed_run.h"

#include <set>

namespace {

using namespace composition;

uint64_t number_in(const char* variable, uint64_t otherwise) {
    const char* const text = std::getenv(variable);
    return text ? std::strtoull(text, nullptr, 10) : otherwise;
}

std::string outcome(const DrawnSet& set, const std::string& data) {
    const data_test::TempDir folder;
    try {
        return failure_of(set, data, folder.path);
    } catch (const Error& error) {
        return strf("exit %d: %s", error.exit_code, error.what());
    }
}

}  // namespace

TEST_CASE("composition: every option is drawn, or it is said why not") {
    for (const OptionRow& row : option_table()) {
        CAPTURE(std::string(row.name));
        CHECK((!values_of(row).empty() || option_values().contains(row.name)));
    }
    for (const auto& [name, values] : option_values()) CHECK(find_option(name));
}

TEST_CASE("composition: random sets of options give what plainer runs give") {
    if (!device::device_info(-1).toolkit.empty()) return;   // bits of a GPU depend on more
    const data_test::TempDir data;
    write_data(data.path);
    const uint64_t seed = number_in("LLMC_SEED", 1), sets = number_in("LLMC_SETS", 60);
    const uint64_t first = number_in("LLMC_SET", 0), end = std::getenv("LLMC_SET") ? first + 1 : sets;
    std::set<const OptionRow*> drawn;
    for (uint64_t number = first; number < end; number++) {
        CAPTURE(seed, number);
        const DrawnSet set = draw_set(seed, number, data.path);
        for (const Part& part : set.parts)
            for (const Setting& setting : part.settings) drawn.insert(setting.row);
        const std::string text = outcome(set, data.path);
        if (text.empty()) continue;
        const DrawnSet smallest = reduced(set, data.path, [&](const DrawnSet& one) {
            return !outcome(one, data.path).empty();
        });
        // Ends the test: each further set would be reduced as well, which takes many runs.
        FAIL("LLMC_SEED=", seed, " LLMC_SET=", number, ": ", text, "\n", set.text(), "\nthe smallest: ",
             outcome(smallest, data.path), "\n", smallest.text());
    }
    if (end - first < 1000) return;
    for (const OptionRow& row : option_table()) {
        CAPTURE(std::string(row.name));
        CHECK((drawn.contains(&row) || values_of(row).empty()));
    }
}
