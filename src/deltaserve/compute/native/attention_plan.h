// The work list of a step, cut into tasks.
#pragma once
#include <vector>

#include "attention_kernel.h"

struct DsPlan {
    DsWork work;  // its pointers are of use while the plan is made only
    int max_rows = 0;
    int64_t num_parts = 0;
    int64_t num_products = 0;  // of all tasks: what they cost
    std::vector<int32_t> pages;
    std::vector<deltaserve::TokenRows> rows;
    std::vector<deltaserve::Segment> segments;
    std::vector<deltaserve::Task> tasks;  // the longest first
    std::vector<deltaserve::Merge> merges;

    deltaserve::PlanView view() const { return {&work, pages.data(), rows.data(), segments.data(), max_rows}; }
};
