// Threads that take numbered tasks, and memory that stays between steps.
#pragma once
#include <stdint.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "native.h"
#include "shared_cores.h"

namespace deltaserve {

// Of work in one unit: up to which one thread does all, as soon as others wake and end (measured); and of a task.
struct TaskSizes {
    int64_t alone, task;
};

// The caller is one of the threads. Those that have nothing to do sleep. `limit` says how many take tasks from the next run on.
// Of shared cores, the threads beyond its own are those that take tasks only on a core where nobody else computes.
class ThreadPool {
public:
    explicit ThreadPool(int num_threads);
    ~ThreadPool();
    int size() const { return (int)threads_.size() + 1; }
    void limit(int num_threads);
    void share(SharedCores* cores) { cores_ = cores; }
    // How many threads may compute now, with what was borrowed for them.
    int borrow();
    // task(number, thread) for each number below `count`, on whichever thread is free; returns when all are done.
    void run(int64_t count, const std::function<void(int64_t, int)>& task);
    // act(first, end, thread) for ranges that make up [0, count); `work`: of each number.
    template <class Act> void run_ranges(int64_t count, int64_t work, TaskSizes sizes, const Act& act) {
        if (active_ == 1 || count * work <= sizes.alone) return act(0, count, 0);
        const int64_t size = std::max<int64_t>(1, sizes.task / std::max<int64_t>(1, work));
        run((count + size - 1) / size,
            [&](int64_t i, int thread) { act(i * size, std::min(count, (i + 1) * size), thread); });
    }

private:
    void serve(int thread);
    void take_tasks(int thread);
    bool is_borrowed(int thread) const { return cores_ != nullptr && thread >= cores_->own(); }

    std::vector<std::thread> threads_;
    std::mutex mutex_;
    std::condition_variable started_, finished_;
    const std::function<void(int64_t, int)>* task_ = nullptr;
    std::atomic<int64_t> next_{0};
    int64_t count_ = 0;
    int active_ = 1;       // may take tasks
    std::atomic<uint64_t> round_{0};
    int helpers_ = 0;           // threads 1 to helpers_ take tasks of the round
    std::atomic<int> busy_{0};  // of these
    bool is_closing_ = false;
    SharedCores* cores_ = nullptr;  // null: all threads are its own
};

// Aligned floats with any content; grows when more is asked for.
class FloatBuffer {
public:
    float* take(int64_t count);  // throws std::bad_alloc
    int64_t bytes() const { return count_ * 4; }
    void clear();

private:
    struct Free {
        void operator()(void* p) const;
    };
    std::unique_ptr<float, Free> data_;
    int64_t count_ = 0;
};

}  // namespace deltaserve

struct DsContext {
    explicit DsContext(int num_threads) : pool(num_threads), of_threads(pool.size()) {}
    std::unique_ptr<deltaserve::SharedCores> cores;
    deltaserve::ThreadPool pool;
    std::vector<deltaserve::FloatBuffer> of_threads;
    deltaserve::FloatBuffer parts, part_scales, rows;
};
