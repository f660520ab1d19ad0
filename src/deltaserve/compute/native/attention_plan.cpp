#include "attention_plan.h"

#include <algorithm>
#include <new>

namespace deltaserve {

namespace {

constexpr int64_t kRowBytes = 384 << 10;  // of a task: with a block of keys they fit a core's L2 cache
constexpr int kMinRows = 16, kMaxRows = 256;  // the first divides every number of rows: those of a tile register
constexpr int kShortLen = 16;  // of queries whose keys may be cut into several tasks
constexpr int kTasksPerThread = 4;  // so that threads end at about the same time
constexpr int kRowTasksPerThread = 2;  // as far as that goes with tasks of kLeastCutRows, which all lay the same keys out
constexpr int kLeastCutRows = 32;

struct Span {  // splits [first, end) of a query
    int64_t first, end;
};

// Makes a plan; see the header.
class Planner {
public:
    Planner(DsPlan& plan, int num_threads) : plan_(plan), work_(plan.work), threads_(num_threads) {}

    void run() {
        int32_t token = 0;
        for (int i = 0; i < work_.num_queries; i++) {
            const int32_t* query = work_.queries + 3 * i;
            queries_.push_back({query[0], query[1], query[1] + query[2], token, {}, {}, false, 0, 0});
            token += query[2];
            see(queries_.back());
        }
        share();
        number_parts();
        for (const Run& run : runs_) add_shared(run);
        for (const Query& query : queries_) add_private(query);
        cut_tasks();
    }

private:
    struct Query {
        int64_t line, start, end;
        int32_t token;
        Span splits;              // that hold a key some position sees
        std::vector<char> taken;  // by a run; empty: none
        bool keeps_parts;
        int64_t first_part;  // of its first token
        int64_t pages;

        int64_t num_splits() const { return splits.end - splits.first; }
        int64_t len() const { return end - start; }
    };

    struct Run {
        Span splits;
        std::vector<int> members;
    };

    bool is_long(const Query& query) const { return query.len() >= work_.long_len; }

    int64_t first_key(int64_t position) const { return std::max<int64_t>(0, position + 1 - work_.window_len); }

    void see(Query& query) {
        const int64_t split = work_.split_tokens;
        query.splits = {first_key(query.start) / split, (query.end - 1) / split + 1};
        query.pages = (int64_t)plan_.pages.size();
        const int32_t* line = work_.table + query.line * work_.table_stride;
        plan_.pages.insert(plan_.pages.end(), line, line + (query.end - 1) / work_.page_size + 1);
    }

    bool sees_whole(const Query& query, int64_t split) const {
        const int64_t start = split * work_.split_tokens;
        return start + work_.split_tokens <= query.start + 1 && start >= first_key(query.end - 1);
    }

    // Splits of the runs that two queries or more see whole. Of a split in several runs the first counts.
    void share() {
        const int32_t* members = work_.members;
        for (int i = 0; i < work_.num_runs; members += work_.runs[3 * i + 2], i++) {
            const int32_t* run = work_.runs + 3 * i;
            const size_t first_of_run = runs_.size();
            for (int64_t split = run[0] / work_.split_tokens; split < run[1] / work_.split_tokens; split++) {
                std::vector<int> readers;
                for (int m = 0; m < run[2]; m++)
                    if (may_take(queries_[members[m]], split)) readers.push_back(members[m]);
                if (readers.size() < 2) continue;
                for (int reader : readers) take(queries_[reader], split);
                if (runs_.size() > first_of_run && runs_.back().splits.end == split && runs_.back().members == readers)
                    runs_.back().splits.end++;
                else
                    runs_.push_back({{split, split + 1}, std::move(readers)});
            }
        }
    }

    bool may_take(const Query& query, int64_t split) const {
        return !is_long(query) && sees_whole(query, split) && (query.taken.empty() || !query.taken[split - query.splits.first]);
    }

    void take(Query& query, int64_t split) {
        query.taken.resize(query.num_splits());
        query.taken[split - query.splits.first] = true;
        query.keeps_parts = true;
    }

    // A short query that would be a large share of the work alone is cut as well.
    void number_parts() {
        int64_t cost = 0;
        for (const Query& query : queries_) cost += query.len() * (query.end - query.splits.first * work_.split_tokens);
        // A task is of one KV head.
        target_ = cost * work_.num_kv_heads / (kTasksPerThread * threads_) / work_.split_tokens + 1;
        for (Query& query : queries_) {
            if (threads_ > 1 && query.len() <= kShortLen && query.len() * query.num_splits() > target_)
                query.keeps_parts = true;
            if (!query.keeps_parts) continue;
            query.first_part = plan_.num_parts;
            for (int64_t t = 0; t < query.len(); t++) {
                plan_.merges.push_back({plan_.num_parts, query.num_splits(), (int32_t)(query.token + t)});
                plan_.num_parts += query.num_splits();
            }
        }
    }

    void add_rows(const Query& query, int64_t split) {
        for (int64_t position = query.start; position < query.end; position++) {
            const int64_t t = position - query.start;
            const int64_t part = query.first_part + t * query.num_splits() + split - query.splits.first;
            plan_.rows.push_back({first_key(position), position + 1, part, (int32_t)(query.token + t)});
        }
    }

    void add_segment(const Query& first, Span splits, bool keeps_parts, size_t rows) {
        const int64_t split = work_.split_tokens;
        plan_.segments.push_back({splits.first * split, std::min(splits.end * split, first.end), first.pages,
                                  (int32_t)rows, (int32_t)plan_.rows.size(), keeps_parts, is_long(first)});
    }

    void add_shared(const Run& run) {
        const size_t rows = plan_.rows.size();
        for (int member : run.members) add_rows(queries_[member], run.splits.first);
        add_segment(queries_[run.members[0]], run.splits, true, rows);
    }

    void add_private(const Query& query) {
        const int64_t most = query.keeps_parts && threads_ > 1 ? std::max<int64_t>(1, target_ / query.len())
                                                               : query.num_splits();
        for (int64_t split = query.splits.first; split < query.splits.end;) {
            if (is_taken(query, split)) {
                split++;
                continue;
            }
            const int64_t first = split;
            while (split < query.splits.end && split - first < most && !is_taken(query, split)) split++;
            const size_t rows = plan_.rows.size();
            add_rows(query, first);
            add_segment(query, {first, split}, query.keeps_parts, rows);
        }
    }

    static bool is_taken(const Query& query, int64_t split) {
        return !query.taken.empty() && query.taken[split - query.splits.first];
    }

    void cut_tasks() {
        const int64_t row_bytes = 4 * (padded(work_.head_dim) + 2 * padded(work_.value_dim));
        const int64_t most_rows = std::clamp<int64_t>(kRowBytes / row_bytes / kMinRows * kMinRows, kMinRows, kMaxRows);
        plan_.max_rows = (int)most_rows + kMinRows;  // a part has fewer more, and tile registers take whole tiles
        int64_t work = 0;
        for (const Segment& segment : plan_.segments) work += num_scores(segment);
        const int64_t share = work * work_.num_kv_heads / (kRowTasksPerThread * threads_) + 1;
        for (size_t i = 0; i < plan_.segments.size(); i++) {
            const int64_t wanted = threads_ > 1 ? (num_scores(plan_.segments[i]) + share - 1) / share : 1;
            for (int head = 0; head < work_.num_kv_heads; head++) cut_rows((int32_t)i, head, most_rows, wanted);
        }
        const auto cost = [](const Task& task) { return (task.end - task.start) * (task.num_rows + 2); };
        for (const Task& task : plan_.tasks) plan_.num_products += cost(task) * (work_.head_dim + work_.value_dim);
        std::stable_sort(plan_.tasks.begin(), plan_.tasks.end(),
                         [&](const Task& a, const Task& b) { return cost(a) > cost(b); });
    }

    // Parts begin at multiples of kMinRows and have as many rows at least, unless all together are fewer: whether rows are
    // few, upon which their arithmetic depends, does not depend on the number of threads.
    void cut_rows(int32_t index, int head, int64_t most_rows, int64_t wanted) {
        const int32_t num_rows = num_rows_of(plan_.segments[index]);
        const int64_t units = std::max(1, num_rows / kMinRows);
        const int64_t least_parts = (units * kMinRows + most_rows - 1) / most_rows;
        const int64_t parts = std::max(least_parts, std::min<int64_t>(wanted, num_rows / kLeastCutRows));
        for (int64_t part = 0; part < parts; part++) {
            const int32_t first = (int32_t)(part * units / parts) * kMinRows;
            const int32_t end = part + 1 < parts ? (int32_t)((part + 1) * units / parts) * kMinRows : num_rows;
            plan_.tasks.push_back(make_task(index, head, first, end - first));
        }
    }

    int32_t num_rows_of(const Segment& segment) const { return (segment.end_rows - segment.rows) * work_.group_size; }

    int64_t num_scores(const Segment& segment) const { return num_rows_of(segment) * (segment.end - segment.start); }

    Task make_task(int32_t index, int head, int32_t first, int32_t num_rows) const {
        const Segment& segment = plan_.segments[index];
        int64_t start = segment.end, end = segment.start;
        for (int32_t row = first; row < first + num_rows; row++) {
            const TokenRows& rows = plan_.rows[segment.rows + row / work_.group_size];
            start = std::min(start, std::max(segment.start, rows.first_key));
            end = std::max(end, std::min(segment.end, rows.end_key));
        }
        return {start, end, index, head, first, num_rows};
    }

    DsPlan& plan_;
    const DsWork& work_;
    int threads_;
    int64_t target_ = 0;  // splits times positions of a task
    std::vector<Query> queries_;
    std::vector<Run> runs_;
};

}  // namespace
}  // namespace deltaserve

extern "C" {

DsPlan* ds_plan_new(const DsWork* work, int num_threads) {
    DsPlan* plan = nullptr;
    try {
        plan = new DsPlan;
        plan->work = *work;
        deltaserve::Planner(*plan, num_threads).run();
        return plan;
    } catch (const std::bad_alloc&) {
        delete plan;
        return nullptr;
    }
}

void ds_plan_free(DsPlan* plan) { delete plan; }

}  // extern "C"
