#include "shared_cores.h"

#include <time.h>

#include <algorithm>

namespace deltaserve {

namespace {

constexpr int64_t kForever = INT64_MAX;

int64_t now_ns() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

}  // namespace

SharedCores::SharedCores(CorePlace* places, int place, int num_places, int num_cores, int own)
    : places_(places), num_places_(num_places), own_place_(places[place]), num_cores_(num_cores), own_(own) {
    own_place_.until_ns = 0;
    own_place_.borrowed = 0;
    own_place_.own = own;
}

SharedCores::~SharedCores() { own_place_.until_ns = 0; }

void SharedCores::begin() { own_place_.until_ns = kForever; }

void SharedCores::end(int64_t for_ns) { own_place_.until_ns = now_ns() + for_ns; }

int SharedCores::borrow(int most) {
    const int count = std::min(most, num_cores_ - num_computing());
    if (count <= 0) return 0;
    own_place_.borrowed += count;
    return count;
}

void SharedCores::give_back(int count) { own_place_.borrowed -= count; }

int SharedCores::num_computing() const {
    const int64_t now = now_ns();
    int count = 0;
    for (int i = 0; i < num_places_; i++) {
        const CorePlace& place = places_[i];
        if (place.until_ns > now) count += place.own;
        count += place.borrowed;
    }
    return count;
}

}  // namespace deltaserve
