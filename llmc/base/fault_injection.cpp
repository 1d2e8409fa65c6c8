#include "llmc/base/fault_injection.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstring>

#include "llmc/base/check.h"
#include "llmc/base/nearest.h"

namespace {

using Kind = Fault::Kind;
using At = Fault::At;

struct KindRow {
    const char* name;
    Kind kind;
    bool needs_rank;
    const char* example;
};
constexpr KindRow kKinds[] = {
    {"kill", Kind::kKill, true, "kill:rank=3@step=50"},    {"stop", Kind::kStop, true, "stop:rank=3@step=50"},
    {"stall", Kind::kStall, true, "stall:rank=3@step=50"}, {"term", Kind::kTerm, true, "term:rank=0@eval"},
    {"nan", Kind::kNan, false, "nan:grad@77"},             {"enospc", Kind::kEnospc, false, "enospc@save"},
    {"bf16", Kind::kBf16, false, "bf16:linear=3.down"},
};

std::vector<std::string> split(const std::string& text, char separator) {
    std::vector<std::string> parts{""};
    for (char c : text) {
        if (c == separator) parts.emplace_back();
        else parts.back() += c;
    }
    return parts;
}

// Returns the integer after `prefix` in `text` if there is one and it is at least `low`, else -1.
int64_t number_after(const std::string& text, const std::string& prefix, int64_t low) {
    if (text.rfind(prefix, 0) != 0) return -1;
    const std::string digits = text.substr(prefix.size());
    if (digits.empty() || digits.size() > 12 || digits.find_first_not_of("0123456789") != std::string::npos) return -1;
    const int64_t number = std::atoll(digits.c_str());
    return number >= low ? number : -1;
}

const KindRow& kind_of(const std::string& name, const std::string& word) {
    std::vector<std::string> names;
    for (const KindRow& row : kKinds) {
        if (name == row.name) return row;
        names.push_back(row.name);
    }
    FAIL(kExitBadInput, "--inject %s: unknown fault \"%s\", did you mean %s?", word.c_str(), name.c_str(),
         nearest(name, names).c_str());
}

// Parses the text after the @; returns false if it is malformed.
bool read_place(const std::string& text, Fault* fault) {
    for (const auto& [name, at] : {std::pair{"save", At::kSave}, {"eval", At::kEvaluation}}) {
        if (text.rfind(name, 0) != 0) continue;
        fault->at = at;
        fault->number = text == name ? 1 : number_after(text, std::string(name) + "=", 1);
        return fault->number >= 1;
    }
    fault->at = At::kStep;
    fault->number = std::max(number_after(text, "step=", 1), number_after(text, "", 1));
    return fault->number >= 1;
}

[[noreturn]] void stall() {
    for (;;) ::sleep(1000);
}

}  // namespace

Fault parse_fault(const std::string& word) {
    const std::vector<std::string> halves = split(word, '@');
    const std::vector<std::string> parts = split(halves[0], ':');
    const KindRow& kind = kind_of(parts[0], word);
    Fault fault{.kind = kind.kind, .at = At::kStep, .text = word};
    const std::string like = strf(" (example: %s)", kind.example);
    if (kind.kind == Kind::kBf16) {
        const std::string prefix = "bf16:linear=";
        REQUIRE(word.rfind(prefix, 0) == 0 && word.size() > prefix.size(), "--inject %s: needs linear=NAME%s",
                word.c_str(), like.c_str());
        fault.at = At::kStart;
        fault.linear = word.substr(prefix.size());
        return fault;
    }
    REQUIRE(halves.size() == 2 && read_place(halves[1], &fault),
            "--inject %s: one @ must be followed by step=S, save or eval%s", word.c_str(), like.c_str());
    bool has_rank = false;
    for (size_t i = 1; i < parts.size(); i++) {
        if (kind.kind == Kind::kNan && parts[i] == "grad") continue;
        const int64_t rank = number_after(parts[i], "rank=", 0);
        REQUIRE(rank >= 0 && rank < (1 << 30) && !has_rank, "--inject %s: \"%s\" is not understood%s", word.c_str(),
                parts[i].c_str(), like.c_str());
        fault.rank = static_cast<int>(rank);
        has_rank = true;
    }
    REQUIRE(has_rank || !kind.needs_rank, "--inject %s: needs rank=R%s", word.c_str(), like.c_str());
    REQUIRE((kind.kind != Kind::kNan || fault.at == At::kStep) && (kind.kind != Kind::kEnospc || fault.at == At::kSave),
            "--inject %s: %s cannot be injected there%s", word.c_str(), kind.name, like.c_str());
    return fault;
}

std::string injected_bf16_linear(const std::vector<std::string>& words) {
    for (const std::string& word : words)
        if (const Fault fault = parse_fault(word); fault.kind == Kind::kBf16) return fault.linear;
    return "";
}

Faults::Faults(const std::vector<std::string>& words, int rank) : rank_(rank) {
    for (const std::string& word : words) {
        const Fault fault = parse_fault(word);
        if (fault.rank == rank) faults_.push_back(fault);
    }
    done_.assign(faults_.size(), false);
}

bool Faults::corrupts_gradient(int64_t step) const {
    return std::any_of(faults_.begin(), faults_.end(),
                       [&](const Fault& f) { return f.kind == Kind::kNan && f.number == step; });
}

int Faults::disk_error(const char* call) const {
    const bool full = std::any_of(faults_.begin(), faults_.end(),
                                  [&](const Fault& f) { return f.kind == Kind::kEnospc && f.number == saves_; });
    return full && std::strcmp(call, "write") == 0 ? ENOSPC : 0;
}

void Faults::trigger(At at, int64_t number) {
    for (size_t i = 0; i < faults_.size(); i++) {
        const Fault& fault = faults_[i];
        if (fault.at != at || fault.number != number || done_[i]) continue;
        if (fault.kind == Kind::kNan || fault.kind == Kind::kEnospc) continue;
        done_[i] = true;
        std::fprintf(stderr, "fault injection: rank %d: --inject %s\n", rank_, fault.text.c_str());
        std::fflush(nullptr);
        switch (fault.kind) {
            case Kind::kKill: ::raise(SIGKILL); break;
            case Kind::kStop: ::raise(SIGSTOP); break;
            case Kind::kTerm: ::raise(SIGTERM); break;
            default: stall();
        }
    }
}
