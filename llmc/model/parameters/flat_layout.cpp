#include "llmc/model/parameters/flat_layout.h"

#include <algorithm>
#include <array>
#include <tuple>

namespace {

int64_t stored_elems(const Param& p) { return round_up(p.elems(), kParamAlign); }

ParamForm form_of(const ParamTable& table, const Fp8Plan& plan, int param) {
    if (param == table.wte) return ParamForm::kOther;   // also if the head is tied to it
    for (const LinearPlan& linear : plan.linears)
        if (linear.weight == param)
            return linear.fp8_forward() || linear.fp8_elsewhere ? ParamForm::kFp8Linear : ParamForm::kLinear;
    return ParamForm::kOther;
}

// Returns the groups in layer order; elems excludes the padding at the end of a group.
std::vector<ParamGroup> make_groups(const ParamTable& table, const Fp8Plan& plan, int64_t group_bytes, bool by_layer) {
    std::vector<int> order;
    for (size_t i = 0; i < table.params.size(); i++) order.push_back(static_cast<int>(i));
    std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return table.layer_of(a) < table.layer_of(b); });
    std::vector<ParamGroup> groups;
    std::array<int, 2 * kParamForms> open;   // by form, whole or parts: the group that is not full yet, -1: none
    open.fill(-1);
    for (int param : order) {
        const ParamForm form = form_of(table, plan, param);
        const int layer = table.layer_of(param);
        const int64_t parts = table.params[static_cast<size_t>(param)].parts;
        int& current = open[static_cast<size_t>(form) + (parts > 1 ? kParamForms : 0)];
        if (current >= 0) {
            const int last = groups[static_cast<size_t>(current)].last_layer;
            // Layers far apart (BF16 at both ends, for instance) become ready at different times.
            const bool alone = by_layer && (form != ParamForm::kOther || last < 0);
            if (last + (alone ? 0 : 1) < layer) current = -1;
        }
        if (current < 0) {
            current = static_cast<int>(groups.size());
            groups.push_back({.form = form, .first_layer = layer, .parts = parts, .params = {}});
        }
        ParamGroup& group = groups[static_cast<size_t>(current)];
        group.params.push_back(param);
        group.last_layer = layer;
        group.elems += stored_elems(table.params[static_cast<size_t>(param)]);
        if (group.elems * dtype_bytes(Dtype::kFp32) >= group_bytes) current = -1;
    }
    std::stable_sort(groups.begin(), groups.end(), [](const ParamGroup& a, const ParamGroup& b) {
        return std::tie(a.first_layer, a.form, a.parts) < std::tie(b.first_layer, b.form, b.parts);
    });
    for (ParamGroup& group : groups)
        if (!plan.on() && group.form == ParamForm::kFp8Linear) group.form = ParamForm::kLinear;   // fp8_elsewhere
    return groups;
}

}  // namespace

std::string layer_text(int layer, int64_t num_layers) {
    if (layer < 0) return "embedding";
    return layer < num_layers ? strf("layers.%d", layer) : "head";
}

std::string layers_text(const ParamGroup& group, int64_t num_layers) {
    const std::string first = layer_text(group.first_layer, num_layers);
    const std::string last = layer_text(group.last_layer, num_layers);
    return first == last ? first : first + " to " + last;
}

FlatLayout::FlatLayout(const ParamTable& table, const Fp8Plan& plan, int64_t group_bytes, int64_t unit, bool by_layer)
    : groups_(make_groups(table, plan, group_bytes, by_layer)), places_(table.params.size()) {
    CHECK(unit > 0 && unit % kParamAlign == 0, "groups in multiples of %lld elements", (long long)unit);
    int64_t working = 0;
    for (size_t g = 0; g < groups_.size(); g++) {
        ParamGroup& group = groups_[g];
        group.begin = flat_elems_;
        int64_t offset = group.begin;
        for (int param : group.params) {
            const Param& p = table.params[static_cast<size_t>(param)];
            places_[static_cast<size_t>(param)] = {offset, p.elems(), static_cast<int>(g)};
            offset += stored_elems(p);
        }
        group.elems = round_up(group.elems, unit);
        int64_t& weight_elems = group.form == ParamForm::kFp8Linear ? fp8_elems_ : working;
        group.weight_begin = weight_elems;
        weight_elems += group.elems;
        flat_elems_ += group.elems;
    }
}
