// What generated kernels are made of.
//
// Every function here has its definition in Python: interp.py (reductions, casts, packing) and
// philox.py. Loops over the 64 elements of a group have no branch, so that the compiler makes
// vectors of whatever width the machine has. Neither <cmath> nor <immintrin.h> is included: reading
// them takes longer than compiling a kernel.
#pragma once

#include "blocks.h"
#include "kept.h"
#include "packing.h"
#include "philox.h"
#include "scalars.h"
