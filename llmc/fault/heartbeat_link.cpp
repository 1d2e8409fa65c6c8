#include "llmc/fault/heartbeat_link.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <sstream>

#include "llmc/base/check.h"

namespace {

using Clock = std::chrono::steady_clock;

struct FrameHead {
    uint32_t magic, kind;
    uint64_t bytes;
};
constexpr uint32_t kMagic = 0x6c6d6638;
constexpr uint64_t kMaxFrameBytes = 16 << 20, kMaxStrangerBytes = 1 << 10;
constexpr double kTryS = 2;   // timeout of one of several addresses

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }
double left(Clock::time_point start, double seconds) { return std::max(0.0, seconds - seconds_since(start)); }

void wait_for(int fd, short events, double seconds) {
    pollfd poll{fd, events, 0};
    ::poll(&poll, 1, static_cast<int>(seconds * 1e3) + 1);
}

void make_prompt(int fd) {
    const int on = 1;
    ::setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
}

// The IPv4 addresses of this host that are up. Loopback is last, for tests on a machine without another.
std::vector<std::string> own_addresses() {
    std::vector<std::string> found, loopback;
    ifaddrs* list = nullptr;
    if (::getifaddrs(&list) != 0) return found;
    for (const ifaddrs* entry = list; entry; entry = entry->ifa_next) {
        if (!entry->ifa_addr || entry->ifa_addr->sa_family != AF_INET || !(entry->ifa_flags & IFF_UP)) continue;
        char text[INET_ADDRSTRLEN];
        const auto* address = reinterpret_cast<const sockaddr_in*>(entry->ifa_addr);
        ::inet_ntop(AF_INET, &address->sin_addr, text, sizeof text);
        (entry->ifa_flags & IFF_LOOPBACK ? loopback : found).push_back(text);
    }
    ::freeifaddrs(list);
    found.insert(found.end(), loopback.begin(), loopback.end());
    return found;
}

// A connected descriptor, or -1 with errno set.
int connect_to(const std::string& ip, int port, double seconds) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<uint16_t>(port));
    if (::inet_pton(AF_INET, ip.c_str(), &address.sin_addr) != 1) {
        errno = EINVAL;
        return -1;
    }
    const int fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0) return -1;
    int error = 0;
    if (::connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof address) != 0) {
        socklen_t length = sizeof error;
        if (errno != EINPROGRESS) error = errno;
        else wait_for(fd, POLLOUT, seconds), ::getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &length);
        sockaddr_in peer{};
        length = sizeof peer;
        if (error == 0 && ::getpeername(fd, reinterpret_cast<sockaddr*>(&peer), &length) != 0) error = ETIMEDOUT;
    }
    if (error == 0) {
        make_prompt(fd);
        return fd;
    }
    ::close(fd);
    errno = error;
    return -1;
}

}  // namespace

HeartbeatLink::~HeartbeatLink() {
    for (auto& peer : peers_) close(*peer);
    if (listen_fd_ >= 0) ::close(listen_fd_);
}

void HeartbeatLink::close(Peer& peer) {
    if (peer.fd >= 0) ::close(peer.fd);
    peer.fd = -1;
}

// ---- connecting

std::unique_ptr<HeartbeatLink> HeartbeatLink::listen(const std::string& secret, int hosts) {
    std::unique_ptr<HeartbeatLink> link(new HeartbeatLink);
    link->secret_ = secret;
    link->hosts_ = hosts;
    const int fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    socklen_t length = sizeof address;
    if (fd < 0 || ::bind(fd, reinterpret_cast<sockaddr*>(&address), sizeof address) != 0
        || ::listen(fd, hosts + 16) != 0
        || ::getsockname(fd, reinterpret_cast<sockaddr*>(&address), &length) != 0) {
        const int error = errno;
        if (fd >= 0) ::close(fd);
        FAIL(kExitBadInput, "rank 0 cannot listen for the other hosts: %s", std::strerror(error));
    }
    link->listen_fd_ = fd;
    link->address_ = std::to_string(ntohs(address.sin_port));
    for (const std::string& ip : own_addresses()) link->address_ += " " + ip;
    return link;
}

void HeartbeatLink::accept_one() {
    const int fd = ::accept4(listen_fd_, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (fd < 0) return;
    make_prompt(fd);
    peers_.push_back(std::make_unique<Peer>());
    peers_.back()->fd = fd;
}

std::vector<int> HeartbeatLink::accept_all(double seconds) {
    const Clock::time_point start = Clock::now();
    while (static_cast<int>(peers().size()) < hosts_ && seconds_since(start) < seconds) {
        wait_for(listen_fd_, POLLIN, 0.02);
        accept_one();
        receive([](int, Kind, const std::string&) {});
    }
    std::vector<int> missing;
    const std::vector<int> here = peers();
    for (int host = 1; host <= hosts_; host++)
        if (std::find(here.begin(), here.end(), host) == here.end()) missing.push_back(host);
    return missing;
}

std::unique_ptr<HeartbeatLink> HeartbeatLink::connect(const std::string& address, const std::string& secret, int host,
                                              double seconds, std::string* error) {
    const Clock::time_point start = Clock::now();
    std::istringstream words(address);
    int port = 0;
    words >> port;
    for (std::string ip; words >> ip && left(start, seconds) > 0;) {
        const double try_s = std::min(kTryS, left(start, seconds));
        const int fd = connect_to(ip, port, try_s);
        std::string why = fd < 0 ? std::strerror(errno) : "";
        if (fd >= 0) {
            std::unique_ptr<HeartbeatLink> link(new HeartbeatLink);
            link->peers_.push_back(std::make_unique<Peer>());
            Peer& peer = *link->peers_.back();
            peer.fd = fd;
            peer.host = 0;
            link->send(0, kHello, strf("%d ", host) + secret);
            bool welcome = false;
            const Clock::time_point asked = Clock::now();
            while (!welcome && !peer.lost && left(asked, try_s) > 0) {
                wait_for(fd, POLLIN, left(asked, try_s));
                link->receive([&](int, Kind kind, const std::string&) { welcome = welcome || kind == kWelcome; });
            }
            if (welcome) return link;
            why = "no answer";   // from another machine at this address, or another program at this port
        }
        *error += (error->empty() ? "" : ", ") + strf("%s:%d: %s", ip.c_str(), port, why.c_str());
    }
    return nullptr;
}

// A peer's first frame must contain its host and the secret; otherwise returns false, and the connection is closed.
bool HeartbeatLink::greeted(Peer& peer, Kind kind, const std::string& bytes) {
    const size_t space = bytes.find(' ');
    const int host = std::atoi(bytes.c_str());
    const std::vector<int> here = peers();
    const bool sound = kind == kHello && space != std::string::npos && bytes.substr(space + 1) == secret_ && host >= 1
                       && host <= hosts_ && std::find(here.begin(), here.end(), host) == here.end();
    if (!sound) {
        close(peer);
        return false;
    }
    peer.host = host;
    send(host, kWelcome, "");
    return true;
}

// ---- during the run

std::vector<int> HeartbeatLink::peers() const {
    std::vector<int> hosts;
    for (const auto& peer : peers_)
        if (peer->host >= 0) hosts.push_back(peer->host);
    return hosts;
}

std::vector<int> HeartbeatLink::sockets() const {
    std::vector<int> sockets;
    for (const auto& peer : peers_)
        if (peer->fd >= 0) sockets.push_back(peer->fd);
    return sockets;
}

bool HeartbeatLink::lost(int host) const {
    return std::any_of(peers_.begin(), peers_.end(), [&](const auto& p) { return p->host == host && p->lost; });
}

void HeartbeatLink::send(int host, Kind kind, const std::string& bytes) {
    for (auto& peer : peers_) {
        if (peer->host != host || peer->fd < 0) continue;
        if (kind == kRows && !peer->out.empty()) {
            flush(*peer);
            if (!peer->out.empty()) return;
        }
        const FrameHead head{kMagic, kind, bytes.size()};
        peer->out.append(reinterpret_cast<const char*>(&head), sizeof head);
        peer->out += bytes;
        flush(*peer);
    }
}

void HeartbeatLink::flush(Peer& peer) {
    while (!peer.out.empty() && peer.fd >= 0) {
        const ssize_t done = ::send(peer.fd, peer.out.data(), peer.out.size(), MSG_NOSIGNAL);
        if (done < 0 && errno == EINTR) continue;
        if (done < 0) {
            if (errno != EAGAIN && errno != EWOULDBLOCK) peer.lost = true;
            return;
        }
        peer.out.erase(0, static_cast<size_t>(done));
    }
}

void HeartbeatLink::receive(const Use& use) {
    for (size_t i = 0; i < peers_.size(); i++) {   // greeted() does not change their number
        Peer& peer = *peers_[i];
        if (peer.fd >= 0) flush(peer);
        if (peer.fd >= 0) read(peer, use);
    }
    std::erase_if(peers_, [](const auto& peer) { return peer->fd < 0 && peer->host < 0; });
}

void HeartbeatLink::read(Peer& peer, const Use& use) {
    char block[16 << 10];
    bool open = true;
    while (open) {
        const ssize_t got = ::recv(peer.fd, block, sizeof block, 0);
        if (got < 0 && errno == EINTR) continue;
        if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) break;
        open = got > 0;
        if (open) peer.in.append(block, static_cast<size_t>(got));
    }
    parse(peer, use);   // also what a peer sent before its connection broke
    if (open || peer.fd < 0) return;
    peer.lost = true;
    close(peer);
}

void HeartbeatLink::parse(Peer& peer, const Use& use) {
    size_t at = 0;
    FrameHead head;
    while (peer.fd >= 0 && peer.in.size() - at >= sizeof head) {
        std::memcpy(&head, peer.in.data() + at, sizeof head);
        if (head.magic != kMagic || head.bytes > (peer.host < 0 ? kMaxStrangerBytes : kMaxFrameBytes)) {
            peer.lost = true;
            close(peer);
            break;
        }
        if (peer.in.size() - at - sizeof head < head.bytes) break;
        const std::string bytes = peer.in.substr(at + sizeof head, head.bytes);
        at += sizeof head + head.bytes;
        const auto kind = static_cast<Kind>(head.kind);
        if (peer.host >= 0) use(peer.host, kind, bytes);
        else if (!greeted(peer, kind, bytes)) return;
    }
    peer.in.erase(0, at);
}
