// The commit this executable was built from, as `git describe --always --dirty` says it; "unknown" outside a
// git checkout. Defined in a file that the Makefile writes.
#pragma once

extern const char* const kBuildCommit;
