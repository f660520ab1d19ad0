// The C ABI: raw pointers, int64 strides, no exceptions. Every function here may be called without Python's lock.
#pragma once
#include <stdint.h>

#define DS_API __attribute__((visibility("default")))

extern "C" {

// Digest of the sources this library was made of.
DS_API const char* ds_sources();

// Instruction sets are numbered from the most general; higher is faster. Null for one that this machine cannot run.
DS_API int ds_num_isas();
DS_API const char* ds_isa_name(int isa);

}  // extern "C"
