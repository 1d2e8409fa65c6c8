// Posts between hosts: the first rank of every host keeps a TCP connection to rank 0. Nothing here waits once the run
// is on, and nothing is believed of a peer that does not know the run's secret.
#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

class HeartbeatLink {
public:
    // kRows, kHangReport: the sender's business. Both sides are builds of the same code on the same architecture.
    enum Kind : uint32_t { kHello = 1, kWelcome, kRows, kHangReport };
    using Use = std::function<void(int peer, Kind kind, const std::string& bytes)>;

    // Rank 0: waits for connections from as many hosts, numbered from 1. address(): what the others connect() to.
    static std::unique_ptr<HeartbeatLink> listen(const std::string& secret, int hosts);
    std::string address() const { return address_; }
    // Until all hosts are there, or for so long. Their numbers that did not come.
    std::vector<int> accept_all(double seconds);

    // The first rank of host `host`. Null if rank 0 cannot be reached; *error says how it was tried.
    static std::unique_ptr<HeartbeatLink> connect(const std::string& address, const std::string& secret, int host,
                                              double seconds, std::string* error);

    ~HeartbeatLink();
    HeartbeatLink(const HeartbeatLink&) = delete;
    HeartbeatLink& operator=(const HeartbeatLink&) = delete;

    // Peers: hosts from rank 0, host 0 from the others.
    std::vector<int> peers() const;
    bool lost(int peer) const;   // was there, and its connection is gone
    // Sends what the connection takes; rows are left out while older ones are still on their way.
    void send(int peer, Kind kind, const std::string& bytes);
    void receive(const Use& use);

private:
    struct Peer {
        int host = -1;   // -1: did not say hello yet
        int fd = -1;
        std::string in, out;
        bool lost = false;
    };
    HeartbeatLink() = default;
    void accept_one();
    void read(Peer& peer, const Use& use);
    void parse(Peer& peer, const Use& use);
    void flush(Peer& peer);
    static void close(Peer& peer);
    bool greeted(Peer& peer, Kind kind, const std::string& bytes);

    std::string secret_, address_;
    int listen_fd_ = -1, hosts_ = 0;
    std::vector<std::unique_ptr<Peer>> peers_;
};
