// JSON from outside: what is wrong is said in one line with the place, never in the library's words.
#include "tests/support/doctest.h"

#include <string>

#include "llmc/base/check.h"
#include "llmc/base/json_object.h"

namespace {

std::string error_of(const std::string& text) {
    try {
        parse_json_object(text, "f");
        return "";
    } catch (const Error& error) {
        CHECK(error.exit_code == kExitBadInput);
        return error.what();
    }
}

}  // namespace

TEST_CASE("json: a file that is not a JSON object is named with the place and the way out") {
    struct Case {
        std::string text, said;
    };
    const Case cases[] = {
        {"", "f: not JSON: the file is empty"},
        {" \r\n", "f: not JSON: the file is empty"},
        {"[1, 2]", "f: not a JSON object {\"name\": value, ...}, but a list"},
        {"3", "but a number"},
        {"\"x\"", "but a text or word"},
        {"%PDF-1.4\n\xe2\xe3", "f: byte 0: this is a PDF, not JSON: name a JSON file"},
        {std::string("\x1f\x8b\x08\0", 4), "f: byte 0: this is a gzip file"},
        {std::string("\xff\xfe{\0}\0", 6), "f: byte 0: this is text in UTF-16, not JSON: save it as UTF-8"},
        {std::string("{\"a\": 1}\0\0", 10), "f: byte 8: not JSON: a NUL byte"},
        {"{\"a\": \"\xe9t\xe9\"}", "f: byte 7: not JSON: 0xe9 is not UTF-8; save the file as UTF-8"},
        {"{\"a\": \"\xed\xa0\x80\"}", "f: byte 7: not JSON: 0xed is not UTF-8"},   // a surrogate in UTF-8
        {"{\"a\": \"\xc3", "f: byte 7: not JSON: 0xc3 is not UTF-8"},              // half of a character
        {"{\"a\": \"\\ud800\"}", "f: line 1, column 14: not JSON: half of a surrogate pair"},
        {"{\"a\": 1,\n}", "f: line 2, column 1: not JSON: a comma before }"},
        {"{\"a\": [1,]}", "f: line 1, column 10: not JSON: a comma before ]"},
        {"{'a': 1}", "f: line 1, column 2: not JSON: a single quote: names and texts stand in double quotes"},
        {"{\"a\": True}", "f: line 1, column 7: not JSON: a word of Python: write true, false or null"},
        {"{\n\"a\": yes}", "f: line 2, column 6: not JSON: a word without quotes"},
        {"lr: 1", "f: line 1, column 1: not JSON: a word without quotes"},
        {"{\"a\": 1", "not JSON: it ends too early: a quote or bracket is not closed"},
        {"{\"a\": \"b", "not JSON: it ends too early"},
        {"{\"a\": 1 \"b\": 2}", "f: line 1, column 11: not JSON: \" where a comma is missing"},
        {"{\"a\": \"b\nc\"}", "not JSON: a control character in a text: a line break is written \\n"},
        {"{\"a\": 1}}", "f: line 1, column 9: not JSON: an unexpected }"},
        {"{\"a\": 1e999}", "not JSON: a number is too large"},
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
