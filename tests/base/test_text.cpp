#include "tests/support/doctest.h"

#include "llmc/base/check.h"
#include "llmc/base/text.h"

TEST_CASE("a command in a message: a shell reads back the words") {
    CHECK_EQ(shell_command({"./train_gpt2", "--lr", "1e-3", "a_b=c:d,e@f%g+h-i"}),
             "./train_gpt2 --lr 1e-3 a_b=c:d,e@f%g+h-i");
    CHECK_EQ(shell_command({"--train-data", "shards/train_*.bin", "", "two words", "$HOME", "a\nb"}),
             "--train-data 'shards/train_*.bin' '' 'two words' '$HOME' 'a\nb'");
    CHECK_EQ(shell_quoted("it's"), "'it'\"'\"'s'");
    CHECK_EQ(shell_quoted("caf\xc3\xa9"), "'caf\xc3\xa9'");
    CHECK_EQ(shell_command({}), "");
}

TEST_CASE("text from outside: characters that a terminal would act on are escaped") {
    struct Case {
        std::string text, shown;
    };
    const Case cases[] = {
        {"plain caf\xc3\xa9 \xf0\x9f\x98\x80", "plain caf\xc3\xa9 \xf0\x9f\x98\x80"},
        {"a\x1b[2Jb\x07\x7f", "a\\x1b[2Jb\\x07\\x7f"}, {"a\nb\tc\r", "a\\x0ab\\x09c\\x0d"},
        {std::string("a\0b", 3), "a\\x00b"},
        {"\xff\xc3(\xed\xa0\x80", "\\xff\\xc3(\\xed\\xa0\\x80"},   // no UTF-8: a lone byte, half of two, a surrogate
        {"\xc2\x9b" "31m", "\\x9b31m"},                              // U+009B, which begins an escape sequence
        {"x\xe2\x80\xae" "fdp", "x\\u202efdp"},                       // right-to-left override
        {"\xe2\x81\xa6\xe2\x80\xa8", "\\u2066\\u2028"},
    };
    for (const Case& c : cases) {
        CAPTURE(c.text);
        CHECK_EQ(escaped(c.text), c.shown);
        CHECK_EQ(escaped(c.shown), c.shown);
        CHECK_EQ(Error(2, c.text).what(), c.shown);
    }
    CHECK_EQ(escaped("a\nb\x1b", "\n"), "a\nb\\x1b");
    CHECK_EQ(printable("a\"b"), "a\\x22b");
}

TEST_CASE("text from outside: long values and messages are shortened, and both ends of a long path remain") {
    const std::string path = "/begin/" + std::string(5000, 'x') + "/end.json";
    const std::string shown = shortened(path);
    CHECK(shown.size() == 200);
    CHECK(shown.starts_with("/begin/xxx"));
    CHECK(shown.ends_with("xxx/end.json"));
    CHECK(shortened(std::string(200, 'x')) == std::string(200, 'x'));
    std::string accents;
    for (int i = 0; i < 201; i++) accents += "\xc3\xa9";
    CHECK(escaped(shortened(accents)) == shortened(accents));   // no character is cut in two
    CHECK(shortened(accents).size() == 2 * 197 + 3);
    const std::string message = Error(2, "cannot read " + path + ": no such file").what();
    CHECK(message == "cannot read " + shortened(path + ":") + " no such file");
    CHECK(message_line(message) == message);
    std::string words;
    for (int i = 0; i < 3000; i++) words += "word ";
    CHECK(message_line(words).size() == 2000);
    CHECK(message_line(std::string(100, '\x1b')).size() == 200);
}
