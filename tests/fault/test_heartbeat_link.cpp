// The link between the heartbeat tables of several hosts: messages between hosts, and how unknown processes, wrong
// secrets, recorded and reflected messages are rejected. The sockets are real. A "stranger" is a process without the
// secret.
#if LLMC_MPI
#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <thread>

#include "llmc/base/check.h"
#include "llmc/fault/heartbeat_link.h"
#include "tests/support/config_test.h"

namespace {

using Link = HeartbeatLink;
using Clock = std::chrono::steady_clock;
const LinkPlace kHere{.interfaces = "=lo"};

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

// A socket of a process without the secret.
struct Wire {
    int fd;
    std::string in = {};

    explicit Wire(int accepted) : fd(accepted) {
        const timeval limit{10, 0};
        ::setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    }
    explicit Wire(const std::string& address) : Wire(::socket(AF_INET, SOCK_STREAM, 0)) {
        sockaddr_in to{};
        to.sin_family = AF_INET;
        const size_t colon = address.find(':');
        to.sin_port = htons(static_cast<uint16_t>(std::atoi(address.c_str() + colon + 1)));
        ::inet_pton(AF_INET, address.substr(0, colon).c_str(), &to.sin_addr);
        if (::connect(fd, reinterpret_cast<sockaddr*>(&to), sizeof to) != 0) {
            ::close(fd);
            fd = -1;
        }
    }
    Wire(Wire&& other) noexcept : fd(std::exchange(other.fd, -1)), in(std::move(other.in)) {}
    ~Wire() {
        if (fd >= 0) ::close(fd);
    }
    bool connected() const { return fd >= 0; }
    void write(const std::string& bytes) const { ::send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL); }
    // The next frame; empty if the other side has closed.
    std::string frame() {
        Frame frame;
        char block[4096];
        while (cut_frame(in, 1 << 20, &frame) != FrameCut::kWhole) {
            const ssize_t got = ::recv(fd, block, sizeof block, 0);
            if (got <= 0) return "";
            in.append(block, static_cast<size_t>(got));
        }
        const std::string whole = in.substr(0, frame.bytes);
        in.erase(0, frame.bytes);
        return whole;
    }
    bool closed() { return frame().empty(); }
};

// The address at which connecting hosts look for rank 0.
struct Trap {
    int fd = ::socket(AF_INET, SOCK_STREAM, 0);
    std::string address;
    Trap() {
        sockaddr_in at{};
        at.sin_family = AF_INET;
        at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
        socklen_t length = sizeof at;
        const bool listens = ::bind(fd, reinterpret_cast<sockaddr*>(&at), sizeof at) == 0 && ::listen(fd, 8) == 0
                             && ::getsockname(fd, reinterpret_cast<sockaddr*>(&at), &length) == 0;
        REQUIRE(listens);
        address = "127.0.0.1:" + std::to_string(ntohs(at.sin_port));
    }
    ~Trap() { ::close(fd); }
    Wire accept() const { return Wire(::accept(fd, nullptr, nullptr)); }
};

// A man in the middle: passes on the handshake of two hosts that know the secret.
struct Between {
    Trap trap;
    std::unique_ptr<Link> root = Link::listen("secret", 1, kHere), one;
    std::string error, challenge, hello, welcome;
    std::unique_ptr<Wire> to_one, to_root;

    Between() {
        std::vector<int> missing{0};
        std::thread listener([&] { missing = root->accept_all(10); });
        std::thread connector([&] { one = Link::connect(trap.address, "secret", 1, 10, &error); });
        to_one = std::make_unique<Wire>(trap.accept());
        to_root = std::make_unique<Wire>(root->address());
        to_one->write(challenge = to_root->frame());
        to_root->write(hello = to_one->frame());
        to_one->write(welcome = to_root->frame());
        listener.join();
        connector.join();
        CHECK(missing.empty());
        CHECK(error == "");
        REQUIRE(one);
    }
};

// Collects the messages that a link receives until `enough`, or for 10 s.
std::vector<std::string> receive(Link& link, const std::function<bool(const std::vector<std::string>&)>& enough) {
    std::vector<std::string> got;
    const Clock::time_point start = Clock::now();
    while (!enough(got) && seconds_since(start) < 10) {
        std::vector<pollfd> events;
        for (const int fd : link.sockets()) events.push_back({fd, POLLIN, 0});
        ::poll(events.data(), events.size(), 100);
        link.receive([&](int peer, Link::Kind kind, const std::string& bytes) {
            got.push_back(std::to_string(peer) + (kind == Link::kRows ? " rows " : " report ") + bytes);
        });
    }
    return got;
}

std::string refused_place(const LinkPlace& place) {
    try {
        Link::listen("secret", 1, place);
    } catch (const Error& error) {
        CHECK(error.exit_code == kExitBadInput);
        return error.what();
    }
    return "";
}

std::string refused_ports(const char* ports) {
    setenv(kPortsVariable, ports, 1);
    std::string refused;
    try {
        link_place_of_environment();
    } catch (const Error& error) {
        CHECK(error.exit_code == kExitBadInput);
        refused = error.what();
    }
    unsetenv(kPortsVariable);
    return refused;
}

}  // namespace

TEST_CASE("heartbeat link: hosts with the secret connect, and messages arrive in order") {
    auto root = Link::listen("secret", 2);
    std::unique_ptr<Link> one, two;
    std::string error;
    const std::string closed_port = "127.0.0.1:1 ";   // an address that fails is no failure while another does not
    std::thread meeting([&] {
        one = Link::connect(closed_port + root->address(), "secret", 1, 10, &error);
        two = Link::connect(root->address(), "secret", 2, 10, &error);
    });
    CHECK(root->accept_all(20).empty());
    meeting.join();
    REQUIRE(one);
    REQUIRE(two);
    CHECK(error == "");
    const std::string large(3 << 20, 'x');   // more than a socket's buffer holds, and than one call reads
    two->send(0, Link::kRows, large);
    two->send(0, Link::kHangReport, "last");
    root->send(1, Link::kHangReport, "to one");
    std::thread sending([&] {   // sends what did not fit into the socket's buffer
        receive(*two, [](const auto& got) { return !got.empty(); });
    });
    CHECK(receive(*one, [](const auto& got) { return got.size() == 1; }) == Words{"0 report to one"});
    const Words got = receive(*root, [](const auto& messages) { return messages.size() == 2; });
    REQUIRE(got.size() == 2);
    CHECK(got[0] == "2 rows " + large);
    CHECK(got[1] == "2 report last");
    root->send(2, Link::kHangReport, "enough");
    sending.join();
    CHECK(!root->lost(1));
    one.reset();
    receive(*root, [&](const auto&) { return root->lost(1); });
    CHECK(root->lost(1));
    CHECK(!root->lost(2));
}

TEST_CASE("heartbeat link: peers without the secret are rejected, and the error lists the attempts") {
    auto root = Link::listen("secret", 1, kHere);
    std::string error;
    std::unique_ptr<Link> stranger;
    const std::string address = root->address();
    std::thread meeting([&] { stranger = Link::connect(address, "guess", 1, 1, &error); });
    CHECK(root->accept_all(1.5) == std::vector<int>{1});
    meeting.join();
    CHECK(!stranger);
    CHECK(error == address + ": the connection was closed");
    error.clear();
    CHECK(!Link::connect(address, "secret", 1, 1, &error));   // it no longer listens, although the link is there
    CHECK(error == address + ": Connection refused");
}

TEST_CASE("heartbeat link: hosts connect in spite of 500 strangers, and then the port is closed") {
    auto root = Link::listen("secret", 2, kHere);
    const std::string address = root->address();
    std::vector<int> missing{0};
    const Clock::time_point start = Clock::now();
    std::thread listener([&] { missing = root->accept_all(20); });
    std::vector<Wire> strangers;
    int closed_early = 0;
    const std::string hello = make_frame(Link::kHello, std::string(68, 'h'));
    for (int i = 0; i < 500; i++) {
        strangers.emplace_back(address);
        Wire& stranger = strangers.back();
        REQUIRE(stranger.connected());
        switch (i % 7) {
            case 0: break;   // says nothing
            case 1: stranger.write(std::string(100, '\xff')); break;
            case 2: stranger.write(hello.substr(0, 8) + std::string(8, '\x7f')); break;   // a length of 2^63
            case 3: stranger.write(hello); break;                                          // a wrong proof
            case 4: stranger.write(hello.substr(0, 40)); break;                            // an incomplete frame
            case 5: stranger.write(std::string(64 << 10, 'x')); break;
            default: ::shutdown(stranger.fd, SHUT_RDWR);
        }
    }
    std::unique_ptr<Link> one, two;
    std::string error;
    std::thread first([&] { one = Link::connect(address, "secret", 1, 10, &error); });
    two = Link::connect(address, "secret", 2, 10, &error);
    first.join();
    listener.join();
    const double took = seconds_since(start);
    CHECK(missing.empty());
    CHECK(error == "");
    REQUIRE(one);
    REQUIRE(two);
    CHECK(took < 2);   // less than the time that a silent stranger is allowed
    CHECK(root->sockets().size() == 2);
    for (Wire& stranger : strangers) {
        while (!stranger.closed()) {}
        closed_early++;
    }
    CHECK(closed_early == 500);
    CHECK(!Wire(address).connected());
    one->send(0, Link::kRows, "still");
    CHECK(receive(*root, [](const auto& got) { return !got.empty(); }) == Words{"1 rows still"});
}

TEST_CASE("heartbeat link: a silent stranger is disconnected after two seconds") {
    auto root = Link::listen("secret", 1, kHere);
    std::thread listener([&] { root->accept_all(5); });
    const Clock::time_point start = Clock::now();
    Wire stranger(root->address());
    CHECK(!stranger.frame().empty());   // the challenge
    CHECK(stranger.closed());
    CHECK(seconds_since(start) > 1.9);
    CHECK(seconds_since(start) < 3);
    std::string error;
    const auto one = Link::connect(root->address(), "secret", 1, 5, &error);
    CHECK(one);
    listener.join();
}

TEST_CASE("heartbeat link: if there are too many strangers, the oldest are disconnected early") {
    auto root = Link::listen("secret", 1, kHere);
    std::thread listener([&] { root->accept_all(1.5); });
    const Clock::time_point start = Clock::now();
    std::vector<Wire> strangers;
    for (int i = 0; i < 100; i++) strangers.emplace_back(root->address());
    for (int i = 0; i < 35; i++) {   // 100 - 64 - 1 of each host that is missing
        CHECK(!strangers[static_cast<size_t>(i)].frame().empty());
        CHECK(strangers[static_cast<size_t>(i)].closed());
    }
    CHECK(seconds_since(start) < 1);
    CHECK(!strangers.back().frame().empty());
    pollfd last{strangers.back().fd, POLLIN, 0};
    CHECK(::poll(&last, 1, 100) == 0);
    listener.join();
}

TEST_CASE("heartbeat link: the secret is not sent, and a recorded handshake is rejected") {
    Between recorded;
    for (const std::string& message : {recorded.challenge, recorded.hello, recorded.welcome})
        CHECK(!contains(message, "secret"));
    auto root = Link::listen("secret", 1, kHere);
    std::vector<int> missing;
    std::thread listener([&] { missing = root->accept_all(1); });
    Wire again(root->address());
    const std::string challenge = again.frame();
    CHECK(challenge != recorded.challenge);
    CHECK(challenge.size() == recorded.challenge.size());
    again.write(recorded.hello);
    CHECK(again.closed());
    listener.join();
    CHECK(missing == std::vector<int>{1});
    // Recorded messages of rank 0 do not deceive a host either.
    Trap trap;
    std::string error;
    std::unique_ptr<Link> one;
    std::thread connector([&] { one = Link::connect(trap.address, "secret", 1, 0.5, &error); });
    Wire host = trap.accept();
    host.write(recorded.challenge);
    CHECK(host.frame() != recorded.hello);
    host.write(recorded.welcome);
    CHECK(host.closed());
    connector.join();
    CHECK(!one);
}

TEST_CASE("heartbeat link: reflected messages of a host are rejected") {
    Trap trap;
    std::string error;
    std::unique_ptr<Link> one;
    std::thread connector([&] { one = Link::connect(trap.address, "secret", 1, 0.5, &error); });
    Wire host = trap.accept();
    host.write(make_frame(Link::kChallenge, random_bytes(kNonceBytes)));
    const std::string hello = host.frame();
    REQUIRE(hello.size() > kMacBytes);
    host.write(make_frame(Link::kWelcome, hello.substr(hello.size() - kMacBytes)));
    CHECK(host.closed());
    connector.join();
    CHECK(!one);
    // A host's proof for one connection, sent back as the proof for another.
    auto root = Link::listen("secret", 1, kHere);
    std::thread listener([&] { root->accept_all(0.5); });
    Wire stranger(root->address());
    stranger.write(stranger.frame());
    CHECK(stranger.closed());
    listener.join();
    CHECK(root->peers().empty());
}

TEST_CASE("heartbeat link: a frame that was repeated, changed, left out or sent back ends the connection") {
    for (const char* change : {"none", "repeated", "changed", "left out", "sent back", "longer"}) {
        CAPTURE(std::string(change));
        const std::string how = change;
        Between middle;
        middle.one->send(0, Link::kRows, "first");
        middle.one->send(0, Link::kHangReport, "second");
        const std::string first = middle.to_one->frame();
        std::string second = middle.to_one->frame();
        if (how == "sent back") {
            middle.to_one->write(first);
            CHECK(receive(*middle.one, [&](const auto&) { return middle.one->lost(0); }).empty());
            CHECK(middle.one->lost(0));
            continue;
        }
        if (how != "left out") middle.to_root->write(first);
        if (how == "repeated") middle.to_root->write(first);
        if (how == "changed") second[kFrameHeadBytes] ^= 1;
        if (how == "longer") second[8] ^= 1;
        middle.to_root->write(second + std::string(64, 'x'));
        const auto got = receive(*middle.root, [&](const auto&) { return middle.root->lost(1); });
        CHECK(middle.root->lost(1));   // "none": the bytes that follow are no frame
        const Words both = {"1 rows first", "1 report second"};
        CHECK(got == Words(both.begin(), both.begin() + (how == "none" ? 2 : how == "left out" ? 0 : 1)));
    }
}

TEST_CASE("heartbeat link: the interface and the ports can be chosen") {
    const auto free_port = [] { return Trap().address.substr(sizeof "127.0.0.1:" - 1); }();
    const int port = std::atoi(free_port.c_str());
    CHECK(Link::listen("secret", 1, {"=lo", port, port})->address() == "127.0.0.1:" + free_port);
    for (const char* interfaces : {"lo", "l", "none,lo", "127.0.0.1", "127.0.0.0/8", "10.255.255.255,127.0.0.1/32"}) {
        CAPTURE(std::string(interfaces));
        CHECK(Link::listen("secret", 1, {interfaces})->address().starts_with("127.0.0.1:"));
    }
    const auto holds = Link::listen("secret", 1, {"=lo", port, port});
    CHECK(refused_place({"=lo", port, port})
          == strf("rank 0 cannot listen for the other hosts at ports %d-%d (LLMFP8_SOCKET_PORTS): Address already in "
                  "use", port, port));
    for (const char* interfaces : {"=l", "eth-none", "^lo,e,w,d,b,v,t,p,i,n", "10.255.255.255", "127.0.0.0/33", ","}) {
        CAPTURE(std::string(interfaces));
        CHECK(contains(refused_place({interfaces}), std::string("LLMFP8_SOCKET_IFNAME=") + interfaces
                                                        + ": no interface of this host matches; it has "));
    }
    CHECK(refused_ports("") == "");
    CHECK(refused_ports("5000") == "");
    CHECK(refused_ports("5000-5010") == "");
    for (const char* ports : {"0", "5000-", "-5000", "5010-5000", "65536", "1-65536", "a", "5000 ", "5000-5001-5002",
                              "99999999999999999999"}) {
        CAPTURE(std::string(ports));
        CHECK(refused_ports(ports)
              == std::string("LLMFP8_SOCKET_PORTS=") + ports + ": give a port or FIRST-LAST, from 1 to 65535");
    }
}
#endif
