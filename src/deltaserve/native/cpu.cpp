// Which instruction sets this machine can run.
#include "native.h"

namespace {

constexpr const char* kNames[] = {"generic", "avx2", "avx512", "avx512_bf16"};
constexpr int kCount = sizeof(kNames) / sizeof(kNames[0]);

#if defined(__x86_64__)
bool can_run(int isa) {
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    return isa == 0 || (isa == 1 && avx2) || (isa >= 2 && avx2 && avx512 && (isa == 2 || __builtin_cpu_supports("avx512bf16")));
}
#else
bool can_run(int isa) { return isa == 0; }
#endif

}  // namespace

extern "C" {

const char* ds_sources() { return DELTASERVE_SOURCES; }

const char* ds_isa_name(int isa) { return isa >= 0 && isa < kCount && can_run(isa) ? kNames[isa] : nullptr; }

int ds_num_isas() { return kCount; }

}  // extern "C"
