// A ParamStore that records the requests of the decoder and forwards them to the model's own store.
#pragma once
#include <functional>
#include <set>
#include <utility>
#include <vector>

#include "tests/support/model_test.h"

class WatchedStore : public ParamStore {
public:
    using Calls = std::vector<std::pair<int, Pass>>;

    explicit WatchedStore(TestModel& model) : table_(model.table), decoder_(model.trainer->decoder()),
                                              inner_(decoder_.store()) {
        decoder_.set_store(*this);
    }
    ~WatchedStore() override { decoder_.set_store(inner_); }

    void before_layer(Ctx& ctx, int layer, Pass pass) override {
        before.push_back({layer, pass});
        open_.insert(layer);
        inner_.before_layer(ctx, layer, pass);
    }
    void after_layer(Ctx& ctx, int layer, Pass pass) override {
        after.push_back({layer, pass});
        open_.erase(layer);
        if (pass == Pass::kBackward && gradients_ready) gradients_ready(layer);
        inner_.after_layer(ctx, layer, pass);
    }
    Tensor weight(int param) const override { return look(param), inner_.weight(param); }
    Tensor grad(int param) const override { return look(param), inner_.grad(param); }
    bool accumulates(int param) const override { return inner_.accumulates(param); }

    Calls before, after;
    mutable int closed_reads = 0;                      // requests for a layer outside before_layer and after_layer
    std::function<void(int layer)> gradients_ready;   // after a layer's backward pass, before reduction

private:
    void look(int param) const {
        const bool tied_head = param == table_.head && open_.count(static_cast<int>(table_.layers.size()));
        closed_reads += !tied_head && !open_.count(table_.layer_of(param));
    }

    const ParamTable& table_;
    Decoder& decoder_;
    ParamStore& inner_;
    std::set<int> open_;
};
