// The median of measurements. Includes nothing of llmc.
#pragma once
#include <algorithm>
#include <vector>

// Returns the mean of the two middle values if their number is even; 0 without values.
inline double median_of(std::vector<double> values) {
    std::sort(values.begin(), values.end());
    const size_t n = values.size();
    return n == 0 ? 0 : (values[(n - 1) / 2] + values[n / 2]) / 2;
}
