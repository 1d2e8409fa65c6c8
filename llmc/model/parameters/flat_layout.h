// Where every parameter lies in the flat buffers, and in what form its weight is stored. Parameters of the same form in
// neighbouring layers are stored together in a group, which ranks communicate as one message. The gaps between
// parameters and at the end of a group stay 0.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "llmc/model/parameters/fp8_recipe.h"
#include "llmc/model/parameters/params.h"

// Elements. In FP8 these are 256 bytes, the alignment at which cuBLASLt is fastest.
inline constexpr int64_t kParamAlign = 256;

// Parameters that are stored or exchanged in different ways are never in one group.
enum class ParamForm : uint8_t {
    kFp8Linear,   // weight of a linear that is used in FP8 only
    kLinear,      // weight of a linear in the working type
    kOther,       // embeddings, norms, biases: their gradients are never quantized
};
inline constexpr int kParamForms = 3;

struct ParamGroup {
    ParamForm form = ParamForm::kOther;
    int64_t begin = 0, elems = 0;           // in the flat buffers; elems is a multiple of the layout's unit
    int64_t weight_begin = 0;               // in the flat weights of its form: working type, or FP8
    int first_layer = 0, last_layer = 0;    // numbered as in ParamStore
    int64_t parts = 1;                      // Param::parts of all of them
    std::vector<int> params;                // by ascending offset
};

// "layers.3" and "layers.3 to layers.5", for messages.
std::string layer_text(int layer, int64_t num_layers);
std::string layers_text(const ParamGroup& group, int64_t num_layers);

class FlatLayout {
public:
    // A group ends once it has group_bytes of fp32 gradients, and is padded to a multiple of `unit` elements. `unit` is
    // a multiple of kParamAlign. by_layer: the weights of linears of two layers are never in one group, and embeddings
    // never share a group with norms and biases of other layers, so that the weights of a layer can be gathered alone.
    FlatLayout(const ParamTable& table, const Fp8Plan& plan, int64_t group_bytes, int64_t unit = kParamAlign,
               bool by_layer = false);

    // In the order of the flat buffers: by first layer, then by form.
    const std::vector<ParamGroup>& groups() const { return groups_; }
    int64_t flat_elems() const { return flat_elems_; }                  // of a flat buffer, gaps included
    int64_t weight_elems() const { return flat_elems_ - fp8_elems_; }   // in the working type
    int64_t fp8_elems() const { return fp8_elems_; }                    // in FP8

    int group_number(int param) const { return place(param).group; }
    const ParamGroup& group_of(int param) const { return groups_[static_cast<size_t>(group_number(param))]; }
    ParamForm form(int param) const { return group_of(param).form; }
    // The offset of the parameter's first element in the flat buffers, a multiple of kParamAlign.
    int64_t offset(int param) const { return place(param).offset; }
    int64_t elems(int param) const { return place(param).elems; }   // without the gap behind the parameter
    // The parameter's elements of a flat buffer.
    Tensor view(const Tensor& flat, int param) const { return flat.slice(offset(param), elems(param)); }

private:
    struct Place {
        int64_t offset, elems;
        int group;
    };
    const Place& place(int param) const { return places_[static_cast<size_t>(param)]; }

    std::vector<ParamGroup> groups_;
    std::vector<Place> places_;   // by parameter
    int64_t flat_elems_ = 0, fp8_elems_ = 0;
};
