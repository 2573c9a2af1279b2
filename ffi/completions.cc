#include "ffi/completions.h"

#include <thread>
#include <utility>

namespace gear_jax {

Completions& Completions::Global() {
  static Completions* completions = new Completions;
  return *completions;
}

void Completions::Run(std::function<void()> end) {
  const std::lock_guard<std::mutex> lock(mutex_);
  waiting_.push_back(std::move(end));
  if (static_cast<int64_t>(waiting_.size()) > idle_) {
    ++threads_;
    std::thread([this] { Loop(); }).detach();
  } else {
    some_.notify_one();
  }
}

int64_t Completions::threads() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return threads_;
}

void Completions::Loop() {
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    ++idle_;
    some_.wait(lock, [this] { return !waiting_.empty(); });
    --idle_;
    std::function<void()> end = std::move(waiting_.front());
    waiting_.pop_front();
    lock.unlock();
    end();
    end = nullptr;
    lock.lock();
  }
}

}  // namespace gear_jax
