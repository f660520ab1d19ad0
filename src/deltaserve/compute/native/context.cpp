#include "context.h"

#include <pthread.h>
#include <stdlib.h>

#include <algorithm>
#include <chrono>
#include <new>
#include <system_error>

namespace deltaserve {

namespace {

constexpr auto kSoon = std::chrono::microseconds(50);

// Whether it comes within the time that sleeping and being woken would take; whoever wants the core meanwhile gets it.
template <class Condition> bool comes_soon(Condition condition) {
    const auto until = std::chrono::steady_clock::now() + kSoon;
    while (!condition()) {
        if (std::chrono::steady_clock::now() >= until) return false;
        std::this_thread::yield();
    }
    return true;
}

// As the variable's own wait, which GCC 12 and newer take from a libstdc++ of their own age: a wheel is for older ones, too.
template <class Condition>
void wait_for(std::condition_variable& variable, std::unique_lock<std::mutex>& lock, Condition condition) {
    while (!condition()) pthread_cond_wait(variable.native_handle(), lock.mutex()->native_handle());
}

}  // namespace

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

int ThreadPool::borrow() {
    if (cores_ == nullptr || active_ <= cores_->own()) return active_;
    return cores_->own() + cores_->borrow(active_ - cores_->own());
}

void ThreadPool::run(int64_t count, const std::function<void(int64_t, int)>& task) {
    const int num_threads = active_ == 1 || count < 2 ? 1 : borrow();
    const bool is_alone = num_threads == 1;
    {
        std::lock_guard<std::mutex> lock(mutex_);
        task_ = &task;
        count_ = count;
        next_ = 0;
        if (!is_alone) {
            busy_ = helpers_ = num_threads - 1;
            round_++;
        }
    }
    if (!is_alone) started_.notify_all();
    take_tasks(0);
    if (is_alone || comes_soon([this] { return busy_ == 0; })) return;
    std::unique_lock<std::mutex> lock(mutex_);
    wait_for(finished_, lock, [this] { return busy_ == 0; });
}

void ThreadPool::serve(int thread) {
    uint64_t seen = 0;
    for (;;) {
        comes_soon([&] { return round_ != seen; });
        std::unique_lock<std::mutex> lock(mutex_);
        // Who helped in the last round has seen it: a round that is over is never entered.
        wait_for(started_, lock, [&] { return is_closing_ || (thread <= helpers_ && round_ != seen); });
        if (is_closing_) return;
        seen = round_;
        lock.unlock();
        take_tasks(thread);
        if (is_borrowed(thread)) cores_->give_back(1);
        lock.lock();
        if (--busy_ == 0) finished_.notify_one();
    }
}

void ThreadPool::take_tasks(int thread) {
    const bool yields = is_borrowed(thread);
    while (!yields || !cores_->is_crowded()) {
        const int64_t i = next_++;
        if (i >= count_) break;
        (*task_)(i, thread);
    }
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

using namespace deltaserve;

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

bool ds_context_share_cores(DsContext* context, void* places, int place, int num_places, int num_cores, int own) {
    if (place < 0 || place >= num_places || own < 1 || (uintptr_t)places % alignof(CorePlace)) return false;
    try {
        context->cores = std::make_unique<SharedCores>((CorePlace*)places, place, num_places, num_cores, own);
    } catch (const std::bad_alloc&) {
        return false;
    }
    context->pool.share(context->cores.get());
    return true;
}

void ds_context_begin(DsContext* context) {
    if (context->cores) context->cores->begin();
}

void ds_context_end(DsContext* context, int64_t for_ns) {
    if (context->cores) context->cores->end(for_ns);
}

int ds_context_borrow(DsContext* context) { return context->pool.borrow(); }

void ds_context_give_back(DsContext* context, int num_threads) {
    if (context->cores) context->cores->give_back(std::max(0, num_threads - context->cores->own()));
}

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
