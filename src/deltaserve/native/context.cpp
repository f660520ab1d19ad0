#include "context.h"

#include <stdlib.h>

#include <algorithm>
#include <new>
#include <system_error>

namespace deltaserve {

ThreadPool::ThreadPool(int num_threads) {
    try {
        for (int i = 1; i < num_threads; i++) threads_.emplace_back([this, i] { serve(i); });
    } catch (const std::system_error&) {
        // The kernel gives no more threads: those there are do the work.
    }
    limit(size());
}

ThreadPool::~ThreadPool() {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        is_closing_ = true;
    }
    started_.notify_all();
    for (std::thread& thread : threads_) thread.join();
}

void ThreadPool::limit(int num_threads) { active_ = std::max(1, std::min(num_threads, size())); }

void ThreadPool::run(int64_t count, const std::function<void(int64_t, int)>& task) {
    const bool is_alone = active_ == 1 || count < 2;
    {
        std::lock_guard<std::mutex> lock(mutex_);
        task_ = &task;
        count_ = count;
        next_ = 0;
        if (!is_alone) {
            busy_ = helpers_ = active_ - 1;
            round_++;
        }
    }
    if (!is_alone) started_.notify_all();
    take_tasks(0);
    if (is_alone) return;
    std::unique_lock<std::mutex> lock(mutex_);
    finished_.wait(lock, [this] { return busy_ == 0; });
}

void ThreadPool::serve(int thread) {
    uint64_t seen = 0;
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
        // Who helped in the last round has seen it: a round that is over is never entered.
        started_.wait(lock, [&] { return is_closing_ || (thread <= helpers_ && round_ != seen); });
        if (is_closing_) return;
        seen = round_;
        lock.unlock();
        take_tasks(thread);
        lock.lock();
        if (--busy_ == 0) finished_.notify_one();
    }
}

void ThreadPool::take_tasks(int thread) {
    for (int64_t i = next_++; i < count_; i = next_++) (*task_)(i, thread);
}

float* FloatBuffer::take(int64_t count) {
    if (count > count_) {
        clear();
        void* data = nullptr;
        if (posix_memalign(&data, 64, (size_t)(count * 4))) throw std::bad_alloc();
        data_.reset((float*)data);
        count_ = count;
    }
    return data_.get();
}

void FloatBuffer::clear() {
    data_.reset();
    count_ = 0;
}

void FloatBuffer::Free::operator()(void* p) const { free(p); }

}  // namespace deltaserve

extern "C" {

DsContext* ds_context_new(int num_threads) {
    try {
        return new DsContext(num_threads);
    } catch (const std::bad_alloc&) {
        return nullptr;
    }
}

void ds_context_free(DsContext* context) { delete context; }

void ds_context_use_threads(DsContext* context, int num_threads) { context->pool.limit(num_threads); }

int64_t ds_context_bytes(const DsContext* context) {
    int64_t bytes = context->parts.bytes() + context->part_scales.bytes() + context->rows.bytes();
    for (const auto& buffer : context->of_threads) bytes += buffer.bytes();
    return bytes;
}

void ds_context_trim(DsContext* context) {
    context->parts.clear();
    context->part_scales.clear();
    context->rows.clear();
    for (auto& buffer : context->of_threads) buffer.clear();
}

}  // extern "C"
