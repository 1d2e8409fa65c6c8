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
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <sstream>

#include "llmc/base/check.h"

namespace {

using Clock = std::chrono::steady_clock;

constexpr uint64_t kMaxFrameBytes = 16 << 20, kMaxReadBytes = 1 << 20;
constexpr size_t kHelloBytes = sizeof(uint32_t) + kNonceBytes + kMacBytes;   // the longest frame of a stranger
constexpr size_t kMaxStrangers = 64;   // kept, beyond one for each host
constexpr double kTryS = 2;            // timeout of one of several addresses, and of a stranger's proof
constexpr int kAgainMs = 20;           // until a host that was dropped tries again

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

struct Interface {
    std::string name, ip;
    bool loopback;
};
// The IPv4 addresses of this host that are up. Loopback is last, for tests on a machine without another.
std::vector<Interface> own_interfaces() {
    std::vector<Interface> found;
    ifaddrs* list = nullptr;
    if (::getifaddrs(&list) != 0) return found;
    for (const ifaddrs* entry = list; entry; entry = entry->ifa_next) {
        if (!entry->ifa_addr || entry->ifa_addr->sa_family != AF_INET || !(entry->ifa_flags & IFF_UP)) continue;
        char text[INET_ADDRSTRLEN];
        const auto* address = reinterpret_cast<const sockaddr_in*>(entry->ifa_addr);
        ::inet_ntop(AF_INET, &address->sin_addr, text, sizeof text);
        found.push_back({entry->ifa_name, text, (entry->ifa_flags & IFF_LOOPBACK) != 0});
    }
    ::freeifaddrs(list);
    std::stable_partition(found.begin(), found.end(), [](const Interface& i) { return !i.loopback; });
    return found;
}

// The address as a number, and the bits of the network behind a slash; false for any other text.
bool parse_network(const std::string& text, uint32_t* address, int* bits) {
    const size_t slash = std::min(text.find('/'), text.size());
    in_addr parsed{};
    if (::inet_pton(AF_INET, text.substr(0, slash).c_str(), &parsed) != 1) return false;
    *address = ntohl(parsed.s_addr);
    *bits = 32;
    if (slash == text.size()) return true;
    const char *begin = text.data() + slash + 1, *end = text.data() + text.size();
    const auto [rest, error] = std::from_chars(begin, end, *bits);
    return error == std::errc() && rest == end && *bits >= 0 && *bits <= 32;
}

bool matches(const Interface& own, const std::string& word) {
    uint32_t network, address;
    int bits, all;
    if (parse_network(word, &network, &bits) && parse_network(own.ip, &address, &all))
        return bits == 0 || (address ^ network) >> (32 - bits) == 0;
    return word[0] == '=' ? own.name == word.substr(1) : own.name.starts_with(word);
}

// The interfaces that LinkPlace::interfaces names.
std::vector<Interface> chosen_interfaces(const std::string& words) {
    const std::vector<Interface> all = own_interfaces();
    const bool excludes = words.starts_with('^');
    std::vector<Interface> chosen;
    for (const Interface& own : all) {
        std::istringstream list(words.substr(excludes));
        bool named = false;
        for (std::string word; std::getline(list, word, ',');) named = named || (!word.empty() && matches(own, word));
        if (words.empty() || named != excludes) chosen.push_back(own);
    }
    std::string there;
    for (const Interface& own : all) there += (there.empty() ? "" : ", ") + own.name + " (" + own.ip + ")";
    REQUIRE(!chosen.empty(), "%s=%s: no interface of this host matches; it has %s", kInterfaceVariable, words.c_str(),
            there.empty() ? "none that is up" : there.c_str());
    return chosen;
}

// A listening socket, or -1 with errno set.
int listen_at(const std::string& ip, int port) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<uint16_t>(port));
    ::inet_pton(AF_INET, ip.c_str(), &address.sin_addr);
    const int fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0) return -1;
    const int on = 1;   // the previous run may have used this port
    ::setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    const bool bound = ::bind(fd, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0;
    if (bound && ::listen(fd, SOMAXCONN) == 0) return fd;
    const int error = errno;
    ::close(fd);
    errno = error;
    return -1;
}

int port_of(int fd) {
    sockaddr_in address{};
    socklen_t length = sizeof address;
    return ::getsockname(fd, reinterpret_cast<sockaddr*>(&address), &length) == 0 ? ntohs(address.sin_port) : 0;
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

LinkPlace link_place_of_environment() {
    LinkPlace place;
    if (const char* interfaces = std::getenv(kInterfaceVariable)) place.interfaces = interfaces;
    const char* ports = std::getenv(kPortsVariable);
    if (!ports || !*ports) return place;
    const char* const end = ports + std::strlen(ports);
    auto [rest, error] = std::from_chars(ports, end, place.first_port);
    place.last_port = place.first_port;
    if (error == std::errc() && rest != end && *rest == '-') {
        const auto last = std::from_chars(rest + 1, end, place.last_port);
        rest = last.ptr;
        error = last.ec;
    }
    REQUIRE(error == std::errc() && rest == end && place.first_port >= 1 && place.last_port <= 65535
                && place.first_port <= place.last_port,
            "%s=%s: give a port or FIRST-LAST, from 1 to 65535", kPortsVariable, ports);
    return place;
}

HeartbeatLink::~HeartbeatLink() {
    for (auto& peer : peers_) close(*peer);
    stop_listening();
}

void HeartbeatLink::close(Peer& peer) {
    if (peer.fd >= 0) ::close(peer.fd);
    peer.fd = -1;
}

void HeartbeatLink::stop_listening() {
    for (const int fd : listening_) ::close(fd);
    listening_.clear();
}

// ---- connecting

std::unique_ptr<HeartbeatLink> HeartbeatLink::listen(const std::string& secret, int hosts, const LinkPlace& place) {
    std::unique_ptr<HeartbeatLink> link(new HeartbeatLink);
    link->secret_ = secret;
    link->hosts_ = hosts;
    int error = 0;
    for (const Interface& own : chosen_interfaces(place.interfaces)) {
        int fd = -1;
        for (int port = place.first_port; fd < 0 && port <= place.last_port; port++) fd = listen_at(own.ip, port);
        if (fd < 0) {
            error = errno;
            continue;
        }
        link->listening_.push_back(fd);
        link->address_ += (link->address_.empty() ? "" : " ") + own.ip + ":" + std::to_string(port_of(fd));
    }
    REQUIRE(!link->listening_.empty(), "rank 0 cannot listen for the other hosts%s%s: %s",
            place.first_port ? strf(" at ports %d-%d", place.first_port, place.last_port).c_str() : "",
            place.first_port ? strf(" (%s)", kPortsVariable).c_str() : "", std::strerror(error));
    return link;
}

HeartbeatLink::Peer& HeartbeatLink::add_peer(int fd) {
    make_prompt(fd);
    peers_.push_back(std::make_unique<Peer>());
    Peer& peer = *peers_.back();
    peer.fd = fd;
    peer.nonce = random_bytes(kNonceBytes);
    return peer;
}

void HeartbeatLink::accept_waiting() {
    for (const int listening : listening_) {
        int accepted = 0;
        while (accepted++ < static_cast<int>(kMaxStrangers)) {
            const int fd = ::accept4(listening, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
            if (fd < 0) break;
            Peer& peer = add_peer(fd);
            write(peer, make_frame(kChallenge, peer.nonce));
        }
    }
}

// Drops strangers whose time is up and, if there are too many, the oldest ones. A host of the run proves the secret at
// once; if it was dropped nevertheless, it tries again.
void HeartbeatLink::drop_strangers() {
    size_t strangers = 0;
    for (size_t i = peers_.size(); i-- > 0;) {   // the newest are last
        Peer& peer = *peers_[i];
        if (peer.host >= 0) continue;
        strangers++;
        if (strangers > kMaxStrangers + static_cast<size_t>(hosts_) || seconds_since(peer.since) > kTryS) close(peer);
    }
    // A host that was dropped before it got its welcome connects again.
    std::erase_if(peers_, [](const auto& peer) { return peer->fd < 0; });
}

std::vector<int> HeartbeatLink::accept_all(double seconds) {
    const Clock::time_point start = Clock::now();
    while (static_cast<int>(peers().size()) < hosts_ && seconds_since(start) < seconds) {
        std::vector<pollfd> events;
        for (const int fd : listening_) events.push_back({fd, POLLIN, 0});
        for (const int fd : sockets()) events.push_back({fd, POLLIN, 0});
        ::poll(events.data(), events.size(), static_cast<int>(std::min(left(start, seconds), 0.1) * 1e3) + 1);
        accept_waiting();
        receive([](int, Kind, const std::string&) {});
        drop_strangers();
    }
    stop_listening();
    std::erase_if(peers_, [](const auto& peer) {
        if (peer->host < 0) close(*peer);
        return peer->host < 0;
    });
    std::vector<int> missing;
    const std::vector<int> here = peers();
    for (int host = 1; host <= hosts_; host++)
        if (std::find(here.begin(), here.end(), host) == here.end()) missing.push_back(host);
    return missing;
}

std::unique_ptr<HeartbeatLink> HeartbeatLink::connect(const std::string& address, const std::string& secret, int host,
                                              double seconds, std::string* error) {
    const Clock::time_point start = Clock::now();
    std::string attempts;
    for (bool again = true; again && left(start, seconds) > 0;) {
        again = false;
        attempts.clear();
        std::istringstream words(address);
        for (std::string word; words >> word && left(start, seconds) > 0;) {
            const double try_s = std::min(kTryS, left(start, seconds));
            const size_t colon = word.rfind(':');
            const int fd = colon == std::string::npos ? (errno = EINVAL, -1)
                           : connect_to(word.substr(0, colon), std::atoi(word.c_str() + colon + 1), try_s);
            std::string why = fd < 0 ? std::strerror(errno) : "";
            if (fd >= 0) {
                std::unique_ptr<HeartbeatLink> link(new HeartbeatLink);
                link->secret_ = secret;
                link->own_host_ = host;
                Peer& peer = link->add_peer(fd);
                const Clock::time_point asked = Clock::now();
                while (peer.host < 0 && peer.fd >= 0 && left(asked, try_s) > 0) {
                    wait_for(fd, POLLIN, left(asked, try_s));
                    link->read(peer, [](int, Kind, const std::string&) {});
                }
                if (peer.host == 0) return link;
                // Tries again, since rank 0 drops connections while too many come. The other addresses come first:
                // another machine may have this address, too, or another program this port.
                again = again || peer.fd < 0;
                why = peer.fd < 0 ? "the connection was closed" : "no answer";
            }
            attempts += (attempts.empty() ? "" : ", ") + word + ": " + why;
        }
        if (again) ::poll(nullptr, 0, kAgainMs);
    }
    *error = attempts;
    return nullptr;
}

// Handles one frame of a stranger. False: it is not part of the handshake, and the connection must be closed.
bool HeartbeatLink::greet(Peer& peer, const Frame& frame) {
    return own_host_ == 0 ? greet_connector(peer, frame) : greet_listener(peer, frame);
}

bool HeartbeatLink::greet_connector(Peer& peer, const Frame& frame) {
    if (frame.kind != kHello || frame.body.size() != kHelloBytes) return false;
    uint32_t host;
    std::memcpy(&host, frame.body.data(), sizeof host);
    peer.handshake = LinkHandshake(secret_, host, peer.nonce, frame.body.substr(sizeof host, kNonceBytes));
    if (!same_mac(frame.body.substr(sizeof host + kNonceBytes), peer.handshake.hello_proof())) return false;
    const std::vector<int> here = peers();
    if (host < 1 || host > static_cast<uint32_t>(hosts_)
        || std::find(here.begin(), here.end(), static_cast<int>(host)) != here.end()) return false;
    write(peer, make_frame(kWelcome, peer.handshake.welcome_proof()));
    peer.host = static_cast<int>(host);
    peer.sent = peer.handshake.to_connector();
    peer.received = peer.handshake.to_listener();
    return true;
}

bool HeartbeatLink::greet_listener(Peer& peer, const Frame& frame) {
    if (frame.kind == kChallenge && frame.body.size() == kNonceBytes && !peer.challenged) {
        const auto host = static_cast<uint32_t>(own_host_);
        peer.challenged = true;
        peer.handshake = LinkHandshake(secret_, host, frame.body, peer.nonce);
        write(peer, make_frame(kHello, std::string(reinterpret_cast<const char*>(&host), sizeof host) + peer.nonce
                                           + peer.handshake.hello_proof()));
        return true;
    }
    if (frame.kind != kWelcome || !peer.challenged) return false;
    if (!same_mac(frame.body, peer.handshake.welcome_proof())) return false;
    peer.host = 0;
    peer.sent = peer.handshake.to_listener();
    peer.received = peer.handshake.to_connector();
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
        write(*peer, peer->sent.seal(kind, bytes));
    }
}

void HeartbeatLink::write(Peer& peer, const std::string& frame) {
    peer.out += frame;
    flush(peer);
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
    for (auto& peer : peers_) {
        if (peer->fd >= 0) flush(*peer);
        if (peer->fd >= 0) read(*peer, use);
    }
}

void HeartbeatLink::read(Peer& peer, const Use& use) {
    char block[16 << 10];
    bool open = true;
    for (size_t total = 0; open && peer.fd >= 0 && total < kMaxReadBytes;) {
        // From a stranger, no more is read than the longest frame that it may send.
        const size_t most = peer.host < 0 ? kFrameHeadBytes + kHelloBytes - peer.in.size() : sizeof block;
        const ssize_t got = ::recv(peer.fd, block, most, 0);
        if (got < 0 && errno == EINTR) continue;
        if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) break;
        open = got > 0;
        if (!open) break;
        total += static_cast<size_t>(got);
        peer.in.append(block, static_cast<size_t>(got));
        parse(peer, use);
    }
    if (open || peer.fd < 0) return;
    peer.lost = true;
    close(peer);
}

void HeartbeatLink::parse(Peer& peer, const Use& use) {
    size_t at = 0;
    Frame frame;
    FrameCut cut;
    bool sound = true;
    while (sound) {
        cut = cut_frame(std::string_view(peer.in).substr(at), peer.host < 0 ? kHelloBytes : kMaxFrameBytes, &frame);
        if (cut != FrameCut::kWhole) break;
        at += frame.bytes;
        const bool was_known = peer.host >= 0;
        if (!was_known) sound = greet(peer, frame);
        else sound = peer.received.open(&frame);
        if (sound && was_known) use(peer.host, static_cast<Kind>(frame.kind), std::string(frame.body));
    }
    if (!sound || cut == FrameCut::kBroken) {
        peer.lost = true;
        close(peer);
    }
    peer.in.erase(0, at);
}
