#include "llmc/checkpoint/huggingface/safetensors.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "llmc/base/check.h"
#include "llmc/base/system/files.h"
#include "llmc/base/text.h"

static_assert(std::endian::native == std::endian::little, "the format is little-endian and copied as it is");

namespace {

constexpr uint64_t kMaxHeaderBytes = 100'000'000;  // the limit of the format's own implementation
constexpr size_t kMaxDims = 16;

// Bytes of an element, 0 for an unknown dtype. Sub-byte dtypes are not supported.
int64_t element_bytes(const std::string& dtype) {
    static constexpr struct {
        const char* name;
        int64_t bytes;
    } kTypes[] = {{"F64", 8}, {"F32", 4}, {"F16", 2},  {"BF16", 2},    {"I64", 8},
                  {"I32", 4}, {"I16", 2}, {"I8", 1},   {"U64", 8},     {"U32", 4},
                  {"U16", 2}, {"U8", 1},  {"BOOL", 1}, {"F8_E4M3", 1}, {"F8_E5M2", 1}};
    for (const auto& type : kTypes)
        if (dtype == type.name) return type.bytes;
    return 0;
}

// A tensor's fields in the header.
struct Described {
    std::optional<std::string> dtype;
    std::optional<std::vector<uint64_t>> shape, offsets;
};

// Parses the header's JSON event by event and stops at the first error. Without a tree, deep nesting costs nothing and
// duplicate names are found.
class HeaderEvents : public nlohmann::json_sax<nlohmann::json> {
public:
    std::map<std::string, Described> tensors;
    std::string error;

    bool start_object(std::size_t) override {
        switch (place_) {
            case Place::kStart: return go(Place::kTop);
            case Place::kTop: return go(in_metadata_ ? Place::kMetadata : Place::kTensor);
            default: return unexpected("an object");
        }
    }
    bool end_object() override {
        switch (place_) {
            case Place::kTop: return go(Place::kEnd);
            case Place::kMetadata: return go(Place::kTop);
            default: return end_tensor();
        }
    }
    bool key(string_t& name) override {
        if (place_ == Place::kTop) {
            in_metadata_ = name == "__metadata__";
            if (in_metadata_) return std::exchange(seen_metadata_, true) ? fail("__metadata__ twice") : true;
            name_ = name;
            bool is_new = tensors.try_emplace(name).second;
            return is_new || fail("tensor \"" + printable(name) + "\" twice");
        }
        field_ = name;
        if (place_ != Place::kTensor) return true;
        Described& tensor = tensors[name_];
        bool twice = (name == "dtype" && tensor.dtype) || (name == "shape" && tensor.shape)
                     || (name == "data_offsets" && tensor.offsets);
        if (name != "dtype" && name != "shape" && name != "data_offsets") return unexpected("a field");
        return !twice || unexpected("a second field");
    }
    bool string(string_t& text) override {
        if (place_ == Place::kMetadata) return true;
        if (place_ != Place::kTensor || field_ != "dtype") return unexpected("text");
        tensors[name_].dtype = text;
        return true;
    }
    bool start_array(std::size_t) override {
        if (place_ != Place::kTensor || field_ == "dtype") return unexpected("a list");
        (field_ == "shape" ? tensors[name_].shape : tensors[name_].offsets).emplace();
        return go(Place::kList);
    }
    bool end_array() override { return go(Place::kTensor); }
    bool number_unsigned(number_unsigned_t value) override {
        if (place_ != Place::kList) return unexpected("a number");
        std::vector<uint64_t>& list = *(field_ == "shape" ? tensors[name_].shape : tensors[name_].offsets);
        if (list.size() >= kMaxDims) return unexpected("too many numbers");
        list.push_back(value);
        return true;
    }
    bool number_integer(number_integer_t) override { return unexpected("a negative number"); }
    bool number_float(number_float_t, const string_t&) override {
        return unexpected("a number that is not an integer");
    }
    bool boolean(bool) override { return unexpected("true or false"); }
    bool null() override { return unexpected("null"); }
    bool binary(binary_t&) override { return unexpected("binary data"); }
    bool parse_error(std::size_t byte, const std::string&, const nlohmann::detail::exception&) override {
        return fail(strf("it is not valid JSON at byte %zu", byte));
    }

private:
    enum class Place { kStart, kTop, kMetadata, kTensor, kList, kEnd };

    bool go(Place place) {
        place_ = place;
        return true;
    }
    bool fail(const std::string& text) {
        if (error.empty()) error = text;
        return false;
    }
    bool unexpected(const char* what) {
        if (place_ == Place::kStart) return fail("it is not a JSON object");
        if (place_ == Place::kTop || place_ == Place::kMetadata)
            return fail(strf("%s where %s belongs", what, place_ == Place::kTop ? "a tensor" : "metadata text"));
        return fail(strf("tensor \"%s\" has %s in \"%s\"", printable(name_).c_str(), what,
                         printable(field_).c_str()));
    }
    bool end_tensor() {
        const Described& tensor = tensors[name_];
        if (!tensor.dtype || !tensor.shape || !tensor.offsets)
            return fail(strf("tensor \"%s\" lacks %s", printable(name_).c_str(),
                             !tensor.dtype   ? "dtype"
                             : !tensor.shape ? "shape"
                                             : "data_offsets"));
        return go(Place::kTop);
    }

    Place place_ = Place::kStart;
    bool in_metadata_ = false, seen_metadata_ = false;
    std::string name_, field_;  // the tensor's and its field's
};

// Returns what is wrong with a tensor, "" if nothing. Fills the view except its address.
std::string check_tensor(const Described& tensor, uint64_t data_bytes, SafetensorsView& view) {
    const int64_t element = element_bytes(*tensor.dtype);
    if (element == 0) return "has the unknown dtype \"" + printable(*tensor.dtype) + "\"";
    if (tensor.offsets->size() != 2) return "needs two data_offsets";
    const uint64_t begin = (*tensor.offsets)[0], end = (*tensor.offsets)[1];
    if (begin > end || end > data_bytes)
        return strf("has data_offsets [%llu, %llu], but the file has %llu bytes of data (truncated?)",
                    static_cast<unsigned long long>(begin), static_cast<unsigned long long>(end),
                    static_cast<unsigned long long>(data_bytes));
    int64_t bytes = element;
    for (uint64_t dim : *tensor.shape) {
        if (dim > INT64_MAX || __builtin_mul_overflow(bytes, static_cast<int64_t>(dim), &bytes))
            return "has a shape that overflows 64 bits";
        view.shape.push_back(static_cast<int64_t>(dim));
    }
    if (static_cast<uint64_t>(bytes) != end - begin)
        return strf("has %llu bytes of data, but dtype and shape say %lld",
                    static_cast<unsigned long long>(end - begin), static_cast<long long>(bytes));
    view.dtype = *tensor.dtype;
    view.bytes = bytes;
    return "";
}

// IEEE half precision; every value is a float.
float half_to_float(uint16_t bits) {
    const uint32_t sign = static_cast<uint32_t>(bits & 0x8000u) << 16;
    const uint32_t exponent = (bits >> 10) & 0x1fu, fraction = bits & 0x3ffu;
    if (exponent == 0) {
        const float magnitude = static_cast<float>(fraction) * 0x1p-24f;  // zero and subnormal
        return sign ? -magnitude : magnitude;
    }
    const uint32_t biased = exponent == 31 ? 255u : exponent + 112u;
    return std::bit_cast<float>(sign | biased << 23 | fraction << 13);
}

// Parses a file of `bytes` bytes of which read(offset, count, out) reads the header. Sets all of the views but data and
// file.
std::map<std::string, SafetensorsView> parse_header(
    const std::string& path, int64_t bytes, const std::function<void(int64_t offset, int64_t count, void* out)>& read) {
    const char* p = path.c_str();
    REQUIRE(bytes >= 8, "%s: %s too few for a safetensors file", p,
            (count_text(bytes, "byte") + (bytes == 1 ? " is" : " are")).c_str());
    uint64_t length = 0;
    read(0, 8, &length);
    REQUIRE(length <= kMaxHeaderBytes,
            "%s: a header of %llu bytes is beyond the limit of 100 MB (not safetensors?)", p,
            static_cast<unsigned long long>(length));
    REQUIRE(length <= static_cast<uint64_t>(bytes) - 8,
            "%s: the header should have %llu bytes, the file ends after %lld", p,
            static_cast<unsigned long long>(length), static_cast<long long>(bytes - 8));
    std::string header(static_cast<size_t>(length), '\0');
    read(8, static_cast<int64_t>(length), header.data());
    REQUIRE(length > 0 && header[0] == '{', "%s: the header is not a JSON object (not safetensors?)", p);
    HeaderEvents events;
    bool parsed = nlohmann::json::sax_parse(header.begin(), header.end(), &events);
    REQUIRE(parsed, "%s: damaged header: %s", p, events.error.c_str());

    const uint64_t data_bytes = static_cast<uint64_t>(bytes) - 8 - length;
    std::map<std::string, SafetensorsView> views;
    std::vector<const std::pair<const std::string, Described>*> order;
    for (const auto& tensor : events.tensors) {
        SafetensorsView& view = views[tensor.first];
        std::string wrong = check_tensor(tensor.second, data_bytes, view);
        REQUIRE(wrong.empty(), "%s: tensor \"%s\" %s", p, printable(tensor.first).c_str(), wrong.c_str());
        view.offset = static_cast<int64_t>(8 + length + (*tensor.second.offsets)[0]);
        order.push_back(&tensor);
    }
    // In the order of the data every tensor must start where the one before ends.
    std::sort(order.begin(), order.end(),
              [](auto* a, auto* b) { return *a->second.offsets < *b->second.offsets; });
    uint64_t cursor = 0;
    for (const auto* tensor : order) {
        const uint64_t start = (*tensor->second.offsets)[0];
        REQUIRE(start == cursor, "%s: tensor \"%s\" starts at byte %llu of the data, %s", p,
                printable(tensor->first).c_str(), static_cast<unsigned long long>(start),
                start < cursor ? "inside another tensor" : "after a hole");
        cursor = (*tensor->second.offsets)[1];
    }
    REQUIRE(cursor == data_bytes, "%s: %llu bytes follow the last tensor", p,
            static_cast<unsigned long long>(data_bytes - cursor));
    return views;
}

}  // namespace

const char* safetensors_dtype(Dtype dtype) {
    switch (dtype) {
        case Dtype::kFp32: return "F32";
        case Dtype::kBf16: return "BF16";
        case Dtype::kFp64: return "F64";
        case Dtype::kInt32: return "I32";
        case Dtype::kE4m3: return "F8_E4M3";
        default: CHECK(false, "%s is not written to files", dtype_name(dtype));
    }
}

std::string safetensors_header(const std::vector<SafetensorsEntry>& entries) {
    nlohmann::ordered_json header;
    header["__metadata__"] = {{"format", "pt"}};
    int64_t offset = 0;
    for (const SafetensorsEntry& entry : entries) {
        CHECK(!header.contains(entry.name), "tensor %s twice", entry.name.c_str());
        header[entry.name] = {{"dtype", safetensors_dtype(entry.dtype)},
                              {"shape", entry.shape},
                              {"data_offsets", {offset, offset + entry.bytes()}}};
        offset += entry.bytes();
    }
    std::string text = header.dump();
    text.resize((text.size() + 7) / 8 * 8, ' ');  // aligns the data
    const uint64_t length = text.size();
    return std::string(reinterpret_cast<const char*>(&length), sizeof length) + text;
}

int64_t SafetensorsView::elems() const { return bytes / element_bytes(dtype); }

void SafetensorsView::read(int64_t begin, int64_t count, void* out) const {
    CHECK(begin >= 0 && count >= 0 && count <= bytes - begin, "bytes [%lld, +%lld) of %lld", ll(begin), ll(count),
          ll(bytes));
    if (file) return file->read(offset + begin, count, out);
    if (count > 0) std::memcpy(out, static_cast<const char*>(data) + begin, static_cast<size_t>(count));
}

std::string SafetensorsView::content() const {
    std::string all(static_cast<size_t>(bytes), '\0');
    read(0, bytes, all.data());
    return all;
}

std::map<std::string, SafetensorsView> parse_safetensors(const std::string& path, const void* file, int64_t bytes) {
    const char* begin = static_cast<const char*>(file);
    auto views = parse_header(path, bytes, [&](int64_t offset, int64_t count, void* out) {
        std::memcpy(out, begin + offset, static_cast<size_t>(count));
    });
    for (auto& [name, view] : views) view.data = begin + view.offset;
    return views;
}

struct SafetensorsReader::Impl {
    InputFile file;
    std::map<std::string, SafetensorsView> views;
};

SafetensorsReader::SafetensorsReader(const std::string& path)
    : impl_(new Impl{InputFile(path, path, kExitNoCheckpoint), {}}) {
    const InputFile& file = impl_->file;
    impl_->views = parse_header(path, file.bytes(), [&](int64_t offset, int64_t count, void* out) {
        file.read(offset, count, out);
    });
    for (auto& [name, view] : impl_->views) view.file = &file;
}

SafetensorsReader::~SafetensorsReader() = default;

const std::map<std::string, SafetensorsView>& SafetensorsReader::tensors() const { return impl_->views; }

const SafetensorsView& SafetensorsReader::tensor(const std::string& name) const {
    auto found = impl_->views.find(name);
    REQUIRE(found != impl_->views.end(), "%s has no tensor %s", impl_->file.name().c_str(), name.c_str());
    return found->second;
}

bool read_as_fp32(const SafetensorsView& view, int64_t begin, int64_t count, float* out) {
    const bool half = view.dtype == "F16", brain = view.dtype == "BF16";
    if (!half && !brain && view.dtype != "F32") return false;
    CHECK(begin >= 0 && count >= 0 && begin + count <= view.elems(), "elements [%lld, +%lld) of %lld", ll(begin),
          ll(count), ll(view.elems()));
    // The data may not be aligned, hence copies instead of casts.
    if (!half && !brain) {
        view.read(begin * 4, count * 4, out);
        return true;
    }
    constexpr int64_t kBlock = 16384;   // elements
    uint16_t block[kBlock];
    for (int64_t done = 0; done < count; done += kBlock) {
        const int64_t n = std::min(kBlock, count - done);
        view.read((begin + done) * 2, n * 2, block);
        for (int64_t i = 0; i < n; i++)
            out[done + i] = half ? half_to_float(block[i]) : static_cast<float>(bf16::from_bits(block[i]));
    }
    return true;
}
