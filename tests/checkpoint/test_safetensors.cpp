// The safetensors format: writing, reading, errors, and the file functions that it uses.
#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cmath>
#include <limits>

#include "llmc/base/system/files.h"
#include "tests/support/checkpoint_test.h"

using namespace checkpoint_test;

namespace {

std::string with_header(const std::string& header, size_t data_bytes) {
    const uint64_t length = header.size();
    std::string file(reinterpret_cast<const char*>(&length), 8);
    return file + header + std::string(data_bytes, 'd');
}

std::string parse_error(const std::string& file) {
    TempDir dir;
    spill(dir / "some.safetensors", file);
    return error_of([&] { SafetensorsReader reader(dir / "some.safetensors"); });
}

std::string tensor(const std::string& name, const std::string& dtype, const std::string& shape,
                   const std::string& offsets) {
    return "\"" + name + "\":{\"dtype\":\"" + dtype + "\",\"shape\":" + shape + ",\"data_offsets\":" + offsets + "}";
}

}  // namespace

TEST_CASE("safetensors: what is written is read back") {
    TempDir dir;
    const std::vector<SafetensorsEntry> entries = {
        {"b", Dtype::kFp32, {3, 5}},  {"a \"quoted\"", Dtype::kBf16, {7}}, {"empty", Dtype::kFp32, {0, 4}},
        {"scalar", Dtype::kBf16, {}}, {"ids", Dtype::kInt32, {2, 1}},      {"wide", Dtype::kFp64, {1}}};
    std::string data;
    for (const SafetensorsEntry& entry : entries)
        for (int64_t i = 0; i < entry.bytes(); i++) data += static_cast<char>(data.size() * 7 + 1);
    spill_tensors(dir / "x.safetensors", entries, data);

    const std::string file = slurp(dir / "x.safetensors");
    CHECK(file.substr(8, 33) == "{\"__metadata__\":{\"format\":\"pt\"},\"");
    CHECK((file.size() - data.size()) % 8 == 0);

    SafetensorsReader reader(dir / "x.safetensors");
    REQUIRE(reader.tensors().size() == entries.size());
    size_t offset = 0;
    for (const SafetensorsEntry& entry : entries) {
        const SafetensorsView& view = reader.tensors().at(entry.name);
        CHECK(view.dtype == safetensors_dtype(entry.dtype));
        CHECK(view.shape == entry.shape);
        CHECK(view.elems() == entry.elems());
        REQUIRE(view.bytes == entry.bytes());
        CHECK(content_of(view) == data.substr(offset, static_cast<size_t>(view.bytes)));
        offset += static_cast<size_t>(view.bytes);
    }
}

TEST_CASE("safetensors: every kind of damaged header is refused by name") {
    const std::string a = tensor("a", "F32", "[2]", "[0,8]");
    struct Case {
        std::string file;
        std::vector<std::string> says;
    };
    const std::string huge = "18446744073709551615";
    const std::vector<Case> cases = {
        {"", {"0 bytes are too few"}}, {"1234567", {"7 bytes are too few"}},
        {std::string(8, '\xff') + "{}", {"beyond the limit of 100 MB"}},
        {with_header("{" + a + "}", 0).substr(0, 40), {"the file ends after 32"}},
        {with_header("", 0), {"not a JSON object"}},
        {with_header("[1]", 0), {"not a JSON object"}},
        {with_header("{" + a, 8), {"header: not JSON: parse error at line 1, column 54", "unexpected end of input"}},
        {with_header("{" + a + "} x", 8), {"header: not JSON: parse error at line 1, column 56"}},
        {with_header("{\"a\xff\":1}", 8), {"header: not JSON: ", "ill-formed UTF-8 byte"}},
        {with_header("{" + a + "," + a + "}", 8), {"header: \"a\" is there twice"}},
        {with_header("{\"a\":3}", 8), {"tensor \"a\" is not an object"}},
        {with_header("{\"a\":[]}", 8), {"tensor \"a\" is not an object"}},
        {with_header("{\"__metadata__\":{\"format\":1}}", 0), {"__metadata__ is not an object of texts"}},
        {with_header("{\"__metadata__\":{},\"__metadata__\":{}}", 0), {"\"__metadata__\" is there twice"}},
        {with_header("{\"a\":{\"dtype\":\"F32\",\"shape\":[2]}}", 8), {"tensor \"a\": \"data_offsets\" is missing"}},
        {with_header("{\"a\":{\"shape\":[2],\"data_offsets\":[0,8]}}", 8), {"tensor \"a\": \"dtype\" is missing"}},
        {with_header("{\"a\":{\"dtype\":\"F32\",\"dtype\":\"F32\"}}", 8), {"\"dtype\" is there twice"}},
        {with_header("{\"a\":{\"offset\":1}}", 8), {"tensor \"a\" has the unknown field \"offset\""}},
        {with_header("{" + tensor("a", "F32", "[2.0]", "[0,8]") + "}", 8), {"\"shape\" is [2.0]: whole numbers"}},
        {with_header("{" + tensor("a", "F32", "[-2]", "[0,8]") + "}", 8), {"\"shape\" is [-2]: whole numbers"}},
        {with_header("{" + tensor("a", "F32", "[1e400]", "[0,8]") + "}", 8), {"not JSON: number overflow"}},
        {with_header("{" + tensor("a", "F32", "[\"2\"]", "[0,8]") + "}", 8), {"\"shape\" is [\"2\"]: whole numbers"}},
        {with_header("{" + tensor("a", "F32", "[[2]]", "[0,8]") + "}", 8), {"\"shape\" is [[2]]: whole numbers"}},
        {with_header("{" + tensor("a", "F32", "2", "[0,8]") + "}", 8), {"\"shape\" is 2: a list is needed"}},
        {with_header("{" + tensor("a", "F32", "null", "[0,8]") + "}", 8), {"\"shape\" is missing"}},
        {with_header("{" + tensor("a", "F32", "[1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,2]", "[0,8]") + "}", 8),
         {"at most 16 numbers"}},
        {with_header("{" + tensor("a", "F33", "[2]", "[0,8]") + "}", 8), {"\"F33\": this dtype is not known"}},
        {with_header("{" + tensor("a", "F32", "[2]", "[0,4,8]") + "}", 8), {"is [0,4,8]: two numbers"}},
        {with_header("{" + tensor("a", "F32", "[2]", "[8,0]") + "}", 8), {"\"data_offsets\" is [8,0]"}},
        {with_header("{" + tensor("a", "F32", "[2]", "[0,8]") + "}", 7), {"the file has 7 bytes of data"}},
        {with_header("{" + tensor("a", "F32", "[2]", "[0," + huge + "]") + "}", 8), {"whole numbers"}},
        {with_header("{" + tensor("a", "F32", "[3]", "[0,8]") + "}", 8), {"\"data_offsets\" is [0,8]", "say 12 bytes"}},
        {with_header("{" + tensor("a", "F32", "[" + huge + "]", "[0,8]") + "}", 8), {"\"shape\" is [" + huge}},
        {with_header("{" + tensor("a", "F32", "[4294967296,4294967296]", "[0,8]") + "}", 8), {"overflows 64 bits"}},
        {with_header("{" + a + "," + tensor("b", "U8", "[4]", "[6,10]") + "}", 10), {"\"b\"", "inside another"}},
        {with_header("{" + a + "," + tensor("b", "U8", "[8]", "[0,8]") + "}", 8), {"inside another"}},
        {with_header("{" + a + "," + tensor("b", "U8", "[1]", "[9,10]") + "}", 10), {"\"b\"", "after a hole"}},
        {with_header("{" + tensor("b", "U8", "[7]", "[1,8]") + "}", 8), {"\"b\"", "after a hole"}},
        {with_header("{" + a + "}", 11), {"3 bytes follow the last tensor"}},
        {with_header("{" + tensor("a\\u0000\\n\\u001b[2J", "F0", "[2]", "[0,8]") + "}", 8), {"a\\x00\\x0a\\x1b[2J"}},
    };
    for (const Case& c : cases) {
        CAPTURE(c.file);
        const std::string error = parse_error(c.file);
        check_contains(error, {"exit 2: ", "some.safetensors: "});
        check_contains(error, c.says);
    }
    CHECK(parse_error(with_header("{" + a + "}  ", 8)) == "nothing");
    CHECK(parse_error(with_header("{}", 0)) == "nothing");
    // An empty tensor between two others is neither an overlap nor a gap.
    CHECK(parse_error(with_header("{" + a + "," + tensor("b", "U8", "[0]", "[8,8]") + ","
                                      + tensor("c", "U8", "[1]", "[8,9]") + "}",
                                  9))
          == "nothing");
    // Deep nesting is refused at the second level instead of being followed.
    check_contains(parse_error(with_header("{\"a\":" + std::string(1 << 20, '[') + "}", 0)), {"exit 2"});
}

TEST_CASE("safetensors: paths that are no file are refused") {
    TempDir dir;
    check_contains(error_of([&] { SafetensorsReader(dir / "none"); }),
                   {"exit 2", "cannot read", "none", "No such file"});
    check_contains(error_of([&] { SafetensorsReader reader(dir.path); }), {"exit 2", dir.path, "a folder, not a file"});
    spill(dir / "empty", "");
    check_contains(error_of([&] { SafetensorsReader(dir / "empty"); }), {"exit 2", "0 bytes are too few"});
    check_contains(error_of([&] { safetensors_header({{"a", Dtype::kFp32, {1}}, {"a", Dtype::kFp32, {1}}}); }),
                   {"exit 1", "tensor a twice"});
}

TEST_CASE("safetensors: a file that is cut while it is read is exit 5, not a signal") {
    TempDir dir;
    const std::vector<SafetensorsEntry> entries = {{"a", Dtype::kFp32, {1024}}, {"b", Dtype::kBf16, {4096}}};
    spill_tensors(dir / "x.safetensors", entries, std::string(4096 + 8192, 'd'));
    const SafetensorsReader reader(dir / "x.safetensors");
    const SafetensorsView& a = reader.tensors().at("a");
    const SafetensorsView& b = reader.tensors().at("b");
    std::vector<float> values(4096);
    REQUIRE(read_as_fp32(b, 0, 4096, values.data()));
    REQUIRE(truncate((dir / "x.safetensors").c_str(), b.offset + 5000) == 0);
    CHECK(read_as_fp32(a, 0, 1024, values.data()));
    const std::string cut = std::to_string(b.offset + 5000);
    check_contains(error_of([&] { read_as_fp32(b, 0, 4096, values.data()); }),
                   {"exit 5", dir / "x.safetensors", "byte " + cut + " is missing", "has " + cut + " now"});
    REQUIRE(truncate((dir / "x.safetensors").c_str(), 0) == 0);
    check_contains(error_of([&] { content_of(a); }),
                   {"exit 5", "byte " + std::to_string(a.offset) + " is missing", "has 0 now"});
}

TEST_CASE("safetensors: offsets beyond 4 GiB") {
    TempDir dir;
    const int64_t elems = (int64_t{5} << 30) / 4 + 1;
    const std::string header =
        "{" + tensor("big", "F32", "[" + std::to_string(elems) + "]", "[0," + std::to_string(elems * 4) + "]")
        + ","
        + tensor("last", "F32", "[1]",
                 "[" + std::to_string(elems * 4) + "," + std::to_string(elems * 4 + 4) + "]")
        + "}";
    spill(dir / "big", with_header(header, 0));
    const int64_t start = static_cast<int64_t>(header.size()) + 8;
    REQUIRE(truncate((dir / "big").c_str(), start + elems * 4 + 4) == 0);  // sparse
    const float values[2] = {1.5f, -2.5f};                                 // the last of big, and last
    int fd = open((dir / "big").c_str(), O_WRONLY);
    REQUIRE(pwrite(fd, values, 8, start + elems * 4 - 4) == 8);
    close(fd);
    SafetensorsReader reader(dir / "big");
    float read = 0;
    REQUIRE(read_as_fp32(reader.tensors().at("big"), elems - 1, 1, &read));
    CHECK(read == 1.5f);
    REQUIRE(read_as_fp32(reader.tensors().at("last"), 0, 1, &read));
    CHECK(read == -2.5f);
}

TEST_CASE("safetensors: every F16 and BF16 value becomes the same number in fp32") {
    std::string all;
    for (int i = 0; i < 65536; i++) all += {static_cast<char>(i & 255), static_cast<char>(i >> 8)};
    TempDir dir;
    spill(dir / "x", with_header("{" + tensor("half", "F16", "[65536]", "[0,131072]") + ","
                                 + tensor("brain", "BF16", "[65536]", "[131072,262144]") + ","
                                 + tensor("ids", "I32", "[1]", "[262144,262148]") + "}", 0) + all + all + "abcd");
    const SafetensorsReader reader(dir / "x");
    std::vector<float> half(65536), brain(65536);
    REQUIRE(read_as_fp32(reader.tensors().at("half"), 0, 65536, half.data()));
    REQUIRE(read_as_fp32(reader.tensors().at("brain"), 0, 65536, brain.data()));
    for (int i = 0; i < 65536; i++) {
        const int exponent = (i >> 10) & 31, fraction = i & 1023;
        double value = exponent == 0 ? std::ldexp(fraction, -24) : std::ldexp(1024 + fraction, exponent - 25);
        if (exponent == 31) value = fraction ? NAN : std::numeric_limits<double>::infinity();
        if (i & 0x8000) value = -value;
        const float got = half[static_cast<size_t>(i)];
        const bool same =
            std::isnan(value) ? std::isnan(got) : got == value && std::signbit(got) == std::signbit(value);
        if (!same) FAIL_CHECK("F16 bits " << i << " became " << got << ", not " << value);
        const uint32_t bits = std::bit_cast<uint32_t>(brain[static_cast<size_t>(i)]);
        if (bits != static_cast<uint32_t>(i) << 16) FAIL_CHECK("BF16 bits " << i << " became bits " << bits);
    }
    CHECK_FALSE(read_as_fp32(reader.tensors().at("ids"), 0, 1, half.data()));
    check_contains(error_of([&] { read_as_fp32(reader.tensors().at("half"), 65536, 1, half.data()); }), {"exit 1"});
}

TEST_CASE("files: XXH3-128 gives the published hash") {
    CHECK(xxh3_of_text("")
          == "99aa06d3014798d86001c324468d497f");  // of the empty input, in the library's tests
    TempDir dir;
    std::string text;
    for (int64_t i = 0; i < 100000; i++) text += static_cast<char>(i * i);
    write_file(dir / "f", text);
    Xxh3 parts;
    for (size_t at = 0; at < text.size(); at += 12345)
        parts.update(text.data() + at, static_cast<int64_t>(std::min<size_t>(12345, text.size() - at)));
    CHECK(parts.digest() == xxh3_of_text(text));
    CHECK(parts.digest() == xxh3_of_range(dir / "f", 0, 100000));
    text[77777] ^= 1;
    CHECK(parts.digest() != xxh3_of_text(text));
}

TEST_CASE("files: a failing call is exit 7 with path and reason") {
    TempDir dir;
    for (const std::string call : {"open", "write", "fsync"}) {
        CAPTURE(call);
        IoHook hook = [&](const char* name, const std::string&) { return name == call ? ENOSPC : 0; };
        const std::string error = error_of([&] { write_file(dir / call, "abc", hook); });
        check_contains(error, {"exit 7", "cannot " + call + " " + (dir / call), "No space left"});
    }
    check_contains(error_of([&] { require_free_space(dir.path, INT64_MAX, "step-00000001"); }),
                   {"exit 7", "step-00000001", dir.path, "9223372036854775807 bytes needed",
                    std::to_string(free_bytes(dir.path)).substr(0, 3)});
    CHECK(error_of([&] { require_free_space(dir.path, 1, "x"); }) == "nothing");
    make_directories(dir / "a/b/c");
    CHECK(is_directory(dir / "a/b/c"));
    make_directories(dir / "a/b/c/");
    spill(dir / "a/file", "x");
    check_contains(error_of([&] { make_directories(dir / "a/file"); }), {"exit 7", "a/file", "File exists"});
}
