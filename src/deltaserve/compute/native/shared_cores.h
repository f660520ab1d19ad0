// Cores that the processes of one server divide: on a page that all of them have mapped, each says how many it computes
// on. What one of them does not need, another may borrow for as long as one task takes.
#pragma once
#include <stdint.h>

#include <atomic>

namespace deltaserve {

// Of one process. A process that was killed while it computed keeps its cores until its place is taken anew: that costs
// the others speed, nothing else.
struct alignas(64) CorePlace {
    std::atomic<int64_t> until_ns;  // of CLOCK_MONOTONIC: until then its own threads compute, or are about to
    std::atomic<int32_t> own;       // threads that compute whether cores are free or not
    std::atomic<int32_t> borrowed;
};

class SharedCores {
public:
    // Takes a place, whoever had it before. `places` stay mapped as long as this is used.
    SharedCores(CorePlace* places, int place, int num_places, int num_cores, int own);
    ~SharedCores();
    int own() const { return own_; }
    // Own threads compute from now on, until `for_ns` after `end`: others should not start for the time between steps.
    void begin();
    void end(int64_t for_ns);
    // At most `most` cores on which nobody computes, for whoever gives them back.
    int borrow(int most);
    void give_back(int count);
    // More threads compute than there are cores: who borrowed one should give it back.
    bool is_crowded() const { return num_computing() > num_cores_; }

private:
    int num_computing() const;

    CorePlace* places_;
    int num_places_;
    CorePlace& own_place_;
    int num_cores_;
    int own_;
};

}  // namespace deltaserve
