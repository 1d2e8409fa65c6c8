#include "llmc/checkpoint/huggingface/safetensors.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <utility>

#include "llmc/base/json_object.h"

static_assert(std::endian::native == std::endian::little, "the format is little-endian and copied as it is");

namespace {

constexpr uint64_t kMaxHeaderBytes = 100'000'000;  // the limit of the format's own implementation

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

// Checks a tensor's fields in the header. data_begin: where the file's data begin.
SafetensorsView view_of(const JsonFields& tensor, const InputFile& file, int64_t data_begin) {
    const int64_t data_bytes = file.bytes() - data_begin;
    constexpr size_t kMaxDims = 16;
    for (const auto& [field, value] : tensor.object.items())
        REQUIRE(field == "dtype" || field == "shape" || field == "data_offsets", "%s has the unknown field \"%s\"",
                tensor.where.c_str(), printable(field).c_str());
    SafetensorsView view{.dtype = tensor.text("dtype"), .shape = tensor.integers("shape", 0, INT64_MAX)};
    if (view.shape.size() > kMaxDims) tensor.refuse("shape", strf("at most %zu numbers are needed", kMaxDims));
    view.bytes = element_bytes(view.dtype);
    if (view.bytes == 0) tensor.refuse("dtype", "this dtype is not known");
    for (const int64_t dim : view.shape)
        if (__builtin_mul_overflow(view.bytes, dim, &view.bytes)) tensor.refuse("shape", "it overflows 64 bits");
    const std::vector<int64_t> offsets = tensor.integers("data_offsets", 0, INT64_MAX);
    if (offsets.size() != 2) tensor.refuse("data_offsets", "two numbers are needed");
    if (offsets[0] > offsets[1] || offsets[1] > data_bytes)
        tensor.refuse("data_offsets", strf("the file has %lld bytes of data (truncated?)", ll(data_bytes)));
    if (view.bytes != offsets[1] - offsets[0])
        tensor.refuse("data_offsets", strf("dtype and shape say %lld bytes", ll(view.bytes)));
    view.file = &file;
    view.offset = data_begin + offsets[0];
    return view;
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

std::map<std::string, SafetensorsView> parse_header(const InputFile& file) {
    const std::string& path = file.name();
    const int64_t bytes = file.bytes();
    const char* p = path.c_str();
    REQUIRE(bytes >= 8, "%s: %s too few for a safetensors file", p,
            (count_text(bytes, "byte") + (bytes == 1 ? " is" : " are")).c_str());
    uint64_t length = 0;
    file.read(0, 8, &length);
    REQUIRE(length <= kMaxHeaderBytes, "%s: a header of %llu bytes is beyond the limit of 100 MB (not safetensors?)", p,
            static_cast<unsigned long long>(length));
    REQUIRE(length <= static_cast<uint64_t>(bytes) - 8, "%s: the header should have %llu bytes, the file ends after "
            "%lld", p, static_cast<unsigned long long>(length), static_cast<long long>(bytes - 8));
    std::string header(static_cast<size_t>(length), '\0');
    file.read(8, static_cast<int64_t>(length), header.data());
    REQUIRE(length > 0 && header[0] == '{', "%s: the header is not a JSON object (not safetensors?)", p);
    const nlohmann::json tensors = parse_json_object(header, path + ": header");

    const int64_t begin = 8 + static_cast<int64_t>(length);
    std::map<std::string, SafetensorsView> views;
    std::vector<std::pair<int64_t, std::string>> order;   // offset and name
    for (const auto& [name, value] : tensors.items()) {
        if (name == "__metadata__") {
            const auto is_text = [](const nlohmann::json& entry) { return entry.is_string(); };
            REQUIRE(value.is_object() && std::all_of(value.begin(), value.end(), is_text),
                    "%s: __metadata__ is not an object of texts", p);
            continue;
        }
        const std::string where = path + ": tensor \"" + printable(name) + "\"";
        REQUIRE(value.is_object(), "%s is not an object", where.c_str());
        views[name] = view_of({value, where}, file, begin);
        order.emplace_back(views[name].offset, name);
    }
    // In the order of the data every tensor must start where the one before ends. Empty ones come first.
    std::sort(order.begin(), order.end(), [&](const auto& a, const auto& b) {
        return std::pair(a.first, views[a.second].bytes) < std::pair(b.first, views[b.second].bytes);
    });
    int64_t cursor = begin;
    for (const auto& [offset, name] : order) {
        REQUIRE(offset == cursor, "%s: tensor \"%s\" starts at byte %lld of the data, %s", p, printable(name).c_str(),
                ll(offset - begin), offset < cursor ? "inside another tensor" : "after a hole");
        cursor += views[name].bytes;
    }
    REQUIRE(cursor == bytes, "%s: %lld bytes follow the last tensor", p, ll(bytes - cursor));
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
        case Dtype::kUe5m3: return "U8";   // the format has no name for it
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
    file->read(offset + begin, count, out);
}

SafetensorsReader::SafetensorsReader(const std::string& path)
    : file_(path, path, kExitNoCheckpoint), views_(parse_header(file_)) {}

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
