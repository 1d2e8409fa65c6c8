// A file descriptor that is closed at the end of its scope; -1 for none.
#pragma once
#include <unistd.h>

#include <utility>

struct Descriptor {
    int fd;
    explicit Descriptor(int fd_ = -1) : fd(fd_) {}
    ~Descriptor() {
        if (fd >= 0) ::close(fd);
    }
    Descriptor(Descriptor&& other) noexcept : fd(std::exchange(other.fd, -1)) {}
};
