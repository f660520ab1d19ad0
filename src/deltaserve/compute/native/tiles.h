// Tile registers (Intel AMX): eight of 16 rows of 64 bytes. For kernel files that are compiled with DELTASERVE_TILES; all
// is internal to them.
//
// With DELTASERVE_EMULATED_TILES they are memory, and the product is what Intel's manual says of TDPBF16PS: so kernels can
// be tested, under sanitizers too, by machines without tiles.
#pragma once
#include <stdint.h>
#include <string.h>

#include "vectors.h"

namespace {

constexpr int kTile = 16;                // rows of a register, and columns of 4 bytes: a number, or a pair of factors
constexpr int kTileBytes = 4 * kTile;    // of a row
constexpr int kTilePair = 2 * kTile;     // factors of a row

// act(Count<0>), act(Count<1>) and so on: registers are named by constants.
template <int kCount, class Act> DS_INLINE void for_each(Act act) {
    if constexpr (kCount > 0) {
        for_each<kCount - 1>(act);
        act(Count<kCount - 1>{});
    }
}

// What LDTILECFG reads.
struct alignas(64) TileShapes {
    uint8_t palette = 1, start_row = 0;
    uint8_t unused[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
};

#if defined(DELTASERVE_EMULATED_TILES)

struct TileRegister {
    int rows = 0;
    alignas(64) uint8_t bytes[kTile][kTileBytes] = {};
};

thread_local TileRegister emulated[8];

inline void shape_tiles(const TileShapes& shapes) {
    for (int i = 0; i < 8; i++) {
        emulated[i] = {};
        emulated[i].rows = shapes.rows[i];
    }
}

inline void free_tiles() { shape_tiles({}); }

template <int kRegister> inline void clear_tile() { memset(emulated[kRegister].bytes, 0, sizeof emulated[kRegister].bytes); }

template <int kRegister> inline void load_tile(const void* from, int64_t stride) {
    TileRegister& tile = emulated[kRegister];
    for (int row = 0; row < tile.rows; row++) memcpy(tile.bytes[row], (const uint8_t*)from + row * stride, kTileBytes);
}

template <int kRegister> inline void store_tile(void* to, int64_t stride) {
    const TileRegister& tile = emulated[kRegister];
    for (int row = 0; row < tile.rows; row++) memcpy((uint8_t*)to + row * stride, tile.bytes[row], kTileBytes);
}

inline float emulated_factor(const uint8_t* at) {
    uint16_t half;
    memcpy(&half, at, 2);
    const uint32_t bits = (uint32_t)half << 16;
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

template <int kSums, int kOfRows, int kOfColumns> inline void multiply_tiles() {
    TileRegister &sums = emulated[kSums], &a = emulated[kOfRows], &b = emulated[kOfColumns];
    for (int m = 0; m < sums.rows; m++)
        for (int n = 0; n < kTile; n++) {
            float even = 0, odd = 0, sum;
            for (int k = 0; k < b.rows; k++) {
                const uint8_t *of_row = a.bytes[m] + 4 * k, *of_column = b.bytes[k] + 4 * n;
                even = __builtin_fmaf(emulated_factor(of_row), emulated_factor(of_column), even);
                odd = __builtin_fmaf(emulated_factor(of_row + 2), emulated_factor(of_column + 2), odd);
            }
            memcpy(&sum, sums.bytes[m] + 4 * n, 4);
            sum += even + odd;
            memcpy(sums.bytes[m] + 4 * n, &sum, 4);
        }
}

#else

// "memory": what was written before is read from memory, and nothing written is moved behind.

DS_INLINE void shape_tiles(const TileShapes& shapes) { __asm__ volatile("ldtilecfg %0" ::"m"(shapes) : "memory"); }

DS_INLINE void free_tiles() { __asm__ volatile("tilerelease" ::: "memory"); }

template <int kRegister> DS_INLINE void clear_tile() { __asm__ volatile("tilezero %%tmm%c0" ::"i"(kRegister)); }

template <int kRegister> DS_INLINE void load_tile(const void* from, int64_t stride) {
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(kRegister) : "memory");
}

template <int kRegister> DS_INLINE void store_tile(void* to, int64_t stride) {
    __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(kRegister) : "memory");
}

template <int kSums, int kOfRows, int kOfColumns> DS_INLINE void multiply_tiles() {
    __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSums), "i"(kOfRows), "i"(kOfColumns));
}

#endif

// Tiles of a thread while it computes: registers of sums and of factors of rows have so many rows, others 16.
class Tiles {
public:
    DS_INLINE explicit Tiles(int num_rows = kTile) {
        TileShapes shapes;
        for (int i = 0; i < 8; i++) {
            shapes.row_bytes[i] = kTileBytes;
            shapes.rows[i] = (uint8_t)(i < kFirstColumns ? num_rows : kTile);
        }
        shape_tiles(shapes);
    }
    DS_INLINE ~Tiles() { free_tiles(); }
    Tiles(const Tiles&) = delete;
    Tiles& operator=(const Tiles&) = delete;

    // Registers 0 to 3 are sums, then two of factors of rows, then two of factors of columns.
    static constexpr int kFirstRows = 4, kFirstColumns = 6;
};

// Where 16 rows of 64 bytes lie.
struct TileAt {
    const void* first;
    int64_t stride;  // bytes
};

// Sums of kM tiles of rows times kN tiles of columns, four tiles at most.
template <int kM, int kN> struct TileSums {
    static_assert(kM * kN <= 4, "four registers hold sums");

    static DS_INLINE void clear() {
        for_each<kM * kN>([](auto i) { clear_tile<decltype(i)::value>(); });
    }

    // Tiles of a row lie side by side, rows of tiles 16 rows below each other.
    static DS_INLINE void load(const float* from, int64_t stride) {
        for_each<kM * kN>([&](auto i) {
            constexpr int kI = decltype(i)::value;
            load_tile<kI>(from + kI / kN * kTile * stride + kI % kN * kTile, 4 * stride);
        });
    }

    static DS_INLINE void store(float* to, int64_t stride) {
        for_each<kM * kN>([&](auto i) {
            constexpr int kI = decltype(i)::value;
            store_tile<kI>(to + kI / kN * kTile * stride + kI % kN * kTile, 4 * stride);
        });
    }

    // `rows`, `columns`: of each tile the factors; a tile of columns is [pair of factors][column].
    static DS_INLINE void add(const TileAt* rows, const TileAt* columns) {
        constexpr int kFirstRows = Tiles::kFirstRows, kFirstColumns = Tiles::kFirstColumns;
        for_each<kN>([&](auto n) {
            constexpr int kColumns = kFirstColumns + decltype(n)::value % 2;
            load_tile<kColumns>(columns[n.value].first, columns[n.value].stride);
            for_each<kM>([&](auto m) {
                constexpr int kRows = kFirstRows + decltype(m)::value % 2;
                if (n.value == 0 || kM > 2) load_tile<kRows>(rows[m.value].first, rows[m.value].stride);
                multiply_tiles<decltype(m)::value * kN + decltype(n)::value, kRows, kColumns>();
            });
        });
    }
};

}  // namespace
