// `git describe --always --dirty` of the commit that this executable was built from; "unknown" outside a git checkout.
// Defined in a file that the Makefile writes.
#pragma once

extern const char* const kBuildCommit;
