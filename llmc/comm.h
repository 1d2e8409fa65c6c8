// Ranks and what they exchange. World size 1 is comm_single.cpp and needs no library.
#pragma once
#include <cstdint>

struct Comm {
    int rank = 0;
    int world = 1;
};
