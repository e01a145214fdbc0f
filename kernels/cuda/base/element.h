// The element type that a module is compiled for, and how many elements a 16-byte access takes.
#pragma once

#include "numeric.h"

#ifndef ELEMENT
#error "define ELEMENT as bf16 or float"
#endif

constexpr int VECTOR = Element<ELEMENT>::per_vec16;
