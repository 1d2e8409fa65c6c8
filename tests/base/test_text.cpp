#include <doctest/doctest.h>

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
