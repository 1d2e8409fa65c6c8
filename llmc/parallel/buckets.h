// How the flat buffers of the parameters are cut for several ranks. A bucket is a run of whole parameters that travels
// as one message; each rank owns one of `ranks` equal blocks of every bucket, and the masters and moments of what lies
// in it (ZeRO-1; Rajbhandari et al., arXiv 1910.02054). The gaps between parameters and at the end of a bucket stay 0.
#pragma once
#include <cstdint>
#include <vector>

#include "llmc/model/fp8_recipe.h"
#include "llmc/model/params.h"

// Parameters that travel differently are never in one bucket.
enum class BucketKind : uint8_t {
    kFp8Linears,   // weights that are used in FP8 alone
    kLinears,      // weights of linears in the working type
    kOthers,       // embeddings, norms, biases: their gradients are never quantised
};
inline constexpr int kBucketKinds = 3;

struct Bucket {
    BucketKind kind = BucketKind::kOthers;
    int64_t begin = 0, elems = 0;            // in the flat buffers; elems a multiple of ranks * kParamAlign
    int64_t weight_begin = 0;                // among the weights of its form: working type, or FP8
    int first_layer = 0, last_layer = 0;     // of its parameters, as ParamStore numbers them
    std::vector<int> params;                 // ascending offsets
};

// A run of one parameter's elements inside one rank's block.
struct Piece {
    int bucket, param;
    int64_t begin, elems;   // in the parameter
    int64_t shard;          // of its first element in the rank's masters and moments
    bool operator==(const Piece&) const = default;
};

class Buckets {
public:
    // Sets the offsets and flat_elems of `table`. A bucket is closed once it has bucket_bytes of fp32 gradients; one
    // rank needs no buckets that small, but gets them, too.
    Buckets(ParamTable& table, const Fp8Plan& plan, int ranks, int64_t bucket_bytes);

    // In the order of the flat buffers: by first layer, then by kind.
    const std::vector<Bucket>& all() const { return buckets_; }
    int ranks() const { return ranks_; }
    int64_t block_elems(const Bucket& bucket) const { return bucket.elems / ranks_; }
    int64_t shard_elems() const { return flat_elems_ / ranks_; }        // of one rank
    int64_t weight_elems() const { return flat_elems_ - fp8_elems_; }   // in the working type
    int64_t fp8_elems() const { return fp8_elems_; }                    // in FP8, one layout
    // In the order of the flat buffers; what lies in rank's blocks, or (--zero 0) whole parameters, where an element of
    // masters and moments has the place that it has in the flat buffers.
    std::vector<Piece> pieces(int rank) const;
    std::vector<Piece> whole_pieces() const;
    int bucket_of(int param) const { return bucket_of_[static_cast<size_t>(param)]; }
    const Bucket& of_param(int param) const { return buckets_[static_cast<size_t>(bucket_of(param))]; }
    // Of the first element of a parameter, among the weights of its form.
    int64_t weight_offset(int param) const;

private:
    // What is where, by parameter.
    struct Place {
        int64_t offset, elems;
    };
    const Place& place(int param) const { return places_[static_cast<size_t>(param)]; }

    int ranks_;
    int64_t flat_elems_ = 0, fp8_elems_ = 0;
    std::vector<Bucket> buckets_;
    std::vector<int> bucket_of_;
    std::vector<Place> places_;
};
