// The table of instruction sets, and which of them this machine can run.
#include "kernels.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace deltaserve {

namespace {

bool always() { return true; }

#if defined(__x86_64__)

bool has_avx2() {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}

bool has_avx512() {
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

bool has_vnni() { return has_avx512() && __builtin_cpu_supports("avx512vnni"); }

bool has_bf16() { return has_vnni() && __builtin_cpu_supports("avx512bf16"); }

#if defined(DELTASERVE_EMULATED_TILES)

bool has_tiles() { return has_bf16(); }

#else

// Tiles are 8 KiB of a thread's state, for which a process asks the kernel; threads that it has or makes may use them then.
bool may_use_tiles() {
    constexpr int kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

bool has_tiles() {
    constexpr unsigned kBf16 = 1u << 22, kTile = 1u << 24;
    unsigned a, b, c, d;
    if (!has_bf16() || !__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & kBf16) == 0 || (d & kTile) == 0) return false;
    static const bool may = may_use_tiles();
    return may;
}

#endif

// From the most general; where a set brings nothing for an idea, its row names the kernels of a former one.
constexpr Kernels kTable[] = {
    {"generic", always, &attention_generic, &step_ops_generic, &product_generic, &blocks_generic,
     &delta_rule_generic},
    {"avx2", has_avx2, &attention_avx2, &step_ops_avx2, &product_avx2, &blocks_avx2, &delta_rule_avx2},
    {"avx512", has_avx512, &attention_avx512, &step_ops_avx512, &product_avx512, &blocks_avx512,
     &delta_rule_avx512},
    {"avx512_vnni", has_vnni, &attention_avx512, &step_ops_avx512, &product_avx512, &blocks_avx512_vnni,
     &delta_rule_avx512},
    {"avx512_bf16", has_bf16, &attention_avx512_bf16, &step_ops_avx512_bf16, &product_avx512_bf16, &blocks_avx512_vnni,
     &delta_rule_avx512},
    {"amx_bf16", has_tiles, &attention_amx_bf16, &step_ops_avx512_bf16, &product_amx_bf16, &blocks_avx512_vnni,
     &delta_rule_avx512},
};

#else

constexpr Kernels kTable[] = {
    {"generic", always, &attention_generic, &step_ops_generic, &product_generic, &blocks_generic,
     &delta_rule_generic},
};

#endif

constexpr int kCount = sizeof(kTable) / sizeof(kTable[0]);

}  // namespace

const Kernels* kernels_of(int isa) {
#if defined(__x86_64__)
    __builtin_cpu_init();
#endif
    return isa >= 0 && isa < kCount && kTable[isa].runs_here() ? &kTable[isa] : nullptr;
}

}  // namespace deltaserve

extern "C" {

const char* ds_sources() { return DELTASERVE_SOURCES; }

const char* ds_isa_name(int isa) {
    const deltaserve::Kernels* kernels = deltaserve::kernels_of(isa);
    return kernels == nullptr ? nullptr : kernels->name;
}

int ds_num_isas() { return deltaserve::kCount; }

}  // extern "C"
