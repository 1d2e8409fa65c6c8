// A file descriptor that is closed at the end of its scope; -1 for none.
#pragma once
#include <unistd.h>

struct Descriptor {
    int fd;
    explicit Descriptor(int fd_) : fd(fd_) {}
    ~Descriptor() {
        if (fd >= 0) ::close(fd);
    }
    Descriptor(const Descriptor&) = delete;
    Descriptor& operator=(const Descriptor&) = delete;
};
