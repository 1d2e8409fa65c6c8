// The fields of a config.json, and which of them have been read. The bounds of sizes and counts keep all products
// within 64 bits.
#pragma once
#include <initializer_list>
#include <set>
#include <string>

#include "llmc/base/check.h"
#include "llmc/base/json_object.h"

inline constexpr int64_t kMaxWidth = int64_t{1} << 20, kMaxPositions = int64_t{1} << 30;

struct HfFields : JsonFields {
    HfFields(const nlohmann::json& of, const std::string& place) : JsonFields{of, place, &names_} {}
    HfFields(const HfFields&) = delete;   // `read` would be the other's

    int64_t size(const char* name, int64_t max = kMaxWidth) const { return integer(name, 1, max); }
    int64_t size_or(const char* name, int64_t otherwise) const { return integer_or(name, otherwise, 1, kMaxWidth); }
    HfFields child(const char* name) const {
        const JsonFields inner = JsonFields::child(name);
        return {inner.object, inner.where};
    }
    // Requires that the field has this value or is absent.
    void only(const char* name, const nlohmann::json& value, const char* why) const {
        if (has(name) && object[name] != value) refuse(name, why);
    }
    template <typename Enum>
    Enum one_of(const char* name, const char* first, Enum a, const char* second, Enum b) const {
        std::string value = text(name);
        if (value != first && value != second) refuse(name, strf("\"%s\" or \"%s\"", first, second));
        return value == first ? a : b;
    }
    // Marks fields as read whose values have no effect here.
    void ignore(std::initializer_list<const char*> names) const { read->insert(names.begin(), names.end()); }
    // Refuses a field that nothing has read, since it may be a part of the model that would be left out in silence.
    void require_all_read() const {
        for (const auto& [name, value] : object.items())
            if (!value.is_null() && !read->contains(name))
                refuse(name.c_str(), "it is not known here; remove it if the model computes the same without it");
    }

private:
    std::set<std::string> names_;
};
