// JSON from outside the process: each error is one line with the file and the key or place.
#include "tests/support/doctest.h"

#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>

#include "llmc/base/check.h"
#include "llmc/base/json_object.h"

namespace {

std::string error_of(const std::string& text) { return refusal_of([&] { parse_json_object(text, "f"); }); }

std::string nested(int levels) {
    return std::string(static_cast<size_t>(levels), '[') + std::string(static_cast<size_t>(levels), ']');
}

std::string refusal(const std::string& path, int64_t max_bytes = 1000) {
    return refusal_of([&] { read_json_object(path, max_bytes); });
}

}  // namespace

TEST_CASE("json: a file that is not a JSON object is named with the key or the place") {
    struct Case {
        std::string text, said;
    };
    const Case cases[] = {
        {"", "f: not JSON: parse error at line 1, column 1: "},
        {"[1, 2]", "f: not a JSON object {\"name\": value, ...}"}, {"3", "f: not a JSON object"},
        {"%PDF-1.4\n\xe2\xe3", "f: not JSON: parse error at line 1, column 1: "},
        {std::string("{\"a\": 1}\0\0", 10), "f: not JSON: a NUL byte"},
        {"{\"a\": \"\xe9t\xe9\"}", "ill-formed UTF-8 byte"},
        {"{\"a\": \"\xed\xa0\x80\"}", "ill-formed UTF-8 byte"},   // a surrogate in UTF-8
        {"{\"a\": \"\\ud800\"}", "surrogate"},
        {"{\"a\": 1,\n}", "f: not JSON: parse error at line 2, column 1: "},
        {"{\"a\": 1", "unexpected end of input"}, {"{\"a\": 1}}", "f: not JSON: parse error at line 1, column 9: "},
        {"{\"a\": 1e999}", "f: not JSON: number overflow"},
        {"{\"a\": {\"b\": 1, \"b\": 2}}", "f: \"b\" is there twice"},
        {"{\"a\": [{\"b\": 1}, {\"b\": 2, \"c\": 1}], \"a\": 3}", "f: \"a\" is there twice"},
        {"{\"deep\": " + nested(100000) + "}", "f: \"deep\" is nested deeper than 64 levels"},
        {"{\"deep\": " + std::string(100000, '[') , "f: \"deep\" is nested deeper than 64 levels"},
        {nested(100000), "f: \"\" is nested deeper than 64 levels"},
    };
    for (const Case& c : cases) {
        CAPTURE(c.text);
        const std::string said = error_of(c.text);
        CHECK_MESSAGE(said.find(c.said) != std::string::npos, said);
        CHECK(said.find('\n') == std::string::npos);
        CHECK(said.find("json.exception") == std::string::npos);
    }
}

TEST_CASE("json: a byte order mark, Windows line ends and comments are read") {
    CHECK(parse_json_object("\xef\xbb\xbf{\"a\": \"\xc3\xa9\xf0\x9f\x98\x80\"}", "f").size() == 1);
    CHECK(parse_json_object("{\r\n\"a\": 1, // why\r\n\"b\": 2}\r\n", "f").size() == 2);
}

TEST_CASE("json: up to 64 levels are read") {
    CHECK(error_of("{\"a\": " + nested(kMaxJsonDepth - 1) + "}") == "");
    CHECK(error_of("{\"a\": " + nested(kMaxJsonDepth) + "}") != "");
    CHECK(parse_json_line("{\"a\": " + nested(100000) + "}").is_null());
    CHECK(parse_json_line("{\"a\": [1, {\"b\": null}]}")["a"][1]["b"].is_null());
    CHECK(parse_json_line("{\"a\": 1").is_null());
    CHECK(parse_json_line("[1]").is_null());
}

TEST_CASE("json: the tree is the library's") {
    const std::string text = R"({"a": [1, -2, 3.5, "x", true, null, [], {}, [[{"b": [4]}]]], "c": {"d": {}}, "": 1})";
    CHECK(parse_json_object(text, "f") == nlohmann::json::parse(text));
}

TEST_CASE("json: if only one key is read, the text after it is not parsed and other values are not kept") {
    const std::string text = R"({"offsets": [1, 2, [3]], "tokenizer": {"name": "x", "ids": [1]}, "more": })";
    CHECK(parse_json_object(text, "f", "tokenizer") == nlohmann::json{{"name", "x"}, {"ids", {1}}});
    CHECK(parse_json_object("{\"a\": {\"tokenizer\": 1}}", "f", "tokenizer").is_null());
    CHECK(parse_json_object("{\"tokenizer\": 7, x", "f", "tokenizer") == 7);
}

TEST_CASE("json: anything but a regular file is refused by name, without reading it or waiting for it") {
    const auto dir = std::filesystem::temp_directory_path() / ("llmc_json_" + std::to_string(getpid()));
    std::filesystem::create_directory(dir);
    const std::string fifo = dir / "fifo", unix_socket = dir / "socket", folder = dir / "folder", big = dir / "big";
    CHECK(mkfifo(fifo.c_str(), 0600) == 0);   // nobody ever writes: opening it would wait for ever
    const int fd = socket(AF_UNIX, SOCK_STREAM, 0);
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::strncpy(address.sun_path, unix_socket.c_str(), sizeof address.sun_path - 1);
    CHECK(bind(fd, reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0);
    std::filesystem::create_directory(folder);
    std::ofstream(big) << std::string(1001, ' ');
    CHECK(refusal(fifo) == "cannot read " + fifo + ": a FIFO (pipe), not a file");
    CHECK(refusal(unix_socket) == "cannot read " + unix_socket + ": a socket, not a file");
    CHECK(refusal(folder) == "cannot read " + folder + ": a folder, not a file");
    CHECK(refusal("/dev/zero") == "cannot read /dev/zero: a device, not a file");
    CHECK(refusal(dir / "none") == "cannot read " + std::string(dir / "none") + ": No such file or directory");
    CHECK(refusal(big) == big + " is longer than 1000 bytes");
    CHECK(refusal(std::string("/dev/null\0.json", 15)).find("a name with a NUL byte") != std::string::npos);
    close(fd);
    std::filesystem::remove_all(dir);
}

TEST_CASE("json: fields of other types and ranges are named with their value") {
    const nlohmann::json object = nlohmann::json::parse(R"({"n": 3, "huge": 18446744073709551615, "list": [1, "x"]})");
    const JsonFields fields{object, "f"};
    CHECK(fields.integer("n", 0, 3) == 3);
    CHECK(refusal_of([&] { fields.integer("n", 4, 9); }) == "f: \"n\" is 3: a whole number from 4 to 9 is needed");
    CHECK(refusal_of([&] { fields.integer("huge", 0, INT64_MAX); })
          == "f: \"huge\" is 18446744073709551615: a whole number of at least 0 is needed");
    CHECK(refusal_of([&] { fields.integers("list", 0, 9); })
          == "f: \"list\" is [1,\"x\"]: whole numbers from 0 to 9 are needed");
    CHECK(refusal_of([&] { fields.text("none"); }) == "f: \"none\" is missing");
}
