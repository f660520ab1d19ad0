// Floats from stdin, as halves to stdout, by the path for machines without instructions for it.
#include <stdio.h>

#include "vectors.h"

int main() {
    Vec v;
    uint8_t halves[2 * kLanes];
    while (fread(&v, sizeof v, 1, stdin) == 1) {
        Float16::store(halves, v);
        fwrite(halves, sizeof halves, 1, stdout);
    }
}
